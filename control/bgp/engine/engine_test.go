package engine

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// node is an engine and a reader of what it says.
type node struct {
	*Engine
	addr   netip.Addr
	at     netip.AddrPort
	wg     sync.WaitGroup
	mu     sync.Mutex
	routes map[netip.Prefix]string
	events []string
}

// newNode starts an engine that listens at an address.
func newNode(t *testing.T, addr string, as uint32, change func(*Options)) *node {
	t.Helper()
	n := &node{addr: netip.MustParseAddr(addr), routes: map[netip.Prefix]string{}}
	b := n.addr.As16()
	o := Options{Log: slog.New(slog.DiscardHandler), AS: as, RouterID: netip.AddrFrom4([4]byte{10, b[13], b[14], b[15]}), LimitPause: time.Hour}
	if change != nil {
		change(&o)
	}
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	n.Engine = e
	if err := e.Listen(t.Context(), []netip.AddrPort{netip.AddrPortFrom(n.addr, 0)}); err != nil {
		t.Fatal(err)
	}
	n.at = e.Listening()[0]
	ctx, cancel := context.WithCancel(t.Context())
	n.wg.Go(func() { n.read(ctx) })
	t.Cleanup(func() {
		shutdown := fsm.Cease(fsm.CeaseShutdown, "")
		if err := e.Stop(context.WithoutCancel(ctx), &shutdown); err != nil {
			t.Error(err)
		}
		cancel()
		n.wg.Wait()
	})
	return n
}

func (n *node) read(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.Changed():
		}
		n.mu.Lock()
		for n.Take(1000, n.event, n.change) {
		}
		n.mu.Unlock()
	}
}

func (n *node) event(e Event) {
	text := map[EventKind]string{Up: "up", Down: "down", Failed: "failed", EndOfRIB: "end of", Expired: "expired", Withdrawn: "withdrawn", Resumed: "resumed"}[e.Kind]
	switch e.Kind {
	case EndOfRIB:
		text += " " + e.Family.String()
	case Down, Failed:
		text += ": " + e.Reason.String()
		if e.Retained {
			text += ", retained"
		}
	}
	n.events = append(n.events, e.Peer.String()+" "+text)
}

// change notes paths as "peer next-hop path pref communities", the best one first.
func (n *node) change(prefix wire.Prefix, chosen iter.Seq[*Path]) {
	p := prefix.Netip()
	var list []string
	for path := range chosen {
		list = append(list, describe(path))
	}
	if n.routes[p] = strings.Join(list, " | "); len(list) == 0 {
		delete(n.routes, p)
	}
}

func describe(p *Path) string {
	text := fmt.Sprintf("%s via %s [%s] %d", p.Peer, p.NextHopAddr(), p.PathText(), p.LocalPref)
	for c := range p.Communities() {
		text += fmt.Sprintf(" %d:%d", c>>16, c&0xffff)
	}
	if p.Flags&attrs.HasOriginator != 0 {
		text += fmt.Sprintf(" from %d by %v", p.Originator&0xff, slices.Collect(p.Clusters()))
	}
	return text
}

// peerOf is the settings by which a node speaks to another.
func (n *node) peerOf(o *node, change func(*Peer)) Peer {
	p := Peer{
		Addr: o.addr, Port: o.at.Port(), AS: o.options.AS, Source: n.addr, HoldTime: 9 * time.Second, ConnectRetry: time.Second,
		RestartTime: 60 * time.Second, Families: [wire.Families]Family{{Enabled: true}, {Enabled: true}},
	}
	if change != nil {
		change(&p)
	}
	return p
}

// has waits for the routes of a node.
func (n *node) has(t *testing.T, want map[string]string) {
	t.Helper()
	await.Until(t, "routes of "+n.addr.String(), func() error {
		n.mu.Lock()
		defer n.mu.Unlock()
		got := map[string]string{}
		for p, r := range n.routes {
			got[p.String()] = r
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("%s has %v, want %v; %q", n.addr, got, want, n.events[max(0, len(n.events)-9):])
		}
		return nil
	})
}

