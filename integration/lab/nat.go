package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// NATKind is what the router of a rack translates (RFC 2663).
type NATKind string

// The kinds of NAT.
const (
	// NATBasic gives each host a public address of its own, as the clouds do.
	NATBasic NATKind = "basic"
	// NATPort lets all hosts share one public address; whoever was not sent to
	// does not get in.
	NATPort NATKind = "port"
)

// NAT puts a rack behind a router of its own that translates addresses. The
// spine knows no route to the rack, only to the public addresses.
type NAT struct {
	Kind   NATKind      `json:"kind"`
	Public netip.Prefix `json:"public,omitzero"` // default: 198.18.0.0/24, 198.18.1.0/24, … by rack
}

// transit is the router's device towards the spine.
const transit = "transit"

func (r Rack) translated() bool { return r.NAT != nil }

// defaultNAT fills in the public prefixes.
func (t *Topology) defaultNAT() {
	for i := range t.Racks {
		if r := &t.Racks[i]; r.translated() {
			n := *r.NAT // the caller's stays as it is
			setDefault(&n.Public, netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i), 0}), 24))
			r.NAT = &n
		}
	}
}

func (t Topology) checkNAT() error {
	var errs []error
	for i, r := range t.Racks {
		if !r.translated() {
			continue
		}
		at := fmt.Sprintf("racks[%d] (%s).nat", i, r.Name)
		if k := r.NAT.Kind; k != NATBasic && k != NATPort {
			errs = append(errs, fmt.Errorf("%s.kind %q: want %s or %s", at, k, NATBasic, NATPort))
		}
		if p := r.NAT.Public; !p.Addr().Is4() || p != p.Masked() || p.Bits() > r.CIDR.Bits() {
			errs = append(errs, fmt.Errorf("%s.public %s: want an IPv4 prefix without host bits that is as large as the rack's, %s", at, p, r.CIDR))
		}
		if t.Underlay.has6() {
			errs = append(errs, fmt.Errorf("%s: only IPv4 is translated: set underlay: ipv4", at))
		}
		if *t.Spine.BGP {
			errs = append(errs, fmt.Errorf("%s: the spine cannot be a BGP peer of hosts behind NAT: set spine.bgp: false and an encapsulation", at))
		}
		for j, o := range t.Racks {
			if o.CIDR.Overlaps(r.NAT.Public) || j < i && o.translated() && o.NAT.Public.Overlaps(r.NAT.Public) {
				errs = append(errs, fmt.Errorf("%s.public %s overlaps a prefix of racks[%d] (%s)", at, r.NAT.Public, j, o.Name))
			}
		}
	}
	if len(t.Nodes) > 0 {
		if r, ok := t.rack(t.Nodes[0].Rack); ok && r.translated() {
			errs = append(errs, fmt.Errorf("nodes[0] (%s) runs the store, which all must reach: put it into a rack without nat", t.Nodes[0].Name))
		}
	}
	return errors.Join(errs...)
}

// routerSpace is the namespace of the router whose interface a rack's hosts are
// connected to.
func (r Rack) routerSpace(lab string) string {
	if r.translated() {
		return lab + "-" + r.Name
	}
	return lab + "-" + spineName
}

// routers lists the names of the racks with routers of their own.
func (t Topology) routers() []string {
	var out []string
	for _, r := range t.Racks {
		if r.translated() {
			out = append(out, r.Name)
		}
	}
	return out
}

// publicAddress is where the world sends to for a host behind NAT.
func (r Rack) publicAddress(n Node) netip.Addr {
	a := r.NAT.Public.Addr().Next()
	if r.NAT.Kind == NATPort {
		return a
	}
	for b := r.CIDR.Addr().Next(); b != n.Address; b = b.Next() {
		a = a.Next()
	}
	return a
}

// PublicAddress returns the address as which the world sees a host behind NAT,
// as the topology has it.
func (l *Lab) PublicAddress(host string) (netip.Addr, error) {
	n, ok := l.topology.node(host)
	if !ok {
		return netip.Addr{}, fmt.Errorf("host %s: not in lab %s; want one of %v", host, l.name, l.Hosts())
	}
	r, _ := l.topology.rack(n.Rack)
	if !r.translated() {
		return netip.Addr{}, fmt.Errorf("host %s: its rack %s is not behind NAT", host, r.Name)
	}
	return r.publicAddress(n), nil
}

