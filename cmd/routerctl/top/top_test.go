package top

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// load is a host that has been up for so long and counted so much.
func load(node string, up time.Duration, n uint64) *apiv1.HostLoad {
	return &apiv1.HostLoad{
		Node: node, Up: durationpb.New(up), Boot: "b", Ready: true, SessionsUp: 2, Sessions: 2, DenialsCounted: true, Denied: n, Cpu: durationpb.New(time.Duration(n) * time.Millisecond),
		Traffic: []*apiv1.Traffic{{Devices: Uplink, ReceivedBytes: n, SentBytes: 2 * n, ReceivedPackets: n, SentPackets: n, Dropped: n, Errors: n}},
	}
}

func answer(hosts ...*apiv1.HostLoad) *apiv1.HostsResponse {
	return &apiv1.HostsResponse{Node: "node1", Hosts: hosts}
}

func TestCompareRates(t *testing.T) {
	t.Parallel()
	was := load("node1", 10*time.Second, 100)
	for _, tt := range []struct {
		name    string
		was, is *apiv1.HostLoad
		change  func(*apiv1.HostLoad)
		want    string
	}{
		{"two seconds", was, load("node1", 12*time.Second, 300), nil, "2s rx 800 tx 1600 drops 100 denied 100 cpu 10"},
		{"the first answer", nil, load("node1", 12*time.Second, 300), nil, "0s"},
		{"the same answer", was, was, nil, "0s"},
		{"another boot", was, load("node1", 12*time.Second, 300), func(h *apiv1.HostLoad) { h.Boot = "c" }, "0s"},
		{"an older answer", was, load("node1", 9*time.Second, 300), nil, "0s"},
		{"a device made anew", was, load("node1", 12*time.Second, 300), func(h *apiv1.HostLoad) { h.Traffic[0].SentBytes = 1 }, "2s denied 100 cpu 10"},
		{"rules changed", was, load("node1", 12*time.Second, 300), func(h *apiv1.HostLoad) { h.Denied = 0 }, "2s rx 800 tx 1600 drops 100 cpu 10"},
		{"the daemon started anew", was, load("node1", 12*time.Second, 300), func(h *apiv1.HostLoad) { h.Cpu = nil }, "2s rx 800 tx 1600 drops 100 denied 100"},
		{"no answer before", &apiv1.HostLoad{Node: "node1", Error: "x"}, load("node1", 12*time.Second, 300), nil, "0s"},
		{"none now", was, &apiv1.HostLoad{Node: "node1", Error: "x"}, nil, "0s"},
	} {
		if tt.change != nil {
			tt.change(tt.is)
		}
		before := answer()
		if tt.was != nil {
			before = answer(tt.was)
		}
		h := Compare(before, answer(tt.is)).Hosts[0]
		got := fmt.Sprintf("%vs", h.Seconds)
		if r, ok := h.Rates[Uplink]; ok {
			got += fmt.Sprintf(" rx %v tx %v drops %v", r.ReceivedBits, r.SentBits, *h.Dropped)
		}
		if h.Denied != nil {
			got += fmt.Sprintf(" denied %v", *h.Denied)
		}
		if h.CPU != nil {
			got += fmt.Sprintf(" cpu %v", *h.CPU)
		}
		if got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// No answer of hosts, whatever they count, makes a rate that is negative.
func TestRatesAreNeverNegative(t *testing.T) {
	t.Parallel()
	one := rapid.Custom(func(t *rapid.T) *apiv1.HostLoad {
		n := func(of string) uint64 { return rapid.Uint64().Draw(t, of) }
		return &apiv1.HostLoad{
			Node: "node1", Boot: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "boot"), Up: durationpb.New(time.Duration(rapid.Int64().Draw(t, "up"))),
			DenialsCounted: rapid.Bool().Draw(t, "counted"), Denied: n("denied"), Cpu: durationpb.New(time.Duration(rapid.Int64().Draw(t, "cpu"))),
			Traffic: []*apiv1.Traffic{{Devices: Uplink, ReceivedBytes: n("rb"), SentBytes: n("sb"), ReceivedPackets: n("rp"), SentPackets: n("sp"), Dropped: n("d"), Errors: n("e")}},
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		h := Compare(answer(one.Draw(t, "was")), answer(one.Draw(t, "is"))).Hosts[0]
		for _, n := range []*float64{h.Dropped, h.Denied, h.CPU} {
			if n != nil && *n < 0 {
				t.Fatalf("%+v", h)
			}
		}
		for _, r := range h.Rates {
			if min(r.ReceivedBits, r.SentBits, r.ReceivedPackets, r.SentPackets, r.Dropped, r.Errors) < 0 {
				t.Fatalf("%+v", r)
			}
		}
	})
}

func TestStates(t *testing.T) {
	t.Parallel()
	down := &apiv1.BGPPeer{Name: "node2", Address: "10.1.0.2", Info: "refused"}
	for _, tt := range []struct {
		host    *apiv1.HostLoad
		state   string
		reasons []string
	}{
		{load("a", 1, 1), Ready, nil},
		{&apiv1.HostLoad{Error: "gone", Absent: true}, Absent, []string{"gone"}},
		{&apiv1.HostLoad{Error: "late"}, NoAnswer, []string{"late"}},
		{&apiv1.HostLoad{Ready: true, Sessions: 3, SessionsUp: 1, Down: []*apiv1.BGPPeer{down}}, Impaired, []string{"session with node2 10.1.0.2: refused", "and 1 more sessions"}},
		{&apiv1.HostLoad{Unmet: []*apiv1.Check{{Name: "BGP", Reason: "no port"}}, UnmetTotal: 3}, NotReady, []string{"BGP: no port", "and 2 more conditions"}},
	} {
		state, reasons := stateOf(tt.host)
		if d := cmp.Diff(tt.reasons, reasons); state != tt.state || d != "" {
			t.Errorf("%v: %s, want %s; reasons (-want +got)\n%s", tt.host, state, tt.state, d)
		}
	}
}

func TestSort(t *testing.T) {
	t.Parallel()
	n := func(f float64) *float64 { return &f }
	hosts := []Host{
		{Node: "b", State: Ready, Dropped: n(1), Rates: map[string]Rates{Uplink: {ReceivedBits: 5}}, Sessions: Sessions{Up: 2, Total: 2}, Memory: 1},
		{Node: "a", State: Absent, Sessions: Sessions{Up: 0, Total: 1}},
		{Node: "c", State: Ready, Dropped: n(3), Rates: map[string]Rates{Uplink: {ReceivedBits: 1}}, Sessions: Sessions{Up: 1, Total: 3}, Memory: 2},
	}
	for _, tt := range []struct {
		order   string
		reverse bool
		want    string
	}{
		{"host", false, "abc"},
		{"host", true, "cba"},
		{"state", false, "abc"},
		{"state", true, "bca"},
		{"drops", false, "cba"},
		{"rx", false, "bca"},
		{"sessions", false, "cab"},
		{"mem", false, "cba"},
		{"denied", false, "abc"},
	} {
		Sort(hosts, tt.order, Uplink, tt.reverse)
		var got string
		for _, h := range hosts {
			got += h.Node
		}
		if got != tt.want {
			t.Errorf("by %s, reverse %v: %s, want %s", tt.order, tt.reverse, got, tt.want)
		}
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		typed     string
		want      Screen
		quit, now bool
	}{
		{"s", Screen{Order: "state", Devices: Uplink, Top: 1}, false, false},
		{"S", Screen{Order: "mem", Devices: Uplink, Top: 1}, false, false},
		{"rd", Screen{Order: "host", Devices: Tunnel, Reverse: true, Top: 1}, false, false},
		{"\x1b[B\x1bOB\x1b[A", Screen{Order: "host", Devices: Uplink, Top: 2}, false, false},
		{"kkk", Screen{Order: "host", Devices: Uplink}, false, false},
		{"\x1b[15~q", Screen{Order: "host", Devices: Uplink, Top: 1}, false, false},
		{" q", Screen{Order: "host", Devices: Uplink, Top: 1}, true, true},
	} {
		s := Screen{Order: "host", Devices: Uplink, Top: 1}
		quit, now := s.Keys(tt.typed)
		if d := cmp.Diff(tt.want, s); d != "" || quit != tt.quit || now != tt.now {
			t.Errorf("%q: quit %v, now %v; (-want +got)\n%s", tt.typed, quit, now, d)
		}
	}
}

// A thousand hosts fit into any terminal: the table is cut, and the summary and the keys stay.
func TestDrawFits(t *testing.T) {
	t.Parallel()
	var hosts []*apiv1.HostLoad
	for i := range 1000 {
		hosts = append(hosts, load(fmt.Sprintf("node%04d", i), time.Second, 1))
	}
	hosts[7].Ready, hosts[7].Unmet, hosts[7].UnmetTotal = false, []*apiv1.Check{{Name: "BGP", Reason: strings.Repeat("no ", 100)}}, 1
	v := Compare(nil, answer(hosts...))
	rapid.Check(t, func(t *rapid.T) {
		s := &Screen{
			Width: rapid.IntRange(1, 200).Draw(t, "width"), Height: rapid.IntRange(1, 60).Draw(t, "height"), Top: rapid.IntRange(0, 2000).Draw(t, "top"),
			Order: rapid.SampledFrom(Orders()).Draw(t, "order"), Devices: Uplink, Now: time.Unix(0, 0),
		}
		lines := s.Draw(v)
		if len(lines) > s.Height {
			t.Fatalf("%d lines in %d", len(lines), s.Height)
		}
		for _, l := range lines {
			if len([]rune(l.Text)) > s.Width {
				t.Fatalf("%q is wider than %d", l.Text, s.Width)
			}
		}
		if s.Height > 12 && s.Width > 120 {
			if !strings.Contains(lines[0].Text, "999 ready") || lines[len(lines)-1].Text != Help || !strings.Contains(lines[1].Text, "SESSIONS") {
				t.Fatalf("%+v", lines)
			}
		}
	})
}

func TestAmount(t *testing.T) {
	t.Parallel()
	for n, want := range map[float64]string{0: "0b", 0.5: "0.5b", 9.96: "10.0b", 12: "12b", 999: "999b", 999.96: "1.0kb", 1e6: "1.0Mb", 2.5e12: "2.5Tb", 1e16: "10000.0Tb"} {
		if got := amount(n, "b"); got != want {
			t.Errorf("%v: %s, want %s", n, got, want)
		}
	}
}

func TestSame(t *testing.T) {
	t.Parallel()
	a := answer(load("node1", time.Second, 1))
	if Same(nil, a) || !Same(a, proto.CloneOf(a)) || Same(a, answer(load("node1", 2*time.Second, 1))) {
		t.Error("answers of one moment are not told from others")
	}
	if got := Pause(time.Second, &apiv1.HostsResponse{NextAfter: durationpb.New(10 * time.Second)}); got != 10*time.Second {
		t.Errorf("pause %s", got)
	}
}
