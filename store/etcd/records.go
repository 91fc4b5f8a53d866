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

// Roots of the records.
const (
	joinRoot    = "/routerd/v1/joins/"
	renewalRoot = "/routerd/v1/renewals/"
	orderRoot   = "/routerd/v1/memberships/"
)

// Records are those of one purpose, each with an id and a lease. The datastore makes
// nothing of what is in them.
type Records struct {
	s          *Store
	root, what string
}

// Joins are what is known of the join tokens of new hosts.
func (s *Store) Joins() Records { return Records{s, joinRoot, "join token"} }

// Renewals are what hosts ask that want another certificate, with the answers.
func (s *Store) Renewals() Records { return Records{s, renewalRoot, "certificate request"} }

// Orders are what hosts are to be: members of the datastore's cluster, or clients.
func (s *Store) Orders() Records { return Records{s, orderRoot, "order to"} }

// Add stores a record, in place of one with the same id, until ttl is over (whole
// seconds, at least one).
func (r Records) Add(ctx context.Context, id string, record []byte, ttl time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	lease, err := r.s.client.Grant(ctx, max(1, int64(ttl/time.Second)))
	if err == nil {
		_, err = r.s.client.Put(ctx, r.root+id, string(record), clientv3.WithLease(lease.ID))
	}
	if err != nil {
		return fmt.Errorf("store the %s %s: %w", r.what, id, r.s.explain(ctx, err))
	}
	return nil
}

// Read returns a record and its revision, for [Records.Change]; nil: there is none,
// or none any more.
func (r Records) Read(ctx context.Context, id string) (record []byte, rev int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	resp, err := r.s.client.Get(ctx, r.root+id)
	if err != nil {
		return nil, 0, fmt.Errorf("read the %s %s: %w", r.what, id, r.s.explain(ctx, err))
	}
	if len(resp.Kvs) == 0 {
		return nil, 0, nil
	}
	return resp.Kvs[0].Value, resp.Kvs[0].ModRevision, nil
}

// Change replaces a record that is as it was at a revision, and ends it if the new
// one is nil. The lease stays. [store.ErrConflict]: it is another by now, or ended.
func (r Records) Change(ctx context.Context, id string, rev int64, record []byte) error {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	path := r.root + id
	op := clientv3.OpDelete(path)
	if record != nil {
		op = clientv3.OpPut(path, string(record), clientv3.WithIgnoreLease())
	}
	resp, err := r.s.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(path), "=", rev)).Then(op).Commit()
	switch {
	case err != nil:
		err = r.s.explain(ctx, err)
	case !resp.Succeeded:
		err = store.ErrConflict
	}
	if err != nil {
		return fmt.Errorf("change the %s %s: %w", r.what, id, err)
	}
	return nil
}

// Follow tells the ids of the records and the revision at which each was written,
// as [Store.Presences] does nodes, and whenever one is written anew.
func (r Records) Follow(ctx context.Context, yield func(revisions map[string]int64)) {
	r.s.members(ctx, r.root, func(kvs []*mvccpb.KeyValue) {
		revisions := make(map[string]int64, len(kvs))
		for _, kv := range kvs {
			revisions[strings.TrimPrefix(string(kv.Key), r.root)] = kv.ModRevision
		}
		yield(revisions)
	})
}