// hears waits for an event.
func (n *node) hears(t *testing.T, want string) {
	t.Helper()
	await.Until(t, want, func() error {
		n.mu.Lock()
		defer n.mu.Unlock()
		if !slices.Contains(n.events, want) {
			return fmt.Errorf("events %q", n.events)
		}
		return nil
	})
}

func set(t *testing.T, n *node, peers ...Peer) {
	t.Helper()
	if err := n.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
}

// origin is a path that begins at a node, whose next hop tells which: a loopback address
// is none.
func (n *node) origin(p string, change func(*Origin)) Origin {
	o := Origin{Prefix: netip.MustParsePrefix(p), LocalPref: 200, NextHop: n.hop()}
	if change != nil {
		change(&o)
	}
	return o
}

func (n *node) hop() netip.Addr {
	b := n.addr.As4()
	return netip.AddrFrom4([4]byte{192, 0, b[2], b[3]})
}

// TestTwo: what one announces the other has, in its own AS and in another; what is
// withdrawn goes, also with the session.
func TestTwo(t *testing.T) {
	t.Parallel()
	a, b, c := newNode(t, "127.0.80.1", 65000, nil), newNode(t, "127.0.80.2", 65000, nil), newNode(t, "127.0.80.3", 65001, nil)
	set(t, a, a.peerOf(b, nil), a.peerOf(c, nil))
	set(t, b, b.peerOf(a, nil))
	set(t, c, c.peerOf(a, nil))
	a.Announce([]Origin{a.origin("10.1.0.0/26", nil), a.origin("10.2.0.0/26", func(o *Origin) {
		o.NextHop, o.Communities = netip.MustParseAddr("192.0.2.1"), []uint32{65000<<16 | 7}
	}), a.origin("2001:db8::/64", func(o *Origin) { o.NextHop = netip.MustParseAddr("2001:db8::1") })})
	b.has(t, map[string]string{
		"10.1.0.0/26": "127.0.80.1 via 192.0.80.1 [] 200", "10.2.0.0/26": "127.0.80.1 via 192.0.2.1 [] 200 65000:7", "2001:db8::/64": "127.0.80.1 via 2001:db8::1 [] 200",
	})
	c.has(t, map[string]string{
		"10.1.0.0/26": "127.0.80.1 via 192.0.80.1 [65000] 0", "10.2.0.0/26": "127.0.80.1 via 192.0.2.1 [65000] 0 65000:7", "2001:db8::/64": "127.0.80.1 via 2001:db8::1 [65000] 0",
	})
	b.hears(t, "127.0.80.1 end of IPv4")
	b.hears(t, "127.0.80.1 end of IPv6")
	a.Announce([]Origin{a.origin("10.1.0.0/26", nil)})
	b.has(t, map[string]string{"10.1.0.0/26": "127.0.80.1 via 192.0.80.1 [] 200"})
	s, _ := a.Peer(b.addr)
	if s.State != fsm.Established || s.Families[wire.IPv4].Advertised != 1 || s.Out.Update == 0 || s.In.Open == 0 {
		t.Errorf("%+v", s)
	}
	set(t, a, a.peerOf(c, nil))
	b.has(t, map[string]string{})
	b.hears(t, "127.0.80.1 withdrawn")
	c.has(t, map[string]string{"10.1.0.0/26": "127.0.80.1 via 192.0.80.1 [65000] 0"})
}

