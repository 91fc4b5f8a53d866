package bgp

import (
	"net/netip"
	"strings"
	"testing"
)

// TestGracefulShutdown: a peer that is about to go is left as soon as there is another
// way, and used while there is none (RFC 8326).
func TestGracefulShutdown(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	us, first, second := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	const prefix = "203.0.113.0/24"
	us.apply(testConfig(h[0], 64512, nil, waiting(tor(h[0], h[1], 64999)), waiting(tor(h[0], h[2], 64998))))
	c := testConfig(h[1], 64999, []string{prefix}, tor(h[1], h[0], 64512))
	first.apply(c)
	us.waitPath(prefix)
	c.Tags = map[netip.Prefix]string{netip.MustParsePrefix(prefix): "65535:0"}
	first.apply(c)
	poll(t, us.dump, func() bool {
		tagged := false
		err := us.Query(t.Context(), Query{Table: TableReceived, Peer: h[1]}, func(r Route) bool { tagged = r.leaving; return true })
		return err == nil && tagged
	})
	if p := us.waitPath(prefix); p.PeerAddr != h[1] {
		t.Errorf("path %s", p)
	}
	second.apply(testConfig(h[2], 64998, []string{prefix}, tor(h[2], h[0], 64512)))
	poll(t, us.dump, func() bool {
		p, ok := us.path(prefix)
		return ok && p.PeerAddr == h[2] && len(p.More) == 0
	})
	if got := us.explain(prefix); !strings.Contains(got, "its peer says that it is about to go (GRACEFUL_SHUTDOWN, RFC 8326)") {
		t.Errorf("explained as %q", got)
	}
}
