package cluster

import (
	"fmt"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// Pool is what an IPPool says of routing. Disabled pools count: disabling stops
// allocation.
type Pool struct {
	Name  string
	CIDR  netip.Prefix // invalid: it cannot be read; see Err
	Err   error
	Encap store.Encapsulation
	// Nodes selects the nodes that have workloads in it; nil: the selector cannot be
	// read and selects nobody, as in IPAM. Pools with the same selector share it.
	Nodes *selector.Selector
	// Tunnels says that addresses of tunnels' devices are allocated from it.
	Tunnels bool
	// Hidden says that BGP does not announce it: disableBGPExport.
	Hidden bool
}

// Family is that of the pool's workloads.
func (p *Pool) Family() dataplane.Family { return dataplane.FamilyOf(p.CIDR.Addr()) }

func (d *decoder) pool(r *v3.IPPool) *Pool {
	p := &Pool{
		Name: r.Name, Encap: store.EncapsulationOf(r), Nodes: d.selector(r.Spec.NodeSelector), Hidden: r.Spec.DisableBGPExport,
		Tunnels: !r.Spec.Disabled && (len(r.Spec.AllowedUses) == 0 || slices.Contains(r.Spec.AllowedUses, v3.IPPoolAllowedUseTunnel)),
	}
	cidr, err := netip.ParsePrefix(r.Spec.CIDR)
	if err != nil {
		p.Err = fmt.Errorf("spec.cidr %q is not a CIDR such as 192.168.0.0/16", r.Spec.CIDR)
		return p
	}
	p.CIDR = cidr.Masked()
	return p
}
