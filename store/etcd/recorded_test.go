package etcd_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
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

// record reads on until ctx ends. What is between Calico's keys and routerd's own is read too,
// and not kept.
func (tr *truth) record(ctx context.Context, c *clientv3.Client) error {
	for resp := range c.Watch(ctx, store.RootPath, clientv3.WithRange(clientv3.GetPrefixRangeEnd(store.OwnRootPath)), clientv3.WithRev(1)) {
		if err := resp.Err(); err != nil && ctx.Err() == nil {
			return fmt.Errorf("read etcd's history: %w", err)
		}
		tr.mu.Lock()
		for _, e := range resp.Events {
			ch := change{rev: store.Revision(e.Kv.ModRevision), path: string(e.Kv.Key)}
			if e.Type != clientv3.EventTypeDelete {
				ch.raw = e.Kv.Value
			}
			if strings.HasPrefix(ch.path, store.RootPath) || ownPath(ch.path) {
				tr.changes = append(tr.changes, ch)
			}
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

func ownPath(path string) bool { return strings.HasPrefix(path, store.OwnRootPath) }

// compared is what was stored and what was told of some keys.
type compared struct {
	history      []change
	stored, told map[string]change
}

func compare(history []change, own bool) *compared {
	return &compared{
		history: slices.DeleteFunc(slices.Clone(history), func(ch change) bool { return ownPath(ch.path) != own }),
		stored:  map[string]change{}, told: map[string]change{},
	}
}

func (c *compared) tell(e store.Event) {
	path := e.Key.Path()
	if e.Deleted() {
		delete(c.told, path)
	} else {
		c.told[path] = change{e.Object.Revision, path, e.Object.Raw}
	}
}

// differs compares what was told with what was stored at a revision, which is not before the one
// of the call before.
func (c *compared) differs(rev store.Revision) string {
	for ; len(c.history) > 0 && c.history[0].rev <= rev; c.history = c.history[1:] {
		if ch := c.history[0]; ch.raw == nil {
			delete(c.stored, ch.path)
		} else {
			c.stored[ch.path] = ch
		}
	}
	if maps.EqualFunc(c.stored, c.told, sameChange) {
		return ""
	}
	diff := fmt.Sprintf("stored %s, told %s", show(c.stored, c.told), show(c.told, c.stored))
	c.told = maps.Clone(c.stored) // one complaint for one fault
	return diff
}

// checkWatch compares what a watch delivered with etcd's history, and returns what is
// wrong with it: a change that was lost, invented, or told out of order. After each
// batch the consumer knows exactly what was stored at that batch's revision; of a kind of
// routerd's own, at the revision of the last that it was told of it.
func checkWatch(history []change, batches []store.Batch) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	calicos, own := compare(history, false), compare(history, true)
	var last, lastOwn store.Revision
	for i, b := range batches {
		if b.Revision < last {
			complain("batch %d: the revision goes back from %d to %d", i, last, b.Revision)
		}
		var order store.Revision
		toldOwn := lastOwn // before this batch
		for _, e := range b.Events {
			path, rev := e.Key.Path(), e.Object.Revision
			if ownPath(path) {
				if !b.Synced && (rev <= toldOwn || rev < lastOwn) {
					complain("batch %d: %s at %d comes after a change at %d", i, path, rev, lastOwn)
				}
				lastOwn = max(lastOwn, rev)
				own.tell(e)
				continue
			}
			if !b.Synced {
				if rev < order {
					complain("batch %d: %s at %d comes after a change at %d", i, path, rev, order)
				}
				order = rev
			}
			if rev <= last && !b.Synced {
				complain("batch %d: %s at %d is told after revision %d was", i, path, rev, last)
			}
			calicos.tell(e)
		}
		last = max(last, b.Revision)
		if b.Err != nil {
			continue
		}
		if diff := calicos.differs(b.Revision); diff != "" {
			complain("batch %d, revision %d: %s", i, b.Revision, diff)
		}
		if diff := own.differs(lastOwn); diff != "" {
			complain("batch %d, revision %d of routerd's own: %s", i, lastOwn, diff)
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
	cidrs := store.ServiceCIDRKey("c")
	cidr := func(rev store.Revision, raw string) store.Event {
		return store.Event{Key: cidrs, Object: store.Object{Key: cidrs, Revision: rev, Value: &store.ServiceCIDR{}, Raw: []byte(raw)}}
	}
	history := []change{{2, path, []byte("a")}, {3, path, []byte("b")}, {4, cidrs.Path(), []byte("x")}, {5, path, nil}, {6, cidrs.Path(), []byte("y")}}
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
		{"beside, ahead", []store.Batch{synced(2, put(2, "a")), then(2, cidr(4, "x")), then(3, put(3, "b")), then(5, gone(5), cidr(6, "y"))}, false},
		{"beside, lost", []store.Batch{synced(2, put(2, "a")), then(2, cidr(6, "y"), cidr(7, "z"))}, true},
		{"beside, invented", []store.Batch{synced(2, put(2, "a")), then(2, cidr(4, "y"))}, true},
		{"beside, back", []store.Batch{synced(2, put(2, "a")), then(2, cidr(6, "y")), then(2, cidr(4, "x"))}, true},
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