// TestPasswordChange: a password that changes on both sides leaves the session as it is.
func TestPasswordChange(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "127.0.81.1", 65000, nil), newNode(t, "127.0.81.2", 65001, nil)
	for _, password := range []string{"first", "second", ""} {
		with := func(p *Peer) { p.Auth.Password = password }
		set(t, a, a.peerOf(b, with))
		set(t, b, b.peerOf(a, with))
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(len(password)), 0, 0}), 26).String()
		a.Announce([]Origin{a.origin(prefix, nil)})
		b.has(t, map[string]string{prefix: "127.0.81.1 via 192.0.81.1 [65000] 0"})
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.events {
		if strings.Contains(e, "down") {
			t.Errorf("the session was lost: %q", b.events)
		}
	}
}

// TestOtherPasswords: while two sides may have different ones of the passwords that both
// know, the side that opens the connection finds the other's, for new sessions and for one
// that is up, whoever changes first; without any password too.
func TestOtherPasswords(t *testing.T) {
	t.Parallel()
	for i, step := range []struct{ opener, acceptor string }{
		{"one", "two"}, {"one", ""},
	} {
		t.Run(step.opener+" "+step.acceptor, func(t *testing.T) {
			t.Parallel()
			host := func(last int) string { return fmt.Sprintf("127.0.%d.%d", 85+i, last) }
			a, b := newNode(t, host(1), 65000, nil), newNode(t, host(2), 65001, nil)
			give := func(opener, other, acceptor string) {
				set(t, a, a.peerOf(b, func(p *Peer) {
					p.Auth.Password, p.Others, p.HoldTime = opener, conn.Passwords{N: 1, List: [2]string{other}}, 90*time.Second
				}))
				set(t, b, b.peerOf(a, func(p *Peer) { p.Auth.Password, p.Passive, p.HoldTime = acceptor, true, 90*time.Second }))
			}
			routes := map[string]string{}
			n := 0
			// Two routes, one after the other: TCP doubles its timeout until it has measured a round trip
			// that nothing was lost of (RFC 6298, section 5), and keys are not replaced faster than that.
			carries := func() {
				t.Helper()
				for range 2 {
					n++
					prefix := fmt.Sprintf("10.%d.0.0/26", n)
					a.Announce([]Origin{a.origin(prefix, nil)})
					clear(routes)
					routes[prefix] = fmt.Sprintf("%s via %s [65000] 0", a.addr, a.hop())
					b.has(t, routes)
				}
			}
			give(step.opener, step.acceptor, step.acceptor)
			carries()
			give(step.opener, step.acceptor, step.opener)
			carries()
			give(step.acceptor, step.opener, step.opener)
			carries()
			give(step.acceptor, step.opener, step.acceptor)
			carries()
			for _, n := range []*node{a, b} {
				n.mu.Lock()
				if slices.ContainsFunc(n.events, func(e string) bool { return strings.Contains(e, "down") }) {
					t.Errorf("the session was lost: %q", n.events)
				}
				n.mu.Unlock()
			}
		})
	}
}

// TestPasswordTakenBack: once both sides have no password any more, they find each other
// again without one.
func TestPasswordTakenBack(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, "127.0.88.1", 65000, nil), newNode(t, "127.0.88.2", 65001, nil)
	both := func(hold time.Duration, password string) {
		set(t, a, a.peerOf(b, func(p *Peer) { p.Auth.Password, p.HoldTime = password, hold }))
		set(t, b, b.peerOf(a, func(p *Peer) { p.Auth.Password, p.HoldTime, p.Passive = password, hold, true }))
	}
	a.Announce([]Origin{a.origin("10.1.0.0/26", nil)})
	route := map[string]string{"10.1.0.0/26": "127.0.88.1 via 192.0.88.1 [65000] 0"}
	both(9*time.Second, "secret")
	b.has(t, route)
	both(9*time.Second, "")
	b.mu.Lock()
	b.events = nil
	b.mu.Unlock()
	if err := a.Reset(b.addr, fsm.Cease(fsm.CeaseReset, "")); err != nil {
		t.Fatal(err)
	}
	b.hears(t, "127.0.88.1 end of IPv4")
	b.has(t, route)
}

