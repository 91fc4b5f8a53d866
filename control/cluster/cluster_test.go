package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func newCluster() *Cluster {
	return New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler)})
}

func pool(name string, n int) store.Event {
	key := store.ResourceKey(store.KindIPPool, name)
	p := v3.NewIPPool()
	p.Name, p.Spec.CIDR = name, fmt.Sprintf("10.%d.0.0/16", n)
	return store.Event{Key: key, Object: store.Object{Key: key, Value: p}}
}

func gone(ev store.Event) store.Event { return store.Event{Key: ev.Key} }

// reader is a follower's view, as a part of the daemon would keep it.
type reader struct {
	*Follower
	have   map[store.Key]netip.Prefix
	synced bool
	err    error
	rev    store.Revision
}

// read takes a step, if there is one.
func (r *reader) read() (Step, bool) {
	s, ok := r.take()
	if !ok {
		return s, false
	}
	for _, ch := range s.Changes {
		switch {
		case ch.Err != nil:
		case ch.Deleted():
			delete(r.have, ch.Key)
		default:
			r.have[ch.Key] = ch.Value.(*Pool).CIDR
		}
	}
	r.synced, r.err, r.rev = r.synced || s.Synced, s.Err, s.Revision
	return s, true
}

// TestEveryReader: whatever the changes and however slow a reader is, it ends with
// the datastore's state; a step names a key once, the order of the last changes is
// kept, what was told as complete is complete, and a transaction is not divided.
func TestEveryReader(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := newCluster()
		readers := []*reader{}
		for range 3 {
			readers = append(readers, &reader{Follower: c.Follow(store.KindIPPool), have: map[store.Key]netip.Prefix{}})
		}
		other := &reader{Follower: c.Follow(store.KindNode), have: map[store.Key]netip.Prefix{}}
		want := map[store.Key]netip.Prefix{}
		last := map[store.Key]int{} // when a key changed last
		now, synced := 0, false
		var away error
		names := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		read := func(r *reader) {
			s, _ := r.read()
			seen := map[store.Key]bool{}
			at := 0
			for _, ch := range s.Changes {
				if seen[ch.Key] {
					t.Fatalf("%s is twice in a step", ch.Key)
				}
				seen[ch.Key] = true
				if last[ch.Key] < at {
					t.Fatalf("%s comes late", ch.Key)
				}
				at = last[ch.Key]
			}
			if fmt.Sprint(r.have) != fmt.Sprint(want) {
				t.Fatalf("a reader has %v, the datastore %v", r.have, want)
			}
			if r.synced != synced {
				t.Fatalf("a reader takes the state as complete: %t, and it is: %t", r.synced, synced)
			}
			if !errors.Is(r.err, away) {
				t.Fatalf("a reader knows of the outage %v, it is %v", r.err, away)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"change": func(t *rapid.T) {
				var b store.Batch
				for range rapid.IntRange(0, 40).Draw(t, "events") {
					ev := pool(names.Draw(t, "name"), rapid.IntRange(1, 200).Draw(t, "net"))
					if now++; rapid.Bool().Draw(t, "gone") {
						ev = gone(ev)
						delete(want, ev.Key)
					} else {
						want[ev.Key] = netip.MustParsePrefix(ev.Object.Value.(*v3.IPPool).Spec.CIDR)
					}
					last[ev.Key] = now
					b.Events = append(b.Events, ev)
				}
				b.Revision = c.Revision() + store.Revision(rapid.IntRange(0, 3).Draw(t, "revisions"))
				b.Synced = rapid.Bool().Draw(t, "synced")
				synced, away = synced || b.Synced, nil
				c.apply(b)
			},
			"undecodable": func(t *rapid.T) {
				ev := gone(pool(names.Draw(t, "name"), 1))
				if _, ok := want[ev.Key]; !ok {
					return
				}
				for _, r := range readers {
					r.read() // what was known of it before holds
				}
				now++
				last[ev.Key] = now
				ev.Err = store.ErrDecode
				away = nil
				c.apply(store.Batch{Events: []store.Event{ev}, Revision: c.Revision() + 1})
				for _, r := range readers {
					r.read()
				}
			},
			"outage": func(*rapid.T) {
				away = store.ErrUnavailable
				c.apply(store.Batch{Err: away, Revision: c.Revision()})
			},
			"read": func(t *rapid.T) { read(readers[rapid.IntRange(0, 2).Draw(t, "who")]) },
			"other": func(t *rapid.T) {
				if s, _ := other.read(); len(s.Changes) > 0 {
					t.Fatalf("it is told of %v", s.Changes)
				}
			},
		})
		for _, r := range readers {
			read(r)
		}
	})
}

