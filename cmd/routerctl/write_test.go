package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
	"github.com/routerd/routerd/store/memory"
)

func documents(t *testing.T, text string) []manifest.Document {
	t.Helper()
	docs, err := manifest.Read("test", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return docs
}

func poolText(name, cidr, more string) string {
	return fmt.Sprintf("---\napiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: %s}\nspec: {cidr: %s%s}\n", name, cidr, more)
}

// rival is a store in which somebody else writes just before each of the first
// transactions.
type rival struct {
	store.Store
	write func(store.Store)
	times int
}

func (r *rival) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	if r.times > 0 {
		r.times--
		r.write(r.Store)
	}
	return r.Store.Txn(ctx, ops...)
}

func newMemory(t *testing.T) *memory.Store {
	t.Helper()
	s := memory.New()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func getPool(t *testing.T, s store.Store, name string) *v3.IPPool {
	t.Helper()
	o, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, name))
	if err != nil {
		t.Fatal(err)
	}
	return o.Value.(*v3.IPPool)
}

// An apply that is overtaken is planned again from what is there then.
func TestApplyIsOvertaken(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	n := 0
	r := &rival{Store: s, times: 2, write: func(s store.Store) {
		n++
		_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindIPPool, "a"), func(cur store.Object) (any, error) {
			p := store.New(store.KindIPPool).(*v3.IPPool)
			p.Name = "a"
			if cur.Value != nil {
				p = store.Clone(cur.Value).(*v3.IPPool)
			}
			p.Spec.CIDR, p.Spec.BlockSize = "10.0.0.0/16", 26
			p.Labels = map[string]string{"rival": fmt.Sprint(n)}
			return p, nil
		})
		if err != nil {
			t.Error(err)
		}
	}}
	var out strings.Builder
	if err := write(t.Context(), r, &out, apply, documents(t, poolText("a", "10.0.0.0/16", ", vxlanMode: Always")), writing{}); err != nil {
		t.Fatal(err)
	}
	if r.times != 0 {
		t.Fatalf("%d writes of the rival are left", r.times)
	}
	p := getPool(t, s, "a")
	if p.Spec.VXLANMode != v3.VXLANModeAlways || len(p.Labels) != 0 || p.UID == "" {
		t.Errorf("stored: %+v", p)
	}
	if want := "IPPool(a) configured\nSuccessfully applied 1 'IPPool' resource(s)\n"; out.String() != want {
		t.Errorf("printed %q, want %q", out.String(), want)
	}
}

// What becomes impossible meanwhile is refused, and nothing of it is written.
func TestCreateIsOvertaken(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	r := &rival{Store: s, times: 1, write: func(s store.Store) {
		if err := write(t.Context(), s, &strings.Builder{}, create, documents(t, poolText("b", "10.1.0.0/16", "")), writing{}); err != nil {
			t.Error(err)
		}
	}}
	err := write(t.Context(), r, &strings.Builder{}, create, documents(t, poolText("a", "10.0.0.0/16", "")+poolText("b", "10.2.0.0/16", "")), writing{})
	if !errors.Is(err, store.ErrExists) {
		t.Errorf("got %v, want ErrExists", err)
	}
	objects, _, err := s.List(t.Context(), store.KindIPPool, "")
	if err != nil || len(objects) != 1 {
		t.Errorf("store holds %d pools (%v), want the rival's alone", len(objects), err)
	}
}

// An endless rival ends the tries, not the patience.
func TestApplyGivesUp(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	n := 0
	r := &rival{Store: s, times: 100, write: func(s store.Store) {
		n++
		docs := documents(t, poolText("a", "10.0.0.0/16", fmt.Sprintf(", nodeSelector: \"n == '%d'\"", n)))
		if err := write(t.Context(), s, &strings.Builder{}, apply, docs, writing{}); err != nil {
			t.Error(err)
		}
	}}
	err := write(t.Context(), r, &strings.Builder{}, apply, documents(t, poolText("a", "10.0.0.0/16", "")), writing{})
	if !errors.Is(err, store.ErrConflict) || n != writeTries {
		t.Errorf("got %v after %d tries, want ErrConflict after %d", err, n, writeTries)
	}
}

