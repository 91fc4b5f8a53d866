// Package vrouter is the core: it decides what should be in the kernel.
//
// Three things come in: what the store knows (nodes, pools, blocks), what BGP
// learned, and what the underlay looks like. For every prefix the best
// candidate is chosen, store before BGP; the pool of the prefix names the
// driver that carries it; the driver says which objects that takes. The
// objects go to a [dataplane.Sink].
//
// All decisions are made in the type table, which does no I/O and is not safe
// for concurrent use. [Core] owns one table and feeds it from one goroutine.
// The cost of an event follows what it changes, not the size of the table.
//
// # Parts
//
// The table joins parts that own their state. What comes in: members (nodes),
// poolTable (pools and settings), network (the underlay). The live change of
// encapsulation: ends (this host and the others as drivers see them), publishing
// (what this host says that it sends), receiver (what it accepts, and the devices
// for it), sender (the forwarding path to each node), probeTargets. The RIB:
// origins (what blocks say), learnedPaths (what BGP says), nextHops (the objects
// that routes point at), rib (candidates, choice and routes). Both sides share
// objects: what the kernel is to have apart from routes. The sender knows nothing
// of the RIB; the table hands on which nodes it has another path to, once a turn.
//
// # Next hops
//
// Routes do not carry gateways; they point at a next-hop object. There is one
// object per pool and peer, so that a change of the pool's encapsulation or of
// the peer's address replaces one object whatever the number of routes, and
// one per gateway for prefixes outside the pools. Its number is derived from
// that identity, so a restarted daemon finds its own objects in place and
// leaves them alone.
//
// A route has a desired next hop and an effective one. They differ where a group
// lost a member and so equals what the route has come to desire: the route stays
// on it. When no route desires a group's own set any more, the group is re-keyed:
// it keeps its number and takes the identity of what it has become.
package vrouter
