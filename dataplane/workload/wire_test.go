package workload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

const containerID = "0123456789abcdef"

type fixture struct {
	wire *Wire
	host *netnstest.Netns
	pod  *netnstest.Netns
	spec Spec
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{host: netnstest.New(t), pod: netnstest.New(t)}
	var err error
	f.wire, err = New(Config{HostNetns: f.host.Path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.wire.Close)
	owner := Owner{"net1", containerID, "eth0"}
	f.spec = Spec{
		Device:    DeviceName(owner, "", ""),
		Owner:     owner,
		Netns:     f.pod.Path,
		Addresses: []netip.Addr{netip.MustParseAddr("192.168.7.1")},
		MTU:       1450,
	}
	return f
}

// command runs a command in a namespace and returns its output's lines,
// trimmed. Complaints are apart: ip(8) has one of each name in /run/netns that somebody is
// just making or removing.
func command(t *testing.T, ns *netnstest.Netns, name string, args ...string) []string {
	t.Helper()
	var out, errs bytes.Buffer
	err := ns.Do(func() error {
		cmd := exec.Command(name, args...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		return cmd.Run()
	})
	if err != nil {
		t.Fatalf("%s %v: %v\n%s%s", name, args, err, &errs, &out)
	}
	var lines []string
	for l := range strings.Lines(out.String()) {
		if l = strings.Join(strings.Fields(l), " "); l != "" {
			lines = append(lines, l)
		}
	}
	return lines
}

func contains(t *testing.T, lines []string, want string) {
	t.Helper()
	if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, want) }) {
		t.Errorf("no line with %q in:\n%s", want, strings.Join(lines, "\n"))
	}
}

// addHostRoute does what dataplane/kernel does for an attachment.
func (f *fixture) addHostRoute(t *testing.T) {
	t.Helper()
	for _, a := range f.spec.Addresses {
		command(t, f.host, "ip", "route", "replace", netip.PrefixFrom(a, a.BitLen()).String(), "dev", f.spec.Device)
	}
	err := f.host.Do(func() error {
		for _, s := range f.wire.HostSysctls(f.spec.Device, f.spec.Addresses) {
			if err := procSys.write(s.Name, s.Value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAttach(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	end, err := f.wire.Attach(ctx, f.spec)
	if err != nil {
		t.Fatal(err)
	}
	if end.MAC.IsZero() {
		t.Error("no MAC address reported")
	}
	f.addHostRoute(t)

	in := func(args ...string) []string { return command(t, f.pod, "ip", args...) }
	if diff := cmp.Diff([]string{"default via 169.254.1.1 dev eth0", "169.254.1.1 dev eth0 scope link"}, in("route")); diff != "" {
		t.Errorf("routes in the pod (-want +got):\n%s", diff)
	}
	contains(t, in("addr", "show", "dev", "eth0"), "inet 192.168.7.1/32 scope global eth0")
	contains(t, in("link", "show", "dev", "eth0"), "mtu 1450")
	contains(t, in("link", "show", "dev", "eth0"), "link/ether "+end.MAC.String())
	contains(t, in("neigh"), "169.254.1.1 dev eth0 lladdr ee:ee:ee:ee:ee:ee PERMANENT")
	contains(t, in("link", "show", "dev", "lo"), ",UP")
	contains(t, command(t, f.pod, "cat", "/proc/sys/net/ipv4/ip_forward"), "0")
	host := command(t, f.host, "ip", "link", "show", "dev", f.spec.Device)
	contains(t, host, "mtu 1450")
	contains(t, host, "link/ether ee:ee:ee:ee:ee:ee")
	contains(t, host, "alias routerd:net1/0123456789abcdef/eth0")
	contains(t, host, ",UP")

	// The host has no default route here: packets must pass all the same, both
	// ways.
	command(t, f.host, "ip", "link", "set", "lo", "up")
	command(t, f.host, "ip", "addr", "add", "10.9.9.9/32", "dev", "lo")
	command(t, f.pod, "ping", "-c", "1", "-W", "5", "10.9.9.9")
	command(t, f.host, "ping", "-c", "1", "-W", "5", "-I", "10.9.9.9", "192.168.7.1")

	if err := f.wire.Verify(ctx, f.spec, end.MAC); err != nil {
		t.Errorf("verify: %v", err)
	}
	devices, err := f.wire.Devices(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{f.spec.Device: f.spec.Owner.Alias()}, devices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func TestAttachWithForwarding(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.spec.Forwarding = true
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	contains(t, command(t, f.pod, "cat", "/proc/sys/net/ipv4/ip_forward"), "1")
}

// A repeat makes a wire whole whatever of it is missing, and keeps what is
// there: the pair's index and MAC stay.
func TestAttachRepairs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, f *fixture)
		remade bool
	}{
		{"nothing", func(*testing.T, *fixture) {}, false},
		{"ends down", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "link", "set", "eth0", "down")
			command(t, f.host, "ip", "link", "set", f.spec.Device, "down")
		}, false},
		{"default route gone", func(t *testing.T, f *fixture) { command(t, f.pod, "ip", "route", "del", "default") }, false},
		{"routes gone", func(t *testing.T, f *fixture) { command(t, f.pod, "ip", "route", "flush", "dev", "eth0") }, false},
		{"neighbour gone", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "neigh", "del", "169.254.1.1", "dev", "eth0")
		}, false},
		{"address gone", func(t *testing.T, f *fixture) { command(t, f.pod, "ip", "addr", "flush", "dev", "eth0") }, false},
		{"another address", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "addr", "add", "192.168.7.99/32", "dev", "eth0")
		}, false},
		{"MTU changed", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "link", "set", "eth0", "mtu", "1400")
			command(t, f.host, "ip", "link", "set", f.spec.Device, "mtu", "1400")
		}, false},
		{"host end's MAC changed", func(t *testing.T, f *fixture) {
			command(t, f.host, "ip", "link", "set", f.spec.Device, "address", "02:00:00:00:00:01")
		}, false},
		{"killed before the alias", func(t *testing.T, f *fixture) {
			command(t, f.host, "ip", "link", "set", f.spec.Device, "alias", "")
		}, true},
		{"pair gone", func(t *testing.T, f *fixture) { command(t, f.host, "ip", "link", "del", f.spec.Device) }, true},
		{"other namespace", func(t *testing.T, f *fixture) {
			f.pod = netnstest.New(t)
			f.spec.Netns = f.pod.Path
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			ctx := t.Context()
			first, err := f.wire.Attach(ctx, f.spec)
			if err != nil {
				t.Fatal(err)
			}
			tt.damage(t, f)
			second, err := f.wire.Attach(ctx, f.spec)
			if err != nil {
				t.Fatal(err)
			}
			if remade := first != second; remade != tt.remade {
				t.Errorf("made anew: %v, want %v", remade, tt.remade)
			}
			if err := f.wire.Verify(ctx, f.spec, second.MAC); err != nil {
				t.Errorf("after the repeat: %v", err)
			}
			contains(t, command(t, f.pod, "ip", "neigh"), "169.254.1.1 dev eth0 lladdr ee:ee:ee:ee:ee:ee PERMANENT")
			if lines := command(t, f.pod, "ip", "-4", "-o", "addr", "show", "dev", "eth0"); len(lines) != 1 {
				t.Errorf("addresses: %v", lines)
			}
		})
	}
}

func TestAttachRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		prepare func(t *testing.T, f *fixture)
		want    error
		says    string
	}{
		{"foreign device on the host", func(t *testing.T, f *fixture) {
			command(t, f.host, "ip", "link", "add", f.spec.Device, "type", "bridge")
		}, ErrClash, "is not routerd's"},
		{"stranger's veth on the host", func(t *testing.T, f *fixture) {
			command(t, f.host, "ip", "link", "add", f.spec.Device, "type", "veth", "peer", "name", "other")
			command(t, f.host, "ip", "link", "set", f.spec.Device, "alias", "uplink")
		}, ErrClash, `alias "uplink"`},
		{"another container's device", func(t *testing.T, f *fixture) {
			s := f.spec
			s.Owner.ContainerID, s.Netns = "0123456789abcdef-2", netnstest.New(t).Path
			if _, err := f.wire.Attach(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}, ErrClash, "belongs to net1/0123456789abcdef-2/eth0"},
		{"interface in the pod", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "link", "add", "eth0", "type", "bridge")
		}, ErrClash, "interface eth0 (bridge) exists"},
		{"namespace gone", func(_ *testing.T, f *fixture) { f.pod.End() }, ErrNoNamespace, "no such network namespace"},
		{"not a namespace", func(t *testing.T, f *fixture) { f.spec.Netns = "/proc/self/comm" }, ErrNoNamespace, "is not a namespace"},
		{"host's namespace", func(_ *testing.T, f *fixture) { f.spec.Netns = f.host.Path }, ErrClash, "the host's own network namespace"},
		{"IPv6 off on the host", func(t *testing.T, f *fixture) {
			f.spec.Addresses = append(f.spec.Addresses, netip.MustParseAddr("fd00::1"))
			command(t, f.host, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
		}, ErrNoIPv6, "net.ipv6.conf.all.disable_ipv6 is 1; set it to 0"},
		{"MTU out of range", func(_ *testing.T, f *fixture) { f.spec.MTU = 20 }, nil, "make veth pair"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			tt.prepare(t, f)
			_, err := f.wire.Attach(t.Context(), f.spec)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Fatalf("got %v, want an error that says %q", err, tt.says)
			}
			if tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("%v does not match %v", err, tt.want)
			}
		})
	}
}

