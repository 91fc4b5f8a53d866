package workload

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// inside is the workload's side of a wire: its namespace and a netlink socket
// there.
type inside struct {
	sysctls settings
	ns      *namespace
	netlink *netlink.Handle
}

// foreignNamespace opens the namespace of a workload, which is not the host's.
func (w *Wire) foreignNamespace(path string) (*namespace, error) {
	ns, err := openNamespace(path)
	if err != nil {
		return nil, err
	}
	same, err := ns.same(w.host)
	if err == nil && same {
		err = fmt.Errorf("%s is the host's own network namespace: %w", path, ErrClash)
	}
	if err != nil {
		ns.close()
		return nil, err
	}
	return ns, nil
}

// enter opens the namespace of a workload.
func (w *Wire) enter(path string) (*inside, error) {
	ns, err := w.foreignNamespace(path)
	if err != nil {
		return nil, err
	}
	in := &inside{sysctls: w.sysctls, ns: ns}
	err = ns.do(func() (err error) {
		in.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		ns.close()
		return nil, err
	}
	return in, nil
}

func (in *inside) close() {
	in.netlink.Close()
	in.ns.close()
}

// configure gives the workload's end what spec says.
func (in *inside) configure(spec Spec) (End, error) {
	if err := in.loopbackUp(); err != nil {
		return End{}, err
	}
	name := spec.Owner.Interface
	link, err := linkByName(in.netlink, name)
	if err != nil {
		return End{}, err
	}
	if link == nil {
		return End{}, fmt.Errorf("interface %s vanished from %s", name, spec.Netns)
	}
	a := link.Attrs()
	if err := setMTU(in.netlink, link, spec.MTU, " in "+spec.Netns); err != nil {
		return End{}, err
	}
	mac, err := in.setMAC(link, spec)
	if err != nil {
		return End{}, err
	}
	families := familiesOf(spec.Addresses)
	if slices.Contains(families, dataplane.IPv6) {
		if err := in.ns.do(func() error { return in.sysctls.enableIPv6(name) }); err != nil {
			return End{}, fmt.Errorf("%s in %s: %w", name, spec.Netns, err)
		}
	}
	if err := in.address(link, spec.Addresses); err != nil {
		return End{}, fmt.Errorf("%s in %s: %w", name, spec.Netns, err)
	}
	if a.Flags&net.FlagUp == 0 {
		if err := in.netlink.LinkSetUp(link); err != nil {
			return End{}, fmt.Errorf("set %s in %s up: %w", name, spec.Netns, err)
		}
	}
	for _, f := range families {
		if err := in.wayOut(link, f); err != nil {
			return End{}, fmt.Errorf("%s in %s: %w", name, spec.Netns, err)
		}
	}
	if err := in.ns.do(func() error { return in.sysctls.setForwarding(families, spec.Forwarding) }); err != nil {
		return End{}, fmt.Errorf("%s: %w", spec.Netns, err)
	}
	return End{MAC: mac}, nil
}

// setMAC gives a device the MAC that spec wants, and returns the one it has
// then.
func (in *inside) setMAC(link netlink.Link, spec Spec) (dataplane.MAC, error) {
	var have dataplane.MAC
	copy(have[:], link.Attrs().HardwareAddr)
	if spec.MAC.IsZero() || spec.MAC == have {
		return have, nil
	}
	if err := in.netlink.LinkSetHardwareAddr(link, spec.MAC[:]); err != nil {
		return have, fmt.Errorf("give %s in %s the MAC address %s: %w", spec.Owner.Interface, spec.Netns, spec.MAC, err)
	}
	return spec.MAC, nil
}

// setForwarding says whether the kernel of the calling thread's namespace
// forwards packets. A new namespace inherits the host's IPv4 setting, and this
// host is a router.
func (s settings) setForwarding(families []dataplane.Family, on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	names := []string{"net/ipv4/ip_forward"}
	if slices.Contains(families, dataplane.IPv6) {
		names = append(names, "net/ipv6/conf/all/forwarding")
	}
	for _, n := range names {
		if err := s.write(n, value); err != nil {
			return err
		}
	}
	return nil
}

func (in *inside) loopbackUp() error {
	lo, err := linkByName(in.netlink, "lo")
	if err != nil {
		return err
	}
	if lo == nil || lo.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := in.netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo in %s up: %w", in.ns.path, err)
	}
	return nil
}

