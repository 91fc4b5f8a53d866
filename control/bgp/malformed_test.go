package bgp

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/integration/await"
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
	maps.Copy(m, absurd())
	for typ, val := range knownAttributes() {
		long := attr(0xc0, typ, val...)
		long[2] += 50
		m[fmt.Sprintf("attribute %d beyond the end", typ)] = updateWith(net24, origin, path, hop, long)
		m[fmt.Sprintf("attribute %d twice with wrong flags", typ)] = updateWith(net24, origin, path, hop, attr(0x20, typ, val...), attr(0x60, typ, val...))
		m[fmt.Sprintf("attribute %d cut short", typ)] = updateWith(net24, origin, path, hop, attr(0xc0, typ, val[:len(val)-1]...))
	}
	for i := range uint64(24) {
		m[fmt.Sprintf("mutation %d", i)] = mutations(i, updateWith(net24, origin, path, hop, attr(0xc0, 8, 0xfd, 0xe7, 0, 1)))
	}
	return m
}

// knownAttributes are right values of path attributes (RFC 4271, 1997, 4456,
// 4760, 4360, 6793, 6514, 5512, 5701, 7311, 8092, 9234).
func knownAttributes() map[byte][]byte {
	return map[byte][]byte{
		1: {0}, 2: {2, 1, 0, 0, 0xfd, 0xe7}, 3: {10, 77, 0, 1}, 4: {0, 0, 0, 1}, 5: {0, 0, 0, 100}, 7: {0, 0, 0xfd, 0xe7, 10, 0, 0, 1},
		8: {0xfd, 0xe7, 0, 1}, 9: {10, 0, 0, 1}, 10: {10, 0, 0, 1}, 14: {0, 2, 1, 16, 0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 32, 0x20, 1, 0xd, 0xb8},
		15: {0, 2, 1, 32, 0x20, 1, 0xd, 0xb8}, 16: {0, 2, 0xfd, 0xe7, 0, 0, 0, 1}, 17: {2, 1, 0, 0, 0xfd, 0xe7}, 18: {0, 0, 0xfd, 0xe7, 10, 0, 0, 1},
		22: {0, 6, 0, 0, 0, 10, 0, 0, 1}, 23: {0, 8, 0, 0}, 25: {0, 2, 0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1},
		26: {1, 0, 11, 0, 0, 0, 0, 0, 0, 0, 1}, 32: {0, 0, 0xfd, 0xe7, 0, 0, 0, 1, 0, 0, 0, 2}, 35: {0, 0, 0xfd, 0xe7}, 40: {1, 0, 7, 0, 0, 0, 0, 0, 0, 1},
	}
}

// absurd are messages of the right form that make no sense.
func absurd() map[string][]byte {
	origin, path := attr(0x40, 1, 0), attr(0x40, 2, 2, 1, 0, 0, 0xfd, 0xe7)
	net24 := []byte{24, 203, 0, 113}
	open := func(version byte, hold uint16, id [4]byte, options ...byte) []byte {
		b := binary.BigEndian.AppendUint16([]byte{version, 0xfd, 0xe7}, hold)
		return message(1, append(append(append(b, id[:]...), byte(len(options))), options...))
	}
	id := [4]byte{10, 77, 0, 1}
	extended := func(typ byte, val []byte) []byte {
		return append(binary.BigEndian.AppendUint16([]byte{0x50, typ}, uint16(len(val))), val...)
	}
	var segments []byte
	for range 600 {
		segments = append(segments, 2, 1, 0, 0, 0xfd, 0xe7)
	}
	length := func(n uint16, m []byte) []byte {
		binary.BigEndian.PutUint16(m[16:], n)
		return m
	}
	m := map[string][]byte{
		"600 segments":           updateWith(net24, origin, extended(2, segments), attr(0x40, 3, id[:]...)),
		"1000 empty segments":    updateWith(net24, origin, extended(2, bytes.Repeat([]byte{2, 0}, 1000)), attr(0x40, 3, id[:]...)),
		"segment of no type":     updateWith(net24, origin, attr(0x40, 2, 9, 1, 0, 0, 0xfd, 0xe7), attr(0x40, 3, id[:]...)),
		"version 3":              open(3, 90, id),
		"version 255":            open(255, 90, id),
		"hold time 1":            open(4, 1, id),
		"hold time 2":            open(4, 2, id),
		"router id 0":            open(4, 90, [4]byte{}),
		"capabilities beyond":    open(4, 90, id, 2, 200, 1, 4),
		"capability too long":    open(4, 90, id, 2, 6, 1, 200, 0, 1, 0, 1),
		"capability too short":   open(4, 90, id, 2, 4, 65, 2, 0, 1),
		"restart cut short":      open(4, 90, id, 2, 3, 64, 1, 0),
		"options beyond":         append(open(4, 90, id)[:28], 255),
		"length 4097":            length(4097, message(2, make([]byte, 100))),
		"length beyond what is":  length(60, message(4, nil)),
		"update without lengths": message(2, nil),
		"keepalive with a body":  message(4, []byte{1, 2, 3}),
		"refresh of no family":   message(5, []byte{0xff, 0xff, 9, 9}),
	}
	for name, hop := range map[string][4]byte{"nobody": {}, "many": {224, 0, 0, 1}, "itself": {127, 0, 0, 1}, "all": {255, 255, 255, 255}} {
		m["next hop is "+name] = updateWith(net24, origin, path, attr(0x40, 3, hop[:]...))
	}
	return m
}

