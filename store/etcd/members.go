package etcd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/control/async"
)

// Presences follows which nodes hold their names (package presence), and calls yield with all of them, sorted, at first and
// whenever one comes or goes, until ctx ends. While the datastore is away it says nothing: what was said last is what is known.
func (s *Store) Presences(ctx context.Context, yield func(nodes []string)) {
	s.members(ctx, presenceRoot, func(kvs []*mvccpb.KeyValue) {
		list := names(kvs, func(kv *mvccpb.KeyValue) string { return strings.TrimPrefix(string(kv.Key), presenceRoot) })
		slices.Sort(list)
		yield(list)
	})
}

// Leaders follows who holds or waits for a lease whose name begins with prefix, as [Store.Lead] has it: by their ids, who has
// stood for the longest first. It calls yield as [Store.Presences] does.
func (s *Store) Leaders(ctx context.Context, prefix string, yield func(ids []string)) {
	s.members(ctx, electionRoot+prefix, func(kvs []*mvccpb.KeyValue) {
		yield(names(kvs, func(kv *mvccpb.KeyValue) string { return string(kv.Value) }))
	})
}

// names lists what name makes of each, every one once.
func names(kvs []*mvccpb.KeyValue, name func(*mvccpb.KeyValue) string) []string {
	var out []string
	for _, kv := range kvs {
		if n := name(kv); !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// members follows the keys below a prefix, in the order of their creation.
func (s *Store) members(ctx context.Context, prefix string, yield func([]*mvccpb.KeyValue)) {
	pause := async.Backoff{Min: time.Second, Max: 30 * time.Second, Jitter: 0.5}
	for ctx.Err() == nil {
		if err := s.followMembers(ctx, prefix, func(kvs []*mvccpb.KeyValue) { pause.Reset(); yield(kvs) }); ctx.Err() == nil {
			s.log.Debug("who is there is not followed; will try again", "prefix", prefix, "error", err)
		}
		_ = pause.Wait(ctx) // the loop looks at ctx
	}
}

func (s *Store) followMembers(ctx context.Context, prefix string, yield func([]*mvccpb.KeyValue)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, done := context.WithTimeout(ctx, nameTimeout)
	defer done()
	resp, err := s.client.Get(call, prefix, clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("read %s: %w", prefix, s.explain(call, err))
	}
	there := map[string]*mvccpb.KeyValue{}
	for _, kv := range resp.Kvs {
		there[string(kv.Key)] = kv
	}
	tell := func() {
		kvs := make([]*mvccpb.KeyValue, 0, len(there))
		for _, kv := range there {
			kvs = append(kvs, kv)
		}
		slices.SortFunc(kvs, func(a, b *mvccpb.KeyValue) int { return cmp.Compare(a.CreateRevision, b.CreateRevision) })
		yield(kvs)
	}
	tell()
	for changes := range s.client.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(resp.Header.Revision+1)) {
		if err := changes.Err(); err != nil {
			return fmt.Errorf("follow %s: %w", prefix, s.explain(ctx, err))
		}
		for _, e := range changes.Events {
			if e.Type == clientv3.EventTypeDelete {
				delete(there, string(e.Kv.Key))
				continue
			}
			there[string(e.Kv.Key)] = e.Kv
		}
		if len(changes.Events) > 0 {
			tell()
		}
	}
	return errDisconnected
}