func TestStoreFails(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	s.Fail(errors.New("no route to 10.0.0.1:2379"))
	err := write(t.Context(), s, &strings.Builder{}, apply, documents(t, poolText("a", "10.0.0.0/16", "")), writing{})
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "no route to 10.0.0.1:2379") {
		t.Errorf("apply: got %v", err)
	}
	d := &deletion{store: s, out: &strings.Builder{}, notes: &strings.Builder{}}
	if err := d.run(t.Context(), []target{{key: store.ResourceKey(store.KindIPPool, "a")}}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("delete: got %v", err)
	}
}

// Whatever a fault cuts off, the deletion can be run again and completes.
func TestDeletionIsTakenUpAgain(t *testing.T) {
	t.Parallel()
	for fails := range 6 {
		s := newMemory(t)
		docs := documents(t, poolText("a", "10.0.0.0/24", ", blockSize: 29"))
		if err := write(t.Context(), s, &strings.Builder{}, apply, docs, writing{}); err != nil {
			t.Fatal(err)
		}
		for _, b := range []string{"10.0.0.0/29", "10.0.0.8/29"} {
			putBlock(t, s, emptyBlock(netip.MustParsePrefix(b), "n1"))
		}
		n := 0
		f := &failing{Store: s, allow: func() bool { n++; return n != fails+1 }}
		d := &deletion{store: f, out: &strings.Builder{}, notes: &strings.Builder{}}
		first := d.run(t.Context(), []target{{key: store.ResourceKey(store.KindIPPool, "a")}})
		d.skipMissing = true
		if err := d.run(t.Context(), []target{{key: store.ResourceKey(store.KindIPPool, "a")}}); err != nil {
			t.Errorf("failure %d: again: %v", fails, err)
		}
		if fails == 0 && first == nil {
			t.Error("the first failure was not seen")
		}
		for _, k := range []store.Kind{store.KindIPPool, store.KindIPAMBlock, store.KindIPAMAffinity} {
			if objects, _, err := s.List(t.Context(), k, ""); err != nil || len(objects) != 0 {
				t.Errorf("failure %d: %d of %s are left (%v)", fails, len(objects), k, err)
			}
		}
	}
}

// failing is a store that refuses some transactions.
type failing struct {
	store.Store
	allow func() bool
}

func (f *failing) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	if !f.allow() {
		return nil, fmt.Errorf("%w: the connection was cut", store.ErrUnavailable)
	}
	return f.Store.Txn(ctx, ops...)
}

func emptyBlock(p netip.Prefix, node string) *store.Block {
	affinity := "host:" + node
	n := 1 << (p.Addr().BitLen() - p.Bits())
	b := &store.Block{CIDR: p.String(), Affinity: &affinity, Allocations: make([]*int, n), Attributes: []store.Attribute{}, SequenceNumberForAllocation: map[string]uint64{}}
	for i := range n {
		b.Unallocated = append(b.Unallocated, i)
	}
	return b
}

func putBlock(t *testing.T, s store.Store, b *store.Block) {
	t.Helper()
	p := netip.MustParsePrefix(b.CIDR)
	ops := []store.Op{{Action: store.Put, Object: store.Object{Key: store.BlockKey(p), Value: b}}}
	if n := b.Holder(); n != "" {
		ops = append(ops, store.Op{Action: store.Put, Object: store.Object{Key: store.AffinityKey(n, p), Value: &store.Affinity{State: store.AffinityConfirmed}}})
	}
	if _, err := s.Txn(t.Context(), ops...); err != nil {
		t.Fatal(err)
	}
}