// address makes want the device's addresses. Others on it are left from an
// earlier try that got another address. IPv6 addresses are used at once: IPAM
// has seen to it that they are unique, so that the kernel need not ask around
// for a second or two first (RFC 4862, section 5.4).
func (in *inside) address(link netlink.Link, want []netip.Addr) error {
	have, err := in.addresses(link)
	if err != nil {
		return err
	}
	wanted := make(map[netip.Prefix]bool, len(want))
	for _, a := range want {
		p := netip.PrefixFrom(a, a.BitLen())
		wanted[p] = true
		if have[p] {
			continue
		}
		if err := in.netlink.AddrReplace(link, withoutDAD(p)); err != nil {
			return fmt.Errorf("add address %s: %w", p, err)
		}
	}
	for p := range have {
		if wanted[p] {
			continue
		}
		if err := in.netlink.AddrDel(link, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
			return fmt.Errorf("remove address %s: %w", p, err)
		}
	}
	return nil
}

// withoutDAD is an address on a device; one of IPv6 skips duplicate address
// detection.
func withoutDAD(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if dataplane.FamilyOf(p.Addr()) == dataplane.IPv6 {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

// addresses returns the addresses on a device but those of the link alone,
// which the kernel makes.
func (in *inside) addresses(link netlink.Link) (map[netip.Prefix]bool, error) {
	out := map[netip.Prefix]bool{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := whole(func() ([]netlink.Addr, error) { return in.netlink.AddrList(link, family) })
		if err != nil {
			return nil, fmt.Errorf("list addresses: %w", err)
		}
		for _, a := range list {
			if p, ok := prefixOf(a.IPNet); ok && (p.Addr().Is4() || !p.Addr().IsLinkLocalUnicast()) {
				out[p] = true
			}
		}
	}
	return out, nil
}

// wayOut sets the routes to and through a family's gateway, and its neighbour
// entry. The entry makes the gateway reachable also while the host end would
// not answer for it: the kernel's proxy ARP wants a route to what was asked for
// that leads elsewhere, which a host without a default route does not have.
func (in *inside) wayOut(link netlink.Link, f dataplane.Family) error {
	gw := Gateway(f)
	index := link.Attrs().Index
	if f == dataplane.IPv4 { // IPv6's gateway is link-local, and so on the link
		onLink := &netlink.Route{
			LinkIndex: index,
			Dst:       ipNet(netip.PrefixFrom(gw, gw.BitLen())),
			Scope:     netlink.SCOPE_LINK,
		}
		if err := in.route(onLink, f); err != nil {
			return fmt.Errorf("add route to %s: %w", gw, err)
		}
	}
	if err := in.route(&netlink.Route{LinkIndex: index, Gw: gw.AsSlice()}, f); err != nil {
		return fmt.Errorf("add default route via %s: %w", gw, err)
	}
	mac := HostMAC()
	n := &netlink.Neigh{
		LinkIndex: index, Family: afOf(f), State: netlink.NUD_PERMANENT,
		IP: gw.AsSlice(), HardwareAddr: mac[:],
	}
	if err := in.netlink.NeighSet(n); err != nil {
		return fmt.Errorf("add neighbour %s: %w", gw, err)
	}
	return nil
}

// afOf returns the kernel's number of a family.
func afOf(f dataplane.Family) int {
	if f == dataplane.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// defaultMetric returns the metric of a route that was made with none.
func defaultMetric(f dataplane.Family) int {
	if f == dataplane.IPv6 {
		return 1024 // IP6_RT_PRIO_USER
	}
	return 0
}

// route makes r a route of its device, without taking one from another device:
// a container's second interface has the same gateway as its first, and the
// first would be cut off. What is second gets a metric of its own, so that it
// takes over when the first goes.
func (in *inside) route(r *netlink.Route, f dataplane.Family) error {
	err := in.netlink.RouteAdd(r)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	routes, err := whole(func() ([]netlink.Route, error) { return in.netlink.RouteList(nil, afOf(f)) })
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, have := range routes {
		if have.Priority == defaultMetric(f) && have.LinkIndex != r.LinkIndex && destination(have, f) == destination(*r, f) {
			r.Priority = defaultMetric(f) + r.LinkIndex
		}
	}
	return in.netlink.RouteReplace(r)
}

// destination is where a route of a family leads; a default route may have
// none.
func destination(r netlink.Route, f dataplane.Family) netip.Prefix {
	if p, ok := prefixOf(r.Dst); ok {
		return p
	}
	if f == dataplane.IPv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones), ok
}
