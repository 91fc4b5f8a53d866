package bgp

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// message frames a body as RFC 4271 section 4.1 has it.
func message(typ byte, body []byte) []byte {
	m := bytes.Repeat([]byte{0xff}, 16)
	m = binary.BigEndian.AppendUint16(m, uint16(19+len(body)))
	return append(append(m, typ), body...)
}

// updateWith is an UPDATE with these path attributes and NLRI.
func updateWith(nlri []byte, attrs ...[]byte) []byte {
	all := bytes.Join(attrs, nil)
	body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(all)))
	return message(2, append(append(body, all...), nlri...))
}

func attr(flags, typ byte, val ...byte) []byte {
	return append([]byte{flags, typ, byte(len(val))}, val...)
}

// malformed are messages that no speaker should send.
func malformed() map[string][]byte {
	origin, path, hop := attr(0x40, 1, 0), attr(0x40, 2, 2, 1, 0, 0, 0xfd, 0xe7), attr(0x40, 3, 10, 77, 0, 1)
	net24 := []byte{24, 203, 0, 113}
	marker := message(4, nil)
	marker[3] = 0
	short := message(4, nil)
	short[17] = 18
	long := message(2, nil)
	binary.BigEndian.PutUint16(long[16:], 0xffff)
	m := map[string][]byte{
		"unknown type":               message(9, nil),
		"type zero":                  message(0, nil),
		"wrong marker":               marker,
		"length below header":        short,
		"length beyond limit":        long,
		"empty update":               message(2, []byte{0}),
		"withdrawn beyond end":       message(2, []byte{0xff, 0xff, 0, 0}),
		"attributes beyond end":      message(2, []byte{0, 0, 0xff, 0xff}),
		"truncated MP_REACH":         updateWith(nil, origin, path, attr(0x80, 14, 0, 2)),
		"MP_REACH without next hop":  updateWith(nil, origin, path, attr(0x80, 14, 0, 2, 1, 0, 0)),
		"MP_REACH next hop too long": updateWith(nil, origin, path, attr(0x80, 14, 0, 1, 1, 200, 0)),
		"empty MP_REACH":             updateWith(nil, origin, path, attr(0x80, 14)),
		"empty MP_UNREACH":           updateWith(nil, attr(0x80, 15)),
		"prefix of 33 bits":          updateWith([]byte{33, 203, 0, 113, 0, 0}, origin, path, hop),
		"prefix cut short":           updateWith([]byte{24, 203}, origin, path, hop),
		"no attributes":              updateWith(net24),
		"no next hop":                updateWith(net24, origin, path),
		"next hop of 3 bytes":        updateWith(net24, origin, path, attr(0x40, 3, 10, 77, 0)),
		"AS path cut short":          updateWith(net24, origin, attr(0x40, 2, 2, 9, 0), hop),
		"empty communities":          updateWith(net24, origin, path, hop, attr(0xc0, 8, 1)),
		"aggregator of 1 byte":       updateWith(net24, origin, path, hop, attr(0xc0, 7, 1)),
		"origin twice":               updateWith(net24, origin, origin, path, hop),
		"MP_REACH twice":             updateWith(nil, attr(0x80, 14, 0, 1, 1, 4, 10, 77, 0, 1, 0), attr(0x80, 14, 0, 1, 1, 4, 10, 77, 0, 1, 0)),
		"unknown well-known":         updateWith(net24, origin, path, hop, attr(0x40, 99, 1, 2, 3)),
		"route refresh of 1 byte":    message(5, []byte{0}),
		"open in established":        message(1, []byte{4, 0xfd, 0xe7, 0, 90, 10, 77, 0, 1, 0}),
		"open cut short":             message(1, []byte{4}),
		"notification without code":  message(3, nil),
		"notification":               message(3, []byte{6, 200, 1, 2, 3}),
	}
	for typ := byte(4); typ < 41; typ++ {
		m[fmt.Sprintf("attribute %d empty", typ)] = updateWith(net24, origin, path, hop, attr(0xc0, typ))
		m[fmt.Sprintf("attribute %d of one byte", typ)] = updateWith(net24, origin, path, hop, attr(0xc0, typ, 0xff))
	}
	return m
}

