package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// Underlay says which address families the network between the hosts has.
type Underlay string

// The underlays.
const (
	UnderlayIPv4 Underlay = "ipv4"
	UnderlayIPv6 Underlay = "ipv6"
	UnderlayDual Underlay = "dual"
)

// Underlays lists all of them.
func Underlays() []Underlay { return []Underlay{UnderlayIPv4, UnderlayIPv6, UnderlayDual} }

func (u Underlay) has4() bool { return u != UnderlayIPv6 }
func (u Underlay) has6() bool { return u == UnderlayIPv6 || u == UnderlayDual }

const defaultBlock6 = 122

// defaultPool6 fills in what the IPv6 pool leaves out; its encapsulation is
// that of the IPv4 pool.
func (t *Topology) defaultPool6() {
	if t.Pool6 == nil {
		return
	}
	p := *t.Pool6 // the caller's stays as it is
	setDefault(&p.CIDR, netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, 2, 0x44}), 48))
	setDefault(&p.Encapsulation, t.Pool.Encapsulation)
	setDefault(&p.BlockSize, defaultBlock6)
	t.Pool6 = &p
}

// defaultCIDRs gives the racks IPv6 prefixes where the underlay has IPv6, and
// takes away IPv4 ones where it has not.
func (t *Topology) defaultCIDRs() {
	for i := range t.Racks {
		if t.Underlay.has6() {
			setDefault(&t.Racks[i].CIDR6, netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, byte(i + 1)}), 64))
		}
		if !t.Underlay.has4() {
			t.Racks[i].CIDR = netip.Prefix{}
		}
	}
}

func (t Topology) checkIPv6() error {
	if !slices.Contains(Underlays(), t.Underlay) {
		return fmt.Errorf("underlay %q: want one of %v", t.Underlay, Underlays())
	}
	var errs []error
	if t.Pool6 != nil {
		errs = append(errs, t.Pool6.check6())
	}
	for i, r := range t.Racks {
		at := fmt.Sprintf("racks[%d] (%s).cidr6 %s", i, r.Name, r.CIDR6)
		switch {
		case !t.Underlay.has6():
			if r.CIDR6.IsValid() {
				errs = append(errs, fmt.Errorf("%s: the underlay has no IPv6; set underlay: dual", at))
			}
			continue
		case !r.CIDR6.Addr().Is6() || r.CIDR6 != r.CIDR6.Masked() || r.CIDR6.Bits() > 112:
			errs = append(errs, fmt.Errorf("%s: want an IPv6 prefix without host bits, /112 or shorter", at))
			continue
		case t.Pool6 != nil && t.Pool6.CIDR.Overlaps(r.CIDR6):
			errs = append(errs, fmt.Errorf("%s overlaps pool6.cidr %s: choose another", at, t.Pool6.CIDR))
		}
		for j, o := range t.Racks[:i] {
			if o.CIDR6.Overlaps(r.CIDR6) {
				errs = append(errs, fmt.Errorf("%s overlaps that of racks[%d], %s", at, j, o.CIDR6))
			}
		}
	}
	return errors.Join(append(errs, t.checkAddresses6()...)...)
}

func (t Topology) checkAddresses6() []error {
	var errs []error
	for i, n := range t.Nodes {
		rack, ok := t.rack(n.Rack)
		at := fmt.Sprintf("nodes[%d] (%s).address6 %s", i, n.Name, n.Address6)
		switch {
		case !ok: // checkNodes says so
		case !t.Underlay.has6():
			if n.Address6.IsValid() {
				errs = append(errs, fmt.Errorf("%s: the underlay has no IPv6; set underlay: dual", at))
			}
		case !rack.CIDR6.Contains(n.Address6) || n.Address6 == rack.CIDR6.Addr() || n.Address6 == rack.Gateway6():
			errs = append(errs, fmt.Errorf("%s: want a host address of %s other than the spine's, %s", at, rack.CIDR6, rack.Gateway6()))
		case slices.ContainsFunc(t.Nodes[:i], func(o Node) bool { return o.Address6 == n.Address6 }):
			errs = append(errs, fmt.Errorf("%s is also that of another node", at))
		}
	}
	return errs
}

func (p Pool) check6() error {
	if c := p.CIDR; !c.Addr().Is6() || c != c.Masked() {
		return fmt.Errorf("pool6.cidr %s: want an IPv6 prefix without host bits, such as fd00:10:244::/48", c)
	}
	if p.BlockSize < 116 || p.BlockSize > 128 || p.BlockSize < p.CIDR.Bits() {
		return fmt.Errorf("pool6.blockSize %d: want 116 to 128, and not shorter than the pool's own prefix", p.BlockSize)
	}
	return nil
}

// Addrs lists the host's addresses on the underlay, IPv4 first.
func (n Node) Addrs() []netip.Addr {
	return slices.DeleteFunc([]netip.Addr{n.Address, n.Address6}, func(a netip.Addr) bool { return !a.IsValid() })
}

// prefixes lists the host's addresses with their racks' prefix lengths, and
// the spine's address beside each.
func (n Node) prefixes(r Rack) (addrs []netip.Prefix, gateways []netip.Addr) {
	for _, a := range n.Addrs() {
		if a.Is4() {
			addrs, gateways = append(addrs, netip.PrefixFrom(a, r.CIDR.Bits())), append(gateways, r.Gateway())
		} else {
			addrs, gateways = append(addrs, netip.PrefixFrom(a, r.CIDR6.Bits())), append(gateways, r.Gateway6())
		}
	}
	return addrs, gateways
}

// prefixes lists the spine's addresses in the rack.
func (r Rack) prefixes() []netip.Prefix {
	var out []netip.Prefix
	for _, p := range []netip.Prefix{r.CIDR, r.CIDR6} {
		if p.IsValid() {
			out = append(out, netip.PrefixFrom(p.Addr().Next(), p.Bits()))
		}
	}
	return out
}

// AddrOf returns the address of a family of HOST or HOST/POD.
func (l *Lab) AddrOf(where string, f dataplane.Family) (netip.Addr, error) {
	addrs, err := l.Addrs(where)
	if err != nil {
		return netip.Addr{}, err
	}
	i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return dataplane.FamilyOf(a) == f })
	if i < 0 {
		return netip.Addr{}, fmt.Errorf("%s has no %s address", where, f)
	}
	return addrs[i], nil
}

// Addrs returns the addresses of HOST or HOST/POD, IPv4 first.
func (l *Lab) Addrs(where string) ([]netip.Addr, error) {
	host, pod := splitPod(where)
	n, ok := l.topology.node(host)
	if !ok {
		return nil, fmt.Errorf("host %s: not in lab %s; want one of %v", host, l.name, l.Hosts())
	}
	if pod == "" {
		return n.Addrs(), nil
	}
	p, err := l.Pod(host, pod)
	if err != nil {
		return nil, err
	}
	if len(p.Addrs) == 0 {
		return nil, fmt.Errorf("pod %s is not attached", p)
	}
	return p.Addrs, nil
}

// addressConfig is how a host's daemon finds its addresses.
func addressConfig(u Underlay) map[string]any {
	method := func(has bool) string {
		if has {
			return "interface=" + uplink
		}
		return "none"
	}
	return map[string]any{"ipv4": method(u.has4()), "ipv6": method(u.has6())}
}
