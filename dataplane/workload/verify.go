package workload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// ErrDiffers says that a wire is not as it was made.
var ErrDiffers = errors.New("not as it was made")

// Verify compares the wire with spec and mac, the MAC of the workload's end
// (zero: any). It changes nothing. The error matches [ErrDiffers] and names
// every difference; [ErrNoNamespace] when the namespace is gone.
func (w *Wire) Verify(_ context.Context, spec Spec, mac dataplane.MAC) error {
	in, err := w.enter(spec.Netns)
	if err != nil {
		return err
	}
	defer in.close()

	host, err := w.standing(spec, in)
	if err != nil {
		return err
	}
	d := new(differences)
	hostMAC := HostMAC()
	d.link(host, spec.Device, hostMAC)
	if have := host.Attrs().MTU; have != spec.MTU {
		d.add("device %s has the MTU %d, want %d", spec.Device, have, spec.MTU)
	}
	if err := w.verifyHostIPv6(host, spec, d); err != nil {
		return err
	}
	if err := in.verify(spec, mac, d); err != nil {
		return err
	}
	return d.err()
}

// standing returns the host's end of a wire that is there. The error matches [ErrDiffers] where it is not.
func (w *Wire) standing(spec Spec, in *inside) (netlink.Link, error) {
	host, err := w.lookup(spec.Device)
	if err != nil {
		return nil, err
	}
	if host == nil {
		return nil, fmt.Errorf("device %s is missing: %w", spec.Device, ErrDiffers)
	}
	if a := host.Attrs(); a.Alias != spec.Owner.Alias() {
		return nil, fmt.Errorf("device %s has the alias %q, want %q: %w", spec.Device, a.Alias, spec.Owner.Alias(), ErrDiffers)
	}
	ok, err := w.paired(host, spec.Owner.Interface, in)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("device %s is not connected to %s in %s: %w", spec.Device, spec.Owner.Interface, spec.Netns, ErrDiffers)
	}
	return host, nil
}

// differences collects what is not as it should be.
type differences struct{ all []error }

func (d *differences) add(format string, args ...any) {
	d.all = append(d.all, fmt.Errorf(format+": %w", append(args, ErrDiffers)...))
}

func (d *differences) err() error { return errors.Join(d.all...) }

func (d *differences) link(l netlink.Link, name string, mac dataplane.MAC) {
	a := l.Attrs()
	if a.Flags&net.FlagUp == 0 {
		d.add("device %s is down", name)
	}
	if !mac.IsZero() && a.HardwareAddr.String() != mac.String() {
		d.add("device %s has the MAC address %s, want %s", name, a.HardwareAddr, mac)
	}
}

func (in *inside) verify(spec Spec, mac dataplane.MAC, d *differences) error {
	name := spec.Owner.Interface
	link, err := linkByName(in.netlink, name)
	if err != nil {
		return err
	}
	if link == nil {
		d.add("interface %s is missing in %s", name, spec.Netns)
		return nil
	}
	d.link(link, name, mac)
	// A lower one was set inside on purpose; see SetMTU.
	if have := link.Attrs().MTU; have > spec.MTU {
		d.add("device %s has the MTU %d, want %d", name, have, spec.MTU)
	}
	have, err := in.addresses(link)
	if err != nil {
		return err
	}
	for _, a := range spec.Addresses {
		if !have[netip.PrefixFrom(a, a.BitLen())] {
			d.add("address %s is missing on %s in %s", a, name, spec.Netns)
		}
	}
	for _, f := range familiesOf(spec.Addresses) {
		if err := in.verifyWayOut(link, f, spec, d); err != nil {
			return err
		}
	}
	return nil
}

// verifyHostIPv6 verifies that the host end is the IPv6 gateway of a workload
// that needs one.
func (w *Wire) verifyHostIPv6(host netlink.Link, spec Spec, d *differences) error {
	if !slices.Contains(familiesOf(spec.Addresses), dataplane.IPv6) {
		return nil
	}
	list, err := whole(func() ([]netlink.Addr, error) { return w.netlink.AddrList(host, unix.AF_INET6) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", spec.Device, err)
	}
	gw := Gateway(dataplane.IPv6)
	if !slices.ContainsFunc(list, func(a netlink.Addr) bool { return a.IP.Equal(gw.AsSlice()) }) {
		d.add("address %s is missing on %s", gw, spec.Device)
	}
	return nil
}

func (in *inside) verifyWayOut(link netlink.Link, f dataplane.Family, spec Spec, d *differences) error {
	gw := Gateway(f)
	index := link.Attrs().Index
	routes, err := whole(func() ([]netlink.Route, error) { return in.netlink.RouteList(link, afOf(f)) })
	if err != nil {
		return fmt.Errorf("list routes in %s: %w", spec.Netns, err)
	}
	onLink := f == dataplane.IPv6 // a link-local gateway needs no route
	deflt := false
	for _, r := range routes {
		p, ok := prefixOf(r.Dst)
		switch {
		case ok && p == netip.PrefixFrom(gw, gw.BitLen()) && r.Scope == netlink.SCOPE_LINK:
			onLink = true
		case (!ok || p.Bits() == 0) && r.Gw.Equal(gw.AsSlice()):
			deflt = true
		}
	}
	if !onLink {
		d.add("route to %s is missing in %s", gw, spec.Netns)
	}
	if !deflt {
		d.add("default route via %s is missing in %s", gw, spec.Netns)
	}
	neighs, err := whole(func() ([]netlink.Neigh, error) { return in.netlink.NeighList(index, afOf(f)) })
	if err != nil {
		return fmt.Errorf("list neighbours in %s: %w", spec.Netns, err)
	}
	want := HostMAC()
	for _, n := range neighs {
		if n.IP.Equal(gw.AsSlice()) && n.HardwareAddr.String() != want.String() && n.HardwareAddr != nil {
			d.add("neighbour %s has the MAC address %s in %s, want %s", gw, n.HardwareAddr, spec.Netns, want)
		}
	}
	return nil
}

// VerifyRoute verifies that the host sends packets for a workload's address to
// device. The error matches [ErrDiffers].
func (w *Wire) VerifyRoute(_ context.Context, device string, addr netip.Addr) error {
	host, err := w.lookup(device)
	if err != nil {
		return err
	}
	routes, err := w.netlink.RouteGet(addr.AsSlice())
	if err != nil && !leadsNowhere(err) {
		return fmt.Errorf("look up the route to %s: %w", addr, err)
	}
	for _, r := range routes {
		if host != nil && r.LinkIndex == host.Attrs().Index && len(r.Gw) == 0 {
			return nil
		}
	}
	return fmt.Errorf("the host's route to %s does not lead to %s: %w", addr, device, ErrDiffers)
}

// leadsNowhere reports whether a route lookup's error says that there is none,
// or one that drops: EINVAL is a blackhole's, such as that of the own block,
// and EACCES a prohibit's.
func leadsNowhere(err error) bool {
	return errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) ||
		errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EACCES)
}
