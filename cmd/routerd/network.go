package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/kubesync"
	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/policyevents"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

// conditions is what keeps the condition NetworkUnavailable of Nodes in Kubernetes.
type conditions struct {
	names  *kube.Names // which know what this host's says
	others *nodenetwork.Others
}

const (
	// syncLease is held by the one host that brings what Kubernetes says into etcd.
	syncLease = "kubernetes-sync"
	// syncTTL is about how long policies stay as they are when that host dies.
	syncTTL = 10 * time.Second
)

// mirrors reports whether Kubernetes' API is not the datastore, and what it says is brought
// there.
func (d *router) mirrors() bool { return d.api != nil && !d.inAPI }

// followKubernetes brings what Kubernetes says into the datastore while this host holds the
// lease.
func (d *router) followKubernetes(ctx context.Context) error {
	d.store.Lead(ctx, syncLease, d.name, syncTTL, func(ctx context.Context) {
		kubesync.New(d.api, d.db, d.log.With("component", "kubesync")).Run(ctx)
	})
	return nil
}

// lookAtOthers tells Kubernetes for the cluster while this host holds the Lease in the API by
// which the policy of admission lets it. Where the API is the datastore, who looks for leaks
// holds it.
func (d *router) lookAtOthers(ctx context.Context) error {
	d.api.Lead(ctx, collectorLease, d.name, collectorTTL, d.tellForOthers)
	return nil
}

// tellForOthers says of the Nodes whose daemon is gone that they have no network, and of
// policies that they cannot be carried out.
func (d *router) tellForOthers(ctx context.Context) {
	var events sync.WaitGroup
	events.Go(func() {
		policyevents.New(d.api, d.policyProblems, d.log.With("component", "policy")).Run(ctx)
	})
	d.conditions.others.Run(ctx)
	events.Wait()
}

// policyServices is what the datastore tells of Services that rules name.
func (d *router) policyServices() policy.Services {
	switch {
	case d.inAPI:
		return policy.AllServices
	case d.api != nil:
		return policy.BroughtServices
	}
	return policy.NoServices
}

// followPolicy follows what policy is about: api says that the datastore has Services, which rules name.
func followPolicy(c *cluster.Cluster, api bool) *cluster.Follower {
	kinds, waived := policy.Kinds(), []store.Kind{store.KindKubeControllersConfiguration}
	if api {
		kinds, waived = append(kinds, policy.ServiceKinds()...), append(waived, policy.ServiceKinds()...)
	}
	return c.Follow(kinds...).Waive(waived...)
}

// policyProblems says why objects of policy are not carried out as they stand; false: not
// all are known.
func (d *router) policyProblems() (map[store.Key]string, bool) {
	if d.policy.Enforcer == nil {
		return nil, false
	}
	s := d.policy.Enforcer.Status()
	problems := make(map[store.Key]string, len(s.Problems))
	for _, p := range s.Problems {
		if before, twice := problems[p.Key]; twice {
			p.Reason = before + "; " + p.Reason
		}
		problems[p.Key] = p.Reason
	}
	return problems, s.InForce && !s.FromDisk
}

// networkObstacle says what keeps pods from being attached here or from reaching others.
func (d *router) networkObstacle(ctx context.Context) error {
	if err := d.attachReady(); err != nil {
		return err
	}
	if r := d.operator.Report(ctx).Ready; !r.OK {
		return errors.New(r.Reason)
	}
	return nil
}
