// Package traffic sends echo requests of ICMP (RFC 792) and ICMPv6 (RFC 4443)
// out of network namespaces and says exactly what came back: how many, how
// often, from how far, and what the network complained of.
//
// Sockets are opened inside a namespace and used from outside, so no helper
// process is needed. All of it needs CAP_NET_RAW and CAP_SYS_ADMIN.
package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

const (
	ipv4HeaderLen = 20
	ipv6HeaderLen = 40
	icmpHeaderLen = 8
	cookieLen     = 16 // in each request's payload: whose it is and its number

	// MinSize is the size of the smallest IPv4 packet that can be sent, in
	// bytes.
	MinSize = ipv4HeaderLen + icmpHeaderLen + cookieLen
	// MinSize6 is the same for IPv6.
	MinSize6 = ipv6HeaderLen + icmpHeaderLen + cookieLen
	// MaxSize is the size of the largest packet, in bytes.
	MaxSize = 65535
)

// ICMP types (RFC 792).
const (
	typeEchoReply    = 0
	typeUnreachable  = 3
	typeEcho         = 8
	typeTimeExceeded = 11

	codeFragmentationNeeded = 4 // of typeUnreachable
)

// Options says what the requests look like.
type Options struct {
	Size int  // of the IP packet, in bytes; 0: the smallest
	DF   bool // do not fragment, and ignore what the kernel knows of the path's MTU
	TTL  int  // or IPv6's hop limit; 0: the kernel's default
	IPv6 bool // to IPv6 addresses; else to IPv4 addresses
}

// minSize is the size of the smallest request.
func (o Options) minSize() int {
	if o.IPv6 {
		return MinSize6
	}
	return MinSize
}

func (o Options) validate() error {
	if o.Size != 0 && (o.Size < o.minSize() || o.Size > MaxSize) {
		return fmt.Errorf("packet size %d: want %d to %d bytes", o.Size, o.minSize(), MaxSize)
	}
	if o.TTL < 0 || o.TTL > 255 {
		return fmt.Errorf("TTL %d: want 1 to 255, or 0 for the default", o.TTL)
	}
	return nil
}

// conn is a raw ICMP socket in a namespace.
type conn struct {
	ip     *net.IPConn
	v6     bool
	oob    []byte // receive's
	id     uint16
	secret uint64
	size   int
}

