package storetest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// testTransactionInParts holds what is promised where objects are written one
// after the other: what stands after which op has failed.
func testTransactionInParts(t *testing.T, s store.Store) {
	role := func(r store.Role, op store.Op) store.Op {
		op.Role = r
		return op
	}
	there := func(name string) store.Revision {
		obj, err := s.Get(t.Context(), poolKey(name))
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			t.Fatal(err)
		}
		return obj.Revision
	}
	old := must(t, s, put(store.IfAbsent(), pool("old", "10.0.0.0/16")))[0]
	stale := old.Revision
	old = must(t, s, put(store.IfRevision(old.Revision), pool("old", "10.1.0.0/16")))[0]

	// All of it, whatever the order of the ops.
	objs := must(t, s,
		role(store.Follows, put(store.IfAbsent(), pool("after", "10.0.0.0/16"))),
		put(store.IfAbsent(), pool("decides", "10.0.0.0/16")),
		role(store.Prepares, put(store.IfAbsent(), pool("before", "10.0.0.0/16"))),
		store.Op{If: store.IfRevision(old.Revision), Action: store.Check, Object: store.Object{Key: old.Key}})
	if after, decides, before := objs[0].Revision, objs[1].Revision, objs[2].Revision; before == 0 || before > decides || decides > after || objs[3].Key != old.Key {
		t.Errorf("prepared at %d, decided at %d, followed at %d", before, decides, after)
	}

	// A check that does not hold: nothing is done.
	_, err := s.Txn(t.Context(),
		role(store.Prepares, put(store.IfAbsent(), pool("p1", "10.0.0.0/16"))),
		put(store.IfAbsent(), pool("d1", "10.0.0.0/16")),
		store.Op{If: store.IfRevision(stale), Action: store.Check, Object: store.Object{Key: old.Key}})
	var conflict *store.ConflictError
	if !errors.As(err, &conflict) || conflict.Key != old.Key || conflict.Reason != store.ErrConflict {
		t.Fatalf("a check of an old revision: %v", err)
	}
	want := []store.Object{{Key: poolKey("p1")}, {Key: poolKey("d1")}, old}
	if diff := cmp.Diff(want, conflict.Current); diff != "" {
		t.Errorf("current state (-want +got):\n%s", diff)
	}
	if there("p1") != 0 || there("d1") != 0 {
		t.Error("something was written although a check did not hold")
	}

	// The decision is refused: what prepared stands, what would have followed does
	// not come.
	_, err = s.Txn(t.Context(),
		role(store.Prepares, put(store.IfAbsent(), pool("p2", "10.0.0.0/16"))),
		put(store.IfRevision(stale), pool("old", "10.2.0.0/16")),
		role(store.Follows, put(store.IfAbsent(), pool("f2", "10.0.0.0/16"))))
	if !errors.As(err, &conflict) || conflict.Key != old.Key || conflict.Current[0].Revision == 0 || conflict.Current[2].Revision != 0 {
		t.Errorf("a refused decision: %v, %+v", err, conflict)
	}
	if there("p2") == 0 || there("f2") != 0 || there("old") != old.Revision {
		t.Errorf("after a refused decision: prepared %d, followed %d", there("p2"), there("f2"))
	}

	// What should prepare is refused: no decision.
	_, err = s.Txn(t.Context(),
		role(store.Prepares, put(store.IfAbsent(), pool("p2", "10.0.0.0/16"))),
		put(store.IfRevision(old.Revision), pool("old", "10.2.0.0/16")))
	if !errors.Is(err, store.ErrExists) || there("old") != old.Revision {
		t.Errorf("a refused preparation: %v", err)
	}

	// What should follow is refused: the transaction took place all the same.
	objs = must(t, s,
		put(store.IfRevision(old.Revision), pool("old", "10.2.0.0/16")),
		role(store.Follows, put(store.IfAbsent(), pool("p2", "10.9.0.0/16"))))
	if objs[0].Revision != there("old") || objs[1].Revision != 0 || objs[1].Key != poolKey("p2") {
		t.Errorf("with a refused op that follows: %+v", objs)
	}

	// Two decisions cannot be taken at once: none is.
	if _, err := s.Txn(t.Context(), put(store.IfAbsent(), pool("d3", "10.0.0.0/16")), put(store.IfAbsent(), pool("d4", "10.0.0.0/16"))); !errors.Is(err, store.ErrInvalid) || there("d3") != 0 {
		t.Errorf("two decisions: %v", err)
	}
}

// testWatchOrder: the changes of one kind come in their order, also of many keys.
func testWatchOrder(t *testing.T, s store.Store) {
	w := watch(t, s, store.KindIPPool)
	w.next(t)
	const n = 60
	last := store.Revision(0)
	for i := range n {
		last = must(t, s, put(store.Always(), pool(fmt.Sprintf("p%d", i%7), fmt.Sprintf("10.%d.0.0/16", i))))[0].Revision
	}
	told := store.Revision(0)
	w.until(t, "the last change", func(b store.Batch) bool {
		for _, e := range b.Events {
			if e.Object.Revision <= told {
				t.Errorf("%s of revision %d comes after one of %d", e.Key, e.Object.Revision, told)
			}
			told = e.Object.Revision
		}
		return told == last
	})
}
