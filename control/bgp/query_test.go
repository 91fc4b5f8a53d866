package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
)

// TestLoopIsExplained: a path in which the own AS stands too often is not used,
// and what a peer sent and the explanation of the prefix say so.
func TestLoopIsExplained(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	us, sw := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	p, q := waiting(tor(h[0], h[1], 64999)), tor(h[1], h[0], 64512)
	us.apply(testConfig(h[0], 64512, nil, p))
	q.Filters = "back"
	c := testConfig(h[1], 64999, []string{"203.0.113.0/24"}, q)
	c.Filters = map[string]Filter{"back": parse(t, `{"exportV4":[{"action":"Accept","operations":[{"prependASPath":{"prefix":[64512]}}]}]}`)}
	sw.apply(c)
	poll(t, us.dump, func() bool { return us.status(h[1]).Received == 1 })
	want := fmt.Sprintf("filtered tor-%s: AS loop: AS 64512, this node's own on the session, is in the AS path 1 times, but numAllowedLocalASNumbers is 0\n", h[1])
	if got := us.explain("203.0.113.0/24"); got != want {
		t.Errorf("explained as %q, want %q", got, want)
	}
	p.AllowOwnASN = 1
	us.apply(testConfig(h[0], 64512, nil, p))
	us.waitPath("203.0.113.0/24")
	if got := us.explain("203.0.113.0/24"); !strings.HasPrefix(got, "best ") || strings.Contains(got, "filtered") {
		t.Errorf("with numAllowedLocalASNumbers 1 explained as %q", got)
	}
}

// TestOriginatorIsExplained: what this node originated does not come back to it
// by a reflector.
func TestOriginatorIsExplained(t *testing.T) {
	t.Parallel()
	c := testConfig(netip.MustParseAddr("10.1.0.11"), 64512, nil)
	r := Route{Prefix: netip.MustParsePrefix("192.168.1.0/26"), Hop: Hop{NextHop: netip.MustParseAddr("10.1.0.12")}, originator: c.RouterID}
	for asn, want := range map[uint32]bool{64512: false, 64999: true} {
		if accepted, why := newPolicy(&c).judgeImport(Peer{ASN: asn}, r.judged()); accepted != want {
			t.Errorf("from AS %d: accepted %t (%s), want %t", asn, accepted, why, want)
		}
	}
}

// TestLostTo: which step of the choice decided.
func TestLostTo(t *testing.T) {
	t.Parallel()
	path := func(length int, as ...uint32) Route { return Route{path: as, length: length} }
	med := func(r Route, n uint32) Route {
		r.MED = n
		return r
	}
	stale := Route{Hop: Hop{LongLived: true, LocalPref: 500}}
	for name, c := range map[string]struct {
		best, lost Route
		says       string
	}{
		"long-lived stale goes before preference": {Route{}, stale, "any other path is better"},
		"a set counts one":                        {med(path(2, 1, 2, 3), 5), med(path(2, 1, 4), 6), "MED 6 is more than 5"},
		"longer":                                  {path(1, 1), path(2, 1, 2), "the AS path has 2 ASes, the best one has 1"},
		"MED inside the AS":                       {Route{}, med(Route{}, 7), "MED 7 is more than 0"},
		"MED of other ASes":                       {path(1, 1), med(path(1, 2), 7), "all else equal"},
	} {
		if got := lostTo(c.best, c.lost); !strings.Contains(got, c.says) {
			t.Errorf("%s: %q, want one that says %q", name, got, c.says)
		}
	}
}

// TestQueryWhileStarting: who asks for routes between the start of the engine and the end of
// the first Apply is told by what the engine judges them.
func TestQueryWhileStarting(t *testing.T) {
	t.Parallel()
	c, err := Desired(view(t, bgpNode(t, "node1", "10.1.0.11/24")), "node1")
	if err != nil {
		t.Fatal(err)
	}
	c.ListenPort, c.ListenAddrs = 0, nil
	s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
	started, _, err := s.start(t.Context(), &c, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.halt(context.WithoutCancel(t.Context()), false); err != nil {
			t.Error(err)
		}
	})
	if e, policy, _ := s.snapshot(); e != started || policy == nil {
		t.Errorf("engine %p, want %p, which judges by %v", e, started, policy)
	}
}
