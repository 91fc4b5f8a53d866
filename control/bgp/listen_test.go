package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestPortTaken: the error names the program; sessions that we open work; when
// the port is free the listener comes without a lost route.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	l, err := net.Listen("tcp4", netip.AddrPortFrom(h[1], DefaultPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, b := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	ca := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, to(h[0], h[1], 64512))
	a.apply(ca)
	cb := testConfig(h[1], 64512, []string{"192.168.2.0/26"}, to(h[1], h[0], 64512), to(h[1], h[2], 64512))
	err = b.Apply(context.Background(), cb)
	var le *ListenError
	if !errors.As(err, &le) {
		t.Fatalf("error %v, want a ListenError", err)
	}
	comm, err2 := os.ReadFile("/proc/self/comm")
	if err2 != nil {
		t.Fatal(err2)
	}
	want := fmt.Sprintf("port 179 on %s is taken by %s (pid %d): stop it, or set listenPort in the BGPConfiguration", h[1], strings.TrimSpace(string(comm)), os.Getpid())
	if diff := cmp.Diff(want, le.Error()); diff != "" {
		t.Errorf("error (-want +got):\n%s", diff)
	}
	b.waitInfo(h[2], "waiting for the peer to connect, but port 179 on")
	b.waitPath("192.168.1.0/26") // b is the active side
	a.waitPath("192.168.2.0/26")
	if err := b.Apply(context.Background(), cb); !errors.As(err, &le) {
		t.Errorf("second Apply: error %v, want a ListenError", err)
	}
	from, fromA := b.mark(), a.mark()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// A process that another test starts has a copy of the listener until it
	// executes its program.
	poll(t, func() string { return fmt.Sprint("not listening with the port free: ", err) }, func() bool {
		err = b.Apply(context.Background(), cb)
		return err == nil
	})
	b.waitUp(h[0])
	poll(t, b.dump, func() bool { return b.happened(from, "put 192.168.1.0/26") > 0 })
	for _, n := range []int{b.happened(from, "del 192.168.1.0/26"), a.happened(fromA, "del 192.168.2.0/26")} {
		if n != 0 {
			t.Errorf("a route went %d times", n)
		}
	}
	conn, err := net.Dial("tcp4", netip.AddrPortFrom(h[1], DefaultPort).String())
	if err != nil {
		t.Fatalf("nothing listens: %v", err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
}

func TestListenErrors(t *testing.T) {
	t.Parallel()
	ap := netip.MustParseAddrPort("10.1.0.11:179")
	for _, tt := range []struct {
		err  error
		says string
	}{
		{&ListenError{Addr: ap, Err: syscall.EADDRINUSE}, "port 179 on 10.1.0.11 is taken by another program: stop it, or set listenPort in the BGPConfiguration"},
		{&ListenError{Addr: ap, Err: syscall.EACCES}, "port 179 on 10.1.0.11 may not be opened: run as root or with CAP_NET_BIND_SERVICE"},
		{&ListenError{Addr: ap, Err: syscall.EMFILE}, "listen on 10.1.0.11:179: too many open files"},
		{canListen(context.Background(), []netip.Addr{netip.MustParseAddr("192.0.2.1")}, 179), "this host does not have the address 192.0.2.1 to listen on"},
	} {
		if diff := cmp.Diff(tt.says, tt.err.Error()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestWithoutIPv6: a kernel without IPv6 keeps nobody from listening on IPv4.
func TestWithoutIPv6(t *testing.T) {
	t.Parallel()
	four, six := netip.IPv4Unspecified(), netip.IPv6Unspecified()
	for name, c := range map[string]struct {
		addrs  []netip.Addr
		own    netip.Addr
		speaks bool
		want   []netip.Addr
	}{
		"IPv4 alone":         {[]netip.Addr{four}, netip.Addr{}, false, []netip.Addr{four}},
		"links":              {[]netip.Addr{four, six}, netip.Addr{}, true, []netip.Addr{four, six}},
		"links without IPv6": {[]netip.Addr{four, six}, netip.Addr{}, false, []netip.Addr{four}},
		"an IPv6 address":    {[]netip.Addr{four, six}, netip.MustParseAddr("fd00:1::11"), false, []netip.Addr{four, six}},
	} {
		cfg := Config{ListenAddrs: c.addrs, NextHop6: c.own}
		cfg.withoutIPv6(func() bool { return c.speaks })
		if diff := cmp.Diff(c.want, cfg.ListenAddrs, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if !speaksIPv6() {
		t.Error("this kernel speaks IPv6: other tests use it")
	}
}
