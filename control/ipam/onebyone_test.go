package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// dualHost is a host with a pool of each family on a datastore that writes one object at a
// time.
func dualHost(t *testing.T, six string, reserve int) (*memory.Sequential, *host) {
	t.Helper()
	st := memory.NewSequential()
	t.Cleanup(func() { _ = st.Close() })
	put(t, st, newPool("four", "10.0.0.0/24", blockSize(28)), newPool("six", six, blockSize(126)), newNode("a", nil))
	h := reserving(t, st, "a", newClock().time, ReserveConfig{Min: reserve, Max: reserve})
	t.Cleanup(h.stop)
	settle(t, h, "pools and node", func(s *state) bool { return len(s.pools) == 2 && s.registered })
	return st, h
}

// TestOneByOneTogether: a workload gets an address of each family from a datastore that cannot
// write both blocks at once, or none and an error.
func TestOneByOneTogether(t *testing.T) {
	t.Parallel()
	st, h := dualHost(t, "fd00:10::/126", 0)
	for i := range 4 {
		got, err := h.AssignTogether(await.Context(t), dualParts(fmt.Sprint("net.", i))...)
		if err != nil || len(got) != 2 || !got[0][0].Addr.Is4() || !got[1][0].Addr.Is6() {
			t.Fatalf("%v, %v", got, err)
		}
	}
	again, err := h.AssignTogether(await.Context(t), dualParts("net.0")...)
	if err != nil || len(again[0]) != 1 || len(again[1]) != 1 {
		t.Errorf("asked again: %v, %v", again, err)
	}
	if got, err := h.AssignTogether(await.Context(t), dualParts("net.4")...); !errors.Is(err, ErrExhausted) {
		t.Errorf("the IPv6 pool is full: %v, %v", got, err)
	}
	if held := sound(t, st); len(held) != 8 {
		t.Errorf("held: %v", held)
	}
	claims := make([]Claim, 0, 2)
	for _, l := range again {
		claims = append(claims, Claim{Addr: l[0].Addr, Handle: "net.0"})
	}
	if got, err := h.ReleaseUnless(await.Context(t), func(Claim) bool { return false }, claims...); err != nil || len(got) != 2 {
		t.Errorf("released unless they are used: %v, %v", got, err)
	}
	if held := sound(t, st); len(held) != 6 {
		t.Errorf("held: %v", held)
	}
}

// TestOneByOneConfirm: addresses of the reserve in two blocks are confirmed there, each by
// itself, and one that cannot be keeps none of the others.
func TestOneByOneConfirm(t *testing.T) {
	t.Parallel()
	st, h := dualHost(t, "fd00:10::/120", 4)
	var cs []Confirmation
	await.Until(t, "the reserve has both families", func() error {
		got, ok := h.Take(dualParts("net.0")...)
		if !ok {
			return fmt.Errorf("ready: %v", h.Ready())
		}
		for _, a := range got {
			cs = append(cs, Confirmation{Addr: a.Addr, Handle: "net.0"})
		}
		return nil
	})
	cs = append(cs, Confirmation{Addr: netip.MustParseAddr("10.9.9.9"), Handle: "net.0"})
	errs := h.Confirm(await.Context(t), cs...)
	if errs[0] != nil || errs[1] != nil || !errors.Is(errs[2], ErrNotHolder) {
		t.Errorf("confirm: %v", errs)
	}
	held := sound(t, st)
	for _, c := range cs[:2] {
		if held[c.Addr] != "net.0" {
			t.Errorf("%s is held by %q", c.Addr, held[c.Addr])
		}
	}
	st.LetWrites(0)
	if errs := h.Confirm(await.Context(t), cs[:2]...); errs[0] != nil || errs[1] != nil {
		t.Errorf("confirmed twice: %v", errs)
	}
	st.LetWrites(-1)
}

// TestOneByOneConfirmWrites: the handle of a workload with an address of each family is written
// once when both are confirmed, as Calico writes it, and once when they are released.
func TestOneByOneConfirmWrites(t *testing.T) {
	t.Parallel()
	seq := memory.NewSequential()
	t.Cleanup(func() { _ = seq.Close() })
	st := &writeCounter{Store: seq, writes: map[string]int{}}
	put(t, st, newPool("four", "10.0.0.0/24", blockSize(28)), newPool("six", "fd00:10::/120", blockSize(126)), newNode("a", nil))
	h := reserving(t, st, "a", newClock().time, ReserveConfig{Min: 8, Max: 8})
	t.Cleanup(h.stop)
	filled(t, h, "four", 8)
	filled(t, h, "six", 2)
	st.take()
	got := mustTake(t, h, dualParts("net.0")...)
	var cs []Confirmation
	for _, a := range got {
		cs = append(cs, Confirmation{Addr: a.Addr, Handle: "net.0"})
	}
	for range 2 { // it may be repeated
		if err := errors.Join(h.Confirm(await.Context(t), cs...)...); err != nil {
			t.Fatal(err)
		}
	}
	handle := store.HandleKey("net.0")
	if n := st.take()[handle.String()]; n != 1 {
		t.Errorf("confirmed with %d writes of the handle", n)
	}
	o, err := st.Get(t.Context(), handle)
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "the handle", fmt.Sprintf(`{"block":{"%s":1,"%s":1},"deleted":false}`, got[0].Block, got[1].Block), string(o.Raw))
	if held := sound(t, st); held[cs[0].Addr] != "net.0" || held[cs[1].Addr] != "net.0" {
		t.Errorf("held: %v", held)
	}
	if _, err := h.ReleaseHandleHere(await.Context(t), "net.0"); err != nil {
		t.Fatal(err)
	}
	if n := st.take()[handle.String()]; n != 1 {
		t.Errorf("released with %d writes of the handle", n)
	}
	sound(t, st)
}
