package bgp

import (
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/store"
)

// Keyring is what nodes sign the sessions between each other with, where nobody asked for
// another password: keys that all hosts of the cluster share. A workload that connects with
// a host's address has none. Two nodes go by what each has published of its keys
// ([store.AnnotationBGPKeys]): they use the newest that both have, and none if one of them
// has published none. They may see that at different times, above all while one of them
// does not reach the datastore; so the side that opens a connection follows the other one,
// among what that may have.
type Keyring struct {
	keys [2]key // the newest first; empty: there are no more
	open bool   // a node that has published keys may still do without
}

type key struct {
	id   string
	text Password
}

// NewKeyring returns the keys of a secret; nil: there are none.
func NewKeyring(s *store.Secret) Keyring {
	if s == nil {
		return Keyring{}
	}
	k := Keyring{open: s.Open}
	for i, b := range [][]byte{s.Key, s.Former} {
		if len(b) > 0 {
			k.keys[i] = key{store.KeyID(b), Password{hex.EncodeToString(b)}}
		}
	}
	return k
}

// passwords returns what to sign a session with, given what the peer has published of its
// keys, and what the peer may have instead for a while.
func (k *Keyring) passwords(published []string) (use Password, others []Password) {
	var all []Password // in the order in which they are likely
	if len(published) == 0 {
		all = append(all, Password{}) // it has none, or its keys are not seen here yet
	}
	for _, both := range []bool{true, false} {
		for _, own := range k.keys {
			if own.id != "" && slices.Contains(published, own.id) == both {
				all = append(all, own.text)
			}
		}
	}
	if len(all) == 0 || len(published) > 0 && k.open {
		all = append(all, Password{})
	}
	return all[0], all[1:]
}

// sign has the session with another node signed, unless it has a password of its own.
func (d *derivation) sign(p *Peer, n nodeFacts) {
	if p.Secret != (SecretRef{}) {
		return
	}
	use, others := d.v.keys.passwords(store.BGPKeysOf(n.keys))
	if p.Password = use; p.Passive {
		return // the peer follows
	}
	p.Others.n = copy(p.Others.list[:], others)
}

// CanSign says why this kernel cannot sign sessions; nil: it can.
func CanSign() error { return conn.CanSign() }

// SetKeys says which keys of the cluster this host has. It may be called at any time.
func (c *Controller) SetKeys(k Keyring) {
	c.mu.Lock()
	changed := c.view.keys != k
	if c.view.keys = k; changed {
		c.view.revision++
	}
	c.mu.Unlock()
	if changed {
		c.poke()
	}
}

// Passwords are some of which a peer has one. They show no more of themselves than a
// [Password].
type Passwords struct {
	n    int
	list [2]Password
}

// Format implements [fmt.Formatter]: no verb shows them.
func (p Passwords) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "(%d)", p.n) }

// Format implements [fmt.Formatter]: no verb shows them.
func (k Keyring) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "(%s %s open %t)", k.keys[0].id, k.keys[1].id, k.open)
}

func (p Passwords) reveal() (out conn.Passwords) {
	out.N = p.n
	for i, one := range p.list {
		out.List[i] = one.reveal()
	}
	return out
}
