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
	poll(t, func() string { return "a watcher" }, func() bool {
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
		poll(t, func() string { mu.Lock(); defer mu.Unlock(); return fmt.Sprintf("%q in %q", want, seen) }, func() bool {
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
	two := Changes{Del: prefixes("10.0.0.0/8"), Put: []Path{{netip.MustParsePrefix("10.1.0.0/16"), newPathSet(Hop{})}}}
	w.session(Peer{}, StateUp, "", time.Time{})
	for range maxWaiting/2 + 3 {
		w.changes(two, time.Time{})
	}
	w.session(Peer{}, StateDown, "", time.Time{})
	queue, lost := n.take()
	told := 0
	for i := range queue {
		if err := queue[i].each(func(Event) error { told++; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if told != maxWaiting || lost != 8 {
		t.Errorf("%d events and %d lost, want %d and 8", told, lost, maxWaiting)
	}
	w.remove(n)
	w.changes(two, time.Time{})
	if queue, _ := n.take(); len(queue) != 0 {
		t.Error("told after its end")
	}
}

// TestWatchHoldsUpNobody: telling a reader that never reads of a full table
// costs the same as telling of one route.
func TestWatchHoldsUpNobody(t *testing.T) {
	var w watchers
	w.add()
	ch := Changes{Put: make([]Path, batchSize)}
	for i := range ch.Put {
		ch.Put[i] = Path{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24), newPathSet(Hop{})}
	}
	if n := testing.AllocsPerRun(100, func() { w.changes(ch, time.Time{}) }); n > 2 {
		t.Errorf("%v allocations for %d routes, want 2 at most", n, len(ch.Put))
	}
}

// TestWatchStuckReader: while a reader's connection takes nothing, the others
// and the speaker go on; the reader is told in the end how much it missed.
func TestWatchStuckReader(t *testing.T) {
	t.Parallel()
	c := New(Options{Log: testLog(t)})
	ctx, cancel := context.WithCancel(t.Context())
	stuck, release := make(chan struct{}, 1), make(chan struct{})
	seen := make(chan Event, 2*maxWaiting)
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = c.Watch(ctx, func(e Event) error { // ends with ctx
			select {
			case stuck <- struct{}{}:
			default:
			}
			<-release
			seen <- e
			return nil
		})
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	one := Changes{Del: prefixes("10.0.0.0/8")}
	poll(t, func() string { return "a stuck reader" }, func() bool {
		c.watchers.changes(one, time.Time{})
		return len(stuck) == 1
	})
	for range maxWaiting + 7 { // returns at once though nobody reads
		c.watchers.changes(one, time.Time{})
	}
	close(release)
	for e := range seen {
		if e.What == "lost" {
			if !strings.Contains(e.Detail, "events were dropped") {
				t.Errorf("told %q", e.Detail)
			}
			return
		}
	}
}
