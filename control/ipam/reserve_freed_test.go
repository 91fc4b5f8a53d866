package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// releaseAsCalico frees an address in two transactions, as Calico's client does: the
// block first, and then the handle, of which an address less is counted or all are
// forgotten. between is called after the first one.
func releaseAsCalico(t *testing.T, st store.Store, cidr netip.Prefix, free func(netip.Addr) bool, between func()) {
	t.Helper()
	var left map[string]int
	await.Until(t, "the addresses are freed", func() error {
		obj, err := st.Get(await.Context(t), store.BlockKey(cidr))
		if err != nil {
			return err
		}
		obj.Key = store.BlockKey(cidr)
		e, _, err := EditBlock(obj, func(a Allocation) bool { return free(a.Addr) }, false, time.Now(), 0)
		if err != nil {
			return err
		}
		left = e.Left
		_, err = st.Txn(await.Context(t), e.Op)
		return err
	})
	between()
	for id := range left {
		await.Until(t, "the handle is lowered", func() error {
			obj, err := st.Get(await.Context(t), store.HandleKey(id))
			if err != nil {
				return err
			}
			obj.Key = store.HandleKey(id)
			op, ok := editHandle(obj, left)
			if !ok {
				return nil
			}
			_, err = st.Txn(await.Context(t), op)
			return err
		})
	}
}

// An address of the reserve that somebody frees is whose the datastore says: the host
// neither gives it out nor takes it back from who has it then.
func TestFreedFromReserve(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		// free frees an address, with others or alone, and has other take it at some
		// moment of that.
		free func(t *testing.T, w *world, b *host, block netip.Prefix, freed netip.Addr, other func())
	}{
		{"by another node", func(t *testing.T, _ *world, b *host, _ netip.Prefix, freed netip.Addr, other func()) {
			if _, err := b.Release(await.Context(t), Claim{Addr: freed}); err != nil {
				t.Fatal(err)
			}
			other()
		}},
		{"by Calico's client", func(t *testing.T, w *world, _ *host, block netip.Prefix, freed netip.Addr, other func()) {
			releaseAsCalico(t, w.st, block, func(a netip.Addr) bool { return a == freed }, func() {})
			other()
		}},
		{"by Calico's client, and taken before the handle is lowered", func(t *testing.T, w *world, _ *host, block netip.Prefix, freed netip.Addr, other func()) {
			releaseAsCalico(t, w.st, block, func(a netip.Addr) bool { return a == freed }, other)
		}},
		{"with all of the handle, which goes", func(t *testing.T, w *world, _ *host, block netip.Prefix, _ netip.Addr, other func()) {
			held := audit(t, w.st)
			releaseAsCalico(t, w.st, block, func(a netip.Addr) bool { return held[a] == store.ReserveHandle("a") }, func() {})
			other()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
			h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 8})
			defer h.stop()
			b := w.host("b", nil)
			filled(t, h, "p", 8)
			held := audit(t, w.st)
			freed := slices.MinFunc(slices.Collect(maps.Keys(held)), netip.Addr.Compare)
			if held[freed] != store.ReserveHandle("a") {
				t.Fatalf("%s is %q's", freed, held[freed])
			}
			block := h.Blocks()[0].CIDR
			tc.free(t, w, b, block, freed, func() {
				if _, err := b.AssignAddr(await.Context(t), freed, v4("calico.other")); err != nil {
					t.Fatal(err)
				}
			})
			catchUp(t, h, w.st)
			for n := range 60 {
				filled(t, h, "p", 1)
				got := mustTake(t, h, part4(fmt.Sprint("net.", n)))
				if got[0].Addr == freed {
					t.Fatalf("%s was given to %s", freed, got[0].Handle)
				}
				confirm(t, h, got...)
			}
			if got := audit(t, w.st)[freed]; got != "calico.other" {
				t.Errorf("%s is %q's", freed, got)
			}
		})
	}
}

// What the reserve has of a block that another program took from this node is freed,
// but not what a workload was given of it, and of a block that is the node's nothing.
func TestReserveOfALostBlock(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 8})
	defer h.stop()
	filled(t, h, "p", 8)
	got := mustTake(t, h, part4("net.1"))[0]
	lost := h.Blocks()[0].CIDR
	claims := func() (out []Claim) {
		for a, handle := range audit(t, w.st) {
			if handle == store.ReserveHandle("a") {
				out = append(out, Claim{Addr: a, Handle: handle})
			}
		}
		return out
	}
	unused := func(Claim) bool { return false }
	if freed, err := h.ReleaseUnless(await.Context(t), unused, claims()...); err != nil || len(freed) > 0 {
		t.Errorf("of a block that the node holds %v are freed (%v)", freed, err)
	}
	// As Calico's client releases an affinity: the block is nobody's, then the claim goes.
	await.Until(t, "the block is nobody's", func() error {
		obj, err := w.st.Get(await.Context(t), store.BlockKey(lost))
		if err != nil {
			return err
		}
		obj.Key = store.BlockKey(lost)
		e, _, err := EditBlock(obj, func(Allocation) bool { return false }, true, time.Now(), 0)
		if err != nil {
			return err
		}
		_, err = w.st.Txn(await.Context(t), e.Op)
		return err
	})
	remove(t, w.st, store.AffinityKey("a", lost))
	settle(t, h, "another block", func(s *state) bool { return len(s.own) == 1 && s.own[0].CIDR != lost })
	filled(t, h, "p", 8)
	before := claims()
	freed, err := h.ReleaseUnless(await.Context(t), unused, before...)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range freed {
		if !lost.Contains(a) || a == got.Addr {
			t.Errorf("%s is freed", a)
		}
	}
	for _, c := range claims() {
		if lost.Contains(c.Addr) && c.Addr != got.Addr {
			t.Errorf("%s is held still", c.Addr)
		}
	}
	confirm(t, h, got)
	if held := audit(t, w.st); held[got.Addr] != "net.1" {
		t.Errorf("%s is held by %q", got.Addr, held[got.Addr])
	}
}
