package workload

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

// outside is an address beyond the host, in a namespace of its own, so that
// packets from there to the workload are forwarded.
const outside = "10.9.0.2"

// withOutside connects a namespace to the host by a wire that takes 1500
// bytes.
func (f *fixture) withOutside(t *testing.T) *netnstest.Netns {
	t.Helper()
	far := netnstest.New(t)
	command(t, f.host, "ip", "link", "add", "far0", "mtu", "1500", "type", "veth", "peer", "name", "eth0", "netns", far.Path)
	for _, c := range []struct {
		ns   *netnstest.Netns
		args []string
	}{
		{f.host, []string{"addr", "add", "10.9.0.1/24", "dev", "far0"}},
		{f.host, []string{"link", "set", "far0", "up"}},
		{far, []string{"addr", "add", outside + "/24", "dev", "eth0"}},
		{far, []string{"link", "set", "eth0", "up"}},
		{far, []string{"route", "add", "default", "via", "10.9.0.1"}},
	} {
		command(t, c.ns, "ip", c.args...)
	}
	if err := f.host.Do(func() error { return procSys.write("net/ipv4/ip_forward", "1") }); err != nil {
		t.Fatal(err)
	}
	return far
}

// sender sends UDP datagrams until the test ends: each is made of packets as
// large as its namespace's kernel takes, or, with discover, of one packet of
// that size with DF set, whatever the kernel has learned of the path.
type sender struct{ sent atomic.Int64 }

func startSender(t *testing.T, ns *netnstest.Netns, to netip.Addr, payload, discover int) *sender {
	t.Helper()
	var fd int
	err := ns.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, discover)
	})
	if err != nil {
		t.Fatal(err)
	}
	s := new(sender)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Paced: a sender that is busy all the time is interrupted between
		// choosing a packet's size and handing the packet over.
		tick := time.NewTicker(200 * time.Microsecond)
		defer tick.Stop()
		buf := make([]byte, payload)
		for ctx.Err() == nil {
			// Refusals are ICMP errors about earlier packets: what the test wants.
			if unix.Sendto(fd, buf, 0, &unix.SockaddrInet4{Port: 9, Addr: to.As4()}) == nil {
				s.sent.Add(1)
			}
			<-tick.C
		}
	}()
	t.Cleanup(func() { cancel(); <-done; _ = unix.Close(fd) })
	return s
}

// waitMore waits until each has sent that many more.
func waitMore(t *testing.T, n int64, senders ...*sender) {
	t.Helper()
	for _, s := range senders {
		until := s.sent.Load() + n
		await.True(t, fmt.Sprintf("%d packets more", n), func() bool { return s.sent.Load() >= until })
	}
}