func TestTakeOver(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	if _, err := f.wire.Attach(ctx, f.spec); err != nil {
		t.Fatal(err)
	}
	next := f.spec
	next.Owner.ContainerID, next.Netns, next.TakeOver = "fedcba98", netnstest.New(t).Path, true
	if _, err := f.wire.Attach(ctx, next); err != nil {
		t.Fatal(err)
	}
	// The first container's DEL comes late and must not cut the second's wire.
	if err := f.wire.Detach(ctx, f.spec.Device, f.spec.Owner); err != nil {
		t.Fatal(err)
	}
	if err := f.wire.Verify(ctx, next, dataplane.MAC{}); err != nil {
		t.Errorf("second container: %v", err)
	}
}

func TestVerifyNamesDifferences(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, f *fixture)
		says   string
	}{
		{"device gone", func(t *testing.T, f *fixture) { command(t, f.host, "ip", "link", "del", f.spec.Device) }, "is missing"},
		{"down", func(t *testing.T, f *fixture) { command(t, f.host, "ip", "link", "set", f.spec.Device, "down") }, "is down"},
		{"MTU", func(t *testing.T, f *fixture) { command(t, f.pod, "ip", "link", "set", "eth0", "mtu", "1500") }, "has the MTU 1500, want 1450"},
		{"MAC", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:01")
		}, "has the MAC address 02:00:00:00:00:01"},
		{"address", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "addr", "del", "192.168.7.1/32", "dev", "eth0")
		}, "address 192.168.7.1 is missing"},
		{"default route", func(t *testing.T, f *fixture) { command(t, f.pod, "ip", "route", "del", "default") }, "default route via 169.254.1.1 is missing"},
		{"gateway's route", func(t *testing.T, f *fixture) { command(t, f.pod, "ip", "route", "flush", "dev", "eth0") }, "route to 169.254.1.1 is missing"},
		{"neighbour", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "neigh", "replace", "169.254.1.1", "dev", "eth0", "lladdr", "02:00:00:00:00:02", "nud", "permanent")
		}, "neighbour 169.254.1.1 has the MAC address 02:00:00:00:00:02"},
		{"alias", func(t *testing.T, f *fixture) { command(t, f.host, "ip", "link", "set", f.spec.Device, "alias", "x") }, `alias "x"`},
		{"other namespace", func(t *testing.T, f *fixture) { f.spec.Netns = netnstest.New(t).Path }, "is not connected"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			end, err := f.wire.Attach(t.Context(), f.spec)
			if err != nil {
				t.Fatal(err)
			}
			tt.damage(t, f)
			err = f.wire.Verify(t.Context(), f.spec, end.MAC)
			if !errors.Is(err, ErrDiffers) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want ErrDiffers that says %q", err, tt.says)
			}
		})
	}
}

func TestDetach(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	detach := func() {
		t.Helper()
		if err := f.wire.Detach(ctx, f.spec.Device, f.spec.Owner); err != nil {
			t.Error(err)
		}
		if l, err := f.wire.lookup(f.spec.Device); l != nil || err != nil {
			t.Errorf("device is there: %v %v", l, err)
		}
	}
	detach() // never attached
	attach := func() {
		t.Helper()
		if _, err := f.wire.Attach(ctx, f.spec); err != nil {
			t.Fatal(err)
		}
	}
	attach()
	detach()
	detach() // twice
	attach()
	f.pod.End() // the namespace goes first
	detach()

	command(t, f.host, "ip", "link", "add", f.spec.Device, "type", "bridge")
	if err := f.wire.Detach(ctx, f.spec.Device, f.spec.Owner); err != nil {
		t.Error(err)
	}
	contains(t, command(t, f.host, "ip", "link", "show", "dev", f.spec.Device), f.spec.Device)
}

