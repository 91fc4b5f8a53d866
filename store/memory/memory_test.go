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
