package ipam

import (
	"context"
	"fmt"

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

// EnsureTunnel returns the address of this node's tunnel of a kind. The one
// that it has is kept while an enabled pool of the encapsulation that selects
// the node contains it; else there is a new one, and the old one is released
// thereafter. An error that matches [ErrNoPool] says that no pool needs the
// tunnel: then call [Allocator.ReleaseTunnel]. It is to be called at start and
// whenever pools or the node's labels change.
func (a *Allocator) EnsureTunnel(ctx context.Context, kind TunnelKind) (Assignment, error) {
	handle := kind.Handle(a.cfg.Node)
	if handle == "" {
		return Assignment{}, fmt.Errorf("%w: %s", ErrInvalidRequest, kind)
	}
	got, err := a.Assign(ctx, Request{
		Family: kind.family(), Handle: handle, Use: Tunnel, Idempotent: true, tunnel: &kind,
		Attributes: map[string]string{AttrType: kind.attrType()},
	})
	if err != nil {
		return Assignment{}, err
	}
	all, err := a.ByHandle(ctx, handle)
	if err != nil {
		return Assignment{}, err
	}
	var old []Claim
	for _, o := range all {
		if o.Addr != got[0].Addr {
			old = append(old, Claim{Addr: o.Addr, Handle: handle, Sequence: o.Sequence})
		}
	}
	if len(old) > 0 {
		if _, err := a.Release(ctx, old...); err != nil {
			return Assignment{}, err
		}
	}
	return got[0], nil
}

// ReleaseTunnel releases the address of this node's tunnel of a kind, if it
// has one.
func (a *Allocator) ReleaseTunnel(ctx context.Context, kind TunnelKind) error {
	_, err := a.ReleaseHandle(ctx, kind.Handle(a.cfg.Node))
	return err
}
