package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/dataplane"
)

// tunnelCollector shows what probes found of tunnels. Its series are few,
// whatever the number of nodes: forms by answer, and a handful of devices.
type tunnelCollector struct {
	status                    func() []probe.Status
	tunnels, smaller, offload *prometheus.Desc
}

func newTunnelCollector(d *router) *tunnelCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_"+name, help, labels, nil)
	}
	return &tunnelCollector{
		status: func() []probe.Status {
			if d.tunnels == nil {
				return nil
			}
			return d.tunnels.prober.Status()
		},
		tunnels: desc("tunnels", "Tunnels to other nodes, by whether probes through them arrive.", "form", "delivers"),
		smaller: desc("tunnels_with_smaller_path", "Tunnels whose path takes less than their device.", "form"),
		offload: desc("tunnel_offload_off", "Whether an offload of a tunnel's device is off because it spoils packets.", "device", "offload"),
	}
}

// Describe implements [prometheus.Collector].
func (c *tunnelCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.tunnels
	ch <- c.smaller
	ch <- c.offload
}

// Collect implements [prometheus.Collector].
func (c *tunnelCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	type cell struct {
		form   string
		answer dataplane.Answer
	}
	tunnels, smaller, devices := map[cell]int{}, map[string]int{}, map[string]probe.Setting{}
	for _, s := range c.status() {
		form := s.Target.Form.String()
		for _, a := range []dataplane.Answer{dataplane.Unknown, dataplane.Yes, dataplane.No} {
			tunnels[cell{form, a}] += 0
		}
		tunnels[cell{form, s.Result}]++
		smaller[form] += 0
		if s.MTU != 0 {
			smaller[form]++
		}
		devices[s.Target.Link] |= s.Device
	}
	for k, n := range tunnels {
		gauge(c.tunnels, n, k.form, k.answer.String())
	}
	for form, n := range smaller {
		gauge(c.smaller, n, form)
	}
	for device, s := range devices {
		for _, o := range probe.Offloads() {
			off := 0
			if s&o.Bit != 0 {
				off = 1
			}
			gauge(c.offload, off, device, o.Name)
		}
	}
}