// TestWait: who waits for a follower gets on when that is through with the step,
// and at once where nothing of it concerns the follower.
func TestWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		slow, other := c.Follow(store.KindIPPool), c.Follow(store.KindNode)
		c.apply(store.Batch{Events: []store.Event{pool("a", 1)}, Revision: 7})
		if err := other.Wait(t.Context(), 7); err != nil {
			t.Fatal(err)
		}
		through, asked := make(chan struct{}), make(chan error, 1)
		go func() { asked <- slow.Wait(t.Context(), 7) }()
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			_ = slow.Each(ctx, func(context.Context, Step) error { <-through; return nil })
		}()
		synctest.Wait()
		select {
		case <-asked:
			t.Fatal("the follower works on the step, and is said to be through")
		default:
		}
		close(through)
		if err := <-asked; err != nil {
			t.Fatal(err)
		}
		gives, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if err := slow.Wait(gives, 8); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a revision that does not come is waited for: %v", err)
		}
		cancel()
		synctest.Wait()
	})
}

// TestFreshness: the copy says where it comes from, and every follower hears of an
// outage and of its end, also before the datastore has said anything.
func TestFreshness(t *testing.T) {
	t.Parallel()
	c := newCluster()
	f := c.Follow()
	state := func(want Source, failed bool) {
		t.Helper()
		if got := c.Freshness(); got.Source != want || (got.Err != nil) != failed {
			t.Errorf("it is %s with %v, want %s", got.Source, got.Err, want)
		}
		s, ok := f.take()
		if !ok || (s.Err != nil) != failed {
			t.Errorf("a follower hears %v, %t", s.Err, ok)
		}
	}
	c.SetOutage(store.ErrUnavailable)
	state(Unread, true)
	c.SetOutage(nil)
	state(Unread, false)
	c.SetOutage(store.ErrUnavailable)
	c.SetOutage(nil)
	state(Unread, false)
	c.apply(store.Batch{Synced: true, Revision: 3})
	state(Live, false)
	c.apply(store.Batch{Err: store.ErrUnavailable})
	state(Stale, true)
	c.apply(store.Batch{Synced: true, Revision: 4})
	state(Live, false)
	if _, ok := f.take(); ok {
		t.Error("a follower hears of nothing")
	}
}

// TestRun follows a store with readers of different pace, for the race detector
// too.
func TestRun(t *testing.T) {
	t.Parallel()
	s := memory.New()
	c := New(Config{Store: s, Node: "node1", Log: slog.New(slog.DiscardHandler)})
	const n = 100
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	counts := make([]int, 3)
	var followers []*Follower
	for i := range counts {
		f := c.Follow(store.KindNode)
		followers = append(followers, f)
		wg.Go(func() {
			names := map[string]bool{}
			for step := range f.Steps(ctx) {
				for _, ch := range step.Changes {
					names[ch.Value.(*Node).Name] = true
				}
				counts[i] = len(names)
			}
		})
	}
	wg.Go(func() { _ = c.Run(ctx) })
	var rev store.Revision
	for i := range n {
		o, err := store.Create(ctx, s, &store.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}})
		if err != nil {
			t.Fatal(err)
		}
		rev = o.Revision
	}
	for _, f := range followers {
		if err := f.Wait(ctx, rev); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	wg.Wait()
	if !slices.Equal(counts, []int{n, n, n}) {
		t.Errorf("they know %v of %d nodes", counts, n)
	}
	_ = s.Close()
}

// TestWithheld: who decides by a kind of which the datastore tells nothing is not told
// that it has all, also where it has a state from the disk; who does not is.
func TestWithheld(t *testing.T) {
	t.Parallel()
	c := newCluster()
	of, others := c.Follow(store.KindIPPool, store.KindTier), c.Follow(store.KindIPPool)
	reason := errors.New("the role lacks the right")
	unknown := map[store.Kind]store.Withheld{store.KindTier: {Err: reason}}
	expect := func(what string, of, others bool, f *Follower, g *Follower) {
		t.Helper()
		for _, x := range []struct {
			f    *Follower
			want bool
		}{{f, of}, {g, others}} {
			if s, _ := x.f.take(); s.Synced != x.want {
				t.Errorf("%s: synced is %t, want %t", what, s.Synced, x.want)
			}
		}
	}
	c.apply(store.Batch{Events: []store.Event{pool("a", 1)}, Revision: 5, Synced: true, Withheld: unknown})
	expect("a kind is withheld", false, true, of, others)
	if err := c.Freshness().Withheld; !errors.Is(err, reason) || err.Error() != "Tier: the role lacks the right" {
		t.Errorf("the reason is %v", err)
	}
	c.apply(store.Batch{Revision: 6, Synced: true})
	expect("all is told", true, true, of, others)
	c.apply(store.Batch{Revision: 7, Synced: true, Withheld: map[store.Kind]store.Withheld{store.KindTier: {Err: reason, Known: true}}})
	expect("what was known of it holds", true, true, of, others)
	if c.Freshness().Withheld == nil {
		t.Error("nothing is said of what is withheld")
	}
}
