package bgp

import (
	"net/netip"
	"testing"
	"time"
)

// TestLongLivedStale: long after the time of a restart the routes of one that
// does not come back are there, with less preference than any other (RFC 9494):
// ours at BIRD and FRR, and theirs here.
func TestLongLivedStale(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 3)
		routes := []string{"203.0.113.0/24"}
		o := begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, longLived: true, routes: routes})
		peer := tor(h[0], h[1], 64999)
		peer.RestartTime, peer.StaleTime = time.Second, 5*time.Minute
		gone, r := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
		gone.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, peer))
		gone.waitPath("203.0.113.0/24")
		o.waitRoute("192.168.1.0/26")
		if err := gone.Stop(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		// The well-known community LLGR_STALE, as each writes it.
		o.waitRouteWithOneOf("192.168.1.0/26", "llgr-stale", "llgr_stale", "(65535,6)")

		r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, peer, tor(h[0], h[2], 64998)))
		r.waitUp(h[1])
		p := r.waitPath("203.0.113.0/24")
		from := r.mark()
		o.kill()
		// Until its restart time is over the path is stale, then long-lived so.
		longLived := func() bool {
			found := false
			err := r.Query(t.Context(), Query{Table: TableBest, Prefix: netip.MustParsePrefix("203.0.113.0/24")}, func(route Route) bool {
				for _, c := range route.Communities {
					found = found || c == "65535:6"
				}
				return true
			})
			return err == nil && found
		}
		poll(t, r.dump, longLived)
		if now, ok := r.path("203.0.113.0/24"); !ok || now.NextHop != p.NextHop || r.happened(from, "del 203.0.113.0/24") != 0 {
			t.Errorf("the route went:%s", r.dump())
		}
		// Any other path is better.
		startBIRDAs(t, remote{self: h[2], asn: 64998, peer: h[0], peerASN: 64512, routes: routes})
		poll(t, r.dump, func() bool {
			now, ok := r.path("203.0.113.0/24")
			return ok && now.NextHop == h[2] && len(now.More) == 0
		})
	})
}
