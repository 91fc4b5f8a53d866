package store

import (
	"fmt"
	"net/netip"
	"strings"
)

// ParseAddress reads an address as Node resources hold it: with its subnet's
// length, or without, and then it counts as a single address. The result is
// not masked.
func ParseAddress(s string) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		if p, err := netip.ParsePrefix(s); err == nil {
			return p, nil
		}
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("parse address %q: %w", s, err)
	}
	return netip.PrefixFrom(a, a.BitLen()), nil
}

// Addresses returns the valid addresses of an endpoint, which may be written with
// or without a length.
func (w *WorkloadEndpoint) Addresses() []netip.Addr { return addresses(w.Spec.IPNetworks...) }

// DeviceAddresses returns the addresses of a node's own tunnel devices.
func (n *Node) DeviceAddresses() []netip.Addr {
	list := []string{n.Spec.IPv4VXLANTunnelAddr, n.Spec.IPv6VXLANTunnelAddr, n.Annotations[AnnotationIPv6IPIPTunnelAddr]}
	if b := n.Spec.BGP; b != nil {
		list = append(list, b.IPv4IPIPTunnelAddr)
	}
	if w := n.Spec.Wireguard; w != nil {
		list = append(list, w.InterfaceIPv4Address, w.InterfaceIPv6Address)
	}
	return addresses(list...)
}

func addresses(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		if p, err := ParseAddress(s); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out
}
