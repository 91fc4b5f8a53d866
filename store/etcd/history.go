package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store"
)

// historyCheck is how often a watch asks whether the datastore is still the one that
// it follows. A connection to etcd itself ends when a snapshot is restored; one to
// etcd's grpc-proxy stays.
const historyCheck = 30 * time.Second

// errRestored says that the datastore's revisions are not those of before.
var errRestored = errors.New("the datastore was restored from a snapshot, or is another one")

// history tells the lives of the datastore apart. One that is restored from a snapshot
// counts its revisions from there again, so that a revision may come twice, with
// other content. Callers never see that: their revisions go on, each life's above all
// of the life before. So what was read before is older than everything, and no
// condition on it holds.
type history struct {
	log *slog.Logger

	mu  sync.Mutex
	now life
}

// life is what is known of one life of the datastore.
type life struct {
	number  int            // from 0
	base    store.Revision // what is added to etcd's revisions
	seen    int64          // the highest of etcd's revisions that was seen
	cluster uint64         // etcd's id of the cluster; 0: not known yet
	ended   chan struct{}  // closed when another has begun
}

func newHistory(log *slog.Logger) *history {
	return &history{log: log, now: life{ended: make(chan struct{})}}
}

// begin returns the life in which a request is made, before it is.
func (h *history) begin() life {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

// judge looks at the answer to a request that was begun in a life, and that etcd
// serves as of that time or later. It fails with errRestored where the answer is, or
// may be, of another life.
func (h *history) judge(in life, header *etcdserverpb.ResponseHeader) error {
	if header == nil {
		return nil
	}
	switch {
	case in.cluster != 0 && header.ClusterId != 0 && header.ClusterId != in.cluster:
		h.end(in, fmt.Sprintf("its cluster id was %x and is %x", in.cluster, header.ClusterId))
		return errRestored
	case header.Revision < in.seen:
		h.end(in, fmt.Sprintf("it was at revision %d and is at %d", in.seen, header.Revision))
		return errRestored
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.now.number != in.number {
		return errRestored
	}
	h.now.seen = max(h.now.seen, header.Revision)
	if h.now.cluster == 0 {
		h.now.cluster = header.ClusterId
	}
	return nil
}

// saw takes note of a revision of a life.
func (h *history) saw(in life, rev int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.now.number == in.number {
		h.now.seen = max(h.now.seen, rev)
	}
}

// end ends a life, if it has not ended yet.
func (h *history) end(in life, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.now.number != in.number {
		return
	}
	h.log.Warn("the datastore was restored from a snapshot, or is another one; everything is read anew", "reason", why)
	close(h.now.ended)
	h.now = life{number: in.number + 1, base: h.now.base + store.Revision(h.now.seen), ended: make(chan struct{})}
}

// revision returns a revision of etcd as callers know it.
func (l life) revision(rev int64) store.Revision { return l.base + store.Revision(rev) }

// condition returns that a key was last written at a revision that a caller knows.
// Where that is of a life that has ended it never holds.
func (l life) condition(path string, rev store.Revision) clientv3.Cmp {
	etcds := int64(rev - l.base)
	if etcds <= 0 {
		etcds = -1
	}
	return clientv3.Compare(clientv3.ModRevision(path), "=", etcds)
}

// again reads until the answer is of the life in which it was asked for.
func (s *Store) again(ctx context.Context, read func(life) (*etcdserverpb.ResponseHeader, error)) (life, error) {
	for {
		in := s.history.begin()
		header, err := read(in)
		if err != nil {
			return in, err
		}
		if s.history.judge(in, header) == nil || ctx.Err() != nil {
			return in, ctx.Err()
		}
	}
}

// checkHistory asks now and then whether the datastore is in the same life, until ctx
// ends or it is not, which it then says.
func (s *Store) checkHistory(ctx context.Context, in life, lost context.CancelCauseFunc) {
	for {
		timer := time.NewTimer(s.historyCheck/2 + rand.N(s.historyCheck))
		select {
		case <-timer.C:
		case <-in.ended:
			timer.Stop()
			lost(errRestored)
			return
		case <-ctx.Done():
			timer.Stop()
			return
		}
		now := s.history.begin()
		call, cancel := context.WithTimeout(ctx, s.pageTimeout)
		resp, err := s.client.Get(call, store.IPAMConfigKey().Path(), clientv3.WithKeysOnly())
		cancel()
		if err == nil { // an outage is seen without it
			_ = s.history.judge(now, resp.Header) // which ends the life
		}
	}
}
