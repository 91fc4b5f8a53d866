package workload

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

const (
	gateway6 = "fe80::ecee:eeff:feee:eeee"
	address6 = "fd00:7::1"
)

// newFixture6 is a fixture whose workload has an IPv6 address, and an IPv4
// address if dual is set.
func newFixture6(t *testing.T, dual bool) *fixture {
	t.Helper()
	f := newFixture(t)
	if !dual {
		f.spec.Addresses = nil
	}
	f.spec.Addresses = append(f.spec.Addresses, netip.MustParseAddr(address6))
	return f
}

// The first packet passes, in either direction, right after Attach: no address
// waits for duplicate address detection.
func TestAttachIPv6(t *testing.T) {
	t.Parallel()
	for name, dual := range map[string]bool{"dual stack": true, "IPv6 alone": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture6(t, dual)
			command(t, f.host, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
			// As runtimes leave the namespace of a container without IPv6.
			command(t, f.pod, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
			command(t, f.pod, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")

			end, err := f.wire.Attach(t.Context(), f.spec)
			if err != nil {
				t.Fatal(err)
			}
			f.addHostRoute(t)
			for where, ns := range map[string][]string{
				"pod":  command(t, f.pod, "ip", "-6", "-o", "addr", "show", "scope", "global"),
				"host": command(t, f.host, "ip", "-6", "-o", "addr", "show", "dev", f.spec.Device),
			} {
				if len(ns) == 0 || slices.ContainsFunc(ns, func(l string) bool { return strings.Contains(l, "tentative") }) {
					t.Errorf("IPv6 addresses in the %s: %q; want them usable", where, ns)
				}
			}
			f.pingHost(t)
			command(t, f.host, "ping", "-6", "-c", "1", "-W", "5", "-I", "fd00:99::9", address6)

			contains(t, command(t, f.pod, "ip", "-6", "addr", "show", "dev", "eth0"), "inet6 "+address6+"/128 scope global")
			contains(t, command(t, f.pod, "ip", "-6", "route"), "default via "+gateway6+" dev eth0")
			contains(t, command(t, f.pod, "ip", "-6", "neigh"), gateway6+" dev eth0 lladdr ee:ee:ee:ee:ee:ee")
			contains(t, command(t, f.pod, "ip", "-6", "neigh", "show", "nud", "permanent"), gateway6)
			contains(t, command(t, f.host, "ip", "-6", "addr", "show", "dev", f.spec.Device), "inet6 "+gateway6+"/64 scope link")
			contains(t, command(t, f.pod, "cat", "/proc/sys/net/ipv6/conf/all/forwarding"), "0")
			if got := command(t, f.pod, "ip", "-4", "-o", "addr", "show", "dev", "eth0"); (len(got) == 1) != dual {
				t.Errorf("IPv4 addresses: %q", got)
			}
			if err := f.wire.Verify(t.Context(), f.spec, end.MAC); err != nil {
				t.Errorf("verify: %v", err)
			}
			for _, a := range f.spec.Addresses {
				if err := f.wire.VerifyRoute(t.Context(), f.spec.Device, a); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A workload without an IPv6 address does not reach the host by a link-local
// one, and its own namespace stays as the runtime made it.
func TestNoIPv6(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	f.addHostRoute(t)
	if got := command(t, f.host, "ip", "-6", "addr", "show", "dev", f.spec.Device); len(got) != 0 {
		t.Errorf("IPv6 addresses of the host end: %q", got)
	}
	contains(t, command(t, f.pod, "cat", "/proc/sys/net/ipv6/conf/eth0/disable_ipv6"), "0")
	if got := command(t, f.pod, "ip", "-6", "route", "show", "default"); len(got) != 0 {
		t.Errorf("IPv6 default route: %q", got)
	}

	// The container's next ADD asks for both.
	f.spec.Addresses = append(f.spec.Addresses, netip.MustParseAddr(address6))
	end, err := f.wire.Attach(t.Context(), f.spec)
	if err != nil {
		t.Fatal(err)
	}
	f.addHostRoute(t)
	if err := f.wire.Verify(t.Context(), f.spec, end.MAC); err != nil {
		t.Errorf("verify: %v", err)
	}
	f.pingHost(t)
}

// pingHost sends one packet from the workload's IPv6 address to the host and
// wants its answer.
func (f *fixture) pingHost(t *testing.T) {
	t.Helper()
	command(t, f.host, "ip", "link", "set", "lo", "up")
	command(t, f.host, "ip", "addr", "replace", "fd00:99::9/128", "dev", "lo")
	// The kernel leaves the local route of the test's address to a worker.
	await.True(t, "the host takes up fd00:99::9", func() bool {
		return len(command(t, f.host, "ip", "-6", "route", "show", "table", "local", "fd00:99::9")) > 0
	})
	command(t, f.pod, "ping", "-6", "-c", "1", "-W", "5", "-I", address6, "fd00:99::9")
}

func TestHostSysctls(t *testing.T) {
	t.Parallel()
	f := newFixture6(t, true)
	text := func(addrs []netip.Addr) []string {
		var out []string
		for _, s := range f.wire.HostSysctls("cali1", addrs) {
			if strings.Contains(s.Name, "ipv6") {
				out = append(out, s.String())
			}
		}
		return out
	}
	want := []string{
		"net/ipv6/conf/cali1/disable_ipv6=0", "net/ipv6/conf/cali1/proxy_ndp=1",
		"net/ipv6/conf/cali1/forwarding=1", "net/ipv6/conf/cali1/accept_ra=0",
	}
	if diff := cmp.Diff(want, text(f.spec.Addresses)); diff != "" {
		t.Errorf("with IPv6 (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"net/ipv6/conf/cali1/disable_ipv6=1"}, text(f.spec.Addresses[:1])); diff != "" {
		t.Errorf("without IPv6 (-want +got):\n%s", diff)
	}
}

func TestAttachRepairsIPv6(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		says   string // what Verify says of the damage
		damage func(t *testing.T, f *fixture)
	}{
		{"ends down", "is down", func(t *testing.T, f *fixture) { // the kernel then drops IPv6 addresses
			command(t, f.pod, "ip", "link", "set", "eth0", "down")
			command(t, f.host, "ip", "link", "set", f.spec.Device, "down")
		}},
		{"default route gone", "default route via " + gateway6 + " is missing", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "-6", "route", "del", "default")
		}},
		{"neighbour wrong", "neighbour " + gateway6 + " has the MAC address 02:00:00:00:00:02", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "neigh", "replace", gateway6, "dev", "eth0", "lladdr", "02:00:00:00:00:02", "nud", "permanent")
		}},
		{"address gone", "address " + address6 + " is missing", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "addr", "del", address6+"/128", "dev", "eth0")
		}},
		{"gateway gone", "address " + gateway6 + " is missing", func(t *testing.T, f *fixture) {
			command(t, f.host, "ip", "addr", "flush", "dev", f.spec.Device)
		}},
		{"IPv6 switched off in the pod", "address " + address6 + " is missing", func(t *testing.T, f *fixture) {
			command(t, f.pod, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
		}},
		{"another address", "", func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "addr", "add", "fd00:7::99/128", "dev", "eth0")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture6(t, true)
			end, err := f.wire.Attach(t.Context(), f.spec)
			if err != nil {
				t.Fatal(err)
			}
			f.addHostRoute(t)
			tt.damage(t, f)
			if err := f.wire.Verify(t.Context(), f.spec, end.MAC); tt.says != "" && (!errors.Is(err, ErrDiffers) || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("verify: %v; want ErrDiffers that says %q", err, tt.says)
			}
			again, err := f.wire.Attach(t.Context(), f.spec)
			if err != nil {
				t.Fatal(err)
			}
			f.addHostRoute(t)
			if again != end {
				t.Errorf("the pair was made anew: %v, then %v", end, again)
			}
			if err := f.wire.Verify(t.Context(), f.spec, end.MAC); err != nil {
				t.Errorf("after the repeat: %v", err)
			}
			if got := command(t, f.pod, "ip", "-6", "-o", "addr", "show", "dev", "eth0", "scope", "global"); len(got) != 1 {
				t.Errorf("addresses: %q", got)
			}
			f.pingHost(t)
		})
	}
}

// A container's second interface does not take the first one's way out, and is
// the way out when the first has gone.
func TestSecondInterfaceIPv6(t *testing.T) {
	t.Parallel()
	f := newFixture6(t, true)
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	second := f.spec
	second.Owner.Interface = "net1"
	second.Device = DeviceName(second.Owner, "", "")
	second.Addresses = []netip.Addr{netip.MustParseAddr("192.168.7.2"), netip.MustParseAddr("fd00:7::2")}
	for range 2 { // a repeat too
		if _, err := f.wire.Attach(t.Context(), second); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []Spec{f.spec, second} {
		if err := f.wire.Verify(t.Context(), s, dataplane.MAC{}); err != nil {
			t.Errorf("%s: %v", s.Owner.Interface, err)
		}
	}
	contains(t, command(t, f.pod, "ip", "-6", "route", "get", "2001:db8::1"), "dev eth0")
	if err := f.wire.Detach(t.Context(), f.spec.Device, f.spec.Owner); err != nil {
		t.Fatal(err)
	}
	contains(t, command(t, f.pod, "ip", "-6", "route", "get", "2001:db8::1"), "dev net1")
}
