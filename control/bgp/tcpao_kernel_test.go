//go:build tcpao

package bgp

import (
	"fmt"
	"net/netip"
	"os"
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

// TestKernelSignsForRange: whoever connects from a range has its keys, which the kernel has for the prefix, and goes on while they are replaced.
func TestKernelSignsForRange(t *testing.T) {
	h, dir := hosts(t, 3), t.TempDir()
	for _, name := range []string{"old", "new"} {
		writeSecret(t, dir, SecretRef{"tor", name}, "the "+name+" one")
	}
	a := newDaemonOf(t, Options{Node: "node1", SecretDir: dir})
	inside := netip.PrefixFrom(h[1], 31) // and h[2]
	listen := func(keys string) store.Event {
		return labelled(t, peer(t, "lab", `{"asNumber":64999}`), "", fmt.Sprintf("%q:%q,%q:%q", store.AnnotationListenRange, inside, store.AnnotationTCPAO, keys))
	}
	a.send(store.Batch{Synced: true, Events: []store.Event{bgpNode(t, "node1", h[0].String()+"/32"), conf(t, "default", `{"bindMode":"NodeIP"}`), listen("tor/old id=1")}})
	a.waitAt(inside, "0 of 100 neighbours")
	var others []keyed
	for i, node := range []string{"node2", "node3"} {
		k := newKeyed(t, dir, node, h[1+i], h[0], 64999, 64512)
		k.annotate("tor/old id=1")
		k.says(StateUp, "signs with key 1")
		others = append(others, k)
	}
	step := func(keys, says string) {
		t.Helper()
		a.send(store.Batch{Events: []store.Event{listen(keys)}})
		for _, k := range others {
			k.annotate(keys)
			k.says(StateUp, says)
		}
	}
	step("tor/new id=2, tor/old id=1", "signs with key 2, asks for key 2")
	step("tor/new id=2", "signs with key 2, asks for key 2")
	for i, k := range others {
		if p := k.peer("tor"); p.Established != 1 {
			t.Errorf("%d sessions in all: %s", p.Established, p.Info)
		}
		if p := a.waitAt(h[1+i], "asks for key 2"); p.Established != 1 {
			t.Errorf("%d sessions in all with %s: %s", p.Established, h[1+i], p.Info)
		}
	}
	// Who comes back without keys is not answered.
	others[0].annotate("")
	others[0].says(StateStart, "no answer")
	others[0].annotate("tor/new id=2")
	others[0].says(StateUp, "signs with key 2")
}

// TestKernelSignsForBIRD: each algorithm and a rollover, with BIRD.
func TestKernelSignsForBIRD(t *testing.T) {
	h, dir := hosts(t, 2), t.TempDir()
	for _, name := range []string{"old", "new"} {
		writeSecret(t, dir, SecretRef{"tor", name}, "the "+name+" one")
	}
	birdKeys := func(keys ...string) string {
		return birdConf(h[1], 64999, h[0], 64512, "authentication ao; keys { "+strings.Join(keys, " ")+" }; passive off; ")
	}
	key := func(id int, name, algorithm, more string) string {
		return fmt.Sprintf(`key { id %d; secret "the %s one"; algorithm %s; %s};`, id, name, algorithm, more)
	}
	configure := func(b *bird, conf string) {
		t.Helper()
		if err := os.WriteFile(b.conf, []byte(conf), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := b.command("configure"); err != nil || !strings.Contains(out, "Reconfigur") {
			t.Fatalf("configure BIRD: %v: %s", err, out)
		}
	}
	b := startBIRD(t, birdKeys(key(1, "old", "hmac sha1", "preferred; ")))
	a := newKeyed(t, dir, "node1", h[0], h[1], 64512, 64999)
	a.annotate("tor/old id=1")
	since := a.says(StateUp, "signs with key 1, asks for key 1").Since
	a.annotate("tor/new id=2 algorithm=cmac(aes128), tor/old id=1")
	a.says(StateUp, "signs with key 1, asks for key 2")
	configure(b, birdKeys(key(1, "old", "hmac sha1", ""), key(2, "new", "cmac aes128", "preferred; ")))
	a.says(StateUp, "signs with key 2, asks for key 2")
	a.annotate("tor/new id=2 algorithm=cmac(aes128)")
	configure(b, birdKeys(key(2, "new", "cmac aes128", "preferred; ")))
	a.says(StateUp, "signs with key 2, asks for key 2")
	configure(b, birdKeys(key(2, "new", "cmac aes128", ""), key(3, "old", "hmac sha256", "preferred; ")))
	a.annotate("tor/old id=3 algorithm=hmac(sha256), tor/new id=2 algorithm=cmac(aes128)")
	a.says(StateUp, "signs with key 3, asks for key 3")
	a.annotate("tor/old id=3 algorithm=hmac(sha256)")
	configure(b, birdKeys(key(3, "old", "hmac sha256", "preferred; ")))
	for _, says := range []string{"Established", "Current key:    3", "RNext key:      3"} {
		b.waitFor(says, "show", "protocols", "all", "host")
	}
	if p := a.says(StateUp, "signs with key 3, asks for key 3"); p.Established != 1 || !p.Since.Equal(since) {
		t.Errorf("%d sessions, the last since %s, the first since %s", p.Established, p.Since, since)
	}
	b.kill()
	startBIRD(t, birdKeys(key(3, "new", "hmac sha256", "preferred; ")))
	a.says(StateStart, "TCP-AO suspected")
}
