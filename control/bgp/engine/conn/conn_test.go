package conn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// record is a handler that notes what it is called with.
type record struct {
	mu       sync.Mutex
	session  *fsm.Session
	ups      int
	ends     []string
	received []netip.Prefix
	hold     chan struct{} // Receive waits for it; nil: it does not
}

func (r *record) Updates(*fsm.Session) [][]byte { return nil }

func (r *record) Up(s *fsm.Session, _ *Link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.session = s
	r.ups++
}

func (r *record) Receive(s *fsm.Session, t wire.Type, body []byte) *wire.Error {
	if r.hold != nil {
		<-r.hold
	}
	if t != wire.UpdateMessage {
		return nil
	}
	d := wire.Decoder{Session: s.Wire}
	var u wire.Update
	if err := d.Decode(body, &u); err != nil {
		return &wire.Error{Code: wire.CodeUpdate, Reason: err.Error()}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, list := range []wire.NLRI{u.Announced, u.Reach} {
		for p, ok := list.Next(); ok; p, ok = list.Next() {
			r.received = append(r.received, p.Netip())
		}
	}
	return nil
}

func (r *record) Down(_ *fsm.Session, reason fsm.Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.session = nil
	r.ends = append(r.ends, reason.String())
}

func (r *record) Fail(reason fsm.Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends = append(r.ends, "failed: "+reason.String())
}

func (r *record) is(t *testing.T, what string, cond func() bool) {
	t.Helper()
	await.Until(t, what, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !cond() {
			return fmt.Errorf("session %v, %d so far, ends %q, prefixes %v", r.session != nil, r.ups, r.ends, r.received)
		}
		return nil
	})
}

func (r *record) up(t *testing.T) {
	t.Helper()
	r.is(t, "session", func() bool { return r.session != nil })
}

func config(as, peerAS, id uint32, passive bool) fsm.Config {
	o := fsm.Open{AS: as, ID: id, HoldTime: 9 * time.Second}
	o.AS4, o.Refresh, o.GracefulRestart, o.Notification, o.ExtendedMessages = true, true, true, true, true
	for i := range o.Family {
		o.Family[i].Enabled, o.Family[i].Restart = true, true
	}
	return fsm.Config{Local: o, PeerAS: peerAS, ConnectRetry: time.Second, Passive: passive, Jitter: rand.Float64}
}

// serve listens and hands connections to the peers of their addresses.
func serve(t *testing.T, at netip.Addr) (l *Listener, add func(netip.Addr, *Peer)) {
	t.Helper()
	l, err := Listen(t.Context(), netip.AddrPortFrom(at, 0))
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	peers := map[netip.Addr]*Peer{}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			p := peers[c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()]
			mu.Unlock()
			if p == nil {
				c.Close()
			} else if err := p.Accept(c); err != nil {
				t.Errorf("accept: %v", err)
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return l, func(a netip.Addr, p *Peer) {
		mu.Lock()
		defer mu.Unlock()
		peers[a] = p
	}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// pair is two peers that connect to each other, with what options set.
func pair(t *testing.T, a, b netip.Addr, set func(*Options)) (peers [2]*Peer, records [2]*record) {
	t.Helper()
	at := [2]netip.Addr{a, b}
	var listeners [2]*Listener
	var add [2]func(netip.Addr, *Peer)
	for i := range at {
		listeners[i], add[i] = serve(t, at[i])
	}
	for i := range at {
		o := Options{Peer: listeners[1-i].Addr(), Source: at[i]}
		if set != nil {
			set(&o)
		}
		if err := listeners[i].Sign(alone(at[1-i]), o.Auth); err != nil {
			t.Fatal(err)
		}
		records[i] = &record{}
		peers[i] = NewPeer(o, config(65000+uint32(i), 65001-uint32(i), uint32(i+1), false), records[i])
		t.Cleanup(peers[i].Close)
		add[i](at[1-i], peers[i])
	}
	for _, p := range peers {
		p.Start()
	}
	return peers, records
}

// TestPeers: two peers that connect at the same time have one session, signed and
// with TTL security, and the text of a shutdown comes across.
func TestPeers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, a, b string }{{"IPv4", "127.0.91.1", "127.0.91.2"}, {"IPv6", "::1", "::1"}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			peers, records := pair(t, addr(c.a), addr(c.b), func(o *Options) { o.Auth.Password, o.Hops = "secret", 1 })
			for _, r := range records {
				r.up(t)
			}
			n := fsm.Cease(fsm.CeaseShutdown, "maintenance")
			peers[0].Stop(&n)
			records[1].is(t, "reason", func() bool {
				return slices.Contains(records[1].ends, `received NOTIFICATION 6/2, hard reset: "maintenance"`)
			})
			if s := peers[0].State(); s != fsm.Idle {
				t.Errorf("stopped, but %s", s)
			}
		})
	}
}

