package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Kinds lists what [Reporter.HandleStore] wants to know.
func Kinds() []store.Kind { return []store.Kind{store.KindCalicoNodeStatus} }

const (
	// minPeriod bounds how often one request is answered.
	minPeriod = time.Second
	// answerWithin bounds one answer, the write included.
	answerWithin = 30 * time.Second
)

// Host is what is asked of this host.
type Host interface {
	Node(ctx context.Context) (*apiv1.NodeResponse, error)
	Routes(ctx context.Context, filter netip.Prefix, all bool) (*apiv1.RoutesResponse, error)
}

// Reporter answers the requests that name one node. Its methods are safe for
// concurrent use.
type Reporter struct {
	node  string
	store store.Store
	host  Host
	log   *slog.Logger

	changed async.Signal

	mu       sync.Mutex
	requests map[store.Key]*request
}

// request is a CalicoNodeStatus that names this host.
type request struct {
	period  time.Duration // 0: never
	classes []v3.NodeStatusClassType
	next    time.Time
}

// New returns a Reporter for the node of that name.
func New(node string, s store.Store, h Host, log *slog.Logger) *Reporter {
	return &Reporter{node: node, store: s, host: h, log: log, changed: async.NewSignal(), requests: map[store.Key]*request{}}
}

// HandleStore applies a step of the cluster's copy. It does not block.
func (r *Reporter) HandleStore(step cluster.Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, ev := range step.Changes {
		if ev.Err != nil {
			continue // what was known stays
		}
		o, ok := ev.Object.Value.(*v3.CalicoNodeStatus)
		if !ok || o.Spec.Node != r.node || o.Spec.UpdatePeriodSeconds == nil {
			delete(r.requests, ev.Key)
			continue
		}
		period := time.Duration(min(*o.Spec.UpdatePeriodSeconds, store.MaxStatusPeriod)) * time.Second
		if old := r.requests[ev.Key]; old != nil && old.period == period && slices.Equal(old.classes, o.Spec.Classes) {
			continue // our own answer, or nothing that matters here
		}
		r.requests[ev.Key] = &request{period: period, classes: o.Spec.Classes}
	}
	r.changed.Set()
}

// Run answers until ctx ends: a request at once, and then at its period.
func (r *Reporter) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		case <-r.changed:
		}
		for _, key := range r.due(time.Now()) {
			if err := r.answer(ctx, key); err != nil && ctx.Err() == nil {
				r.log.Warn("cannot report this host's status", "resource", key.String(), "error", err)
			}
		}
		timer.Reset(r.wait(time.Now()))
	}
}

// due returns the requests that are to be answered now, and sets their next time.
func (r *Reporter) due(now time.Time) []store.Key {
	r.mu.Lock()
	defer r.mu.Unlock()
	var keys []store.Key
	for key, q := range r.requests {
		if q.period > 0 && !q.next.After(now) {
			q.next = now.Add(max(q.period, minPeriod))
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b store.Key) int { return strings.Compare(a.Name, b.Name) })
	return keys
}

// wait returns how long nothing is to be done.
func (r *Reporter) wait(now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := now.Add(time.Hour)
	for _, q := range r.requests {
		if q.period > 0 && q.next.Before(next) {
			next = q.next
		}
	}
	return next.Sub(now)
}

func (r *Reporter) answer(ctx context.Context, key store.Key) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	node, err := r.host.Node(ctx)
	if err != nil {
		return fmt.Errorf("ask this host: %w", err)
	}
	routes, err := r.host.Routes(ctx, netip.Prefix{}, false)
	if err != nil {
		return fmt.Errorf("ask for this host's routes: %w", err)
	}
	now := time.Now()
	_, err = store.ModifyStatus(ctx, r.store, key, func(cur store.Object) (any, error) {
		old, ok := cur.Value.(*v3.CalicoNodeStatus)
		if !ok || old.Spec.Node != r.node {
			return nil, nil // deleted meanwhile, or another's now
		}
		o := store.Clone(old).(*v3.CalicoNodeStatus)
		o.Status = status(o.Spec.Classes, o.Status, node, routes, now)
		return o, nil
	})
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	return err
}
