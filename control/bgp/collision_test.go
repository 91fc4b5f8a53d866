package bgp

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/integration/await"
)

// TestCollision: a peer whose connection collides with ours decides for its own
// (RFC 4271 section 6.8), and is not left alone with it.
func TestCollision(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	listener, err := net.Listen("tcp", netip.AddrPortFrom(h[1], 179).String())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))

	theirs := opened(t, h[1], h[0]) // our OPEN came here; theirs is held back
	defer theirs.Close()
	ours, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	listener.Close()
	expect := func(conn net.Conn, want uint8) {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
			t.Fatal(err)
		}
		if m, err := readMessage(conn); err != nil || m.Header.Type != want {
			t.Fatalf("message %+v, %v: want one of type %d", m, err, want)
		}
	}
	send := func(conn net.Conn, typ uint8, body ...byte) {
		t.Helper()
		if _, err := conn.Write(message(typ, body)); err != nil {
			t.Fatal(err)
		}
	}
	open := func(conn net.Conn) {
		t.Helper()
		if err := sendOpen(conn, &Config{ASN: 64999, RouterID: netip.MustParseAddr("255.0.0.1")}, Peer{HoldTime: defaultHoldTime}); err != nil {
			t.Fatal(err)
		}
	}
	expect(ours, packet.BGP_MSG_OPEN)
	open(ours)
	expect(ours, packet.BGP_MSG_KEEPALIVE)
	open(theirs)
	send(ours, packet.BGP_MSG_NOTIFICATION, packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_CONNECTION_COLLISION_RESOLUTION)
	ours.Close()
	send(theirs, packet.BGP_MSG_KEEPALIVE)

	// Half of the hold time.
	if err := theirs.SetReadDeadline(time.Now().Add(defaultHoldTime / 2)); err != nil {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, err = readMessage(theirs)
	}
	if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Fatal("the peer's connection is neither used nor closed")
	}
	again, err := establish(t.Context(), h[1], h[0])
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	r.waitUp(h[1])
}

// opened dials a speaker until it takes the connection and sends its OPEN.
func opened(t *testing.T, from, to netip.Addr) net.Conn {
	t.Helper()
	var conn net.Conn
	await.Until(t, "an OPEN", func() error {
		c, err := dial(t.Context(), from, to)
		if err != nil {
			return err
		}
		err = c.SetDeadline(time.Now().Add(await.Patience))
		if err == nil {
			_, err = readMessage(c)
		}
		if err != nil {
			c.Close()
			return err
		}
		conn = c
		return nil
	})
	return conn
}

func TestLost(t *testing.T) {
	t.Parallel()
	const port = 179
	peer, other := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("10.1.0.3")
	conn := func(fd int, local uint16, a netip.Addr, remote uint16) connection {
		return connection{fd, netip.AddrPortFrom(netip.MustParseAddr("10.1.0.1"), local), netip.AddrPortFrom(a, remote)}
	}
	accepted, again, own := conn(3, port, peer, 40000), conn(4, port, peer, 40001), conn(5, 40002, peer, port)
	others, othersOwn := conn(6, port, other, 40000), conn(7, 40003, other, port)
	for name, c := range map[string]struct {
		state packet.FSMState
		all   []connection
		want  []connection
	}{
		"none":                {packet.BGP_FSM_OPENCONFIRM, nil, nil},
		"slow peer":           {packet.BGP_FSM_OPENCONFIRM, []connection{accepted, others, othersOwn}, nil},
		"slow peer, own":      {packet.BGP_FSM_OPENCONFIRM, []connection{own, others}, nil},
		"collided":            {packet.BGP_FSM_OPENCONFIRM, []connection{accepted, own, others, othersOwn}, []connection{accepted}},
		"collided twice":      {packet.BGP_FSM_OPENCONFIRM, []connection{accepted, own, again}, []connection{accepted, again}},
		"fallen back":         {packet.BGP_FSM_IDLE, []connection{accepted, others}, []connection{accepted}},
		"fallen back, others": {packet.BGP_FSM_IDLE, []connection{others, othersOwn}, nil},
	} {
		if diff := cmp.Diff(c.want, lost(c.all, peer, port, c.state), cmp.AllowUnexported(connection{}), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
