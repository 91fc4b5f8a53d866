package presence

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// nameStore is a datastore that knows one name.
type nameStore struct {
	changed async.Signal

	mu     sync.Mutex
	holder *store.Incarnation
}

func newNameStore(holder *store.Incarnation) *nameStore {
	return &nameStore{holder: holder, changed: async.NewSignal()}
}

func (s *nameStore) Name(context.Context, string) (store.NameState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return store.NameState{Record: s.holder, Holder: s.holder, Revision: 1}, nil
}

func (s *nameStore) Claim(_ context.Context, _ string, _ store.NameState, as store.Incarnation, _ time.Duration) (store.Hold, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holder = &as
	return heldName{}, nil
}

// set has the datastore say who has the name; nil: nothing has it any more.
func (s *nameStore) set(holder *store.Incarnation) {
	s.mu.Lock()
	s.holder = holder
	s.mu.Unlock()
	s.changed.Set()
}

func (s *nameStore) WatchName(context.Context, string, store.Revision) <-chan struct{} {
	return s.changed
}
func (s *nameStore) Rest(context.Context, int) {}

type heldName struct{}

func (heldName) Lost() <-chan struct{} { return nil }
func (heldName) Forget()               {}

// TestFence: a host that is refused takes down the routes of others' addresses at once and
// then from time to time, whatever comes of it, until the name is its own.
func TestFence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newNameStore(life("other", "boot9", 1, 0))
		var fenced atomic.Int64
		k := New(Config{
			Node: "node-a", Store: s, File: t.TempDir() + "/incarnation.json", Self: *life("self", "boot1", 0, 0), Log: slog.New(slog.DiscardHandler),
			Fence: func(context.Context) error {
				fenced.Add(1)
				return errors.New("the datastore does not answer")
			},
		})
		if err := k.MayWrite(); !errors.Is(err, errNotHeld) {
			t.Errorf("before the datastore answers: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- k.Run(ctx) }()
		for want := range int64(3) {
			synctest.Wait()
			if got := fenced.Load(); got != want+1 {
				t.Errorf("fenced %d times after %d intervals", got, want)
			}
			time.Sleep(FenceEvery) //nolint:forbidigo // virtual time
		}
		var refused *RefusedError
		if err := k.MayWrite(); !errors.As(err, &refused) {
			t.Errorf("while another has the name: %v", err)
		}
		synctest.Wait()
		before := fenced.Load()
		s.set(nil)
		synctest.Wait()
		if err := k.MayWrite(); err != nil {
			t.Errorf("the name is its own: %v", err)
		}
		time.Sleep(10 * FenceEvery) //nolint:forbidigo // virtual time
		if got := fenced.Load(); got != before {
			t.Errorf("fenced %d times more though the name is its own", got-before)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestGivenUpWhileVerifying: a daemon that gives its name up ends, though what was assigned to
// its workloads cannot be verified.
func TestGivenUpWhileVerifying(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newNameStore(nil)
		conf := Config{Node: "node-a", Store: s, File: t.TempDir() + "/incarnation.json", Self: *life("self", "boot1", 0, 0), Log: slog.New(slog.DiscardHandler)}
		hangs(&conf)
		k := New(conf)
		ended := make(chan error, 1)
		go func() { ended <- k.Run(t.Context()) }()
		<-k.Held()
		s.set(life("other", "boot9", 2, 0))
		var given *GivenUpError
		if err := <-ended; !errors.As(err, &given) {
			t.Errorf("ended with %v", err)
		}
	})
}
