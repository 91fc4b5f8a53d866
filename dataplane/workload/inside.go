package workload

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// inside is the workload's side of a wire: its namespace and a netlink socket
// there.
type inside struct {
	ns      *namespace
	netlink *netlink.Handle
}

// enter opens the namespace of a workload.
func (w *Wire) enter(path string) (*inside, error) {
	ns, err := openNamespace(path)
	if err != nil {
		return nil, err
	}
	same, err := ns.same(w.host)
	if err == nil && same {
		err = fmt.Errorf("%s is the host's own network namespace: %w", path, ErrClash)
	}
	in := &inside{ns: ns}
	if err == nil {
		err = ns.do(func() (err error) {
			in.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE)
			return err
		})
	}
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
	if err := in.address(link, spec.Addresses); err != nil {
		return End{}, fmt.Errorf("%s in %s: %w", name, spec.Netns, err)
	}
	if a.Flags&net.FlagUp == 0 {
		if err := in.netlink.LinkSetUp(link); err != nil {
			return End{}, fmt.Errorf("set %s in %s up: %w", name, spec.Netns, err)
		}
	}
	if err := in.wayOut(link); err != nil {
		return End{}, fmt.Errorf("%s in %s: %w", name, spec.Netns, err)
	}
	// A new namespace inherits the host's setting, and this host is a router.
	forward := "0"
	if spec.Forwarding {
		forward = "1"
	}
	if err := in.ns.do(func() error { return writeSysctl("net/ipv4/ip_forward", forward) }); err != nil {
		return End{}, fmt.Errorf("%s: %w", spec.Netns, err)
	}
	var end End
	copy(end.MAC[:], a.HardwareAddr)
	return end, nil
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

// address makes want the device's IPv4 addresses. Others on it are left from
// an earlier try that got another address.
func (in *inside) address(link netlink.Link, want []netip.Addr) error {
	have, err := in.addresses(link)
	if err != nil {
		return err
	}
	wanted := make(map[netip.Prefix]bool, len(want))
	for _, a := range want {
		if !a.Is4() {
			return fmt.Errorf("address %s: only IPv4 is served", a)
		}
		p := netip.PrefixFrom(a, a.BitLen())
		wanted[p] = true
		if have[p] {
			continue
		}
		if err := in.netlink.AddrReplace(link, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
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

// addresses returns the IPv4 addresses on a device.
func (in *inside) addresses(link netlink.Link) (map[netip.Prefix]bool, error) {
	list, err := in.netlink.AddrList(link, unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	out := make(map[netip.Prefix]bool, len(list))
	for _, a := range list {
		if p, ok := prefixOf(a.IPNet); ok {
			out[p] = true
		}
	}
	return out, nil
}

// wayOut sets the routes to and through the gateway, and its neighbour entry.
// The entry makes the gateway reachable also while the host end would not
// answer for it: the kernel's proxy ARP wants a route to what was asked for
// that leads elsewhere, which a host without a default route does not have.
func (in *inside) wayOut(link netlink.Link) error {
	gw := Gateway(dataplane.IPv4)
	index := link.Attrs().Index
	onLink := &netlink.Route{
		LinkIndex: index,
		Dst:       ipNet(netip.PrefixFrom(gw, gw.BitLen())),
		Scope:     netlink.SCOPE_LINK,
	}
	if err := in.route(onLink); err != nil {
		return fmt.Errorf("add route to %s: %w", gw, err)
	}
	if err := in.route(&netlink.Route{LinkIndex: index, Gw: gw.AsSlice()}); err != nil {
		return fmt.Errorf("add default route via %s: %w", gw, err)
	}
	mac := HostMAC()
	n := &netlink.Neigh{
		LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
		IP: gw.AsSlice(), HardwareAddr: mac[:],
	}
	if err := in.netlink.NeighSet(n); err != nil {
		return fmt.Errorf("add neighbour %s: %w", gw, err)
	}
	return nil
}

// route makes r a route of its device, without taking one from another device:
// a container's second interface has the same gateway as its first, and the
// first would be cut off. What is second gets a metric of its own, so that it
// takes over when the first goes.
func (in *inside) route(r *netlink.Route) error {
	err := in.netlink.RouteAdd(r)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	routes, err := in.netlink.RouteList(nil, unix.AF_INET)
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, have := range routes {
		if have.Priority == 0 && have.LinkIndex != r.LinkIndex && destination(have) == destination(*r) {
			r.Priority = r.LinkIndex
		}
	}
	return in.netlink.RouteReplace(r)
}

// destination is where an IPv4 route leads; a default route may have none.
func destination(r netlink.Route) netip.Prefix {
	if p, ok := prefixOf(r.Dst); ok {
		return p
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
