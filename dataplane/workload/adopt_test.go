package workload

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

func TestNamespacesIn(t *testing.T) {
	t.Parallel()
	got, err := namespacesIn(strings.NewReader(`22 1 0:21 / /proc rw,nosuid shared:5 - proc proc rw
100 30 0:4 net:[4026532008] /run/netns/cni-1 rw shared:60 - nsfs nsfs rw
101 28 0:4 net:[4026532008] /var/run/netns/cni-1 rw shared:60 - nsfs nsfs rw
102 30 0:4 mnt:[4026532010] /run/snapd/ns/x rw - nsfs nsfs rw
103 30 0:4 net:[4026532011] /run/docker/netns/a\040b rw - nsfs nsfs rw
short
`))
	if want := []string{"/var/run/netns/cni-1", "/run/docker/netns/a b"}; err != nil || !cmp.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

// TestAdopt: a wire that Calico's plugin made is found with its namespace, and carries an
// owner afterwards; nothing else of it changes.
func TestAdopt(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if _, err := f.wire.Attach(t.Context(), f.spec); err != nil {
		t.Fatal(err)
	}
	other := f.spec.Owner
	other.ContainerID = "other"
	if _, err := f.wire.Inspect(t.Context(), f.spec.Device, other); !errors.Is(err, ErrDiffers) {
		t.Errorf("inspect of another's: %v", err)
	}
	at := netnstest.Mount(t, f.spec.Netns)
	inspect := func(netns string) {
		t.Helper()
		got, err := f.wire.Inspect(t.Context(), f.spec.Device, f.spec.Owner)
		if want := (Found{Device: f.spec.Device, MTU: f.spec.MTU, Netns: netns}); err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	inspect(at)
	command(t, f.host, "ip", "link", "set", f.spec.Device, "alias", "")
	inspect(at)
	before := command(t, f.host, "ip", "-d", "addr", "show", f.spec.Device)
	for range 2 {
		if err := f.wire.Mark(t.Context(), f.spec.Device, f.spec.Owner); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.wire.Verify(t.Context(), f.spec, f.spec.MAC); err != nil {
		t.Error(err)
	}
	var after []string
	for _, line := range command(t, f.host, "ip", "-d", "addr", "show", f.spec.Device) {
		if !strings.Contains(line, "alias") {
			after = append(after, line)
		}
	}
	if d := cmp.Diff(before, after); d != "" {
		t.Errorf("the wire changed (-before +after):\n%s", d)
	}
	if err := f.wire.Mark(t.Context(), f.spec.Device, other); !errors.Is(err, ErrDiffers) {
		t.Errorf("mark of another's: %v", err)
	}
	if err := f.wire.Mark(t.Context(), "cali00000000000", other); !errors.Is(err, ErrDiffers) {
		t.Errorf("mark of nothing: %v", err)
	}
}
