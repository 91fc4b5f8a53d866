package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// A host in doubt serves no ADD before its workloads were compared with the
// datastore once; a host without workloads is in no doubt.
func TestDoubt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	a.Doubt()
	if err := a.Verified(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.add(a, w.request(1<<40))
	a.Doubt()
	next := w.request(2 << 40)
	if _, err := a.Add(t.Context(), next); !errors.Is(err, ErrNotReady) {
		t.Fatalf("ADD in doubt: %v, want ErrNotReady", err)
	}
	if err := a.Status(t.Context()); !errors.Is(err, ErrNotReady) {
		t.Errorf("STATUS in doubt: %v, want ErrNotReady", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Verified(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("verified before anything was: %v", err)
	}
	// A datastore that cannot be reached verifies nothing.
	w.ipam.set(fmt.Errorf("read: %w", store.ErrUnavailable), false)
	a.reclaimer.all(t.Context())
	if _, err := a.Add(t.Context(), next); !errors.Is(err, ErrNotReady) {
		t.Fatalf("ADD after nothing was verified: %v, want ErrNotReady", err)
	}
	w.ipam.set(nil, false)
	a.reclaimer.all(t.Context())
	if err := a.Verified(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.add(a, next)
}

// One workload whose address the datastore refuses keeps no others waiting.
func TestDoubtAboutOneThatCannotBeHelped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	w.add(a, w.request(1<<40))
	a.Doubt()
	w.ipam.set(ErrNoAddress, false)
	a.reclaimer.all(t.Context())
	if err := a.Verified(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.ipam.set(nil, false)
	w.add(a, w.request(2<<40))
}

// A doubt stays while a workload was not compared, whatever became of others.
func TestDoubtStays(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		wire bool  // the devices cannot be listed
		deny error // of the last workload
	}{
		{name: "devices not listed", wire: true},
		{name: "datastore away", deny: store.ErrUnavailable},
		{name: "not ready", deny: ErrNotReady},
		{name: "unknown reason", deny: errors.New("something else")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			wire := &blindWire{Wire: w.wire}
			w.cfg = func(c *Config) { c.Wire = wire }
			a := w.start()
			for n := range 4 {
				req := w.request((n + 1) << 40)
				w.add(a, req)
				err := ErrNoAddress
				if n == 3 {
					err = tt.deny
				}
				w.ipam.deny(handle(req.ID), err)
			}
			a.Doubt()
			wire.blind.Store(tt.wire)
			if a.reclaimer.all(t.Context()) {
				t.Error("nothing is left to be taken up")
			}
			next := w.request(5 << 40)
			if _, err := a.Add(t.Context(), next); !errors.Is(err, ErrNotReady) {
				t.Fatalf("ADD when not all were compared: %v, want ErrNotReady", err)
			}
			wire.blind.Store(false)
			w.ipam.deny(handle(w.request(4<<40).ID), nil)
			a.reclaimer.all(t.Context())
			if err := a.Verified(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.add(a, next)
		})
	}
}

// blindWire cannot list devices while it is blind.
type blindWire struct {
	Wire
	blind atomic.Bool
}

func (w *blindWire) Devices(ctx context.Context) (map[string]string, error) {
	if w.blind.Load() {
		return nil, errors.New("dump interrupted")
	}
	return w.Wire.Devices(ctx)
}

// A disk that takes nothing keeps no route of somebody else's address, and no
// doubt is settled by it.
func TestFenceWithoutDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1 << 40)
	addr := w.add(a, req).Addresses[0].Addr
	a.Doubt()
	w.ipam.deny(handle(req.ID), ipam.ErrTaken)
	if err := w.journal.Close(); err != nil {
		t.Fatal(err)
	}
	if a.reclaimer.all(t.Context()) {
		t.Error("nothing is left to be taken up")
	}
	if w.routes(addr) {
		t.Errorf("the host routes %s, which is somebody else's", addr)
	}
	if _, err := a.Add(t.Context(), w.request(2<<40)); !errors.Is(err, ErrNotReady) {
		t.Errorf("ADD: %v, want ErrNotReady", err)
	}
}