// TestMalformedMessages sends each from a configured peer of its own to one
// live speaker, in an established session and instead of an OPEN. The speaker
// and the session beside must not notice.
func TestMalformedMessages(t *testing.T) {
	t.Parallel()
	h := hosts(t, 200)
	us, good := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	names, messages := []string{}, malformed()
	for name := range messages {
		names = append(names, name)
	}
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, to(h[0], h[1], 64512))
	for i := range names {
		p := tor(h[0], h[2+i], 64999)
		p.Passive = true
		c.Peers = append(c.Peers, p)
	}
	us.apply(c)
	good.apply(testConfig(h[1], 64512, []string{"192.168.2.0/26"}, to(h[1], h[0], 64512)))
	since := us.waitUp(h[1]).Since
	us.waitPath("192.168.2.0/26")

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	errs := make(chan error, len(names))
	for i, name := range names {
		go func() {
			if err := misbehave(ctx, h[2+i], h[0], messages[name]); err != nil {
				errs <- fmt.Errorf("%s: %w", name, err)
				return
			}
			errs <- nil
		}()
	}
	for range names {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if st := us.status(h[1]); st.State != StateUp || !st.Since.Equal(since) {
		t.Errorf("the good session is %+v, up since %s before", st, since)
	}
	good.apply(testConfig(h[1], 64512, []string{"192.168.2.0/26", "192.168.3.0/26"}, to(h[1], h[0], 64512)))
	us.waitPath("192.168.3.0/26")
	if n := us.happened(0, "del 192.168.2.0/26"); n != 0 {
		t.Errorf("the good route went %d times", n)
	}
}

// misbehave says the message where an OPEN is due, then in an established
// session, and waits for what the speaker does.
func misbehave(ctx context.Context, from, to netip.Addr, msg []byte) error {
	conn, err := dial(ctx, from, to)
	if err != nil {
		return err
	}
	if _, err := conn.Write(msg); err != nil {
		return err
	}
	if err := conn.Close(); err != nil {
		return err
	}
	conn, err = establish(ctx, from, to)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write(msg); err != nil {
		return err
	}
	// Either the speaker goes on (a KEEPALIVE is answered by nothing, but an
	// UPDATE of ours is taken) or it ends the session: both are right.
	if err := conn.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	for {
		if _, err := readMessage(conn); err != nil {
			return nil
		}
	}
}

func dial(ctx context.Context, from, to netip.Addr) (net.Conn, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	return d.DialContext(ctx, "tcp", netip.AddrPortFrom(to, DefaultPort).String())
}

// establish brings up a session by hand; a speaker that has just been offended
// takes none for a while.
func establish(ctx context.Context, from, to netip.Addr) (net.Conn, error) {
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		conn, err := tryEstablish(ctx, from, to)
		if err == nil {
			return conn, nil
		}
		last = err
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("no session: %w", last)
		case <-tick.C:
		}
	}
}

func tryEstablish(ctx context.Context, from, to netip.Addr) (_ net.Conn, err error) {
	c, err := dial(ctx, from, to)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	err = handshake(c, from)
	return c, err
}

// handshake does what comes before Established, from the peer's side.
func handshake(conn net.Conn, from netip.Addr) error {
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := readMessage(conn); err != nil { // its OPEN
		return err
	}
	if err := sendOpen(conn, &Config{ASN: 64999, RouterID: from}, Peer{HoldTime: defaultHoldTime}); err != nil {
		return err
	}
	if _, err := conn.Write(message(packet.BGP_MSG_KEEPALIVE, nil)); err != nil {
		return err
	}
	m, err := readMessage(conn)
	if err == nil && m.Header.Type != packet.BGP_MSG_KEEPALIVE {
		err = fmt.Errorf("answered with message type %d", m.Header.Type)
	}
	return err
}
