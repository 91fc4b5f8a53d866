package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Overlap is something of this host that lies in, or around, a pool's range.
type Overlap struct {
	With string // for people: the route or the address, with its device and protocol

	// OnLink says that the host, or others on a network that it is attached
	// to, have addresses of the range: workloads with the same ones would cut
	// them off.
	OnLink bool
	// Addr is the host's address, where With is one.
	Addr netip.Addr
	// OtherPods says that pods have it which another network attached, of the
	// addresses that Kubernetes gave for pods: IPAM goes round it.
	OtherPods bool
}

// Overlaps lists what of the host shares addresses with a range that is to be
// a pool's: its own addresses with their subnets, and every route but the
// default ones. What routerd made itself does not count, nor do workloads'
// devices, nor a route that drops as much as the range or more: a pool's blocks
// are more specific. Addresses come first. podCIDRs are the ranges that Kubernetes gave this
// node, where pods have addresses of these alone: nil where they do not count.
func Overlaps(u dataplane.Underlay, cidr netip.Prefix, podCIDRs []netip.Prefix) []Overlap {
	var out []Overlap
	others := u.OtherPods(podCIDRs)
	subnets := map[netip.Prefix]bool{}
	for _, a := range u.Addresses {
		if !ofHost(a) || !a.Prefix.Overlaps(cidr) {
			continue
		}
		subnets[a.Prefix.Masked()] = true
		out = append(out, Overlap{With: fmt.Sprintf("address %s of device %s", a.Prefix, a.Link), OnLink: true, Addr: a.Prefix.Addr(), OtherPods: slices.Contains(others, a)})
	}
	for _, r := range u.Routes {
		// The kernel's own route to a subnet is told with the address.
		if r.Prefix.Bits() == 0 || ownLink(r.Link) || !r.Prefix.Overlaps(cidr) || subnets[r.Prefix] && !r.Gateway.IsValid() {
			continue
		}
		// A part of the cluster's range is a Node's.
		out = append(out, Overlap{With: routeText(r), OtherPods: len(podCIDRs) > 0 && r.Prefix.Bits() > cidr.Bits()})
	}
	for _, r := range u.Dropping {
		if r.Prefix.Bits() > cidr.Bits() && cidr.Contains(r.Prefix.Addr()) {
			out = append(out, Overlap{With: routeText(r)})
		}
	}
	return out
}

// ownLink reports whether a device is routerd's, or Calico's of the same name.
// The tunnels of a VXLAN network that is being left have names with a number.
func ownLink(name string) bool {
	own := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
	return slices.ContainsFunc([]string{"cali", "vxlan.calico", "vxlan-v6.calico", "tunl6.calico", "wireguard.cali", "wg-v6.cali"}, own) ||
		slices.Contains([]string{"lo", "tunl0", "ip6tnl0"}, name)
}

// ofHost reports whether an address is one that the host has by itself and shows to others.
func ofHost(a dataplane.UnderlayAddress) bool {
	addr := a.Prefix.Addr()
	return !ownLink(a.Link) && !addr.IsLoopback() && !addr.IsLinkLocalUnicast()
}

// HostAddresses returns which addresses no workload can have because the host has them
// itself or takes them for its subnets': the first and the last of one are no host's (RFC 922).
// What routerd made itself does not count.
func HostAddresses(u dataplane.Underlay) []netip.Prefix {
	var out []netip.Prefix
	single := func(a netip.Addr) { out = append(out, netip.PrefixFrom(a, a.BitLen())) }
	for _, a := range u.Addresses {
		if !ofHost(a) {
			continue
		}
		single(a.Prefix.Addr())
		if subnet := a.Prefix.Masked(); subnet.Addr().Is4() && subnet.Bits() < 31 {
			single(subnet.Addr())
			last, _ := store.AddrAt(subnet, 1<<(32-subnet.Bits())-1) // it lies inside
			single(last)
		}
	}
	return out
}

// OwnPodCIDRs are the ranges that Kubernetes gave this node, where these count.
func (a *Agent) OwnPodCIDRs() []netip.Prefix {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.podCIDRs
}

func routeText(r dataplane.UnderlayRoute) string {
	s := strings.TrimSpace(r.Type + " route " + r.Prefix.String())
	if r.Gateway.IsValid() {
		s += " via " + r.Gateway.String()
	}
	if r.Link != "" {
		s += " dev " + r.Link
	}
	return s + " proto " + protocolName(r.Protocol)
}

// protocolName names a route's origin as ip(8) does: RTPROT_* of
// linux/rtnetlink.h, and Calico's 80.
func protocolName(p uint8) string {
	names := map[uint8]string{
		2: "kernel", 3: "boot", 4: "static", 9: "ra", 11: "zebra", 12: "bird", 16: "dhcp", 18: "keepalived", 80: "calico",
		186: "bgp", 187: "isis", 188: "ospf", 189: "rip", 192: "eigrp",
	}
	if n := names[p]; n != "" {
		return n
	}
	return fmt.Sprint(p)
}

// Underlay returns the newest snapshot of the network around the host; false:
// none has come yet.
func (a *Agent) Underlay() (dataplane.Underlay, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.underlay == nil {
		return dataplane.Underlay{}, false
	}
	return *a.underlay, true
}

// PoolOverlaps returns what of the host shares addresses with a pool.
func (a *Agent) PoolOverlaps(pool string) []Overlap {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.overlaps == nil {
		a.overlaps = map[string][]Overlap{}
	}
	known, ok := a.overlaps[pool]
	if p := a.pools[pool]; !ok && p != nil && a.underlay != nil {
		if p.CIDR.IsValid() {
			known = Overlaps(*a.underlay, p.CIDR, a.podCIDRs)
		}
		a.overlaps[pool] = known
	}
	return known
}
