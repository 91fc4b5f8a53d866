package bgp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// keysOf makes the secret of letters: "b", "ba" with b the newer, "b?" while some may have
// none.
func keysOf(letters string) *store.Secret {
	open := strings.HasSuffix(letters, "?")
	letters = strings.TrimSuffix(letters, "?")
	if letters == "" {
		return nil
	}
	s := &store.Secret{Key: []byte(strings.Repeat(letters[:1], 32)), Open: open}
	if len(letters) > 1 {
		s.Former = []byte(strings.Repeat(letters[1:], 32))
	}
	return s
}

// letterOf is the letter of a password that [keysOf] made; "-": it is none.
func letterOf(p Password) string {
	for _, l := range []string{"a", "b", "c"} {
		if p == NewKeyring(keysOf(l)).keys[0].text {
			return l
		}
	}
	return "-"
}

// TestKeyring: what a session between two nodes is signed with, by what each has and has
// published, first the passive side and then in their order what the other one tries.
func TestKeyring(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ own, theirs, passive, opener string }{
		{"a", "a", "a", "a"},
		{"", "", "-", "-"},
		{"", "a", "-", "-"},     // this host has not read it, or cannot
		{"a", "", "-", "-a"},    // Calico's node, or one that has just published it
		{"ba", "ba", "b", "ba"}, // it is being replaced, and both have the newer one
		{"ba", "a", "a", "ab"},
		{"a", "ba", "a", "a"},
		{"ba", "", "-", "-ba"},
		{"b", "ba", "b", "b"},
		{"b", "a", "b", "b"},   // that one is behind: nobody goes back
		{"a?", "a", "a", "a-"}, // the first key, which the other may not know that this one has
		{"a?", "", "-", "-a"},
	} {
		view := &View{keys: NewKeyring(keysOf(tt.own))}
		d := &derivation{v: view}
		got := map[bool]string{}
		for _, passive := range []bool{true, false} {
			p := Peer{Passive: passive}
			d.sign(&p, nodeFacts{keys: strings.Join(keysOf(tt.theirs).KeyIDs(), ",")})
			got[passive] = letterOf(p.Password)
			for _, o := range p.Others.list[:p.Others.n] {
				got[passive] += letterOf(o)
			}
		}
		if diff := cmp.Diff([]string{tt.passive, tt.opener}, []string{got[true], got[false]}); diff != "" {
			t.Errorf("own %q, theirs %q (-want +got):\n%s", tt.own, tt.theirs, diff)
		}
	}
}

// TestKeysAreNotShown: neither a configuration nor a peer shows the cluster's keys.
func TestKeysAreNotShown(t *testing.T) {
	t.Parallel()
	v := view(t, labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), "", ""), labelled(t, bgpNode(t, "node2", "10.1.0.10/24"), "", `"routerd.io/bgpKeys":"`+strings.Join(keysOf("ba").KeyIDs(), ",")+`"`))
	v.keys = NewKeyring(keysOf("ba"))
	c, err := Desired(v, "node1")
	if err != nil {
		t.Fatal(err)
	}
	if p := c.Peers[0]; letterOf(p.Password) != "b" || letterOf(p.Others.list[0]) != "a" {
		t.Errorf("not signed: %+v", p)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, x := range []any{c, v.keys, c.Peers[0], keysOf("ba")} {
			if text := fmt.Sprintf(verb, x); strings.Contains(text, strings.Repeat("61", 8)) || strings.Contains(text, strings.Repeat("62", 8)) || strings.Contains(text, "bbbbbbbb") {
				t.Errorf("%s of %T shows a key: %.300s", verb, x, text)
			}
		}
	}
	p := Peer{Secret: SecretRef{"s", "k"}}
	if (&derivation{v: v}).sign(&p, v.nodes["node2"]); p.Password != (Password{}) {
		t.Error("a key of the cluster in the place of the password that somebody asked for")
	}
}
