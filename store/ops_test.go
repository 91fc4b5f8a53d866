package store_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

var poolKey = store.ResourceKey(store.KindIPPool, "p")

func newPool(size int) *v3.IPPool {
	p := store.New(store.KindIPPool).(*v3.IPPool)
	p.Name, p.Spec.BlockSize = "p", size
	return p
}

// interloper lets somebody else act before each transaction.
type interloper struct {
	store.Store
	before func() error
}

func (i interloper) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	if err := i.before(); err != nil {
		return nil, err
	}
	return i.Store.Txn(ctx, ops...)
}

func TestModifyGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // the pauses pass in no time
		s := memory.New()
		defer s.Close()
		writes := 0
		rival := interloper{s, func() error {
			writes++
			_, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: poolKey, Value: newPool(1000 + writes)}})
			return err
		}}
		_, err := store.Modify(t.Context(), rival, poolKey, func(store.Object) (any, error) { return newPool(1), nil })
		if !errors.Is(err, store.ErrConflict) || !strings.Contains(err.Error(), "after 100 tries") || writes != 100 {
			t.Errorf("after %d writes of a rival: %v", writes, err)
		}
		writes = 0
		ctx, cancel := context.WithCancel(t.Context())
		_, err = store.Modify(ctx, interloper{s, func() error {
			if writes == 5 {
				cancel()
			}
			return rival.before()
		}}, poolKey, func(store.Object) (any, error) { return newPool(1), nil })
		if err == nil || writes > 7 {
			t.Errorf("a caller that gave up waited for %d writes: %v", writes, err)
		}
	})
}

// TestModifyUsesConflict: one rival costs one more transaction, no read.
func TestModifyUsesConflict(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	if _, err := store.Create(t.Context(), s, newPool(1)); err != nil {
		t.Fatal(err)
	}
	rivals := 1
	saw := []int{}
	got, err := store.Modify(t.Context(), interloper{s, func() error {
		if rivals--; rivals < 0 {
			return nil
		}
		_, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: poolKey, Value: newPool(2)}})
		return err
	}}, poolKey, func(cur store.Object) (any, error) {
		p := store.Clone(cur.Value).(*v3.IPPool)
		saw = append(saw, p.Spec.BlockSize)
		p.Spec.BlockSize += 10
		return p, nil
	})
	if err != nil || got.Value.(*v3.IPPool).Spec.BlockSize != 12 || len(saw) != 2 || saw[0] != 1 || saw[1] != 2 {
		t.Errorf("saw %v, got %+v, %v", saw, got, err)
	}
}

// TestModifyAfterRemoval: what a rival deletes is made anew.
func TestModifyAfterRemoval(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	first, err := store.Create(t.Context(), s, newPool(1))
	if err != nil {
		t.Fatal(err)
	}
	removed := false
	got, err := store.Modify(t.Context(), interloper{s, func() error {
		if removed {
			return nil
		}
		removed = true
		return store.Delete(t.Context(), s, poolKey, 0)
	}}, poolKey, func(store.Object) (any, error) { return newPool(7), nil })
	if err != nil || got.Revision <= first.Revision || store.Meta(got.Value).UID == store.Meta(first.Value).UID {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestOperationsWithoutStore(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	s.Fail(errors.New("unplugged"))
	_, create := store.Create(t.Context(), s, newPool(1))
	_, modify := store.Modify(t.Context(), s, poolKey, func(store.Object) (any, error) { return newPool(1), nil })
	for name, err := range map[string]error{
		"create": create, "modify": modify,
		"delete":    store.Delete(t.Context(), s, poolKey, 0),
		"bootstrap": store.Bootstrap(t.Context(), s),
	} {
		if !errors.Is(err, store.ErrUnavailable) || !strings.HasPrefix(err.Error(), name) || !strings.Contains(err.Error(), "unplugged") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKeyLocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var locks store.KeyLocks
		release, err := locks.LockKey(t.Context(), poolKey)
		if err != nil {
			t.Fatal(err)
		}
		other, err := locks.LockKey(t.Context(), store.IPAMConfigKey())
		if err != nil {
			t.Fatal(err)
		}
		other()

		var order []int
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				release, err := locks.LockKey(t.Context(), poolKey)
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				release()
			})
			synctest.Wait() // so that they come in this order
		}
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() {
			if _, err := locks.LockKey(ctx, poolKey); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		cancel()
		synctest.Wait()
		if len(order) != 0 {
			t.Errorf("%v got a lock that is held", order)
		}
		release()
		wg.Wait()
		for i, got := range order {
			if got != i {
				t.Errorf("they came in order and left in %v", order)
				break
			}
		}
		if len(order) != 5 {
			t.Errorf("%d of 5 got the lock", len(order))
		}
	})
}
