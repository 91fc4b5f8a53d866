package dataplane

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// The drivers, as [Encap.Driver] and users name them.
const (
	DriverDirect = "direct"
	DriverIPIP   = "ipip"
	DriverVXLAN  = "vxlan"
)

// String returns the encapsulation as nodes publish it: direct, ipip (in IPv4), ip6tnl
// (in IPv6), vxlan/VNI/PORT (over IPv4) or vxlan6/VNI/PORT (over IPv6).
func (f Encap) String() string {
	switch f.Driver {
	case DriverIPIP:
		if f.Outer == IPv6 {
			return "ip6tnl"
		}
	case DriverVXLAN:
		name := DriverVXLAN
		if f.Outer == IPv6 {
			name = "vxlan6"
		}
		return fmt.Sprintf("%s/%d/%d", name, f.VNI, f.Port)
	}
	return f.Driver
}

// ParseEncap reads what [Encap.String] returns.
func ParseEncap(s string) (Encap, error) {
	switch s {
	case DriverDirect:
		return Encap{Driver: DriverDirect}, nil
	case DriverIPIP:
		return Encap{Driver: DriverIPIP, Outer: IPv4}, nil
	case "ip6tnl":
		return Encap{Driver: DriverIPIP, Outer: IPv6}, nil
	}
	name, rest, _ := strings.Cut(s, "/")
	vni, port, ok := strings.Cut(rest, "/")
	f := Encap{Driver: DriverVXLAN, Outer: IPv4}
	if name == "vxlan6" {
		f.Outer = IPv6
	}
	if !ok || name != DriverVXLAN && name != "vxlan6" {
		return Encap{}, fmt.Errorf("parse encapsulation %q: want direct, ipip, ip6tnl, vxlan/VNI/PORT or vxlan6/VNI/PORT", s)
	}
	n, err := strconv.ParseUint(vni, 10, 24)
	if err != nil || n == 0 {
		return Encap{}, fmt.Errorf("parse encapsulation %q: VNI %q is not a number from 1 to 16777215", s, vni)
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 {
		return Encap{}, fmt.Errorf("parse encapsulation %q: port %q is not a number from 1 to 65535", s, port)
	}
	f.VNI, f.Port = uint32(n), uint16(p)
	if f.String() != s {
		return Encap{}, fmt.Errorf("parse encapsulation %q: want it written as %s", s, f)
	}
	return f, nil
}

// CompareEncaps orders encapsulations: tunnels before direct, VXLAN before IPIP, IPv4
// before IPv6, then by number. Where a sender has to fall back, it takes the
// first that the peer accepts: a tunnel asks nothing of the network between.
func CompareEncaps(a, b Encap) int {
	rank := func(f Encap) int { return slices.Index([]string{DriverVXLAN, DriverIPIP, DriverDirect}, f.Driver) }
	return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Outer, b.Outer), cmp.Compare(a.VNI, b.VNI), cmp.Compare(a.Port, b.Port))
}
