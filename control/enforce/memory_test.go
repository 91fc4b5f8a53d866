package enforce

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// disk is a [Memory] that is lost but for what was written when its process ends.
type disk struct {
	mu      sync.Mutex
	entries map[string]json.RawMessage // in the process
	written map[string]json.RawMessage // by it; nil: there is no file
	held    bool
	syncs   int
	tries   int
	fail    error
	stuck   error // of Forget
	onSync  func(written map[string]json.RawMessage)
}

// life begins a process.
func (d *disk) life() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.written == nil {
		d.written = map[string]json.RawMessage{}
	}
	d.entries, d.held = maps.Clone(d.written), false
}

func (d *disk) change(fn func(map[string]json.RawMessage)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tries++
	if !d.held {
		if d.fail != nil {
			return d.fail
		}
		fn(d.written)
	}
	fn(d.entries)
	return nil
}

func (d *disk) Put(key string, value any) error {
	b, err := json.Marshal(value)
	return errors.Join(err, d.change(func(m map[string]json.RawMessage) { m[key] = b }))
}

func (d *disk) Delete(key string) error {
	return d.change(func(m map[string]json.RawMessage) { delete(m, key) })
}

func (d *disk) Begin() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = true
}

func (d *disk) Forget() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held = true
	if d.stuck == nil {
		d.written = nil
	}
	return d.stuck
}

func (d *disk) Sync() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.onSync != nil {
		d.onSync(maps.Clone(d.written))
	}
	if d.fail != nil {
		return d.fail
	}
	d.syncs++
	if d.held {
		d.written, d.held = maps.Clone(d.entries), false
	}
	return nil
}

func (d *disk) Entries() map[string]json.RawMessage {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.entries)
}

func (d *disk) set(fail error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = fail
}

// file returns what is on the disk.
func (d *disk) file() map[string]json.RawMessage {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.written)
}

// live runs an Enforcer with a memory, after a boot, until the function that is
// returned is called.
func live(t *testing.T, d *disk) (*world, func()) {
	t.Helper()
	return liveAs(t, d, Config{Recall: true})
}

func liveAs(t *testing.T, d *disk, cfg Config) (*world, func()) {
	t.Helper()
	d.life()
	w := &world{t: t, table: &table{have: filter.NewRuleset()}, conns: &connections{}}
	cfg.Node, cfg.Table, cfg.Connections, cfg.Memory, cfg.Log = "node1", w.table, w.conns, d, slog.New(slog.DiscardHandler)
	w.e = New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.e.Run(ctx) }()
	w.e.HandleUnderlay(dataplane.Underlay{})
	synctest.Wait()
	return w, func() {
		cancel()
		<-done
		if len(w.table.errs) > 0 {
			t.Errorf("steps that do not fit: %v", w.table.errs)
		}
	}
}

func wait(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // virtual time
	synctest.Wait()
}

// TestRecalled: after a boot without the datastore the rules are those of what
// was known, also for an endpoint that is new; when the datastore has told all,
// in one step those that follow from it.
func TestRecalled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		web, bad, fine := map[string]string{"app": "web"}, map[string]string{"app": "bad"}, map[string]string{"app": "fine"}
		w.store(pod("b", "10.0.0.9", bad), denyFrom("app == 'bad'"), pod("gone", "10.0.0.8", web))
		w.store(pod("c", "10.0.0.7", fine))
		gone := pod("gone", "10.0.0.8", web)
		w.remove(eventOf(t, gone, true).Key)
		before := w.rules()
		end()

		w, end = live(t, d)
		if s := w.e.Status(); !s.InForce || !s.Recalled {
			t.Fatalf("status %+v", s)
		}
		diff := cmp.Diff(before, w.rules(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
		if diff != "" {
			t.Errorf("rules from memory (-before +after):\n%s", diff)
		}
		fresh := pod("a", "10.0.0.1", web)
		w.own(eventOf(t, fresh, false))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.e.Wait(ctx, "calia", []netip.Addr{netip.MustParseAddr("10.0.0.1")}); err != nil {
			t.Fatalf("an ADD without the datastore: %v", err)
		}
		if len(w.rules().Endpoints["calia"].Ingress.Tiers) == 0 {
			t.Error("the new endpoint has no policy: it is open")
		}
		// The datastore begins to tell, and has not told all.
		steps := w.table.applied
		nothing := store.Batch{Events: []store.Event{eventOf(t, pod("c", "10.0.0.7", nil), false)}, Revision: 7}
		w.e.HandleStore(clustertest.Step("", nothing, policy.Kinds()...))
		synctest.Wait()
		if w.table.applied != steps || !w.e.Status().Recalled {
			t.Error("rules follow a state that is not complete")
		}
		w.e.HandleStore(clustertest.Step("", store.Batch{Synced: true, Revision: 8}, policy.Kinds()...))
		synctest.Wait()
		if w.table.applied != steps+1 || w.e.Status().Recalled {
			t.Errorf("%d steps when the datastore has told all, want 1", w.table.applied-steps)
		}
		if _, ok := w.rules().Endpoints["calia"]; !ok {
			t.Error("what was announced is gone")
		}
		if _, ok := w.rules().Endpoints["calib"]; ok || len(w.rules().Endpoints["calia"].Ingress.Tiers) > 0 {
			t.Errorf("what the datastore does not have is in force: %v", w.rules().Policies)
		}
		end()
		if got := d.file(); len(got) != 2 { // c, and that it is complete
			t.Errorf("remembered: %v", got)
		}
	})
}

