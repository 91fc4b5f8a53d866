package bgp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// TestCompare spoils what the reader was told, and the comparison with GoBGP's
// table puts it right; where nothing is wrong it tells nothing.
func TestCompare(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	here, there := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	there.apply(testConfig(h[1], 64999, []string{"172.20.1.0/24", "172.20.2.0/24", "172.20.3.0/24"}, waiting(tor(h[1], h[0], 64512))))
	here.apply(testConfig(h[0], 64512, []string{"192.168.9.0/26"}, tor(h[0], h[1], 64999)))
	for i := 1; i <= 3; i++ {
		here.waitPath(fmt.Sprintf("172.20.%d.0/24", i))
	}
	quiet := func(what string) {
		t.Helper()
		if n := here.compare(); n != 0 {
			t.Errorf("%s: %d prefixes differ", what, n)
		}
	}
	quiet("nothing is wrong")
	// A way that is configured and nobody announced.
	configured := netip.MustParsePrefix("10.9.9.9/32")
	here.rib.add(configured, Hop{NextHop: h[1], Peer: "configured"})
	quiet("a configured way")

	gone, phantom, other := netip.MustParsePrefix("172.20.1.0/24"), netip.MustParsePrefix("172.21.0.0/24"), netip.MustParsePrefix("172.20.2.0/24")
	here.rib.remove(gone, h[1])
	here.rib.add(phantom, Hop{NextHop: h[1], PeerAddr: h[1]})
	here.rib.add(other, Hop{NextHop: h[0], PeerAddr: h[0]})
	here.waitNoPath(gone.String())
	here.waitPath(phantom.String())
	n := 0
	poll(t, 10*time.Second, here.dump, func() bool { n = here.compare(); return n > 0 }) // nothing is done while events are under way
	if n != 3 {
		t.Errorf("%d prefixes put right, want 3", n)
	}
	here.waitPath(gone.String())
	here.waitNoPath(phantom.String())
	poll(t, 10*time.Second, here.dump, func() bool {
		p, ok := here.path(other.String())
		return ok && p.NextHop == h[1] && len(p.More) == 0
	})
	if _, ok := here.path(configured.String()); !ok {
		t.Error("the configured way is gone")
	}
	quiet("all is put right")
}
