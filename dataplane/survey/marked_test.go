package survey

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

const mark = 0xc0ffee01

// segment makes what follows an IP header: two ports, and words.
func segment(src, dst uint16, words ...uint32) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, src), dst)
	for _, w := range words {
		b = binary.BigEndian.AppendUint32(b, w)
	}
	return b
}

// TestMarked: the marked packet is known whatever its addresses, and its answers by those of a packet that was seen. What the
// filter of the kernel lets through has all of them.
func TestMarked(t *testing.T) {
	t.Parallel()
	a, b, x := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	a6, b6 := netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
	const tcp, udp, sctp = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP
	options := packetBetween(a, b, tcp, nil) // an IPv4 header of 24 bytes
	options[0] = 0x46
	options = append(options, 0, 0, 0, 0)
	fragment := packetBetween(a, b, tcp, segment(1000, 80, mark, 0))
	fragment[7] = 1
	for _, tt := range []struct {
		name     string
		protocol uint8
		packet   []byte
		back, ok bool
		dropped  bool // the filter does not let it through
	}{
		{"a SYN", tcp, packetBetween(a, b, tcp, segment(1000, 80, mark, 0)), false, true, false},
		{"translated", tcp, packetBetween(x, b, tcp, segment(2000, 8080, mark, 0)), false, true, false},
		{"its answer", tcp, packetBetween(b, a, tcp, segment(80, 1000, 7, mark+1)), true, true, false},
		{"an answer to nobody", tcp, packetBetween(b, a, tcp, segment(81, 1000, 7, mark+1)), false, false, false},
		{"behind IP options", tcp, append(options, segment(1000, 80, mark, 0)...), false, true, false},
		{"of IPv6", tcp, packetBetween(a6, b6, tcp, segment(1000, 80, mark, 0)), false, true, false},
		{"its answer", tcp, packetBetween(b6, a6, tcp, segment(80, 1000, 7, mark+1)), true, true, false},
		{"another's", tcp, packetBetween(a, b, tcp, segment(1000, 80, mark+2, 0)), false, false, true},
		{"of another protocol", tcp, packetBetween(a, b, udp, segment(1000, 80, mark, 0)), false, false, true},
		{"a later fragment", tcp, fragment, false, false, false},
		{"cut off", tcp, packetBetween(a, b, tcp, segment(1000, 80)), false, false, true},
		{"nothing", tcp, nil, false, false, true},
		{"an INIT", sctp, packetBetween(a, b, sctp, segment(1000, 80, 0, 0, 0x01000014, mark)), false, true, false},
		{"its answer", sctp, packetBetween(b, a, sctp, segment(80, 1000, mark, 0, 0x02000014, 7)), true, true, false},
		{"a datagram", udp, packetBetween(a, b, udp, segment(1000, 80, 0x000c0000, mark)), false, true, false},
		{"its answer", udp, packetBetween(b, a, udp, segment(80, 1000, 0x00080000)), true, true, false},
		{"from another port", udp, packetBetween(b, a, udp, segment(81, 1000, 0x00080000)), false, false, true},
	} {
		m := Marked{Protocol: tt.protocol, Mark: mark, Ports: []uint16{53, 80}}
		seen := [][2]netip.AddrPort{
			{netip.AddrPortFrom(a, 1000), netip.AddrPortFrom(b, 80)}, {netip.AddrPortFrom(a6, 1000), netip.AddrPortFrom(b6, 80)},
		}
		if got, ok := m.match(tt.packet, &seen); ok != tt.ok || ok && got.back != tt.back {
			t.Errorf("%s (%d): %+v, match %v", tt.name, tt.protocol, got, ok)
		}
		vm, err := bpf.NewVM(m.filter())
		if err != nil {
			t.Fatal(err)
		}
		if n, err := vm.Run(tt.packet); err != nil || (n == 0) != tt.dropped {
			t.Errorf("%s (%d): the filter keeps %d bytes, %v", tt.name, tt.protocol, n, err)
		}
	}
}

