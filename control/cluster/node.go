package cluster

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Families holds a value for each family of addresses; the zero value of T stands
// for none.
type Families[T any] struct{ IPv4, IPv6 T }

// Of returns the value of a family.
func (f Families[T]) Of(fam dataplane.Family) T {
	if fam == dataplane.IPv4 {
		return f.IPv4
	}
	return f.IPv6
}

func (f *Families[T]) set(fam dataplane.Family, v T) {
	if fam == dataplane.IPv4 {
		f.IPv4 = v
		return
	}
	f.IPv6 = v
}

// With returns the values with another one for a family.
func (f Families[T]) With(fam dataplane.Family, v T) Families[T] {
	f.set(fam, v)
	return f
}

// Node is what a Node resource says. Members that cannot be read count as not set:
// validation refuses them where they are written, and one bad resource must not stop
// the others.
type Node struct {
	Name     string
	Revision store.Revision
	Labels   map[string]string
	Drain    store.Drain
	Away     bool // Kubernetes takes the host or its daemon for gone

	BGP       bool   // it has a place in BGP at all
	ASN       uint32 // 0: the cluster's
	ClusterID string // of a route reflector; empty: it is none
	BGPKeys   string // which keys of BGP it has, as [store.AnnotationBGPKeys] has it

	// Addr has the node's addresses on the underlay, with their subnets' lengths.
	Addr Families[netip.Prefix]
	// AddrErr says which of them cannot be read, or is of the other family.
	AddrErr error
	// Public are the addresses that others may have to send tunnelled packets to
	// instead, of the annotation [store.AnnotationTunnelAddress].
	Public Families[netip.Addr]

	// Hosts are all of its addresses on the underlay, each once: those above and those of
	// spec.addresses, in whatever notation. Inner are those that its packets have inside
	// tunnels. Sources are from which it may send tunnels' packets besides.
	Hosts, Inner, Sources []netip.Addr

	// IPIPAddr and VXLANAddr are of the tunnels' devices, by the family of the
	// workloads; VXLANMAC by that of the underlay, zero where the node has not
	// published it.
	IPIPAddr, VXLANAddr Families[netip.Addr]
	VXLANMAC            Families[dataplane.MAC]

	// PodCIDRs are the ranges that Kubernetes gave the node for its pods, in ascending order.
	PodCIDRs []netip.Prefix

	Encaps *Encaps // never nil

	Reflection store.NodeReflection
}

// Addrs returns the node's addresses on the underlay, IPv4 first.
func (n *Node) Addrs() []netip.Addr {
	var out []netip.Addr
	for _, p := range []netip.Prefix{n.Addr.IPv4, n.Addr.IPv6} {
		if p.IsValid() {
			out = append(out, p.Addr())
		}
	}
	return out
}

// Encaps is what a node publishes of the encapsulations of its packets. Nodes that
// publish the same share one.
type Encaps struct {
	store.NodeEncaps

	// What NodeEncaps holds as text. What a later version may have published and is
	// not known here is left out: this version does not send it.
	Accept, Use map[dataplane.Encap]struct{}
	Accepted    []dataplane.Encap // Accept, sorted
	Send        map[string]store.Mode
	Refuse      map[dataplane.Encap]string
}

// NewEncaps reads what a node publishes.
func NewEncaps(e store.NodeEncaps) *Encaps {
	out := &Encaps{
		NodeEncaps: e, Accept: parseEncaps(e.Accepts), Use: parseEncaps(e.Uses),
		Send: map[string]store.Mode{}, Refuse: map[dataplane.Encap]string{},
	}
	out.Accepted = slices.SortedFunc(maps.Keys(out.Accept), dataplane.CompareEncaps)
	for pool, s := range e.Sends {
		if m, err := store.ParseMode(s); err == nil {
			out.Send[pool] = m
		}
	}
	for s, why := range e.Refuses {
		if encap, err := dataplane.ParseEncap(s); err == nil {
			out.Refuse[encap] = why
		}
	}
	return out
}

func parseEncaps(list []string) map[dataplane.Encap]struct{} {
	out := make(map[dataplane.Encap]struct{}, len(list))
	for _, s := range list {
		if e, err := dataplane.ParseEncap(s); err == nil {
			out[e] = struct{}{}
		}
	}
	return out
}

