package main

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

const (
	// collectorLease is held by the one host that looks after the cluster.
	collectorLease = "ipam-collector"
	// collectorTTL is how long the lease has no holder after one died. Leaks
	// can wait; a lease that is renewed seldom costs little.
	collectorTTL = time.Minute
)

// runCollector looks for leaks in IPAM's records, unless that is switched off, and does what
// one host does for the cluster.
func (d *router) runCollector(ctx context.Context) error {
	c := collect.New(collect.Config{
		Store: d.db, Node: d.name, Host: hostAddresses{d.ipam, d.attach, d.name},
		Grace: d.cfg.IPAM.LeakGracePeriod, Log: d.log.With("component", "collector"),
	})
	var forCluster []func(context.Context)
	if d.cfg.IPAM.LeakGracePeriod > 0 { // otherwise the resource does not count here, and another host is to look
		forCluster = append(forCluster, c.RunCluster)
	}
	if d.inAPI {
		forCluster = append(forCluster, d.tellForOthers)
	}
	if len(forCluster) > 0 {
		forCluster = append(forCluster, d.hostEndpoints.RunCluster, d.running.Run)
	}
	var work sync.WaitGroup
	work.Go(func() { c.RunHost(ctx) })
	work.Go(func() {
		for s := range d.follow.controllers.Steps(ctx) {
			d.running.HandleStore(s)
			for _, ch := range s.Changes {
				if k, _ := ch.Object.Value.(*v3.KubeControllersConfiguration); ch.Key.Name == store.DefaultName && ch.Err == nil {
					c.SetGrace(leakGrace(d.cfg.IPAM.LeakGracePeriod, k))
				}
			}
		}
	})
	if len(forCluster) > 0 {
		d.store.Lead(ctx, collectorLease, d.name, collectorTTL, func(ctx context.Context) {
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

// leakGrace returns how long an address must have leaked before it is freed, by the host's own setting, which counts unless it is the
// default, and by the KubeControllersConfiguration; nil: there is none.
func leakGrace(own time.Duration, k *v3.KubeControllersConfiguration) time.Duration {
	if own != collect.DefaultGrace || k == nil || k.Spec.Controllers.Node == nil || k.Spec.Controllers.Node.LeakGracePeriod == nil {
		return own
	}
	grace := k.Spec.Controllers.Node.LeakGracePeriod.Duration
	if grace <= 0 {
		return 0
	}
	// A container that is being made has its address before anything else tells of it.
	return max(grace, time.Minute)
}

// hostAddresses is what this host knows of its addresses.
type hostAddresses struct {
	ipam   *ipam.Allocator
	attach *attach.Attacher
	node   string
}

func (h hostAddresses) Allocations() []ipam.Allocation { return h.ipam.Allocations() }

// Uses counts what the daemon itself holds as in use: the node's agent looks
// after tunnels' addresses, and IPAM after its reserve.
func (h hostAddresses) Uses(handle string) bool {
	return strings.HasSuffix(handle, "-tunnel-addr-"+h.node) || handle == store.ReserveHandle(h.node) || h.attach.Uses(handle)
}

func (h hostAddresses) Wired(ctx context.Context) (map[string]bool, error) {
	return h.attach.Wired(ctx)
}

func (h hostAddresses) Release(ctx context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error) {
	return h.ipam.ReleaseUnless(ctx, used, claims...)
}
