// Package vrouter is the core: the one loop in which it is decided what should be in
// the kernel.
//
// Three things come in: what the store knows (nodes, pools, blocks), what BGP
// learned, and what the underlay looks like. The core keeps them (package topology),
// and joins what decides by them: how packets travel between hosts (package encap) and
// where each prefix goes (package rib). The objects that follow go to a
// [dataplane.Sink].
//
// All decisions are made in the type table, which does no I/O and is not safe
// for concurrent use. [Core] owns one table and feeds it from one goroutine.
// The cost of an event follows what it changes, not the size of the table.
package vrouter
