package kernel

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/felix"
)

// The names of our devices.
const (
	nameIPIP    = "tunl0"
	nameVXLAN   = "vxlan.calico"
	nameVXLANv6 = "vxlan-v6.calico"
	nameIP6TNL  = "tunl6.calico"
	// prefixWorkload begins the names of workloads' devices.
	prefixWorkload = "cali"
)

// kindOf is the kind of our device of that name; empty: we give no such name.
// Those of VXLAN are dataplane/vxlan.DeviceName's.
func kindOf(name string) string {
	switch name {
	case nameIPIP:
		return string(dataplane.LinkIPIP)
	case nameIP6TNL:
		return string(dataplane.LinkIP6TNL)
	case nameVXLAN, nameVXLANv6:
		return string(dataplane.LinkVXLAN)
	}
	slot, ok := strings.CutPrefix(name, nameVXLAN)
	slot = strings.TrimPrefix(slot, "6")
	if ok && len(slot) == 2 && slot[0] == '-' && '2' <= slot[1] && slot[1] <= '9' {
		return string(dataplane.LinkVXLAN)
	}
	return ""
}

// haveLink is a device of ours as it is; it satisfies what is wanted if
// the parts agree that are said there.
type haveLink struct {
	dataplane.Link
	up            bool
	marked        bool // carries our alias
	learning      bool
	autoLinkLocal bool   // makes link-local addresses by itself
	shape         string // what a desired link cannot say, such as a fixed remote end
	obstructed    string // what others did that keeps packets from it
	metadata      bool   // of an ip6tnl device: the other end comes from the route
}

func (h haveLink) String() string {
	list := []string{h.Link.String()}
	add := func(is bool, text string) {
		if is {
			list = append(list, text)
		}
	}
	add(!h.up, "down")
	add(h.learning, "learning")
	add(h.autoLinkLocal, "addrgenmode eui64")
	add(h.shape != "", h.shape)
	add(h.obstructed != "", h.obstructed)
	add(!h.marked, "without our alias")
	add(h.Type == dataplane.LinkIP6TNL && !h.metadata, "not external")
	return strings.Join(list, ", ")
}

// noncanonicalNote ends the text of what has settings that we never make.
const noncanonicalNote = ", with settings that are not routerd's"

// noncanonicalRoute is a route of our protocol that is not in our notation. It is
// replaced where its key is wanted and swept where it is not.
type noncanonicalRoute struct {
	dataplane.Route
	tos uint8
	// hops distinguishes what several noncanonical routes of one key look like.
	hops string
}

func (r noncanonicalRoute) String() string { return r.Route.String() + noncanonicalNote }

// noncanonicalRouteKey is the key of a route with a type of service, which no desired route has.
type noncanonicalRouteKey struct {
	dataplane.RouteKey
	tos uint8
}

func (r noncanonicalRoute) Key() dataplane.Key {
	if r.tos != 0 {
		return noncanonicalRouteKey{r.Route.Key().(dataplane.RouteKey), r.tos}
	}
	return r.Route.Key()
}

// noncanonicalNextHop is a next hop of our protocol that is not in our notation.
type noncanonicalNextHop struct {
	dataplane.NextHop
	flags uint32
	encap encap
	extra bool
}

func (o noncanonicalNextHop) String() string { return o.NextHop.String() + noncanonicalNote }

// noncanonicalGroup is a group of our protocol that is not in our notation.
type noncanonicalGroup struct{ dataplane.NextHopGroup }

func (o noncanonicalGroup) String() string { return o.NextHopGroup.String() + noncanonicalNote }

// noncanonicalNeighbour and noncanonicalFDBEntry are entries on our devices with flags that we
// do not set.
type noncanonicalNeighbour struct {
	dataplane.Neighbour
	flags uint8
}

func (o noncanonicalNeighbour) String() string { return o.Neighbour.String() + noncanonicalNote }

type noncanonicalFDBEntry struct {
	dataplane.FDBEntry
	state uint16
}

func (o noncanonicalFDBEntry) String() string { return o.FDBEntry.String() + noncanonicalNote }

// equal reports whether have, as the kernel shows it, satisfies want.
func equal(want, have dataplane.Object) bool {
	w, ok := want.(dataplane.Link)
	if !ok {
		return want == have
	}
	if w == have {
		return true // just made; the notification says what became of it
	}
	h, ok := have.(haveLink)
	return ok && h.Type == w.Type && sameSettings(w, h) && sameEnds(w, h) && !needsNew(w, h)
}