// A release keeps a block whole: each address is either allocated or in the
// queue of free ones, every attribute is used, and strangers keep theirs.
func TestReleaseKeepsBlocksWhole(t *testing.T) {
	t.Parallel()
	prefix := netip.MustParsePrefix("10.0.0.0/28")
	rapid.Check(t, func(t *rapid.T) {
		b := emptyBlock(prefix, "n1")
		b.Unallocated = nil
		var mine []netip.Addr
		addr := prefix.Addr()
		held := map[netip.Addr]string{}
		var claimed []netip.Addr
		for i := range b.Allocations {
			who := rapid.SampledFrom([]string{"", "mine", "other"}).Draw(t, "who")
			if who == "" {
				b.Unallocated = append(b.Unallocated, i)
			} else {
				attr := store.Attribute{HandleID: &who}
				if who == "other" && rapid.Bool().Draw(t, "claimed") {
					// The node that goes says that it has what another one was given.
					attr.Secondary = map[string]string{store.AttrNode: "n3"}
					claimed = append(claimed, addr)
				}
				b.Attributes = append(b.Attributes, attr)
				n := len(b.Attributes) - 1
				b.Allocations[i] = &n
				b.SequenceNumberForAllocation[fmt.Sprint(i)] = uint64(i)
				held[addr] = who
			}
			if who == "mine" {
				mine = append(mine, addr)
			}
			addr = addr.Next()
		}
		cooldown := rapid.Bool().Draw(t, "cooldown")
		handle := &store.Handle{Block: map[string]int{b.CIDR: rapid.IntRange(1, 20).Draw(t, "count")}}
		have := []store.Object{
			{Key: store.BlockKey(prefix), Value: b, Revision: 1},
			{Key: store.HandleKey("mine"), Value: handle, Revision: 1},
		}
		before := store.Clone(b)
		rest := time.Duration(0)
		if cooldown {
			rest = time.Hour
		}
		ops := releases("n2", slices.Concat(mine, claimed), have, time.Unix(0, 0), rest)
		if diff := cmp.Diff(before, any(b)); diff != "" {
			t.Fatalf("changed the shared value (-before +after):\n%s", diff)
		}
		if len(mine) == 0 {
			if len(ops) != 0 {
				t.Fatalf("%d operations for nothing", len(ops))
			}
			return
		}
		if len(ops) != 2 || ops[1].Action != store.Remove || ops[1].Object.Key != store.HandleKey("mine") {
			t.Fatalf("operations: %+v", ops)
		}
		checkReleased(t, ops[0].Object.Value.(*store.Block), held, cooldown)
	})
}

func checkReleased(t *rapid.T, b *store.Block, held map[netip.Addr]string, cooldown bool) {
	free := map[int]bool{}
	for _, i := range b.Unallocated {
		if free[i] || b.Allocations[i] != nil {
			t.Fatalf("%d is free twice, or free and allocated", i)
		}
		free[i] = true
	}
	used := map[int]bool{}
	addr := netip.MustParsePrefix(b.CIDR).Addr()
	for i, a := range b.Allocations {
		switch {
		case a == nil && (held[addr] == "other" || cooldown && held[addr] == "mine" || !free[i]):
			t.Fatalf("%s of %q is gone", addr, held[addr])
		case a != nil:
			used[*a] = true
			attr := b.Attributes[*a]
			resting := attr.ReleasedAt != nil && attr.HandleID == nil
			if held[addr] == "other" && (resting || *attr.HandleID != "other") || held[addr] == "mine" && !resting || held[addr] == "" {
				t.Fatalf("%s of %q has %+v", addr, held[addr], attr)
			}
		}
		addr = addr.Next()
	}
	if len(used) != len(b.Attributes) {
		t.Fatalf("%d attributes, %d in use", len(b.Attributes), len(used))
	}
}

