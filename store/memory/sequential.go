package memory

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

// errCut is why a write of a [Sequential] fails after [Sequential.LetWrites].
var errCut = errors.New("cut between two writes")

// Sequential is a [Store] that writes one object at a time, as the Kubernetes
// datastore does: [store.Store.Txn] says how. Make one with [NewSequential].
type Sequential struct {
	*Store

	asks func(store.Op) error // see [SequentialOn]

	mu     sync.Mutex
	writes int // how many are let through; negative: all
}

// NewSequential returns an empty store.
func NewSequential() *Sequential { return &Sequential{Store: New(), writes: -1} }

// SequentialOn returns what writes one object at a time to a store that others may write to as
// well. It asks before each write; with an error, that fails and what its transaction wrote before
// stays.
func SequentialOn(s *Store, asks func(store.Op) error) *Sequential {
	return &Sequential{Store: s, asks: asks, writes: -1}
}

// LetWrites lets n writes through and fails those after them; negative: all pass.
// A transaction that meets this is left as a crash would leave it.
func (s *Sequential) LetWrites(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes = n
}

// admit says whether a write is let through.
func (s *Sequential) admit(op store.Op) error {
	if s.asks != nil {
		return s.asks(op)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.writes == 0:
		return fmt.Errorf("%w: %w", store.ErrUnavailable, errCut)
	case s.writes > 0:
		s.writes--
	}
	return nil
}

// Txn implements [store.Store].
func (s *Sequential) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	if _, err := backend.Prepare(ops); err != nil {
		return nil, err
	}
	var checks []store.Op
	decides := -1
	for i, op := range ops {
		switch {
		case op.Action == store.Check:
			checks = append(checks, op)
		case op.Role != store.Decides:
		case decides >= 0:
			return nil, fmt.Errorf("transaction: %w: %s and %s are to be written in one step, and %w", store.ErrInvalid, ops[decides].Object.Key, op.Object.Key, store.ErrOneByOne)
		default:
			decides = i
		}
	}
	if len(checks) > 0 {
		if _, err := s.Store.Txn(ctx, checks...); err != nil {
			return nil, s.whole(ctx, ops, err)
		}
	}
	out := make([]store.Object, len(ops))
	for i, op := range ops {
		out[i].Key = op.Object.Key
	}
	for _, role := range []store.Role{store.Prepares, store.Decides, store.Follows} {
		for i, op := range ops {
			if op.Action == store.Check || op.Role != role {
				continue
			}
			err := s.admit(op)
			var written []store.Object
			if err == nil {
				written, err = s.Store.Txn(ctx, op)
			}
			switch {
			case err == nil:
				out[i] = written[0]
			case role != store.Follows:
				return nil, s.whole(ctx, ops, err)
			}
		}
	}
	return out, nil
}

// whole gives a conflict what is there of all ops.
func (s *Sequential) whole(ctx context.Context, ops []store.Op, err error) error {
	var conflict *store.ConflictError
	if !errors.As(err, &conflict) {
		return err
	}
	conflict.Current = nil
	for _, op := range ops {
		obj, err := s.Get(ctx, op.Object.Key)
		if err != nil && !errors.Is(err, store.ErrNotFound) && !errors.Is(err, store.ErrDecode) {
			return err
		}
		obj.Key = op.Object.Key
		conflict.Current = append(conflict.Current, obj)
	}
	return conflict
}
