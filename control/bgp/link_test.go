package bgp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// link is a wire between two devices, each with one link-local address. Both are
// in the tests' namespace: what is sent to the other's address by a device takes
// the wire.
type link struct {
	a, b netip.Addr // with their own devices
	port uint16     // of a listener at a: 179 is other tests'
}

func newLink(t testing.TB) link {
	t.Helper()
	n := nets.Add(1)
	l := link{
		a:    netip.MustParseAddr(fmt.Sprintf("fe80::a:%x%%la%d", n, n)),
		b:    netip.MustParseAddr(fmt.Sprintf("fe80::b:%x%%lb%d", n, n)),
		port: 10000 + uint16(n),
	}
	ip(t, "link add "+l.a.Zone()+" type veth peer name "+l.b.Zone())
	t.Cleanup(func() { ip(t, "link del "+l.a.Zone()) })
	for _, end := range []netip.Addr{l.a, l.b} {
		ip(t, "link set "+end.Zone()+" addrgenmode none up")
		ip(t, "addr add "+end.WithZone("").String()+"/64 dev "+end.Zone()+" nodad")
	}
	return l
}

func ip(t testing.TB, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

// birdConf is BIRD's configuration on the b end; extra is of the session.
func (l link) birdConf(extra string) string {
	return fmt.Sprintf(`router id 10.78.0.1;
log stderr all;
protocol device {}
protocol static { ipv4; route 203.0.113.0/24 blackhole; }
protocol bgp host {
  debug { states };
  local %[1]s port 179 as 64999;
  neighbor %[2]s port %[3]d as 64512;
  interface "%[4]s";
  strict bind yes;
  direct;
  connect delay time 1; connect retry time 2; error wait time 1, 2;
  %[5]s
  ipv4 { extended next hop on; import all; export where source = RTS_STATIC; };
  ipv6 { import all; export none; };
}
`, l.b.WithZone(""), l.a.WithZone(""), l.port, l.b.Zone(), extra)
}

// linkPeer is a BGPPeer for the link of a device, with the neighbour's address
// and port.
func linkPeer(t testing.TB, device string, at netip.AddrPort, asn int) store.Event {
	t.Helper()
	spec := fmt.Sprintf(`{"peerIP":%q,"asNumber":%d}`, netip.AddrPortFrom(at.Addr().WithZone(""), at.Port()), asn)
	return labelled(t, peer(t, "tor", spec), "", fmt.Sprintf(`"routerd.io/peerInterface":%q`, device))
}

// linkNode is the store's first batch for a node that has an IPv4 address and one
// block.
func linkNode(t testing.TB, name string, port uint16, block string, more ...store.Event) store.Batch {
	t.Helper()
	return store.Batch{Synced: true, Events: append(more,
		bgpNode(t, name, hosts(t, 1)[0].String()+"/24"), conf(t, "default", fmt.Sprintf(`{"listenPort":%d}`, port)),
		ippool(t, "pool", `{"cidr":"192.168.0.0/16"}`), affinity(t, name, block, "confirmed"))}
}

// TestNodesOnLink: two nodes that have no addresses but IPv4 ones peer over a
// link.
func TestNodesOnLink(t *testing.T) {
	t.Parallel()
	l := newLink(t)
	a, b := netip.AddrPortFrom(l.a, l.port), netip.AddrPortFrom(l.b, l.port+1000)
	one, two := newDaemon(t, "node1"), newDaemon(t, "node2")
	one.SetAdjacent(map[string]Link{a.Addr().Zone(): {Up: true, Addr: a.Addr().WithZone("")}})
	two.SetAdjacent(map[string]Link{b.Addr().Zone(): {Up: true, Addr: b.Addr().WithZone("")}})
	two.send(linkNode(t, "node2", b.Port(), "192.168.2.0/26", linkPeer(t, b.Addr().Zone(), a, 64512)))
	// It will try again in some seconds, so it is the other that connects.
	poll(t, func() string { return fmt.Sprint(two.peer("tor")) }, func() bool { return strings.Contains(two.peer("tor").Info, "connection refused") })
	one.send(linkNode(t, "node1", a.Port(), "192.168.1.0/26", linkPeer(t, a.Addr().Zone(), b, 64512)))
	poll(t, func() string { return fmt.Sprint(one.peer("tor"), two.peer("tor")) },
		func() bool { return one.has("192.168.2.0/26") && two.has("192.168.1.0/26") })
}

// TestHeardOnLink: a node that has no address but an IPv4 one hears a peer that
// opens the session over link-local addresses, and nobody else there.
func TestHeardOnLink(t *testing.T) {
	t.Parallel()
	l := newLink(t)
	b := startBIRD(t, l.birdConf(""))
	d := newDaemon(t, "node1")
	d.SetAdjacent(map[string]Link{l.a.Zone(): {Up: true, Addr: l.a.WithZone("")}})
	d.send(linkNode(t, "node1", l.port, "192.168.1.0/26"))
	d.waitErr("")
	if conn, err := dialLink(t, l); err == nil {
		conn.Close()
		t.Error("a node without peers on links listens on IPv6")
	}
	// Nothing listens on that port of the peer's: it is the one that connects.
	d.send(store.Batch{Events: []store.Event{linkPeer(t, l.a.Zone(), netip.AddrPortFrom(l.b, 9), 64999)}})
	poll(t, func() string { return fmt.Sprint(d.peer("tor")) + b.log.String() }, func() bool { return d.peer("tor").State == StateUp && d.has("203.0.113.0/24") })
	b.waitFor("192.168.1.0/26", "show", "route")

	ip(t, "addr add fe80::c/64 dev "+l.b.Zone()+" nodad")
	l.b = netip.MustParseAddr("fe80::c").WithZone(l.b.Zone())
	conn, err := dialLink(t, l)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a stranger on the link was answered: %d bytes, %v", n, err)
	}
}