// TestPassword: without the right password there is no connection, and with it, once
// the listener has it, there is.
func TestPassword(t *testing.T) {
	t.Parallel()
	a, b := addr("127.0.92.1"), addr("127.0.92.2")
	l, add := serve(t, b)
	r := &record{}
	p := NewPeer(Options{Peer: netip.AddrPortFrom(a, 179), Source: b}, config(65001, 65000, 2, true), r)
	defer p.Close()
	add(a, p)
	p.Start()
	if err := l.Sign(alone(a), Auth{Password: "secret"}); err != nil {
		t.Fatal(err)
	}
	for _, password := range []string{"", "wrong"} {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		o := Options{Peer: l.Addr(), Source: a}
		if c, err := o.dial(ctx, Auth{Password: password}); err == nil {
			c.Close()
			t.Errorf("connected with password %q", password)
		}
		cancel()
	}
	q := NewPeer(Options{Peer: l.Addr(), Source: a, Auth: Auth{Password: "secret"}}, config(65000, 65001, 1, false), &record{})
	defer q.Close()
	q.Start()
	r.up(t)
}

// TestManyCollisions: a hundred pairs that connect at once all have one session, and
// when they are closed no descriptor is left.
func TestManyCollisions(t *testing.T) { // not parallel: it counts descriptors
	before := descriptors(t)
	t.Run("sessions", func(t *testing.T) {
		for i := range 100 {
			_, records := pair(t, netip.AddrFrom4([4]byte{127, 1, byte(i), 1}), netip.AddrFrom4([4]byte{127, 1, byte(i), 2}), nil)
			t.Cleanup(func() {
				for _, r := range records {
					r.up(t)
					r.mu.Lock()
					defer r.mu.Unlock()
					if r.ups != 1 {
						t.Errorf("pair %d: %d sessions: %q", i, r.ups, r.ends)
					}
				}
			})
		}
	})
	await.Until(t, "descriptors", func() error {
		if n := descriptors(t); n > before+2 { // the runtime's poller, and this directory
			return fmt.Errorf("%d descriptors, %d before", n, before)
		}
		return nil
	})
}

func descriptors(t *testing.T) int {
	t.Helper()
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
}

// raw is a peer made by hand that has a session with p.
func raw(t *testing.T, l *Listener, from netip.Addr, hold time.Duration) net.Conn {
	t.Helper()
	o := Options{Peer: l.Addr(), Source: from}
	c, err := o.dial(t.Context(), o.Auth)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	conf := config(65000, 65001, 1, false)
	conf.Local.HoldTime = hold
	msg, err := conf.Local.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(wire.AppendMessage(msg, wire.Keepalive, nil)); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestBusy: a session lasts while what it brought is not handled yet, however long,
// and ends by the hold timer when nothing comes.
func TestBusy(t *testing.T) {
	t.Parallel()
	a, b := addr("127.0.93.1"), addr("127.0.93.2")
	l, add := serve(t, b)
	r := &record{hold: make(chan struct{})}
	p := NewPeer(Options{Peer: netip.AddrPortFrom(a, 179)}, config(65001, 65000, 2, true), r)
	defer p.Close()
	add(a, p)
	p.Start()
	c := raw(t, l, a, 3*time.Second)
	r.up(t)
	var pack wire.Packer
	pack.EndOfRIB(wire.IPv4)
	if _, err := c.Write(pack.Bytes()); err != nil {
		t.Fatal(err)
	}
	passed := time.NewTimer(4 * time.Second) // the hold time and more
	<-passed.C
	if s := p.State(); s != fsm.Established {
		t.Fatalf("%s while it was busy", s)
	}
	close(r.hold)
	r.is(t, "hold timer", func() bool { return slices.Contains(r.ends, "hold timer expired") })
}

// TestNeverReads: a peer that reads nothing holds up neither Stop nor Close.
func TestNeverReads(t *testing.T) {
	t.Parallel()
	a, b := addr("127.0.94.1"), addr("127.0.94.2")
	l, add := serve(t, b)
	r := &record{}
	p := NewPeer(Options{Peer: netip.AddrPortFrom(a, 179)}, config(65001, 65000, 2, true), r)
	add(a, p)
	p.Start()
	raw(t, l, a, 90*time.Second)
	r.up(t)
	start := time.Now()
	n := fsm.Cease(fsm.CeaseReset, "x")
	p.Stop(&n)
	if took := time.Since(start); took > time.Second {
		t.Errorf("Stop took %v", took)
	}
	p.Close()
	if took := time.Since(start); took > 3*lingerTime {
		t.Errorf("Close took %v", took)
	}
	late := raw(t, l, a, 90*time.Second) // accepted by a peer that is closed
	if err := late.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := late.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection to a closed peer: %v", err)
	}
}