func open(space string, o Options) (*conn, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Size == 0 {
		o.Size = o.minSize()
	}
	var fd int
	err := ns.Do(space, func() (err error) {
		if o.IPv6 {
			fd, err = socket6(o)
		} else {
			fd, err = socket(o)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open ICMP socket in %s: %w", space, err)
	}
	f := os.NewFile(uintptr(fd), "icmp")
	defer f.Close() // FilePacketConn works on a duplicate
	pc, err := net.FilePacketConn(f)
	if err != nil {
		return nil, fmt.Errorf("open ICMP socket in %s: %w", space, err)
	}
	ip, ok := pc.(*net.IPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("open ICMP socket in %s: unexpected connection %T", space, pc), pc.Close())
	}
	return &conn{ip: ip, v6: o.IPv6, oob: make([]byte, 128), id: uint16(rand.Uint32()), secret: rand.Uint64(), size: o.Size}, nil
}

func socket(o Options) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMP)
	if err != nil {
		return -1, err
	}
	set := func(level, name, value int) {
		if err == nil {
			err = unix.SetsockoptInt(fd, level, name, value)
		}
	}
	// Room for a second of full-size replies, should this process get no time.
	set(unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	pmtu := unix.IP_PMTUDISC_DONT
	if o.DF {
		pmtu = unix.IP_PMTUDISC_PROBE
	}
	set(unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, pmtu)
	if o.TTL != 0 {
		set(unix.IPPROTO_IP, unix.IP_TTL, o.TTL)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (c *conn) close() error { return c.ip.Close() }

// request builds an echo request numbered seq.
func (c *conn) request(seq uint64) []byte {
	header := ipv4HeaderLen
	if c.v6 {
		header = ipv6HeaderLen
	}
	b := make([]byte, c.size-header)
	b[0] = typeEcho
	if c.v6 {
		b[0] = typeEcho6
	}
	binary.BigEndian.PutUint16(b[4:], c.id)
	binary.BigEndian.PutUint16(b[6:], uint16(seq))
	binary.BigEndian.PutUint64(b[8:], c.secret)
	binary.BigEndian.PutUint64(b[16:], seq)
	if !c.v6 { // the kernel computes ICMPv6's, which covers the addresses
		binary.BigEndian.PutUint16(b[2:], checksum(b))
	}
	return b
}

func (c *conn) send(to netip.Addr, seq uint64) error {
	_, err := c.ip.WriteToIP(c.request(seq), &net.IPAddr{IP: to.AsSlice()})
	return err
}

// message is what the socket received that concerns one of its requests.
type message struct {
	from netip.Addr // who sent the message
	seq  uint64     // the request's number; only valid for replies
	ttl  int        // that the message arrived with
	size int        // of the IP packet
	err  string     // what the network complains of; empty for a reply
	dst  netip.Addr // whom the request was for
}

// receive waits for the next message that concerns this socket.
func (c *conn) receive(buf []byte) (message, error) {
	for {
		n, oobn, _, from, err := c.ip.ReadMsgIP(buf, c.oob)
		if err != nil {
			return message{}, err
		}
		var m message
		var ok bool
		if c.v6 {
			m, ok = c.parse6(buf[:n], c.oob[:oobn], from)
		} else {
			m, ok = c.parse(buf[:n])
		}
		if ok {
			return m, nil
		}
	}
}

// parse reads an IP packet; it reports false for what is not about us.
func (c *conn) parse(b []byte) (message, bool) {
	h, body, ok := splitIPv4(b)
	if !ok || len(body) < icmpHeaderLen {
		return message{}, false
	}
	m := message{from: h.src, ttl: h.ttl, size: len(b)}
	switch body[0] {
	case typeEchoReply:
		if len(body) < icmpHeaderLen+cookieLen || binary.BigEndian.Uint16(body[4:]) != c.id ||
			binary.BigEndian.Uint64(body[8:]) != c.secret || checksum(body) != 0 {
			return message{}, false
		}
		m.seq, m.dst = binary.BigEndian.Uint64(body[16:]), h.src
		return m, true
	case typeUnreachable, typeTimeExceeded:
		// The message quotes the request's IP header and 8 bytes more.
		q, quoted, ok := splitIPv4(body[icmpHeaderLen:])
		if !ok || len(quoted) < icmpHeaderLen || quoted[0] != typeEcho || binary.BigEndian.Uint16(quoted[4:]) != c.id {
			return message{}, false
		}
		m.dst, m.err = q.dst, complaint(body)
		return m, true
	}
	return message{}, false
}

// complaint puts an ICMP error into words.
func complaint(body []byte) string {
	if body[0] == typeTimeExceeded {
		return "time to live exceeded"
	}
	switch body[1] {
	case 0:
		return "network unreachable"
	case 1:
		return "host unreachable"
	case codeFragmentationNeeded:
		return fmt.Sprintf("fragmentation needed, mtu %d", binary.BigEndian.Uint16(body[6:]))
	}
	return fmt.Sprintf("unreachable, code %d", body[1])
}

type ipv4Header struct {
	src, dst netip.Addr
	ttl      int
}

func splitIPv4(b []byte) (ipv4Header, []byte, bool) {
	if len(b) < ipv4HeaderLen || b[0]>>4 != 4 {
		return ipv4Header{}, nil, false
	}
	l := int(b[0]&0x0f) * 4
	if l < ipv4HeaderLen || len(b) < l {
		return ipv4Header{}, nil, false
	}
	return ipv4Header{
		src: netip.AddrFrom4([4]byte(b[12:16])),
		dst: netip.AddrFrom4([4]byte(b[16:20])),
		ttl: int(b[8]),
	}, b[l:], true
}

// checksum is the Internet checksum (RFC 1071): of a message whose checksum
// field is right it is zero.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
