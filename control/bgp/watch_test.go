package bgp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/store"
)

// TestWatch: sessions and best paths are told as they change.
func TestWatch(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	d := newDaemonOf(t, Options{Node: "node1"})
	var mu sync.Mutex
	var seen []string
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		err := d.Watch(ctx, func(e Event) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, strings.TrimSpace(fmt.Sprintf("%s %s %s", e.What, e.Subject, e.Detail)))
			return nil
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("watch: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	poll(t, 10*time.Second, func() string { return "a watcher" }, func() bool {
		d.watchers.mu.Lock()
		defer d.watchers.mu.Unlock()
		return len(d.watchers.list) == 1
	})
	d.send(store.Batch{Synced: true, Events: []store.Event{
		bgpNode(t, "node1", h[0].String()+"/24"), conf(t, "default", `{"bindMode":"NodeIP"}`),
		peer(t, "tor", fmt.Sprintf(`{"peerIP":%q,"asNumber":64999}`, h[1])),
	}})
	o := startFRRAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, routes: []string{"203.0.113.0/24"}})
	await := func(want string) {
		t.Helper()
		poll(t, 30*time.Second, func() string { mu.Lock(); defer mu.Unlock(); return fmt.Sprintf("%q in %q", want, seen) }, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.Contains(seen, want)
		})
	}
	await(fmt.Sprintf("session tor (%s) up: Established", h[1]))
	await(fmt.Sprintf("route 203.0.113.0/24 via %s from tor (%s) as-path 64999", h[1], h[1]))
	o.announce()
	await("withdrawn 203.0.113.0/24")
}

// TestWatchSlowReader: what a slow reader misses is counted, and the memory
// for it is bounded.
func TestWatchSlowReader(t *testing.T) {
	t.Parallel()
	var w watchers
	n := w.add()
	for range maxWaiting + 5 {
		w.changes(Changes{Del: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}, time.Time{})
	}
	events, lost := n.take()
	if len(events) != maxWaiting || lost != 5 {
		t.Errorf("%d events and %d lost, want %d and 5", len(events), lost, maxWaiting)
	}
	w.remove(n)
	w.changes(Changes{Del: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}, time.Time{})
	if events, _ := n.take(); len(events) != 0 {
		t.Error("told after its end")
	}
}
