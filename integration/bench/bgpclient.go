package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Message types and lengths of BGP (RFC 4271, section 4).
const (
	bgpOpen, bgpUpdate, bgpNotification, bgpKeepalive = 1, 2, 3, 4

	bgpHeader = 19
	bgpMost   = 4096
)

// bgpClient is one iBGP session that announces prefixes and counts which ones
// come. It does no more than a measurement of its peer needs.
type bgpClient struct {
	addr netip.Addr
	conn net.Conn
	r    *bufio.Reader
	send sync.Mutex

	stop  context.CancelFunc // of what keeps the session
	alive sync.WaitGroup

	seen []uint64 // bit i: prefix i of routePrefixes came
	n    int      // how many
}

// dialBGP opens a session out of a namespace and waits until it is established.
// seen is how many prefixes there are in all.
func dialBGP(ctx context.Context, space string, addr, peer netip.Addr, asn uint32, seen int) (*bgpClient, error) {
	c := &bgpClient{addr: addr, seen: make([]uint64, (seen+63)/64)}
	err := ns.Do(space, func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: addr.AsSlice()}, Timeout: 5 * time.Second}
		c.conn, err = d.DialContext(ctx, "tcp", netip.AddrPortFrom(peer, 179).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	c.r = bufio.NewReaderSize(c.conn, 1<<16)
	if err := c.open(asn); err != nil {
		return nil, errors.Join(fmt.Errorf("session of %s: %w", addr, err), c.conn.Close())
	}
	ctx, c.stop = context.WithCancel(ctx)
	c.alive.Go(func() { c.keep(ctx) })
	return c, nil
}

// keep sends KEEPALIVEs until ctx ends or the session has: a peer that has much to
// tell others hears nothing else of this client for longer than its hold time.
func (c *bgpClient) keep(ctx context.Context) {
	tick := time.NewTicker(20 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if c.write(bgpKeepalive, nil) != nil {
				return // who reads is told the same
			}
		}
	}
}

// close ends the session.
func (c *bgpClient) close() error {
	c.stop()
	err := c.conn.Close()
	c.alive.Wait()
	return err
}

// open exchanges OPEN and KEEPALIVE.
func (c *bgpClient) open(asn uint32) error {
	if err := c.conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	body := binary.BigEndian.AppendUint16([]byte{4}, uint16(asn))
	body = binary.BigEndian.AppendUint16(body, 240) // hold time, seconds
	body = append(body, c.addr.AsSlice()...)
	// Multiprotocol IPv4 unicast (RFC 4760, section 8), and 4-byte AS numbers
	// (RFC 6793, section 3).
	body = append(body, 14, 2, 12, 1, 4, 0, 1, 0, 1, 65, 4)
	body = binary.BigEndian.AppendUint32(body, asn)
	if err := errors.Join(c.write(bgpOpen, body), c.write(bgpKeepalive, nil)); err != nil {
		return err
	}
	for {
		typ, body, err := c.read()
		switch {
		case err != nil:
			return err
		case typ == bgpNotification:
			return fmt.Errorf("notification %v", body)
		case typ == bgpKeepalive:
			return c.conn.SetDeadline(time.Time{})
		}
	}
}

func (c *bgpClient) write(typ byte, body []byte) error {
	msg := slices.Repeat([]byte{0xff}, 16)
	msg = binary.BigEndian.AppendUint16(msg, uint16(bgpHeader+len(body)))
	msg = append(append(msg, typ), body...)
	c.send.Lock()
	defer c.send.Unlock()
	_, err := c.conn.Write(msg)
	return err
}

// read returns the next message; its body is valid until the next call.
func (c *bgpClient) read() (typ byte, body []byte, err error) {
	var head [bgpHeader]byte
	if _, err := io.ReadFull(c.r, head[:]); err != nil {
		return 0, nil, err
	}
	n := int(binary.BigEndian.Uint16(head[16:])) - bgpHeader
	if n < 0 || n > bgpMost-bgpHeader {
		return 0, nil, fmt.Errorf("a message of %d bytes", n+bgpHeader)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(c.r, body)
	return head[18], body, err
}

// withdraw takes prefixes back.
func (c *bgpClient) withdraw(ps []netip.Prefix) error {
	for ps := range slices.Chunk(ps, 700) {
		list := make([]byte, 0, 5*len(ps))
		for _, p := range ps {
			list = append(append(list, byte(p.Bits())), p.Addr().AsSlice()...)
		}
		body := append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...)
		if err := c.write(bgpUpdate, append(body, 0, 0)); err != nil {
			return err
		}
	}
	return nil
}

// change announces one prefix of length 26 with another MED.
func (c *bgpClient) change(p netip.Addr, med uint32) error {
	attrs := append(c.attributes(), 0x80, 4, 4)
	attrs = binary.BigEndian.AppendUint32(attrs, med)
	body := append(binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attrs))), attrs...)
	return c.write(bgpUpdate, append(append(body, 26), p.AsSlice()...))
}

// attributes are those of each announcement.
func (c *bgpClient) attributes() []byte {
	attrs := []byte{
		0x40, 1, 1, 0, // ORIGIN IGP
		0x40, 2, 0, // AS_PATH, empty
		0x40, 3, 4, 0, 0, 0, 0, // NEXT_HOP
		0x40, 5, 4, 0, 0, 0, 100, // LOCAL_PREF
	}
	copy(attrs[10:], c.addr.AsSlice())
	return attrs
}

// announce tells the peer of prefixes of length 26, in as few messages as they
// fit in.
func (c *bgpClient) announce(ps []netip.Prefix) error {
	attrs := c.attributes()
	for ps := range slices.Chunk(ps, 700) { // of five bytes
		body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attrs)))
		body = append(body, attrs...)
		for _, p := range ps {
			body = append(append(body, byte(p.Bits())), p.Addr().AsSlice()...)
		}
		if err := c.write(bgpUpdate, body); err != nil {
			return err
		}
	}
	return nil
}

// count reads until want different prefixes have come or the session ends.
func (c *bgpClient) count(want int) error {
	for c.n < want {
		typ, body, err := c.read()
		if err != nil {
			return fmt.Errorf("%d of %d prefixes came to %s: %w", c.n, want, c.addr, err)
		}
		switch typ {
		case bgpNotification:
			return fmt.Errorf("%d of %d prefixes came to %s: notification %v", c.n, want, c.addr, body)
		case bgpUpdate:
			err = c.take(body)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errUpdate = errors.New("an UPDATE that is cut off")

// take notes what an UPDATE announces (RFC 4271, section 4.3).
func (c *bgpClient) take(b []byte) error {
	for range 2 { // what is withdrawn, and the attributes
		if len(b) < 2 || len(b) < 2+int(binary.BigEndian.Uint16(b)) {
			return errUpdate
		}
		b = b[2+int(binary.BigEndian.Uint16(b)):]
	}
	for len(b) > 0 {
		size := (int(b[0]) + 7) / 8
		if size > 4 || len(b) < 1+size {
			return errUpdate
		}
		var a [4]byte
		copy(a[:], b[1:1+size])
		b = b[1+size:]
		i := (binary.BigEndian.Uint32(a[:]) - 20<<24) >> 6
		if int(i/64) >= len(c.seen) || c.seen[i/64]&(1<<(i%64)) != 0 {
			continue
		}
		c.seen[i/64] |= 1 << (i % 64)
		c.n++
	}
	return nil
}
