package main

import (
	"context"
	"net/netip"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/reach"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/dataplane/sourceport"
	"github.com/routerd/routerd/store"
)

// reachState is where what was measured outlives the daemon, but not the host.
func reachState(runDir string) string { return filepath.Join(runDir, "reach.json") }

// reacher measures the underlay towards peers, with what it holds of the
// kernel.
type reacher struct {
	*reach.Prober
	ports *sourceport.Table // nil: nothing is measured, or the kernel has no nftables
}

// newReach makes the part that measures the underlay. What an earlier life of
// the daemon measured is told to the core at once, before it decides anything.
func (d *router) newReach(ctx context.Context) (*reacher, error) {
	log := d.log.With("component", "reach")
	rc := reach.Config{
		Node: d.name, Store: d.store, Log: log, Interval: d.cfg.Reach.Interval, Addresses: tunnelAddresses(d.cfg.TunnelAddress),
		PublishOnly: !d.cfg.Reach.Enabled, StateFile: reachState(d.cfg.RunDir), Deliver: d.core.Reach,
	}
	r := &reacher{}
	if d.cfg.Reach.Enabled {
		asker, err := neighbour.Open()
		if err != nil {
			return nil, err
		}
		rc.Neighbours = asker
		if r.ports, err = sourceport.Open(log); err != nil {
			log.Warn("no nftables: peers that let in VXLAN from one port alone are not reached", "error", err)
		} else {
			rc.SourcePorts = r.ports
		}
	}
	r.Prober = reach.New(rc)
	if rc.PublishOnly {
		return r, nil
	}
	return r, r.Restore(ctx)
}

// tunnelAddresses reads the configuration's key; nil: auto.
func tunnelAddresses(s string) []netip.Addr {
	if s == config.TunnelAddressAuto {
		return nil
	}
	addrs, _ := store.ParseTunnelAddresses(s) // Validate has parsed it; none gives none
	return append([]netip.Addr{}, addrs...)
}

// runReach measures until ctx ends.
func (d *router) runReach(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.reach.Run(ctx) })
	if d.reach.ports != nil {
		g.Go(func() error { return d.reach.ports.Run(ctx) })
	}
	g.Go(func() error {
		for u := range d.kernel.Underlay(ctx) {
			d.reach.HandleUnderlay(u)
		}
		return ctx.Err()
	})
	g.Go(func() error {
		for list := range d.core.Probes(ctx) {
			ts, err := d.reachTargets(ctx, list)
			if err != nil {
				return err
			}
			d.reach.SetTargets(ts)
		}
		return ctx.Err()
	})
	return g.Wait()
}

// reachTargets says of what the core wants measured in which form to probe.
func (d *router) reachTargets(ctx context.Context, list []vrouter.Target) ([]reach.Target, error) {
	pools, err := d.core.Pools(ctx)
	if err != nil {
		return nil, err
	}
	forms := map[dataplane.Family]dataplane.Form{}
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		h, err := d.core.Host(ctx, f)
		if err != nil {
			return nil, err
		}
		forms[f] = usualForm(pools, f, h.VXLANPort)
	}
	out := make([]reach.Target, 0, len(list))
	for _, t := range list {
		out = append(out, reachTarget(t, forms[t.Family]))
	}
	return out, nil
}

// usualForm is the tunnel that some pool uses, towards some peers at least;
// VXLAN before IPIP, for it has ports.
func usualForm(pools []vrouter.PoolStatus, f dataplane.Family, port uint16) dataplane.Form {
	var form dataplane.Form
	for _, p := range pools {
		switch p.Encapsulation {
		case store.VXLAN, store.VXLANCrossSubnet:
			return dataplane.Form{Driver: dataplane.DriverVXLAN, Outer: f, Port: port}
		case store.IPIP, store.IPIPCrossSubnet:
			form = dataplane.Form{Driver: dataplane.DriverIPIP, Outer: f}
		case store.Direct:
		}
	}
	return form
}

