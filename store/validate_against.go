package store

import (
	"fmt"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// ValidateAgainst checks one resource beside the others that exist, or that
// are about to be written together with it. It is pure: the caller reads
// others from one revision of the store. Objects of kinds that do not matter
// to v are ignored, so a caller can pass everything it has; [RelatedKinds]
// says what is needed. An object of v's own kind and name among others is its
// present state: v is then an update of it.
//
// It looks for pools that overlap each other, or when they are new a node's
// network or a range of services, changes of what cannot be changed, block
// sizes at odds with blocks that exist, BGP filters that are referred to and
// missing, addresses that two nodes claim, and tiers that policies name and
// nobody made. The error is a [FieldErrors].
// Run [Validate] first; fields that it refuses are passed over here.
func ValidateAgainst(v any, others []Object) error {
	c := &checker{}
	switch o := v.(type) {
	case *v3.IPPool:
		c.poolAgainst(o, others)
	case *v3.BGPPeer:
		c.peerAgainst(o, others)
	case *Node:
		c.nodeAgainst(o, others)
	default:
		c.tierAgainst(v, others)
	}
	return c.errs.Err()
}

// RelatedKinds returns the kinds that [ValidateAgainst] looks at to judge an
// object of kind.
func RelatedKinds(kind Kind) []Kind {
	switch kind {
	case KindIPPool:
		return []Kind{KindIPPool, KindIPAMBlock, KindNode, KindBGPConfiguration}
	case KindBGPPeer:
		return []Kind{KindBGPFilter}
	case KindNode:
		return []Kind{KindNode}
	case KindNetworkPolicy, KindGlobalNetworkPolicy, KindStagedNetworkPolicy, KindStagedGlobalNetworkPolicy:
		return []Kind{KindTier}
	}
	return nil
}

func (c *checker) poolAgainst(p *v3.IPPool, others []Object) {
	cidr, err := netip.ParsePrefix(p.Spec.CIDR)
	if err != nil {
		return
	}
	exists := false
	for _, o := range others {
		old, ok := o.Value.(*v3.IPPool)
		if !ok {
			continue
		}
		if old.Name == p.Name {
			exists = true
			c.poolUpdate(old, p, cidr)
			continue
		}
		if other, err := netip.ParsePrefix(old.Spec.CIDR); err == nil && other.Overlaps(cidr) {
			c.add("spec.cidr", p.Spec.CIDR, "IPPool(%s) overlaps IPPool(%s) with CIDR %s; choose a range apart from it", p.Name, old.Name, old.Spec.CIDR)
		}
	}
	// A pool that exists may be at odds with what came later: it must still be
	// possible to disable it.
	if !exists {
		c.poolBlocks(p, cidr, others)
		c.poolServices(p, cidr, others)
		c.poolNodes(p, cidr, others)
	}
}

// poolServices refuses a pool in a range from which services get addresses:
// each would be a service on some hosts and a workload on others. Only the
// addresses of load balancers may be a pool's, of one that is for them.
func (c *checker) poolServices(p *v3.IPPool, cidr netip.Prefix, others []Object) {
	balancers := slices.Contains(p.Spec.AllowedUses, v3.IPPoolAllowedUseLoadBalancer)
	for _, o := range others {
		conf, ok := o.Value.(*v3.BGPConfiguration)
		if !ok {
			continue
		}
		check := func(field, service string) {
			if s, err := netip.ParsePrefix(service); err == nil && s.Overlaps(cidr) {
				c.add("spec.cidr", p.Spec.CIDR, "IPPool(%s) overlaps %s %s of BGPConfiguration(%s), from which services get addresses; choose a range apart from it",
					p.Name, field, service, conf.Name)
			}
		}
		for _, s := range conf.Spec.ServiceClusterIPs {
			check("serviceClusterIPs", s.CIDR)
		}
		for _, s := range conf.Spec.ServiceExternalIPs {
			check("serviceExternalIPs", s.CIDR)
		}
		for _, s := range conf.Spec.ServiceLoadBalancerIPs {
			if !balancers {
				check("serviceLoadBalancerIPs", s.CIDR)
			}
		}
	}
}

// poolNodes refuses a pool in a network that a node is attached to: the node's
// neighbours there would be taken for workloads. One refusal names one node;
// the others of its subnet would say the same.
func (c *checker) poolNodes(p *v3.IPPool, cidr netip.Prefix, others []Object) {
	for _, o := range others {
		n, ok := o.Value.(*Node)
		if !ok || n.Spec.BGP == nil {
			continue
		}
		for _, s := range []string{n.Spec.BGP.IPv4Address, n.Spec.BGP.IPv6Address} {
			if a, err := ParseAddress(s); err == nil && a.Overlaps(cidr) {
				c.add("spec.cidr", p.Spec.CIDR, "IPPool(%s) overlaps %s, the network of Node(%s), whose address is %s; choose a range apart from the hosts' networks",
					p.Name, a.Masked(), n.Name, s)
				return
			}
		}
	}
}

// poolUpdate compares a pool with what is stored. The stored one may be older
// than the defaults.
func (c *checker) poolUpdate(stored, p *v3.IPPool, cidr netip.Prefix) {
	old := stored.DeepCopy()
	SetDefaults(old)
	if was, err := netip.ParsePrefix(old.Spec.CIDR); err == nil && was != cidr {
		c.add("spec.cidr", p.Spec.CIDR, "cannot be changed from %s; make a new pool, disable this one, move the workloads, then delete it", old.Spec.CIDR)
		return
	}
	c.reject(old.Spec.BlockSize != p.Spec.BlockSize, "spec.blockSize", p.Spec.BlockSize, "cannot be changed from %d; make a new pool with the other size", old.Spec.BlockSize)
	was := slices.Contains(old.Spec.AllowedUses, v3.IPPoolAllowedUseLoadBalancer)
	is := slices.Contains(p.Spec.AllowedUses, v3.IPPoolAllowedUseLoadBalancer)
	c.reject(was != is, "spec.allowedUses", p.Spec.AllowedUses, "cannot be changed to or from LoadBalancer; it is %v", old.Spec.AllowedUses)
}

// poolBlocks refuses a new pool where blocks of another size, left by a pool
// before it, still hold addresses: both sizes would claim the same ones.
func (c *checker) poolBlocks(p *v3.IPPool, cidr netip.Prefix, others []Object) {
	for _, o := range others {
		if o.Key.Kind != KindIPAMBlock {
			continue
		}
		b := o.Key.CIDR()
		if b.IsValid() && b.Overlaps(cidr) && b.Bits() != p.Spec.BlockSize {
			c.add("spec.blockSize", p.Spec.BlockSize, "the block %s of size %d exists in %s; use blockSize %d, or release its addresses first",
				b, b.Bits(), p.Spec.CIDR, b.Bits())
			return
		}
	}
}

func (c *checker) peerAgainst(p *v3.BGPPeer, others []Object) {
	if len(p.Spec.Filters) == 0 {
		return
	}
	var have []string
	for _, o := range others {
		if f, ok := o.Value.(*v3.BGPFilter); ok {
			have = append(have, f.Name)
		}
	}
	slices.Sort(have)
	for i, f := range p.Spec.Filters {
		if slices.Contains(have, f) {
			continue
		}
		hint := "there is none yet"
		if len(have) > 0 {
			hint = fmt.Sprintf("there are %v", have)
		}
		c.add(index("spec.filters", i), f, "no BGPFilter of this name exists; create it first or in the same manifest (%s)", hint)
	}
}

func (c *checker) nodeAgainst(n *Node, others []Object) {
	if n.Spec.BGP == nil {
		return
	}
	for _, o := range others {
		other, ok := o.Value.(*Node)
		if !ok || other.Name == n.Name || other.Spec.BGP == nil {
			continue
		}
		for _, f := range []struct{ field, mine, theirs string }{
			{"spec.bgp.ipv4Address", n.Spec.BGP.IPv4Address, other.Spec.BGP.IPv4Address},
			{"spec.bgp.ipv6Address", n.Spec.BGP.IPv6Address, other.Spec.BGP.IPv6Address},
		} {
			mine, err := ParseAddress(f.mine)
			theirs, none := ParseAddress(f.theirs)
			c.reject(err == nil && none == nil && mine.Addr() == theirs.Addr(), f.field, f.mine, "Node(%s) cannot have the address of Node(%s), which is %s; give it one of its own", n.Name, other.Name, f.theirs)
		}
	}
}
