package etcd

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store"
)

// joinRoot is where the join tokens of new hosts are, each with a lease.
const joinRoot = "/routerd/v1/joins/"

// AddJoin stores what is known of a join token until ttl is over (whole seconds,
// at least one). The datastore makes nothing of the record.
func (s *Store) AddJoin(ctx context.Context, id string, record []byte, ttl time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	lease, err := s.client.Grant(ctx, max(1, int64(ttl/time.Second)))
	if err == nil {
		_, err = s.client.Put(ctx, joinRoot+id, string(record), clientv3.WithLease(lease.ID))
	}
	if err != nil {
		return fmt.Errorf("store the join token %s: %w", id, s.explain(ctx, err))
	}
	return nil
}

// Join returns the record of a join token and its revision, for
// [Store.ChangeJoin]; nil: there is none, or none any more.
func (s *Store) Join(ctx context.Context, id string) (record []byte, rev int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	resp, err := s.client.Get(ctx, joinRoot+id)
	if err != nil {
		return nil, 0, fmt.Errorf("read the join token %s: %w", id, s.explain(ctx, err))
	}
	if len(resp.Kvs) == 0 {
		return nil, 0, nil
	}
	return resp.Kvs[0].Value, resp.Kvs[0].ModRevision, nil
}

// ChangeJoin replaces the record of a join token that is as it was at a revision,
// and ends it if the new one is nil. The lease stays. [store.ErrConflict]: it is
// another by now, or ended.
func (s *Store) ChangeJoin(ctx context.Context, id string, rev int64, record []byte) error {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	path := joinRoot + id
	op := clientv3.OpDelete(path)
	if record != nil {
		op = clientv3.OpPut(path, string(record), clientv3.WithIgnoreLease())
	}
	resp, err := s.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(path), "=", rev)).Then(op).Commit()
	switch {
	case err != nil:
		err = s.explain(ctx, err)
	case !resp.Succeeded:
		err = store.ErrConflict
	}
	if err != nil {
		return fmt.Errorf("change the join token %s: %w", id, err)
	}
	return nil
}

// Joins follows which join tokens there are, as [Store.Presences] does nodes.
func (s *Store) Joins(ctx context.Context, yield func(ids []string)) {
	s.members(ctx, joinRoot, func(kv *mvccpb.KeyValue) string { return strings.TrimPrefix(string(kv.Key), joinRoot) }, yield)
}
