package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/store"
)

func keysNamed(list ...string) AOKeys {
	var out []store.TCPAOKey
	for i, name := range list {
		id := uint8(len(list) - i)
		out = append(out, store.TCPAOKey{Name: "tor", Key: name, Send: id, Receive: id, Algorithm: "hmac(sha1)"})
	}
	return aoKeys(out)
}

// TestKeysFailClosed: what cannot be read or used is left out and said; without any key there is no session, and none without TCP-AO.
func TestKeysFailClosed(t *testing.T) {
	t.Parallel()
	read := func(r SecretRef) (Password, error) {
		if r.Key == "missing" {
			return Password{}, errors.New("secret tor/missing is missing")
		}
		return Password{"text of " + r.Key}, nil
	}
	for _, c := range []struct {
		keys          AOKeys
		kernel        error
		ids           string
		left, problem string
	}{
		{keys: keysNamed("new", "old"), ids: "2 1"},
		{keys: keysNamed("missing", "old"), ids: "1", left: "left out: key 2: secret tor/missing is missing"},
		{keys: keysNamed("missing"), problem: "annotation routerd.io/tcpAO: key 1: secret tor/missing is missing; the session is not run without it"},
		{keys: keysNamed("new", "old"), kernel: errors.New("no such algorithm"), problem: "annotation routerd.io/tcpAO: key 2: no such algorithm; key 1: no such algorithm; the session is not run without it"},
		{keys: keysNamed("new", "old"), kernel: fmt.Errorf("no TCP-AO: %w", unix.ENOPROTOOPT), problem: "annotation routerd.io/tcpAO: no TCP-AO: protocol not available; the session is not run without it"},
	} {
		p := Peer{Name: "tor", Addr: netip.MustParseAddr("10.9.0.1"), AO: c.keys}
		got := withSecrets(Config{Peers: []Peer{p}}, read, func(k conn.Key) error {
			if !strings.HasPrefix(k.Secret, "text of ") {
				t.Errorf("the kernel is asked about %q", k.Secret)
			}
			return c.kernel
		}).Peers[0]
		var ids []string
		keys := got.auth().Keys
		for _, k := range keys.List[:keys.N] {
			ids = append(ids, k.String())
		}
		if strings.Join(ids, " ") != c.ids || got.Unread != c.left || got.Problem != c.problem {
			t.Errorf("%s: keys %q, unread %q, problem %q", c.keys, ids, got.Unread, got.Problem)
		}
		if got.runs() == (c.problem != "") {
			t.Errorf("%s: runs: %v", c.keys, got.runs())
		}
	}
}

// TestKeysAndSessions: a session stays when its keys are replaced, and is a new one when it is signed another way.
func TestKeysAndSessions(t *testing.T) {
	t.Parallel()
	with := func(k AOKeys, password string) Peer {
		return Peer{AO: k, Password: Password{password}, Secret: SecretRef{Name: password}}
	}
	for _, c := range []struct {
		name     string
		from, to Peer
		same     bool
	}{
		{"a new key", with(keysNamed("old"), ""), with(keysNamed("new", "old"), ""), true},
		{"the old one goes", with(keysNamed("new", "old"), ""), with(aoKeys([]store.TCPAOKey{keysNamed("new", "old").List[0].TCPAOKey}), ""), true},
		{"another secret of the same id", with(keysNamed("old"), ""), with(keysNamed("new"), ""), false},
		{"the first keys", with(AOKeys{}, ""), with(keysNamed("old"), ""), false},
		{"no keys any more", with(keysNamed("old"), ""), with(AOKeys{}, ""), false},
		{"a password instead", with(keysNamed("old"), ""), with(AOKeys{}, "x"), false},
	} {
		if got := c.to.sameSession(c.from); got != c.same {
			t.Errorf("%s: the same session: %v, want %v", c.name, got, c.same)
		}
	}
	d := derivation{v: &View{keys: ringOf("a")}}
	p := Peer{AO: keysNamed("old")}
	if d.sign(&p, nodeFacts{ours: true, keys: published("a")}); p.Password != (Password{}) {
		t.Error("a session with keys of its own is signed with the cluster's too")
	}
}

// TestKeysBesideRange: the kernel has one way to sign for an address.
func TestKeysBesideRange(t *testing.T) {
	t.Parallel()
	h := netip.MustParseAddr("10.9.0.1")
	in, r := Peer{Name: "tor", Addr: h}, Peer{Name: "lab", Range: netip.MustParsePrefix("10.9.0.0/24")}
	for _, c := range []struct {
		name       string
		rangeKeys  bool
		peerKeys   bool
		rangeSays  SecretRef
		hasProblem bool
	}{
		{"neither", false, false, SecretRef{}, false},
		{"the peer has keys", false, true, SecretRef{}, false},
		{"the range has keys", true, false, SecretRef{}, true},
		{"both have keys", true, true, SecretRef{}, true},
		{"the range has a password", false, true, SecretRef{"a", "b"}, true},
	} {
		p, q := r, in
		if p.Secret = c.rangeSays; c.rangeKeys {
			p.AO = keysNamed("k")
		}
		if c.peerKeys {
			q.AO = keysNamed("k")
		}
		if got := p.rangeProblem(nil, []Peer{q}); (got != "") != c.hasProblem || got != "" && !strings.Contains(got, "annotation "+store.AnnotationTCPAO+": tor is inside 10.9.0.0/24, and the kernel can sign for an address in one way only: narrow the range, or let neither have TCP-AO") {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

// TestKeysWithoutKernel: whole daemon; a BGPPeer with keys runs signed or not at all, and says why.
func TestKeysWithoutKernel(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	dir := t.TempDir()
	writeSecret(t, dir, SecretRef{"s", "k"}, "geheim")
	d := newDaemonOf(t, Options{Node: "node1", SecretDir: dir})
	p := labelled(t, peer(t, "tor", fmt.Sprintf(`{"peerIP":%q,"asNumber":64999}`, h[1])), "", fmt.Sprintf("%q:%q", store.AnnotationTCPAO, "s/k id=1"))
	d.send(store.Batch{Synced: true, Events: []store.Event{bgpNode(t, "node1", h[0].String()+"/24"), conf(t, "default", `{"bindMode":"NodeIP"}`), p}})
	state, says := StateStart, ""
	if err := conn.TryKey(conn.Key{Algorithm: "hmac(sha1)", Secret: "x"}); err != nil {
		state, says = StateDown, "annotation routerd.io/tcpAO: this kernel has no TCP-AO (CONFIG_TCP_AO is not set"
	}
	poll(t, func() string { return fmt.Sprint(d.peer("tor")) }, func() bool {
		return d.peer("tor").State == state && strings.Contains(d.peer("tor").Info, says)
	})
}
