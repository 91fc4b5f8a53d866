package bgp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/bgp/engine"
)

// pair starts two speakers that peer with each other inside one AS.
func pair(t *testing.T, announce1, announce2 []string) (a, b *run, h []netip.Addr) {
	t.Helper()
	h = hosts(t, 2)
	a, b = newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	a.apply(testConfig(h[0], 64512, announce1, to(h[0], h[1], 64512)))
	b.apply(testConfig(h[1], 64512, announce2, to(h[1], h[0], 64512)))
	a.waitUp(h[1])
	b.waitUp(h[0])
	return a, b, h
}

func TestMeshSession(t *testing.T) {
	t.Parallel()
	a, b, h := pair(t, []string{"192.168.1.0/26", "192.168.9.5/32"}, []string{"192.168.2.0/26", "10.0.0.0/8"})
	got := a.waitPath("192.168.2.0/26")
	want := Hop{
		NextHop: h[1], Peer: "node-" + h[1].String(), PeerAddr: h[1], IBGP: true, LocalPref: LocalPref,
	}
	if diff := cmp.Diff(want, *got.Hop, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" || len(got.More) > 0 {
		t.Errorf("path (-want +got):\n%s", diff)
	}
	b.waitPath("192.168.1.0/26")
	b.waitPath("192.168.9.5/32")
	poll(t, a.dump, func() bool { return a.happened(0, "synced") == 1 })
	if _, ok := a.path("192.168.1.0/26"); ok {
		t.Error("an own path was reported as learned")
	}
	if _, ok := a.path("10.0.0.0/8"); ok {
		t.Error("a node's prefix outside the pools was accepted")
	}
	if diff := cmp.Diff("reset", a.history[0]); diff != "" {
		t.Errorf("first change (-want +got):\n%s", diff)
	}
	poll(t, a.dump, func() bool {
		st := a.status(h[1])
		return st.Info == "Established" && st.Type == PeerMesh && st.Received == 2 && st.Accepted == 1 && st.Advertised == 2 && st.ASN == 64512
	})
	st := a.status(h[1])
	if diff := cmp.Diff([]FamilyCounts{{"ipv4", 2, 1, 2}}, st.Families); diff != "" || st.FSMState != 6 || st.Established != 1 || st.In.Update == 0 || st.Out.Open != 1 || len(st.Resets) != 0 {
		t.Errorf("counters %+v; families (-want +got):\n%s", st.Counters, diff)
	}
	routes, err := a.Routes(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if len(routes) != 1 || routes[0].String() != got.String() {
		t.Errorf("routes %v, want only %v", routes, got)
	}
}

// TestApplyTouchesOnlyWhatChanged adds, changes and removes a peer, prefixes
// and import sets beside a session that must stay.
func TestApplyTouchesOnlyWhatChanged(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	a, b, c := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	first := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, to(h[0], h[1], 64512))
	a.apply(first)
	b.apply(testConfig(h[1], 64512, []string{"192.168.2.0/26", "192.168.2.64/26"}, to(h[1], h[0], 64512)))
	c.apply(testConfig(h[2], 64512, []string{"192.168.3.0/26"}, to(h[2], h[0], 64512)))
	since := a.waitUp(h[1]).Since
	b.waitPath("192.168.1.0/26")
	a.waitPath("192.168.2.64/26")

	second := testConfig(h[0], 64512, []string{"192.168.1.64/26"}, to(h[0], h[1], 64512), to(h[0], h[2], 64512))
	second.Own = append(second.Own, netip.MustParsePrefix("192.168.2.64/26")) // claimed by us, says the store
	a.apply(second)
	b.waitPath("192.168.1.64/26")
	b.waitNoPath("192.168.1.0/26")
	a.waitNoPath("192.168.2.64/26")
	a.waitPath("192.168.3.0/26")
	c.waitPath("192.168.1.64/26")

	slow := to(h[0], h[2], 64512)
	slow.RestartTime = time.Minute
	a.apply(testConfig(h[0], 64512, []string{"192.168.1.64/26"}, to(h[0], h[1], 64512), slow))
	a.waitPath("192.168.2.64/26") // nobody's any more: accepted again without a word of the peer
	a.waitUp(h[2])
	a.apply(testConfig(h[0], 64512, []string{"192.168.1.64/26"}, to(h[0], h[1], 64512)))
	a.waitNoPath("192.168.3.0/26")
	c.waitInfo(h[0], "cease, peer de-configured")

	if st := a.status(h[1]); st.State != StateUp || !st.Since.Equal(since) {
		t.Errorf("the session that did not change is %+v, up since %s before", st, since)
	}
	if n := a.happened(0, "del 192.168.2.0/26"); n != 0 {
		t.Errorf("its route went %d times", n)
	}
}

