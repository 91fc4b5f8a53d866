package nflog

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

func run(t *testing.T, ns *netnstest.Netns, args ...string) {
	t.Helper()
	err := ns.Do(func() error {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What rules log comes with the rule's prefix, the group and the headers, of
// both families; other groups are others' business.
func TestListen(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	run(t, ns, "ip", "link", "set", "lo", "up")
	run(t, ns, "nft", `add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule inet t c udp dport 7001 log group 77 prefix "D|one"; add rule inet t c udp dport 7002 log group 78 prefix "A|two"; add rule inet t c udp dport 7003 log group 79 prefix "another's"; add rule inet t c icmp type echo-request log group 77 prefix "ping"`)
	var l *Listener
	if err := ns.Do(func() (err error) { l, err = Open(77, 78); return err }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	packets, done := make(chan Packet, 10), make(chan error, 1)
	go func() { done <- l.Run(ctx, 0, func(p Packet) { packets <- p }) }()
	err := ns.Do(func() error {
		for _, to := range []string{"127.0.0.1:7003", "127.0.0.1:7001", "[::1]:7002"} {
			c, err := net.Dial("udp", to)
			if err != nil {
				return err
			}
			_, err = c.Write([]byte("x"))
			c.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	run(t, ns, "ping", "-c1", "-W1", "127.0.0.1")
	got := map[string]string{}
	for len(got) < 3 {
		select {
		case p := <-packets:
			got[p.Prefix] = fmt.Sprintf("group %d, protocol %d, %s → %s port %d, type %d, out %t", p.Group, p.Protocol, p.Src, p.Dst, p.DstPort, p.ICMPType, p.Out == 1)
		case <-ctx.Done():
			t.Fatalf("only %v came", got)
		}
	}
	want := map[string]string{
		"D|one": "group 77, protocol 17, 127.0.0.1 → 127.0.0.1 port 7001, type 0, out true",
		"A|two": "group 78, protocol 17, ::1 → ::1 port 7002, type 0, out true",
		"ping":  "group 77, protocol 1, 127.0.0.1 → 127.0.0.1 port 0, type 8, out true",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("logged (-want +got):\n%s", d)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("run: %v, want the context's error", err)
	}
}

// A reader that takes so many packets a second only loses what there is no room
// for, and knows to the packet how many that were.
func TestFlood(t *testing.T) {
	t.Parallel()
	const most, sent = 1000, 20000
	ns := netnstest.New(t)
	run(t, ns, "ip", "link", "set", "lo", "up")
	run(t, ns, "nft", `add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule inet t c udp dport 7001 log group 77 prefix "D|one" drop`)
	var l *Listener
	var c net.Conn
	err := ns.Do(func() (err error) {
		if l, err = Open(77); err != nil {
			return err
		}
		c, err = net.Dial("udp", "127.0.0.1:7001")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	send := func() { _, _ = c.Write([]byte("x")) } // EPERM: it was dropped
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	var seen atomic.Uint64
	done := make(chan error, 1)
	// The first second's packets are taken, and the rest waits in the socket.
	go func() { done <- l.Run(ctx, most, func(Packet) { seen.Add(1) }) }()
	for range sent {
		send()
	}
	total := uint64(sent)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for l.Missed() == 0 || seen.Load()+l.Missed() < total {
		select {
		case <-ctx.Done():
			t.Fatalf("%d packets seen and %d missed of %d", seen.Load(), l.Missed(), total)
		case <-tick.C:
			// What is missing shows by the next packet.
			if seen.Load()+l.Missed() < total {
				send()
				total++
			}
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("run: %v, want the context's error", err)
	}
	if n := seen.Load() + l.Missed(); n > total {
		t.Errorf("%d packets seen and %d missed of %d", seen.Load(), l.Missed(), total)
	}
}

// A group that another process listens to is refused by name.
func TestGroupTaken(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	err := ns.Do(func() error {
		first, err := Open(5)
		if err != nil {
			return err
		}
		defer first.Close()
		if second, err := Open(4, 5); err == nil {
			second.Close()
			return errors.New("a second listener was let in")
		} else if !strings.Contains(err.Error(), "group 5") {
			return fmt.Errorf("%w: want the group named", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestParseHeader(t *testing.T) {
	t.Parallel()
	v4 := func(protocol, fragment byte, rest ...byte) []byte {
		return append([]byte{0x45, 0, 0, 0, 0, 0, 0, fragment, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2}, rest...)
	}
	v6 := func(next byte, rest ...byte) []byte {
		b := make([]byte, 40)
		b[0], b[6], b[23], b[39] = 0x60, next, 1, 2
		return append(b, rest...)
	}
	four := Header{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.2")}
	six := Header{Src: netip.MustParseAddr("::1"), Dst: netip.MustParseAddr("::2")}
	with := func(h Header, protocol uint8, src, dst uint16, typ, code uint8) Header {
		h.Protocol, h.SrcPort, h.DstPort, h.ICMPType, h.ICMPCode = protocol, src, dst, typ, code
		return h
	}
	for _, tt := range []struct {
		name string
		in   []byte
		want Header
	}{
		{"nothing", nil, Header{}},
		{"no IP", []byte{0x15, 2, 3}, Header{}},
		{"TCP", v4(6, 0, 0, 80, 1, 0), with(four, 6, 80, 256, 0, 0)},
		{"a later fragment has no ports", v4(6, 1, 0, 80, 1, 0), with(four, 6, 0, 0, 0, 0)},
		{"cut off before the ports", v4(17, 0, 0), with(four, 17, 0, 0, 0, 0)},
		{"ICMP", v4(1, 0, 3, 4), with(four, 1, 0, 0, 3, 4)},
		{"a protocol without ports", v4(47, 0, 0, 80, 1, 0), with(four, 47, 0, 0, 0, 0)},
		{"UDP over IPv6", v6(17, 0, 53, 0, 54), with(six, 17, 53, 54, 0, 0)},
		{"behind options", v6(0, 58, 0, 0, 0, 0, 0, 0, 0, 128, 0), with(six, 58, 0, 0, 128, 0)},
		{"behind a fragment header", v6(44, 17, 0, 0, 1, 0, 0, 0, 0, 0, 53, 0, 54), with(six, 17, 53, 54, 0, 0)},
		{"IPv6's later fragment", v6(44, 17, 0, 0, 9, 0, 0, 0, 0, 0, 53, 0, 54), with(six, 17, 0, 0, 0, 0)},
		{"options cut off", v6(0, 58), with(six, 0, 0, 0, 0, 0)},
	} {
		if d := cmp.Diff(tt.want, ParseHeader(tt.in), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}
