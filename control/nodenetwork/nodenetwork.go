// Package nodenetwork keeps the condition NetworkUnavailable of Nodes in Kubernetes, and
// with it the taint that keeps pods away: true whenever pods cannot be attached or do not
// reach others, false only then.
package nodenetwork

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store/kube"
)

const (
	// lookEvery is how often the condition of the Node is compared with what is so.
	lookEvery = 2 * time.Second
	// patience is for how long pods cannot be attached here before the Node says so: a
	// daemon that is replaced is back by then.
	patience = 10 * time.Second
	// maxPause is the longest between two attempts to write it, where the API refuses it or
	// is away.
	maxPause = 30 * time.Second
	// lookAtPods and podPatience are the same for the daemons of other nodes, which
	// cannot say it any more.
	lookAtPods  = 20 * time.Second
	podPatience = time.Minute
)

// Reasons of the condition.
const (
	reasonUp      = "RouterdIsUp"
	reasonOnHost  = "RouterdIsUpOnHost" // by a daemon that is no pod, of which no DaemonSet says that it is gone
	reasonUnready = "RouterdIsNotReady"
	reasonGone    = kube.DaemonGone
)

// Ours reports whether a daemon, or another one in its place, wrote what a Node says.
func Ours(n kube.Network) bool {
	switch n.Reason {
	case reasonUp, reasonOnHost, reasonUnready, reasonGone:
		return true
	}
	return false
}

// API is what is asked of Kubernetes. [kube.Store] has it.
type API interface {
	SetNetwork(ctx context.Context, node string, n kube.Network) error
	Network(ctx context.Context, node string) (kube.Network, bool, error)
	// DaemonPods reports, for each node that has a pod of routerd's DaemonSet, whether
	// it is ready.
	DaemonPods(ctx context.Context) (map[string]bool, error)
}

// Own keeps the condition of this host's Node.
type Own struct {
	Node string
	Pod  bool // this is a pod of the DaemonSet, of which [Others] see whether it is there
	API  API
	// Said returns what the Node says, by its watch; false: nothing is known of it.
	Said func() (kube.Network, bool)
	// Obstacle says what keeps pods from being attached or from reaching others.
	Obstacle func(ctx context.Context) error
	Log      *slog.Logger
}

// Run keeps the condition until ctx ends, whose error it returns, also when another
// program writes it.
func (o *Own) Run(ctx context.Context) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	well, pause, notBefore := time.Now(), async.Backoff{Min: lookEvery, Max: maxPause}, time.Time{}
	for {
		want := o.condition(o.Obstacle(ctx))
		if !want.Unavailable {
			well = time.Now()
		}
		said, known := o.Said()
		if due(said, known, want, time.Since(well)) && !time.Now().Before(notBefore) {
			if err := o.API.SetNetwork(ctx, o.Node, want); err == nil {
				pause.Reset()
			} else if ctx.Err() == nil {
				wait := pause.Next()
				notBefore = time.Now().Add(wait)
				o.Log.Debug("the condition of the Node is not written; will try again", "error", err, "retry", wait)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (o *Own) condition(obstacle error) kube.Network {
	if obstacle != nil {
		return kube.Network{Unavailable: true, Reason: reasonUnready, Message: obstacle.Error()}
	}
	up := kube.Network{Reason: reasonUp, Message: "pods can be attached, and reach others"}
	if !o.Pod {
		up.Reason = reasonOnHost
	}
	return up
}

// due reports whether a condition is to be written. What is well is said at once, what is
// not after a while, unless the Node says nothing yet.
func due(said kube.Network, known bool, want kube.Network, ill time.Duration) bool {
	differs := !known || said.Unavailable != want.Unavailable || said.Reason != want.Reason || want.Unavailable && said.Message != want.Message
	return differs && (!want.Unavailable || !known || ill > patience)
}

// Others says, in the place of daemons of the DaemonSet that are gone, that the network
// of their nodes is unavailable. Hosts whose daemon is no pod are left alone.
type Others struct {
	api API

	mu    sync.Mutex
	nodes map[string]bool
}

// NewOthers returns an Others that knows of no nodes.
func NewOthers(api API) *Others { return &Others{api: api, nodes: map[string]bool{}} }

// HandleStore takes account of which Nodes there are.
func (o *Others) HandleStore(s cluster.Step) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ev := range s.Changes {
		if ev.Deleted() {
			delete(o.nodes, ev.Key.Name)
		} else {
			o.nodes[ev.Key.Name] = true
		}
	}
}

// Run watches the daemons until ctx ends. It is for the one host of the cluster that
// holds the lease.
func (o *Others) Run(ctx context.Context) {
	missing := map[string]time.Time{} // since when
	tick := time.NewTicker(lookAtPods)
	defer tick.Stop()
	for {
		if ready, err := o.api.DaemonPods(ctx); err == nil && len(ready) > 0 {
			for _, node := range o.gone(ready, missing) {
				o.mark(ctx, node)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// gone returns the nodes whose daemon has not been ready for a while.
func (o *Others) gone(ready map[string]bool, missing map[string]time.Time) (list []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for node := range o.nodes {
		if ready[node] {
			delete(missing, node)
		} else if since, ok := missing[node]; !ok {
			missing[node] = time.Now()
		} else if time.Since(since) > podPatience {
			list = append(list, node)
		}
	}
	return list
}

// mark says that the network of a node is unavailable, if its daemon said the opposite
// last.
func (o *Others) mark(ctx context.Context, node string) {
	said, known, err := o.api.Network(ctx, node)
	if err != nil || !known || said.Reason != reasonUp {
		return
	}
	// If it cannot be written, the next look tries again.
	_ = o.api.SetNetwork(ctx, node, kube.Network{Unavailable: true, Reason: reasonGone, Message: "routerd has no pod on this node that is ready"})
}
