package main

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/store/kube"
)

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
		written: vec("kernel_written_total", "Total number of kernel objects created, changed or removed.", "kind", "action"),
		refused: vec("kernel_refused_total", "Total number of objects that the kernel refused.", "kind"),
		drift:   vec("kernel_drift_total", "Total number of kernel objects that another program changed, removed or added.", "kind"),
		repairs: vec("drift_repairs_total", "Total number of kernel objects repaired after a change by another program.", "kind"),
		repaired: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "routerd_drift_repair_seconds", Help: "Time from the kernel's notice of a change by another program to its repair.",
			Buckets: []float64{0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 60},
		}, []string{"kind"}),
		listed: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "routerd_kernel_list_seconds", Help: "Duration of complete listings of the kernel's objects.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}),
	}
}

func (c counters) collectors() []prometheus.Collector {
	return []prometheus.Collector{c.written, c.refused, c.drift, c.repairs, c.repaired, c.listed}
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

// watches shows what is asked of Kubernetes' API server.
type watches struct {
	api                    *kube.Store // nil: nothing is
	open, requests, states *prometheus.Desc
}

func newWatches(api *kube.Store) watches {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_kubernetes_"+name, help, []string{"watch"}, nil)
	}
	return watches{
		api:      api,
		open:     desc("watches_open", "Number of open watch connections to the Kubernetes API server; the watch of other nodes' pods is open only while it is needed."),
		requests: desc("watch_requests_total", "Total number of watch requests to the Kubernetes API server."),
		states:   desc("state_requests_total", "Total number of requests to the Kubernetes API server for all objects of a watch."),
	}
}

// Describe implements [prometheus.Collector].
func (w watches) Describe(ch chan<- *prometheus.Desc) {
	ch <- w.open
	ch <- w.requests
	ch <- w.states
}

// Collect implements [prometheus.Collector].
func (w watches) Collect(ch chan<- prometheus.Metric) {
	if w.api == nil {
		return
	}
	for _, is := range w.api.Watches() {
		ch <- prometheus.MustNewConstMetric(w.open, prometheus.GaugeValue, float64(is.Open), is.Watch)
		ch <- prometheus.MustNewConstMetric(w.requests, prometheus.CounterValue, float64(is.Requests), is.Watch)
		ch <- prometheus.MustNewConstMetric(w.states, prometheus.CounterValue, float64(is.States), is.Watch)
	}
}
