package bgp

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
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
	s := &store.Secret{Key: []byte(strings.Repeat(letters[:1], 32))}
	if open {
		s.Former = []byte("none")
	}
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

// signedWith is with which letters a session is signed, in the order in which they are tried.
func signedWith(p *Peer) string {
	s := letterOf(p.Password)
	for _, o := range p.Others.list[:p.Others.n] {
		s += letterOf(o)
	}
	return s
}

// TestKeyring: what a session between two nodes is signed with, by what each has and has
// published, and in their order what the side that opened it tries else.
func TestKeyring(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ own, theirs, want string }{ // what each has it has published
		{"a", "a", "a"},
		{"", "", "-"},
		{"", "a", "-"},     // this host has not read it, or cannot
		{"a", "", "-"},     // Calico's node, or one of an earlier version
		{"a?", "", "-a"},   // the first key, which that one may have by now
		{"a?", "a", "a-"},  // which may not know that this one has it
		{"ba", "ba", "ba"}, // it is being replaced, and both have the newer one
		{"ba", "a", "ab"},
		{"a", "ba", "a"},
		{"ba", "", "-"},
		{"b", "ba", "b"},
		{"b", "a", "b"}, // that one is behind: nobody goes back
	} {
		d := &derivation{v: &View{keys: ringOf(tt.own)}, self: nodeFacts{keys: published(tt.own)}}
		var p Peer
		d.sign(&p, nodeFacts{ours: true, keys: published(tt.theirs)})
		if got := signedWith(&p); got != tt.want {
			t.Errorf("own %q, theirs %q: %s, want %s", tt.own, tt.theirs, got, tt.want)
		}
	}
}

