package dataplane

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Family is an IP address family.
type Family uint8

// The two families. The numbers are those of the IP header's version field.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Families lists the two, in the order in which they are shown.
func Families() []Family { return []Family{IPv4, IPv6} }

// FamilyOf returns the family of a. An IPv4-mapped IPv6 address is IPv6.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Bits returns the length of an address of the family in bits.
func (f Family) Bits() int {
	if f == IPv4 {
		return 32
	}
	return 128
}

func (f Family) String() string {
	if f == IPv4 {
		return "IPv4"
	}
	return "IPv6"
}

// Kind tells the sorts of objects apart. Kinds are numbered in the order in
// which a pass creates objects; it deletes them in the reverse order, so an
// object always exists while another refers to it.
type Kind uint8

// The closed set of kinds.
const (
	KindLink Kind = iota + 1
	KindAddress
	KindSysctl
	KindFeature
	KindFDB // before the neighbours: what waits for one is sent the moment it is there
	KindNeighbour
	KindNextHop
	KindNextHopGroup
	KindRoute
)

// Kinds lists every kind in creation order.
func Kinds() []Kind {
	return []Kind{KindLink, KindAddress, KindSysctl, KindFeature, KindFDB, KindNeighbour, KindNextHop, KindNextHopGroup, KindRoute}
}

