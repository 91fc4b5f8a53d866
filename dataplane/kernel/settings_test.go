package kernel

import (
	"slices"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

// TestUnderlaySettings: the underlay tells the settings in effect, also those
// that a wish of ours changed.
func TestUnderlaySettings(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.run("sysctl -qw net.ipv4.conf.all.rp_filter=1", "sysctl -qw net.ipv4.conf.up0.rp_filter=0", "sysctl -qw net.ipv6.conf.up0.accept_ra=1")
	k := l.start()
	k.put(host()...)
	ch := k.Underlay(t.Context())
	is := func(rpFilter, acceptRA int) func(dataplane.Underlay) bool {
		return func(u dataplane.Underlay) bool {
			return slices.ContainsFunc(u.Links, func(l dataplane.UnderlayLink) bool {
				return l.Name == "up0" && l.RPFilter == rpFilter && l.AcceptRA == acceptRA
			})
		}
	}
	until(t, ch, "strict, as all devices", is(1, 1))
	k.put(
		dataplane.Sysctl{Name: "net/ipv4/conf/up0/rp_filter", Value: "2"},
		dataplane.Sysctl{Name: "net/ipv6/conf/up0/accept_ra", Value: "2"},
	)
	until(t, ch, "loose, and advertisements also when forwarding", is(2, 2))
}
