package etcd

import (
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

// smallPage is how many objects a page of [Store.Pages] has: of blocks about
// half a megabyte, and ten times that when decoded.
const smallPage = 250

var _ store.Pager = (*Store)(nil)

// Pages implements [store.Pager].
func (s *Store) Pages(ctx context.Context, kind store.Kind, namespace string, page func([]store.Object) error) error {
	from := store.PathPrefix(kind, namespace)
	if from == "" {
		return fmt.Errorf("read: %w: unknown kind %q", store.ErrInvalid, kind)
	}
	end := clientv3.GetPrefixRangeEnd(from)
	for {
		var resp *clientv3.GetResponse
		in, err := s.again(ctx, func(life) (_ *etcdserverpb.ResponseHeader, err error) {
			if resp, err = s.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(smallPage)); err != nil {
				return nil, err
			}
			return resp.Header, nil
		})
		if err != nil {
			return fmt.Errorf("read %s: %w", kind, s.explain(ctx, err))
		}
		objs := make([]store.Object, 0, len(resp.Kvs))
		for _, kv := range resp.Kvs {
			key, ok := store.ParsePath(string(kv.Key))
			if !ok || key.Kind != kind {
				continue
			}
			// What cannot be decoded comes without its value.
			obj, _ := backend.Object(key, in.revision(kv.ModRevision), kv.Value)
			obj.Key = key
			objs = append(objs, obj)
		}
		if err := page(objs); err != nil {
			return err
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}
