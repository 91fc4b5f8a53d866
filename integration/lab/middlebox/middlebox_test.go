package middlebox

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
)

// wires makes two namespaces with a VXLAN tunnel between them, over veth:
// 10.0.0.1 and .2 on the wire, 10.9.0.1 and .2 in the tunnel.
func wires(t *testing.T) (a, b string) {
	t.Helper()
	name := fmt.Sprintf("mb%d-%s", os.Getpid(), strings.ToLower(t.Name()[4:min(len(t.Name()), 12)]))
	spaces := []string{name + "-a", name + "-b"}
	for _, s := range spaces {
		if err := ns.Create(s); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := ns.Delete(s); err != nil {
				t.Error(err)
			}
		})
	}
	for i, s := range spaces {
		if err := ns.Do(s, func() error { return wire(i, spaces[1]) }); err != nil {
			t.Fatal(err)
		}
	}
	return spaces[0], spaces[1]
}

func wire(i int, far string) error {
	if i == 0 {
		fd, err := netns.GetFromName(far)
		if err != nil {
			return err
		}
		defer fd.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "eth0"
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(fd)}); err != nil {
			return fmt.Errorf("add veth: %w", err)
		}
	}
	local, remote := byte(1+i), byte(2-i)
	if err := configure("eth0", netip.AddrFrom4([4]byte{10, 0, 0, local})); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "vx0"
	err := netlink.LinkAdd(&netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 7, Port: vxlanPort, SrcAddr: net.IPv4(10, 0, 0, local), Group: net.IPv4(10, 0, 0, remote), Learning: true,
	})
	if err != nil {
		return fmt.Errorf("add vxlan: %w", err)
	}
	return configure("vx0", netip.AddrFrom4([4]byte{10, 9, 0, local}))
}

func configure(dev string, a netip.Addr) error {
	l, err := netlink.LinkByName(dev)
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(netip.PrefixFrom(a, 24).String())
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(l, addr); err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

// sender sends datagrams in a to a socket in b.
type sender struct {
	t        *testing.T
	out, in  *net.UDPConn
	sequence byte
}

func newSender(t *testing.T, a, b, from, to string) *sender {
	t.Helper()
	s := &sender{t: t}
	err := errors.Join(
		ns.Do(b, func() (err error) {
			s.in, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(to)})
			return err
		}),
		ns.Do(a, func() (err error) {
			s.out, err = net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(from)}, s.in.LocalAddr().(*net.UDPAddr))
			return err
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.in.Close(); s.out.Close() })
	return s
}

func (s *sender) option(name, value int) {
	s.t.Helper()
	raw, err := s.out.SyscallConn()
	if err != nil {
		s.t.Fatal(err)
	}
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, name, value) }); err != nil || serr != nil {
		s.t.Fatal(err, serr)
	}
}

// passes sends a packet of so many bytes of payload and reports whether it, or
// all that it is cut into, got there. What follows it tells when to stop
// waiting: a packet that no fault touches, for the kernel computes its checksum.
func (s *sender) passes(size int, software bool) bool {
	s.t.Helper()
	s.sequence++
	b := make([]byte, size)
	for i := range b {
		b[i] = s.sequence
	}
	if software {
		s.option(unix.UDP_CORK, 1)
	}
	if _, err := s.out.Write(b); err != nil {
		s.t.Fatal(err)
	}
	if software {
		s.option(unix.UDP_CORK, 0)
	}
	s.option(unix.UDP_SEGMENT, 0)
	s.option(unix.UDP_CORK, 1)
	if _, err := s.out.Write([]byte("end")); err != nil {
		s.t.Fatal(err)
	}
	s.option(unix.UDP_CORK, 0)
	if err := s.in.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
		s.t.Fatal(err)
	}
	got := 0
	for buf := make([]byte, 1<<16); ; {
		n, err := s.in.Read(buf)
		if err != nil {
			s.t.Fatal(err)
		}
		if string(buf[:n]) == "end" {
			return got == size
		}
		got += n
	}
}

func TestFaults(t *testing.T) {
	t.Parallel()
	a, b := wires(t)
	tunnel := newSender(t, a, b, "10.9.0.1", "10.9.0.2")
	plain := newSender(t, a, b, "10.0.0.1", "10.0.0.2")
	for _, tt := range []struct {
		name     string
		faults   *Faults
		size     int
		software bool
		segment  int
		want     bool
	}{
		{name: "no faults", size: 100, want: true},
		{name: "no faults attached", faults: &Faults{}, size: 100, want: true},
		{name: "no faults, segments", size: 20000, segment: 1000, want: true},
		{name: "checksum left to the card", faults: &Faults{Checksum: true}, size: 100},
		{name: "checksum of the kernel", faults: &Faults{Checksum: true}, size: 100, software: true, want: true},
		{name: "segments left to the card", faults: &Faults{Segmentation: true}, size: 20000, segment: 1000},
		{name: "whole packets of such a card", faults: &Faults{Segmentation: true}, size: 1000, want: true},
		// Beside the payload: 28 bytes of headers inside, 50 outside.
		{name: "as large as the path", faults: &Faults{MTU: 1400}, size: 1400 - 78, want: true},
		{name: "larger than the path", faults: &Faults{MTU: 1400}, size: 1400 - 77},
		{name: "segments as large as the path", faults: &Faults{MTU: 1400}, size: 10 * (1400 - 78), segment: 1400 - 78, want: true},
		{name: "segments larger than the path", faults: &Faults{MTU: 1400}, size: 10 * (1400 - 77), segment: 1400 - 77},
		{name: "another port", faults: &Faults{Checksum: true, Port: 8472}, size: 100, want: true},
	} {
		if err := ns.Do(b, func() error {
			if tt.faults == nil {
				return Detach("eth0")
			}
			return Attach("eth0", *tt.faults)
		}); err != nil {
			t.Fatal(err)
		}
		tunnel.option(unix.UDP_SEGMENT, tt.segment)
		if got := tunnel.passes(tt.size, tt.software); got != tt.want {
			t.Errorf("%s: passes = %v, want %v", tt.name, got, tt.want)
		}
		// Outside of tunnels nothing is wrong.
		plain.option(unix.UDP_SEGMENT, tt.segment)
		if !plain.passes(tt.size, tt.software) {
			t.Errorf("%s: a packet outside of the tunnel was lost", tt.name)
		}
	}
}

func TestAssemble(t *testing.T) {
	t.Parallel()
	p := new(program)
	p.always("nowhere")
	if _, err := p.assemble(); err == nil {
		t.Error("a jump to nowhere was assembled")
	}
	if err := Attach("no-such-device", Faults{}); err == nil || !strings.Contains(err.Error(), "no-such-device") {
		t.Errorf("Attach to a device that is not there: %v", err)
	}
}
