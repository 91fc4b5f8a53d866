package etcd_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store"
)

// change is what etcd's own history says of a key; raw is nil where it was deleted.
type change struct {
	rev  store.Revision
	path string
	raw  []byte
}

// truth records etcd's own history, by a watch of its own client's.
type truth struct {
	mu      sync.Mutex
	changes []change
	rev     int64
}

// record reads on until ctx ends.
func (tr *truth) record(ctx context.Context, c *clientv3.Client) error {
	for resp := range c.Watch(ctx, store.RootPath, clientv3.WithPrefix(), clientv3.WithRev(1)) {
		if err := resp.Err(); err != nil && ctx.Err() == nil {
			return fmt.Errorf("read etcd's history: %w", err)
		}
		tr.mu.Lock()
		for _, e := range resp.Events {
			ch := change{rev: store.Revision(e.Kv.ModRevision), path: string(e.Kv.Key)}
			if e.Type != clientv3.EventTypeDelete {
				ch.raw = e.Kv.Value
			}
			tr.changes = append(tr.changes, ch)
			tr.rev = max(tr.rev, e.Kv.ModRevision)
		}
		tr.mu.Unlock()
	}
	return nil
}

// at returns the revision up to which it has come.
func (tr *truth) at() int64 {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.rev
}

// deleted reports whether the last that it knows of a key is that it was deleted.
func (tr *truth) deleted(path string) bool {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, ch := range slices.Backward(tr.changes) {
		if ch.path == path {
			return ch.raw == nil
		}
	}
	return false
}

// written is what a writer asked for and was answered.
type written struct {
	ops  []store.Op
	objs []store.Object
	err  error
}

// checkWatch compares what a watch delivered with etcd's history, and returns what is
// wrong with it: a change that was lost, invented, or told out of order. After each
// batch the consumer knows exactly what was stored at that batch's revision.
func checkWatch(history []change, batches []store.Batch) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	stored, told := map[string]change{}, map[string]change{}
	var last store.Revision
	next := 0
	for i, b := range batches {
		if b.Revision < last {
			complain("batch %d: the revision goes back from %d to %d", i, last, b.Revision)
		}
		var order store.Revision
		for _, e := range b.Events {
			path := e.Key.Path()
			if !b.Synced {
				if e.Object.Revision < order {
					complain("batch %d: %s at %d comes after a change at %d", i, path, e.Object.Revision, order)
				}
				order = e.Object.Revision
			}
			if e.Object.Revision <= last && !b.Synced {
				complain("batch %d: %s at %d is told after revision %d was", i, path, e.Object.Revision, last)
			}
			if e.Deleted() {
				delete(told, path)
			} else {
				told[path] = change{e.Object.Revision, path, e.Object.Raw}
			}
		}
		last = max(last, b.Revision)
		for ; next < len(history) && history[next].rev <= b.Revision; next++ {
			if ch := history[next]; ch.raw == nil {
				delete(stored, ch.path)
			} else {
				stored[ch.path] = ch
			}
		}
		if b.Err == nil && !maps.EqualFunc(stored, told, sameChange) {
			complain("batch %d, revision %d: stored %s, told %s", i, b.Revision, show(stored, told), show(told, stored))
			told = maps.Clone(stored) // one complaint for one fault
		}
	}
	return wrong
}

func sameChange(a, b change) bool { return a.rev == b.rev && bytes.Equal(a.raw, b.raw) }

// show lists what one state has and another has not.
func show(of, not map[string]change) string {
	var out []string
	for _, path := range slices.Sorted(maps.Keys(of)) {
		if have, ok := not[path]; !ok || !sameChange(of[path], have) {
			out = append(out, fmt.Sprintf("%s at %d: %s", path, of[path].rev, of[path].raw))
		}
	}
	return fmt.Sprintf("%q", out)
}

