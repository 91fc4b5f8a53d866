// Package bgp speaks BGP for this host: it decides who the host talks to and
// what it announces, runs a BGP engine, and hands on the best paths it learns.
//
// [View] collects the resources that matter from the store's batches;
// [Desired] turns it into a [Config], the complete desired state, without any I/O. A
// [Speaker] makes a running engine match a Config and touches only what changed. A [Controller] joins the two for the daemon.
//
// # What is announced
//
// The node's own blocks (affinity confirmed, and the block itself not
// another's), each address of a block that is not the node's but is assigned to
// it, as a /32 or /128, and the ranges of services of the default
// BGPConfiguration; nothing inside a pool with disableBGPExport. Communities
// come from prefixAdvertisements. The next hop is the node's address and
// LOCAL_PREF is [LocalPref] or what the default BGPConfiguration's priorities of
// routes ask for, as Calico's speakers send it. Nothing that was
// learned is passed on, so that a node is no transit between two top-of-rack
// switches or between two nodes, with one exception: a node with a
// routeReflectorClusterID passes what is inside a pool on from one iBGP peer to
// another (RFC 4456). A peer's BGPFilters come before all of that: what they
// accept or reject is decided.
//
// A session carries the routes of its own transport's family: IPv4 over IPv4,
// IPv6 over IPv6 (RFC 4760), as Calico's two speakers do. A node of both
// families has two sessions with each of its like. IPv4 goes over IPv6 too
// where a BGPPeer asks for it (RFC 8950), and always over link-local addresses.
//
// # Over link-local addresses
//
// A BGPPeer may name a device in place of an address ("unnumbered", as
// top-of-rack fabrics do it). Who is on its link comes from outside, by
// [Controller.SetAdjacent], and is followed: the engine is given the address with the
// device as the zone, and a neighbour with another address is another session. Next hops that such a
// peer names have the device as their zone.
//
// # What is accepted
//
// In this order. Refused from everybody: loopback, link-local, multicast and
// reserved prefixes; the subnet of the node's own address, the node's own
// blocks and the ranges of services, with everything inside them. From peers
// that are nodes of the cluster only prefixes inside a pool are accepted, and of
// the node's own blocks just the single addresses that IPAM has assigned to another
// node. Then a peer's BGPFilters decide. Then the default route is refused: only
// a rule that names exactly 0.0.0.0/0 or ::/0 lets it in, for it is the
// underlay's business. The rest is accepted. Loops are found as BGP does (RFC
// 4271 section 9.1.2), relaxed by numAllowedLocalASNumbers.
package bgp
