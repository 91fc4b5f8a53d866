// Package workload makes and removes a workload's wire: a veth pair with one
// end on the host and the other inside the workload's network namespace.
//
// The workload's end has its address with a full-length prefix and one way
// out: a default route through 169.254.1.1, an address that exists nowhere. A
// permanent neighbour entry gives it the host end's MAC, and the host end
// answers ARP for it as well (proxy ARP), so that it also works for a workload
// that flushes its neighbours. IPv6's gateway is the host end's link-local
// address. No IPv6 address waits for duplicate address detection: the first
// packet after [Wire.Attach] passes.
//
// The host end's alias (IFLA_IFALIAS) says whose it is, so that a daemon that
// was killed recognises its devices from the kernel alone. Every operation can
// be repeated: on a half-made pair [Wire.Attach] finishes it.
//
// Of a wire of which nothing is there yet, as with nearly every container, all is
// made by a handful of requests; one that is half made, or that has something in
// its way, is looked at piece by piece.
//
// What belongs on the host besides the device (the route to the workload, the
// device's settings) is not kept here: [Wire.HostSysctls] names the settings,
// and dataplane/kernel keeps them. A new device has most of them from the start,
// so that there is nothing left to write.
package workload
