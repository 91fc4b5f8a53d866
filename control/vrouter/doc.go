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
// # Next hops
//
// Routes do not carry gateways; they point at a next-hop object. There is one
// object per pool and peer, so that a change of the pool's encapsulation or of
// the peer's address replaces one object whatever the number of routes, and
// one per gateway for prefixes outside the pools. Its number is derived from
// that identity, so a restarted daemon finds its own objects in place and
// leaves them alone.
package vrouter
