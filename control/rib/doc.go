// Package rib is the routing table: for each prefix the candidates of this host's
// blocks, the store and BGP, the best of them, and the next-hop object that its route
// points at. How packets go to a node it asks package encap.
//
// A [RIB] joins parts that own their state: learnedPaths (what BGP says), nextHops (the
// objects that routes point at); what blocks say it asks package topology. Events mark
// prefixes, and once a turn the RIB chooses anew for those that are marked. It does no I/O
// and is not safe for concurrent use.
//
// All that is known of one prefix is one record of a [dense.Table], without pointers:
// what prefixes share (what BGP says, the route in use) has a number there. So a table
// of a million prefixes is a few large objects to the collector, and what changes of
// many in the same way is looked up once.
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
package rib
