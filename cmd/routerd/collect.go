package main

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/kubecontrollers"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/policyevents"
	"github.com/routerd/routerd/store"
)

const (
	// collectorLease is held by the one host that looks after the cluster.
	collectorLease = "ipam-collector"
	// collectorTTL is how long the lease has no holder after one died. Leaks
	// can wait; a lease that is renewed seldom costs little.
	collectorTTL = time.Minute

	// syncLease is held by the one host that brings what Kubernetes says into etcd.
	syncLease = "kubernetes-sync"
	// syncTTL is about how long policies stay as they are when that host dies.
	syncTTL = 10 * time.Second
)

// duties looks for leaks in IPAM's records, and does what one host does for the cluster.
type duties struct {
	daemon
	ds        *datastore
	addresses hostAddresses
	endpoints *kubecontrollers.Keeper
	follows   *cluster.Follower // the KubeControllersConfiguration
	forOthers func(context.Context)
}

// run goes on until ctx ends. No leaks are looked for where that is switched off.
func (k duties) run(ctx context.Context) error {
	own := k.IPAM.LeakGracePeriod
	c := collect.New(collect.Config{Store: k.ds.db, Node: k.name, Host: k.addresses, Grace: own, Log: k.of("collector")})
	running := kubecontrollers.NewStatusWriter(kubecontrollers.Running{
		API: k.ds.inAPI(), Mirrored: k.ds.mirrors(),
		LeakGrace: func(r *v3.KubeControllersConfiguration) time.Duration { return collect.GraceOf(own, r) },
	}, k.ds.db, k.of("kubecontrollers"))
	var forCluster []func(context.Context)
	if own > 0 { // otherwise the resource does not count here, and another host is to look
		forCluster = append(forCluster, c.RunCluster)
	}
	if k.ds.inAPI() {
		forCluster = append(forCluster, k.forOthers)
	}
	if len(forCluster) > 0 {
		forCluster = append(forCluster, k.endpoints.RunCluster, running.Run)
	}
	var work sync.WaitGroup
	work.Go(func() { c.RunHost(ctx) })
	work.Go(func() {
		for s := range k.follows.Steps(ctx) {
			running.HandleStore(s)
			for _, ch := range s.Changes {
				if r, _ := ch.Object.Value.(*v3.KubeControllersConfiguration); ch.Key.Name == store.DefaultName && ch.Err == nil {
					c.SetGrace(collect.GraceOf(own, r))
				}
			}
		}
	})
	if len(forCluster) > 0 {
		k.ds.store.Lead(ctx, collectorLease, k.name, collectorTTL, func(ctx context.Context) {
			var led sync.WaitGroup
			for _, run := range forCluster {
				led.Go(func() { run(ctx) })
			}
			led.Wait()
		})
	}
	work.Wait()
	return nil
}

// tellForOthers tells Kubernetes, while this host holds the Lease in the API by which the policy of admission lets it,
// of the Nodes whose daemon is gone that they have no network, and of policies that they cannot be carried out. Where
// the API is the datastore, who looks for leaks holds it.
func (ds *datastore) tellForOthers(ctx context.Context, d daemon, p *netpolicy.Policy) {
	var events sync.WaitGroup
	events.Go(func() { policyevents.New(ds.api, p.Problems, d.of("policy")).Run(ctx) })
	ds.networks.Run(ctx)
	events.Wait()
}

// hostAddresses is what this host knows of its addresses.
type hostAddresses struct {
	*ipam.Allocator
	attach *attach.Attacher
	node   string
}

// Uses counts what the daemon itself holds as in use: the node's agent looks
// after tunnels' addresses, and IPAM after its reserve.
func (h hostAddresses) Uses(handle string) bool {
	return strings.HasSuffix(handle, "-tunnel-addr-"+h.node) || handle == store.ReserveHandle(h.node) || h.attach.Uses(handle)
}

func (h hostAddresses) Wired(ctx context.Context) (map[string]bool, error) {
	return h.attach.Wired(ctx)
}

func (h hostAddresses) Release(ctx context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error) {
	return h.ReleaseUnless(ctx, used, claims...)
}
