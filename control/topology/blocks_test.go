package topology

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

func FuzzBlockOrigins(f *testing.F) {
	f.Add("192.168.0.0/26", 3, 0, "node2")
	f.Add("fd00::/122", 63, 0, "node2")
	f.Fuzz(func(t *testing.T, cidr string, ord, attr int, node string) {
		if ord < 0 || ord > 1<<12 {
			return
		}
		block, err := netip.ParsePrefix(cidr)
		if err != nil || block != block.Masked() {
			return // no key of a block has it
		}
		b := &store.Block{CIDR: cidr, Allocations: make([]*int, ord+1), Attributes: []store.Attribute{{Secondary: map[string]string{"node": node}}}}
		b.Allocations[ord] = &attr
		read, _ := cluster.NewBlock("", store.Object{Key: store.BlockKey(block), Value: b})
		for p := range prefixes(read) {
			if !block.Contains(p.Addr()) {
				t.Errorf("block %s yields %s, which lies outside", cidr, p)
			}
		}
	})
}

// Whose a prefix is follows from the blocks that there are, in whatever order they came and
// went: also where some lie in others.
func TestBlocks(t *testing.T) {
	t.Parallel()
	var cidrs, all []netip.Prefix
	for _, s := range []string{"10.0.0.0/19", "10.0.0.0/29", "10.0.0.0/30", "10.0.0.4/30", "10.0.0.1/32", "fd00::/126", "fd00::2/128"} {
		cidrs = append(cidrs, netip.MustParsePrefix(s))
	}
	for i := range 8 {
		all = append(all, Single(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})), Single(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i)})))
	}
	all = append(all, cidrs...)
	names := rapid.SampledFrom([]string{"", "a", "b"})
	rapid.Check(t, func(t *rapid.T) {
		b, have, whose := NewBlocks(), map[netip.Prefix]*cluster.Block{}, map[netip.Prefix]Origin{}
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			cidr := rapid.SampledFrom(cidrs).Draw(t, "cidr")
			var block *cluster.Block
			if rapid.Bool().Draw(t, "there") {
				block = &cluster.Block{CIDR: cidr, Holder: names.Draw(t, "holder")}
				for a := cidr.Addr(); cidr.Contains(a) && len(block.Borrowed)+len(block.Tunnels) < 8; a = a.Next() {
					if node := names.Draw(t, "borrower"); node != "" {
						block.Borrowed = append(block.Borrowed, cluster.Borrowed{Addr: a, Node: node})
					}
					if node := names.Draw(t, "tunnel of"); node != "" {
						block.Tunnels = append(block.Tunnels, cluster.Assigned{Addr: a, Node: node})
					}
				}
			}
			before, changed := b.Replace(cidr, block)
			if before != have[cidr] {
				t.Fatalf("%s was %v, want %v", cidr, before, have[cidr])
			}
			if have[cidr] = block; block == nil {
				delete(have, cidr)
			}
			now := map[netip.Prefix]Origin{}
			for _, p := range all {
				want, is := originAmong(have, p)
				if got, ok := b.Origin(p); got != want || ok != is {
					t.Fatalf("%s is of %v, %t, want %v, %t", p, got, ok, want, is)
				}
				if is {
					now[p] = want
				}
				if got, want := b.Assigned(p.Addr()), assignedAmong(have, p.Addr()); got != want {
					t.Fatalf("%s is assigned to %q, want %q", p.Addr(), got, want)
				}
			}
			var want []netip.Prefix
			for _, p := range slices.Compact(slices.SortedFunc(slices.Values(all), netip.Prefix.Compare)) {
				if now[p] != whose[p] {
					want = append(want, p)
				}
			}
			slices.SortFunc(changed, netip.Prefix.Compare)
			if diff := cmp.Diff(want, changed, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Fatalf("prefixes that are another's (-want +got):\n%s", diff)
			}
			whose = now
			for _, p := range all {
				around, contain := map[netip.Prefix]bool{}, map[netip.Prefix]bool{}
				for o := range b.Around(p.Addr()) {
					around[o] = true
				}
				for o := range now {
					if o.Contains(p.Addr()) {
						contain[o] = true
					}
				}
				if diff := cmp.Diff(contain, around, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
					t.Fatalf("prefixes around %s (-want +got):\n%s", p.Addr(), diff)
				}
			}
			listed := map[netip.Prefix]bool{}
			for _, node := range []string{"a", "b"} {
				for p := range b.Of(node) {
					if listed[p] = true; whose[p].Node != node {
						t.Fatalf("%s is listed of %s, and is of %v", p, node, whose[p])
					}
				}
			}
			if len(listed) != len(whose) || len(slices.Collect(b.Prefixes())) != len(whose) {
				t.Fatalf("%d and %d prefixes listed, want %d", len(listed), len(slices.Collect(b.Prefixes())), len(whose))
			}
		}
		if got := len(b.List()); got != len(have) {
			t.Fatalf("%d blocks, want %d", got, len(have))
		}
	})
}

