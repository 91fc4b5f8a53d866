package etcd

import (
	"cmp"
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
	errGranted      = errors.New("what might not be read may be now")
)

// Watch implements [store.Store]. What Calico's programs know is below one prefix, which one
// watch of etcd follows, so that the changes of one transaction arrive together. Each kind of
// routerd's own has a prefix beside it and a watch of its own, on the same stream to etcd.
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
	r := newReader(s, kinds)
	s.watches.Go(func() {
		defer close(out)
		defer stop()
		var reading sync.WaitGroup
		reading.Go(func() { r.read(ctx) })
		r.feed.Run(ctx, out)
		cancel()
		reading.Wait()
	})
	return out
}

// reader follows some kinds for one watch.
type reader struct {
	*Store
	feed *backend.Feed

	prefixes []string     // of what one watch of etcd follows, whose progress is that of the whole
	below    string       // that watch's own
	beside   []store.Kind // those of routerd's own, each with a watch of etcd

	known  map[store.Kind]bool // of beside: all was told once
	denied []store.Kind        // of beside: this user may not read them
}

// newReader sorts the kinds by the watches that follow them. A host's role lets it read
// what Calico's programs know as a whole, and of the rest single kinds (configs/etcd/roles.sh).
func newReader(s *Store, kinds []store.Kind) *reader {
	r := &reader{Store: s, feed: backend.NewFeed(kinds), below: store.RootPath, known: make(map[store.Kind]bool)}
	for _, k := range kinds {
		switch p := store.PathPrefix(k, ""); {
		case p == "":
		case !strings.HasPrefix(p, store.OwnRootPath):
			if !slices.Contains(r.prefixes, p) {
				r.prefixes = append(r.prefixes, p)
			}
		case !slices.Contains(r.beside, k):
			r.beside = append(r.beside, k)
		}
	}
	switch {
	case len(r.prefixes) > 0:
	case len(r.beside) > 0:
		r.below = store.PathPrefix(r.beside[0], "")
		r.prefixes, r.beside = []string{r.below}, r.beside[1:]
	default:
		// A watch of nothing still follows the revision; this is the least to
		// ask for it.
		r.prefixes = []string{store.PathPrefix(store.KindIPAMConfig, "")}
	}
	return r
}

// read feeds the state and its changes until ctx ends.
func (r *reader) read(ctx context.Context) {
	down := false
	for failures := 0; ctx.Err() == nil; {
		synced, err := r.follow(ctx, func() {
			if down {
				r.log.Info("datastore is back", "endpoints", r.where)
			}
			down = false
		})
		if ctx.Err() != nil {
			return
		}
		if synced {
			failures = 0
			r.log.Debug("datastore watch begins anew", "endpoints", r.where, "reason", err)
			if errors.Is(err, errCompacted) || errors.Is(err, errDisconnected) || errors.Is(err, errRestored) || errors.Is(err, errGranted) {
				continue // reading the state tells whether there is an outage
			}
		} else if !down {
			down = true
			r.log.Warn("datastore unavailable", "endpoints", r.where, "error", err)
			r.feed.Outage(err)
		}
		r.rest(ctx, failures)
		failures++
	}
}

// follow reads the state, feeds it, and then each change, until one of the watches
// breaks. It says whether it got as far as feeding the state; it calls back
// then, too.
func (r *reader) follow(ctx context.Context, onSync func()) (synced bool, err error) {
	rev, in, err := r.snapshot(ctx)
	if err != nil {
		return false, err
	}
	onSync()

	ctx, lost := context.WithCancelCause(ctx)
	var others sync.WaitGroup
	defer others.Wait()
	defer lost(nil)
	others.Go(func() { r.guard(ctx, lost) })
	others.Go(func() { r.checkHistory(ctx, in, lost) })
	for _, k := range r.beside {
		if slices.Contains(r.denied, k) {
			continue
		}
		others.Go(func() {
			lost(r.changes(ctx, store.PathPrefix(k, ""), rev, in, func(_ int64, events []*clientv3.Event) {
				r.feed.Beside(wanted(r.feed, in, events))
			}))
		})
	}
	if len(r.denied) > 0 {
		others.Go(func() { r.awaitRights(ctx, lost) })
	}
	return true, r.changes(ctx, r.below, rev, in, func(at int64, events []*clientv3.Event) {
		if len(events) == 0 {
			r.feed.Progress(in.revision(at))
			return
		}
		r.feed.Change(in.revision(at), wanted(r.feed, in, events))
	})
}

// changes hands on what changes below a prefix after a revision, and up to which revision that
// is, until the watch breaks. A notice of progress has no changes.
func (s *Store) changes(ctx context.Context, prefix string, rev int64, in life, hand func(at int64, events []*clientv3.Event)) error {
	for resp := range s.client.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(rev+1), clientv3.WithProgressNotify()) {
		if resp.CompactRevision != 0 {
			return errCompacted
		}
		if err := resp.Err(); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		at := resp.Header.Revision
		if n := len(resp.Events); n > 0 {
			at = resp.Events[n-1].Kv.ModRevision
		} else if !resp.IsProgressNotify() {
			continue
		}
		s.history.saw(in, at)
		hand(at, resp.Events)
	}
	return cmp.Or(context.Cause(ctx), errDisconnected)
}

// snapshot reads the state of the kinds and feeds it. It returns etcd's revision of
// it, and in which life of the datastore it is.
func (r *reader) snapshot(ctx context.Context) (int64, life, error) {
	beside := make([]string, 0, len(r.beside))
	for _, k := range r.beside {
		beside = append(beside, store.PathPrefix(k, ""))
	}
	for {
		st, err := r.readPrefixes(ctx, r.prefixes, beside)
		if err != nil {
			return 0, st.in, fmt.Errorf("watch: %w", r.explain(ctx, err))
		}
		items := make([]backend.Item, 0, len(st.kvs))
		for _, kv := range st.kvs {
			key, ok := store.ParsePath(string(kv.Key))
			if ok && r.feed.Wants(key.Kind) {
				items = append(items, backend.Item{Key: key, Stored: backend.Stored{Revision: st.in.revision(kv.ModRevision), Raw: kv.Value}})
			}
		}
		// A restored datastore may have come as far as the old one was: its revisions
		// do not show it then, what is stored at them does.
		if why := r.feed.Contradiction(items); why != "" {
			r.history.end(st.in, why)
			continue
		}
		r.feed.ResetBut(st.in.revision(st.rev), items, r.withhold(st.denied))
		return st.rev, st.in, nil
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
