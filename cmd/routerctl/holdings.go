package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// holding is an address that is in use, and who uses it.
type holding struct {
	addr            netip.Addr
	node, namespace string
	workload        string // the pod, or what else names it
	tunnel          bool   // of a node's own tunnel device
}

// holdings lists the addresses of a range that are in use, by node and
// address. Addresses in their cool-down are nobody's, and those that a
// node only holds ready it gives back by itself when the pool ends.
func holdings(cidr netip.Prefix, blocks []store.Object) []holding {
	var out []holding
	for _, o := range blocks {
		b, ok := o.Value.(*store.Block)
		if !ok || !cidr.Overlaps(o.Key.CIDR()) {
			continue
		}
		for n := range b.Allocations {
			if at := b.Attribute(n); at != nil && at.ReleasedAt == nil && at.Secondary[ipam.AttrType] != ipam.AttrTypeReserve {
				addr, _ := store.AddrAt(o.Key.CIDR(), n)
				out = append(out, holdingOf(addr, at, b.Holder()))
			}
		}
	}
	slices.SortFunc(out, func(a, b holding) int { return cmp.Or(cmp.Compare(a.node, b.node), a.addr.Compare(b.addr)) })
	return out
}

// holdingOf reads an address's attributes, as IPAM and Calico write them. An
// address without a node is taken to be in use where its block is.
func holdingOf(addr netip.Addr, a *store.Attribute, holder string) holding {
	h := holding{addr: addr, node: cmp.Or(a.Secondary["node"], holder, "-"), namespace: a.Secondary["namespace"], workload: a.Secondary["pod"]}
	handle := ""
	if a.HandleID != nil {
		handle = *a.HandleID
	}
	h.tunnel = strings.HasSuffix(a.Secondary["type"], "TunnelAddress") || strings.Contains(handle, "-tunnel-addr-")
	h.workload = cmp.Or(h.workload, handle, "unknown")
	return h
}

// split parts what workloads hold from what tunnels do.
func split(all []holding) (workloads, tunnels []holding) {
	for _, h := range all {
		if h.tunnel {
			tunnels = append(tunnels, h)
		} else {
			workloads = append(workloads, h)
		}
	}
	return workloads, tunnels
}

// whose names holders in a line: how many there are on which nodes, and the
// first of them.
func whose(list []holding) string {
	perNode := map[string]int{}
	for _, h := range list {
		perNode[h.node]++
	}
	var parts []string
	for _, n := range slices.Sorted(maps.Keys(perNode)) {
		parts = append(parts, fmt.Sprintf("%d on %s", perNode[n], n))
	}
	const most = 10 // nodes; more would not be read
	if more := len(parts) - most; more > 0 {
		parts = append(parts[:most], fmt.Sprintf("and %d more nodes", more))
	}
	first := list[0]
	name := first.workload
	if first.namespace != "" {
		name = first.namespace + "/" + name
	}
	return fmt.Sprintf("%s; the first is %s with %s on %s", strings.Join(parts, ", "), name, first.addr, first.node)
}

// successors lists the enabled pools, other than one of this name, that give
// addresses of its family to workloads.
func successors(p *v3.IPPool, pools []store.Object) []string {
	var out []string
	for _, o := range pools {
		if q, ok := o.Value.(*v3.IPPool); ok && q.Name != p.Name && !q.Spec.Disabled && sameFamily(p, q) && allows(q, v3.IPPoolAllowedUseWorkload) {
			out = append(out, q.Name)
		}
	}
	return out
}

// takesTunnels reports whether another enabled pool can hold the addresses of
// the tunnels that carry p's packets.
func takesTunnels(p *v3.IPPool, pools []store.Object) bool {
	return slices.ContainsFunc(pools, func(o store.Object) bool {
		q, ok := o.Value.(*v3.IPPool)
		return ok && q.Name != p.Name && !q.Spec.Disabled && sameFamily(p, q) && allows(q, v3.IPPoolAllowedUseTunnel) &&
			tunnelOf(p) != "" && tunnelOf(p) == tunnelOf(q)
	})
}

func sameFamily(p, q *v3.IPPool) bool {
	a, err1 := netip.ParsePrefix(p.Spec.CIDR)
	b, err2 := netip.ParsePrefix(q.Spec.CIDR)
	return err1 == nil && err2 == nil && a.Addr().Is4() == b.Addr().Is4()
}

// allows reports whether a pool lists a use; one without a list has both.
func allows(p *v3.IPPool, use v3.IPPoolAllowedUse) bool {
	return len(p.Spec.AllowedUses) == 0 || slices.Contains(p.Spec.AllowedUses, use)
}

// tunnelOf names the kind of tunnel that carries a pool's packets; empty:
// none.
func tunnelOf(p *v3.IPPool) string {
	switch store.EncapsulationOf(p) {
	case store.IPIP, store.IPIPCrossSubnet:
		return "ipip"
	case store.VXLAN, store.VXLANCrossSubnet:
		return "vxlan"
	case store.Direct:
	}
	return ""
}
