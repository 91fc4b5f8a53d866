package ipam

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestReserveFollowsEdits: what is reserved, disabled or taken from this node
// after the reserve was filled is not given from the reserve, and goes back.
func TestReserveFollowsEdits(t *testing.T) {
	t.Parallel()
	var quarters []string // the first two addresses of every block
	for i := range 32 {
		quarters = append(quarters, fmt.Sprintf("10.0.0.%d/31", 8*i))
	}
	for _, tc := range []struct {
		name  string
		edit  any
		stays func(netip.Addr) bool
	}{
		{"a reservation", newReservation("r", quarters...), func(a netip.Addr) bool { return a.As4()[3]%8 >= 2 }},
		{"a reservation of all", newReservation("r", "10.0.0.0/24"), func(netip.Addr) bool { return false }},
		{"a disabled pool", newPool("p", "10.0.0.0/24", blockSize(29), func(s *v3.IPPoolSpec) { s.Disabled = true }), func(netip.Addr) bool { return false }},
		{"another node selector", newPool("p", "10.0.0.0/24", blockSize(29), func(s *v3.IPPoolSpec) { s.NodeSelector = "rack == 'x'" }), func(netip.Addr) bool { return false }},
		{"another use", newPool("p", "10.0.0.0/24", blockSize(29), func(s *v3.IPPoolSpec) { s.AllowedUses = []v3.IPPoolAllowedUse{v3.IPPoolAllowedUseTunnel} }), func(netip.Addr) bool { return false }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(29)), newNode("a", nil))
			d := &disk{}
			h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 4, Max: 4, Journal: d})
			defer h.stop()
			filled(t, h, "p", 4)
			put(t, w.st, tc.edit)
			settle(t, h, "the edit", func(s *state) bool {
				return len(s.reserved) > 0 || s.pools["p"].off != "" || len(s.pools["p"].uses) == 1 || !s.pools["p"].nodes.Matches(nil)
			})
			for i := range 8 {
				if as, ok := h.Take(part4(fmt.Sprint("net.", i))); ok && !tc.stays(as[0].Addr) {
					t.Errorf("%s is given", as[0].Addr)
				}
			}
			settle(t, h, "what the reserve must not have given back", func(s *state) bool {
				for _, b := range s.own {
					for _, o := range b.ready {
						if !tc.stays(addrAt(b.CIDR, o)) {
							return false
						}
					}
				}
				return true
			})
			h.stop()
			// After a boot without the datastore neither.
			known := fromDisk(t, w.st)
			w.st.Fail(errors.New("away"))
			a := New(Config{Store: w.st, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Reserve: ReserveConfig{Min: 4, Max: 4, Journal: d}})
			a.apply(known)
			for i := range 8 {
				if as, ok := a.Take(part4(fmt.Sprint("net.again", i))); ok && !tc.stays(as[0].Addr) {
					t.Errorf("%s is given after a boot", as[0].Addr)
				}
			}
		})
	}
}

// What was taken before a reservation stays its workload's.
func TestReservedAfterTaken(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(29)), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 4, Max: 4})
	defer h.stop()
	filled(t, h, "p", 4)
	got := mustTake(t, h, part4("net.1"))[0]
	put(t, w.st, newReservation("r", "10.0.0.0/24"))
	settle(t, h, "the reserve given back", func(s *state) bool {
		return len(s.own) == 1 && len(s.own[0].ready) == 1
	})
	confirm(t, h, got)
	mustDiff(t, "stored", map[netip.Addr]string{got.Addr: "net.1"}, audit(t, w.st))
}

