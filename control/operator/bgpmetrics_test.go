package operator

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/control/bgp"
)

// fixedBGP collects the metrics of one state.
type fixedBGP struct {
	bgpMetrics
	st bgp.Status
}

func (f fixedBGP) Describe(ch chan<- *prometheus.Desc) { f.describe(ch) }
func (f fixedBGP) Collect(ch chan<- prometheus.Metric) { f.collect(ch, f.st) }

// TestBGPMetrics: every series is of a peer that is configured now, each once,
// also where two resources name one address and one names none.
func TestBGPMetrics(t *testing.T) {
	t.Parallel()
	a := netip.MustParseAddr("10.1.0.1")
	up := bgp.PeerStatus{
		Name: "tor", Type: bgp.PeerGlobal, Addr: a, Port: bgp.DefaultPort, State: bgp.StateUp, Since: time.UnixMilli(1500),
		Counted: true, Received: 7, Accepted: 6, Advertised: 5,
		Counters: bgp.Counters{
			FSMState: 6, Established: 3, Resets: map[bgp.Reset]int{bgp.ResetHoldTimer: 2}, LastReset: bgp.ResetHoldTimer,
			Families: []bgp.FamilyCounts{{Family: "ipv4", Received: 7, Accepted: 6, Advertised: 5}},
			In:       bgp.Messages{Update: 9},
		},
	}
	same, nobody := bgp.PeerStatus{Name: "again", Addr: a, Port: bgp.DefaultPort, State: bgp.StateDown, Counted: true}, bgp.PeerStatus{Name: "none", State: bgp.StateDown}
	other := bgp.PeerStatus{Name: "far", Addr: a, Port: 1790, State: bgp.StateStart, Counted: true}
	busy := bgp.PeerStatus{Name: "busy", Addr: netip.MustParseAddr("10.1.0.3"), Port: bgp.DefaultPort, State: bgp.StateUp}
	link := bgp.PeerStatus{Name: "one", Addr: netip.MustParseAddr("fe80::1%eth1"), Interface: "eth1", Port: bgp.DefaultPort, State: bgp.StateUp, Counted: true}
	link2, found := link, link
	link2.Name, link2.Addr = "two", netip.MustParseAddr("fe80::2%eth1")
	found.Name, found.Addr, found.Interface, found.Found = "three", netip.MustParseAddr("fe80::1%eth2"), "eth2", true
	listening := bgp.PeerStatus{Name: "lab", Range: netip.MustParsePrefix("10.9.0.0/24"), State: bgp.StateListening, Limit: 5} // is no session
	f := fixedBGP{newBGPMetrics(), bgp.Status{Peers: []bgp.PeerStatus{up, same, nobody, other, busy, link, link2, found, listening}}}
	reg := prometheus.NewPedanticRegistry() // refuses a series that comes twice
	reg.MustRegister(f)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, fam := range families {
		for _, m := range fam.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			name := strings.TrimPrefix(fam.GetName(), "routerd_bgp_") + " " + strings.Join(labels, " ")
			got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if (m.GetCounter() != nil) != strings.HasSuffix(fam.GetName(), "_total") {
				t.Errorf("%s: counters, and only they, end in _total", fam.GetName())
			}
		}
	}
	for name, want := range map[string]float64{
		"session_up 10.1.0.1 global": 1, "session_fsm_state 10.1.0.1": 6, "session_changed_timestamp_seconds 10.1.0.1": 1.5,
		"session_established_total 10.1.0.1": 3, "session_established_total 10.1.0.1:1790": 0,
		"session_resets_total 10.1.0.1 hold-timer": 2, "session_last_reset_info 10.1.0.1 hold-timer": 1,
		"prefixes received 10.1.0.1": 7, "prefixes accepted 10.1.0.1": 6, "prefixes advertised 10.1.0.1": 5,
		"family_prefixes accepted ipv4 10.1.0.1": 6, "messages_total in update 10.1.0.1": 9, "messages_total out open 10.1.0.1": 0,
		"session_fsm_state 10.1.0.3": 0, "session_fsm_state fe80::1%eth1": 0, "prefixes received fe80::2%eth1": 0, "prefixes received eth2": 0,
	} {
		if n, ok := got[name]; !ok || n != want {
			t.Errorf("%s is %v (there: %t), want %v", name, n, ok, want)
		}
	}
	// One that was not counted has neither prefixes nor messages.
	if want := 22 + 16 + 3 + 3*16; len(got) != want {
		t.Errorf("%d series, want %d: %v", len(got), want, got)
	}
	none := prometheus.NewPedanticRegistry()
	none.MustRegister(fixedBGP{newBGPMetrics(), bgp.Status{}})
	if left, err := none.Gather(); err != nil || len(left) != 0 {
		t.Errorf("without peers there are %v, %v", left, err)
	}
}
