package kubesync

import (
	"context"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// PodWatcher tells of the pods of one node.
type PodWatcher interface {
	WatchPods(ctx context.Context, node string) <-chan store.Batch
}

// FollowPods hands what the API says of a node's pods to handle, as steps like those of
// the cluster's copy, until ctx ends, whose error it returns. Each host follows its own pods:
// what an ADD needs of one is there before the runtime asks.
func FollowPods(ctx context.Context, api PodWatcher, node string, handle func(cluster.Step)) error {
	for b := range api.WatchPods(ctx, node) {
		s := cluster.Step{Revision: b.Revision, Source: cluster.Live, Synced: b.Synced, Err: b.Err}
		for _, e := range b.Events {
			s.Changes = append(s.Changes, &cluster.Change{Event: e, Value: e.Object.Value})
		}
		handle(s)
	}
	return ctx.Err()
}