// What is a marked packet or an answer the filter always lets through, and no number of ports makes a program that the kernel
// would not take.
func TestMarkedFilter(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		addrs := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
		if rapid.Bool().Draw(t, "six") {
			addrs = []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")}
		}
		protocol := rapid.SampledFrom([]uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}).Draw(t, "protocol")
		m := Marked{Protocol: protocol, Mark: rapid.Uint32Range(0, 2).Draw(t, "mark"), Ports: rapid.SliceOfN(rapid.Uint16Range(1, 100), 0, mostPorts).Draw(t, "ports")}
		vm, err := bpf.NewVM(m.filter())
		if err != nil {
			t.Fatal(err)
		}
		words := rapid.SliceOfN(rapid.Uint32Range(0, 3), 1, 6).Draw(t, "words")
		b := packetBetween(addrs[0], addrs[1], protocol, segment(rapid.Uint16Range(1, 100).Draw(t, "source"), 1000, words...))
		n, err := vm.Run(b)
		if err != nil {
			t.Fatal(err)
		}
		var seen [][2]netip.AddrPort
		if _, ok := m.match(b, &seen); ok && n == 0 {
			t.Fatalf("%+v: packet % x is the marked one, and is dropped", m, b)
		}
	})
}

// TestMarkedRefused: what has no place for a mark, or would make too long a filter, is refused.
func TestMarkedRefused(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]Marked{
		"protocol 1": {Protocol: unix.IPPROTO_ICMP},
		"at most 64": {Protocol: unix.IPPROTO_UDP, Ports: make([]uint16, mostPorts+1)},
	} {
		if _, err := WatchMarked(t.Context(), m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// space makes a network namespace, moves a device there, whose other end stays in the caller's, and has f make a socket in it.
func space(t *testing.T, device, addr, via string, f func() error) {
	t.Helper()
	n := netnstest.New(t)
	run(t, "ip link set "+device+" netns "+n.Path)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		file, err := os.Open(n.Path)
		if err == nil {
			err = errors.Join(unix.Setns(int(file.Fd()), unix.CLONE_NEWNET), file.Close()) //nolint:gosec // a descriptor
		}
		for _, c := range []string{"link set lo up", "addr add " + addr + " dev " + device, "link set " + device + " up", "route add default via " + via} {
			if err == nil {
				err = exec.Command("ip", strings.Fields(c)...).Run()
			}
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestWatchMarked: of a packet that this host's kernel translates, as a proxy of Services does, both ends of the way through it
// are seen, and those of the answer.
func TestWatchMarked(t *testing.T) {
	enter(t)
	run(t, "ip link add c0 type veth peer name d0", "ip addr add 10.2.0.1/24 dev c0", "ip link set c0 up", "echo 1 >/proc/thread-self/root/proc/sys/net/ipv4/ip_forward",
		`nft -f - <<'EOF'
table ip proxy {
 chain pre { type nat hook prerouting priority dstnat; ip daddr 10.96.0.7 udp dport 80 dnat to 10.2.0.2:8080; }
 chain post { type nat hook postrouting priority srcnat; oifname "c0" masquerade fully-random; }
}
EOF`)
	var server *net.UDPConn
	space(t, "d0", "10.2.0.2/24", "10.2.0.1", func() (err error) {
		server, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 8080})
		return err
	})
	defer server.Close()
	var client *net.UDPConn
	space(t, "b0", "10.1.0.2/24", "10.1.0.1", func() (err error) {
		client, err = net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(10, 96, 0, 7), Port: 80})
		return err
	})
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var both sync.WaitGroup
	both.Go(func() {
		b := make([]byte, 16)
		for {
			if _, from, err := server.ReadFromUDPAddrPort(b); err != nil || write(server, from) != nil {
				return
			}
		}
	})
	both.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_, _ = client.Write(binary.BigEndian.AppendUint32(nil, mark))
			case <-ctx.Done():
				return
			}
		}
	})
	seen, err := WatchMarked(ctx, Marked{Protocol: unix.IPPROTO_UDP, Mark: mark, Ports: []uint16{80, 8080}})
	server.Close()
	both.Wait()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range seen {
		got = append(got, fmt.Sprintf("%s out %t back %t %s %s", s.Device, s.Out, s.Back, s.Ends.Client, s.Ends.Server))
	}
	slices.Sort(got)
	want := []string{
		"a0 out false back false 10.1.0.2 10.96.0.7:80",
		"a0 out true back true 10.1.0.2 10.96.0.7:80",
		"c0 out false back true 10.2.0.1 10.2.0.2:8080",
		"c0 out true back false 10.2.0.1 10.2.0.2:8080",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// write answers with an empty datagram.
func write(c *net.UDPConn, to netip.AddrPort) error {
	_, err := c.WriteToUDPAddrPort(nil, to)
	return err
}