// sameSettings compares what every kind of device has, and can be changed with
// one message.
func sameSettings(w dataplane.Link, h haveLink) bool {
	if !h.up || !h.marked || w.MTU != 0 && w.MTU != h.MTU || h.autoLinkLocal || h.obstructed != "" {
		return false
	}
	return w.Type != dataplane.LinkVXLAN || w.MAC.IsZero() || w.MAC == h.MAC
}

// sameEnds compares what a tunnel's own message changes in place.
func sameEnds(w dataplane.Link, h haveLink) bool {
	return w.Type == dataplane.LinkIPIP || w.Local == h.Local && w.Parent == h.Parent && !h.learning && h.shape == ""
}

// needsNew reports whether the device has to be made anew to be as wanted. The
// kernel changes the local address of a VXLAN device, and its parent, but
// neither its network identifier nor its port, and no address into one of the
// other family.
func needsNew(w dataplane.Link, h haveLink) bool {
	if w.Type == dataplane.LinkIP6TNL {
		return !h.metadata
	}
	return w.Type == dataplane.LinkVXLAN &&
		(w.VNI != h.VNI || w.Port != h.Port || w.Local != h.Local && (!w.Local.IsValid() || w.Local.Is4() != h.Local.Is4()) ||
			w.Parent == "" && h.Parent != "")
}

// canonical gives an object the form in which the kernel shows it, so that
// equal things have equal keys.
func canonical(o dataplane.Object) dataplane.Object {
	switch o := o.(type) {
	case dataplane.Route:
		if c := canonicalRoute(o); c != o { // else without a copy
			return c
		}
	case dataplane.Sysctl:
		o.Value = canonicalSysctl(o.Value)
		return o
	}
	return o
}

// canonicalKey is canonical for keys.
func canonicalKey(k dataplane.Key) dataplane.Key {
	if r, ok := k.(dataplane.RouteKey); ok {
		return canonicalRouteKey(r)
	}
	return k
}

// canonicalRoute is canonical for routes.
func canonicalRoute(r dataplane.Route) dataplane.Route {
	r.Prefix = r.Prefix.Masked()
	r.Metric = canonicalMetric(r.Prefix, r.Metric)
	return r
}

// canonicalRouteKey is canonical for the keys of routes.
func canonicalRouteKey(k dataplane.RouteKey) dataplane.RouteKey {
	k.Prefix = k.Prefix.Masked()
	k.Metric = canonicalMetric(k.Prefix, k.Metric)
	return k
}

// canonicalMetric: the kernel takes an IPv6 metric of zero as IP6_RT_PRIO_USER.
func canonicalMetric(p netip.Prefix, m uint32) uint32 {
	if m == 0 && p.Addr().Is6() {
		return 1024
	}
	return m
}

// canonicalSysctl: the kernel separates the numbers of a vector by tabs.
func canonicalSysctl(v string) string { return strings.Join(strings.Fields(v), " ") }

// validate says what is wrong with an object that can never be in a kernel.
func validate(o dataplane.Object) error {
	switch o := o.(type) {
	case dataplane.Link:
		return validateLink(o)
	case dataplane.Address:
		return check(o.Prefix.IsValid(), "prefix", "give an address with its length")
	case dataplane.Sysctl:
		bad := o.Name == "" || strings.HasPrefix(o.Name, "/") || strings.Contains("/"+o.Name+"/", "/../")
		return check(!bad, "name", "give a path below /proc/sys such as net/ipv4/ip_forward")
	case dataplane.Feature:
		if err := check(o.Link != "", "link", "name the device"); err != nil {
			return err
		}
		return check(o.Name != "", "name", "give the kernel's name of an offload, such as tx-checksum-ip-generic")
	case dataplane.Neighbour:
		if err := check(o.Addr.IsValid(), "addr", "give the neighbour's address"); err != nil {
			return err
		}
		return check(!o.MAC.IsZero(), "mac", "give the neighbour's MAC address")
	case dataplane.FDBEntry:
		return check(o.Dst.IsValid(), "dst", "give the address of the other tunnel end")
	case dataplane.NextHop:
		if err := check(o.ID != 0, "id", "numbers begin with 1"); err != nil {
			return err
		}
		if err := check(o.Gateway.IsValid(), "gateway", "give the address of the gateway"); err != nil {
			return err
		}
		return check(o.Link != "", "link", "name the device towards the gateway")
	case dataplane.NextHopGroup:
		if err := check(o.ID != 0, "id", "numbers begin with 1"); err != nil {
			return err
		}
		for m := range o.Members.All() {
			if err := check(m.ID != 0, "members", "numbers begin with 1"); err != nil {
				return err
			}
		}
		return check(o.Members != dataplane.GroupMembers{}, "members", "name at least one next hop")
	case dataplane.Route:
		return validateRoute(o)
	}
	return nil
}

