package policyevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

// world is a cluster's problems, and the API that hears of them.
type world struct {
	mu       sync.Mutex
	problems map[store.Key]string
	unknown  bool
	refuses  error
	events   map[store.Key]kube.Event
	written  int
}

func (w *world) SetEvent(_ context.Context, key store.Key, e kube.Event) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuses != nil {
		return w.refuses
	}
	w.written++
	w.events[key] = e
	return nil
}

func (w *world) known() (map[store.Key]string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.problems), !w.unknown
}

// is changes the world.
func (w *world) is(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// says is what the API has.
func (w *world) says() map[string]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]string{}
	for key, e := range w.events {
		out[key.Name] = strings.TrimSpace(fmt.Sprintf("%s %s", map[bool]string{true: "!"}[e.Warning], e.Message))
	}
	return out
}

func (w *world) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.written
}

func key(name string) store.Key {
	return store.Key{Kind: store.KindNetworkPolicy, Namespace: "prod", Name: name}
}

func begin(t *testing.T) (w *world, expect func(when string, after time.Duration, want map[string]string), end func()) {
	w = &world{problems: map[store.Key]string{}, events: map[store.Key]kube.Event{}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		New(w, w.known, slog.New(slog.DiscardHandler)).Run(ctx)
	}()
	expect = func(when string, after time.Duration, want map[string]string) {
		t.Helper()
		time.Sleep(after) //nolint:forbidigo // virtual time
		synctest.Wait()
		if diff := cmp.Diff(want, w.says()); diff != "" {
			t.Errorf("%s: the events (-want +got):\n%s", when, diff)
		}
	}
	return w, expect, func() { cancel(); <-ended }
}

func TestTeller(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, expect, end := begin(t)
		defer end()
		w.is(func() {
			w.unknown = true
			w.problems = map[store.Key]string{key("a"): "no port", {Kind: store.KindHostEndpoint, Name: "theirs"}: "clash"}
		})
		expect("before the datastore has said all", time.Hour, map[string]string{})
		w.is(func() { w.unknown = false })
		expect("a policy with a fault", lookEvery, map[string]string{"a": "! no port"})
		expect("nothing changes", renewEvery-2*lookEvery, map[string]string{"a": "! no port"})
		if n := w.count(); n != 1 {
			t.Errorf("written %d times though nothing changed", n)
		}
		expect("what the API would forget", 2*lookEvery, map[string]string{"a": "! no port"})
		if n := w.count(); n != 2 {
			t.Errorf("written %d times, want it renewed once", n)
		}
		w.is(func() { w.problems[key("a")] = "no CIDR" })
		expect("another fault at once", lookEvery, map[string]string{"a": "! no port"})
		expect("another fault", quiet, map[string]string{"a": "! no CIDR"})
		w.is(func() { w.problems = nil })
		expect("mended", quiet+lookEvery, map[string]string{"a": messageDone})
		n := w.count()
		expect("and then", 3*renewEvery, map[string]string{"a": messageDone})
		if now := w.count(); now != n {
			t.Errorf("written %d times after it was mended", now-n)
		}
	})
}

// TestNotTaken: what the API does not take is tried again, ever less often; an object that
// is gone keeps nothing up.
func TestNotTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, expect, end := begin(t)
		defer end()
		w.is(func() {
			w.refuses = errors.New("no right")
			w.problems = map[store.Key]string{key("a"): "no port"}
		})
		expect("refused", time.Hour, map[string]string{})
		w.is(func() { w.refuses = nil })
		expect("the right is given", retryMost+lookEvery, map[string]string{"a": "! no port"})
		w.is(func() {
			w.refuses = fmt.Errorf("gone: %w", store.ErrNotFound)
			w.problems = nil
		})
		expect("gone", quiet+lookEvery, map[string]string{"a": "! no port"})
		w.is(func() {
			w.refuses = nil
			w.problems = map[store.Key]string{key("b"): "no port"}
		})
		expect("another", lookEvery, map[string]string{"a": "! no port", "b": "! no port"})
	})
}

// TestBounded: however many there are, and however often they change, so many events are
// written in a time and no more, and each gets its turn.
func TestBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const n = 500
		w, expect, end := begin(t)
		defer end()
		want := map[string]string{}
		for i := range n {
			name := fmt.Sprintf("p%03d", i)
			w.problems[key(name)], want[name] = "no port", "! no port"
		}
		expect("all are said", n/atOnce*lookEvery, want)
		if got := w.count(); got != n {
			t.Errorf("written %d times for %d policies", got, n)
		}
		for i := range 100 {
			w.is(func() { w.problems[key("p000")] = fmt.Sprintf("fault %d", i) })
			time.Sleep(lookEvery) //nolint:forbidigo // virtual time
		}
		if got, most := w.count()-n, int(100*lookEvery/quiet)+1; got > most {
			t.Errorf("written %d times for one that changes all the time, want %d at most", got, most)
		}
	})
}

// TestDue: what waits longest comes first.
func TestDue(t *testing.T) {
	t.Parallel()
	now := time.Now()
	teller := New(nil, nil, nil)
	teller.said = map[store.Key]saying{
		key("old"): {"x", now.Add(-time.Hour)}, key("mended"): {"x", now.Add(-2 * time.Hour)}, key("fresh"): {"x", now},
	}
	got := teller.due(map[store.Key]string{key("old"): "x", key("fresh"): "y", key("new"): "x"}, now)
	want := []store.Key{key("new"), key("mended"), key("old")}
	if !slices.Equal(got, want) {
		t.Errorf("due are %v, want %v", got, want)
	}
}
