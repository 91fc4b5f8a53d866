package rib

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/store"
)

// origins says which node the blocks of the cluster give a prefix to.
type origins struct {
	blocks map[store.Key]*cluster.Block
	claims map[netip.Prefix][]claim  // what blocks say of it, the one that counts first
	byNode map[string][]netip.Prefix // by the node of that one
	held   *bart.Table[string]       // block → the node that holds it
}

// claim is what one block says of a prefix.
type claim struct {
	block netip.Prefix
	origin
}

func newOrigins() *origins {
	return &origins{blocks: map[store.Key]*cluster.Block{}, claims: map[netip.Prefix][]claim{}, byNode: map[string][]netip.Prefix{}, held: new(bart.Table[string])}
}

// origin returns whose a prefix is.
func (o *origins) origin(p netip.Prefix) (origin, bool) {
	if cs := o.claims[p]; len(cs) > 0 {
		return cs[0].origin, true
	}
	return origin{}, false
}

// setBlock replaces a block; nil: there is none any more. It returns the
// prefixes that are another's now.
func (o *origins) setBlock(key store.Key, b *cluster.Block) []netip.Prefix {
	before, now := blockOrigins(o.blocks[key]), blockOrigins(b)
	if len(now) == 0 {
		delete(o.blocks, key)
	} else {
		o.blocks[key] = b
	}
	var changed []netip.Prefix
	for p, was := range before {
		if now[p] != was && o.claim(p, claim{key.CIDR(), origin{}}) {
			changed = append(changed, p)
		}
	}
	for p, is := range now {
		if before[p] != is && o.claim(p, claim{key.CIDR(), is}) {
			changed = append(changed, p)
		}
	}
	for _, p := range changed {
		if is, ok := o.origin(p); ok && !is.borrowed {
			o.held.Insert(p, is.node)
		} else {
			o.held.Delete(p)
		}
	}
	return changed
}

// holder returns the smallest block that a prefix is a part of, and the node that
// holds the block. The prefix itself must be no block.
func (o *origins) holder(p netip.Prefix) (block netip.Prefix, node string, ok bool) {
	return o.held.LookupPrefixLPM(p)
}

// errPart says why a part of a node's block is left out that others announced.
func errPart(block netip.Prefix, node string) error {
	return fmt.Errorf("it is a part of block %s, which node %s holds, and only that node announces parts of it; "+
		"to take it from a peer all the same, have a BGPFilter of that peer accept it by a cidr inside the block", block, node)
}

// claim replaces what a block says of a prefix; an origin without a node:
// nothing. It reports whether the prefix is another's now. Blocks do not
// overlap; should the store hold two that do, the smaller one knows better.
func (o *origins) claim(p netip.Prefix, c claim) bool {
	was, had := o.origin(p)
	cs := slices.DeleteFunc(o.claims[p], func(old claim) bool { return old.block == c.block })
	if c.node != "" {
		cs = append(cs, c)
		slices.SortStableFunc(cs, func(a, b claim) int { return cmp.Compare(b.block.Bits(), a.block.Bits()) })
	}
	if o.claims[p] = cs; len(cs) == 0 {
		delete(o.claims, p)
	}
	is, has := o.origin(p)
	if had && was == is {
		return false
	}
	if had {
		list := slices.DeleteFunc(o.byNode[was.node], func(other netip.Prefix) bool { return other == p })
		if o.byNode[was.node] = list; len(list) == 0 {
			delete(o.byNode, was.node)
		}
	}
	if has {
		o.byNode[is.node] = append(o.byNode[is.node], p)
	}
	return had || has
}

// errCovers says why a prefix of a pool is left out in which a node's own
// address lies: on its owner, the host would cut itself off from its network,
// and elsewhere what goes to the tunnel's end would go into the tunnel.
func errCovers(node string, a netip.Addr) error {
	return fmt.Errorf("the address %s of node %s itself lies in it: give the pool a CIDR apart from the hosts' network", a, node)
}

// errPlain says why what BGP announced of a block is left out where the store's way to
// it cannot be used: it would have the packets go in plain.
func errPlain(pool string) error {
	return fmt.Errorf("pool %s asks for a tunnel, and the next hop is no node to which one leads", pool)
}

// origin says why the store wants a prefix to go to a node.
type origin struct {
	node     string
	borrowed bool // a single address within another node's block
}

// maxBlockBits is the size of the largest block that a pool may have: /20 and
// /116, as Calico's validation has it. A larger one would let a single wrong
// key of the store take all of a host's traffic.
const maxBlockBits = 12

// blockOrigins returns what a block says about who has which prefix: the block
// as a whole for the node that holds it, and each address that another node
// borrowed from it.
func blockOrigins(b *cluster.Block) map[netip.Prefix]origin {
	if b == nil || b.CIDR.Addr().BitLen()-b.CIDR.Bits() > maxBlockBits {
		return nil
	}
	out := make(map[netip.Prefix]origin, 1+len(b.Borrowed))
	if b.Holder != "" {
		out[b.CIDR] = origin{node: b.Holder}
	}
	for _, g := range b.Borrowed {
		out[topology.Single(g.Addr)] = origin{node: g.Node, borrowed: true}
	}
	return out
}
