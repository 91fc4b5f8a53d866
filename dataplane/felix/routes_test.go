package felix

import (
	"testing"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

func TestForwards(t *testing.T) {
	t.Parallel()
	for route, want := range map[string]bool{
		"":                                false,
		"192.0.2.0/24 proto static":       false,
		"192.0.2.0/24 proto 77":           false,
		"192.0.2.0/24 proto 80 table 100": false,
		"192.0.2.0/24 proto 80":           true,
		"192.0.2.0/24 proto bird":         true,
		"2001:db8::/64 proto bird":        true,
	} {
		ns := netnstest.New(t)
		if route != "" {
			run(t, ns, "route add blackhole "+route+"\n", "ip", "-batch", "-")
		}
		var got bool
		if err := ns.Do(func() (err error) { got, err = Forwards(); return err }); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", route, got, err, want)
		}
	}
}
