//go:build tcpao

package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/store"
)

// The tests of this file want a kernel with CONFIG_TCP_AO and a BIRD that can use it: make test-tcp-ao.

// keyed is a daemon whose BGPPeer to one neighbour has keys.
type keyed struct {
	*daemon
	t    *testing.T
	spec string
}

func newKeyed(t *testing.T, dir, node string, self, neighbour netip.Addr, asn, neighbourASN uint32) keyed {
	t.Helper()
	k := keyed{newDaemonOf(t, Options{Node: node, SecretDir: dir}), t, fmt.Sprintf(`{"peerIP":%q,"asNumber":%d}`, neighbour, neighbourASN)}
	k.send(store.Batch{Synced: true, Events: []store.Event{
		bgpNode(t, node, self.String()+"/24"), conf(t, "default", fmt.Sprintf(`{"bindMode":"NodeIP","asNumber":%d}`, asn)),
	}})
	return k
}

// annotate gives the BGPPeer keys; with none it has no annotation.
func (k keyed) annotate(keys string) {
	k.t.Helper()
	p := peer(k.t, "tor", k.spec)
	if keys != "" {
		p = labelled(k.t, p, "", fmt.Sprintf("%q:%q", store.AnnotationTCPAO, keys))
	}
	k.send(store.Batch{Events: []store.Event{p}})
}

func (k keyed) says(state string, texts ...string) PeerStatus {
	k.t.Helper()
	poll(k.t, func() string { return fmt.Sprintf("%v, and it should say %q", k.peer("tor"), texts) }, func() bool {
		p := k.peer("tor")
		for _, text := range texts {
			if !strings.Contains(p.Info, text) {
				return false
			}
		}
		return p.State == state
	})
	return k.peer("tor")
}

// TestKernelSignsForTwo: two daemons have a session that is signed by what their BGPPeers say, and it goes on while the key is replaced. Another secret,
// a password and nothing at all make none.
func TestKernelSignsForTwo(t *testing.T) {
	h, dir := hosts(t, 2), t.TempDir()
	for _, name := range []string{"old", "new", "other"} {
		writeSecret(t, dir, SecretRef{"tor", name}, "the "+name+" one")
	}
	a, b := newKeyed(t, dir, "node1", h[0], h[1], 64512, 64999), newKeyed(t, dir, "node2", h[1], h[0], 64999, 64512)
	both := func(keys string) {
		t.Helper()
		a.annotate(keys)
		b.annotate(keys)
	}
	both("tor/old id=1")
	since := a.says(StateUp, "TCP-AO: signs with key 1, asks for key 1").Since
	b.annotate("tor/new id=2 algorithm=cmac(aes128), tor/gone id=3, tor/old id=1")
	b.says(StateUp, "signs with key 1, asks for key 2", "left out: key 3: secret tor/gone is missing")
	a.annotate("tor/new id=2 algorithm=cmac(aes128), tor/old id=1")
	a.says(StateUp, "signs with key 2, asks for key 2")
	both("tor/new id=2 algorithm=cmac(aes128)")
	for _, k := range []keyed{a, b} {
		if p := k.says(StateUp, "signs with key 2, asks for key 2"); p.Established != 1 {
			t.Errorf("%d sessions in all: %s", p.Established, p.Info)
		}
	}
	if p := a.peer("tor"); !p.Since.Equal(since) {
		t.Errorf("the session was up since %s, and is since %s", since, p.Since)
	}
	// The last session was signed; what comes now is another.
	a.annotate("tor/other id=2")
	a.says(StateStart, "TCP-AO suspected")
	a.annotate("")
	a.says(StateStart, "TCP-AO suspected")
	a.annotate("tor/new id=2 algorithm=cmac(aes128)")
	a.says(StateUp, "signs with key 2")
	both("")
	poll(t, func() string { return fmt.Sprint("a session without keys: ", a.peer("tor")) }, func() bool {
		p := a.peer("tor")
		return p.State == StateUp && p.Info == "Established"
	})
}
