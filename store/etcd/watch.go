package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

const (
	retryMin = 100 * time.Millisecond
	retryMax = 5 * time.Second
)

var (
	errDisconnected = errors.New("the connection was lost")
	errCompacted    = errors.New("the history was compacted")
)

// Watch implements [store.Store]. All kinds share one watch of etcd, so that
// the changes of one transaction arrive together. A kind of routerd's own is told
// of only by a watch of that kind alone.
func (s *Store) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		close(out)
		return out
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	feed := backend.NewFeed(kinds)
	s.watches.Go(func() {
		defer close(out)
		defer stop()
		var reader sync.WaitGroup
		reader.Go(func() { s.read(ctx, feed, kinds) })
		feed.Run(ctx, out)
		cancel()
		reader.Wait()
	})
	return out
}

// read feeds the state and its changes until ctx ends.
func (s *Store) read(ctx context.Context, feed *backend.Feed, kinds []store.Kind) {
	down := false
	for failures := 0; ctx.Err() == nil; {
		synced, err := s.follow(ctx, feed, kinds, func() {
			if down {
				s.log.Info("datastore is back", "endpoints", s.where)
			}
			down = false
		})
		if ctx.Err() != nil {
			return
		}
		if synced {
			failures = 0
			s.log.Debug("datastore watch begins anew", "endpoints", s.where, "reason", err)
			if errors.Is(err, errCompacted) || errors.Is(err, errDisconnected) || errors.Is(err, errRestored) {
				continue // reading the state tells whether there is an outage
			}
		} else if !down {
			down = true
			s.log.Warn("datastore unavailable", "endpoints", s.where, "error", err)
			feed.Outage(err)
		}
		s.rest(ctx, failures)
		failures++
	}
}

// follow reads the state, feeds it, and then each change, until the watch
// breaks. It says whether it got as far as feeding the state; it calls back
// then, too.
func (s *Store) follow(ctx context.Context, feed *backend.Feed, kinds []store.Kind, onSync func()) (synced bool, err error) {
	rev, in, err := s.snapshot(ctx, feed, kinds)
	if err != nil {
		return false, err
	}
	onSync()

	ctx, lost := context.WithCancelCause(ctx)
	var guard sync.WaitGroup
	guard.Go(func() { s.guard(ctx, lost) })
	guard.Go(func() { s.checkHistory(ctx, in, lost) })
	defer guard.Wait()
	defer lost(nil)

	changes := s.client.Watch(clientv3.WithRequireLeader(ctx), watched(kinds), clientv3.WithPrefix(),
		clientv3.WithRev(rev+1), clientv3.WithProgressNotify())
	for resp := range changes {
		if resp.CompactRevision != 0 {
			return true, errCompacted
		}
		if err := resp.Err(); err != nil {
			return true, err
		}
		if resp.IsProgressNotify() {
			s.history.saw(in, resp.Header.Revision)
			feed.Progress(in.revision(resp.Header.Revision))
			continue
		}
		if n := len(resp.Events); n > 0 {
			last := resp.Events[n-1].Kv.ModRevision
			s.history.saw(in, last)
			feed.Change(in.revision(last), wanted(feed, in, resp.Events))
		}
	}
	if err := context.Cause(ctx); err != nil {
		return true, err
	}
	return true, errDisconnected
}

// watched returns the prefix under which the changes of the kinds are: all that Calico's programs know, but of one kind
// of routerd's own only what that has, which is all that a host's role lets it read (configs/etcd/roles.sh).
func watched(kinds []store.Kind) string {
	if len(kinds) == 1 {
		if own := store.PathPrefix(kinds[0], ""); strings.HasPrefix(own, store.OwnRootPath) {
			return own
		}
	}
	return store.RootPath
}

// snapshot reads the state of the kinds and feeds it. It returns etcd's revision of
// it, and in which life of the datastore it is.
func (s *Store) snapshot(ctx context.Context, feed *backend.Feed, kinds []store.Kind) (int64, life, error) {
	var prefixes []string
	for _, k := range kinds {
		if p := store.PathPrefix(k, ""); p != "" && !slices.Contains(prefixes, p) {
			prefixes = append(prefixes, p)
		}
	}
	if len(prefixes) == 0 {
		// A watch of nothing still follows the revision; this is the least to
		// ask for it.
		prefixes = []string{store.PathPrefix(store.KindIPAMConfig, "")}
	}
	for {
		kvs, rev, in, err := s.readPrefixes(ctx, prefixes...)
		if err != nil {
			return 0, in, fmt.Errorf("watch: %w", s.explain(ctx, err))
		}
		items := make([]backend.Item, 0, len(kvs))
		for _, kv := range kvs {
			key, ok := store.ParsePath(string(kv.Key))
			if ok && feed.Wants(key.Kind) {
				items = append(items, backend.Item{Key: key, Stored: backend.Stored{Revision: in.revision(kv.ModRevision), Raw: kv.Value}})
			}
		}
		// A restored datastore may have come as far as the old one was: its revisions
		// do not show it then, what is stored at them does.
		if why := feed.Contradiction(items); why != "" {
			s.history.end(in, why)
			continue
		}
		feed.Reset(in.revision(rev), items)
		return rev, in, nil
	}
}

// wanted decodes those events that the feed wants.
func wanted(feed *backend.Feed, in life, changes []*clientv3.Event) []store.Event {
	var events []store.Event
	for _, e := range changes {
		key, ok := store.ParsePath(string(e.Kv.Key))
		if !ok || !feed.Wants(key.Kind) {
			continue
		}
		rev := in.revision(e.Kv.ModRevision)
		if e.Type == clientv3.EventTypeDelete {
			events = append(events, backend.Deletion(key, rev))
		} else {
			events = append(events, backend.Event(key, rev, e.Kv.Value))
		}
	}
	return events
}

// guard ends a watch when the connection as a whole is lost. The etcd client
// would go on waiting in silence, and its watch on a store that came back
// empty would never fire. While another endpoint is up the connection stays
// ready, and the client moves the watch there by itself.
func (s *Store) guard(ctx context.Context, lost context.CancelCauseFunc) {
	for {
		state := s.conn.GetState()
		if state != connectivity.Ready {
			lost(errDisconnected)
			return
		}
		if !s.conn.WaitForStateChange(ctx, state) {
			return
		}
	}
}

// rest waits before another try: longer after each failure, at random so that
// the hosts of a cluster do not come back all at once, and not longer than
// until the connection is up again.
func (s *Store) rest(ctx context.Context, failures int) {
	limit := retryMax
	if failures < 10 {
		limit = min(limit, retryMin<<failures)
	}
	ctx, cancel := context.WithTimeout(ctx, limit/2+rand.N(limit/2))
	defer cancel()
	if s.conn.GetState() == connectivity.Ready {
		<-ctx.Done()
		return
	}
	for state := s.conn.GetState(); state != connectivity.Ready; state = s.conn.GetState() {
		if state == connectivity.Idle {
			s.conn.Connect()
		}
		if !s.conn.WaitForStateChange(ctx, state) {
			return
		}
	}
}
