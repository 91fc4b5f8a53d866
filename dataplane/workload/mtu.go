package workload

import (
	"context"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
)

// SetMTU gives both ends of a wire the MTU of spec, in bytes, while packets
// flow. It may be repeated after it was cut short anywhere. The error matches
// [ErrNoNamespace] when the workload's namespace is gone and [ErrDiffers] when
// the wire is not there.
//
// A veth drops what it receives if that is more than 4 bytes above its own MTU
// and not to be segmented (is_skb_forwardable in net/core/dev.c), and tells
// nobody. So the end that sends is made smaller before the one that receives,
// and larger after it: the workload's end is the first to be lowered and the
// last to be raised. What goes the other way is the caller's part: while
// SetMTU runs the host's routes to the workload must say the smaller of the two
// MTUs (RTAX_MTU), so that the host answers with ICMP instead of handing the
// workload's end what it would drop.
//
// ours are the MTUs that routerd gave the wire before, and so is what the
// host's end has. A workload's end with an MTU below spec's that is none of
// them was lowered by somebody who had a reason, and stays as it is.
func (w *Wire) SetMTU(ctx context.Context, spec Spec, ours ...int) error {
	in, err := w.enter(spec.Netns)
	if err != nil {
		return err
	}
	defer in.close()
	host, err := w.standing(spec, in)
	if err != nil {
		return err
	}
	name := spec.Owner.Interface
	inner, err := linkByName(in.netlink, name)
	if err != nil {
		return err
	}
	if inner == nil {
		return fmt.Errorf("interface %s vanished from %s: %w", name, spec.Netns, ErrNoNamespace)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	inside := func() error {
		have := inner.Attrs().MTU
		if have < spec.MTU && have != host.Attrs().MTU && !slices.Contains(ours, have) {
			return nil
		}
		return setMTU(in.netlink, inner, spec.MTU, " in "+spec.Netns)
	}
	outside := func() error { return setMTU(w.netlink, host, spec.MTU, "") }
	first, second := inside, outside
	if host.Attrs().MTU < spec.MTU {
		first, second = outside, inside
	}
	if err := first(); err != nil {
		return err
	}
	return second()
}

func setMTU(h *netlink.Handle, link netlink.Link, mtu int, where string) error {
	a := link.Attrs()
	if a.MTU == mtu {
		return nil
	}
	if err := h.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("set MTU of %s%s to %d: %w", a.Name, where, mtu, err)
	}
	return nil
}
