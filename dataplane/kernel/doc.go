// Package kernel makes the kernel's tables what their sources want, through
// rtnetlink(7), ethtool's generic netlink and /proc/sys. It is the only writer
// of links, addresses, sysctls, offloads, neighbours, FDB entries, next hops, groups of next hops and routes; [Kernel] implements
// dataplane.Sink.
//
// # Parts
//
// [Kernel] has the loop and what callers see. Of what the loop owns, the actual
// state is what there is and which of it is ours, the observer keeps it true to
// what the kernel notifies of, and the writer makes it what is wanted; each stands on the
// one before.
//
// # Ownership
//
// What is ours follows from the kernel alone, after a restart with an
// empty memory:
//
//   - Routes and next hops carry our protocol number, 77 unless configured.
//   - A device that has a name and kind of our tunnels and carries the alias
//     "routerd" (ip link shows it), which we give it when we make or take it.
//     When no source wants it, it is deleted; one without the alias, such as
//     Calico's, is not touched.
//   - tunl0 cannot be deleted, for it comes with the ipip module in every
//     network namespace. When no source wants it any more its addresses are
//     flushed, it is set down, and the alias is taken off.
//   - Any device is ours while it is wanted by its name.
//   - All addresses, except the IPv6 link-local ones of an ipip device, and
//     all permanent neighbour and FDB entries on such a device are ours. Our
//     VXLAN and ip6tnl devices make no link-local addresses, and what we put
//     on them is used at once, without duplicate address detection. On the devices of
//     workloads (cali*), which package dataplane/workload makes and deletes,
//     only the entries that are wanted are.
//
// A foreign object is never changed. Where its key is the one that we want,
// ours fails with an error that names both owners. Only the routes that Calico left
// on a host are taken over, each replaced by ours in one step: those of Felix's
// protocol, 80, and of protocols boot and bird those that lead where ours does.
//
// # Order
//
// A pass creates and changes in the order of dataplane.Kinds and then deletes
// in the reverse order, so an object exists while another refers to it. To
// delete a next hop deletes its routes in the kernel; so that waits until no
// wanted route uses it, and where all its routes go, one message takes them
// all. A group is made of those of its members that there are, and completed
// when the others come. Nothing of the previous run is removed before every source is synced.
//
// # Truth
//
// What there is comes from complete listings: at the start, every 90 seconds,
// and after any doubt (an overrun of the notifications, an answer that does
// not fit). Notifications correct it in between and are drained before each
// pass. Changes of sysctls are announced by inotify and RTM_NEWNETCONF, those of
// offloads by ethtool's monitor group. The kernel does not notify of everything: with a device that goes
// down or loses its carrier its next hops, also as members of groups, and the
// IPv4 routes that use them, vanish in silence; these consequences are derived here.
package kernel
