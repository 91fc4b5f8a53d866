package survey

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// packetBetween makes the beginning of a packet.
func packetBetween(src, dst netip.Addr, protocol uint8, payload []byte) []byte {
	var b []byte
	if src.Is4() {
		b = make([]byte, 20)
		b[0], b[9] = 0x45, protocol
		copy(b[12:], src.AsSlice())
		copy(b[16:], dst.AsSlice())
	} else {
		b = make([]byte, 40)
		b[0], b[6] = 0x60, protocol
		copy(b[8:], src.AsSlice())
		copy(b[24:], dst.AsSlice())
	}
	return append(b, payload...)
}

func ports(a, b uint16) []byte {
	return append(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, a), b), 0, 0, 0, 0)
}

func TestMatch(t *testing.T) {
	t.Parallel()
	a, b, x := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	a6, b6 := netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
	tcp := Connection{Src: a, Dst: b, Protocol: 6, SrcPort: 1000, DstPort: 80}
	echo := Connection{Src: a, Dst: b, Protocol: 1, ICMPID: 7}
	echo6 := Connection{Src: a6, Dst: b6, Protocol: 58, ICMPID: 7}
	fragment := packetBetween(a, b, 6, ports(1000, 80))
	fragment[7] = 1
	for _, tt := range []struct {
		name     string
		c        Connection
		packet   []byte
		back, ok bool
	}{
		{"there", tcp, packetBetween(a, b, 6, ports(1000, 80)), false, true},
		{"back", tcp, packetBetween(b, a, 6, ports(80, 1000)), true, true},
		{"another port", tcp, packetBetween(a, b, 6, ports(1001, 80)), false, false},
		{"another address", tcp, packetBetween(a, x, 6, ports(1000, 80)), false, false},
		{"another protocol", tcp, packetBetween(a, b, 17, ports(1000, 80)), false, false},
		{"a later fragment", tcp, fragment, false, false},
		{"cut off", tcp, packetBetween(a, b, 6, nil), false, false},
		{"nothing", tcp, nil, false, false},
		{"echo", echo, packetBetween(a, b, 1, []byte{8, 0, 0, 0, 0, 7, 0, 1}), false, true},
		{"its answer", echo, packetBetween(b, a, 1, []byte{0, 0, 0, 0, 0, 7, 0, 1}), true, true},
		{"another's answer", echo, packetBetween(b, a, 1, []byte{0, 0, 0, 0, 0, 8, 0, 1}), false, false},
		{"echo of IPv6", echo6, packetBetween(a6, b6, 58, []byte{128, 0, 0, 0, 0, 7, 0, 1}), false, true},
		{"its answer", echo6, packetBetween(b6, a6, 58, []byte{129, 0, 0, 0, 0, 7, 0, 1}), true, true},
	} {
		if back, ok := tt.c.match(tt.packet); ok != tt.ok || ok && back != tt.back {
			t.Errorf("%s: back %v, match %v", tt.name, back, ok)
		}
	}
}

// What the kernel's filter lets through is what is between the two addresses, by the same packets read in Go.
func TestBetween(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		addrs := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("11.0.0.1")}
		if rapid.Bool().Draw(t, "six") {
			addrs = []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00:1::1")}
		}
		pick := func(name string) netip.Addr { return rapid.SampledFrom(addrs).Draw(t, name) }
		protocols := rapid.SampledFrom([]uint8{1, 6, 17, 58})
		c := Connection{Src: pick("a"), Dst: pick("b"), Protocol: protocols.Draw(t, "protocol")}
		src, dst, protocol := pick("src"), pick("dst"), protocols.Draw(t, "packet's")
		vm, err := bpf.NewVM(between(c))
		if err != nil {
			t.Fatal(err)
		}
		n, err := vm.Run(packetBetween(src, dst, protocol, ports(1, 2)))
		if err != nil {
			t.Fatal(err)
		}
		want := protocol == c.Protocol && (src == c.Src && dst == c.Dst || src == c.Dst && dst == c.Src)
		if (n > 0) != want {
			t.Fatalf("%+v: packet %s > %s %d: kept %d", c, src, dst, protocol, n)
		}
	})
}

// A packet and its answer are seen on the devices of a real kernel, and nothing stays.
func TestWatch(t *testing.T) {
	enter(t)
	self := netip.MustParseAddr("10.1.0.1")
	c := Connection{Src: self, Dst: self, Protocol: unix.IPPROTO_UDP, SrcPort: 4000, DstPort: 4001}
	there, err := net.ListenUDP("udp4", &net.UDPAddr{IP: self.AsSlice(), Port: int(c.DstPort)})
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	here, err := net.DialUDP("udp4", &net.UDPAddr{IP: self.AsSlice(), Port: int(c.SrcPort)}, &net.UDPAddr{IP: self.AsSlice(), Port: int(c.DstPort)})
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_, _ = here.Write([]byte("?"))
				_, _ = there.WriteToUDPAddrPort([]byte("!"), netip.AddrPortFrom(self, c.SrcPort))
			case <-stop:
				return
			}
		}
	}()
	got, err := Watch(ctx, c)
	close(stop)
	<-done
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if got[i].Packets == 0 {
			t.Errorf("%+v: no packets", got[i])
		}
		got[i].Packets = 0
	}
	slices.SortStableFunc(got, func(a, b Sighting) int {
		switch {
		case a.Back == b.Back:
			return 0
		case b.Back:
			return -1
		}
		return 1
	})
	want := []Sighting{{Device: "lo", Out: true}, {Device: "lo"}, {Device: "lo", Out: true, Back: true}, {Device: "lo", Back: true}}
	if d := cmp.Diff(want, got, cmpopts.EquateComparable(Ends{})); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	b, err := os.ReadFile("/proc/thread-self/net/packet")
	if err != nil || bytes.Count(b, []byte("\n")) > 1 { // the headings
		t.Errorf("packet sockets are left: %s, %v", b, err)
	}
}
