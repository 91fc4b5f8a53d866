package topology

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/control/cluster"
)

// MaxBlockBits is the size of the largest block that a pool may have: /20 and
// /116, as Calico's validation has it. A larger one would let a single wrong
// key of the store take all of a host's traffic.
const MaxBlockBits = 12

// Blocks are the blocks of the cluster, and by them which node has which prefix. Blocks do
// not overlap; should the store hold two that do, the smaller one knows better.
type Blocks struct {
	table  *bart.Table[*cluster.Block]
	byNode Index[string, netip.Prefix]

	// Pod CIDRs of Nodes that count as their blocks do, in what no block says.
	podCIDRs map[string][]netip.Prefix // by node
	podNodes *bart.Table[[]string]     // the other way round, in order
}

// Origin says why the store wants a prefix to go to a node.
type Origin struct {
	Node     string
	Borrowed bool // a single address within another node's block
	PodCIDR  bool // Kubernetes gave it to the node
}

// NewBlocks returns no blocks yet.
func NewBlocks() *Blocks {
	return &Blocks{table: new(bart.Table[*cluster.Block]), byNode: NewIndex[string, netip.Prefix](), podCIDRs: map[string][]netip.Prefix{}, podNodes: new(bart.Table[[]string])}
}

// Replace replaces the block of a prefix; nil: there is none any more. It returns the one
// before, and the prefixes that are another's now.
func (b *Blocks) Replace(cidr netip.Prefix, now *cluster.Block) (before *cluster.Block, changed []netip.Prefix) {
	before, _ = b.table.Get(cidr)
	affected := append(slices.Collect(prefixes(before)), slices.Collect(prefixes(now))...)
	return before, b.change(affected, func() {
		if now == nil {
			b.table.Delete(cidr)
		} else {
			b.table.Insert(cidr, now)
		}
	})
}

// SetPodCIDRs replaces the pod CIDRs of a node that count as its blocks do. It returns the
// prefixes that are another's now.
func (b *Blocks) SetPodCIDRs(node string, cidrs []netip.Prefix) (changed []netip.Prefix) {
	was := b.podCIDRs[node]
	if slices.Equal(was, cidrs) {
		return nil
	}
	return b.change(append(slices.Clone(was), cidrs...), func() {
		for _, p := range was {
			nodes, _ := b.podNodes.Get(p)
			if nodes = slices.DeleteFunc(nodes, func(n string) bool { return n == node }); len(nodes) == 0 {
				b.podNodes.Delete(p)
			} else {
				b.podNodes.Insert(p, nodes)
			}
		}
		for _, p := range cidrs {
			nodes, _ := b.podNodes.Get(p)
			nodes = append(nodes, node)
			slices.Sort(nodes)
			b.podNodes.Insert(p, nodes)
		}
		if b.podCIDRs[node] = cidrs; len(cidrs) == 0 {
			delete(b.podCIDRs, node)
		}
	})
}

// PodCIDRs returns those that a node has, where they count.
func (b *Blocks) PodCIDRs(node string) []netip.Prefix { return b.podCIDRs[node] }

// change makes a change by which some prefixes may become another's, and returns those
// that do.
func (b *Blocks) change(affected []netip.Prefix, apply func()) (changed []netip.Prefix) {
	was := make([]Origin, len(affected))
	for i, p := range affected {
		was[i], _ = b.Origin(p)
	}
	apply()
	for i, p := range affected {
		is, ok := b.Origin(p)
		if is == was[i] || slices.Contains(affected[:i], p) {
			continue
		}
		changed = append(changed, p)
		if was[i] != (Origin{}) {
			b.byNode.Remove(was[i].Node, p)
		}
		if ok {
			b.byNode.Add(is.Node, p)
		}
	}
	return changed
}

