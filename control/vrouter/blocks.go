package vrouter

import (
	"fmt"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

func (t *table) setPool(name string, r *v3.IPPool) {
	old, had := t.pools[name]
	var p pool
	ok := false
	if r != nil {
		p, ok = newPool(r)
	}
	if had && ok && old == p {
		return
	}
	delete(t.pools, name)
	if ok {
		t.pools[name] = p
	}
	// A change of encapsulation is one object per peer. Other pools may fall
	// back on the form of this one.
	t.rechooseInPool(name, old, had)
	t.rechooseAll()
	for _, cidr := range []netip.Prefix{old.cidr, p.cidr} {
		if cidr.IsValid() {
			t.electPool(cidr)
			t.markWithin(cidr)
		}
	}
	t.formsDirty = true
}

// rechooseInPool applies the sender's rule anew to every node, for one pool.
func (t *table) rechooseInPool(name string, old pool, had bool) {
	p, has := t.pools[name]
	if had && (!has || old.family() != p.family()) {
		for k := range t.ways {
			if k.pool == name {
				t.dropWay(k)
			}
		}
	}
	if has {
		for n := range t.nodes {
			t.rechoosePool(p, n)
		}
	}
	for k := range t.hops {
		if k.pool == name {
			t.refresh(k)
		}
	}
}

// electPool notes which pool has a CIDR. Validation refuses a second one of
// the same; should the store hold two, all hosts take the same.
func (t *table) electPool(cidr netip.Prefix) {
	best := ""
	for name, p := range t.pools {
		if p.cidr == cidr && (best == "" || name < best) {
			best = name
		}
	}
	if best == "" {
		t.poolTree.Delete(cidr)
	} else {
		t.poolTree.Insert(cidr, best)
	}
}

// markWithin marks what lies inside a pool. Pools change rarely, so this may
// look at everything.
func (t *table) markWithin(cidr netip.Prefix) {
	within := func(p netip.Prefix) bool { return cidr.Bits() <= p.Bits() && cidr.Contains(p.Addr()) }
	for p := range t.origins {
		if within(p) {
			t.dirty[p] = struct{}{}
		}
	}
	for p := range t.paths {
		if within(p) {
			t.dirty[p] = struct{}{}
		}
	}
}

// claim is what one block says of a prefix.
type claim struct {
	block store.Key
	bits  int // of the block
	origin
}

func (t *table) setBlock(key store.Key, b *store.Block) {
	var now map[netip.Prefix]origin
	if b != nil {
		now = blockOrigins(b)
	}
	old := t.blocks[key]
	if len(now) == 0 {
		delete(t.blocks, key)
	} else {
		t.blocks[key] = now
	}
	for p, o := range old {
		if now[p] != o {
			t.claims[p] = slices.DeleteFunc(t.claims[p], func(c claim) bool { return c.block == key })
			t.electOrigin(p)
		}
	}
	for p, o := range now {
		if old[p] != o {
			t.claims[p] = append(t.claims[p], claim{block: key, bits: key.CIDR().Bits(), origin: o})
			t.electOrigin(p)
		}
	}
}

// electOrigin chooses whose a prefix is. Blocks do not overlap; should the
// store hold two that do, the smaller one knows better.
func (t *table) electOrigin(p netip.Prefix) {
	best := claim{bits: -1}
	for _, c := range t.claims[p] {
		if c.bits > best.bits {
			best = c
		}
	}
	if old, had := t.origins[p]; had {
		if old == best.origin {
			return
		}
		t.byNode.remove(old.node, p)
	}
	t.dirty[p] = struct{}{}
	if best.bits < 0 {
		delete(t.claims, p)
		delete(t.origins, p)
		return
	}
	t.origins[p] = best.origin
	t.byNode.add(best.node, p)
}

// nodeWithin finds a node whose own address lies in a prefix.
func (t *table) nodeWithin(p netip.Prefix) (string, netip.Addr, bool) {
	for _, a := range t.nodeAddrs.Subnets(p) {
		n, ok := t.nodeAt(a)
		return n, a, ok
	}
	return "", netip.Addr{}, false
}

// errCovers says why a prefix of a pool is left out in which a node's own
// address lies: on its owner, the host would cut itself off from its network,
// and elsewhere what goes to the tunnel's end would go into the tunnel.
func errCovers(node string, a netip.Addr) error {
	return fmt.Errorf("the address %s of node %s itself lies in it: give the pool a CIDR apart from the hosts' network", a, node)
}

// markAround marks what depends on whether and how a node has an address:
// paths with that next hop, and prefixes in which it lies.
func (t *table) markAround(a netip.Addr) {
	t.markNextHop(a)
	for bits := range a.BitLen() + 1 {
		p := netip.PrefixFrom(a, bits).Masked()
		if _, ok := t.origins[p]; ok {
			t.dirty[p] = struct{}{}
		}
		if _, ok := t.paths[p]; ok {
			t.dirty[p] = struct{}{}
		}
	}
}

// single is the prefix of one address.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
