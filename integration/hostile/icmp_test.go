package hostile

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestPathMTUFromPod: a pod tells its host that the path to another host takes small
// packets alone, by an ICMP error that quotes a packet between these hosts. What it says
// of the path to itself is heard.
func TestPathMTUFromPod(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(2, 1, mode)
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: mode}
			l := bringUp(t, "icmp-"+strings.ToLower(string(mode)), top)
			for _, f := range dataplane.Families() {
				const pod, host = "node1/pod1", "node1"
				poll(t, fmt.Sprint("the pod reaches both hosts, ", f), func() string {
					for _, to := range l.Hosts() {
						if _, err := l.Output(await.Context(t), pod, "ping", "-c", "1", "-W", "1", addrOf(t, l, to, f).String()); err != nil {
							return err.Error()
						}
					}
					return ""
				})
				victim := converses(t, l, host, "node2", f)
				own := converses(t, l, host, pod, f)
				tooBig(t, l, pod, own)
				poll(t, fmt.Sprint("the host hears of the path to the pod, ", f), func() string { return mtuTo(t, l, host, own.RemoteAddr(), "mtu 1290") })
				for range 3 {
					tooBig(t, l, pod, victim)
				}
				// It was sent before this, on the same wire.
				if _, err := l.Output(await.Context(t), pod, "ping", "-c", "1", "-W", "2", addrOf(t, l, host, f).String()); err != nil {
					t.Error(err)
				}
				if mtuTo(t, l, host, victim.RemoteAddr(), "mtu 1290") == "" {
					t.Errorf("%s set the path MTU of %s to node2, %s", pod, host, f)
				}
			}
		})
	}
}

// converses opens a UDP flow between two places and has a datagram go there.
func converses(t *testing.T, l *lab.Lab, from, to string, f dataplane.Family) net.Conn {
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
	return c
}

// tooBig sends the source of a flow an ICMP error that quotes a datagram of it: the path takes 1290 bytes.
func tooBig(t *testing.T, l *lab.Lab, from string, of net.Conn) {
	t.Helper()
	src, ok := of.LocalAddr().(*net.UDPAddr)
	dst, ok2 := of.RemoteAddr().(*net.UDPAddr)
	if !ok || !ok2 {
		t.Fatal("no UDP flow")
	}
	a, b := src.AddrPort(), dst.AddrPort()
	f := dataplane.FamilyOf(a.Addr().Unmap())
	network := "ip4:icmp"
	message := []byte{3, 4, 0, 0, 0, 0, 0x05, 0x0a}
	if f == dataplane.IPv6 {
		network = "ip6:ipv6-icmp"
		message = []byte{2, 0, 0, 0, 0, 0, 0x05, 0x0a}
	}
	message = append(message, quoted(a, b)...)
	if f == dataplane.IPv4 {
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	var c net.Conn
	if err := ns.Do(l.Space(from), func() (err error) {
		c, err = net.DialTimeout(network, a.Addr().Unmap().String(), time.Second)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(message); err != nil {
		t.Fatal(err)
	}
}

// quoted is the beginning of a datagram.
func quoted(src, dst netip.AddrPort) []byte {
	a, b := src.Addr().Unmap(), dst.Addr().Unmap()
	var h []byte
	if a.Is6() {
		h = append([]byte{0x60, 0, 0, 0, 0, 9, 17, 64}, a.AsSlice()...)
		h = append(h, b.AsSlice()...)
	} else {
		h = append([]byte{0x45, 0, 0, 29, 0, 0, 0x40, 0, 64, 17, 0, 0}, a.AsSlice()...)
		h = append(h, b.AsSlice()...)
		binary.BigEndian.PutUint16(h[10:], checksum(h))
	}
	h = binary.BigEndian.AppendUint16(h, src.Port())
	h = binary.BigEndian.AppendUint16(h, dst.Port())
	return append(h, 0, 9, 0, 0)
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

// mtuTo says why the route of a host to an address does not say something; empty: it does.
func mtuTo(t *testing.T, l *lab.Lab, host string, to net.Addr, want string) string {
	t.Helper()
	a, err := netip.ParseAddrPort(to.String())
	if err != nil {
		t.Fatal(err)
	}
	if out := output(t, l, host, "ip", "route", "get", a.Addr().String()); !strings.Contains(out, want) {
		return out
	}
	return ""
}
