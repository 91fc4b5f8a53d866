package bgp

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"

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

// TestLost: of a peer's connections only that is ended which was accepted on the
// port and which nobody reads, whatever else there is with the same peer.
func TestLost(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	const port = 11790
	accepted := func(port uint16) (here, there net.Conn) {
		t.Helper()
		l, err := net.Listen("tcp", netip.AddrPortFrom(h[0], port).String())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(h[1], 0))}
		if there, err = d.DialContext(t.Context(), "tcp", l.Addr().String()); err != nil {
			t.Fatal(err)
		}
		if here, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { here.Close(); there.Close() })
		return here, there
	}
	say := func(c net.Conn) {
		t.Helper()
		if _, err := c.Write(message(packet.BGP_MSG_KEEPALIVE, nil)); err != nil {
			t.Fatal(err)
		}
	}
	_, peerOfLost := accepted(port)
	silent, peerOfSilent := accepted(port)
	used, peerOfUsed := accepted(port)
	other, peerOfOther := accepted(port + 1) // of another program part, which is slow
	say(peerOfLost)
	say(peerOfOther)
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			if _, err := readMessage(used); err != nil {
				return
			}
		}
	})
	say(peerOfUsed)
	await.Until(t, "what was said arrives", func() error {
		all, err := connections(h[1], port)
		n := 0
		for _, c := range all {
			n += c.unread()
			unix.Close(c.fd)
		}
		if err == nil && (len(all) != 3 || n != packet.BGP_HEADER_LENGTH) {
			err = fmt.Errorf("%d connections, %d bytes unread", len(all), n)
		}
		return err
	})
	if n, err := endLost(t.Context(), h[1], port); n != 1 || err != nil {
		t.Errorf("%d ended, %v", n, err)
	}
	if _, err := peerOfLost.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the lost one: %v", err)
	}
	for name, c := range map[string][2]net.Conn{"silent": {silent, peerOfSilent}, "other": {other, peerOfOther}} {
		if _, err := c[0].Write([]byte{1}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n, err := c[1].Read(make([]byte, 1)); n != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
	say(peerOfUsed)
	used.Close()
	reader.Wait()
}
