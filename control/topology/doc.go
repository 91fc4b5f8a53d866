// Package topology is what the core decides by: the nodes, pools and blocks of the
// cluster, and the network around this host. It holds what is known and answers
// questions about it; what follows from it is decided in the packages encap and
// rib. The core alone changes it, from one goroutine; nothing here is safe for
// concurrent use.
package topology