// TestAgain: a workload lives with an address that the datastore was made to
// forget, or not, and its pool gives to nobody new.
func TestAgain(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddr("10.0.0.5")
	disabled := newPool("p", "10.0.0.0/29", blockSize(30), func(s *v3.IPPoolSpec) { s.Disabled = true })
	for _, tc := range []struct {
		name   string
		forget bool
		edit   func(*testing.T, *world)
		want   error // of a request that is not for an address that was given before
	}{
		{"disabled, held", false, func(t *testing.T, w *world) { put(t, w.st, disabled) }, nil},
		{"disabled, forgotten", true, func(t *testing.T, w *world) { put(t, w.st, disabled) }, ErrOutsidePools},
		{"deleted, held", false, func(t *testing.T, w *world) { remove(t, w.st, store.ResourceKey(store.KindIPPool, "p")) }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/29", blockSize(30)))
			h := w.host("a", nil)
			r := v4("net.1")
			r.Idempotent = true
			if _, err := h.AssignAddr(await.Context(t), addr, r); err != nil {
				t.Fatal(err)
			}
			if tc.forget {
				if _, err := h.ReleaseHandle(await.Context(t), "net.1"); err != nil {
					t.Fatal(err)
				}
			}
			tc.edit(t, w)
			settle(t, h, "the edit", func(s *state) bool { return s.pools["p"] == nil || s.pools["p"].off != "" })
			if _, err := h.AssignAddr(await.Context(t), addr, r); !errors.Is(err, tc.want) {
				t.Errorf("without Again: %v, want %v", err, tc.want)
			}
			r.Again = true
			if got, err := h.AssignAddr(await.Context(t), addr, r); err != nil || got.Addr != addr {
				t.Errorf("again: %v, %v", got, err)
			}
			other := v4("net.2")
			other.Idempotent, other.Again = true, true
			if _, err := h.AssignAddr(await.Context(t), addr, other); !errors.Is(err, ErrTaken) {
				t.Errorf("another's: %v", err)
			}
			mustDiff(t, "stored", map[netip.Addr]string{addr: "net.1"}, audit(t, w.st))
		})
	}
}

// A borrowed address is taken again also when affinity has become strict.
func TestAgainBorrowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/30", blockSize(30)))
	a, b := w.host("a", nil), w.host("b", nil)
	mustAssign(t, a, v4("net.a"))
	r := v4("net.b")
	r.Idempotent = true
	borrowed := netip.MustParseAddr(mustAssign(t, b, r)[0])
	if _, err := b.ReleaseHandle(await.Context(t), "net.b"); err != nil {
		t.Fatal(err)
	}
	config := store.DefaultIPAMConfig()
	config.StrictAffinity = true
	put(t, w.st, &config)
	settle(t, b, "strict affinity", func(s *state) bool { return s.config.StrictAffinity })
	if _, err := b.AssignAddr(await.Context(t), borrowed, r); !errors.Is(err, ErrStrictAffinity) {
		t.Errorf("somebody new: %v", err)
	}
	r.Again = true
	if _, err := b.AssignAddr(await.Context(t), borrowed, r); err != nil {
		t.Errorf("again: %v", err)
	}
}

// TestRestOutlivesTheDaemon: an address that a workload gave back to the reserve
// rests also over a restart, is not given by name meanwhile, and does not go
// back to the block without its rest.
func TestRestOutlivesTheDaemon(t *testing.T) {
	t.Parallel()
	cool := 60
	config := store.DefaultIPAMConfig()
	config.IPCooldownSeconds = &cool
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(29)), newNode("a", nil), &config)
	d := &disk{}
	cfg := ReserveConfig{Min: 4, Max: 4, Journal: d}
	h := reserving(t, w.st, "a", w.clock.time, cfg)
	filled(t, h, "p", 4)
	first := mustTake(t, h, part4("net.1"))[0].Addr
	if err := h.CoolDown("net.1"); err != nil {
		t.Fatal(err)
	}
	h.Unclaim("net.1")
	if _, err := h.AssignAddr(await.Context(t), first, v4("net.2")); !errors.Is(err, ErrCooldown) {
		t.Errorf("by name: %v", err)
	}
	h.stop()

	h = reserving(t, w.st, "a", w.clock.time, cfg)
	defer h.stop()
	filled(t, h, "p", 2)
	for i := range 8 {
		if as, ok := h.Take(part4(fmt.Sprint("net.x", i))); ok && as[0].Addr == first {
			t.Errorf("%s is given again after a restart", first)
		} else if ok {
			h.Unclaim(as[0].Handle)
		}
	}
	// The pool is switched off: what rests stays until it has rested.
	put(t, w.st, newPool("p", "10.0.0.0/24", blockSize(29), func(s *v3.IPPoolSpec) { s.Disabled = true }))
	catchUp(t, h, w.st)
	if audit(t, w.st)[first] != store.ReserveHandle("a") {
		t.Errorf("%s went back to its block without its rest", first)
	}
	w.clock.turn(61 * time.Second)
	h.reserveChanged.Set()
	settle(t, h, "all given back", func(s *state) bool { return len(s.own) == 0 || len(s.own[0].ready) == 0 })
	if err := h.CoolDown("net.none"); err != nil {
		t.Fatal(err)
	}
	for key := range d.Entries() {
		if key != rememberKey {
			t.Errorf("the journal still has %s", key)
		}
	}
}
