package main

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
)

// metrics returns what /metrics shows. Numbers are taken from the parts when
// they are asked for; nothing is counted twice.
func (d *router) metrics() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	d.counters.register(reg)
	reg.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), newCollector(d), newReachCollector(d),
		newTunnelCollector(d), newPolicyCollector(d), newPresenceCollector(d),
	)
	return reg
}

type collector struct {
	d                                   *router
	bgp                                 bgpMetrics
	objects, workloads                  *prometheus.Desc
	blockAddresses, blockInUse, healthy *prometheus.Desc
	foreign, journalDamage              *prometheus.Desc
}

func newCollector(d *router) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_"+name, help, labels, nil)
	}
	return &collector{
		d: d, bgp: newBGPMetrics(),
		objects:        desc("reconcile_objects", "Objects wanted in the kernel.", "kind", "state"),
		workloads:      desc("workloads", "Attached workload interfaces."),
		blockAddresses: desc("ipam_block_addresses", "Addresses in this host's blocks.", "pool"),
		blockInUse:     desc("ipam_block_addresses_in_use", "Addresses of this host's blocks in use.", "pool"),
		foreign:        desc("stranger_routes", "Routes of other programs that take packets from routes of ours."),
		journalDamage:  desc("journal_damaged_lines", "Lines of the journal that could not be read when the daemon started."),
		healthy:        desc("healthy", "Whether the daemon is live, ready, and each condition holds.", "check"),
	}
}

// Describe implements [prometheus.Collector].
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.objects, c.workloads, c.blockAddresses, c.blockInUse, c.healthy, c.foreign, c.journalDamage,
	} {
		ch <- d
	}
	c.bgp.describe(ch)
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	v := c.d.view(context.Background(), c.d.bgpStatus(context.Background()))

	type cell struct {
		kind  dataplane.Kind
		state dataplane.State
	}
	objects := map[cell]int{}
	for _, k := range dataplane.Kinds() {
		for _, s := range []dataplane.State{dataplane.Pending, dataplane.Done, dataplane.Failed} {
			objects[cell{k, s}] = 0
		}
	}
	for _, st := range c.d.kernel.Statuses() {
		objects[cell{st.Object.Key().Kind(), st.State}]++
	}
	for k, n := range objects {
		gauge(c.objects, float64(n), k.kind.String(), k.state.String())
	}

	c.bgp.collect(ch, v.bgp)
	gauge(c.workloads, float64(len(c.d.endpoints())))

	size, used := map[string]int32{}, map[string]int32{}
	for _, b := range c.d.blocks() {
		size[b.GetPool()] += b.GetSize()
		used[b.GetPool()] += b.GetInUse()
	}
	for pool := range size {
		gauge(c.blockAddresses, float64(size[pool]), pool)
		gauge(c.blockInUse, float64(used[pool]), pool)
	}

	gauge(c.foreign, float64(len(c.d.foreignRoutes(v.pools, v.coreErr))))

	gauge(c.journalDamage, float64(c.d.damage().Lines))

	r := c.d.reportOf(v)
	gauge(c.healthy, truth(r.Live.OK), "live")
	gauge(c.healthy, truth(r.Ready.OK), "ready")
	for _, cond := range r.Conditions {
		gauge(c.healthy, truth(cond.OK), cond.Name)
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// counters count what the kernel writer does. The zero value must be made with
// [newCounters].
type counters struct {
	written, refused, drift, repairs *prometheus.CounterVec
	repaired                         *prometheus.HistogramVec
	listed                           prometheus.Histogram
}

func newCounters() counters {
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "routerd_" + name, Help: help}, labels)
	}
	return counters{
		written: vec("kernel_written_total", "Objects created, changed or removed in the kernel.", "kind", "action"),
		refused: vec("kernel_refused_total", "Objects that the kernel refused.", "kind"),
		drift:   vec("kernel_drift_total", "Objects that somebody else changed, removed or added.", "kind"),
		repairs: vec("drift_repairs_total", "Objects that were put back after somebody else changed them.", "kind"),
		repaired: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "routerd_drift_repair_seconds", Help: "Time from the kernel's notice of a change by somebody else until it was put back.",
			Buckets: []float64{0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 60},
		}, []string{"kind"}),
		listed: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "routerd_kernel_list_seconds", Help: "Time of complete listings of the kernel.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}),
	}
}

func (c counters) register(reg *prometheus.Registry) {
	reg.MustRegister(c.written, c.refused, c.drift, c.repairs, c.repaired, c.listed)
}

func (c counters) hooks() kernel.Hooks {
	return kernel.Hooks{
		Written: func(k dataplane.Kind, removed bool, n int) {
			action := "put"
			if removed {
				action = "removed"
			}
			c.written.WithLabelValues(k.String(), action).Add(float64(n))
		},
		Refused: func(k dataplane.Kind) { c.refused.WithLabelValues(k.String()).Inc() },
		Drift:   func(k dataplane.Kind, n int) { c.drift.WithLabelValues(k.String()).Add(float64(n)) },
		Repaired: func(k dataplane.Kind, took time.Duration) {
			c.repairs.WithLabelValues(k.String()).Inc()
			c.repaired.WithLabelValues(k.String()).Observe(took.Seconds())
		},
		Listed: func(t time.Duration) { c.listed.Observe(t.Seconds()) },
	}
}