// TestNoTransit holds that nothing learned is passed on: neither between two
// switches, nor between the mesh and a switch.
func TestNoTransit(t *testing.T) {
	t.Parallel()
	h := hosts(t, 4)
	us, torA, torB, mate := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	us.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, tor(h[0], h[1], 65001), tor(h[0], h[2], 65002), to(h[0], h[3], 64512)))
	torA.apply(testConfig(h[1], 65001, []string{"203.0.113.0/24"}, tor(h[1], h[0], 64512)))
	torB.apply(testConfig(h[2], 65002, []string{"198.51.100.0/24"}, tor(h[2], h[0], 64512)))
	mate.apply(testConfig(h[3], 64512, []string{"192.168.4.0/26"}, tor(h[3], h[0], 64512)))
	for _, r := range []*run{torA, torB, mate} {
		r.waitPath("192.168.1.0/26")
	}
	if p := us.waitPath("203.0.113.0/24"); p.ASPath != "65001" || p.IBGP || p.LocalPref != 0 || p.NextHop != h[1] {
		t.Errorf("path from the switch: %+v", p)
	}
	us.waitPath("198.51.100.0/24")
	us.waitPath("192.168.4.0/26")
	// What is announced now comes after all that could have been passed on.
	us.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26", "192.168.1.64/26"}, tor(h[0], h[1], 65001), tor(h[0], h[2], 65002), to(h[0], h[3], 64512)))
	for _, r := range []*run{torA, torB, mate} {
		r.waitPath("192.168.1.64/26")
		r.mu.Lock()
		if len(r.paths) != 2 {
			t.Errorf("a peer learned %v", r.paths)
		}
		r.mu.Unlock()
	}
}

func TestImport(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	us, mate, sw := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, to(h[0], h[1], 64512), tor(h[0], h[2], 64999))
	c.Own = append(c.Own, netip.MustParsePrefix("10.1.0.0/24"))
	c.Borrowed = []netip.Prefix{netip.MustParsePrefix("192.168.1.7/32")}
	us.apply(c)
	everything := []string{
		"0.0.0.0/0", "0.1.0.0/16", "127.0.0.0/8", "127.9.0.0/16", "169.254.1.0/24", "224.0.0.0/4", "239.1.1.0/24", "240.0.0.0/8",
		"10.1.0.0/24", "10.1.0.12/32", "192.168.1.0/26", "192.168.1.9/32", "192.168.1.7/32",
		"192.168.0.0/16", "192.168.2.0/26", "192.0.0.0/8", "10.2.0.0/24", "8.8.8.0/24",
	}
	from := func(i int, asn uint32, last string) Config {
		return testConfig(h[i], asn, append(append([]string{}, everything...), last), tor(h[i], h[0], 64512))
	}
	accepted := func() string {
		var l []string
		us.mu.Lock()
		defer us.mu.Unlock()
		for _, e := range everything {
			if _, ok := us.paths[netip.MustParsePrefix(e)]; ok {
				l = append(l, e)
			}
		}
		return strings.Join(l, " ")
	}
	mate.apply(from(1, 64512, "192.168.250.0/24"))
	us.waitPath("192.168.250.0/24")
	poll(t, accepted, func() bool {
		return us.status(h[1]).Received == len(everything)+1 && accepted() == "192.168.1.7/32 192.168.0.0/16 192.168.2.0/26"
	})
	mate.apply(testConfig(h[1], 64512, nil, tor(h[1], h[0], 64512)))
	poll(t, accepted, func() bool { return accepted() == "" })

	sw.apply(from(2, 64999, "100.64.0.0/24"))
	us.waitPath("100.64.0.0/24")
	const want = "192.168.0.0/16 192.168.2.0/26 192.0.0.0/8 10.2.0.0/24 8.8.8.0/24"
	poll(t, accepted, func() bool { return us.status(h[2]).Received == len(everything)+1 && accepted() == want })
}