// smallest yields the blocks that contain a prefix, the smallest first.
func smallest(have map[netip.Prefix]*cluster.Block, p netip.Prefix) []*cluster.Block {
	var out []*cluster.Block
	for cidr, b := range have {
		if cidr.Bits() <= p.Bits() && cidr.Contains(p.Addr()) {
			out = append(out, b)
		}
	}
	slices.SortFunc(out, func(a, b *cluster.Block) int { return b.CIDR.Bits() - a.CIDR.Bits() })
	return out
}

func originAmong(have map[netip.Prefix]*cluster.Block, p netip.Prefix) (Origin, bool) {
	for _, b := range smallest(have, p) {
		says := map[netip.Prefix]Origin{}
		if b.CIDR.Addr().BitLen()-b.CIDR.Bits() > MaxBlockBits {
			continue
		}
		if b.Holder != "" {
			says[b.CIDR] = Origin{b.Holder, false, false}
		}
		for _, l := range b.Borrowed {
			says[Single(l.Addr)] = Origin{l.Node, true, false}
		}
		if o, ok := says[p]; ok {
			return o, true
		}
	}
	return Origin{}, false
}

func assignedAmong(have map[netip.Prefix]*cluster.Block, a netip.Addr) string {
	for _, b := range smallest(have, Single(a)) {
		for _, t := range b.Tunnels {
			if t.Addr == a {
				return t.Node
			}
		}
	}
	return ""
}

// An index is a map of sets.
func TestIndex(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		x, want := NewIndex[int, int](), map[int]map[int]bool{}
		for range rapid.IntRange(0, 30).Draw(t, "steps") {
			k, v := rapid.IntRange(0, 2).Draw(t, "key"), rapid.IntRange(0, 3).Draw(t, "value")
			if rapid.Bool().Draw(t, "add") {
				x.Add(k, v)
				if want[k] == nil {
					want[k] = map[int]bool{}
				}
				want[k][v] = true
			} else {
				x.Remove(k, v)
				if delete(want[k], v); len(want[k]) == 0 {
					delete(want, k)
				}
			}
			got, shared := map[int]map[int]bool{}, map[int]bool{}
			for k := range x.Keys() {
				got[k] = map[int]bool{}
				for v := range x.Of(k) {
					got[k][v] = true
				}
				if x.Len(k) != len(got[k]) {
					t.Fatalf("set of %d has %d, and its length is %d", k, len(got[k]), x.Len(k))
				}
			}
			for k, set := range x.Shared() {
				if shared[k] = true; len(set) != len(want[k]) {
					t.Fatalf("set of %d is %v, want %v", k, set, want[k])
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("sets (-want +got):\n%s", diff)
			}
			for k := range maps.Keys(want) {
				if shared[k] != (len(want[k]) > 1) {
					t.Fatalf("set of %d counts as shared: %t", k, shared[k])
				}
			}
		}
	})
}
