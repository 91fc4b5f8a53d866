package probe

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
)

func TestMayBeNear(t *testing.T) {
	t.Parallel()
	prefix := netip.MustParsePrefix
	u := dataplane.Underlay{
		Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: prefix("10.1.0.11/24")}, {Link: "eth1", Prefix: prefix("10.7.0.1/24")}},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: prefix("10.1.0.0/24"), Link: "eth0"},
			{Prefix: prefix("10.7.0.0/24"), Link: "eth1"},
			{Prefix: prefix("10.8.0.0/24"), Link: "eth0"},
			{Prefix: prefix("10.8.0.128/25"), Link: "eth0", Gateway: netip.MustParseAddr("10.1.0.1")},
			{Prefix: prefix("0.0.0.0/0"), Link: "eth0", Gateway: netip.MustParseAddr("10.1.0.1")},
		},
	}
	for _, tt := range []struct {
		name, local, peer string
		want              bool
	}{
		{"same subnet", "10.1.0.11/24", "10.1.0.12", true},
		{"other subnet", "10.1.0.11/24", "10.2.0.12", false},
		{"recorded as /32, same subnet on the device", "10.1.0.11/32", "10.1.0.12", true},
		{"recorded as /32, other subnet", "10.1.0.11/32", "10.2.0.12", false},
		{"subnet of another device", "10.1.0.11/32", "10.7.0.12", false},
		{"by a route without a gateway", "10.1.0.11/24", "10.8.0.5", true},
		{"by a longer route with a gateway", "10.1.0.11/24", "10.8.0.200", false},
		{"no address", "10.1.0.11/24", "", false},
	} {
		target := dataplane.ProbeTarget{ProbePath: &dataplane.ProbePath{Uplink: "eth0", Local: prefix(tt.local)}}
		if tt.peer != "" {
			target.Registered = netip.MustParseAddr(tt.peer)
		}
		if got := mayBeNear(&target, u); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}

// asker records what was asked.
type asker struct {
	asked, probed []string
	err           error
}

func (a *asker) Ask(_ int, addr netip.Addr) error {
	a.asked = append(a.asked, addr.String())
	return a.err
}

func (a *asker) Probe(_ int, addr netip.Addr, _ dataplane.MAC) error {
	a.probed = append(a.probed, addr.String())
	return a.err
}

func (*asker) Run(context.Context, func(neighbour.Event)) error { return nil }

func TestNeighbours(t *testing.T) {
	t.Parallel()
	a := new(asker)
	v := newNeighbours(a, 10*time.Second)
	u := dataplane.Underlay{
		Links: []dataplane.UnderlayLink{{Index: 2, Name: "eth0"}},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: netip.MustParsePrefix("10.1.0.0/24"), Link: "eth0"},
			{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Link: "eth0", Gateway: netip.MustParseAddr("10.1.0.1")},
		},
	}
	var ts []dataplane.ProbeTarget
	for _, n := range []string{"10.1.0.12", "10.1.0.13", "10.1.0.14", "10.2.0.1"} {
		ts = append(ts, dataplane.ProbeTarget{Node: n, Registered: netip.MustParseAddr(n), ProbePath: &dataplane.ProbePath{Family: dataplane.IPv4, Uplink: "eth0", Local: netip.MustParsePrefix("10.1.0.11/24")}})
	}
	mac := func(b byte) dataplane.MAC { return dataplane.MAC{2, 0, 0, 0, 0, b} }
	say := func(addr string, ans dataplane.Answer, m dataplane.MAC) map[peerKey]dataplane.Answer {
		return v.note(neighbour.Event{LinkIndex: 2, Addr: netip.MustParseAddr(addr), Answer: ans, MAC: m})
	}
	answer := func(node string, ans dataplane.Answer) map[peerKey]dataplane.Answer {
		return map[peerKey]dataplane.Answer{{node, dataplane.IPv4}: ans}
	}
	check := func(what string, got, want map[peerKey]dataplane.Answer) {
		t.Helper()
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(peerKey{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	// What the kernel knows before the peers are known is not lost.
	check("before the peers", say("10.1.0.14", dataplane.Yes, mac(14)), nil)
	moved, before := v.set(ts, u)
	if moved || len(before) != 1 || before[0].Addr.String() != "10.1.0.14" {
		t.Errorf("set: %t, %v", moved, before)
	}
	now := time.Unix(100, 0)
	log := slog.New(slog.DiscardHandler)
	v.ask(now, log)
	slices.Sort(a.asked)
	if diff := cmp.Diff([]string{"10.1.0.12", "10.1.0.13", "10.1.0.14"}, a.asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	check("an answer", say("10.1.0.12", dataplane.Yes, mac(12)), answer("10.1.0.12", dataplane.Yes))
	check("none", say("10.1.0.13", dataplane.No, dataplane.MAC{}), answer("10.1.0.13", dataplane.No))
	check("a stranger", say("10.1.0.99", dataplane.Yes, mac(99)), nil)
	// It is heard of again: asked at once.
	check("heard of", say("10.1.0.13", dataplane.Unknown, mac(13)), nil)
	if diff := cmp.Diff([]string{"10.1.0.13"}, a.probed); diff != "" {
		t.Errorf("probed (-want +got):\n%s", diff)
	}
	// A router that answers for others: its own MAC, or one for several.
	check("the gateway", say("10.1.0.1", dataplane.Yes, mac(1)), nil)
	check("the gateway's MAC", say("10.1.0.13", dataplane.Yes, mac(1)), answer("10.1.0.13", dataplane.No))
	check("another peer's MAC", say("10.1.0.14", dataplane.Yes, mac(12)), answer("10.1.0.14", dataplane.No))
	// Those that answer are left to the kernel most of the time.
	a.asked = nil
	if next := v.ask(now.Add(time.Second), log); len(a.asked) > 0 || !next.Equal(now.Add(10*time.Second)) {
		t.Errorf("asked %v too early; next at %v", a.asked, next)
	}
	v.ask(now.Add(10*time.Second), log)
	if slices.Contains(a.asked, "10.1.0.12") || len(a.asked) != 2 {
		t.Errorf("asked %v, want those that do not answer", a.asked)
	}
	a.err = errors.New("no buffer space")
	v.ask(now.Add(20*time.Second), log) // is logged, and no more
	// One that somebody enters by hand is left alone until he takes it away.
	a.err, a.asked = nil, nil
	v.note(neighbour.Event{LinkIndex: 2, Addr: netip.MustParseAddr("10.1.0.13"), Answer: dataplane.Yes, MAC: mac(13), Fixed: true})
	now = now.Add(20 * time.Second)
	for range 2 * slower {
		now = now.Add(10 * time.Second)
		v.ask(now, log)
	}
	if slices.Contains(a.asked, "10.1.0.13") || !slices.Contains(a.asked, "10.1.0.12") {
		t.Errorf("asked %v, want all but the one that is fixed", a.asked)
	}
	say("10.1.0.13", dataplane.No, dataplane.MAC{})
	if v.ask(now.Add(10*time.Second), log); !slices.Contains(a.asked, "10.1.0.13") {
		t.Errorf("asked %v, want the one too that was fixed", a.asked)
	}
	// Another gateway: everything is to be asked anew.
	u.Routes[1].Gateway = netip.MustParseAddr("10.1.0.2")
	if moved, _ := v.set(ts, u); !moved {
		t.Error("another gateway was not noticed")
	}
	if moved, _ := v.set(nil, u); moved || len(v.peers) > 0 || len(v.answers) > 0 {
		t.Errorf("peers that are gone are kept: %v, %v", v.peers, v.answers)
	}
}
