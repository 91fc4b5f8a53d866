package bgp

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/store"
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
	if got := us.explain(prefix); !strings.Contains(got, "its peer is about to shut down (GRACEFUL_SHUTDOWN, RFC 8326)") {
		t.Errorf("explained as %q", got)
	}
}

// TestReflectorDrains: what a reflector that is drained passes on is the last choice of
// clients that have it from another one too, and in the end it passes on nothing.
func TestReflectorDrains(t *testing.T) {
	t.Parallel()
	h := hosts(t, 4)
	const prefix = "192.168.3.0/26"
	first, second := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	client, origin := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	reflector := func(addr netip.Addr) Config {
		var clients []Peer
		for _, c := range h[2:] {
			p := to(addr, c, 64512)
			p.Reflect, p.ClusterID = true, netip.MustParseAddr("244.0.0.1")
			clients = append(clients, p)
		}
		return testConfig(addr, 64512, nil, clients...)
	}
	c := reflector(h[0])
	first.apply(c)
	second.apply(reflector(h[1]))
	client.apply(testConfig(h[2], 64512, nil, to(h[2], h[0], 64512), to(h[2], h[1], 64512)))
	origin.apply(testConfig(h[3], 64512, []string{prefix}, to(h[3], h[0], 64512), to(h[3], h[1], 64512)))
	from := func(peer netip.Addr) []Route {
		var out []Route
		if err := client.Query(t.Context(), Query{Table: TableReceived, Peer: peer}, func(r Route) bool { out = append(out, r); return true }); err != nil {
			t.Error(err)
		}
		return out
	}
	chosen := func(want netip.Addr) func() bool {
		return func() bool { p, ok := client.path(prefix); return ok && p.PeerAddr == want && p.NextHop == h[3] }
	}
	poll(t, client.dump, func() bool { return len(from(h[0])) == 1 && len(from(h[1])) == 1 })
	poll(t, client.dump, chosen(h[0]))
	c.Drain = store.DrainShift
	first.apply(c)
	poll(t, client.dump, chosen(h[1]))
	if r := from(h[0]); len(r) != 1 || r[0].LocalPref != drainPreference || !r[0].leaving {
		t.Errorf("the reflector that is drained says %+v", r)
	}
	c.Drain = store.DrainWithdrawn
	first.apply(c)
	poll(t, client.dump, func() bool { return len(from(h[0])) == 0 })
	if got, want := first.explain(prefix), "this host is drained: it advertises no routes"; !strings.Contains(got, want) {
		t.Errorf("explained as %q, want %q", got, want)
	}
	c.Drain = ""
	first.apply(c)
	poll(t, client.dump, chosen(h[0]))
}
