package attach

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestNotHeld: DEL and GC of a host that does not hold its name cut wires, and
// take nothing out of the datastore: neither what another machine of this name
// wrote nor its own. With the name they go on, but not about what was another's.
func TestNotHeld(t *testing.T) {
	t.Parallel()
	for _, behind := range []bool{true, false} {
		for _, disown := range []bool{true, false} {
			t.Run(fmt.Sprintf("behind=%t,disown=%t", behind, disown), func(t *testing.T) {
				t.Parallel()
				testNotHeld(t, behind, disown)
			})
		}
	}
}

func testNotHeld(t *testing.T, behind, disown bool) {
	var refused atomic.Bool
	w := newWorld(t)
	w.ipam.reserve = behind
	w.cfg = func(c *Config) {
		c.Behind = behind
		c.Held = func() error {
			if refused.Load() {
				return errors.New("another machine is there")
			}
			return nil
		}
	}
	a := w.start()
	mine, theirs := w.numbered(1), w.numbered(2)
	w.add(a, mine)
	settle(t, a)
	// The other machine's workload, of which this one knows nothing.
	r := recordOf(theirs.ID, Workload{Orchestrator: CNI, Namespace: "default"})
	r.Addresses = []Address{{Addr: netip.MustParseAddr("192.168.0.60")}}
	ep, _, err := a.endpoints.of(r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create(t.Context(), w.store, ep); err != nil {
		t.Fatal(err)
	}
	w.ipam.steal(r.Addresses[0].Addr, handle(theirs.ID))
	shown := func(want int) {
		t.Helper()
		w.ipam.mu.Lock()
		their := w.ipam.more[r.Addresses[0].Addr]
		w.ipam.mu.Unlock()
		handles := len(w.ipam.handles())
		if their != "" {
			handles++
		}
		if n := w.endpoints(); n != want || handles != want {
			t.Errorf("the datastore shows %d endpoints and %d handles, want %d", n, handles, want)
		}
	}
	shown(2)

	refused.Store(true)
	del := delOf(theirs)
	del.Workload = Workload{Orchestrator: CNI, Namespace: "default"}
	if err := a.Del(t.Context(), del); !errors.Is(err, ErrNotReady) && (err != nil || !behind) {
		t.Errorf("DEL: %v", err)
	}
	if _, err := a.GC(t.Context(), mine.ID.Network, nil); !errors.Is(err, ErrNotReady) {
		t.Errorf("GC: %v", err)
	}
	if !a.releaser.detachAll(t.Context()) || a.releaser.complete(t.Context(), now) {
		t.Error("the wires are not cut, or what cannot be complete is")
	}
	if left := w.leftovers(); slices.ContainsFunc(left, func(s string) bool { return strings.HasPrefix(s, "device") || strings.HasPrefix(s, "kernel") }) {
		t.Errorf("wires and routes are left: %q", left)
	}
	if behind {
		w.add(a, w.numbered(3)) // it was given before the refusal was known
		if a.flusher.all(t.Context(), now) {
			t.Error("the datastore was told of an attachment")
		}
	}
	shown(2)

	if disown {
		if err := a.Disown(); err != nil {
			t.Fatal(err)
		}
		a = w.start() // killed before it was done
	}
	refused.Store(false)
	if !a.releaser.detachAll(t.Context()) || !a.releaser.complete(t.Context(), now) {
		t.Error("what was on its way out is still there")
	}
	switch {
	case disown:
		shown(2)
	case behind:
		shown(0)
	default:
		shown(1) // the runtime repeats its DEL
		if err := a.Del(t.Context(), del); err != nil {
			t.Error(err)
		}
		shown(0)
	}
}

// TestNameWakes: what waited for the name goes on with the datastore's first
// answer.
func TestNameWakes(t *testing.T) {
	t.Parallel()
	var refused atomic.Bool
	refused.Store(true)
	w := newBehind(t)
	behind := w.cfg
	w.cfg = func(c *Config) {
		behind(c)
		c.Retry = maxRetry // nothing is tried again by itself
		c.Held = func() error {
			if refused.Load() {
				return errors.New("not yet")
			}
			return nil
		}
	}
	a := w.start()
	w.run(a)
	req := w.numbered(1)
	w.add(a, req)
	await.True(w.t, "it was tried", func() bool {
		return a.schedule.armed(req.ID)
	})
	refused.Store(false)
	a.HandleStore(clustertest.Step("node-a", store.Batch{Synced: true}))
	await.True(w.t, "the datastore knows", func() bool { return w.endpoints() == 1 && len(w.ipam.handles()) == 1 })
}