// reachTarget takes the form that packets to the peer go in, the first of
// several; a peer that gets plain packets is probed in the usual one.
func reachTarget(t vrouter.Target, usual dataplane.Form) reach.Target {
	out := reach.Target{Node: t.Node, Family: t.Family, Uplink: t.Uplink, Local: t.Local, Form: usual}
	for i, a := range t.Addrs {
		switch i {
		case 0:
			out.Registered = a
		case 1:
			out.Public = a
		}
	}
	if len(t.Forms) > 0 { // sorted, VXLAN first
		f := t.Forms[0].Form
		out.Form = dataplane.Form{Driver: f.Driver, Outer: t.Family, Port: f.Port}
	}
	return out
}

// Paths implements [rpc.Operator].
func (d *router) Paths(ctx context.Context) (*apiv1.PathsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	s, err := d.reach.Status(ctx)
	if err != nil {
		return nil, err
	}
	out := &apiv1.PathsResponse{}
	if s.State != nil {
		out.State = s.State.Error()
	}
	for _, a := range s.Published {
		out.TunnelAddresses = append(out.TunnelAddresses, a.String())
	}
	for _, p := range s.Paths {
		pp := &apiv1.Path{
			Node: p.Node, Family: p.Family.String(), Port: uint32(p.Reach.Port), Why: p.Why, Answers: p.Answers, SourcePort: p.SourcePort,
			Mtu: uint32(p.Reach.MTU), Near: p.Reach.Near.String(), LastAnswer: timestamp(p.LastAnswer), Candidates: p.Candidates,
		}
		if p.Addr.IsValid() {
			pp.Address = p.Addr.String()
		}
		if p.RTT > 0 {
			pp.Rtt = durationpb.New(p.RTT)
		}
		out.Paths = append(out.Paths, pp)
	}
	return out, nil
}

// reachCollector counts what reach measures.
type reachCollector struct {
	d                       *router
	answers, refused, paths *prometheus.Desc
}

func newReachCollector(d *router) *reachCollector {
	return &reachCollector{
		d:       d,
		answers: prometheus.NewDesc("routerd_reach_peers", "Peers by whether they answer probes on the underlay.", []string{"family", "answers"}, nil),
		paths:   prometheus.NewDesc("routerd_reach_small_paths", "Peers to which the underlay takes less than the uplink's MTU.", []string{"family"}, nil),
		refused: prometheus.NewDesc("routerd_reach_refused_total", "Probes and answers that arrived and were of no use.", []string{"reason"}, nil),
	}
}

// Describe implements [prometheus.Collector].
func (c *reachCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.answers
	ch <- c.refused
	ch <- c.paths
}

// Collect implements [prometheus.Collector].
func (c *reachCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), answerWithin)
	defer cancel()
	s, err := c.d.reach.Status(ctx)
	if err != nil {
		return
	}
	type cell struct{ family, answers string }
	count, small := map[cell]int{}, map[string]int{}
	for _, f := range []string{dataplane.IPv4.String(), dataplane.IPv6.String()} {
		count[cell{f, "yes"}], count[cell{f, "no"}], small[f] = 0, 0, 0
	}
	for _, p := range s.Paths {
		answers := "no"
		if p.Answers {
			answers = "yes"
		}
		count[cell{p.Family.String(), answers}]++
		if p.Reach.MTU != 0 {
			small[p.Family.String()]++
		}
	}
	for k, n := range count {
		ch <- prometheus.MustNewConstMetric(c.answers, prometheus.GaugeValue, float64(n), k.family, k.answers)
	}
	for f, n := range small {
		ch <- prometheus.MustNewConstMetric(c.paths, prometheus.GaugeValue, float64(n), f)
	}
	for reason, n := range s.Refused {
		ch <- prometheus.MustNewConstMetric(c.refused, prometheus.CounterValue, float64(n), reason)
	}
}
