package operator

import (
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/control/bgp"
)

// bgpMetrics are the series of BGP sessions. Each is one of a configured peer
// and goes with it; nothing in their labels comes from the network.
type bgpMetrics struct {
	up, state, since, established, resets, lastReset *prometheus.Desc
	prefixes, familyPrefixes, messages               *prometheus.Desc
}

func newBGPMetrics() bgpMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_bgp_"+name, help, labels, nil)
	}
	return bgpMetrics{
		up:             desc("session_up", "Whether a BGP session is established.", "peer", "type"),
		state:          desc("session_fsm_state", "State of a BGP session, numbered as in RFC 4273: 1 Idle, 2 Connect, 3 Active, 4 OpenSent, 5 OpenConfirm, 6 Established.", "peer"),
		since:          desc("session_changed_timestamp_seconds", "Time at which a BGP session last came up or went down.", "peer"),
		established:    desc("session_established_total", "Total number of times that a BGP session was established.", "peer"),
		resets:         desc("session_resets_total", "Total number of times that an established BGP session ended, by reason.", "peer", "reason"),
		lastReset:      desc("session_last_reset_info", "1 for the reason of the last end of a BGP session.", "peer", "reason"),
		prefixes:       desc("prefixes", "Number of prefixes of a BGP session by direction.", "peer", "direction"),
		familyPrefixes: desc("family_prefixes", "Number of prefixes of an established BGP session by address family and direction.", "peer", "family", "direction"),
		messages:       desc("messages_total", "Total number of BGP messages of a session by direction and type.", "peer", "direction", "message"),
	}
}

func (m bgpMetrics) describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.up, m.state, m.since, m.established, m.resets, m.lastReset, m.prefixes, m.familyPrefixes, m.messages} {
		ch <- d
	}
}

func (m bgpMetrics) collect(ch chan<- prometheus.Metric, st bgp.Status) {
	seen := map[string]bool{}
	for _, p := range st.Peers {
		// Peers that are not run may share an address, or have none.
		addr := peerAddress(p)
		if p.Found {
			addr = p.Interface // who is there says so himself, and may be another tomorrow
		}
		if addr == "" || seen[addr] || p.Range.IsValid() && !p.Addr.IsValid() {
			continue
		}
		seen[addr] = true
		m.session(ch, addr, p)
	}
}

func (m bgpMetrics) session(ch chan<- prometheus.Metric, addr string, p bgp.PeerStatus) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{addr}, labels...)...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, append([]string{addr}, labels...)...)
	}
	gauge(m.up, truth(p.State == bgp.StateUp), string(p.Type))
	gauge(m.state, float64(p.FSMState))
	if !p.Since.IsZero() {
		gauge(m.since, float64(p.Since.UnixMilli())/1000)
	}
	count(m.established, float64(p.Established))
	for reason, n := range p.Resets {
		count(m.resets, float64(n), string(reason))
	}
	if p.LastReset != "" {
		gauge(m.lastReset, 1, string(p.LastReset))
	}
	if !p.Counted {
		return // zeros would be taken for the numbers
	}
	for direction, n := range map[string]int{"received": p.Received, "accepted": p.Accepted, "advertised": p.Advertised} {
		gauge(m.prefixes, float64(n), direction)
	}
	for _, f := range p.Families {
		for direction, n := range map[string]int{"received": f.Received, "accepted": f.Accepted, "advertised": f.Advertised} {
			gauge(m.familyPrefixes, float64(n), f.Family, direction)
		}
	}
	for direction, n := range map[string]bgp.Messages{"in": p.In, "out": p.Out} {
		for message, n := range map[string]uint64{
			"open": n.Open, "update": n.Update, "notification": n.Notification, "keepalive": n.Keepalive, "refresh": n.Refresh,
		} {
			count(m.messages, float64(n), direction, message)
		}
	}
}

// peerAddress is what names a peer to the operator; empty: the resource does
// not say.
func peerAddress(p bgp.PeerStatus) string {
	switch {
	case !p.Addr.IsValid() && p.Range.IsValid():
		return p.Range.String()
	case !p.Addr.IsValid():
		return p.Interface // whoever is there
	case p.Port != bgp.DefaultPort:
		return netip.AddrPortFrom(p.Addr, p.Port).String()
	}
	return p.Addr.String()
}