func validateLink(l dataplane.Link) error {
	if err := check(l.Name != "" && len(l.Name) < unix.IFNAMSIZ, "name", "a device's name has 1 to 15 bytes"); err != nil {
		return err
	}
	switch l.Type {
	case dataplane.LinkIPIP:
		return nil
	case dataplane.LinkVXLAN:
		if err := check(l.VNI < 1<<24, "vni", "a VXLAN network identifier has 24 bits"); err != nil {
			return err
		}
		return check(l.Port != 0, "port", "give the UDP port, 4789 by default")
	case dataplane.LinkIP6TNL:
		return check(l.Local.Is6(), "local", "give the IPv6 address of this host's end")
	}
	return check(false, "type", fmt.Sprintf("a device of type %q cannot be made here; use ipip, vxlan or ip6tnl", l.Type))
}

func validateRoute(r dataplane.Route) error {
	if err := check(r.Prefix.IsValid(), "prefix", "give the destination"); err != nil {
		return err
	}
	if err := check(r.Table != 0, "table", "give the number of the routing table; the main one is 254"); err != nil {
		return err
	}
	n := 0
	for _, set := range []bool{r.NextHop != 0, r.Link != "", r.Type == dataplane.Blackhole} {
		if set {
			n++
		}
	}
	return check(n == 1, "next hop", "a route has exactly one of a next hop, a link, and the type blackhole")
}

func check(ok bool, field, cure string) error {
	if ok {
		return nil
	}
	return fmt.Errorf("%s: %s", field, cure)
}

// linkName is the name of the device that an object is on or leads to, if it
// is bound to one.
func linkName(o dataplane.Object) string {
	switch o := o.(type) {
	case dataplane.Link:
		return o.Name
	case haveLink:
		return o.Name
	case dataplane.Address:
		return o.Link
	case dataplane.Sysctl:
		return sysctlLink(o.Name)
	case dataplane.Feature:
		return o.Link
	case dataplane.Neighbour:
		return o.Link
	case noncanonicalNeighbour:
		return o.Link
	case dataplane.FDBEntry:
		return o.Link
	case noncanonicalFDBEntry:
		return o.Link
	case dataplane.NextHop:
		return o.Link
	case noncanonicalNextHop:
		return o.Link
	case dataplane.Route:
		return o.Link
	case noncanonicalRoute:
		return o.Link
	}
	return ""
}

// nextHopOf is the next hop that an object in the kernel uses.
func nextHopOf(o dataplane.Object) dataplane.NextHopID {
	switch o := o.(type) {
	case dataplane.Route:
		return o.NextHop
	case noncanonicalRoute:
		return o.NextHop
	}
	return 0
}

// membersOf lists the next hops that a group in the kernel uses.
func membersOf(o dataplane.Object) dataplane.GroupMembers {
	switch g := o.(type) {
	case dataplane.NextHopGroup:
		return g.Members
	case noncanonicalGroup:
		return g.Members
	}
	return dataplane.GroupMembers{}
}

// protocolNames are those that operators know, from linux/rtnetlink.h.
func protocolName(p uint8) string {
	names := map[uint8]string{
		2: "kernel", 3: "boot", 4: "static", 9: "ra", 11: "zebra", 12: "bird", 16: "dhcp", 18: "keepalived", 42: "babel",
		DefaultProtocol: "routerd", felix.Protocol: "calico", 186: "bgp", 187: "isis", 188: "ospf", 189: "rip", 192: "eigrp",
	}
	if n, ok := names[p]; ok {
		return fmt.Sprintf("%s (%d)", n, p)
	}
	return fmt.Sprint(p)
}

// ClashError says that something of another owner is where an object of ours
// should be. It is left alone.
type ClashError struct {
	Key    dataplane.Key
	Theirs uint8 // routing protocol number (RTPROT_*) of the owner
	Ours   uint8
}

func (e *ClashError) Error() string {
	return fmt.Sprintf("%s belongs to protocol %s and is left alone; we are protocol %s: remove it there, or stop wanting it here",
		e.Key, protocolName(e.Theirs), protocolName(e.Ours))
}