// checkWrites compares what writers were answered with etcd's history: what was done is
// there, whole, on the condition that was set; what was refused is not.
func checkWrites(history []change, writes []written) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	content := map[string]store.Revision{} // every content is written once
	at := map[store.Revision][]change{}
	before := map[string][]change{}
	for _, ch := range history {
		content[string(ch.raw)] = ch.rev
		at[ch.rev] = append(at[ch.rev], ch)
		before[ch.path] = append(before[ch.path], ch)
	}
	for _, w := range writes {
		if w.err != nil {
			continue
		}
		var rev store.Revision
		for i, op := range w.ops {
			path := op.Object.Key.Path()
			if op.Action == store.Put {
				rev = w.objs[i].Revision
				if content[string(w.objs[i].Raw)] != rev {
					complain("%s was written at %d by its answer, and is in no history", path, rev)
				}
			}
		}
		for _, op := range w.ops {
			path := op.Object.Key.Path()
			var prior change
			for _, ch := range before[path] {
				if ch.rev >= rev {
					break
				}
				prior = ch
			}
			want, byRevision := op.If.Revision()
			switch {
			case op.If.Absent() && prior.raw != nil:
				complain("%s was made at %d where it was there since %d", path, rev, prior.rev)
			case byRevision && (prior.raw == nil || prior.rev != want):
				complain("%s was written at %d on condition that it was of %d, and it was of %d", path, rev, want, prior.rev)
			}
		}
		if puts := slices.DeleteFunc(slices.Clone(w.ops), func(op store.Op) bool { return op.Action != store.Put }); len(at[rev]) < len(puts) {
			complain("of %d writes in one transaction at %d there are %d", len(puts), rev, len(at[rev]))
		}
	}
	return wrong
}

// TestCheckWatch: the checkers find what they are for.
func TestCheckWatch(t *testing.T) {
	t.Parallel()
	key := store.HandleKey("h")
	put := func(rev store.Revision, raw string) store.Event {
		return store.Event{Key: key, Object: store.Object{Key: key, Revision: rev, Value: &store.Handle{}, Raw: []byte(raw)}}
	}
	gone := func(rev store.Revision) store.Event {
		return store.Event{Key: key, Object: store.Object{Key: key, Revision: rev}}
	}
	path := key.Path()
	history := []change{{2, path, []byte("a")}, {3, path, []byte("b")}, {5, path, nil}}
	synced := func(rev store.Revision, events ...store.Event) store.Batch {
		return store.Batch{Revision: rev, Events: events, Synced: true}
	}
	then := func(rev store.Revision, events ...store.Event) store.Batch {
		return store.Batch{Revision: rev, Events: events}
	}
	for _, tt := range []struct {
		name    string
		batches []store.Batch
		wrong   bool
	}{
		{"each by each", []store.Batch{synced(2, put(2, "a")), then(3, put(3, "b")), then(4), then(5, gone(5))}, false},
		{"joined", []store.Batch{synced(2, put(2, "a")), then(5, gone(5))}, false},
		{"an outage", []store.Batch{synced(2, put(2, "a")), {Revision: 2, Err: store.ErrUnavailable}, synced(5, gone(5))}, false},
		{"a change is lost", []store.Batch{synced(2, put(2, "a")), then(4)}, true},
		{"a deletion is lost", []store.Batch{synced(3, put(3, "b")), then(5)}, true},
		{"a change is invented", []store.Batch{synced(2, put(2, "c"))}, true},
		{"a deletion is invented", []store.Batch{synced(2, put(2, "a")), then(3, gone(3))}, true},
		{"out of order", []store.Batch{synced(1), then(3, put(3, "b"), put(2, "a"))}, true},
		{"twice", []store.Batch{synced(2, put(2, "a")), then(3, put(3, "b")), then(3, put(3, "b"))}, true},
		{"back", []store.Batch{synced(3, put(3, "b")), synced(2, put(2, "a"))}, true},
	} {
		if got := checkWatch(history, tt.batches); (len(got) > 0) != tt.wrong {
			t.Errorf("%s: %q", tt.name, got)
		}
	}
	op := func(cond store.Cond) []store.Op {
		return []store.Op{{If: cond, Action: store.Put, Object: store.Object{Key: key}}}
	}
	did := func(rev store.Revision, raw string) []store.Object {
		return []store.Object{{Key: key, Revision: rev, Raw: []byte(raw)}}
	}
	for _, tt := range []struct {
		name  string
		w     written
		wrong bool
	}{
		{"done", written{ops: op(store.IfRevision(2)), objs: did(3, "b")}, false},
		{"refused", written{ops: op(store.IfAbsent()), err: store.ErrConflict}, false},
		{"lost", written{ops: op(store.IfRevision(2)), objs: did(4, "c")}, true},
		{"against its condition", written{ops: op(store.IfAbsent()), objs: did(3, "b")}, true},
		{"on an older state", written{ops: op(store.IfRevision(1)), objs: did(3, "b")}, true},
	} {
		if got := checkWrites(history, []written{tt.w}); (len(got) > 0) != tt.wrong {
			t.Errorf("%s: %q", tt.name, got)
		}
	}
}
