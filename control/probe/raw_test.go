package probe

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

func testPayload(s string) []byte { return append([]byte{0x72, 0x74, 0x44, 0x52}, s...) }

// rawHost is a network namespace with an address in each family.
type rawHost struct {
	t  *testing.T
	ns *netnstest.Netns
	a  map[string]netip.Addr
}

func (h *rawHost) run(command string) string {
	h.t.Helper()
	var out []byte
	err := h.ns.Do(func() (err error) {
		f := strings.Fields(command)
		out, err = exec.Command(f[0], f[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		h.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

// twoHosts returns two hosts on a wire, each with a VXLAN device towards the
// other in each family.
func twoHosts(t *testing.T) (a, b *rawHost) {
	t.Helper()
	a = &rawHost{t, netnstest.New(t), map[string]netip.Addr{"IPv4": netip.MustParseAddr("10.9.0.1"), "IPv6": netip.MustParseAddr("fd00:9::1")}}
	b = &rawHost{t, netnstest.New(t), map[string]netip.Addr{"IPv4": netip.MustParseAddr("10.9.0.2"), "IPv6": netip.MustParseAddr("fd00:9::2")}}
	a.run("ip link add eth0 type veth peer name eth0 netns " + b.ns.Path)
	for i, h := range []*rawHost{a, b} {
		other := []*rawHost{b, a}[i]
		h.run("ip link set lo up")
		h.run("ip link set eth0 up")
		h.run("ip addr add " + h.a["IPv4"].String() + "/24 dev eth0")
		h.run("ip addr add " + h.a["IPv6"].String() + "/64 dev eth0 nodad")
		h.run(fmt.Sprintf("ip link add vx4 type vxlan id 4096 dstport 4789 dev eth0 local %s remote %s", h.a["IPv4"], other.a["IPv4"]))
		h.run(fmt.Sprintf("ip link add vx6 type vxlan id 4096 dstport 4789 dev eth0 local %s remote %s", h.a["IPv6"], other.a["IPv6"]))
		for n, d := range []string{"vx4", "vx6"} {
			// Nothing of its own goes through the tunnel, and so into its counters.
			h.run("sysctl -qw net.ipv6.conf." + d + ".disable_ipv6=1")
			h.run("ip link set " + d + " up")
			h.run(fmt.Sprintf("ip addr add 10.%d.0.%d/24 dev %s", 20+n, i+1, d))
		}
	}
	return a, b
}

// opened is a socket whose messages a test waits for.
type opened struct {
	t *testing.T
	s interface {
		send(netip.AddrPort, []byte, int) error
		receive() ([]byte, netip.AddrPort, error)
		Close() error
	}
	received chan string
	past     []string // what was expected and came
}

func (h *rawHost) open(form, family string) *opened {
	h.t.Helper()
	o := &opened{t: h.t, received: make(chan string, 1000)}
	err := h.ns.Do(func() (err error) {
		switch form {
		case "vxlan":
			o.s, err = openVXLAN(h.a[family], 4789)
		case "ipip":
			o.s, err = openIPIP(h.a[family])
		default:
			o.s, err = openAnyPort(h.a[family])
		}
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			p, from, err := o.s.receive()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					h.t.Errorf("receive: %v", err)
				}
				return
			}
			o.received <- from.String() + " " + strings.TrimRight(string(p[4:]), "\x00")
		}
	}()
	h.t.Cleanup(func() {
		o.s.Close()
		<-ended
	})
	return o
}

// expectMessage sends until want arrives: the first packet of all may get lost while
// the neighbour is looked for.
func expectMessage(t *testing.T, from, at *opened, to netip.AddrPort, text string, size int, want string) {
	t.Helper()
	deadline := time.After(await.Patience)
	for {
		if err := from.s.send(to, testPayload(text), size); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-at.received:
			if got == want {
				at.past = append(at.past, got)
				return
			}
			if !slices.Contains(at.past, got) { // sent again while it was under way
				t.Fatalf("received %q, want %q", got, want)
			}
		case <-time.After(200 * time.Millisecond):
		case <-deadline:
			t.Fatalf("%q did not arrive", want)
		}
	}
}

func (h *rawHost) port(family string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(h.a[family], port)
}

func TestRawSockets(t *testing.T) {
	t.Parallel()
	for _, family := range []string{"IPv4", "IPv6"} {
		for _, form := range []string{"vxlan", "ipip"} {
			t.Run(family+" "+form, func(t *testing.T) {
				t.Parallel()
				a, b := twoHosts(t)
				sa, sb := a.open(form, family), b.open(form, family)
				port := uint16(0)
				if form == "vxlan" {
					port = 4789
				}
				expectMessage(t, sa, sb, b.port(family, port), "hello", 0, a.port(family, port).String()+" hello")
				expectMessage(t, sb, sa, a.port(family, port), "back", 0, b.port(family, port).String()+" back")
				expectMessage(t, sa, sb, b.port(family, port), "full size", 1500, a.port(family, port).String()+" full size")
				err := sa.s.send(b.port(family, port), testPayload("too big"), 1501)
				if !errors.Is(err, errTooBig) {
					t.Errorf("send of 1501 bytes: %v, want %v", err, errTooBig)
				}
			})
		}
	}
}

// A socket on any port talks with one on VXLAN's.
func TestAnyPort(t *testing.T) {
	t.Parallel()
	for _, family := range []string{"IPv4", "IPv6"} {
		a, b := twoHosts(t)
		sa, sb := a.open("any", family), b.open("vxlan", family)
		local := sa.s.(*anyPort).c.LocalAddr().(*net.UDPAddr).AddrPort()
		expectMessage(t, sa, sb, b.port(family, 4789), "hello", 0, local.String()+" hello")
		expectMessage(t, sb, sa, local, "back", 0, b.port(family, 4789).String()+" back")
	}
}

// Neither data in the tunnel nor packets of strangers reach user space, and
// our packets do not reach what is behind the tunnel device.
func TestOnlyOurPacketsArrive(t *testing.T) {
	t.Parallel()
	for n, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			a, b := twoHosts(t)
			sa, sb := a.open("vxlan", family), b.open("vxlan", family)
			dev := fmt.Sprintf("vx%d", 4+2*n)
			a.run(fmt.Sprintf("ping -q -c 50 -i 0.002 -W 5 10.%d.0.2", 20+n))
			data := b.rxPackets(dev)
			if data < 50 {
				t.Fatalf("%s of b received %d packets, want those of the ping", dev, data)
			}
			stranger := append([]byte{0x72, 0x74, 0x44, 0x53}, "wrong magic"...)
			if err := sa.s.send(b.port(family, 4789), stranger, 0); err != nil {
				t.Fatal(err)
			}
			// What arrives first is what was sent last.
			expectMessage(t, sa, sb, b.port(family, 4789), "ours", 0, a.port(family, 4789).String()+" ours")
			if got := b.rxPackets(dev); got != data {
				t.Errorf("%s received packets that are not data: %d, then %d", dev, data, got)
			}
			// The kernel's own count of packets that the filter let through.
			if n := waiting(t, sb.s.(*rawSocket)); n != 0 {
				t.Errorf("%d bytes are waiting at the socket", n)
			}
		})
	}
}

