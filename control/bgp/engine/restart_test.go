package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// TestGracefulRestart: the routes of an engine that stops without a word stay with its
// peer until another one, at the same address, has announced its own; what that one does
// not announce goes then, and not before.
func TestGracefulRestart(t *testing.T) {
	t.Parallel()
	a := newNode(t, "127.0.85.1", 65000, nil)
	b := newNode(t, "127.0.85.2", 65000, nil)
	set(t, a, a.peerOf(b, nil))
	set(t, b, b.peerOf(a, nil))
	b.Announce([]Origin{b.origin("10.1.0.0/26", nil), b.origin("10.2.0.0/26", nil)})
	one, two := "127.0.85.2 via 192.0.85.2 [] 200", "127.0.85.2 via 192.0.85.2 [] 200"
	a.has(t, map[string]string{"10.1.0.0/26": one, "10.2.0.0/26": two})
	if err := b.Stop(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	a.hears(t, "127.0.85.2 down: connection lost, retained")
	// The next one waits for the End-of-RIB of its other peer, which never comes, until
	// its deferral ends: no route may be lost before, and 10.2.0.0/26 at that time.
	from := time.Now()
	next := newNode(t, "127.0.85.3", 65000, func(o *Options) {
		o.Restarting, o.Deferral, o.RouterID = true, 2*time.Second, netip.MustParseAddr("10.0.85.2")
	})
	next.addr = b.addr
	if err := next.Listen(t.Context(), []netip.AddrPort{b.at}); err != nil {
		t.Fatal(err)
	}
	next.Announce([]Origin{next.origin("10.1.0.0/26", nil)})
	absent := next.peerOf(a, func(p *Peer) { p.Addr, p.Passive = netip.MustParseAddr("127.0.85.99"), true })
	set(t, next, next.peerOf(a, nil), absent)
	a.is(t, "a session", func() bool { return strings.Count(strings.Join(a.events, "\n"), "127.0.85.2 up") == 2 })
	if s, _ := a.Peer(b.addr); !s.Session.Peer.Restarting || !s.Session.Peer.Family[wire.IPv4].Forwarding {
		t.Errorf("the OPEN does not say that it restarts, and forwards: %+v", s.Session.Peer)
	}
	// Its peers change meanwhile: there is none for a moment whose End-of-RIB it waits for.
	next.hears(t, "127.0.85.1 end of IPv6")
	absent.HoldTime *= 2
	set(t, next, next.peerOf(a, nil), absent)
	a.mu.Lock()
	if a.routes[netip.MustParsePrefix("10.1.0.0/26")] == "" || slices.Contains(a.events, "127.0.85.2 withdrawn") {
		t.Errorf("routes went: %v, %q", a.routes, a.events)
	}
	a.mu.Unlock()
	a.has(t, map[string]string{"10.1.0.0/26": one})
	if took := time.Since(from); took < 2*time.Second {
		t.Errorf("10.2.0.0/26 went after %s: not all of its peers had announced their routes", took)
	}
	if s, _ := a.Peer(b.addr); s.Families[wire.IPv4].Stale != 0 {
		t.Errorf("%+v", s.Families)
	}
}

// TestUnreachable: what BFD says of a peer ends its session and its routes at once, with
// a graceful restart negotiated (RFC 5882 section 4.3.2), also those that were retained
// when the session had ended before. The session comes back by itself.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "127.0.67.1", 65000, nil), newNode(t, "127.0.67.2", 65000, nil)
	set(t, a, a.peerOf(b, nil))
	set(t, b, b.peerOf(a, nil))
	b.Announce([]Origin{b.origin("10.1.0.0/26", nil)})
	has := map[string]string{"10.1.0.0/26": "127.0.67.2 via 192.0.67.2 [] 200"}
	a.has(t, has)
	b.hears(t, "127.0.67.1 end of IPv4")
	if s, _ := a.Peer(b.addr); !s.Session.Peer.Family[wire.IPv4].Enabled || s.Session.Peer.RestartTime == 0 {
		t.Fatalf("no graceful restart: %+v", s.Session.Peer)
	}
	if err := a.Unreachable(b.addr); err != nil {
		t.Fatal(err)
	}
	a.is(t, "the session's end", func() bool {
		return slices.Contains(a.events, "127.0.67.2 down: sent NOTIFICATION 6/10, hard reset") // Cease, BFD Down
	})
	a.mu.Lock()
	if i := slices.IndexFunc(a.events, func(e string) bool { return strings.HasSuffix(e, "retained") }); i >= 0 {
		t.Errorf("%q: its routes stay", a.events[i])
	}
	a.mu.Unlock()
	a.is(t, "another session", func() bool { return strings.Count(strings.Join(a.events, "\n"), "127.0.67.2 up") == 2 })
	a.has(t, has)

	if err := b.Stop(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	a.hears(t, "127.0.67.2 down: connection lost, retained")
	a.has(t, has)
	from := time.Now()
	if err := a.Unreachable(b.addr); err != nil {
		t.Fatal(err)
	}
	a.has(t, map[string]string{})
	if took := time.Since(from); took > 20*time.Second { // they would stay for a minute
		t.Errorf("they went after %s", took)
	}
}

// is waits for a condition of what a node has read.
func (n *node) is(t *testing.T, what string, cond func() bool) {
	t.Helper()
	await.Until(t, what, func() error {
		n.mu.Lock()
		defer n.mu.Unlock()
		if !cond() {
			return fmt.Errorf("routes %v, events %q", n.routes, n.events)
		}
		return nil
	})
}

// TestLimit: a peer that announces more than its limit loses the session and what it
// announced, is left alone for a while, and is tried again then.
func TestLimit(t *testing.T) {
	t.Parallel()
	a := newNode(t, "127.0.86.1", 65000, func(o *Options) { o.LimitPause = 1500 * time.Millisecond })
	b := newNode(t, "127.0.86.2", 65001, nil)
	limit := func(n int) func(*Peer) {
		return func(p *Peer) { p.Families[wire.IPv4].Limit = n }
	}
	set(t, a, a.peerOf(b, limit(2)))
	set(t, b, b.peerOf(a, nil))
	one := []Origin{b.origin("10.1.0.0/26", nil)}
	b.Announce(one)
	a.has(t, map[string]string{"10.1.0.0/26": "127.0.86.2 via 192.0.86.2 [65001] 0"})
	b.Announce(append(one, b.origin("10.2.0.0/26", nil), b.origin("10.3.0.0/26", nil)))
	a.has(t, map[string]string{})
	a.is(t, "an end by the limit", func() bool {
		return slices.ContainsFunc(a.events, func(e string) bool {
			return strings.HasPrefix(e, "127.0.86.2 down: sent NOTIFICATION 6/1, hard reset") && !strings.Contains(e, "retained")
		})
	})
	b.is(t, "a notification", func() bool {
		return slices.ContainsFunc(b.events, func(e string) bool { return strings.Contains(e, "received NOTIFICATION 6/1, hard reset") })
	})
	if s, _ := a.Peer(b.addr); !s.Limited {
		t.Error("the peer is not said to be beyond its limit")
	}
	b.Announce(one)
	a.hears(t, "127.0.86.2 resumed")
	a.has(t, map[string]string{"10.1.0.0/26": "127.0.86.2 via 192.0.86.2 [65001] 0"})
	// A higher limit leaves the session as it is.
	set(t, a, a.peerOf(b, limit(3)))
	b.Announce(append(one, b.origin("10.2.0.0/26", nil), b.origin("10.3.0.0/26", nil)))
	a.is(t, "three routes", func() bool { return len(a.routes) == 3 })
}

// TestRefresh: a peer that is asked for its routes sends them again, and none is lost
// meanwhile.
func TestRefresh(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "127.0.87.1", 65000, nil), newNode(t, "127.0.87.2", 65001, nil)
	set(t, a, a.peerOf(b, nil))
	set(t, b, b.peerOf(a, nil))
	b.Announce([]Origin{b.origin("10.1.0.0/26", nil)})
	want := map[string]string{"10.1.0.0/26": "127.0.87.2 via 192.0.87.2 [65001] 0"}
	a.has(t, want)
	before, _ := a.Peer(b.addr)
	if err := a.Refresh(b.addr, wire.IPv4); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "a refresh between its marks", func() error {
		if s, _ := a.Peer(b.addr); s.In.Refresh != before.In.Refresh+2 || s.In.Update <= before.In.Update || s.Families[wire.IPv4].Stale != 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	a.has(t, want)
	if err := a.Refresh(netip.MustParseAddr("127.0.87.9"), wire.IPv4); err == nil {
		t.Error("a peer that is not known was asked")
	}
}

// TestRejudge: a policy that changes takes effect on what is there, in both directions,
// without a message from the peer.
func TestRejudge(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "127.0.88.1", 65000, nil), newNode(t, "127.0.88.2", 65000, nil)
	set(t, a, a.peerOf(b, func(p *Peer) { p.ExportKey = "x" }))
	set(t, b, b.peerOf(a, func(p *Peer) { p.ExportKey = "x" }))
	prefix := modelPrefixes[0]
	b.Announce([]Origin{b.origin(prefix.String(), nil)})
	a.Announce([]Origin{a.origin("172.16.0.0/12", nil)})
	a.is(t, "route", func() bool { return len(a.routes) == 2 })
	for _, c := range []struct {
		policy modelPolicy
		want   string
	}{
		{modelPolicy{prefer: 1}, "127.0.88.2 via 192.0.88.2 [] 300 0:7"},
		{modelPolicy{}, "127.0.88.2 via 192.0.88.2 [] 200"},
	} {
		a.SetPolicy(c.policy)
		a.Rejudge(Scope{Import: true, Peers: []netip.Addr{b.addr}})
		a.has(t, map[string]string{prefix.String(): c.want, "172.16.0.0/12": "invalid IP via 192.0.88.1 [] 200"})
	}
	received := 0
	err := a.Query(t.Context(), Query{Table: Received, Peer: b.addr, Prefix: netip.MustParsePrefix("0.0.0.0/0")}, func(p *Path) bool {
		received++
		return true
	})
	if err != nil || received != 1 {
		t.Errorf("%d received, %v", received, err)
	}
	// The same with ExportKeys that put the peer into another group.
	b.SetPolicy(modelPolicy{withhold: 1})
	set(t, b, b.peerOf(a, func(p *Peer) { p.ExportKey = "y" }))
	a.has(t, map[string]string{"172.16.0.0/12": "invalid IP via 192.0.88.1 [] 200"})
	set(t, b, b.peerOf(a, func(p *Peer) { p.ExportKey = "x" }))
	a.has(t, map[string]string{prefix.String(): "127.0.88.2 via 192.0.88.2 [] 200", "172.16.0.0/12": "invalid IP via 192.0.88.1 [] 200"})
}

