package hostile

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// What pods say that paths take, in bytes. The kernel keeps the least that it heard: what
// is said of TCP is told from what was said of UDP before.
const smallPath, smallerPath = 1290, 1285

// TestPathMTUFromPod: a pod tells hosts and other pods that a path of theirs takes small
// packets alone, by ICMP errors that quote packets of theirs: between hosts, its own or
// not, between pods, and where its own host takes no part. What it says of paths to itself
// is heard.
func TestPathMTUFromPod(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(2, 2, mode)
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: mode}
			l := bringUp(t, "icmp-"+strings.ToLower(string(mode)), top)
			reachable(t, l)
			for _, f := range dataplane.Families() {
				t.Run(fmt.Sprint(f), func(t *testing.T) { quotesOthers(t, l, f) })
			}
		})
	}
}

func quotesOthers(t *testing.T, l *lab.Lab, f dataplane.Family) {
	const attacker = "node1/pod1"
	for _, from := range []string{"node1", "node2/pod1"} {
		for _, own := range []quotation{converses(t, l, from, attacker, f), connected(t, l, from, attacker, f)} {
			tooBig(t, l, attacker, own)
			poll(t, fmt.Sprintf("%s hears of its path to the pod, %s", from, own), func() string {
				if now := mtuOf(t, l, from, own); now != own.mtu {
					return fmt.Sprint("its path takes ", now)
				}
				return ""
			})
		}
	}
	for _, flow := range [][2]string{
		{"node1", "node2"},
		{"node2", "node1"},
		{"node1/pod2", "node2/pod1"},
		{"node2/pod1", "node1/pod2"},
		// node1 tracks nothing of these.
		{"node2", "node2/pod2"},
		{"node2/pod1", "node2/pod2"},
	} {
		from, to := flow[0], flow[1]
		for _, q := range []quotation{converses(t, l, from, to, f), connected(t, l, from, to, f)} {
			before := mtuOf(t, l, from, q)
			for range 3 {
				tooBig(t, l, attacker, q)
			}
			// They were sent before this, the same way.
			if out, err := l.Output(await.Context(t), attacker, "ping", "-c", "1", "-W", "2", q.src.Addr().String()); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			if now := mtuOf(t, l, from, q); now != before {
				t.Errorf("%s told %s that its path to %s takes %d bytes, not %d: %s", attacker, from, to, now, before, q)
			}
		}
	}
}

// quotation is what an ICMP error says of a packet.
type quotation struct {
	src, dst netip.AddrPort
	protocol uint8
	seq      uint32 // of TCP's next byte: the kernel looks at it (RFC 5927, section 4.1)
	mtu      int    // what the path takes, in bytes
}

func (q quotation) String() string {
	return fmt.Sprintf("%s > %s protocol %d", q.src, q.dst, q.protocol)
}

// converses opens a UDP flow between two places and has a datagram go there.
func converses(t *testing.T, l *lab.Lab, from, to string, f dataplane.Family) quotation {
	t.Helper()
	var c net.Conn
	at := net.JoinHostPort(addrOf(t, l, to, f).String(), "9999")
	if err := ns.Do(l.Space(from), func() (err error) { c, err = net.DialTimeout("udp", at, time.Second); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	return quotation{src: netip.MustParseAddrPort(c.LocalAddr().String()), dst: netip.MustParseAddrPort(at), protocol: unix.IPPROTO_UDP, mtu: smallPath}
}

// connected opens a TCP connection between two places, and nothing more goes over it.
func connected(t *testing.T, l *lab.Lab, from, to string, f dataplane.Family) quotation {
	t.Helper()
	var lis net.Listener
	if err := ns.Do(l.Space(to), func() (err error) {
		lis, err = net.Listen("tcp", net.JoinHostPort(addrOf(t, l, to, f).String(), "0"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lis.Close() })
	var c net.Conn
	if err := ns.Do(l.Space(from), func() (err error) {
		c, err = net.DialTimeout("tcp", lis.Addr().String(), 5*time.Second)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	q := quotation{src: netip.MustParseAddrPort(c.LocalAddr().String()), dst: netip.MustParseAddrPort(lis.Addr().String()), protocol: unix.IPPROTO_TCP, mtu: smallerPath}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		t.Fatalf("a connection is a %T", c)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { q.seq, failed = nextByte(int(fd)) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return q
}

// nextByte returns the sequence number of the next byte that a connection sends. A socket
// tells it while it is under repair (CRIU's TCP_REPAIR, tcp(7)).
func nextByte(fd int) (uint32, error) {
	const sendQueue, off = 2, -1 // TCP_SEND_QUEUE, and TCP_REPAIR_OFF_NO_WP: no packet says that it is over
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1); err != nil {
		return 0, fmt.Errorf("TCP_REPAIR: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, sendQueue); err != nil {
		return 0, fmt.Errorf("TCP_REPAIR_QUEUE: %w", err)
	}
	seq, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
	if err != nil {
		return 0, fmt.Errorf("TCP_QUEUE_SEQ: %w", err)
	}
	return uint32(seq), unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, off) //nolint:gosec // 32 bits in the kernel
}

// tooBig sends the source of a flow an ICMP error that quotes a packet of it.
func tooBig(t *testing.T, l *lab.Lab, from string, q quotation) {
	t.Helper()
	f := dataplane.FamilyOf(q.src.Addr())
	network, message := "ip4:icmp", []byte{3, 4, 0, 0}
	if f == dataplane.IPv6 {
		network, message = "ip6:ipv6-icmp", []byte{2, 0, 0, 0}
	}
	message = binary.BigEndian.AppendUint32(message, uint32(q.mtu)) //nolint:gosec // small
	message = append(message, quoted(q)...)
	if f == dataplane.IPv4 {
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	var c net.Conn
	if err := ns.Do(l.Space(from), func() (err error) {
		c, err = net.DialTimeout(network, q.src.Addr().String(), time.Second)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(message); err != nil {
		t.Fatal(err)
	}
}

// quoted is the beginning of a packet, with eight bytes of UDP's or TCP's header.
func quoted(q quotation) []byte {
	a, b := q.src.Addr(), q.dst.Addr()
	var h []byte
	if a.Is6() {
		h = append([]byte{0x60, 0, 0, 0, 0, 20, q.protocol, 64}, a.AsSlice()...)
		h = append(h, b.AsSlice()...)
	} else {
		h = append([]byte{0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, q.protocol, 0, 0}, a.AsSlice()...)
		h = append(h, b.AsSlice()...)
		binary.BigEndian.PutUint16(h[10:], checksum(h))
	}
	h = binary.BigEndian.AppendUint16(h, q.src.Port())
	h = binary.BigEndian.AppendUint16(h, q.dst.Port())
	if q.protocol == unix.IPPROTO_TCP {
		return binary.BigEndian.AppendUint32(h, q.seq)
	}
	return append(h, 0, 20, 0, 0) // length, no checksum
}

// checksum is that of RFC 1071, of an even number of bytes.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum) //nolint:gosec // folded
}

// mtuOf returns what the source of a flow has heard that its path takes; 0: it has heard
// nothing.
func mtuOf(t *testing.T, l *lab.Lab, from string, q quotation) (mtu int) {
	t.Helper()
	out := output(t, l, from, "ip", "route", "get", q.dst.Addr().String())
	if _, after, ok := strings.Cut(out, "expires"); ok {
		if _, after, ok = strings.Cut(after, "mtu "); ok {
			if _, err := fmt.Sscan(after, &mtu); err != nil {
				t.Fatal(err)
			}
		}
	}
	return mtu
}