// What the disk refuses is not remembered by halves: nothing is, and the status
// says so, until it can be written whole. No change tries before its time.
func TestRemembersLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		defer end()
		w.store(pod("a", "10.0.0.1", nil))
		full := errors.New("no space left")
		d.set(full)
		wait(time.Minute)
		w.store(denyFrom("app == 'bad'"))
		if got := d.file(); got != nil {
			t.Errorf("on the disk without the newest policy: %v", got)
		}
		if err := w.e.Status().KeepErr; !errors.Is(err, full) {
			t.Errorf("status says %v", err)
		}
		tries := d.tries
		for range 1000 {
			w.store(pod("b", "10.0.0.2", nil))
		}
		if d.tries != tries {
			t.Errorf("%d changes tried to write at once", d.tries-tries)
		}
		w.e.mu.Lock()
		if len(w.e.toKeep) != 2 {
			t.Errorf("%d objects wait for the disk, want 2", len(w.e.toKeep))
		}
		w.e.mu.Unlock()
		d.set(nil)
		wait(keepRetry)
		if got := d.file(); len(got) != 4 || got[completeKey] == nil || w.e.Status().KeepErr != nil {
			t.Errorf("remembered: %v, status %+v", got, w.e.Status())
		}
	})
}

// A daemon that ends while the disk refuses leaves nothing that a boot would go
// by, also where there is room again before it has ended.
func TestEndsUnremembered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		w.store(pod("a", "10.0.0.1", nil))
		d.set(errors.New("no space left"))
		wait(time.Minute)
		w.store(denyFrom("app == 'bad'"))
		end()
		if w.e.Remembered() {
			t.Error("it says that all is remembered")
		}
		d.set(nil)
		if err := d.Sync(); err != nil { // as one that is closed does
			t.Fatal(err)
		}
		w, end = live(t, d)
		defer end()
		if s := w.e.Status(); s.InForce || s.Recalled {
			t.Errorf("status %+v", s)
		}
	})
}

// The first that a life writes takes the place of what was known in one step, and
// a start that finds all the same writes nothing.
func TestFirstWriteIsOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		w.store(pod("a", "10.0.0.1", nil), denyFrom("app == 'bad'"))
		end()
		before := d.file()

		d.onSync = func(written map[string]json.RawMessage) {
			if diff := cmp.Diff(before, written); diff != "" {
				t.Errorf("on the disk between two states (-first +then):\n%s", diff)
			}
		}
		w, end = live(t, d)
		w.store(pod("b", "10.0.0.2", nil), denyFrom("app == 'worse'"))
		d.onSync = nil
		end()
		if got := d.file(); len(got) != 3 || cmp.Equal(before, got) {
			t.Errorf("remembered: %v", got)
		}
		w, end = live(t, d)
		defer end()
		d.syncs, d.tries = 0, 0
		w.store(pod("b", "10.0.0.2", nil), denyFrom("app == 'worse'"))
		if d.syncs+d.tries != 0 || w.e.Status().Recalled {
			t.Errorf("%d writes and %d flushes of what is there, status %+v", d.tries, d.syncs, w.e.Status())
		}
	})
}

// What policy does not look at is not written, and changes that follow each other
// closely wait for the disk once a second.
func TestRemembersLittle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		w.store(pod("a", "10.0.0.1", nil))
		wait(time.Minute)
		d.syncs, d.tries = 0, 0
		peer := &v3.BGPPeer{}
		peer.Name = "tor"
		for range 20 {
			w.store(peer)
			wait(100 * time.Millisecond)
		}
		if d.syncs+d.tries != 0 {
			t.Errorf("%d writes and %d flushes for an object that is not of policy", d.tries, d.syncs)
		}
		for i := range 20 {
			w.store(pod("a", fmt.Sprint("10.0.1.", i), nil))
			wait(100 * time.Millisecond)
		}
		if d.syncs < 1 || d.syncs > 3 {
			t.Errorf("%d flushes in two seconds", d.syncs)
		}
		end() // writes what is left
		if !w.e.Remembered() {
			t.Error("an orderly end left something unwritten")
		}
		last := pod("a", "10.0.1.19", nil)
		store.SetDefaults(last)
		key := mustKey(t, last)
		raw, err := store.Encode(key, last, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string]json.RawMessage{key.Path(): raw, completeKey: json.RawMessage("true")}, d.file()); diff != "" {
			t.Errorf("remembered (-want +got):\n%s", diff)
		}
	})
}

