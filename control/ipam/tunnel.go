package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// TunnelKind is a device of this node that needs an address from the pools
// whose packets it carries.
type TunnelKind uint8

// The kinds of tunnels.
const (
	IPIPTunnel    TunnelKind = iota + 1 // tunl0
	VXLANTunnel                         // vxlan.calico
	VXLANv6Tunnel                       // vxlan-v6.calico
	IPIPv6Tunnel                        // tunl6.calico, which Calico does not have
)

func (k TunnelKind) String() string {
	switch k {
	case IPIPTunnel:
		return "IPIP tunnel"
	case VXLANTunnel:
		return "VXLAN tunnel"
	case VXLANv6Tunnel:
		return "IPv6 VXLAN tunnel"
	case IPIPv6Tunnel:
		return "IPv6 IPIP tunnel"
	}
	return fmt.Sprintf("tunnel kind %d", uint8(k))
}

// Handle returns the handle that holds the address of a node's tunnel, in
// Calico's form.
func (k TunnelKind) Handle(node string) string {
	switch k {
	case IPIPTunnel:
		return "ipip-tunnel-addr-" + node
	case VXLANTunnel:
		return "vxlan-tunnel-addr-" + node
	case VXLANv6Tunnel:
		return "vxlan-v6-tunnel-addr-" + node
	case IPIPv6Tunnel:
		return "ipip-v6-tunnel-addr-" + node
	}
	return ""
}

func (k TunnelKind) attrType() string {
	switch k {
	case IPIPTunnel:
		return "ipipTunnelAddress"
	case VXLANTunnel:
		return "vxlanTunnelAddress"
	case VXLANv6Tunnel:
		return "vxlanV6TunnelAddress"
	case IPIPv6Tunnel:
		return "ipipV6TunnelAddress"
	}
	return ""
}

// family returns the family of the addresses inside the tunnel.
func (k TunnelKind) family() dataplane.Family {
	if k == VXLANv6Tunnel || k == IPIPv6Tunnel {
		return dataplane.IPv6
	}
	return dataplane.IPv4
}

// carries reports whether pools with this encapsulation use the tunnel.
func (k TunnelKind) carries(e store.Encapsulation) bool {
	if k == IPIPTunnel || k == IPIPv6Tunnel {
		return e == store.IPIP || e == store.IPIPCrossSubnet
	}
	return e == store.VXLAN || e == store.VXLANCrossSubnet
}

// EnsureTunnel returns the address of this node's tunnel of a kind, and those
// that it held before and that are to be released with
// [Allocator.ReleaseTunnel] once no device uses them any more.
//
// The one that it has is kept while an enabled pool of the encapsulation that
// selects the node contains it; else there is a new one. Where there is none
// to be had from an enabled pool, the one that it has is kept as long as its
// pool exists: a disabled pool gives no new addresses, but its packets are
// still carried. One that is leaving, which no device has any more and which is
// about to be released, is not. An error that matches [ErrNoPool] says that no pool needs the
// tunnel. It is to be called at start and whenever pools or the node's labels
// change.
func (a *Allocator) EnsureTunnel(ctx context.Context, kind TunnelKind, leaving bool) (Assignment, []Assignment, error) {
	handle := kind.Handle(a.cfg.Node)
	if handle == "" {
		return Assignment{}, nil, fmt.Errorf("%w: %s", ErrInvalidRequest, kind)
	}
	got, failed := a.Assign(ctx, Request{
		Family: kind.family(), Handle: handle, Use: Tunnel, Idempotent: true, tunnel: &kind,
		Attributes: map[string]string{AttrType: kind.attrType()},
	})
	if failed != nil && !errors.Is(failed, ErrNoPool) {
		return Assignment{}, nil, failed
	}
	all, err := a.ByHandle(ctx, handle)
	if err != nil {
		return Assignment{}, nil, err
	}
	var use Assignment
	if failed == nil {
		use = got[0]
	} else if i := slices.IndexFunc(all, func(o Assignment) bool { return !leaving && a.stillCarries(kind, o) }); i >= 0 {
		use = all[i]
	} else {
		return Assignment{}, nil, failed
	}
	return use, slices.DeleteFunc(all, func(o Assignment) bool { return o.Addr == use.Addr }), nil
}

// stillCarries reports whether the address of a tunnel lies in a pool of its
// encapsulation that selects the node, though it gives no new ones.
func (a *Allocator) stillCarries(kind TunnelKind, o Assignment) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state.stillCarries(kind, o.Block)
}

func (s *state) stillCarries(kind TunnelKind, block netip.Prefix) bool {
	p := s.poolOf(block)
	return p != nil && kind.carries(p.encap) && p.nodes.Matches(s.labels)
}

// ReleaseTunnel releases the addresses of this node's tunnel of a kind other
// than keep; with an invalid keep, all of them.
func (a *Allocator) ReleaseTunnel(ctx context.Context, kind TunnelKind, keep netip.Addr) error {
	handle := kind.Handle(a.cfg.Node)
	if !keep.IsValid() {
		_, err := a.ReleaseHandle(ctx, handle)
		return err
	}
	all, err := a.ByHandle(ctx, handle)
	if err != nil {
		return err
	}
	var old []Claim
	for _, o := range all {
		if o.Addr != keep {
			old = append(old, Claim{Addr: o.Addr, Handle: handle, Sequence: o.Sequence})
		}
	}
	_, err = a.Release(ctx, old...)
	return err
}