// rxPackets is how many packets came out of a device.
func (h *rawHost) rxPackets(dev string) int {
	h.t.Helper()
	var stats []struct {
		Stats64 struct{ Rx struct{ Packets int } }
	}
	if err := json.Unmarshal([]byte(h.run("ip -j -s link show dev "+dev)), &stats); err != nil || len(stats) != 1 {
		h.t.Fatalf("statistics of %s: %v, %v", dev, stats, err)
	}
	return stats[0].Stats64.Rx.Packets
}

// waiting returns the bytes in the socket's receive queue.
func waiting(t *testing.T, s *rawSocket) int {
	t.Helper()
	var n int
	var err error
	cerr := s.raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestOpenErrors(t *testing.T) {
	t.Parallel()
	a, _ := twoHosts(t)
	for name, open := range map[string]func() (*rawSocket, error){
		"not an address of the host":      func() (*rawSocket, error) { return openVXLAN(netip.MustParseAddr("192.0.2.1"), 4789) },
		"not an IPv6 address of the host": func() (*rawSocket, error) { return openIPIP(netip.MustParseAddr("2001:db8::1")) },
		"no port":                         func() (*rawSocket, error) { return openVXLAN(netip.MustParseAddr("127.0.0.1"), 0) },
	} {
		if err := a.ns.Do(func() error { _, err := open(); return err }); err == nil {
			t.Errorf("%s: a socket was opened", name)
		}
	}
}

// The checksums are those that other hosts verify: a plain UDP socket takes
// the packet.
func TestChecksums(t *testing.T) {
	t.Parallel()
	for _, family := range []string{"IPv4", "IPv6"} {
		a, b := twoHosts(t)
		sa := a.open("vxlan", family)
		plain := b.open("any", family)
		local := plain.s.(*anyPort).c.LocalAddr().(*net.UDPAddr).AddrPort()
		for size := range 5 {
			expectMessage(t, sa, plain, local, strings.Repeat("x", size), 0, a.port(family, 4789).String()+" "+strings.Repeat("x", size))
		}
	}
}
