// Package lock keeps this host from writing to a datastore that an operator has
// locked, as "calicoctl datastore migrate lock" and "routerctl datastore lock" do to
// move it: ClusterInformation default then has datastoreReady false. What is to be
// written waits, as it does while the datastore is away.
package lock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// ErrLocked says that an operator locked the datastore.
var ErrLocked = errors.New("the datastore is locked: ClusterInformation default has datastoreReady: false, " +
	"as \"calicoctl datastore migrate lock\" sets it; unlock it when the migration is over")

// ErrDeleted says that ClusterInformation was deleted, which locks nothing and
// unlocks nothing.
var ErrDeleted = errors.New("ClusterInformation default was deleted; it is put back as it was")

// Kinds lists what [Store.HandleStore] wants to know.
func Kinds() []store.Kind { return []store.Kind{store.KindClusterInformation} }

// Store is a store that refuses to write while it is locked, with an error that
// matches [store.ErrUnavailable] and [ErrLocked]: nothing was written. What a lock is
// not about stays possible: reading, ClusterInformation itself, and the records that
// hosts of routerd keep for each other, which no migration moves. It is safe for
// concurrent use.
type Store struct {
	store.Store
	store.KeyLocks
	log *slog.Logger

	deleted async.Signal

	mu     sync.Mutex
	told   bool          // the datastore has said whether it is locked
	away   bool          // it cannot be reached
	news   chan struct{} // closed when one of the two changes
	last   store.Object  // ClusterInformation as it was last; no value: it was never seen
	locked bool
	gone   bool // it was deleted since
}

// New returns a Store. Who writes waits until [Store.HandleStore] has said whether it
// is locked.
func New(s store.Store, log *slog.Logger) *Store {
	return &Store{Store: s, log: log, deleted: async.NewSignal(), news: make(chan struct{})}
}

// HandleStore applies a step of the cluster's copy. It does not block.
func (s *Store) HandleStore(step cluster.Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ev := range step.Changes {
		if ev.Err != nil || ev.Key != store.ResourceKey(store.KindClusterInformation, store.DefaultName) {
			continue
		}
		info, there := ev.Object.Value.(*v3.ClusterInformation)
		if !there {
			if s.gone = s.last.Value != nil; s.gone {
				s.deleted.Set()
			}
			continue
		}
		s.last, s.gone = ev.Object, false
		s.locked = info.Spec.DatastoreReady != nil && !*info.Spec.DatastoreReady
	}
	// What the disk says may be of before the lock.
	told, away := s.told || step.Synced && step.Source != cluster.Disk, step.Err != nil
	if told != s.told || away != s.away {
		s.told, s.away = told, away
		close(s.news)
		s.news = make(chan struct{})
	}
}

// Err returns an error that matches [ErrLocked] while the datastore is locked, and
// [ErrDeleted] while it lacks ClusterInformation.
func (s *Store) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.locked && s.gone: // it is not put back where this host may not write it
		return fmt.Errorf("%w; %w", ErrLocked, ErrDeleted)
	case s.locked:
		return ErrLocked
	case s.gone:
		return ErrDeleted
	}
	return nil
}

// Locked reports whether the datastore is locked.
func (s *Store) Locked() bool { return errors.Is(s.Err(), ErrLocked) }

// Txn implements [store.Store].
func (s *Store) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	for _, op := range ops {
		if op.Action == store.Check || !kept(op.Object.Key.Kind) {
			continue
		}
		if err := s.mayWrite(ctx); err != nil {
			return nil, fmt.Errorf("write %s: %w: %w", op.Object.Key, store.ErrUnavailable, err)
		}
	}
	return s.Store.Txn(ctx, ops...)
}

// Last returns ClusterInformation as it was last, once the datastore has said what it has
// of it or is away; no value: this host has never seen any.
func (s *Store) Last(ctx context.Context) (store.Object, error) {
	if err := s.mayWrite(ctx); err != nil && !errors.Is(err, ErrLocked) {
		return store.Object{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last, nil
}

// mayWrite waits until it is known whether the datastore is locked. One that is away
// says so itself.
func (s *Store) mayWrite(ctx context.Context) error {
	for {
		s.mu.Lock()
		told, away, locked, news := s.told, s.away, s.locked, s.news
		s.mu.Unlock()
		switch {
		case locked:
			return ErrLocked
		case told || away:
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("it is not known yet whether the datastore is locked: %w", ctx.Err())
		}
	}
}

// kept reports whether a lock holds for a kind.
func kept(k store.Kind) bool {
	switch k {
	case store.KindClusterInformation, store.KindSecret, store.KindIncarnation:
		return false
	}
	return true
}

// Run puts ClusterInformation back when it is deleted, until ctx ends: without
// it Calico's tools and nodes take the datastore for an empty one.
func (s *Store) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.deleted:
		}
		s.log.Warn("ClusterInformation default was deleted; it is put back as it was")
		err := async.Retry(ctx, async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.5}, s.putBack)
		if err != nil {
			return err
		}
	}
}

// putBack makes ClusterInformation what it was. All hosts do; the first one counts.
func (s *Store) putBack(ctx context.Context) error {
	s.mu.Lock()
	obj, gone := s.last, s.gone
	s.mu.Unlock()
	if !gone {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	obj.Revision = 0
	_, err := s.Txn(ctx, store.Op{If: store.IfAbsent(), Action: store.Put, Object: obj})
	if errors.Is(err, store.ErrExists) {
		return nil
	}
	if err != nil {
		s.log.Debug("ClusterInformation is not put back; will try again", "error", err)
		return fmt.Errorf("put ClusterInformation back: %w", err)
	}
	return nil
}
