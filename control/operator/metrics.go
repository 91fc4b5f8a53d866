package operator

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/routerd/routerd/dataplane"
)

// Metrics returns what /metrics shows, with the collectors of others. Numbers are
// taken from the parts when they are asked for; nothing is counted twice.
func (s *Server) Metrics(others ...prometheus.Collector) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	reg.MustRegister(s.Collectors()...)
	reg.MustRegister(others...)
	return reg
}

// Collectors returns what shows the metrics of this package. They can be described
// without any part being there.
func (s *Server) Collectors() []prometheus.Collector {
	return []prometheus.Collector{newCollector(s), newPolicyCollector(s.cfg.Policy), newPresenceCollector(s)}
}

type collector struct {
	s                                   *Server
	bgp                                 bgpMetrics
	objects, workloads                  *prometheus.Desc
	blockAddresses, blockInUse, healthy *prometheus.Desc
	foreign, journalDamage              *prometheus.Desc
}

func newCollector(s *Server) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_"+name, help, labels, nil)
	}
	return &collector{
		s: s, bgp: newBGPMetrics(),
		objects:        desc("reconcile_objects", "Number of objects of the desired state by kind and state.", "kind", "state"),
		workloads:      desc("workloads", "Number of attached workload interfaces."),
		blockAddresses: desc("ipam_block_addresses", "Number of addresses in this host's blocks.", "pool"),
		blockInUse:     desc("ipam_block_addresses_in_use", "Number of addresses in use in this host's blocks.", "pool"),
		foreign:        desc("stranger_routes", "Number of routes of other programs that divert packets from routes of routerd."),
		journalDamage:  desc("journal_damaged_lines", "Number of lines of the journal that were unreadable when the daemon started."),
		healthy:        desc("healthy", "Whether the daemon is live, is ready, and meets each condition.", "check"),
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
	v := c.s.view(context.Background(), c.s.bgpStatus(context.Background()))

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
	for _, st := range c.s.cfg.Kernel.Statuses() {
		objects[cell{st.Object.Key().Kind(), st.State}]++
	}
	for k, n := range objects {
		gauge(c.objects, float64(n), k.kind.String(), k.state.String())
	}

	c.bgp.collect(ch, v.bgp)
	gauge(c.workloads, float64(len(c.s.cfg.Attach.Endpoints())))

	size, used := map[string]int32{}, map[string]int32{}
	for _, b := range c.s.blocks() {
		size[b.GetPool()] += b.GetSize()
		used[b.GetPool()] += b.GetInUse()
	}
	for pool := range size {
		gauge(c.blockAddresses, float64(size[pool]), pool)
		gauge(c.blockInUse, float64(used[pool]), pool)
	}

	gauge(c.foreign, float64(len(c.s.foreignRoutes(v))))

	gauge(c.journalDamage, float64(c.s.cfg.Damage().Lines))

	r := c.s.reportOf(v)
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

// presenceCollector shows the epoch of this host, how many workloads have lost their
// addresses, and when this host's certificates end.
type presenceCollector struct {
	s                *Server
	epoch, lost, end *prometheus.Desc
}

func newPresenceCollector(s *Server) *presenceCollector {
	return &presenceCollector{
		s:     s,
		epoch: prometheus.NewDesc("routerd_node_epoch", "Epoch of this host: number of times that it booted or its Node was recreated; 0 if it does not hold its name.", nil, nil),
		lost:  prometheus.NewDesc("routerd_workloads_fenced", "Number of workloads without a route because something else has their addresses.", nil, nil),
		end:   prometheus.NewDesc("routerd_datastore_certificate_expiry_timestamp_seconds", "Earliest expiry of the certificates used to reach the datastore; absent without certificates.", nil, nil),
	}
}

// Describe implements [prometheus.Collector].
func (c *presenceCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.epoch
	ch <- c.lost
	ch <- c.end
}

// Collect implements [prometheus.Collector].
func (c *presenceCollector) Collect(ch chan<- prometheus.Metric) {
	lost := 0
	for _, e := range c.s.cfg.Attach.Endpoints() {
		if e.Lost != "" {
			lost++
		}
	}
	ch <- prometheus.MustNewConstMetric(c.epoch, prometheus.GaugeValue, float64(c.s.cfg.Presence.Epoch()))
	ch <- prometheus.MustNewConstMetric(c.lost, prometheus.GaugeValue, float64(lost))
	if at := c.s.cfg.CertificateEnd(); !at.IsZero() {
		ch <- prometheus.MustNewConstMetric(c.end, prometheus.GaugeValue, float64(at.Unix()))
	}
}
