package etcd

import (
	"context"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"

	"github.com/routerd/routerd/store"
)

// presenceRoot is where nodes say that they are there, each with a lease.
const presenceRoot = "/routerd/v1/presences/"

// nameTimeout bounds one request about a name.
const nameTimeout = 10 * time.Second

// seen is the state of a name on whose condition it is taken.
type seen struct {
	record, holder int64 // mod_revision
	lease          clientv3.LeaseID
}

func seenOf(st store.NameState) seen {
	s, _ := st.Seen.(seen)
	return s
}

// Hold is a name that is held. Make one with [Store.Claim].
type Hold struct {
	s     *Store
	lease clientv3.LeaseID
	lost  chan struct{}
	stop  context.CancelFunc
	done  sync.WaitGroup
}

func namePaths(node string) (presence, record, resource string) {
	return presenceRoot + node, store.IncarnationKey(node).Path(), store.ResourceKey(store.KindNode, node).Path()
}

// Name reads what there is of a node's name.
func (s *Store) Name(ctx context.Context, node string) (store.NameState, error) {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	presence, record, resource := namePaths(node)
	resp, err := s.client.Txn(ctx).Then(clientv3.OpGet(presence), clientv3.OpGet(record), clientv3.OpGet(resource, clientv3.WithKeysOnly())).Commit()
	if err != nil {
		return store.NameState{}, fmt.Errorf("read who holds the name %s: %w", node, s.explain(ctx, err))
	}
	st, saw := store.NameState{Revision: store.Revision(resp.Header.Revision)}, seen{}
	if kvs := resp.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
		// One that cannot be decoded is somebody all the same.
		if st.Holder = decodeIncarnation(node, kvs[0].Value); st.Holder == nil {
			st.Holder = &store.Incarnation{}
		}
		saw.holder, saw.lease = kvs[0].ModRevision, clientv3.LeaseID(kvs[0].Lease)
	}
	if kvs := resp.Responses[1].GetResponseRange().GetKvs(); len(kvs) > 0 {
		st.Record, saw.record = decodeIncarnation(node, kvs[0].Value), kvs[0].ModRevision
	}
	if kvs := resp.Responses[2].GetResponseRange().GetKvs(); len(kvs) > 0 {
		st.NodeCreated = store.Revision(kvs[0].CreateRevision)
	}
	st.Seen = saw
	return st, nil
}

func decodeIncarnation(node string, raw []byte) *store.Incarnation {
	v, err := store.Decode(store.IncarnationKey(node), raw)
	if err != nil {
		return nil
	}
	i, _ := v.(*store.Incarnation)
	return i
}

// Claim takes a name, or renews it, in one transaction: it takes place if the
// name is still in the state seen, and fails with [store.ErrConflict] if not.
// The lease is renewed until [Hold.Release]; ttl is in whole seconds, at least
// one. It does not judge: that is the caller's work.
func (s *Store) Claim(ctx context.Context, node string, state store.NameState, as store.Incarnation, ttl time.Duration) (store.Hold, error) {
	saw := seenOf(state)
	raw, err := store.Encode(store.IncarnationKey(node), &as, nil)
	if err != nil {
		return nil, fmt.Errorf("take the name %s: %w", node, err)
	}
	call, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	lease, err := s.client.Grant(call, max(1, int64(ttl/time.Second)))
	if err != nil {
		return nil, fmt.Errorf("take the name %s: %w", node, s.explain(call, err))
	}
	h := &Hold{s: s, lease: lease.ID, lost: make(chan struct{}), stop: func() {}}
	presence, record, resource := namePaths(node)
	resp, err := s.client.Txn(call).If(
		clientv3.Compare(clientv3.ModRevision(presence), "=", saw.holder),
		clientv3.Compare(clientv3.ModRevision(record), "=", saw.record),
		clientv3.Compare(clientv3.CreateRevision(resource), "=", int64(state.NodeCreated)),
	).Then(
		clientv3.OpPut(presence, string(raw), clientv3.WithLease(lease.ID)),
		clientv3.OpPut(record, string(raw)),
	).Commit()
	switch {
	case err != nil:
		err = s.explain(call, err)
	case !resp.Succeeded:
		err = store.ErrConflict
	}
	if err != nil {
		h.revoke(ctx)
		return nil, fmt.Errorf("take the name %s: %w", node, err)
	}
	if saw.lease != 0 {
		// Nothing hangs on it any more. If this fails, it ends by itself.
		_, _ = s.client.Revoke(call, saw.lease)
	}
	keep, stop := context.WithCancel(s.ctx)
	h.stop = stop
	answers, err := s.client.KeepAlive(keep, lease.ID)
	if err != nil {
		h.Release(ctx)
		return nil, fmt.Errorf("take the name %s: %w", node, s.explain(call, err))
	}
	h.done.Go(func() {
		defer close(h.lost)
		for range answers { // until the lease has ended
		}
	})
	return h, nil
}

// Lost is closed when the lease has ended: etcd could not be reached for as
// long as it lasts, or somebody revoked it.
func (h *Hold) Lost() <-chan struct{} { return h.lost }

// Release says that nobody is there, if etcd can be told at once; else the
// lease's end says it later. The record stays.
func (h *Hold) Release(ctx context.Context) {
	h.stop()
	h.done.Wait()
	h.revoke(ctx)
}

// Forget stops renewing the lease.
func (h *Hold) Forget() {
	h.stop()
	h.done.Wait()
}

func (h *Hold) revoke(ctx context.Context) {
	if h.s.conn.GetState() != connectivity.Ready {
		return
	}
	bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), resignTimeout)
	defer cancel()
	_, _ = h.s.client.Revoke(bye, h.lease)
}

// EndPresence revokes the lease of who held a name in a state, as its end would:
// whoever it is, if he is there still, takes his place again.
func (s *Store) EndPresence(ctx context.Context, state store.NameState) error {
	lease := seenOf(state).lease
	if lease == 0 {
		return nil
	}
	if _, err := s.client.Revoke(ctx, lease); err != nil {
		return fmt.Errorf("end the presence: %w", s.explain(ctx, err))
	}
	return nil
}

// WatchName gives a sign whenever who holds a name may have changed since a
// revision, or whether its Node exists, and when the watch breaks: then read
// anew, and watch from there. It lasts until ctx ends.
func (s *Store) WatchName(ctx context.Context, node string, since store.Revision) <-chan struct{} {
	out := make(chan struct{}, 1)
	sign := func() {
		select {
		case out <- struct{}{}:
		default:
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return out
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.ctx, func() { cancel(context.Canceled) })
	presence, record, resource := namePaths(node)
	var followers sync.WaitGroup
	for _, path := range []string{presence, record, resource} {
		followers.Go(func() {
			changes := s.client.Watch(clientv3.WithRequireLeader(ctx), path, clientv3.WithRev(int64(since)+1))
			for resp := range changes {
				for _, e := range resp.Events {
					// A Node is written often: what counts is whether it is the same.
					if path != resource || !e.IsModify() {
						sign()
					}
				}
				if resp.Err() != nil {
					break
				}
			}
			sign()
		})
	}
	followers.Go(func() { s.guard(ctx, cancel) })
	in := s.history.begin()
	followers.Go(func() {
		select {
		case <-in.ended:
			cancel(errRestored)
		case <-ctx.Done():
		}
	})
	s.watches.Go(func() {
		defer stop()
		followers.Wait()
		cancel(nil)
	})
	return out
}

// Rest waits before another try of what etcd could not serve: longer after each
// failure, and not longer than until the connection is up again.
func (s *Store) Rest(ctx context.Context, failures int) { s.rest(ctx, failures) }
