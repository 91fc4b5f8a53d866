// Package reach measures the underlay between this host and each other host of
// the cluster: which of a peer's addresses answers (its own, or a public one
// that a NAT translates), whether data may come from any source port, how
// large a packet gets there, and whether a peer of the same subnet answers as
// a neighbour.
//
// Nothing is guessed from addresses. Probes ride in the tunnel's own form, so
// an answer says that this form gets through, and no port is opened beside the
// tunnel's. [Prober] does the I/O; the decisions are in an engine that knows
// neither sockets nor a clock and is tested on a network of values.
package reach
