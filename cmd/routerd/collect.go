package main

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
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
	var forCluster []func(context.Context)
	var work sync.WaitGroup
	if d.cfg.IPAM.LeakGracePeriod > 0 {
		c := collect.New(collect.Config{
			Store: d.db, Node: d.name, Host: hostAddresses{d.ipam, d.attach, d.name},
			Grace: d.cfg.IPAM.LeakGracePeriod, Log: d.log.With("component", "collector"),
		})
		forCluster = append(forCluster, c.RunCluster)
		work.Go(func() { c.RunHost(ctx) })
	}
	if d.inAPI {
		forCluster = append(forCluster, d.tellForOthers)
	}
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
	return strings.HasSuffix(handle, "-tunnel-addr-"+h.node) || handle == ipam.ReserveHandle(h.node) || h.attach.Uses(handle)
}

func (h hostAddresses) Wired(ctx context.Context) (map[string]bool, error) {
	return h.attach.Wired(ctx)
}

func (h hostAddresses) Release(ctx context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error) {
	return h.ipam.ReleaseUnless(ctx, used, claims...)
}
