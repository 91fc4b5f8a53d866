package backend

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func handleItem(name string, rev store.Revision) Item {
	return Item{Key: store.HandleKey(name), Stored: Stored{Revision: rev, Raw: []byte(`{"block":{}}`)}}
}

func handleEvent(name string, rev store.Revision) store.Event {
	it := handleItem(name, rev)
	return Event(it.Key, it.Revision, it.Raw)
}

// run starts a feed's consumer side in a bubble of virtual time.
func run(t *testing.T, f *Feed) <-chan store.Batch {
	t.Helper()
	out := make(chan store.Batch)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.Run(ctx, out)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return out
}

// ready returns the batch that is there without the passing of time, or nil.
func ready(ch <-chan store.Batch) *store.Batch {
	synctest.Wait()
	select {
	case b := <-ch:
		return &b
	default:
		return nil
	}
}

// TestFeedTogether: nothing of what is reported together is taken without the rest.
func TestFeedTogether(t *testing.T) {
	t.Parallel()
	f := NewFeed([]store.Kind{store.KindIPAMHandle})
	out := run(t, f)
	f.Together(func() {
		f.Reset(7, []Item{handleItem("a", 7)})
		select {
		case b := <-out:
			t.Fatalf("half was taken: %+v", b)
		case <-time.After(20 * time.Millisecond): // in vain: nothing else could tell that nobody takes it
		}
		f.Place("a watch", 7)
	})
	if b := <-out; !b.Synced || len(b.Events) != 1 || b.Places["a watch"] != 7 {
		t.Errorf("told %+v", b)
	}
}

func TestFeedTellsBareRevisionsLazily(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := NewFeed([]store.Kind{store.KindIPAMHandle})
		ch := run(t, f)
		f.Reset(5, nil)
		if b := ready(ch); b == nil || !b.Synced || b.Revision != 5 {
			t.Fatalf("got %+v", b)
		}
		// Others' changes do not wake the consumer each by each ...
		begin := time.Now()
		for rev := store.Revision(6); rev < 16; rev++ {
			f.Change(rev, nil)
			if b := ready(ch); b != nil {
				t.Fatalf("told at once: %+v", b)
			}
			<-time.After(lazily / 20) // virtual time
		}
		// ... but are told within a second of the first.
		b := <-ch
		if took := time.Since(begin); b.Revision != 15 || len(b.Events) > 0 || b.Synced || took != lazily {
			t.Errorf("after %v: %+v", took, b)
		}
		// One of the consumer's own changes takes them along.
		f.Change(20, nil)
		f.Change(21, []store.Event{handleEvent("a", 21)})
		if b := ready(ch); b == nil || b.Revision != 21 || len(b.Events) != 1 {
			t.Errorf("got %+v", b)
		}
		// So does a notice of progress, at once.
		f.Progress(30)
		if b := ready(ch); b == nil || b.Revision != 30 || len(b.Events) != 0 {
			t.Errorf("got %+v", b)
		}
		f.Progress(29) // an old one is no news
		<-time.After(2 * lazily)
		if b := ready(ch); b != nil {
			t.Errorf("got %+v", b)
		}
	})
}

func TestFeedOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := NewFeed([]store.Kind{store.KindIPAMHandle})
		ch := run(t, f)
		f.Reset(5, []Item{handleItem("a", 3)})
		ready(ch)
		gone := errors.New("gone")
		f.Change(6, []store.Event{handleEvent("b", 6)})
		f.Outage(gone)
		if b := ready(ch); b == nil || b.Err != nil || len(b.Events) != 1 {
			t.Fatalf("what happened before the outage is not told first: %+v", b)
		}
		if b := ready(ch); b == nil || b.Err != gone || len(b.Events) != 0 || b.Revision != 6 {
			t.Fatalf("got %+v", b)
		}
		// A store that came back older, without b.
		f.Reset(4, []Item{handleItem("a", 3)})
		if b := ready(ch); b == nil || !b.Synced || b.Revision != 4 || len(b.Events) != 1 || !b.Events[0].Deleted() {
			t.Fatalf("got %+v", b)
		}
	})
}

// A revision that waits for company as the store goes away must not be told
// after the outage: the consumer would take the store for back.
func TestFeedOutageTellsBareRevision(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := NewFeed([]store.Kind{store.KindIPAMHandle})
		ch := run(t, f)
		f.Reset(5, nil)
		ready(ch)
		f.Change(6, nil)
		synctest.Wait()
		f.Outage(errors.New("gone"))
		if b := ready(ch); b == nil || b.Err == nil || b.Revision != 6 {
			t.Fatalf("got %+v", b)
		}
		<-time.After(2 * lazily) // virtual time
		if b := ready(ch); b != nil {
			t.Fatalf("told after the outage: %+v", b)
		}
	})
}