func (d *decoder) node(r *store.Node, rev store.Revision) *Node {
	n := &Node{
		Name: r.Name, Revision: rev, Labels: r.Labels, Encaps: d.encaps(r), BGPKeys: r.Annotations[store.AnnotationBGPKeys],
		Drain: store.DrainOf(r.Annotations), Away: r.Annotations[store.AnnotationAway] != "", Reflection: store.NodeReflectionOf(r.Annotations),
	}
	for _, a := range store.TunnelAddresses(r) {
		n.Public.set(dataplane.FamilyOf(a), a)
	}
	if b := r.Spec.BGP; b != nil {
		n.BGP, n.ClusterID = true, b.RouteReflectorClusterID
		if b.ASNumber != nil {
			n.ASN = uint32(*b.ASNumber)
		}
		n.setAddr(b.IPv4Address, dataplane.IPv4, "ipv4Address", "an IPv4 address with its subnet's length such as 10.1.0.11/24")
		n.setAddr(b.IPv6Address, dataplane.IPv6, "ipv6Address", "an IPv6 address with its subnet's length such as fd00:1::11/64")
		setTunnel(&n.IPIPAddr, b.IPv4IPIPTunnelAddr)
	}
	if text := r.Annotations[store.AnnotationProblems]; text != "" && n.AddrErr == nil {
		n.AddrErr = errors.New(text)
	}
	setTunnel(&n.IPIPAddr, r.Annotations[store.AnnotationIPv6IPIPTunnelAddr])
	setTunnel(&n.VXLANAddr, r.Spec.IPv4VXLANTunnelAddr)
	setTunnel(&n.VXLANAddr, r.Spec.IPv6VXLANTunnelAddr)
	n.VXLANMAC = Families[dataplane.MAC]{macOf(r.Spec.VXLANTunnelMACAddr), macOf(r.Spec.VXLANTunnelMACAddrV6)}
	n.PodCIDRs = podCIDRs(r.Status.PodCIDRs)
	n.Hosts, n.Inner, n.Sources = hostAddresses(r), innerAddresses(r), store.TunnelSources(r)
	return n
}

// podCIDRs reads ranges of pods, each once.
func podCIDRs(texts []string) []netip.Prefix {
	var list []netip.Prefix
	for _, s := range texts {
		if p, err := netip.ParsePrefix(s); err == nil {
			list = append(list, p.Masked())
		}
	}
	slices.SortFunc(list, netip.Prefix.Compare)
	return slices.Clip(slices.Compact(list))
}

// hostAddresses returns the addresses of a host on the underlay.
func hostAddresses(r *store.Node) []netip.Addr {
	texts := make([]string, 0, 4)
	if b := r.Spec.BGP; b != nil {
		texts = append(texts, b.IPv4Address, b.IPv6Address)
	}
	for _, a := range r.Spec.Addresses {
		texts = append(texts, a.Address)
	}
	return addrsOf(texts)
}

// innerAddresses returns the addresses with which a host's packets arrive inside tunnels,
// those of Wireguard among them.
func innerAddresses(r *store.Node) []netip.Addr {
	texts := make([]string, 0, 6)
	if b := r.Spec.BGP; b != nil {
		texts = append(texts, b.IPv4IPIPTunnelAddr)
	}
	texts = append(texts, r.Spec.IPv4VXLANTunnelAddr, r.Spec.IPv6VXLANTunnelAddr)
	if w := r.Spec.Wireguard; w != nil {
		texts = append(texts, w.InterfaceIPv4Address, w.InterfaceIPv6Address)
	}
	return addrsOf(texts)
}

// addrsOf reads addresses with or without the length of their subnet, each once.
func addrsOf(texts []string) []netip.Addr {
	var list []netip.Addr
	for _, s := range texts {
		if s == "" {
			continue
		}
		var a netip.Addr
		var err error
		if strings.Contains(s, "/") {
			var p netip.Prefix
			p, err = netip.ParsePrefix(s)
			a = p.Addr()
		} else {
			a, err = netip.ParseAddr(s)
		}
		if a = a.Unmap(); err == nil && a.Zone() == "" && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	return slices.Clip(list)
}

func (n *Node) setAddr(s string, want dataplane.Family, field, example string) {
	if s == "" {
		return
	}
	p, err := store.ParseAddress(s)
	if err == nil {
		n.Addr.set(dataplane.FamilyOf(p.Addr()), p)
	}
	if n.AddrErr == nil && (err != nil || dataplane.FamilyOf(p.Addr()) != want) {
		n.AddrErr = fmt.Errorf("spec.bgp.%s %q: want %s", field, s, example)
	}
}

func setTunnel(to *Families[netip.Addr], s string) {
	if s == "" {
		return
	}
	if p, err := store.ParseAddress(s); err == nil {
		to.set(dataplane.FamilyOf(p.Addr()), p.Addr())
	}
}

// macOf reads a MAC address; zero: there is none.
func macOf(s string) dataplane.MAC {
	if s == "" {
		return dataplane.MAC{}
	}
	m, _ := dataplane.ParseMAC(s)
	return m
}