func (k Kind) String() string {
	switch k {
	case KindLink:
		return "link"
	case KindAddress:
		return "address"
	case KindSysctl:
		return "sysctl"
	case KindFeature:
		return "feature"
	case KindNeighbour:
		return "neighbour"
	case KindFDB:
		return "fdb"
	case KindNextHop:
		return "nexthop"
	case KindNextHopGroup:
		return "nexthop group"
	case KindRoute:
		return "route"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Key identifies an object as the kernel does: two objects with one key cannot
// exist side by side. Keys are comparable.
type Key interface {
	Kind() Kind
	String() string
	key()
}

// Object is a thing that should be in the kernel. The set is closed: [Link],
// [Address], [Sysctl], [Feature], [Neighbour], [FDBEntry], [NextHop],
// [NextHopGroup] and [Route]. Objects are comparable; two objects with equal keys that differ are
// two versions of one thing.
type Object interface {
	Key() Key
	// String shows the object as the operator's tools do: the syntax of ip(8),
	// bridge(8) and sysctl(8).
	String() string
	object()
}

// MAC is an Ethernet address. The zero value means "not set".
type MAC [6]byte

// IsZero reports whether m is not set.
func (m MAC) IsZero() bool { return m == MAC{} }

func (m MAC) String() string {
	var b strings.Builder
	for i, x := range m {
		if i > 0 {
			b.WriteByte(':')
		}
		b.WriteString(hex.EncodeToString([]byte{x}))
	}
	return b.String()
}

// ParseMAC parses the colon-separated form of a 6-byte Ethernet address.
func ParseMAC(s string) (MAC, error) {
	var m MAC
	if strings.Count(s, ":") != len(m)-1 {
		return MAC{}, fmt.Errorf("parse MAC address %q: want six bytes separated by colons", s)
	}
	rest := s
	for i := range m {
		var p string
		p, rest, _ = strings.Cut(rest, ":")
		b, err := strconv.ParseUint(p, 16, 8)
		if err != nil || len(p) != 2 {
			return MAC{}, fmt.Errorf("parse MAC address %q: %q is not a byte in hexadecimal", s, p)
		}
		m[i] = byte(b)
	}
	return m, nil
}

// LinkType is the kernel's name of a kind of device (IFLA_INFO_KIND).
type LinkType string

// The device kinds that drivers use.
const (
	LinkIPIP   LinkType = "ipip"
	LinkVXLAN  LinkType = "vxlan"
	LinkIP6TNL LinkType = "ip6tnl"
)

// Link is a device that routerd owns, known by its name.
type Link struct {
	Name string
	Type LinkType
	MTU  int // bytes
	MAC  MAC // zero: the kernel's choice

	// For LinkVXLAN and LinkIP6TNL.
	Local  netip.Addr // source address of the outer packets
	Parent string     // device that holds Local

	// For LinkVXLAN.
	VNI  uint32
	Port uint16 // UDP destination port
}

// LinkKey identifies a [Link].
type LinkKey struct{ Name string }

// Kind implements [Key].
func (LinkKey) Kind() Kind       { return KindLink }
func (k LinkKey) String() string { return "link " + k.Name }
func (LinkKey) key()             {}

// Key implements [Object].
func (l Link) Key() Key { return LinkKey{l.Name} }
func (Link) object()    {}

func (l Link) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s type %s mtu %d", l.Name, l.Type, l.MTU)
	if !l.MAC.IsZero() {
		fmt.Fprintf(&b, " address %s", l.MAC)
	}
	switch l.Type {
	case LinkIP6TNL:
		fmt.Fprintf(&b, " mode any local %s remote any dev %s encaplimit none", l.Local, l.Parent)
	case LinkIPIP:
	case LinkVXLAN:
		fmt.Fprintf(&b, " id %d dstport %d local %s dev %s nolearning", l.VNI, l.Port, l.Local, l.Parent)
	}
	return b.String()
}

// Address is an address on a device that routerd owns.
type Address struct {
	Link   string
	Prefix netip.Prefix // the address itself with its prefix length, not masked
}

// AddressKey identifies an [Address].
type AddressKey struct {
	Link   string
	Prefix netip.Prefix
}

// Kind implements [Key].
func (AddressKey) Kind() Kind       { return KindAddress }
func (k AddressKey) String() string { return fmt.Sprintf("address %s dev %s", k.Prefix, k.Link) }
func (AddressKey) key()             {}

// Key implements [Object].
func (a Address) Key() Key       { return AddressKey(a) }
func (a Address) String() string { return fmt.Sprintf("%s dev %s", a.Prefix, a.Link) }
func (Address) object()          {}

// Sysctl is a kernel setting. Withdrawing it leaves the value as it is:
// what it was before is not known after a restart.
type Sysctl struct {
	Name  string // with slashes, below /proc/sys: net/ipv4/ip_forward
	Value string
}

// SysctlKey identifies a [Sysctl].
type SysctlKey struct{ Name string }

// Kind implements [Key].
func (SysctlKey) Kind() Kind       { return KindSysctl }
func (k SysctlKey) String() string { return "sysctl " + k.Name }
func (SysctlKey) key()             {}

// Key implements [Object].
func (s Sysctl) Key() Key       { return SysctlKey{s.Name} }
func (s Sysctl) String() string { return s.Name + "=" + s.Value }
func (Sysctl) object()          {}

// Feature is an offload of a device (ethtool -k), as SIOCETHTOOL and the
// kernel's names of features have it. Withdrawing it leaves the setting
// as it is, as with a [Sysctl].
type Feature struct {
	Link string
	Name string // the kernel's name: tx-checksum-ip-generic, tx-udp_tnl-segmentation
	On   bool
}

// FeatureKey identifies a [Feature].
type FeatureKey struct{ Link, Name string }

// Kind implements [Key].
func (FeatureKey) Kind() Kind       { return KindFeature }
func (k FeatureKey) String() string { return fmt.Sprintf("feature %s dev %s", k.Name, k.Link) }
func (FeatureKey) key()             {}

// Key implements [Object].
func (f Feature) Key() Key { return FeatureKey{f.Link, f.Name} }

func (f Feature) String() string {
	if f.On {
		return fmt.Sprintf("%s dev %s on", f.Name, f.Link)
	}
	return fmt.Sprintf("%s dev %s off", f.Name, f.Link)
}
func (Feature) object() {}

// Neighbour is a permanent neighbour (ARP or NDP) entry on a device that
// routerd owns.
type Neighbour struct {
	Link string
	Addr netip.Addr
	MAC  MAC
}

// NeighbourKey identifies a [Neighbour].
type NeighbourKey struct {
	Link string
	Addr netip.Addr
}

// Kind implements [Key].
func (NeighbourKey) Kind() Kind       { return KindNeighbour }
func (k NeighbourKey) String() string { return fmt.Sprintf("neighbour %s dev %s", k.Addr, k.Link) }
func (NeighbourKey) key()             {}

// Key implements [Object].
func (n Neighbour) Key() Key { return NeighbourKey{n.Link, n.Addr} }

func (n Neighbour) String() string {
	return fmt.Sprintf("%s dev %s lladdr %s PERMANENT", n.Addr, n.Link, n.MAC)
}
func (Neighbour) object() {}

// FDBEntry sends frames for MAC on a VXLAN device to the VTEP at Dst.
type FDBEntry struct {
	Link string
	MAC  MAC
	Dst  netip.Addr
	Port uint16 // UDP destination port where a NAT translates it; 0: the device's
}

// FDBKey identifies an [FDBEntry]. Only unicast entries are used, so one
// destination per MAC.
type FDBKey struct {
	Link string
	MAC  MAC
}

// Kind implements [Key].
func (FDBKey) Kind() Kind       { return KindFDB }
func (k FDBKey) String() string { return fmt.Sprintf("fdb %s dev %s", k.MAC, k.Link) }
func (FDBKey) key()             {}

// Key implements [Object].
func (e FDBEntry) Key() Key { return FDBKey{e.Link, e.MAC} }

func (e FDBEntry) String() string {
	port := ""
	if e.Port != 0 {
		port = fmt.Sprintf(" port %d", e.Port)
	}
	return fmt.Sprintf("%s dev %s dst %s%s self permanent", e.MAC, e.Link, e.Dst, port)
}
func (FDBEntry) object() {}

// NextHopID is the kernel's number of a next-hop object (NHA_ID). Zero is not
// a valid number and means "none".
type NextHopID uint32

// NextHop is a next-hop object (RTM_NEWNEXTHOP, Linux 5.3). Routes point at it
// by its number, so replacing it moves all of them in one step.
type NextHop struct {
	ID      NextHopID
	Link    string
	Gateway netip.Addr
	// OnLink takes the gateway to be on the link whatever the addresses there
	// say. IPv6 refuses that all the same where a route that is not the default
	// leads to the gateway through another device
	// (ip6_route_check_nh_onlink); a link-local gateway is never refused. On a
	// LinkIP6TNL the gateway is the outer destination and not checked.
	OnLink bool
}

// NextHopKey identifies a [NextHop].
type NextHopKey struct{ ID NextHopID }

// Kind implements [Key].
func (NextHopKey) Kind() Kind       { return KindNextHop }
func (k NextHopKey) String() string { return fmt.Sprintf("nexthop id %d", k.ID) }
func (NextHopKey) key()             {}

// Key implements [Object].
func (n NextHop) Key() Key { return NextHopKey{n.ID} }
func (NextHop) object()    {}

func (n NextHop) String() string {
	s := fmt.Sprintf("id %d via %s dev %s", n.ID, n.Gateway, n.Link)
	if n.OnLink {
		s += " onlink"
	}
	return s
}

// RouteType says what a route does with a packet.
type RouteType uint8

// The types of route in use.
const (
	Unicast   RouteType = iota // forward
	Blackhole                  // drop silently
)

// MainTable is the number of the kernel's main routing table (RT_TABLE_MAIN).
const MainTable = 254

// Route is a route of routerd's protocol number. Exactly one of these holds:
// NextHop is set; Link is set (a directly attached destination, scope link);
// Type is Blackhole.
type Route struct {
	Prefix  netip.Prefix // masked
	Table   uint32       // MainTable in all present uses
	Metric  uint32       // lower wins; the kernel takes an IPv6 zero as 1024
	Type    RouteType
	NextHop NextHopID
	Link    string
	MTU     uint32 // bytes that the path takes, where it is less than the device's MTU (RTAX_MTU); 0: the device's
}

// RouteKey identifies a [Route], as the kernel's FIB does. Type of service is
// always zero for our routes.
type RouteKey struct {
	Prefix netip.Prefix
	Table  uint32
	Metric uint32
}

// Kind implements [Key].
func (RouteKey) Kind() Kind { return KindRoute }

func (k RouteKey) String() string {
	s := "route " + k.Prefix.String()
	if k.Table != MainTable {
		s += fmt.Sprintf(" table %d", k.Table)
	}
	if k.Metric != 0 {
		s += fmt.Sprintf(" metric %d", k.Metric)
	}
	return s
}
func (RouteKey) key() {}

// Key implements [Object].
func (r Route) Key() Key { return RouteKey{r.Prefix, r.Table, r.Metric} }
func (Route) object()    {}

func (r Route) String() string {
	var b strings.Builder
	if r.Type == Blackhole {
		b.WriteString("blackhole ")
	}
	b.WriteString(r.Prefix.String())
	if r.NextHop != 0 {
		fmt.Fprintf(&b, " nhid %d", r.NextHop)
	}
	if r.Link != "" {
		fmt.Fprintf(&b, " dev %s scope link", r.Link)
	}
	if r.Table != MainTable {
		fmt.Fprintf(&b, " table %d", r.Table)
	}
	if r.Metric != 0 {
		fmt.Fprintf(&b, " metric %d", r.Metric)
	}
	if r.MTU != 0 {
		fmt.Fprintf(&b, " mtu %d", r.MTU)
	}
	return b.String()
}

// CompareKeys orders keys: by kind in creation order, then by name. It is for
// deterministic output, not for speed.
func CompareKeys(a, b Key) int {
	if c := cmp.Compare(a.Kind(), b.Kind()); c != 0 {
		return c
	}
	ra, ok1 := a.(RouteKey)
	rb, ok2 := b.(RouteKey)
	if ok1 && ok2 {
		return ra.Compare(rb)
	}
	return cmp.Compare(a.String(), b.String())
}

// Compare orders the keys of routes by table, prefix and metric.
func (k RouteKey) Compare(o RouteKey) int {
	return cmp.Or(cmp.Compare(k.Table, o.Table), k.Prefix.Compare(o.Prefix), cmp.Compare(k.Metric, o.Metric))
}
