package node

import (
	"context"
	"fmt"
	"time"

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
	told := false
	for pause := publishMin; ; pause = min(2*pause, publishMax) {
		rev, err := a.tryPublish(ctx, f)
		if err == nil {
			return rev, nil
		}
		if !told && ctx.Err() == nil {
			told = true
			a.cfg.Log.Info("what this host takes in is not published yet; will try again", "error", err)
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("publish what this host takes in: %w", context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

func (a *Agent) tryPublish(ctx context.Context, f store.NodeEncaps) (store.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	obj, err := store.Modify(ctx, a.cfg.Store, store.ResourceKey(store.KindNode, a.cfg.Name), func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("publish the forms of node %s: %w", a.cfg.Name, store.ErrNotFound)
		}
		n := store.Clone(cur.Value).(*store.Node)
		store.SetNodeEncaps(n, f)
		return n, nil
	})
	return obj.Revision, err
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
			if form, err := dataplane.ParseEncap(s); err == nil && form.Driver == driver {
				return true
			}
		}
	}
	return false
}
