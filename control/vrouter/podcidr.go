package vrouter

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/control/cluster"
)

// podCIDRs are the ranges that Kubernetes gave Nodes, where these are theirs as blocks
// are.
type podCIDRs struct {
	on        bool
	looked    bool     // conflicts is up to date
	conflicts []string // see podCIDRConflicts
}

// PodCIDRConflicts says what of the Nodes' pod CIDRs cannot be, and why; false: they
// do not count at all.
func (c *Core) PodCIDRConflicts(ctx context.Context) ([]string, bool, error) {
	if !c.cfg.UsePodCIDR {
		return nil, false, nil
	}
	out, err := ask(ctx, c, func(l *loop) []string {
		if !l.pods.looked {
			l.pods.looked, l.pods.conflicts = true, podCIDRConflicts(l.nodes.Self, l.nodes.ByName, l.pools.ByName, l.blocks.List())
		}
		return l.pods.conflicts
	})
	return out, true, err
}

// podCIDR is one that a Node has.
type podCIDR struct {
	cidr netip.Prefix
	node string
}

// podCIDRConflicts says of each pod CIDR whether another Node has it too, whether a pool
// says how packets get there, and which blocks in it are another node's.
func podCIDRConflicts(self string, nodes map[string]*cluster.Node, pools map[string]*cluster.Pool, blocks []*cluster.Block) []string {
	var all []podCIDR
	for name, n := range nodes {
		for _, c := range n.PodCIDRs {
			all = append(all, podCIDR{c, name})
		}
	}
	// The wider first, so that each is held against those that contain it.
	slices.SortFunc(all, func(a, b podCIDR) int {
		return cmp.Or(cmp.Compare(a.cidr.Bits(), b.cidr.Bits()), a.cidr.Compare(b.cidr), strings.Compare(a.node, b.node))
	})
	var out []string
	if own := nodes[self]; own != nil && len(own.PodCIDRs) == 0 {
		out = append(out, fmt.Sprintf("the Node %s has no spec.podCIDRs: have kube-controller-manager give it one (--allocate-node-cidrs, --cluster-cidr)", self))
	}
	ranges := new(bart.Table[*cluster.Pool])
	for _, p := range pools {
		if p.CIDR.IsValid() {
			ranges.Insert(p.CIDR, p)
		}
	}
	held := new(bart.Table[string])
	for _, c := range all {
		if wide, other, ok := held.LookupPrefixLPM(c.cidr); ok {
			out = append(out, fmt.Sprintf("the pod CIDR %s of node %s overlaps %s of node %s: delete one of the two Nodes and let it register anew", c.cidr, c.node, wide, other))
			continue
		}
		held.Insert(c.cidr, c.node)
		if _, ok := ranges.LookupPrefix(c.cidr); ok {
			continue
		}
		parts := 0
		for p := range ranges.Subnets(c.cidr) {
			parts++
			out = append(out, fmt.Sprintf("the pod CIDR %s of node %s is larger than the pool %s in it, which says of a part alone how packets get there: make a pool of the cluster's range (--cluster-cidr)", c.cidr, c.node, p))
		}
		if parts == 0 {
			out = append(out, fmt.Sprintf("the pod CIDR %s of node %s lies in no pool, which is to say how packets get there: make one of the cluster's range (--cluster-cidr)", c.cidr, c.node))
		}
	}
	var foreign []string
	for _, b := range blocks {
		if b.Holder == "" {
			continue
		}
		cidr, node, ok := held.LookupPrefixLPM(b.CIDR)
		if !ok {
			for c, n := range held.Subnets(b.CIDR) {
				cidr, node, ok = c, n, true
			}
		}
		if ok && node != b.Holder {
			foreign = append(foreign, fmt.Sprintf("the block %s of node %s overlaps the pod CIDR %s of node %s: set ipam.usePodCIDR on both, and start the workloads anew that have its addresses", b.CIDR, b.Holder, cidr, node))
		}
	}
	slices.Sort(foreign)
	return append(out, foreign...)
}
