package probe

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/dataplane"
)

// Collector shows what a [Prober] found. Its series are few, whatever the number
// of nodes: families, encapsulations by answer, and a handful of devices.
type Collector struct {
	p                         *Prober
	answers, refused, paths   *prometheus.Desc
	tunnels, smaller, offload *prometheus.Desc
}

// NewCollector returns the metrics of p.
func NewCollector(p *Prober) *Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_"+name, help, labels, nil)
	}
	return &Collector{
		p:       p,
		answers: desc("reach_peers", "Number of peers by whether they answer probes on the underlay.", "family", "answers"),
		paths:   desc("reach_small_paths", "Number of peers whose underlay path has a smaller MTU than the uplink.", "family"),
		refused: desc("reach_refused_total", "Total number of received probes and answers that were discarded.", "reason"),
		tunnels: desc("tunnels", "Number of tunnels to other nodes by whether probes through them arrive.", "form", "delivers"),
		smaller: desc("tunnels_with_smaller_path", "Number of tunnels whose path has a smaller MTU than their device.", "form"),
		offload: desc("tunnel_offload_off", "Whether an offload of a tunnel device is off because it corrupts packets.", "device", "offload"),
	}
}

// Describe implements [prometheus.Collector].
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.answers, c.refused, c.paths, c.tunnels, c.smaller, c.offload} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	var all []prometheus.Metric
	add := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		all = append(all, prometheus.MustNewConstMetric(d, t, v, labels...))
	}
	err := c.p.ask(context.Background(), func(l *loop) {
		c.underlay(l, add)
		if l.tunnels != nil {
			c.ofTunnels(l.tunnels, add)
		}
	})
	if err != nil {
		return
	}
	for _, m := range all {
		ch <- m
	}
}

type addMetric func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string)

func (c *Collector) underlay(l *loop, add addMetric) {
	type cell struct {
		fam dataplane.Family
		up  bool
	}
	count, small := map[cell]int{}, map[dataplane.Family]int{}
	for k, p := range l.eng.peers {
		count[cell{k.fam, p.chosen != nil && p.chosen.up && probed(p.target)}]++
		if p.reach.MTU != 0 {
			small[k.fam]++
		}
	}
	for _, f := range dataplane.Families() {
		add(c.answers, prometheus.GaugeValue, float64(count[cell{f, true}]), f.String(), "yes")
		add(c.answers, prometheus.GaugeValue, float64(count[cell{f, false}]), f.String(), "no")
		add(c.paths, prometheus.GaugeValue, float64(small[f]), f.String())
	}
	if !c.p.cfg.Underlay.Enabled {
		return
	}
	for reason, n := range l.refused() {
		add(c.refused, prometheus.CounterValue, float64(n), reason)
	}
}

// refused counts what arrived over the underlay and was of no use, by reason.
func (l *loop) refused() map[string]uint64 {
	c := &l.p.counts
	return map[string]uint64{
		"forged": c.forged.Load(), "garbage": c.garbage.Load(), "overflow": c.overflow.Load(),
		"unknown": l.eng.unknown, "replayed": l.eng.replayed, "unasked": l.eng.unasked,
	}
}

func (c *Collector) ofTunnels(p *tunnels, add addMetric) {
	p.mu.Lock()
	defer p.mu.Unlock()
	type cell struct {
		form   string
		answer dataplane.Answer
	}
	count, smaller, devices := map[cell]int{}, map[string]int{}, map[string]Setting{}
	for t := range p.all() {
		form := t.Encap.String()
		count[cell{form, t.result}]++
		smaller[form] += 0
		if t.mtu != 0 {
			smaller[form]++
		}
		devices[t.Tunnel.Link] = p.applied[t.Tunnel.Link]
	}
	for form, n := range smaller {
		for _, a := range []dataplane.Answer{dataplane.Unknown, dataplane.Yes, dataplane.No} {
			add(c.tunnels, prometheus.GaugeValue, float64(count[cell{form, a}]), form, a.String())
		}
		add(c.smaller, prometheus.GaugeValue, float64(n), form)
	}
	for device, s := range devices {
		for _, o := range Offloads() {
			off := 0.0
			if s&o.Bit != 0 {
				off = 1
			}
			add(c.offload, prometheus.GaugeValue, off, device, o.Name)
		}
	}
}