// TestRefusals: a thousand connections from an address that is no peer's cost one line of
// log; so do those of a peer that sends nothing, and a session that is up stays so.
func TestRefusals(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	a := newNode(t, "127.0.84.1", 65000, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	b, silent := newNode(t, "127.0.84.2", 65000, nil), netip.MustParseAddr("127.0.84.3")
	passive := Peer{Addr: silent, Port: 179, AS: 65000, Passive: true, HoldTime: 9 * time.Second, ConnectRetry: time.Second, Families: [wire.Families]Family{{Enabled: true}}}
	set(t, a, a.peerOf(b, nil), passive)
	set(t, b, b.peerOf(a, nil))
	b.hears(t, "127.0.84.1 end of IPv4")
	for _, from := range []netip.Addr{netip.MustParseAddr("127.0.84.9"), silent} {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
		var all sync.WaitGroup // they are there at once
		all.Add(1000)
		var g errgroup.Group
		for range 1000 {
			g.Go(func() error {
				c, err := d.DialContext(t.Context(), "tcp", a.at.String())
				all.Done()
				if err != nil {
					return err
				}
				all.Wait()
				return c.Close()
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	await.Until(t, "a line of log", func() error {
		if text := log.String(); !strings.Contains(text, "127.0.84.9") {
			return errors.New(text)
		}
		return nil
	})
	if text := log.String(); len(text) > 1000 {
		t.Errorf("%d bytes of log:\n%.2000s", len(text), text)
	}
	if s, _ := a.Peer(b.addr); s.State != fsm.Established {
		t.Errorf("the session with another peer: %s", s.State)
	}
}

// syncBuffer is a buffer for several goroutines.
type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestReflection: clients of a reflector have each other's paths, others have those of
// clients alone; two reflectors of one cluster have no loop.
func TestReflection(t *testing.T) {
	t.Parallel()
	rr, a, b, other := newNode(t, "127.0.82.1", 65000, nil), newNode(t, "127.0.82.2", 65000, nil), newNode(t, "127.0.82.3", 65000, nil), newNode(t, "127.0.82.4", 65000, nil)
	twin := newNode(t, "127.0.82.5", 65000, nil)
	client := func(p *Peer) { p.ClusterID = netip.MustParseAddr("0.0.0.9") }
	for _, r := range []*node{rr, twin} {
		peers := []Peer{r.peerOf(a, client), r.peerOf(b, client), r.peerOf(other, nil)}
		if r == rr {
			peers = append(peers, r.peerOf(twin, nil))
		} else {
			peers = append(peers, r.peerOf(rr, nil))
		}
		set(t, r, peers...)
	}
	for i, n := range []*node{a, b, other} {
		set(t, n, n.peerOf(rr, nil), n.peerOf(twin, nil))
		n.Announce([]Origin{n.origin(fmt.Sprintf("10.%d.0.0/26", i), nil)})
	}
	by := func(from int, hop string) string {
		return fmt.Sprintf("127.0.82.1 via %s [] 200 from %d by [9] | 127.0.82.5 via %s [] 200 from %d by [9]", hop, from, hop, from)
	}
	a.has(t, map[string]string{"10.0.0.0/26": "invalid IP via 192.0.82.2 [] 200", "10.1.0.0/26": by(3, "192.0.82.3"), "10.2.0.0/26": by(4, "192.0.82.4")})
	other.has(t, map[string]string{"10.2.0.0/26": "invalid IP via 192.0.82.4 [] 200", "10.0.0.0/26": by(2, "192.0.82.2"), "10.1.0.0/26": by(3, "192.0.82.3")})
	rr.has(t, map[string]string{"10.0.0.0/26": "127.0.82.2 via 192.0.82.2 [] 200", "10.1.0.0/26": "127.0.82.3 via 192.0.82.3 [] 200", "10.2.0.0/26": "127.0.82.4 via 192.0.82.4 [] 200"})
}
