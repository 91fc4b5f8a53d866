package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// coolingFor returns a configuration by which released addresses rest.
func coolingFor(d time.Duration) *store.IPAMConfig {
	c := store.DefaultIPAMConfig()
	c.IPCooldownSeconds = new(int(d.Seconds()))
	return &c
}

// TestAgainWhileResting: an address that the datastore was made to forget rests,
// and the workload that lives with it takes it back all the same. Nobody else
// does, and nothing of the rest is left.
func TestAgainWhileResting(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/29", blockSize(29)), coolingFor(30*time.Second))
	h := w.host("a", nil)
	var all []netip.Addr
	for _, handle := range []string{"net.1", "net.2"} {
		r := v4(handle)
		r.Idempotent = true
		all = append(all, netip.MustParseAddr(mustAssign(t, h, r)[0]))
		if _, err := h.ReleaseHandle(await.Context(t), handle); err != nil {
			t.Fatal(err)
		}
	}
	r := v4("net.1")
	r.Idempotent = true
	if _, err := h.AssignAddr(await.Context(t), all[0], r); !errors.Is(err, ErrCooldown) {
		t.Errorf("somebody new: %v, want ErrCooldown", err)
	}
	r.Again = true
	for range 2 {
		if got, err := h.AssignAddr(await.Context(t), all[0], r); err != nil || got.Addr != all[0] {
			t.Fatalf("again: %v, %v", got, err)
		}
	}
	mustDiff(t, "stored", map[netip.Addr]string{all[0]: "net.1"}, audit(t, w.st))
	other := v4("net.3")
	other.Again = true
	if _, err := h.AssignAddr(await.Context(t), all[0], other); !errors.Is(err, ErrTaken) || errors.Is(err, ErrCooldown) {
		t.Errorf("another's: %v, want ErrTaken", err)
	}
	// The last that rests is taken back, too.
	r.Handle = "net.2"
	if _, err := h.AssignAddr(await.Context(t), all[1], r); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "stored", map[netip.Addr]string{all[0]: "net.1", all[1]: "net.2"}, audit(t, w.st))
	w.clock.turn(time.Minute)
	for i := range 6 {
		mustAssign(t, h, v4(fmt.Sprint("net.x", i)))
	}
	if got := audit(t, w.st); len(got) != 8 || got[all[0]] != "net.1" || got[all[1]] != "net.2" {
		t.Errorf("stored when all rest is over: %v", got)
	}
}

// TestAgainOutOfTheRestingReserve: likewise where the address rests in the
// reserve of the workload's own host.
func TestAgainOutOfTheRestingReserve(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(29)), newNode("a", nil), coolingFor(time.Minute))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 4, Max: 4, Journal: &disk{}})
	defer h.stop()
	filled(t, h, "p", 4)
	addr := mustTake(t, h, part4("net.1"))[0].Addr
	h.Unclaim("net.1")
	r := v4("net.1")
	r.Idempotent = true
	if _, err := h.AssignAddr(await.Context(t), addr, r); !errors.Is(err, ErrCooldown) {
		t.Errorf("somebody new: %v, want ErrCooldown", err)
	}
	r.Again = true
	if got, err := h.AssignAddr(await.Context(t), addr, r); err != nil || got.Addr != addr {
		t.Fatalf("again: %v, %v", got, err)
	}
	if got := audit(t, w.st)[addr]; got != "net.1" {
		t.Errorf("%s is stored as %q's", addr, got)
	}
}

// brimDisk is a disk that may be full.
type brimDisk struct {
	disk
	full atomic.Bool
}

func (d *brimDisk) Put(key string, value any) error {
	if d.full.Load() {
		return errors.New("no space left on device")
	}
	return d.disk.Put(key, value)
}

func (d *brimDisk) coolingDown(a netip.Addr) bool {
	_, ok := d.Entries()[cooldownPrefix+a.String()]
	return ok
}

// TestRestOnAFullDisk: a rest that could not be written down is written when it
// is tried again. One that never could be lasts as long as the process.
func TestRestOnAFullDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(29)), newNode("a", nil), coolingFor(time.Minute))
	d := &brimDisk{}
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 4, Max: 4, Journal: d})
	defer h.stop()
	filled(t, h, "p", 4)
	first, second := mustTake(t, h, part4("net.1"))[0].Addr, mustTake(t, h, part4("net.2"))[0].Addr
	d.full.Store(true)
	if err := h.CoolDown("net.1"); err == nil {
		t.Fatal("a rest was written to a full disk")
	}
	d.full.Store(false)
	if err := h.CoolDown("net.1"); err != nil {
		t.Fatal(err)
	}
	if !d.coolingDown(first) {
		t.Errorf("the disk does not know that %s rests", first)
	}
	h.Unclaim("net.1")
	d.full.Store(true)
	h.Unclaim("net.2")
	d.full.Store(false)
	for _, addr := range []netip.Addr{first, second} {
		if _, err := h.AssignAddr(await.Context(t), addr, v4("net.3")); !errors.Is(err, ErrCooldown) {
			t.Errorf("%s by name: %v, want ErrCooldown", addr, err)
		}
	}
	for i := range 4 {
		if as, ok := h.Take(part4(fmt.Sprint("net.x", i))); ok && slices.Contains([]netip.Addr{first, second}, as[0].Addr) {
			t.Errorf("%s is given while it rests", as[0].Addr)
		}
	}
}
