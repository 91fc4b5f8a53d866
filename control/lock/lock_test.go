package lock

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func information(ready *bool) store.Object {
	info := store.New(store.KindClusterInformation).(*v3.ClusterInformation)
	info.Name, info.Spec.ClusterGUID, info.Spec.DatastoreReady = store.DefaultName, "guid", ready
	return store.Object{Key: store.ResourceKey(store.KindClusterInformation, store.DefaultName), Value: info}
}

// says hands over a step: ClusterInformation as given, or deleted without a value.
func (s *Store) says(obj store.Object, synced bool) {
	s.HandleStore(clustertest.Step("node1", store.Batch{Events: []store.Event{{Key: obj.Key, Object: obj}}, Synced: synced, Revision: 1}, Kinds()...))
}

func TestWrites(t *testing.T) {
	t.Parallel()
	yes, no := true, false
	pool := func(s store.Store) error {
		p := store.New(store.KindIPPool).(*v3.IPPool)
		p.Name, p.Spec.CIDR = "pool", "10.1.0.0/16"
		_, err := store.Create(t.Context(), s, p)
		return err
	}
	for _, tt := range []struct {
		name   string
		ready  *bool
		locked bool
	}{
		{"unlocked", &yes, false},
		{"unlocked by silence", nil, false},
		{"locked", &no, true},
	} {
		s := New(memory.New(), slog.New(slog.DiscardHandler))
		s.says(information(tt.ready), true)
		err := pool(s)
		if got := errors.Is(err, ErrLocked) && errors.Is(err, store.ErrUnavailable); got != tt.locked {
			t.Errorf("%s: %v", tt.name, err)
		}
		// What somebody deletes changes nothing about it.
		s.says(store.Object{Key: information(nil).Key}, false)
		if got := s.Locked(); got != tt.locked {
			t.Errorf("%s: locked %t without ClusterInformation", tt.name, got)
		}
		if err := s.Err(); errors.Is(err, ErrLocked) != tt.locked || !errors.Is(err, ErrDeleted) {
			t.Errorf("%s: %v without ClusterInformation", tt.name, err)
		}
		if _, err := s.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: store.IncarnationKey("node1"), Value: &store.Incarnation{}}}); err != nil {
			t.Errorf("%s: a record of our own: %v", tt.name, err)
		}
		if _, err := s.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Check, Object: store.Object{Key: store.ResourceKey(store.KindIPPool, "none")}}); err != nil {
			t.Errorf("%s: a check: %v", tt.name, err)
		}
	}
}

// Writers of one key in this process wait for each other here too.
var _ store.KeyLocker = (*Store)(nil)

// Before it is known whether the datastore is locked nothing is written.
func TestWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := New(memory.New(), slog.New(slog.DiscardHandler))
		put := func(ctx context.Context) error {
			pool := store.New(store.KindIPPool).(*v3.IPPool)
			pool.Name = "pool"
			_, err := store.Create(ctx, s, pool)
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := put(ctx); !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nothing is known: %v", err)
		}
		done := make(chan error, 1)
		go func() { done <- put(t.Context()) }()
		synctest.Wait()
		yes, no := true, false
		still := func(what string) {
			t.Helper()
			synctest.Wait()
			select {
			case err := <-done:
				t.Errorf("%s: %v", what, err)
			default:
			}
		}
		s.says(information(&yes), false)
		still("half is known")
		disk := clustertest.Step("node1", store.Batch{Synced: true, Revision: 1}, Kinds()...)
		disk.Source = cluster.Disk
		s.HandleStore(disk)
		still("what the disk had is known")
		s.says(information(&no), true)
		if err := <-done; !errors.Is(err, ErrLocked) {
			t.Errorf("it is locked: %v", err)
		}
		// A datastore that is away is not waited for: it says so itself.
		m := memory.New()
		m.Fail(errors.New("no quorum"))
		s = New(m, slog.New(slog.DiscardHandler))
		s.HandleStore(clustertest.Step("node1", store.Batch{Err: store.ErrUnavailable}, Kinds()...))
		if err := put(t.Context()); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "no quorum") {
			t.Errorf("it is away: %v", err)
		}
	})
}

// ClusterInformation is put back byte for byte, however long the datastore refuses.
func TestPutBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := memory.New()
		s := New(m, slog.New(slog.DiscardHandler))
		no := false
		made, err := m.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: information(&no)})
		if err != nil {
			t.Fatal(err)
		}
		s.says(made[0], true)
		if err := store.Delete(t.Context(), m, made[0].Key, 0); err != nil {
			t.Fatal(err)
		}
		m.Fail(errors.New("no quorum"))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		s.says(store.Object{Key: made[0].Key}, false)
		<-time.After(time.Minute) // virtual time
		m.Fail(nil)
		<-time.After(time.Minute) // virtual time
		got, err := m.Get(t.Context(), made[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(made[0].Raw), string(got.Raw)); diff != "" {
			t.Errorf("put back (-before +after):\n%s", diff)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
}