// TestReset: a session that is reset comes again, and its end says why.
func TestReset(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "127.0.89.1", 65000, nil), newNode(t, "127.0.89.2", 65001, nil)
	set(t, a, a.peerOf(b, nil))
	set(t, b, b.peerOf(a, nil))
	a.hears(t, "127.0.89.2 up")
	if err := a.Reset(b.addr, fsm.Cease(fsm.CeaseReset, "new cables")); err != nil {
		t.Fatal(err)
	}
	b.hears(t, `127.0.89.1 down: received NOTIFICATION 6/4: "new cables", retained`)
	b.is(t, "another session", func() bool { return strings.Count(strings.Join(b.events, "\n"), "127.0.89.1 up") == 2 })
}

// TestForwardingAfterRestart: a peer that is configured when a restart is over is not asked to wait for it any more, and keeps what it
// has of this host all the same (RFC 4724 section 4.2 has it drop what comes back without F).
func TestForwardingAfterRestart(t *testing.T) {
	t.Parallel()
	for _, restarting := range []bool{true, false} {
		now := time.Unix(1e9, 0)
		c := newCore(Options{AS: 65000, RouterID: netip.MustParseAddr("10.0.0.99"), Restarting: restarting, Deferral: time.Second}, now)
		p := Peer{Addr: netip.MustParseAddr("10.1.0.1"), AS: 65001, RestartTime: time.Minute}
		p.Families[wire.IPv4] = Family{Enabled: true, StaleTime: time.Minute}
		for _, late := range []bool{false, true} {
			if late {
				c.table.at(now.Add(time.Second))
				c.tick()
			}
			o := c.openOf(&p).Local
			f := o.Family[wire.IPv4]
			if o.Restarting != (restarting && !late) || f.Forwarding != restarting || f.LongLivedForwarding != restarting {
				t.Errorf("restarting %t, after its end %t: the OPEN says R %t, F %t, and %t for RFC 9494", restarting, late, o.Restarting, f.Forwarding, f.LongLivedForwarding)
			}
		}
	}
}