// TestKeyringFromDisk: what a host that starts while the datastore is away signs with. Its disk
// may lack what it and the other have published last, which the other goes by; when the
// datastore has said all, only that counts.
func TestKeyringFromDisk(t *testing.T) {
	t.Parallel()
	const accepts = `"routerd.io/accepts":"direct"`
	for _, tt := range []struct{ own, self, theirs, want, then string }{ // what it has, and the disk of both
		{"a", "a", "a", "a", "a"}, // never without
		{"a", "", "", "-a", "-"},
		{"a", "", "a", "a-", "-"}, // that one may not have heard that this one has it
		{"a", "a", "", "-a", "-"},
		{"a", "a", "Calico", "-a", "-"}, // or it has not published yet that it is none
		{"", "", "a", "-", "-"},
		{"ba", "a", "a", "ab", "ab"},
		{"ba", "", "", "-ba", "-"},
		{"ba", "", "a", "ab-", "-"}, // it has published one of the two at least
	} {
		nodes := []store.Event{bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.10/24")}
		for i, letters := range []string{tt.self, tt.theirs} {
			if letters != "Calico" {
				nodes[i] = labelled(t, nodes[i], "", accepts+`,"routerd.io/bgpKeys":"`+published(letters)+`"`)
			}
		}
		v, m := &View{keys: ringOf(tt.own)}, &memo{}
		step := clustertest.Step("node1", store.Batch{Events: nodes, Synced: true})
		for _, from := range []struct {
			source cluster.Source
			want   string
		}{{cluster.Disk, tt.want}, {cluster.Live, tt.then}} {
			if step.Source = from.source; from.source == cluster.Live {
				step.Changes = nil
			}
			if _, err := v.Apply(step); err != nil {
				t.Fatal(err)
			}
			c, err := m.desired(v, "node1")
			if err != nil {
				t.Fatal(err)
			}
			if got := signedWith(&c.Peers[0]); got != from.want {
				t.Errorf("own %q, on disk %q and %q, by %v: %s, want %s", tt.own, tt.self, tt.theirs, from.source, got, from.want)
			}
		}
	}
}

// TestCalicoIsNotSigned: a node of Calico's never has a signed session, whatever its Node says.
func TestCalicoIsNotSigned(t *testing.T) {
	t.Parallel()
	for _, own := range []string{"a", "a?", "ba"} {
		var p Peer
		(&derivation{v: &View{keys: ringOf(own)}, self: nodeFacts{keys: published("a")}}).sign(&p, nodeFacts{keys: published("a")})
		if p.Password != (Password{}) || p.Others.n > 0 {
			t.Errorf("own %q: %s", own, p.Password)
		}
	}
}

func ringOf(letters string) Keyring {
	if s := keysOf(letters); s != nil {
		return NewKeyring(s)
	}
	return WithoutKeys("there is none")
}

func published(letters string) string { return strings.Join(keysOf(letters).KeyIDs(), ",") }

// TestRollover: whatever order hosts and their views of each other go in while the key of a
// cluster is made, replaced and taken away, two of them come to the same as soon as each has
// seen what the other has published, and until then the side that opened the session has
// what the other uses among what it tries. So no session is lost. Where the datastore goes from
// one key to another at once, because somebody deleted it or restored a snapshot, they come to
// the same as well.
func TestRollover(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		// What the datastore has in turn, as store.RotateBGPKey and FinishBGPKey make it: the next
		// step comes when all hosts have published that they have the one before.
		history := rapid.SampledFrom([][]string{
			{"", "a?", "a"},
			{"a", "ba", "b"},
			{"", "a?", "a", "ba", "b", "cb", "c"},
			{"a", ""},
			{"ba", ""},
			{"b", "a"},
			{"b", "ba"},
			{"c", "ba"}, // at once
		}).Draw(t, "history")
		atOnce := len(history) == 2
		type host struct {
			has   int    // of history
			tells string // published
			self  string // what it has seen of that itself
			sees  string // of the other's
		}
		hosts := [2]host{}
		for i := range hosts {
			h := published(history[0])
			hosts[i] = host{tells: h, self: h, sees: h}
		}
		sign := func(i int) (string, []string) {
			ring := ringOf(history[hosts[i].has])
			use, others := ring.passwords(store.BGPKeysOf(hosts[i].self), store.BGPKeysOf(hosts[i].sees), false)
			var more []string
			for _, o := range others {
				more = append(more, letterOf(o))
			}
			return letterOf(use), more
		}
		check := func(what string) {
			if atOnce {
				return
			}
			for opener := range hosts {
				theirs, _ := sign(1 - opener)
				mine, tries := sign(opener)
				if mine != theirs && !slices.Contains(tries, theirs) {
					t.Fatalf("after %s, host %d opened the session: %s and %s, tries %s (%+v of %q)", what, opener, mine, theirs, tries, hosts, history)
				}
			}
		}
		for now := range history {
			var todo []string
			for i := range hosts {
				todo = append(todo, fmt.Sprint(i, "reads"), fmt.Sprint(i, "tells"), fmt.Sprint(i, "self"), fmt.Sprint(i, "sees"))
			}
			// Any order; what cannot be yet is done again at the end.
			steps := rapid.Permutation(todo).Draw(t, "steps")
			for _, s := range slices.Concat(steps, []string{"0reads", "1reads", "0tells", "1tells", "0self", "1sees", "1self", "0sees"}) {
				i := int(s[0] - '0')
				switch s[1:] {
				case "reads":
					hosts[i].has = now
				case "tells":
					hosts[i].tells = published(history[hosts[i].has])
				case "self":
					hosts[i].self = hosts[i].tells
				case "sees":
					hosts[i].sees = hosts[1-i].tells
				}
				check(s)
			}
			a, _ := sign(0)
			if b, _ := sign(1); a != b {
				t.Fatalf("all have seen %q, and use %s and %s", history[now], a, b)
			}
			if want := (history[now] + "-")[:1]; a != want {
				t.Fatalf("all have seen %q, and use %s", history[now], a)
			}
		}
	})
}

// TestKeysAreNotShown: neither a configuration nor a peer shows the cluster's keys.
func TestKeysAreNotShown(t *testing.T) {
	t.Parallel()
	notes := `"routerd.io/accepts":"direct","routerd.io/bgpKeys":"` + published("ba") + `"`
	v := view(t, labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), "", notes), labelled(t, bgpNode(t, "node2", "10.1.0.10/24"), "", notes))
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