// addRouter makes the router of a rack behind NAT and connects it to the
// spine. number tells its transit network from others.
func (s *space) addRouter(ctx context.Context, lab string, number int, t Topology, r Rack) error {
	router, err := openSpace(r.routerSpace(lab))
	if err != nil {
		return err
	}
	defer router.close()
	if err := setSysctls(router.name, routerSysctls()); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = r.Name, r.MTU
	wire := &netlink.Veth{LinkAttrs: attrs, PeerName: transit, PeerTxQLen: -1, PeerNamespace: netlink.NsFd(router.fd), PeerMTU: uint32(r.MTU)}
	if err := addLink(modulePatience, func() error { return s.h.LinkAdd(wire) }); err != nil {
		return fmt.Errorf("add veth: %w", err)
	}
	near, far := netip.AddrFrom4([4]byte{100, 64, byte(number), 1}), netip.AddrFrom4([4]byte{100, 64, byte(number), 2})
	if err := errors.Join(
		settleIPv6(s.name, r.Name, false), settleIPv6(router.name, transit, false),
		s.address(r.Name, netip.PrefixFrom(near, 30)), s.up(r.Name),
		router.address(transit, netip.PrefixFrom(far, 30)), router.up(transit),
		router.addRack(r),
	); err != nil {
		return err
	}
	dst, err := netlink.ParseIPNet(r.NAT.Public.String())
	if err != nil {
		return err
	}
	if err := s.h.RouteAdd(&netlink.Route{Dst: dst, Gw: far.AsSlice()}); err != nil {
		return fmt.Errorf("add route to %s: %w", r.NAT.Public, err)
	}
	// What is not translated must not go back to the spine, and round and round.
	if err := router.h.RouteAdd(&netlink.Route{Dst: dst, Type: unix.RTN_BLACKHOLE}); err != nil {
		return fmt.Errorf("add blackhole route to %s: %w", r.NAT.Public, err)
	}
	if err := router.h.RouteAdd(&netlink.Route{Gw: near.AsSlice()}); err != nil {
		return fmt.Errorf("add default route via %s: %w", near, err)
	}
	public := map[string]netip.Addr{}
	for _, n := range t.Nodes {
		if n.Rack == r.Name {
			public[n.Name] = r.publicAddress(n)
		}
	}
	return loadRules(ctx, router.name, natRules(t, r, public))
}

// natRules renders the translation for a rack, whatever was there before.
func natRules(t Topology, r Rack, public map[string]netip.Addr) string {
	var b strings.Builder
	b.WriteString("table ip lab_nat\ndelete table ip lab_nat\ntable ip lab_nat {\n")
	if r.NAT.Kind == NATPort {
		a := r.NAT.Public.Addr().Next()
		fmt.Fprintf(&b, `	chain postrouting {
		type nat hook postrouting priority srcnat;
		oifname %s meta l4proto { tcp, udp } snat to %s:20000-39999 random
		oifname %s snat to %s
	}
}
`, transit, a, transit, a)
		return b.String()
	}
	var in, out []string
	for _, n := range t.Nodes {
		if a, ok := public[n.Name]; ok && n.Rack == r.Name {
			in = append(in, fmt.Sprintf("%s : %s", a, n.Address))
			out = append(out, fmt.Sprintf("%s : %s", n.Address, a))
		}
	}
	slices.Sort(in)
	slices.Sort(out)
	fmt.Fprintf(&b, `	chain prerouting {
		type nat hook prerouting priority dstnat;
		iifname %s dnat to ip daddr map { %s }
	}
	chain postrouting {
		type nat hook postrouting priority srcnat;
		oifname %s snat to ip saddr map { %s }
	}
}
`, transit, strings.Join(in, ", "), transit, strings.Join(out, ", "))
	return b.String()
}

// loadRules runs nft(8) in a namespace.
func loadRules(ctx context.Context, space, rules string) error {
	return ns.Do(space, func() error {
		cmd := exec.CommandContext(ctx, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("load rules in %s: nft: %w: %s", space, err, strings.TrimSpace(string(out)))
		}
		return nil
	})
}

// ResetNAT makes the router of a rack forget every translation, as a restart
// of it would.
func (l *Lab) ResetNAT(rack string) error {
	r, ok := l.topology.rack(rack)
	if !ok || !r.translated() {
		return fmt.Errorf("rack %s: not behind NAT; want one of %v", rack, l.topology.routers())
	}
	router, err := openSpace(r.routerSpace(l.name))
	if err != nil {
		return err
	}
	defer router.close()
	h, err := netlink.NewHandleAt(router.fd, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netfilter in %s: %w", router.name, err)
	}
	defer h.Close()
	if err := h.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		return fmt.Errorf("flush translations in %s: %w", router.name, err)
	}
	return nil
}

// MovePublicAddress gives a host behind basic NAT another public address of the
// rack's and takes the old one away, as a cloud does with an instance that was
// stopped and started again.
func (l *Lab) MovePublicAddress(ctx context.Context, host string, to netip.Addr) error {
	n, ok := l.topology.node(host)
	if !ok {
		return fmt.Errorf("host %s: not in lab %s; want one of %v", host, l.name, l.Hosts())
	}
	r, _ := l.topology.rack(n.Rack)
	if !r.translated() || r.NAT.Kind != NATBasic || !r.NAT.Public.Contains(to) {
		return fmt.Errorf("move host %s to %s: want a host of a rack with nat of kind %s, and an address of its public prefix", host, to, NATBasic)
	}
	public := map[string]netip.Addr{}
	for _, o := range l.topology.Nodes {
		if o.Rack == r.Name {
			public[o.Name] = r.publicAddress(o)
		}
	}
	public[host] = to
	if err := loadRules(ctx, r.routerSpace(l.name), natRules(l.topology, r, public)); err != nil {
		return err
	}
	return l.ResetNAT(r.Name)
}
