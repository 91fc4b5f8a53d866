// Package clustertest feeds parts of the daemon in tests with what a datastore
// says, with one or without.
package clustertest

import (
	"context"
	"log/slog"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Step is a batch of the datastore as a part of a host gets it that follows some
// kinds; none named: all.
func Step(node string, b store.Batch, kinds ...store.Kind) cluster.Step {
	s := cluster.Step{Revision: b.Revision, Synced: b.Synced, OwnOnly: b.OwnOnly, Err: b.Err}
	for _, ev := range b.Events {
		if len(kinds) > 0 && !slices.Contains(kinds, ev.Key.Kind) {
			continue
		}
		s.Changes = append(s.Changes, cluster.Decode(node, ev))
	}
	return s
}

// Follow returns a follower of a host's copy of what s holds, and a channel that is
// closed when the copy is not kept any more: after ctx ended.
func Follow(ctx context.Context, node string, s store.Store, kinds ...store.Kind) (*cluster.Follower, <-chan struct{}) {
	return FollowOn(ctx, "", node, s, kinds...)
}

// FollowOn is [Follow] of a copy that is kept in a file, and begins with what that
// has.
func FollowOn(ctx context.Context, file, node string, s store.Store, kinds ...store.Kind) (*cluster.Follower, <-chan struct{}) {
	c := cluster.New(cluster.Config{Store: s, Node: node, Log: slog.New(slog.DiscardHandler), File: file})
	f := c.Follow(kinds...)
	c.Load(f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Run(ctx)
		_ = c.Close()
	}()
	return f, done
}

// Says is a datastore of which there is nothing but what it says: the batches.
func Says(batches <-chan store.Batch) store.Store { return says{batches: batches} }

type says struct {
	store.Store
	batches <-chan store.Batch
}

// Watch implements [store.Store].
func (s says) Watch(ctx context.Context, _ ...store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	go func() {
		defer close(out)
		for {
			select {
			case b, ok := <-s.batches:
				if !ok {
					return
				}
				select {
				case out <- b:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}
