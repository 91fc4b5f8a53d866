package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// setReserved says anew what is given only to those who ask for it: what IPReservations
// have, what others than IPAM gave on this host and, where this node's addresses come out
// of its pod CIDRs, the rest of every pool, which other nodes have.
func (s *state) setReserved() {
	s.reserved = nil
	for _, r := range s.reservations {
		s.reserved = append(s.reserved, r...)
	}
	if !s.usePodCIDR {
		return
	}
	for _, o := range s.occupied {
		for _, p := range o {
			// A host may have thousands of others, such as those of Services.
			if containsAddr(s.podCIDRs, p.Addr()) {
				s.reserved = append(s.reserved, p)
			}
		}
	}
	for _, p := range s.pools {
		if p.cidr.IsValid() {
			s.reserved = append(s.reserved, without(p.cidr, s.podCIDRs)...)
		}
	}
}

// SetOccupied says which addresses on this host IPAM did not give and are in use
// nevertheless: those of pods that another network's plugin attached, and of the host's
// devices. by names who has them, for people; what it had before is replaced. None of them is given, not
// even to who asks for it. What a workload has already stays its own. It counts where
// addresses are those of the Node's pod CIDRs.
func (a *Allocator) SetOccupied(by string, addrs []netip.Prefix) {
	a.mu.Lock()
	same := slices.Equal(a.state.occupied[by], addrs)
	if !same {
		a.state.occupied[by] = slices.Clone(addrs)
		a.state.setReserved()
		a.remember()
	}
	a.mu.Unlock()
	if !same {
		a.reserveChanged.Set()
	}
}

// occupier returns who has an address without IPAM; empty: it is free.
func (s *state) occupier(a netip.Addr) string {
	if !s.usePodCIDR {
		return ""
	}
	for _, by := range slices.Sorted(maps.Keys(s.occupied)) {
		if containsAddr(s.occupied[by], a) {
			return by
		}
	}
	return ""
}

// rangesOf returns the parts of a pool that this node may have blocks in.
func (s *state) rangesOf(p *pool) []netip.Prefix {
	if !s.usePodCIDR {
		return []netip.Prefix{p.cidr}
	}
	var out []netip.Prefix
	for _, c := range s.podCIDRs {
		switch {
		case !c.Overlaps(p.cidr):
		case c.Bits() < p.cidr.Bits():
			out = append(out, p.cidr)
		default:
			out = append(out, c)
		}
	}
	return out
}

// foreign reports whether an address is outside of where this node's come from.
func (s *state) foreign(a netip.Addr) bool { return s.usePodCIDR && !containsAddr(s.podCIDRs, a) }

// outsidePodCIDRs says why an address is not given by what Kubernetes gave this node.
func (s *state) outsidePodCIDRs() string {
	if len(s.podCIDRs) == 0 {
		return fmt.Sprintf("ipam.usePodCIDR is set, and the Node %s has no spec.podCIDRs: have kube-controller-manager give it one (--allocate-node-cidrs, --cluster-cidr)", s.node)
	}
	return fmt.Sprintf("ipam.usePodCIDR is set, and the Node has the pod CIDRs %v", s.podCIDRs)
}

// without returns what of a range is in none of others, as prefixes in ascending order.
func without(p netip.Prefix, others []netip.Prefix) []netip.Prefix {
	switch {
	case slices.ContainsFunc(others, func(o netip.Prefix) bool { return o.Bits() <= p.Bits() && o.Contains(p.Addr()) }):
		return nil
	case !slices.ContainsFunc(others, p.Overlaps):
		return []netip.Prefix{p}
	}
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	high := after(p, low, p.Bits()+1)
	return append(without(low, others), without(high, others)...)
}
