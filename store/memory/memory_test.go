package memory_test

import (
	"context"
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
	"github.com/routerd/routerd/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// faulty makes the suite's faults out of the store's own.
type faulty struct{ *memory.Store }

func (f faulty) Compact(context.Context) error {
	f.Store.Compact()
	return nil
}

func (f faulty) Interrupt() func() {
	f.FailWatches(errors.New("unplugged"))
	return func() { f.FailWatches(nil) }
}

func (f faulty) PutRaw(_ context.Context, path string, raw []byte) error {
	f.Store.PutRaw(path, raw)
	return nil
}

func TestConformance(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) store.Store {
		s := memory.New()
		t.Cleanup(func() { s.Close() })
		return faulty{s}
	})
}

func TestFail(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	unplugged := errors.New("unplugged")
	s.Fail(unplugged)
	key := store.IPAMConfigKey()
	put := store.Op{Action: store.Put, Object: store.Object{Key: key, Value: &store.IPAMConfig{}}}
	_, getErr := s.Get(t.Context(), key)
	_, _, listErr := s.List(t.Context(), store.KindIPAMConfig, "")
	_, txnErr := s.Txn(t.Context(), put)
	for _, err := range []error{getErr, listErr, txnErr} {
		if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, unplugged) {
			t.Errorf("got %v", err)
		}
	}
	ch := s.Watch(t.Context(), store.KindIPAMConfig)
	if b := <-ch; !errors.Is(b.Err, unplugged) {
		t.Errorf("got %+v", b)
	}
	s.Fail(nil)
	if b := <-ch; !b.Synced {
		t.Errorf("got %+v", b)
	}
	if _, err := s.Txn(t.Context(), put); err != nil {
		t.Error(err)
	}
}

// faultySequential makes the suite's faults out of the store's own.
type faultySequential struct{ *memory.Sequential }

func (f faultySequential) Compact(context.Context) error {
	f.Store.Compact()
	return nil
}

func (f faultySequential) Interrupt() func() { return faulty{f.Store}.Interrupt() }

func (f faultySequential) PutRaw(ctx context.Context, path string, raw []byte) error {
	return faulty{f.Store}.PutRaw(ctx, path, raw)
}

func TestConformanceSequential(t *testing.T) {
	t.Parallel()
	storetest.RunSequential(t, func(t *testing.T) store.Store {
		s := memory.NewSequential()
		t.Cleanup(func() { s.Close() })
		return faultySequential{s}
	})
}

// TestLetWrites: what a crash between two writes leaves is a beginning of the
// transaction.
func TestLetWrites(t *testing.T) {
	t.Parallel()
	for n := range 4 {
		s := memory.NewSequential()
		defer s.Close()
		var ops []store.Op
		for i, role := range []store.Role{store.Follows, store.Decides, store.Prepares} {
			ops = append(ops, store.Op{Action: store.Put, Role: role, Object: store.Object{Key: store.HandleKey(string(rune('c' - i))), Value: &store.Handle{}}})
		}
		s.LetWrites(n)
		if _, err := s.Txn(t.Context(), ops...); (err == nil) != (n >= 2) {
			t.Errorf("after %d writes: %v", n, err)
		}
		objs, _, err := s.List(t.Context(), store.KindIPAMHandle, "")
		if err != nil || len(objs) != n || n > 0 && objs[0].Key.Name != "a" {
			t.Errorf("after %d writes there are %v, %v", n, objs, err)
		}
	}
}