// Origin returns which node a prefix is of, by the smallest block that says so, and else
// by the Node that has it as a pod CIDR: of several all hosts take the same.
func (b *Blocks) Origin(p netip.Prefix) (Origin, bool) {
	for block := range b.covering(p) {
		if !counts(block) {
			continue
		}
		if p.IsSingleIP() {
			if i, ok := slices.BinarySearchFunc(block.Borrowed, p.Addr(), func(x cluster.Borrowed, a netip.Addr) int { return x.Addr.Compare(a) }); ok {
				return Origin{Node: block.Borrowed[i].Node, Borrowed: true}, true
			}
		}
		if block.CIDR == p && block.Holder != "" {
			return Origin{Node: block.Holder}, true
		}
	}
	if len(b.podCIDRs) > 0 {
		if nodes, ok := b.podNodes.Get(p); ok {
			return Origin{Node: nodes[0], PodCIDR: true}, true
		}
	}
	return Origin{}, false
}

// Holder returns the smallest block or pod CIDR that a prefix is a part of, and the node
// that has it. The prefix itself must be neither.
func (b *Blocks) Holder(p netip.Prefix) (block netip.Prefix, node string, ok bool) {
	if len(b.podCIDRs) > 0 {
		if cidr, nodes, found := b.podNodes.LookupPrefixLPM(p); found {
			block, node, ok = cidr, nodes[0], true
		}
	}
	for around := range b.covering(p) {
		if counts(around) && around.Holder != "" && (!ok || around.CIDR.Bits() >= block.Bits()) {
			return around.CIDR, around.Holder, true
		}
	}
	return block, node, ok
}

// Assigned returns to which node's tunnel device IPAM assigned an address; empty: to none.
func (b *Blocks) Assigned(a netip.Addr) string {
	for block := range b.covering(Single(a)) {
		if i, ok := slices.BinarySearchFunc(block.Tunnels, a, func(x cluster.Assigned, a netip.Addr) int { return x.Addr.Compare(a) }); ok {
			return block.Tunnels[i].Node
		}
	}
	return ""
}

// Around yields the prefixes that are some node's and in which an address lies. One that is
// a block and a pod CIDR comes twice.
func (b *Blocks) Around(a netip.Addr) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		single := Single(a)
		for block := range b.covering(single) {
			if _, ok := b.Origin(block.CIDR); ok && !yield(block.CIDR) {
				return
			}
		}
		for p := range b.podNodes.Supernets(single) {
			if _, ok := b.Origin(p); ok && !yield(p) {
				return
			}
		}
		if _, ok := b.Origin(single); ok { // borrowed
			yield(single)
		}
	}
}

// Of yields the prefixes of a node.
func (b *Blocks) Of(node string) iter.Seq[netip.Prefix] { return b.byNode.Of(node) }

// Prefixes yields the prefixes that are some node's.
func (b *Blocks) Prefixes() iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for node := range b.byNode.Keys() {
			for p := range b.byNode.Of(node) {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// List returns the blocks.
func (b *Blocks) List() []*cluster.Block {
	out := make([]*cluster.Block, 0, b.table.Size())
	for _, block := range b.table.All() {
		out = append(out, block)
	}
	return out
}

// covering yields the blocks in which a prefix lies, the smallest first. Most prefixes of a
// large table lie in none, and others in one.
func (b *Blocks) covering(p netip.Prefix) iter.Seq[*cluster.Block] {
	return func(yield func(*cluster.Block) bool) {
		of, block, ok := b.table.LookupPrefixLPM(p)
		if !ok || !yield(block) || of.Bits() == 0 {
			return
		}
		for _, block := range b.table.Supernets(netip.PrefixFrom(of.Addr(), of.Bits()-1).Masked()) {
			if !yield(block) {
				return
			}
		}
	}
}

// counts reports whether a block's size is one that it may have.
func counts(b *cluster.Block) bool { return b.CIDR.Addr().BitLen()-b.CIDR.Bits() <= MaxBlockBits }

// prefixes yields of which prefixes a block says who has them: of itself, and of each
// address that another node than the holder borrowed. It says nothing where it is nil.
func prefixes(b *cluster.Block) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		if b == nil || !counts(b) || b.Holder != "" && !yield(b.CIDR) {
			return
		}
		for _, l := range b.Borrowed {
			if !yield(Single(l.Addr)) {
				return
			}
		}
	}
}
