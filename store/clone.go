package store

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Clone returns a deep copy of a Value of an [Object], which may then be
// changed. It panics on a type that no kind has.
func Clone(v any) any {
	switch v := v.(type) {
	case nil:
		return nil
	case runtime.Object: // the v3 types of Calico's API module
		return v.DeepCopyObject()
	case *Node:
		return v.clone()
	case *WorkloadEndpoint:
		return v.clone()
	case *Block:
		return v.clone()
	case *Affinity:
		return clonePtr(v)
	case *Handle:
		if v == nil {
			return v
		}
		c := *v
		c.Block = maps.Clone(v.Block)
		return &c
	case *IPAMConfig:
		if v == nil {
			return v
		}
		c := *v
		c.IPCooldownSeconds = clonePtr(v.IPCooldownSeconds)
		return &c
	case *Secret:
		if v == nil {
			return v
		}
		return &Secret{Key: slices.Clone(v.Key), Former: slices.Clone(v.Former)}
	case *Incarnation:
		if v == nil {
			return v
		}
		c := *v
		c.Addresses = slices.Clone(v.Addresses)
		return &c
	case *Change:
		if v == nil {
			return v
		}
		c := *v
		c.Objects = slices.Clone(v.Objects)
		for i := range c.Objects {
			c.Objects[i].Before, c.Objects[i].After = slices.Clone(c.Objects[i].Before), slices.Clone(c.Objects[i].After)
		}
		return &c
	case *Service:
		return v.clone()
	case *EndpointSlice:
		return v.clone()
	case *ServiceCIDR:
		if v == nil {
			return v
		}
		return &ServiceCIDR{CIDRs: slices.Clone(v.CIDRs)}
	case *Unconfirmed:
		if v == nil {
			return v
		}
		c := *v
		return &c
	}
	panic("store: clone of a value of no kind")
}

func (n *Node) clone() *Node {
	if n == nil {
		return nil
	}
	c := *n
	c.ObjectMeta = *n.ObjectMeta.DeepCopy()
	if bgp := n.Spec.BGP; bgp != nil {
		c.Spec.BGP = clonePtr(bgp)
		c.Spec.BGP.ASNumber = clonePtr(bgp.ASNumber)
	}
	c.Spec.OrchRefs = slices.Clone(n.Spec.OrchRefs)
	c.Spec.Wireguard = clonePtr(n.Spec.Wireguard)
	c.Spec.Addresses = slices.Clone(n.Spec.Addresses)
	c.Spec.Interfaces = slices.Clone(n.Spec.Interfaces)
	for i := range c.Spec.Interfaces {
		c.Spec.Interfaces[i].Addresses = slices.Clone(c.Spec.Interfaces[i].Addresses)
	}
	c.Status.PodCIDRs = slices.Clone(n.Status.PodCIDRs)
	c.Status.Conditions = slices.Clone(n.Status.Conditions)
	return &c
}

func (w *WorkloadEndpoint) clone() *WorkloadEndpoint {
	if w == nil {
		return nil
	}
	c := *w
	c.ObjectMeta = *w.ObjectMeta.DeepCopy()
	c.Spec.IPNetworks = slices.Clone(w.Spec.IPNetworks)
	c.Spec.IPNATs = slices.Clone(w.Spec.IPNATs)
	c.Spec.Profiles = slices.Clone(w.Spec.Profiles)
	c.Spec.Ports = slices.Clone(w.Spec.Ports)
	c.Spec.AllowSpoofedSourcePrefixes = slices.Clone(w.Spec.AllowSpoofedSourcePrefixes)
	c.Spec.QoSControls = slices.Clone(w.Spec.QoSControls)
	return &c
}

func (b *Block) clone() *Block {
	if b == nil {
		return nil
	}
	c := *b
	c.Affinity = clonePtr(b.Affinity)
	c.AffinityClaimTime = cloneTime(b.AffinityClaimTime)
	c.Allocations = slices.Clone(b.Allocations)
	for i := range c.Allocations {
		c.Allocations[i] = clonePtr(c.Allocations[i])
	}
	c.Unallocated = slices.Clone(b.Unallocated)
	c.Attributes = slices.Clone(b.Attributes)
	for i := range c.Attributes {
		a := &c.Attributes[i]
		a.HandleID = clonePtr(a.HandleID)
		a.Secondary = maps.Clone(a.Secondary)
		a.AlternateOwnerAttrs = maps.Clone(a.AlternateOwnerAttrs)
		a.ReleasedAt = cloneTime(a.ReleasedAt)
	}
	c.SequenceNumberForAllocation = maps.Clone(b.SequenceNumberForAllocation)
	c.HostAffinity = clonePtr(b.HostAffinity)
	return &c
}

func clonePtr[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}

func cloneTime(t *metav1.Time) *metav1.Time {
	if t == nil {
		return nil
	}
	return t.DeepCopy()
}
