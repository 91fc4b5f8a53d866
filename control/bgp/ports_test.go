package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/store"
)

// TestTwoPorts: two speakers at one address, each at a port of its own and one with a password, have a session each, whose
// routes are told apart; what becomes of one does not touch the other.
func TestTwoPorts(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	speaker := func(port int, asn uint32, id, extra string, routes ...string) *bird {
		conf := birdConf(h[1], asn, h[0], 64512, extra, routes...)
		conf = strings.Replace(conf, "router id "+h[1].String(), "router id "+id, 1)
		return startBIRD(t, strings.Replace(conf, fmt.Sprintf("local %s port 179", h[1]), fmt.Sprintf("local %s port %d", h[1], port), 1))
	}
	speaker(1791, 64999, "10.255.0.1", "", "203.0.113.0/24", "198.51.100.0/24")
	second := birdOther{bird: speaker(1790, 64998, "10.255.0.2", `password "secret"; `, "203.0.113.0/24", "192.0.2.0/24")}
	secrets := t.TempDir()
	writeSecret(t, secrets, SecretRef{"tor", "password"}, "secret")
	d := newDaemonOf(t, Options{Node: "node1", SecretDir: secrets})
	d.send(store.Batch{Synced: true, Events: []store.Event{
		conf(t, "default", `{"bindMode":"NodeIP"}`), ippool(t, "pool", `{"cidr":"192.168.0.0/16"}`), bgpNode(t, "node1", h[0].String()+"/32"),
		affinity(t, "node1", "192.168.1.0/26", "confirmed"),
		peer(t, "a", fmt.Sprintf(`{"peerIP":"%s:1791","asNumber":64999}`, h[1])),
		peer(t, "b", fmt.Sprintf(`{"peerIP":"%s:1790","asNumber":64998,"password":{"secretKeyRef":{"name":"tor","key":"password"}}}`, h[1])),
		peer(t, "c", fmt.Sprintf(`{"peerIP":"%s:1790","asNumber":64997}`, h[1])), // b is this session
	}})
	poll(t, func() string { return fmt.Sprint(d.Status(t.Context())) }, func() bool {
		return d.peer("a").State == StateUp && d.peer("b").State == StateUp && d.has("203.0.113.0/24") && d.has("198.51.100.0/24") && d.has("192.0.2.0/24")
	})
	if st := d.Status(t.Context()); len(st.Peers) != 2 || st.Peers[0].Addr != h[1] || st.Peers[1].Addr != h[1] || st.Peers[0].ID == st.Peers[1].ID {
		t.Errorf("peers %+v", st.Peers)
	}
	for name, want := range map[string]string{"a": "198.51.100.0/24 203.0.113.0/24", "b": "192.0.2.0/24 203.0.113.0/24"} {
		var got []string
		err := d.Query(t.Context(), Query{Table: TableReceived, Peer: d.peer(name).ID}, func(r Route) bool { got = append(got, r.Prefix.String()); return true })
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s sent %v, %v, want %s", name, got, err, want)
		}
	}
	explained, err := d.Explain(t.Context(), netip.MustParsePrefix("203.0.113.0/24"))
	named := map[string]bool{}
	for _, r := range explained {
		named[r.Peer+" "+PeerName(r.PeerAddr)] = true
	}
	if want := fmt.Sprintf("b %s:1790", h[1]); err != nil || !named[want] || !named[fmt.Sprintf("a %s", h[1])] {
		t.Errorf("explained by %v, %v, want %q", named, err, want)
	}

	since := d.peer("a").Since
	second.birdctl("disable", "host")
	poll(t, func() string { return fmt.Sprint(d.Status(t.Context())) }, func() bool { return d.peer("b").State != StateUp && !d.has("192.0.2.0/24") })
	if !d.has("203.0.113.0/24") || d.peer("a").State != StateUp || d.peer("a").Since != since {
		t.Errorf("the end of one session touched the other: %+v", d.peer("a"))
	}
	// The first goes: the second is known by its address alone then.
	d.send(store.Batch{Events: []store.Event{gone(store.ResourceKey(store.KindBGPPeer, "a"))}})
	second.birdctl("enable", "host")
	poll(t, func() string { return fmt.Sprint(d.Status(t.Context())) }, func() bool {
		return d.peer("b").State == StateUp && d.has("192.0.2.0/24") && !d.has("198.51.100.0/24")
	})
}
