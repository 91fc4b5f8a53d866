package bgp

import (
	"net/netip"
	"testing"
)

// TestReasons brings about what keeps a session from coming up, and reads what
// its status says. Wrong AS numbers, passwords, the hold timer, a taken port and
// a peer that takes its leave have tests of their own.
func TestReasons(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		peer func(self, beside netip.Addr) Peer
		says string
	}{
		"refused": {func(self, beside netip.Addr) Peer { return tor(self, beside, 64999) }, "connection refused by"},
		"no route": {func(self, _ netip.Addr) Peer {
			return tor(self, netip.MustParseAddr("192.0.2.1"), 64999)
		}, "no route to 192.0.2.1"},
		"source": {func(self, beside netip.Addr) Peer {
			p := tor(self, beside, 64999)
			p.Source = netip.MustParseAddr("192.0.2.7")
			return p
		}, "this host does not have the address 192.0.2.7 to connect from"},
		"passive": {func(self, beside netip.Addr) Peer { return waiting(tor(self, beside, 64999)) }, "passive: waiting for the peer to connect"},
		"problem": {func(self, beside netip.Addr) Peer {
			p := tor(self, beside, 64999)
			p.Problem = "spec.asNumber is missing"
			return p
		}, "spec.asNumber is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 2)
			r := newRun(t, SpeakerOptions{})
			p := c.peer(h[0], h[1])
			r.apply(testConfig(h[0], 64512, nil, p))
			if st := r.waitInfo(p.Addr, c.says); st.State == StateUp {
				t.Errorf("state %+v", st)
			}
		})
	}
}