// mutations are variations of a message, the header's length kept right so that
// all of them are read.
func mutations(seed uint64, msg []byte) []byte {
	rnd := rand.New(rand.NewPCG(seed, 7606))
	var out []byte
	for range 20 {
		body := bytes.Clone(msg[19:])
		for range 1 + rnd.IntN(3) {
			i := rnd.IntN(len(body))
			switch rnd.IntN(4) {
			case 0:
				body[i] = byte(rnd.IntN(256))
			case 1:
				body = slices.Delete(body, i, min(i+1+rnd.IntN(3), len(body)-1))
			case 2:
				body = slices.Insert(body, i, byte(rnd.IntN(256)))
			default:
				body[i] ^= 1 << rnd.IntN(8)
			}
		}
		out = append(out, message(2, body)...)
	}
	return out
}

// TestUnusableNextHops: a prefix whose next hop is no other host is not taken
// up, and the session goes on.
func TestUnusableNextHops(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	us := newRun(t, SpeakerOptions{})
	us.apply(testConfig(h[0], 64512, nil, waiting(tor(h[0], h[1], 64999))))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := establish(ctx, h[1], h[0])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	say := func(third byte, hop netip.Addr) {
		a := hop.As4()
		msg := updateWith([]byte{24, 203, 0, third}, attr(0x40, 1, 0), attr(0x40, 2, 2, 1, 0, 0, 0xfd, 0xe7), attr(0x40, 3, a[:]...))
		if _, err := conn.Write(msg); err != nil {
			t.Fatal(err)
		}
	}
	say(1, h[1])
	for i, a := range []string{"0.0.0.0", "224.0.0.1", "127.0.0.1", "255.255.255.255", h[0].String()} {
		say(byte(2+i), netip.MustParseAddr(a))
	}
	say(100, h[1])
	us.waitPath("203.0.100.0/24")
	us.mu.Lock()
	if len(us.paths) != 2 {
		t.Errorf("taken up: %v", us.paths)
	}
	us.mu.Unlock()
	if st := us.status(h[1]); st.State != StateUp || st.Established != 1 {
		t.Errorf("the session is %+v", st)
	}
}

// TestMalformedMessages sends each from a configured peer of its own to one
// live speaker, in an established session and instead of an OPEN. The speaker
// and the session beside must not notice.
func TestMalformedMessages(t *testing.T) {
	t.Parallel()
	h := hosts(t, 254)
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

	errs := make(chan error, len(names))
	some := make(chan struct{}, 128) // at once; each has a minute of its own
	for i, name := range names {
		go func() {
			some <- struct{}{}
			defer func() { <-some }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
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
	if err := conn.SetDeadline(time.Now().Add(await.Patience)); err != nil {
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
