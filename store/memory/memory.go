// Package memory is a [store.Store] in memory, for tests: revisions,
// conditions, history and its compaction behave as etcd's do, and faults can be
// switched on.
package memory

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

// history is how many changes are remembered for watches that lag. A watch
// that falls behind further reads the state again, as after a compaction.
const history = 4096

// Store is a datastore in memory. Make one with [New].
type Store struct {
	store.KeyLocks

	mu        sync.Mutex
	rev       store.Revision
	data      map[string]backend.Stored // by path
	log       []change                  // by ascending revision, all above compacted
	compacted store.Revision
	moved     chan struct{} // closed and replaced when any of this changes
	fault     error         // why no call gets through
	cut       error         // why no watch gets through
	closed    chan struct{}
	watches   sync.WaitGroup
}

// change is what one transaction did to one path.
type change struct {
	rev  store.Revision
	path string
	raw  []byte // nil: deleted
}

// New returns an empty store, at revision 1 as an empty etcd is.
func New() *Store {
	return &Store{
		rev:    1,
		data:   make(map[string]backend.Stored),
		moved:  make(chan struct{}),
		closed: make(chan struct{}),
	}
}

// Close ends all watches and waits for them. Later calls fail with
// [store.ErrUnavailable].
func (s *Store) Close() error {
	s.mu.Lock()
	select {
	case <-s.closed:
	default:
		close(s.closed)
		s.fault = fmt.Errorf("%w: the store was closed", store.ErrUnavailable)
	}
	s.mu.Unlock()
	s.watches.Wait()
	return nil
}

// Compact forgets the history up to the present, so that a watch that has not
// read all of it yet reads the state again.
func (s *Store) Compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.compacted, s.log = s.rev, nil
	s.move()
}

// Fail makes every call and every watch fail with an error that wraps cause
// and matches [store.ErrUnavailable], until it is called with nil.
func (s *Store) Fail(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return
	default:
	}
	s.fault = unavailable(cause)
	s.move()
}

// FailWatches is Fail for watches alone, so that what they miss meanwhile can
// be written.
func (s *Store) FailWatches(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cut = unavailable(cause)
	s.move()
}

func unavailable(cause error) error {
	if cause == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", store.ErrUnavailable, cause)
}

// PutRaw stores bytes that need not be decodable, as another client of the
// datastore might, and returns the revision.
func (s *Store) PutRaw(path string, raw []byte) store.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rev++
	s.write(path, slices.Clone(raw))
	s.move()
	return s.rev
}

// move wakes the watches. The lock is held.
func (s *Store) move() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// write applies one change at the present revision. The lock is held. A nil
// raw deletes.
func (s *Store) write(path string, raw []byte) {
	if raw == nil {
		delete(s.data, path)
	} else {
		s.data[path] = backend.Stored{Revision: s.rev, Raw: raw}
	}
	s.log = append(s.log, change{s.rev, path, raw})
	if len(s.log) >= 2*history {
		s.compacted = s.log[len(s.log)-history-1].rev
		s.log = slices.DeleteFunc(slices.Clone(s.log), func(c change) bool { return c.rev <= s.compacted })
	}
}

// enter takes the lock, unless the call cannot get through.
func (s *Store) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	if s.fault != nil {
		defer s.mu.Unlock()
		return s.fault
	}
	return nil
}

// Get implements [store.Store].
func (s *Store) Get(ctx context.Context, key store.Key) (store.Object, error) {
	path := key.Path()
	if path == "" {
		return store.Object{}, fmt.Errorf("get %s: %w: no key", key, store.ErrInvalid)
	}
	if err := s.enter(ctx); err != nil {
		return store.Object{}, fmt.Errorf("get %s: %w", key, err)
	}
	got, ok := s.data[path]
	s.mu.Unlock()
	if !ok {
		return store.Object{}, fmt.Errorf("get %s: %w", key, store.ErrNotFound)
	}
	obj, err := backend.Object(key, got.Revision, got.Raw)
	if err != nil {
		return obj, fmt.Errorf("get %s: %w", key, err)
	}
	return obj, nil
}