// speaker is a peer of the program at theirs, which listens on port 17900.
func speaker(t *testing.T, ours, theirs netip.Addr, passive bool) (*Listener, *record) {
	t.Helper()
	l, add := serve(t, ours)
	if err := l.Sign(alone(theirs), Auth{Password: "secret"}); err != nil {
		t.Fatal(err)
	}
	r := &record{}
	p := NewPeer(Options{Peer: netip.AddrPortFrom(theirs, 17900), Source: ours, Auth: Auth{Password: "secret"}}, config(65000, 65001, 1, passive), r)
	t.Cleanup(p.Close)
	add(theirs, p)
	p.Start()
	return l, r
}

// gobgp starts GoBGP's server as a peer of AS 65001 that has one path.
func gobgp(t *testing.T, at netip.Addr, port int, peer netip.AddrPort, passive bool) *server.BgpServer {
	t.Helper()
	s := server.NewBgpServer(server.LoggerOption(slog.New(slog.DiscardHandler), new(slog.LevelVar)))
	go s.Serve()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(s.StartBgp(t.Context(), &api.StartBgpRequest{Global: &api.Global{
		Asn: 65001, RouterId: "10.0.0.9", ListenPort: int32(port), ListenAddresses: []string{at.String()},
	}}))
	check(s.AddPeer(t.Context(), &api.AddPeerRequest{Peer: &api.Peer{
		Conf:         &api.PeerConf{NeighborAddress: peer.Addr().String(), PeerAsn: 65000, AuthPassword: "secret"},
		Timers:       &api.Timers{Config: &api.TimersConfig{ConnectRetry: 1, HoldTime: 9, IdleHoldTimeAfterReset: 1}},
		Transport:    &api.Transport{RemotePort: uint32(peer.Port()), PassiveMode: passive, LocalAddress: at.String()},
		EbgpMultihop: &api.EbgpMultihop{Enabled: true, MultihopTtl: 255},
	}}))
	nlri, err := packet.NewIPAddrPrefix(netip.MustParsePrefix("10.9.0.0/16"))
	check(err)
	hop, err := packet.NewPathAttributeNextHop(at)
	check(err)
	_, err = s.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{{
		Family: packet.RF_IPv4_UC, Nlri: nlri, Attrs: []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP), hop},
	}}})
	check(err)
	return s
}

// TestGoBGP: a session with GoBGP's server, whoever connects, brings its path, and its
// end is known.
func TestGoBGP(t *testing.T) {
	t.Parallel()
	for i, dials := range []bool{false, true} {
		// One after the other: GoBGP's server has variables of its package.
		t.Run(fmt.Sprintf("GoBGP connects: %t", dials), func(t *testing.T) {
			ours, theirs := netip.AddrFrom4([4]byte{127, 0, 95, byte(10 + i)}), netip.AddrFrom4([4]byte{127, 0, 96, byte(10 + i)})
			l, r := speaker(t, ours, theirs, dials)
			s := gobgp(t, theirs, 17900, netip.AddrPortFrom(ours, l.Addr().Port()), !dials)
			want := netip.MustParsePrefix("10.9.0.0/16")
			r.is(t, "path", func() bool { return slices.Contains(r.received, want) })
			if err := s.StopBgp(t.Context(), &api.StopBgpRequest{}); err != nil {
				t.Fatal(err)
			}
			r.is(t, "end", func() bool { return r.session == nil && len(r.ends) > 0 })
		})
	}
}

// TestBIRD: a session with BIRD, which connects too, brings its path, comes again
// after BIRD restarts it, and its end is known.
func TestBIRD(t *testing.T) {
	t.Parallel()
	program, err := exec.LookPath("bird")
	if err != nil {
		t.Skip("no bird")
	}
	ours, theirs := addr("127.0.97.1"), addr("127.0.97.2")
	l, r := speaker(t, ours, theirs, false)
	dir := t.TempDir()
	conf := filepath.Join(dir, "bird.conf")
	text := fmt.Sprintf(`router id 10.0.0.9;
protocol device { }
protocol static { ipv4; route 10.9.0.0/16 unreachable; }
protocol bgp peer {
	local %s port 17900 as 65001; neighbor %s port %d as 65000;
	strict bind yes; multihop; password "secret"; connect delay time 1; connect retry time 1; error wait time 1, 2;
	ipv4 { import none; export all; };
}
`, theirs, ours, l.Addr().Port())
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "ctl")
	cmd := exec.CommandContext(t.Context(), program, "-f", "-c", conf, "-s", socket, "-P", filepath.Join(dir, "pid"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	want := netip.MustParsePrefix("10.9.0.0/16")
	r.is(t, "path", func() bool { return slices.Contains(r.received, want) })
	for _, command := range [][]string{{"restart", "peer"}, {"down"}} {
		r.mu.Lock()
		ends, ups := len(r.ends), r.ups
		r.mu.Unlock()
		if out, err := exec.CommandContext(t.Context(), "birdc", append([]string{"-s", socket}, command...)...).CombinedOutput(); err != nil {
			t.Fatalf("birdc %v: %v: %s", command, err, out)
		}
		r.is(t, command[0], func() bool { return len(r.ends) > ends && (command[0] == "down" || r.ups > ups && r.session != nil) })
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("bird: %v", err)
	}
}