// TestRefreshBeforeEndOfRIB: what is kept of a peer that restarts goes with its End-of-RIB, and not with the end of a refresh
// that is marked before (RFC 7313 section 4). One that restarts itself marks none before.
func TestRefreshBeforeEndOfRIB(t *testing.T) {
	t.Parallel()
	c, peers, _ := hand(2)
	p := peers[1]
	mark := func(subtype byte) {
		t.Helper()
		if fault := c.receive(p, p.session, wire.RouteRefresh, []byte{0, 1, subtype, 1}); fault != nil {
			t.Fatal(fault)
		}
		for c.work() {
		}
	}
	end := func() {
		var pack wire.Packer
		pack.EndOfRIB(wire.IPv4)
		feed(t, c, p, pack.Bytes(), func() {})
		for c.work() {
		}
	}
	had := func(when string, fresh, stale int) {
		t.Helper()
		if f, s := c.table.rib.Count(p.number, wire.IPv4); f != fresh || s != stale {
			t.Errorf("%s: %d paths and %d stale ones, want %d and %d", when, f, s, fresh, stale)
		}
	}
	feed(t, c, p, announcements(1, 3), func() {})
	end()
	session := p.session
	c.down(p, session, fsm.Reason{Cause: fsm.Lost})
	c.up(p, session, func() {})
	mark(1)
	mark(2)
	had("marked before End-of-RIB", 0, 3)
	feed(t, c, p, announcements(1, 2), func() {})
	mark(1)
	end()
	had("after End-of-RIB", 2, 0)
	mark(2)
	had("the end of a refresh that was ignored", 2, 0)
	mark(1)
	had("a refresh", 0, 2)
	feed(t, c, p, announcements(1, 1), func() {})
	mark(2)
	had("after a refresh", 1, 0)
}