// List implements [store.Store].
func (s *Store) List(ctx context.Context, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	prefix := store.PathPrefix(kind, namespace)
	if prefix == "" {
		return nil, 0, fmt.Errorf("list: %w: unknown kind %q", store.ErrInvalid, kind)
	}
	if err := s.enter(ctx); err != nil {
		return nil, 0, fmt.Errorf("list %s: %w", kind, err)
	}
	rev := s.rev
	items := s.items(func(k store.Key, path string) bool {
		return k.Kind == kind && strings.HasPrefix(path, prefix)
	})
	s.mu.Unlock()

	var objs []store.Object
	var bad backend.DecodeErrors
	for _, it := range items {
		obj, err := backend.Object(it.Key, it.Revision, it.Raw)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		objs = append(objs, obj)
	}
	return objs, rev, bad.Err()
}

// items returns what is stored under the paths that want accepts, in their
// order. The lock is held.
func (s *Store) items(want func(store.Key, string) bool) []backend.Item {
	var paths []string
	for path := range s.data {
		if key, ok := store.ParsePath(path); ok && want(key, path) {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	items := make([]backend.Item, len(paths))
	for i, path := range paths {
		key, _ := store.ParsePath(path)
		items[i] = backend.Item{Key: key, Stored: s.data[path]}
	}
	return items
}

// Txn implements [store.Store].
func (s *Store) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	steps, err := backend.Prepare(ops)
	if err != nil {
		return nil, err
	}
	if err := s.enter(ctx); err != nil {
		return nil, fmt.Errorf("transaction: %w", err)
	}
	rev, err := s.apply(steps)
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return backend.Written(steps, rev)
}

// apply does all steps, or none. The lock is held.
func (s *Store) apply(steps []backend.Step) (store.Revision, error) {
	present := make([]backend.Stored, len(steps))
	for i, step := range steps {
		present[i] = s.data[step.Path]
	}
	if err := backend.Conflict(steps, present); err != nil {
		return 0, err
	}
	writes := slices.ContainsFunc(steps, func(st backend.Step) bool {
		return st.Op.Action == store.Put || st.Op.Action == store.Remove && s.data[st.Path].Revision != 0
	})
	if !writes {
		return s.rev, nil // as in etcd, the revision counts changes, not calls
	}
	s.rev++
	for _, st := range steps {
		switch st.Op.Action {
		case store.Put:
			s.write(st.Path, st.Raw)
		case store.Remove:
			if s.data[st.Path].Revision != 0 {
				s.write(st.Path, nil)
			}
		case store.Check:
		}
	}
	s.move()
	return s.rev, nil
}

// Watch implements [store.Store].
func (s *Store) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	ctx, cancel := context.WithCancel(ctx)
	feed := backend.NewFeed(kinds)
	s.mu.Lock()
	select {
	case <-s.closed:
		cancel()
	default:
	}
	s.watches.Go(func() {
		select {
		case <-s.closed:
			cancel()
		case <-ctx.Done():
		}
	})
	s.watches.Go(func() {
		defer close(out)
		defer cancel()
		var reader sync.WaitGroup
		reader.Go(func() { s.read(ctx, feed) })
		feed.Run(ctx, out)
		cancel()
		reader.Wait()
	})
	s.mu.Unlock()
	return out
}

// read hands feed the state, and then what changes, until ctx ends.
func (s *Store) read(ctx context.Context, feed *backend.Feed) {
	var at store.Revision // what feed knows; 0 when it needs the whole state
	down := false
	for {
		s.mu.Lock()
		moved := s.moved
		err := s.fault
		if err == nil {
			err = s.cut
		}
		switch {
		case err != nil:
			at = 0 // a lost connection: read the state again
			if !down {
				feed.Outage(err)
			}
		case at == 0 || at < s.compacted:
			feed.Reset(s.rev, s.items(func(k store.Key, _ string) bool { return feed.Wants(k.Kind) }))
			at = s.rev
		case at < s.rev:
			feed.Change(s.rev, s.since(at, feed))
			at = s.rev
		}
		down = err != nil
		s.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}

// since returns the changes after rev that feed wants. The lock is held.
func (s *Store) since(rev store.Revision, feed *backend.Feed) []store.Event {
	first, _ := slices.BinarySearchFunc(s.log, rev+1, func(c change, r store.Revision) int { return int(c.rev - r) })
	var events []store.Event
	for _, c := range s.log[first:] {
		key, ok := store.ParsePath(c.path)
		switch {
		case !ok || !feed.Wants(key.Kind):
		case c.raw == nil:
			events = append(events, backend.Deletion(key, c.rev))
		default:
			events = append(events, backend.Event(key, c.rev, c.raw))
		}
	}
	return events
}