// Many detached at once go together, and nothing else goes with them.
func TestDetachTogether(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	const n = 60
	specs := make([]Spec, n)
	for i := range specs {
		s := f.spec
		s.Owner = Owner{"net1", fmt.Sprintf("container-%d", i), fmt.Sprintf("eth%d", i)}
		s.Device = DeviceName(s.Owner, "", "")
		specs[i] = s
		if _, err := f.wire.Attach(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	kept := specs[n-1]
	command(t, f.host, "ip", "link", "add", "br0", "type", "bridge")
	start := time.Now()
	var wg sync.WaitGroup
	for _, s := range specs[:n-1] {
		wg.Go(func() {
			if err := f.wire.Detach(ctx, s.Device, s.Owner); err != nil {
				t.Error(err)
			}
			if l, err := f.wire.lookup(s.Device); l != nil || err != nil {
				t.Errorf("%s after Detach: %v %v", s.Device, l, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d at once: %v", n-1, time.Since(start))
	devices, err := f.wire.Devices(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{kept.Device: kept.Owner.Alias()}, devices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	contains(t, command(t, f.host, "ip", "link"), "br0")
}

// A caller that gives up while another holds the turn leaves the device alone.
func TestDetachGivesUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	f.wire.reaper.turn <- struct{}{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.wire.Detach(ctx, f.spec.Device, f.spec.Owner); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
	<-f.wire.reaper.turn
	if len(f.wire.reaper.waiting) != 0 {
		t.Error("still queued")
	}
	if err := f.wire.Detach(t.Context(), f.spec.Device, f.spec.Owner); err != nil {
		t.Error(err)
	}
}

func TestReaperFindsDeviceGone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	link, err := f.wire.lookup(f.spec.Device)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := f.wire.reaper.delete(t.Context(), link); err != nil {
			t.Error(err)
		}
	}
}

func BenchmarkAttach(b *testing.B) {
	host, pod := netnstest.New(b), netnstest.New(b)
	w, err := New(Config{HostNetns: host.Path})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	owner := Owner{"net1", containerID, "eth0"}
	spec := Spec{Device: DeviceName(owner, "", ""), Owner: owner, Netns: pod.Path, MTU: 1450, Addresses: []netip.Addr{netip.MustParseAddr("192.168.7.1")}}
	for b.Loop() {
		if _, err := w.Attach(b.Context(), spec); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := w.Detach(b.Context(), spec.Device, spec.Owner); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// The thread that entered a namespace comes back: afterwards this process's
// goroutines see their own devices only.
func TestNamespacesStayApart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			h, err := netlink.NewHandle()
			if err != nil {
				t.Error(err)
				return
			}
			defer h.Close()
			if _, err := h.LinkByName(f.spec.Device); err == nil {
				t.Error("the process's namespace has the lab's device")
			}
			if _, err := net.Interfaces(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// A second interface of a container must not cut the first one off, whichever
// is removed first, and both are as they were made all along.
func TestSecondInterface(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"eth0", "eth1"} {
		t.Run(first+" goes first", func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			ctx := t.Context()
			second := f.spec
			second.Owner.Interface = "eth1"
			second.Device = DeviceName(second.Owner, "", "")
			second.Addresses = []netip.Addr{netip.MustParseAddr("192.168.7.2")}
			specs := map[string]Spec{"eth0": f.spec, "eth1": second}
			// Twice, for an ADD may come again.
			for _, name := range []string{"eth0", "eth1", "eth1", "eth0"} {
				if _, err := f.wire.Attach(ctx, specs[name]); err != nil {
					t.Fatal(err)
				}
			}
			contains(t, command(t, f.pod, "ip", "route", "get", "10.9.9.9"), "dev eth0")
			contains(t, command(t, f.pod, "ip", "route", "get", "10.9.9.9", "oif", "eth1"), "via 169.254.1.1 dev eth1")
			for name, spec := range specs {
				if err := f.wire.Verify(ctx, spec, dataplane.MAC{}); err != nil {
					t.Errorf("verify %s: %v", name, err)
				}
			}
			other := map[string]string{"eth0": "eth1", "eth1": "eth0"}[first]
			if err := f.wire.Detach(ctx, specs[first].Device, specs[first].Owner); err != nil {
				t.Fatal(err)
			}
			contains(t, command(t, f.pod, "ip", "route", "get", "10.9.9.9"), "via 169.254.1.1 dev "+other)
			if err := f.wire.Verify(ctx, specs[other], dataplane.MAC{}); err != nil {
				t.Errorf("verify %s after %s went: %v", other, first, err)
			}
		})
	}
}

func TestVerifyRoute(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	if _, err := f.wire.Attach(ctx, f.spec); err != nil {
		t.Fatal(err)
	}
	f.addHostRoute(t)
	addr := f.spec.Addresses[0]
	if err := f.wire.VerifyRoute(ctx, f.spec.Device, addr); err != nil {
		t.Errorf("with its route: %v", err)
	}
	command(t, f.host, "ip", "route", "del", addr.String())
	for _, kind := range []string{"", "blackhole", "unreachable", "prohibit"} {
		if kind != "" {
			command(t, f.host, "ip", "route", "replace", kind, "192.168.7.0/26")
		}
		err := f.wire.VerifyRoute(ctx, f.spec.Device, addr)
		if !errors.Is(err, ErrDiffers) || !strings.Contains(err.Error(), "the host's route to 192.168.7.1 does not lead to") {
			t.Errorf("with %q in its place: got %v, want ErrDiffers", kind, err)
		}
	}
}