// Where the kernel may have newer rules than the memory they hold until the
// datastore has told all.
func TestKernelBeforeMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		w.store(pod("a", "10.0.0.1", nil))
		end()

		heard := 0
		w, end = liveAs(t, d, Config{Heard: func() { heard++ }})
		defer end()
		w.own(eventOf(t, pod("b", "10.0.0.2", nil), false))
		wait(time.Minute)
		if s := w.e.Status(); s.InForce || s.Recalled || w.table.applied != 0 || heard != 0 {
			t.Errorf("status %+v, %d steps, heard %d times", s, w.table.applied, heard)
		}
		w.store(pod("a", "10.0.0.1", nil))
		w.store(denyFrom("app == 'bad'"))
		if s := w.e.Status(); !s.InForce || s.Recalled || heard != 1 {
			t.Errorf("status %+v, heard %d times", s, heard)
		}
	})
}

// Rules by memory are not told as heard of; those that follow are, before the
// kernel has them.
func TestHeardAfterRecall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		w.store(pod("a", "10.0.0.1", nil))
		end()

		steps := []int{}
		var next *world
		next, end = liveAs(t, d, Config{Recall: true, Heard: func() {
			next.table.mu.Lock()
			defer next.table.mu.Unlock()
			steps = append(steps, next.table.applied)
		}})
		next.own(eventOf(t, pod("b", "10.0.0.2", nil), false))
		synctest.Wait()
		next.store(denyFrom("app == 'bad'"))
		next.store(pod("c", "10.0.0.3", nil))
		if diff := cmp.Diff([]int{2}, steps); diff != "" {
			t.Errorf("steps before it was heard (-want +got):\n%s", diff)
		}
		end()
		// A life in which the datastore does not answer has nothing to remember.
		next, end = live(t, d)
		end()
		if next.e.Remembered() {
			t.Error("a life that heard nothing remembers")
		}
	})
}

// What is to be kept of several events of one object is what the calculator goes by.
func TestUnkeptThen(t *testing.T) {
	t.Parallel()
	good, better := store.Event{Object: store.Object{Value: 1}}, store.Event{Object: store.Object{Value: 2}}
	ended, bad := store.Event{}, store.Event{Err: store.ErrDecode}
	for name, c := range map[string]struct {
		events []store.Event
		want   unkept
	}{
		"the last wins":                   {[]store.Event{good, better}, unkept{event: better}},
		"unreadable leaves what was":      {[]store.Event{good, bad}, unkept{event: good}},
		"unreadable at first":             {[]store.Event{bad, bad}, unkept{event: bad}},
		"readable again":                  {[]store.Event{bad, good}, unkept{event: good}},
		"unreadable and another":          {[]store.Event{good, ended, bad}, unkept{bad, true}},
		"unreadable, another, still":      {[]store.Event{ended, bad, bad}, unkept{bad, true}},
		"ended":                           {[]store.Event{good, ended}, unkept{event: ended}},
		"another that can be read":        {[]store.Event{ended, bad, good}, unkept{good, true}},
		"another that cannot any more be": {[]store.Event{ended, bad, good, bad}, unkept{good, true}},
	} {
		got := unkept{event: c.events[0]}
		for _, ev := range c.events[1:] {
			got = got.then(unkept{event: ev})
		}
		if got.fresh != c.want.fresh || got.event.Object.Value != c.want.event.Object.Value || !errors.Is(got.event.Err, c.want.event.Err) {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

// A memory that was never complete, or makes no sense, is not used.
func TestNotRecalled(t *testing.T) {
	t.Parallel()
	for name, entries := range map[string]map[string]json.RawMessage{
		"empty":       {},
		"not whole":   {"/calico/resources/v3/projectcalico.org/tiers/x": json.RawMessage(`{}`)},
		"unknown key": {"/elsewhere": json.RawMessage(`{}`), completeKey: json.RawMessage(`true`)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w, end := live(t, &disk{written: entries})
				defer end()
				if s := w.e.Status(); s.InForce || s.Recalled {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// What cannot be read keeps what was remembered of it; where nothing was, it is
// remembered as unreadable, and not left out.
func TestRemembersUnreadable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		p, q := denyFrom("app == 'bad'"), denyFrom("app == 'bad'")
		q.Name = "never"
		w.store(p)
		known, never := mustKey(t, p), mustKey(t, q)
		before := string(d.file()[known.Path()])
		w.e.HandleStore(clustertest.Step("", store.Batch{Events: []store.Event{
			{Key: known, Object: store.Object{Raw: []byte("{")}, Err: store.ErrDecode},
			{Key: never, Object: store.Object{Raw: []byte("{")}, Err: store.ErrDecode},
		}}, policy.Kinds()...))
		synctest.Wait()
		end()
		if got := string(d.file()[known.Path()]); got != before {
			t.Errorf("remembered %q, before %q", got, before)
		}
		w, end = live(t, d)
		defer end()
		if s := w.e.Status(); !s.InForce || len(s.Problems) != 1 {
			t.Errorf("status %+v, want one problem", s)
		}
	})
}