// A repeated ADD of a workload that lost its address makes it whole with another
// one, and the datastore is told of that, also after a restart.
func TestAddOfAFencedOne(t *testing.T) {
	t.Parallel()
	for _, behind := range []bool{false, true} {
		t.Run(fmt.Sprint("behind ", behind), func(t *testing.T) {
			t.Parallel()
			w := newBehind(t)
			if !behind {
				w.cfg = nil
			}
			a := w.start()
			req := w.numbered(1)
			lost := w.add(a, req).Addresses[0].Addr
			settle(t, a)
			w.forget()
			w.ipam.steal(lost, "net.other")
			a.Doubt()
			a.reclaimer.all(t.Context())
			if got := a.Endpoints()[0].Lost; got == "" || w.routes(lost) {
				t.Fatalf("lost: %q, routed: %v", got, w.routes(lost))
			}
			addr := w.add(a, req).Addresses[0].Addr
			if addr == lost || !w.routes(addr) || w.routes(lost) {
				t.Errorf("has %s (routed: %v) after %s (routed: %v)", addr, w.routes(addr), lost, w.routes(lost))
			}
			if got := a.Endpoints()[0].Lost; got != "" {
				t.Errorf("lost: %q", got)
			}
			r, _ := a.ledger.get(req.ID)
			if r.State != attachedPending || !slices.Equal(r.Claims, []netip.Addr{addr}) {
				t.Errorf("%s, claims %v; want %s pending", r.State, r.Claims, addr)
			}
			w.ipam.forgetClaims() // what IPAM itself knew of claims goes with the daemon
			a = w.start()
			settle(t, a)
			if got := w.ipam.has(handle(req.ID)); !slices.Equal(got, []netip.Addr{addr}) {
				t.Errorf("the datastore has %v, the container %s", got, addr)
			}
			w.check(a, req)
			w.del(a, req)
			settle(t, a)
			w.ipam.steal(lost, "")
			w.expectClean()
		})
	}
}

// A host that must not write takes down the routes of what others hold, and of
// nothing else.
func TestFenceForeign(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name      string
		attribute *store.Attribute // of the address; nil: it is free
		noBlock   bool
		lost      bool
	}{
		{name: "another's", attribute: &store.Attribute{HandleID: new("net.other")}, lost: true},
		{name: "free"},
		{name: "no block", noBlock: true},
		{name: "its own", attribute: &store.Attribute{HandleID: new("own")}},
		{name: "of a reserve", attribute: &store.Attribute{HandleID: new("routerd-reserve-node-a"), Secondary: map[string]string{"type": "routerdReserve"}}},
		{name: "without a handle", attribute: &store.Attribute{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start()
			req := w.request(1 << 40)
			got := w.add(a, req).Addresses[0]
			if !tt.noBlock {
				b := &store.Block{CIDR: got.Block.String()}
				for addr := got.Block.Addr(); got.Block.Contains(addr); addr = addr.Next() {
					b.Allocations = append(b.Allocations, nil)
					if addr == got.Addr && tt.attribute != nil {
						if tt.attribute.HandleID != nil && *tt.attribute.HandleID == "own" {
							*tt.attribute.HandleID = handle(req.ID)
						}
						b.Allocations[len(b.Allocations)-1] = new(int)
						b.Attributes = []store.Attribute{*tt.attribute}
					}
				}
				if _, err := w.store.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.BlockKey(got.Block), Value: b}}); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.FenceForeign(t.Context()); err != nil {
				t.Fatal(err)
			}
			if lost := a.Endpoints()[0].Lost; (lost != "") != tt.lost {
				t.Errorf("lost: %q", lost)
			}
			if routed := w.routes(got.Addr); routed == tt.lost {
				t.Errorf("the host routes %s: %v", got.Addr, routed)
			}
		})
	}
}

// routes reports whether the sink wants a route to an address.
func (w *world) routes(addr netip.Addr) bool {
	w.sink.mu.Lock()
	defer w.sink.mu.Unlock()
	for _, o := range w.sink.want {
		if r, ok := o.(dataplane.Route); ok && r.Prefix.Addr() == addr {
			return true
		}
	}
	return false
}