// TestBorrowedAddressStays: a node that announces an address that this node has
// borrowed, with a higher preference, does not get it.
func TestBorrowedAddressStays(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	us, liar := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	c, err := Desired(view(t, bgpNode(t, "node1", h[0].String()), bgpNode(t, "node2", h[1].String()), ippool(t, "p", `{"cidr":"192.168.0.0/16"}`),
		affinity(t, "node2", "192.168.2.0/29", "confirmed"), ipamBlock(t, "192.168.2.0/29", "host:node2", map[int]string{5: of("node1")})), "node1")
	if err != nil {
		t.Fatal(err)
	}
	c.ListenAddrs, c.Peers[0].Passive = []netip.Addr{h[0]}, true
	us.apply(c)
	p := to(h[1], h[0], 64512)
	p.Passive, p.Filters = false, "dear"
	said := testConfig(h[1], 64512, []string{"192.168.2.0/29", "192.168.2.5/32"}, p)
	said.Filters = map[string]Filter{"dear": parse(t, `{"exportV4":[{"action":"Accept","operations":[{"setPriority":{"value":1}}]}]}`)}
	liar.apply(said)
	us.waitPath("192.168.2.0/29")
	poll(t, us.dump, func() bool { return us.status(h[1]).Received == 2 })
	l, err := us.Explain(t.Context(), netip.MustParsePrefix("192.168.2.5/32"))
	if err != nil || len(l) < 2 || !l[0].Own || l[1].State != RouteFiltered {
		t.Errorf("explained as %+v, %v; want our own first, and the other refused", l, err)
	}
	if _, ok := us.path("192.168.2.5/32"); ok {
		t.Error("it was taken up")
	}
}

// TestSyncedRule: peers that answer make it soon, a dead one delays it to the
// limit, without peers it comes at once.
func TestSyncedRule(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	alone := newRun(t, SpeakerOptions{SyncTimeout: time.Hour})
	alone.apply(testConfig(h[0], 64512, nil))
	poll(t, alone.dump, func() bool { return alone.happened(0, "synced") == 1 })

	waiting := newRun(t, SpeakerOptions{SyncTimeout: 4 * time.Second})
	began := time.Now()
	waiting.apply(testConfig(h[1], 64512, nil, to(h[1], h[2], 64512)))
	poll(t, waiting.dump, func() bool { return waiting.happened(0, "synced") == 1 })
	if d := time.Since(began); d < 4*time.Second {
		t.Errorf("synced after %s although a peer was awaited", d)
	}
	blocked := newRun(t, SpeakerOptions{SyncTimeout: time.Hour})
	p := to(h[2], h[1], 64512)
	p.Problem = "spec.password is not supported"
	blocked.apply(testConfig(h[2], 64512, nil, p))
	poll(t, blocked.dump, func() bool { return blocked.happened(0, "synced") == 1 })
	if st := blocked.status(h[1]); st.State != StateDown || st.Info != p.Problem || st.Since.IsZero() {
		t.Errorf("blocked peer is %+v", st)
	}
	// The kernel counts refused segments of the whole network namespace: those of other tests' sessions are suspected here too.
	info, _, _ := strings.Cut(waiting.waitInfo(h[2], "passive").Info, "; MD5 suspected: ")
	if info != "passive: waiting for the peer to connect" {
		t.Errorf("info %q", info)
	}
}

