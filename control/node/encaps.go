package node

import (
	"context"
	"fmt"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Pauses between tries to publish.
const (
	publishMin = 50 * time.Millisecond
	publishMax = 10 * time.Second
)

// PublishEncaps writes what this host publishes of its encapsulations into
// its Node resource, and returns the resource's revision then. It tries until it
// succeeds or ctx ends: while the datastore is away, and while the resource is
// missing, until the host is registered.
func (a *Agent) PublishEncaps(ctx context.Context, f store.NodeEncaps) (store.Revision, error) {
	var rev store.Revision
	logged := false
	err := async.Retry(ctx, async.Backoff{Min: publishMin, Max: publishMax}, func(ctx context.Context) (err error) {
		rev, err = a.tryPublish(ctx, "encapsulations", func(n *store.Node) { store.SetNodeEncaps(n, f) })
		if err != nil && !logged && ctx.Err() == nil {
			logged = true
			a.cfg.Log.Info("the encapsulations of this host are not published yet; will try again", "error", err)
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("publish the encapsulations of this host: %w", context.Cause(ctx))
	}
	return rev, nil
}

// tryPublish writes to this host's Node resource what set does. It tries once.
func (a *Agent) tryPublish(ctx context.Context, what string, set func(*store.Node)) (store.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	obj, err := store.Modify(ctx, a.cfg.Store, store.ResourceKey(store.KindNode, a.cfg.Name), func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("publish the %s of node %s: %w", what, a.cfg.Name, store.ErrNotFound)
		}
		n := store.Clone(cur.Value).(*store.Node)
		set(n)
		return n, nil
	})
	return obj.Revision, err
}

// PublishReflection writes what this host says about route reflectors to its Node resource. It tries once.
func (a *Agent) PublishReflection(ctx context.Context, r store.NodeReflection) error {
	_, err := a.tryPublish(ctx, "reflectors", func(n *store.Node) { store.SetNodeReflection(n, r) })
	return err
}

// travels reports whether packets may still travel through a tunnel by what
// this host publishes, though no pool asks for the tunnel any more: peers reach
// it by its address until they have changed to what the pools ask for.
func (t Tunnel) travels(f store.NodeEncaps) bool {
	driver := dataplane.DriverVXLAN
	if t == TunnelIPIP || t == TunnelIPIPv6 {
		driver = dataplane.DriverIPIP
	}
	for _, list := range [][]string{f.Accepts, f.Uses} {
		for _, s := range list {
			if e, err := dataplane.ParseEncap(s); err == nil && e.Driver == driver {
				return true
			}
		}
	}
	return false
}