// dropped returns what both ends of the wire received and dropped.
func (f *fixture) dropped(t *testing.T) (host, pod uint64) {
	t.Helper()
	count := func(ns *netnstest.Netns, name string) (n uint64) {
		err := ns.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer h.Close()
			link, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			n = link.Attrs().Statistics.RxDropped
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return count(f.host, f.spec.Device), count(f.pod, "eth0")
}

func (f *fixture) routeMTU(t *testing.T, mtu int) {
	t.Helper()
	args := []string{"route", "replace", f.spec.Addresses[0].String() + "/32", "dev", f.spec.Device}
	if mtu != 0 {
		args = append(args, "mtu", strconv.Itoa(mtu))
	}
	command(t, f.host, "ip", args...)
}

// TestSetMTUUnderTraffic lowers and raises a wire's MTU again and again while
// both sides send packets as large as they may. Neither end drops one; where
// the order is another, they do.
func TestSetMTUUnderTraffic(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.spec.MTU = 1500
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	far := f.withOutside(t)
	f.addHostRoute(t)
	up := startSender(t, f.pod, netip.MustParseAddr(outside), 3000, unix.IP_PMTUDISC_DONT)
	down := startSender(t, far, f.spec.Addresses[0], 1500-28, unix.IP_PMTUDISC_PROBE)
	waitMore(t, 10, up, down)

	have := f.spec.MTU
	for i := range 40 {
		want := []int{1400, 1450, 1500, 1300, 1500}[i%5]
		f.routeMTU(t, min(have, want))
		f.spec.MTU = want
		if err := f.wire.SetMTU(t.Context(), f.spec, have); err != nil {
			t.Fatal(err)
		}
		f.routeMTU(t, 0)
		have = want
		waitMore(t, 5, up, down)
		host, pod := f.dropped(t)
		if host != 0 || pod != 0 {
			t.Fatalf("change %d, to %d: the host's end dropped %d packets, the workload's %d", i, want, host, pod)
		}
		if err := f.wire.Verify(t.Context(), f.spec, [6]byte{}); err != nil {
			t.Fatal(err)
		}
	}

	// The instrument shows what is dropped where the order is wrong.
	command(t, f.host, "ip", "link", "set", f.spec.Device, "mtu", "1400")
	waitMore(t, 5, up, down)
	host, pod := f.dropped(t)
	if host == 0 || pod != 0 {
		t.Errorf("the host's end was lowered first: it dropped %d packets and the workload's end %d, want some and none", host, pod)
	}
	command(t, f.host, "ip", "link", "set", f.spec.Device, "mtu", "1500")
	command(t, f.pod, "ip", "link", "set", "eth0", "mtu", "1400")
	waitMore(t, 5, up, down)
	if _, pod := f.dropped(t); pod == 0 {
		t.Error("the workload's end was lowered and the host's route was not: nothing was dropped")
	}
}

func mtus(t *testing.T, f *fixture) [2]int {
	t.Helper()
	var out [2]int
	for i, end := range []struct {
		ns   *netnstest.Netns
		name string
	}{{f.host, f.spec.Device}, {f.pod, "eth0"}} {
		line := command(t, end.ns, "ip", "-o", "link", "show", end.name)[0]
		if _, err := fmt.Sscanf(line[strings.Index(line, " mtu "):], " mtu %d", &out[i]); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// A change that was cut short between its steps is completed by a repetition,
// and an MTU that somebody lowered inside is left.
func TestSetMTUFrom(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name      string
		host, pod int
		to        int
		ours      []int
		want      [2]int
	}{
		{"lowered", 1500, 1500, 1450, []int{1500}, [2]int{1450, 1450}},
		{"lowering cut short", 1500, 1450, 1450, []int{1500, 1450}, [2]int{1450, 1450}},
		{"raised", 1450, 1450, 1500, []int{1450}, [2]int{1500, 1500}},
		{"raising cut short", 1500, 1450, 1500, []int{1450, 1500}, [2]int{1500, 1500}},
		{"lowering cut short, then taken back", 1500, 1450, 1500, []int{1500, 1450}, [2]int{1500, 1500}},
		{"nothing to do", 1450, 1450, 1450, []int{1450}, [2]int{1450, 1450}},
		{"lower by hand, lowered", 1500, 1300, 1450, []int{1500}, [2]int{1450, 1300}},
		{"lower by hand, lowered further", 1500, 1480, 1450, []int{1500}, [2]int{1450, 1450}},
		{"lower by hand, raised", 1450, 1300, 1500, []int{1450}, [2]int{1500, 1300}},
		{"higher by hand", 1450, 1500, 1480, []int{1450}, [2]int{1480, 1480}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
				t.Fatal(err)
			}
			command(t, f.host, "ip", "link", "set", f.spec.Device, "mtu", strconv.Itoa(tt.host))
			command(t, f.pod, "ip", "link", "set", "eth0", "mtu", strconv.Itoa(tt.pod))
			f.spec.MTU = tt.to
			for range 2 {
				if err := f.wire.SetMTU(t.Context(), f.spec, tt.ours...); err != nil {
					t.Fatal(err)
				}
				if got := mtus(t, f); got != tt.want {
					t.Fatalf("MTU of the host's end and the workload's: %v, want %v", got, tt.want)
				}
			}
			if err := f.wire.Verify(t.Context(), f.spec, [6]byte{}); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSetMTUWithoutWire(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if err := f.wire.SetMTU(t.Context(), f.spec); !errors.Is(err, ErrDiffers) {
		t.Errorf("no device: %v, want ErrDiffers", err)
	}
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	gone, other := f.spec, f.spec
	gone.Netns = "/run/netns/no-such-namespace"
	if err := f.wire.SetMTU(t.Context(), gone); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("no namespace: %v, want ErrNoNamespace", err)
	}
	// The path leads to another container's namespace by now.
	other.Netns, other.MTU = netnstest.New(t).Path, 1300
	if err := f.wire.SetMTU(t.Context(), other); !errors.Is(err, ErrDiffers) {
		t.Errorf("another namespace: %v, want ErrDiffers", err)
	}
	if got := mtus(t, f); got != [2]int{1450, 1450} {
		t.Errorf("MTUs are %v, want them as they were", got)
	}
}
