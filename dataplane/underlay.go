package dataplane

import (
	"net/netip"
	"slices"
)

// Underlay is what the kernel knows of the network around this host: every
// link, every address, and the routes of the main table that are not
// routerd's. It is a snapshot: do not change it.
type Underlay struct {
	Links     []UnderlayLink    // by index
	Addresses []UnderlayAddress // in the kernel's order: primary before secondary
	Routes    []UnderlayRoute   // by prefix, then metric
	// Dropping are the routes that lead nowhere, apart from the others so that
	// no path is looked for among them.
	Dropping []UnderlayRoute
}

// Same reports whether nothing differs. It is not named Equal, by which go-cmp would
// compare instead of looking inside.
func (u Underlay) Same(o Underlay) bool {
	return slices.Equal(u.Links, o.Links) && slices.Equal(u.Addresses, o.Addresses) &&
		slices.Equal(u.Routes, o.Routes) && slices.Equal(u.Dropping, o.Dropping)
}

// OtherPods returns the addresses in some ranges, which this host has for its pods, by which
// another network of pods is on the host: of bridges, behind which are pods that another
// plugin attached, and single ones, as flannel's tunnel has.
func (u Underlay) OtherPods(ranges []netip.Prefix) []UnderlayAddress {
	var out []UnderlayAddress
	for _, a := range u.Addresses {
		inside := slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Bits() <= a.Prefix.Bits() && r.Contains(a.Prefix.Addr()) })
		if inside && (a.Prefix.IsSingleIP() || u.isBridge(a.Link)) {
			out = append(out, a)
		}
	}
	return out
}

func (u Underlay) isBridge(name string) bool {
	return slices.ContainsFunc(u.Links, func(l UnderlayLink) bool { return l.Name == name && l.Type == "bridge" })
}

// UnderlayLink is a network device.
type UnderlayLink struct {
	Index    int
	Name     string
	Type     string // IFLA_INFO_KIND; empty for physical devices and loopback
	MTU      int    // bytes
	MAC      MAC
	Up       bool // administratively up and with carrier
	Loopback bool

	// For VXLAN devices.
	VNI  uint32
	Port uint16 // UDP destination port

	// For devices with addresses.
	RPFilter int // IPv4 source check in effect: 0 off, 1 strict, 2 loose (RFC 3704)
	AcceptRA int // IPv6 router advertisements: 0 no, 1 unless forwarding, 2 always
}

// UnderlayAddress is an address on a device.
type UnderlayAddress struct {
	Link       string
	Prefix     netip.Prefix // the address with its prefix length, not masked
	Secondary  bool         // IPv4: not the first of its subnet; IPv6: temporary (RFC 8981)
	Deprecated bool
	Tentative  bool
	LinkScope  bool // scope link or host: not reachable from elsewhere
}

// UnderlayRoute is a route of the main table that routerd did not make.
type UnderlayRoute struct {
	Type     string       // of one that leads nowhere, as ip(8) names it: blackhole, unreachable, prohibit or throw; else empty
	Prefix   netip.Prefix // masked
	Gateway  netip.Addr   // invalid: directly attached
	Source   netip.Addr   // preferred source address (RTA_PREFSRC); invalid: the kernel chooses
	Link     string
	Metric   uint32
	Protocol uint8 // RTPROT_*
	Behind   bool  // the kernel asks one of routerd's of the same prefix and metric first
}