// In any set of pools, blocks and reservations, free and in-use addresses add
// up to what counting one by one gives.
func TestUsageAddsUp(t *testing.T) {
	t.Parallel()
	pool := netip.MustParsePrefix("10.0.0.0/26")
	rapid.Check(t, func(t *rapid.T) {
		var reserved []netip.Prefix
		for range rapid.IntRange(0, 4).Draw(t, "reservations") {
			a := netip.AddrFrom4([4]byte{10, 0, 0, rapid.Byte().Draw(t, "r")})
			reserved = append(reserved, netip.PrefixFrom(a, rapid.IntRange(23, 32).Draw(t, "bits")).Masked())
		}
		b := emptyBlock(netip.MustParsePrefix("10.0.0.16/28"), "n1")
		zero := 0
		for i := range b.Allocations {
			if rapid.Bool().Draw(t, "used") {
				b.Allocations[i] = &zero
			}
		}
		block := netip.MustParsePrefix(b.CIDR)
		got := poolUsage([]netip.Prefix{pool}, []netip.Prefix{block}, outermost(reserved), map[netip.Prefix]*store.Block{block: b})[0]
		want := usage{cidr: pool, total: 64}
		for a := pool.Addr(); pool.Contains(a); a = a.Next() {
			n, ok := b.Ordinal(a)
			used := ok && b.Allocations[n] != nil
			res := false
			for _, r := range reserved {
				res = res || r.Contains(a)
			}
			if used {
				want.used++
			}
			if res {
				want.reserved++
			}
			if !used && !res {
				want.free++
			}
		}
		if got.total != want.total || got.used != want.used || got.reserved != want.reserved || got.free != want.free {
			t.Fatalf("got %+v, want %+v", got, want)
		}
	})
}

// A manifest of a newer Calico goes through apply and get unharmed.
func TestNewerFieldsSurvive(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	const peer = "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: p}\nspec: {peerIP: 10.0.0.1, keepaliveTime: 20s%s}\n"
	for _, more := range []string{"", ", sourceAddress: None"} {
		if err := write(t.Context(), s, &strings.Builder{}, apply, documents(t, fmt.Sprintf(peer, more)), writing{}); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		q := query{kinds: []store.Kind{store.KindBGPPeer}, names: []string{"p"}, output: output{format: "json"}}
		if err := get(t.Context(), s, &out, q); err != nil {
			t.Fatal(err)
		}
		var got struct{ Spec map[string]any }
		if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
			t.Fatal(err)
		}
		if got.Spec["keepaliveTime"] != "20s" {
			t.Errorf("after applying %q: %s", more, out.String())
		}
	}
}

// oneByOne is a datastore that writes one object at a time, as Kubernetes' API, and that
// judges all of them before.
type oneByOne struct {
	*memory.Sequential
	refuse error
}

func (s oneByOne) Try(context.Context, ...store.Op) error { return s.refuse }

// TestApplyPieceByPiece: where objects are written one at a time, nothing is where the
// datastore would refuse one, and who fails in between learns what stands.
func TestApplyPieceByPiece(t *testing.T) {
	t.Parallel()
	docs := documents(t, poolText("a", "10.1.0.0/16", "")+poolText("b", "10.2.0.0/16", "")+poolText("c", "10.3.0.0/16", ""))
	for _, tt := range []struct {
		name   string
		refuse error
		writes int
		says   string
		stand  int
	}{
		{"all", nil, -1, "", 3},
		{"refused before", errors.New("admission webhook says no"), -1, "nothing is written: admission webhook says no", 0},
		{"the first fails", nil, 0, "cut between two writes", 0},
		{"the last fails", nil, 2, "after 2 of 3 objects were written, up to IPPool(b): ", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := oneByOne{memory.NewSequential(), tt.refuse}
			defer s.Close()
			s.LetWrites(tt.writes)
			var out strings.Builder
			err := write(t.Context(), s, &out, apply, docs, writing{})
			if got := fmt.Sprint(err); tt.says == "" && err != nil || !strings.Contains(got, tt.says) {
				t.Errorf("error: %v, want one with %q", err, tt.says)
			}
			have, _, err := s.List(t.Context(), store.KindIPPool, "")
			if err != nil || len(have) != tt.stand {
				t.Errorf("%d pools stand, want %d: %v", len(have), tt.stand, err)
			}
		})
	}
}
