package hostile

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

// flood is how many senders a pod makes up: the kernel has room for 1,024 neighbours of
// all hosts, pods and labs of the machine, so not for all that it might.
const flood = 300

// floodNeighbours asks a pod's host by ARP and neighbour discovery as hundreds of
// neighbours that there are not. The kernel's tables keep none of ARP's and few of
// discovery's, and the host and other pods find each other.
func floodNeighbours(t *testing.T, l *lab.Lab) {
	const pod, host, other = "node1/pod1", "node1", "node1/pod2"
	device := deviceOf(t, l, host, pod)
	entries := func(f dataplane.Family) int {
		return strings.Count(output(t, l, host, "ip", fmt.Sprintf("-%d", f), "neigh", "show", "dev", device), "\n")
	}
	for _, f := range dataplane.Families() {
		solicit(t, l, pod, host, device, f)
		if n := entries(f); n > flood/5 {
			t.Errorf("%s: the host keeps %d of %d made-up neighbours", f, n, flood)
		}
	}
	output(t, l, host, "ip", "neigh", "flush", "dev", deviceOf(t, l, host, other))
	for _, f := range dataplane.Families() {
		for _, from := range []string{host, pod, "node2/pod1"} {
			if out, err := l.Output(await.Context(t), from, "ping", "-c", "1", "-W", "2", addrOf(t, l, other, f).String()); err != nil {
				t.Errorf("%s: after the flood %s does not reach %s: %v\n%s", f, from, other, err, out)
			}
		}
		// The pod's own entry is learned again, though it was among those that were lost.
		output(t, l, host, "ip", "neigh", "flush", "dev", device)
		if out, err := l.Output(await.Context(t), host, "ping", "-c", "1", "-W", "2", addrOf(t, l, pod, f).String()); err != nil {
			t.Errorf("%s: after the flood %s does not reach %s: %v\n%s", f, host, pod, err, out)
		}
	}
}

// deviceOf returns the host's end of a pod's wire.
func deviceOf(t *testing.T, l *lab.Lab, host, pod string) string {
	t.Helper()
	f := strings.Fields(output(t, l, host, "ip", "route", "get", addrOf(t, l, pod, dataplane.IPv4).String()))
	for i, word := range f {
		if word == "dev" && i+1 < len(f) {
			return f[i+1]
		}
	}
	t.Fatalf("no device leads to %s: %v", pod, f)
	return ""
}

// solicit asks a pod's host for its address as many neighbours.
func solicit(t *testing.T, l *lab.Lab, pod, host, device string, f dataplane.Family) {
	t.Helper()
	gateway := linkLocal(t, l, host, device)
	if err := ns.Do(l.Space(pod), func() error {
		i, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for n := range flood {
			b := arpFrom(n)
			if f == dataplane.IPv6 {
				b = solicitationFrom(n, gateway)
			}
			if err := unix.Sendto(fd, b, 0, &unix.SockaddrLinklayer{Ifindex: i.Index}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// linkLocal returns a device's link-local address.
func linkLocal(t *testing.T, l *lab.Lab, host, device string) netip.Addr {
	t.Helper()
	for word := range strings.FieldsSeq(output(t, l, host, "ip", "-6", "addr", "show", "dev", device, "scope", "link")) {
		if p, err := netip.ParsePrefix(word); err == nil {
			return p.Addr()
		}
	}
	t.Fatalf("%s has no link-local address", device)
	return netip.Addr{}
}

// arpFrom asks for a workload's gateway as the n-th neighbour.
func arpFrom(n int) []byte {
	b := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 66, 8, 6}, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 66, 10, 99)
	b = binary.BigEndian.AppendUint16(b, uint16(n+1)) //nolint:gosec // few
	return append(b, 0, 0, 0, 0, 0, 0, 169, 254, 1, 1)
}

// solicitationFrom asks for an address as the n-th link-local neighbour (RFC 4861,
// section 4.3).
func solicitationFrom(n int, target netip.Addr) []byte {
	to := target.As16()
	group := []byte{0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, to[13], to[14], to[15]}
	src := binary.BigEndian.AppendUint16([]byte{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 99}, uint16(n+1)) //nolint:gosec // few
	body := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, to[:]...)
	body = append(body, 1, 1, 2, 0, 0, 0, 0, 66)
	pseudo := append(append(append([]byte{}, src...), group...), 0, 0, 0, byte(len(body)), 0, 0, 0, 58)
	binary.BigEndian.PutUint16(body[2:], checksum(append(pseudo, body...)))
	b := []byte{0x33, 0x33, 0xff, to[13], to[14], to[15], 2, 0, 0, 0, 0, 66, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(body)), 58, 255}
	return append(append(append(b, src...), group...), body...)
}
