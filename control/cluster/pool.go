package cluster

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// Pool is what an IPPool says. For routing disabled pools count: disabling stops
// allocation.
type Pool struct {
	Name  string
	CIDR  netip.Prefix // invalid: it cannot be read; see Err
	Err   error
	Encap store.Encapsulation
	// Forced says that nodes move to Encap whatever their probes say.
	Forced bool
	// Nodes selects the nodes that have workloads in it; nil: the selector cannot be
	// read and selects no node, as in IPAM. Pools with the same selector share it.
	Nodes *selector.Selector
	// Tunnels says that addresses of tunnels' devices are allocated from it.
	Tunnels bool
	// Hidden says that BGP does not announce it: disableBGPExport.
	Hidden bool
	// Translated says that what its workloads send outside is: natOutgoing.
	Translated bool

	// By what addresses are allocated from it.
	BlockBits  int
	Uses       []v3.IPPoolAllowedUse // at least one
	Manual     bool                  // only to requests that name it
	Namespaces *selector.Selector    // nil: all
	// Off says why nothing may be taken from it at all; empty: it may.
	Off string
}

// Family is that of the pool's workloads.
func (p *Pool) Family() dataplane.Family { return dataplane.FamilyOf(p.CIDR.Addr()) }

// Allows reports whether the pool lists a use.
func (p *Pool) Allows(use v3.IPPoolAllowedUse) bool { return slices.Contains(p.Uses, use) }

// NewPool reads a pool. One that makes no sense is kept with the reason, so that a
// refusal can name it; nil: the object is no pool, or could not be decoded.
func NewPool(obj store.Object) *Pool {
	r, ok := obj.Value.(*v3.IPPool)
	if !ok {
		return nil
	}
	d := newDecoder("")
	return d.pool(r, obj.Raw)
}

func (d *decoder) pool(r *v3.IPPool, raw []byte) *Pool {
	spec := &r.Spec
	p := &Pool{
		Name: r.Name, Encap: store.EncapsulationOf(r), Forced: store.Forced(r), Nodes: d.selector(spec.NodeSelector), Hidden: spec.DisableBGPExport, Translated: spec.NATOutgoing,
		Uses: spec.AllowedUses, Manual: spec.AssignmentMode != nil && *spec.AssignmentMode == v3.Manual,
	}
	if len(p.Uses) == 0 {
		p.Uses = []v3.IPPoolAllowedUse{v3.IPPoolAllowedUseWorkload, v3.IPPoolAllowedUseTunnel}
	}
	p.Tunnels = !spec.Disabled && p.Allows(v3.IPPoolAllowedUseTunnel)
	if cidr, err := netip.ParsePrefix(spec.CIDR); err != nil || cidr.Addr().Is4In6() {
		p.Err = fmt.Errorf("spec.cidr %q is not a CIDR such as 192.168.0.0/16", spec.CIDR)
	} else {
		p.CIDR = cidr.Masked()
	}
	p.Off = p.off(d, r, raw)
	return p
}

// off says why nothing may be allocated from a pool.
func (p *Pool) off(d *decoder, r *v3.IPPool, raw []byte) string {
	err := cmp.Or(p.Err, p.readBlocks(r.Spec.BlockSize), p.readSelectors(d, &r.Spec))
	switch {
	case err != nil:
		return err.Error()
	case r.DeletionTimestamp != nil:
		return "it is being deleted"
	case r.Spec.Disabled:
		return "it is disabled"
	case notAllocatable(raw):
		return "its status says Allocatable=False"
	}
	return ""
}

func (p *Pool) readBlocks(bits int) error {
	if !p.CIDR.IsValid() {
		return nil
	}
	lo, hi, def := 20, 32, 26
	if p.CIDR.Addr().Is6() {
		lo, hi, def = 116, 128, 122
	}
	if p.BlockBits = bits; bits == 0 {
		p.BlockBits = def
	}
	if p.BlockBits < lo || p.BlockBits > hi || p.BlockBits < p.CIDR.Bits() {
		return fmt.Errorf("blockSize %d is not between %d and %d", p.BlockBits, max(lo, p.CIDR.Bits()), hi)
	}
	return nil
}

func (p *Pool) readSelectors(d *decoder, spec *v3.IPPoolSpec) error {
	if p.Nodes == nil {
		_, err := selector.Parse(spec.NodeSelector)
		return fmt.Errorf("nodeSelector: %w", err)
	}
	if spec.NamespaceSelector == "" {
		return nil
	}
	if p.Namespaces = d.selector(spec.NamespaceSelector); p.Namespaces == nil {
		_, err := selector.Parse(spec.NamespaceSelector)
		return fmt.Errorf("namespaceSelector: %w", err)
	}
	return nil
}

// notAllocatable reads the condition from the stored JSON, because the API
// module's IPPool has no status.
func notAllocatable(raw []byte) bool {
	var res struct {
		Status struct {
			Conditions []struct{ Type, Status string }
		}
	}
	if len(raw) == 0 || json.Unmarshal(raw, &res) != nil {
		return false
	}
	for _, c := range res.Status.Conditions {
		if c.Type == "Allocatable" && c.Status == "False" {
			return true
		}
	}
	return false
}
