package workload

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// How long the kernel's deferred work on a new wire may take, and how often it
// is asked. Nearly always it is done when it is asked first; there is no
// notification that could be told from those of before it.
const (
	settleTimeout = 10 * time.Second
	settleTick    = 500 * time.Microsecond
)

// settle waits until the first packet can pass. Two things the kernel leaves to
// its workers: to take up sending on a device whose carrier came after the
// device was set up, at either end (net/core/link_watch.c; only then may an
// IPv6 address of the kernel's own come too), and to add the local route of an
// IPv6 address, also of one without duplicate address detection
// (addrconf_dad_work).
func (w *Wire) settle(ctx context.Context, spec Spec, in *inside, host netlink.Link) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	for {
		lacking, err := w.unsettled(spec, in, host)
		if err != nil || lacking == "" {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", lacking, ctx.Err())
		}
	}
}

// unsettled says what the first packet lacks; empty: nothing.
func (w *Wire) unsettled(spec Spec, in *inside, host netlink.Link) (string, error) {
	name := spec.Owner.Interface
	for _, end := range []struct {
		netlink     *netlink.Handle
		name, where string
	}{{in.netlink, name, spec.Netns}, {w.netlink, spec.Device, "the host"}} {
		// Since Linux 6.8 the question itself makes the kernel catch up.
		link, err := linkByName(end.netlink, end.name)
		if err != nil {
			return "", err
		}
		if link == nil {
			return "", fmt.Errorf("interface %s vanished from %s", end.name, end.where)
		}
		if link.Attrs().OperState != netlink.OperUp {
			return fmt.Sprintf("%s in %s has a carrier", end.name, end.where), nil
		}
	}
	for _, a := range spec.Addresses {
		if a.Is4() {
			continue
		}
		if ok, err := isLocal(in.netlink, a, 0); !ok || err != nil {
			return fmt.Sprintf("%s in %s takes packets for %s", name, spec.Netns, a), err
		}
	}
	if gw := Gateway(dataplane.IPv6); slices.Contains(familiesOf(spec.Addresses), dataplane.IPv6) {
		if ok, err := isLocal(w.netlink, gw, host.Attrs().Index); !ok || err != nil {
			return fmt.Sprintf("%s takes packets for %s", spec.Device, gw), err
		}
	}
	return "", nil
}

// isLocal reports whether packets for an address, arriving by a device if one
// is given, are for the kernel itself.
func isLocal(h *netlink.Handle, a netip.Addr, index int) (bool, error) {
	routes, err := h.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{OifIndex: index})
	if err != nil && !leadsNowhere(err) {
		return false, fmt.Errorf("look up the route to %s: %w", a, err)
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Type == unix.RTN_LOCAL }), nil
}
