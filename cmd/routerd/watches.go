package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/store/kube"
)

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
		open:     desc("watches_open", "Connections on which the API server of Kubernetes tells changes; that of other nodes' pods is open while something asks for them."),
		requests: desc("watch_requests_total", "How often the API server of Kubernetes was asked for changes."),
		states:   desc("state_requests_total", "How often the API server of Kubernetes was asked for all objects of a watch."),
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