// TestFeedBeside: what is followed beside the rest does not say how far that is.
func TestFeedBeside(t *testing.T) {
	t.Parallel()
	f := NewFeed([]store.Kind{store.KindIPAMHandle, store.KindServiceCIDR})
	f.Reset(5, nil)
	f.take(false)
	key := store.ServiceCIDRKey("a")
	f.Beside([]store.Event{Event(key, 9, []byte(`{}`))})
	if b, ok, _ := f.take(false); !ok || b.Revision != 5 || len(b.Events) != 1 || b.Events[0].Object.Revision != 9 {
		t.Errorf("got %+v", b)
	}
	f.Change(7, []store.Event{handleEvent("h", 7)})
	f.Beside([]store.Event{Deletion(key, 11), Deletion(store.ServiceCIDRKey("unknown"), 12)})
	if b, _, _ := f.take(false); b.Revision != 7 || len(b.Events) != 2 || !b.Events[1].Deleted() {
		t.Errorf("got %+v", b)
	}
}

// TestFeedResetBut: of a kind that was not read nothing is deleted, until it was.
func TestFeedResetBut(t *testing.T) {
	t.Parallel()
	f := NewFeed([]store.Kind{store.KindIPAMHandle, store.KindServiceCIDR})
	cidr := Item{Key: store.ServiceCIDRKey("a"), Stored: Stored{Revision: 3, Raw: []byte(`{}`)}}
	f.Reset(5, []Item{handleItem("h", 2), cidr})
	f.take(false)
	withheld := map[store.Kind]store.Withheld{store.KindServiceCIDR: {Err: errors.New("denied"), Known: true}}
	f.ResetBut(6, nil, withheld)
	b, _, _ := f.take(false)
	if len(b.Events) != 1 || b.Events[0].Key != store.HandleKey("h") || !b.Events[0].Deleted() || !b.Synced || !b.Withheld[store.KindServiceCIDR].Known {
		t.Errorf("got %+v", b)
	}
	f.ResetBut(7, nil, nil)
	b, _, _ = f.take(false)
	if len(b.Events) != 1 || b.Events[0].Key != cidr.Key || !b.Events[0].Deleted() || b.Withheld != nil {
		t.Errorf("got %+v", b)
	}
}

// TestFeedHoldsOnePerKey: what a consumer does not take costs by keys.
func TestFeedHoldsOnePerKey(t *testing.T) {
	t.Parallel()
	f := NewFeed([]store.Kind{store.KindIPAMHandle})
	for rev := store.Revision(1); rev <= 100_000; rev++ {
		f.Change(rev, []store.Event{handleEvent(fmt.Sprint(rev%7), rev)})
		if len(f.pending) > 64 {
			t.Fatalf("%d events wait for 7 keys", len(f.pending))
		}
	}
	b, ok, _ := f.take(false)
	if !ok || len(b.Events) != 7 {
		t.Fatalf("got %d events", len(b.Events))
	}
	for i, e := range b.Events {
		if want := store.Revision(100_000 - 6 + i); e.Object.Revision != want {
			t.Errorf("event %d is of revision %d, want %d", i, e.Object.Revision, want)
		}
	}
}

// TestFeedFollows: whatever the store tells, in whatever pieces, and whenever
// the consumer looks, in the end it knows what is there.
func TestFeedFollows(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := NewFeed([]store.Kind{store.KindIPAMHandle})
		there := make(map[store.Key]store.Revision) // the store
		knows := make(map[store.Key]store.Revision) // the consumer
		rev := store.Revision(1)
		take := func() {
			b, ok, _ := f.take(true)
			if !ok {
				return
			}
			last := store.Revision(0)
			for _, e := range b.Events {
				if e.Object.Revision > b.Revision || e.Object.Revision < last && !b.Synced {
					t.Fatalf("out of order: %+v", b)
				}
				last = e.Object.Revision
				if e.Deleted() {
					delete(knows, e.Key)
				} else {
					knows[e.Key] = e.Object.Revision
				}
			}
		}
		connected := false
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			key := store.HandleKey(name)
			switch rapid.SampledFrom([]string{"put", "put", "delete", "connect", "disconnect", "take"}).Draw(t, "step") {
			case "put":
				rev++
				there[key] = rev
				if connected {
					f.Change(rev, []store.Event{handleEvent(name, rev)})
				}
			case "delete":
				if _, ok := there[key]; !ok {
					continue
				}
				rev++
				delete(there, key)
				if connected {
					f.Change(rev, []store.Event{Deletion(key, rev)})
				}
			case "connect":
				var items []Item
				for k, r := range there {
					items = append(items, handleItem(k.Name, r))
				}
				f.Reset(rev, items)
				connected = true
			case "disconnect":
				if connected {
					f.Outage(errors.New("gone"))
				}
				connected = false
			case "take":
				take()
			}
		}
		var items []Item
		for k, r := range there {
			items = append(items, handleItem(k.Name, r))
		}
		f.Reset(rev, items)
		take()
		if diff := cmp.Diff(there, knows); diff != "" {
			t.Fatalf("(-store +consumer):\n%s", diff)
		}
	})
}
