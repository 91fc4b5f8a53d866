package workload

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
)

// A wire of which nothing is there is made without the long way, and is what
// the long way would have made.
func TestMake(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Spec){
		"one address":   func(*Spec) {},
		"two addresses": func(s *Spec) { s.Addresses = append(s.Addresses, netip.MustParseAddr("192.168.7.2")) },
		"MAC given":     func(s *Spec) { s.MAC = dataplane.MAC{2, 0, 0, 0, 0, 7} },
		"forwarding":    func(s *Spec) { s.Forwarding = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			change(&f.spec)
			// As on a host whose new devices have other settings.
			command(t, f.host, "sysctl", "-qw", "net.ipv4.conf.default.forwarding=0")
			end, made, err := f.wire.make(t.Context(), f.spec)
			if err != nil || !made {
				t.Fatalf("made: %v, %v", made, err)
			}
			if !f.spec.MAC.IsZero() && end.MAC != f.spec.MAC || end.MAC.IsZero() {
				t.Errorf("MAC %s, want %s", end.MAC, f.spec.MAC)
			}
			if err := f.wire.Verify(t.Context(), f.spec, end.MAC); err != nil {
				t.Error(err)
			}
			for _, s := range f.wire.HostSysctls(f.spec.Device, f.spec.Addresses) {
				if strings.Contains(s.Name, "/neigh/") {
					continue // no request carries it; dataplane/kernel sets it
				}
				if got := command(t, f.host, "cat", "/proc/sys/"+s.Name); !cmp.Equal(got, []string{s.Value}) {
					t.Errorf("%s is %v, want %s", s.Name, got, s.Value)
				}
			}
			want := "0"
			if f.spec.Forwarding {
				want = "1"
			}
			contains(t, command(t, f.pod, "cat", "/proc/sys/net/ipv4/ip_forward"), want)
			if _, made, err := f.wire.make(t.Context(), f.spec); made || err != nil {
				t.Errorf("again: %v, %v; want it to leave what is there alone", made, err)
			}
		})
	}
}

// Where something is in the way, nothing of it is changed.
func TestMakeLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	for name, there := range map[string]func(*testing.T, *fixture){
		"device on the host": func(t *testing.T, f *fixture) {
			command(t, f.host, "ip", "link", "add", f.spec.Device, "type", "bridge")
		},
		"interface inside": func(t *testing.T, f *fixture) {
			command(t, f.pod, "ip", "link", "add", "eth0", "type", "bridge")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			there(t, f)
			links := func() [][]string {
				return [][]string{command(t, f.host, "ip", "-o", "link"), command(t, f.pod, "ip", "-o", "link")}
			}
			before := links()
			if _, made, err := f.wire.make(t.Context(), f.spec); made || err != nil {
				t.Fatalf("made: %v, %v", made, err)
			}
			if diff := cmp.Diff(before, links()); diff != "" {
				t.Errorf("(-before +after):\n%s", diff)
			}
			if _, err := f.wire.Attach(t.Context(), f.spec); !errors.Is(err, ErrClash) {
				t.Errorf("attach: %v, want %v", err, ErrClash)
			}
		})
	}
}
