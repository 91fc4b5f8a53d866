package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store/kube"
)

const (
	// lookAtNetwork is how often the condition of the Node is compared with what is so.
	lookAtNetwork = 2 * time.Second
	// networkPatience is for how long pods cannot be attached here before the Node says
	// so: a daemon that is replaced is back by then.
	networkPatience = 10 * time.Second
	// lookAtPods and podPatience are the same for the daemons of other nodes, which
	// cannot say it any more.
	lookAtPods  = 20 * time.Second
	podPatience = time.Minute
)

// Reasons of the condition NetworkUnavailable.
const (
	reasonUp      = "RouterdIsUp"
	reasonUnready = "RouterdIsNotReady"
	reasonGone    = "RouterdIsGone"
)

// network keeps the condition NetworkUnavailable of Nodes in Kubernetes, and with it
// the taint that keeps pods away.
type network struct {
	store *kube.Store

	mu    sync.Mutex
	names *kube.Names
	nodes map[string]bool
}

// handle takes account of which Nodes there are.
func (n *network) handle(s cluster.Step) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, ev := range s.Changes {
		if n.nodes[ev.Key.Name] = !ev.Deleted(); ev.Deleted() {
			delete(n.nodes, ev.Key.Name)
		}
	}
}

// wantNetwork says whether pods can start here and reach others.
func (d *router) wantNetwork(ctx context.Context) kube.Network {
	err := d.attachReady()
	if r := d.operator.Report(ctx).Ready; err == nil && !r.OK {
		err = errors.New(r.Reason)
	}
	if err != nil {
		return kube.Network{Unavailable: true, Reason: reasonUnready, Message: err.Error()}
	}
	return kube.Network{Reason: reasonUp, Message: "pods can be attached, and reach others"}
}

// keepNetwork keeps the condition of this host's Node, also when another program
// writes it.
func (d *router) keepNetwork(ctx context.Context) error {
	select {
	case <-d.presence.Held():
	case <-ctx.Done():
		return ctx.Err()
	}
	tick := time.NewTicker(lookAtNetwork)
	defer tick.Stop()
	well := time.Now()
	for {
		want := d.wantNetwork(ctx)
		if !want.Unavailable {
			well = time.Now()
		}
		has, ok := d.network.names.Network()
		differs := !ok || has.Unavailable != want.Unavailable || has.Reason != want.Reason || want.Unavailable && has.Message != want.Message
		if differs && (!want.Unavailable || !ok || time.Since(well) > networkPatience) {
			if err := d.network.store.SetNetwork(ctx, d.name, want); err != nil && ctx.Err() == nil {
				d.log.Debug("the condition of the Node is not written; will try again", "error", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watchDaemons says, in the place of daemons of the DaemonSet that are gone, that the
// network of their nodes is unavailable. It is for the one host of the cluster that
// holds the lease. Hosts whose daemon is no pod are left alone.
func (n *network) watchDaemons(ctx context.Context) {
	missing := map[string]time.Time{} // since when
	tick := time.NewTicker(lookAtPods)
	defer tick.Stop()
	for {
		if ready, err := n.store.DaemonPods(ctx); err == nil && len(ready) > 0 {
			n.mu.Lock()
			var gone []string
			for node := range n.nodes {
				if ready[node] {
					delete(missing, node)
				} else if since, ok := missing[node]; !ok {
					missing[node] = time.Now()
				} else if time.Since(since) > podPatience {
					gone = append(gone, node)
				}
			}
			n.mu.Unlock()
			for _, node := range gone {
				n.mark(ctx, node)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// mark says that the network of a node is unavailable, if its daemon said the opposite
// last.
func (n *network) mark(ctx context.Context, node string) {
	has, ok, err := n.store.Network(ctx, node)
	if err != nil || !ok || has.Reason != reasonUp {
		return
	}
	// If it cannot be written, the next look tries again.
	_ = n.store.SetNetwork(ctx, node, kube.Network{Unavailable: true, Reason: reasonGone, Message: "routerd has no pod on this node that is ready"})
}
