package bgp

import (
	"net"
	"net/netip"
	"testing"
	"time"

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

	r.waitUp(h[1])
	if now := r.status(h[1]); now.Established != 1 {
		t.Errorf("the session came up %d times", now.Established)
	}
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
