// Package encap is the live change of encapsulation: in which encapsulation this
// host sends a pool's packets to each node, which ones it accepts, and what it
// publishes of both, so that a pool can change its encapsulation under traffic.
//
// A [Planner] joins parts that own their state: ends (this host and the others as
// drivers see them), publishing (what this host says that it sends), receiver (what
// it accepts, and the devices for it), sender (the forwarding path to each node) and
// probeTargets (what is to be measured). It decides by what package topology knows,
// does no I/O, and is not safe for concurrent use. It knows nothing of routes: which
// nodes it has another path to it returns, once a turn.
package encap
