package nodenetwork

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

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

// server is an API server with Nodes' conditions and the pods of the DaemonSet.
type server struct {
	mu      sync.Mutex
	nodes   map[string]kube.Network
	pods    map[string]bool
	refuses bool
	written int
	refused int // how often
}

var errAway = errors.New("the API is away")

func (s *server) SetNetwork(_ context.Context, node string, n kube.Network) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuses {
		s.refused++
		return errAway
	}
	s.written++
	s.nodes[node] = n
	return nil
}

func (s *server) Network(_ context.Context, node string) (kube.Network, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.nodes[node]
	if s.refuses {
		return n, ok, errAway
	}
	return n, ok, nil
}

func (s *server) DaemonPods(context.Context) (map[string]bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuses {
		return nil, errAway
	}
	return maps.Clone(s.pods), nil
}

func (s *server) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *server) says() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, n := range slices.Sorted(maps.Keys(s.nodes)) {
		fmt.Fprintf(&b, "%s %t %s;", n, s.nodes[n].Unavailable, s.nodes[n].Reason)
	}
	return b.String()
}

func TestOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &server{nodes: map[string]kube.Network{}}
		var mu sync.Mutex
		obstacle := errors.New("the first rules are to come")
		own := Own{
			Node: "a", Pod: true, API: s, Log: slog.New(slog.DiscardHandler),
			Said:     func() (kube.Network, bool) { n, ok, _ := s.Network(t.Context(), "a"); return n, ok },
			Obstacle: func(context.Context) error { mu.Lock(); defer mu.Unlock(); return obstacle },
		}
		is := func(err error) { mu.Lock(); obstacle = err; mu.Unlock() }
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- own.Run(ctx) }()
		expect := func(when string, after time.Duration, want string) {
			t.Helper()
			time.Sleep(after) //nolint:forbidigo // virtual time
			synctest.Wait()
			if got := s.says(); got != want {
				t.Errorf("%s: %q, want %q", when, got, want)
			}
		}
		const up, unready = "a false RouterdIsUp;", "a true RouterdIsNotReady;"
		expect("a Node that says nothing", 0, unready)
		is(nil)
		expect("well", lookEvery, up)
		is(errors.New("no route to the datastore's pods"))
		expect("ill for a moment", patience-lookEvery, up)
		is(nil)
		expect("well again", lookEvery, up)
		is(errors.New("ill"))
		expect("ill for longer", patience+2*lookEvery, unready)
		written := s.written
		expect("nothing changes", time.Hour, unready)
		if s.written != written {
			t.Errorf("written %d times more though nothing changed", s.written-written)
		}
		s.set(func() { s.refuses = true })
		is(nil)
		expect("the API is away", lookEvery, unready)
		s.set(func() { s.refuses = false })
		expect("the API is back", lookEvery, up)
		s.set(func() { s.nodes["a"] = kube.Network{Unavailable: true, Reason: "NoRouteCreated"} })
		expect("another program writes it", lookEvery, up)
		s.set(func() { s.refuses, s.refused, s.nodes["a"] = true, 0, kube.Network{Unavailable: true} })
		expect("the API refuses it", time.Hour, "a true ;")
		if most := int(time.Hour/maxPause) + 10; s.refused < most/2 || s.refused > most {
			t.Errorf("tried %d times in an hour", s.refused)
		}
		s.set(func() { s.refuses = false })
		expect("the API takes it", maxPause, up)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestOwnOnHost: where a daemon that is no pod takes the place of one that was, the others leave its Node alone.
func TestOwnOnHost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &server{nodes: map[string]kube.Network{"a": {Reason: reasonUp}}, pods: map[string]bool{"b": true}}
		own := Own{
			Node: "a", API: s, Log: slog.New(slog.DiscardHandler),
			Said:     func() (kube.Network, bool) { n, ok, _ := s.Network(t.Context(), "a"); return n, ok },
			Obstacle: func(context.Context) error { return nil },
		}
		others := NewOthers(s)
		others.HandleStore(cluster.Step{Changes: []*cluster.Change{{Event: store.Event{Key: store.Key{Kind: store.KindNode, Name: "a"}, Object: store.Object{Value: &store.Node{}}}}}})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = own.Run(ctx) }) // it ends by ctx
		running.Go(func() { others.Run(ctx) })
		time.Sleep(time.Hour) //nolint:forbidigo // virtual time
		synctest.Wait()
		if got := s.says(); got != "a false RouterdIsUpOnHost;" || s.written != 1 {
			t.Errorf("written %d times, and the Node says %s", s.written, got)
		}
		cancel()
		running.Wait()
	})
}

func TestOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		up := kube.Network{Reason: reasonUp}
		s := &server{
			nodes: map[string]kube.Network{"a": up, "b": up, "bare": {Reason: reasonOnHost}, "deleted": up, "theirs": {Reason: "CalicoIsUp"}},
			pods:  map[string]bool{"a": true, "b": true, "deleted": true, "theirs": false},
		}
		o := NewOthers(s)
		node := func(name string, gone bool) *cluster.Change {
			c := &cluster.Change{Event: store.Event{Key: store.Key{Kind: store.KindNode, Name: name}}}
			if !gone {
				c.Object.Value = &store.Node{}
			}
			return c
		}
		o.HandleStore(cluster.Step{Changes: []*cluster.Change{node("a", false), node("b", false), node("theirs", false), node("bare", false), node("deleted", false)}})
		o.HandleStore(cluster.Step{Changes: []*cluster.Change{node("deleted", true)}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); o.Run(ctx) }()
		s.set(func() { s.pods = map[string]bool{"a": true} })
		time.Sleep(podPatience) //nolint:forbidigo // virtual time
		synctest.Wait()
		if want := "a false RouterdIsUp;b false RouterdIsUp;bare false RouterdIsUpOnHost;deleted false RouterdIsUp;theirs false CalicoIsUp;"; s.says() != want {
			t.Errorf("within the patience: %s", cmp.Diff(want, s.says()))
		}
		time.Sleep(3 * lookAtPods) //nolint:forbidigo // virtual time
		synctest.Wait()
		if want := "a false RouterdIsUp;b true RouterdIsGone;bare false RouterdIsUpOnHost;deleted false RouterdIsUp;theirs false CalicoIsUp;"; s.says() != want {
			t.Errorf("b is gone: %s", cmp.Diff(want, s.says()))
		}
		// No pod at all is a DaemonSet that is being replaced, or rights that are missing.
		s.set(func() { s.pods = nil; s.nodes["b"] = up })
		time.Sleep(time.Hour) //nolint:forbidigo // virtual time
		synctest.Wait()
		if want := "a false RouterdIsUp;b false RouterdIsUp;bare false RouterdIsUpOnHost;deleted false RouterdIsUp;theirs false CalicoIsUp;"; s.says() != want {
			t.Errorf("without any pod: %s", cmp.Diff(want, s.says()))
		}
		cancel()
		<-ended
	})
}
