package etcd_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// handle is a handle with an id of its own in it.
func handle(name, id string) store.Object {
	return store.Object{Key: store.HandleKey(name), Value: &store.Handle{Block: map[string]int{id: 1}}}
}

// putHandle writes one, whatever is there.
func putHandle(t *testing.T, s store.Store, name, id string) store.Object {
	t.Helper()
	var out store.Object
	await.Until(t, "the datastore takes "+name, func() error {
		objs, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: handle(name, id)})
		if err == nil {
			out = objs[0]
		}
		return err
	})
	return out
}

// copied copies a directory to a new one.
func copied(t *testing.T, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

// A datastore that is restored from a snapshot is seen as what it is, however far it
// has come since: all of it is told anew, revisions go on, and what was read before is no
// condition that holds.
func TestRestored(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		writes int // after the snapshot: six were made before it was restored
		proxy  bool
	}{
		{"older", 0, false},
		{"other content at the same revision", 5, false},
		{"further on", 9, false},
		// There the connection stays while etcd is another.
		{"older and behind a proxy", 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			conf := embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock")}
			server := start(t, conf)
			endpoint := server.Endpoint()
			if tt.proxy {
				endpoint = "http://" + startProxy(t, []string{endpoint}).addr
			}
			s := open(t, etcd.Config{Endpoints: []string{endpoint}})
			s.SetHistoryCheck(brief)
			putHandle(t, s, "kept", "common")
			putHandle(t, s, "changed", "common")
			server.Close()
			snapshot := copied(t, conf.Dir)

			server = start(t, conf)
			ch := watch(t, s, store.KindIPAMHandle, store.KindIPAMConfig)
			known := map[store.Key]store.Object{}
			var rev store.Revision
			learn := func(b store.Batch) {
				if b.Revision < rev {
					t.Errorf("the revision went back from %d to %d", rev, b.Revision)
				}
				rev = max(rev, b.Revision)
				for _, e := range b.Events {
					if e.Deleted() {
						delete(known, e.Key)
					} else {
						known[e.Key] = e.Object
					}
				}
			}
			var before store.Object
			for i := range 5 {
				before = putHandle(t, s, "changed", fmt.Sprint("first history, ", i))
			}
			putHandle(t, s, "added", "first history")
			take(t, ch, "the first history", func(b store.Batch) bool {
				learn(b)
				return len(known) == 3 && known[before.Key].Revision == before.Revision
			})
			server.Close()

			// The snapshot lives on elsewhere, and takes the place of the first.
			aside := embedded.Config{Dir: snapshot, Socket: filepath.Join(dir, "aside.sock")}
			server = start(t, aside)
			other := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
			for i := range tt.writes {
				putHandle(t, other, "changed", fmt.Sprint("second history, ", i))
			}
			server.Close()
			if err := errors.Join(os.RemoveAll(conf.Dir), os.Rename(snapshot, conf.Dir)); err != nil {
				t.Fatal(err)
			}
			start(t, conf)

			want := map[store.Key]string{store.HandleKey("kept"): "common", before.Key: "common"}
			if tt.writes > 0 {
				want[before.Key] = fmt.Sprint("second history, ", tt.writes-1)
			}
			take(t, ch, "the second history", func(b store.Batch) bool {
				learn(b)
				got := map[store.Key]string{}
				for key, o := range known {
					for id := range o.Value.(*store.Handle).Block {
						got[key] = id
					}
				}
				return cmp.Equal(want, got)
			})
			if known[before.Key].Revision <= before.Revision {
				t.Errorf("it is known at %d, and was at %d before", known[before.Key].Revision, before.Revision)
			}
			// Nothing that was read before holds, and what is there comes with the refusal.
			op := store.Op{If: store.IfRevision(before.Revision), Action: store.Put, Object: handle("changed", "late")}
			_, err := s.Txn(t.Context(), op)
			var conflict *store.ConflictError
			if !errors.As(err, &conflict) || !errors.Is(err, store.ErrConflict) {
				t.Fatalf("a write on condition of what was read before: %v", err)
			}
			if d := cmp.Diff(known[before.Key], conflict.Current[0]); d != "" {
				t.Errorf("(-watched +conflict):\n%s", d)
			}
			got, err := s.Get(t.Context(), before.Key)
			if d := cmp.Diff(known[before.Key], got); d != "" || err != nil {
				t.Errorf("%v (-watched +read):\n%s", err, d)
			}
			// And what was read since does.
			op.If = store.IfRevision(got.Revision)
			objs, err := s.Txn(t.Context(), op)
			if err != nil {
				t.Fatal(err)
			}
			take(t, ch, "the write", func(b store.Batch) bool {
				learn(b)
				return known[before.Key].Revision == objs[0].Revision
			})
			list, at, err := s.List(t.Context(), store.KindIPAMHandle, "")
			if err != nil || len(list) != 2 || at < objs[0].Revision {
				t.Errorf("%d handles at %d, %v", len(list), at, err)
			}
		})
	}
}