// TestNewIdentity changes the AS: sessions go, routes stay told until the new
// ones are there.
func TestNewIdentity(t *testing.T) {
	t.Parallel()
	a, b, h := pair(t, []string{"192.168.1.0/26"}, []string{"192.168.2.0/26", "192.168.3.0/26"})
	a.waitPath("192.168.2.0/26")
	a.waitPath("192.168.3.0/26")
	from := a.mark()
	ca := testConfig(h[0], 64600, []string{"192.168.1.0/26"}, to(h[0], h[1], 64600))
	a.apply(ca)
	b.apply(testConfig(h[1], 64600, []string{"192.168.2.0/26"}, to(h[1], h[0], 64600)))
	a.waitUp(h[1])
	a.waitNoPath("192.168.3.0/26") // it did not come again
	if n := a.happened(from, "del 192.168.2.0/26"); n != 0 {
		t.Errorf("a route that came again was withdrawn %d times in between", n)
	}
	if n := a.happened(from, "reset"); n != 0 {
		t.Error("told to forget everything")
	}
}

func TestApplyRefusesNonsense(t *testing.T) {
	t.Parallel()
	s := NewSpeaker(SpeakerOptions{Log: testLog(t)})
	for _, c := range []Config{{}, {ASN: 1}, {ASN: 1, RouterID: netip.MustParseAddr("fd00::1")}} {
		if err := s.Apply(context.Background(), c); err == nil || !strings.Contains(err.Error(), "router id") {
			t.Errorf("Apply(%+v): error %v", c, err)
		}
	}
	if err := s.Stop(context.Background(), true); err != nil {
		t.Error(err)
	}
	if err := s.Apply(context.Background(), testConfig(netip.MustParseAddr("10.77.0.1"), 1, nil)); err != ErrStopped {
		t.Errorf("Apply after Stop: %v, want %v", err, ErrStopped)
	}
}

// BenchmarkPeerChanges is what a peer that comes and goes costs beside 1,000 others, which
// are not dialled.
func BenchmarkPeerChanges(b *testing.B) {
	c, err := Desired(view(b, bgpNode(b, "node1", "10.1.0.11/24")), "node1")
	if err != nil {
		b.Fatal(err)
	}
	c.ListenPort, c.ListenAddrs, c.Peers = 0, nil, nil
	for i := range 1001 {
		c.Peers = append(c.Peers, Peer{
			Name: fmt.Sprint(i), Addr: netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), ASN: c.ASN, Passive: true, HoldTime: 90 * time.Second,
		})
	}
	fewer := c
	fewer.Peers = c.Peers[:1000]
	s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
	b.Cleanup(func() {
		if err := s.Stop(context.WithoutCancel(b.Context()), false); err != nil {
			b.Error(err)
		}
	})
	apply := func(c Config) {
		if err := s.Apply(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
	begin := time.Now()
	apply(fewer)
	b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms-to-start")
	for b.Loop() {
		apply(c)
		apply(fewer)
	}
}

// TestRefusedRemoval: a peer whose removal the engine answers with an error, as where the kernel keeps its
// keys, is no session any more, so that it is one again when it comes back.
func TestRefusedRemoval(t *testing.T) {
	t.Parallel()
	c, err := Desired(view(t, bgpNode(t, "node1", "10.1.0.11/24")), "node1")
	if err != nil {
		t.Fatal(err)
	}
	c.ListenPort, c.ListenAddrs = 0, nil
	c.Peers = []Peer{{Name: "tor", Addr: netip.MustParseAddr("10.9.0.1"), ASN: c.ASN, Passive: true, HoldTime: 90 * time.Second}}
	s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { _ = s.Stop(context.WithoutCancel(t.Context()), false) }) // its engine has ended
	if err := s.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := s.engine.Engine.Stop(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	c.Peers = nil
	if err := s.Apply(t.Context(), c); !errors.Is(err, engine.ErrStopped) {
		t.Errorf("removal: %v, want %v", err, engine.ErrStopped)
	}
	if n := len(s.sessions); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
}