// dialLink connects to the a end from the b end.
func dialLink(t testing.TB, l link) (net.Conn, error) {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(l.b, 0)), Timeout: await.Patience}
	return d.DialContext(t.Context(), "tcp6", netip.AddrPortFrom(l.a.WithZone(l.b.Zone()), l.port).String())
}

// TestPasswordOnLink: passwords work over link-local addresses, whoever opens the
// session: the right one brings it up, and with a wrong one it stays down and says
// what is suspected.
func TestPasswordOnLink(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		bird  string
		port  uint16   // of the peer's that we connect to
		wrong []string // passwords; what comes without one only the peer can count
	}{
		"this side opens": {"passive on;", DefaultPort, []string{"wrong"}},
		"the peer opens":  {"", 9, []string{"wrong", ""}}, // nothing listens there
		"both sides open": {"", DefaultPort, []string{"wrong", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, l := hosts(t, 1), newLink(t)
			b := startBIRD(t, l.birdConf(c.bird+` password "right";`))
			r := newRun(t, SpeakerOptions{})
			apply := func(password string) {
				p := tor(l.a, l.b.WithZone(l.a.Zone()), 64999)
				p.Interface, p.Port, p.Password = l.a.Zone(), c.port, Password{password}
				cfg := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, p)
				cfg.ListenPort, cfg.ListenAddrs = l.port, append(cfg.ListenAddrs, netip.IPv6Unspecified())
				r.apply(cfg)
			}
			addr := l.b.WithZone(l.a.Zone())
			for _, wrong := range c.wrong {
				apply(wrong)
				if st := r.waitInfo(addr, "MD5 suspected"); st.State != StateStart {
					t.Errorf("with the password %q: %+v", wrong, st)
				}
			}
			if c.port != DefaultPort {
				r.waitInfo(addr, ":9: nothing listens there, or it is filtered (a routerd node listens for peers on links if it has such a BGPPeer itself and bindMode is not NodeIP)")
			}
			apply("right")
			r.waitUp(addr)
			r.waitPath("203.0.113.0/24")
			b.waitFor("192.168.1.0/26", "show", "route")
		})
	}
}

// TestOneAddressOnTwoLinks: neighbours of two links may have one address, and each has
// its own session and filters.
func TestOneAddressOnTwoLinks(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	one := newLink(t)
	n := nets.Add(1)
	two := link{a: one.a.WithZone(fmt.Sprintf("la%d", n)), b: one.b.WithZone(fmt.Sprintf("lb%d", n))}
	ip(t, "link add "+two.a.Zone()+" type veth peer name "+two.b.Zone())
	t.Cleanup(func() { ip(t, "link del "+two.a.Zone()) })
	for _, end := range []netip.Addr{two.a, two.b} {
		ip(t, "link set "+end.Zone()+" addrgenmode none up")
		ip(t, "addr add "+end.WithZone("").String()+"/64 dev "+end.Zone()+" nodad")
	}
	over := func(self, other netip.Addr, asn uint32) Peer {
		p := tor(self, other, asn)
		p.Name, p.Interface, p.ExtendedNextHop = "on-"+self.Zone(), self.Zone(), true
		return p
	}
	r := newRun(t, SpeakerOptions{})
	first, second := over(one.a, one.b.WithZone(one.a.Zone()), 64998), over(two.a, two.b.WithZone(two.a.Zone()), 64999)
	second.Filters = "none"
	c := testConfig(h[0], 64512, nil, first, second)
	c.Filters = map[string]Filter{"none": parse(t, `{"importV4":[{"action":"Reject"}]}`)}
	r.apply(c)
	for i, l := range []link{one, two} {
		sw := testConfig(h[i+1], []uint32{64998, 64999}[i], []string{"203.0.113.0/24"}, waiting(over(l.b, l.a.WithZone(l.b.Zone()), 64512)))
		sw.ListenAddrs = []netip.Addr{l.b}
		newRun(t, SpeakerOptions{}).apply(sw)
	}
	r.waitUp(first.Addr)
	r.waitUp(second.Addr)
	poll(t, r.dump, func() bool { return r.status(first.Addr).Accepted == 1 && r.status(second.Addr).Received == 1 })
	if p := r.waitPath("203.0.113.0/24"); p.PeerAddr != first.Addr || p.NextHop != first.Addr || len(p.More) != 0 {
		t.Errorf("path %s", p)
	}
	c.Filters = map[string]Filter{"none": parse(t, `{"importV4":[{"action":"Accept"}]}`)}
	r.apply(c)
	poll(t, r.dump, func() bool {
		p, ok := r.path("203.0.113.0/24")
		// Of equal cost; which is named first goes by the names of the devices.
		return ok && len(p.More) == 1 && (p.NextHop == first.Addr && p.More[0].NextHop == second.Addr || p.NextHop == second.Addr && p.More[0].NextHop == first.Addr)
	})
}
