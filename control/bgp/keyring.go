package bgp

import (
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/store"
)

// Keyring is what nodes sign the sessions between each other with, where no resource asks for
// another password: keys that all hosts of the cluster share. A workload that connects with
// a host's address has none. Two nodes go by what each has published of its keys
// ([store.AnnotationBGPKeys]): they use the newest that both have, and none if one of them
// has published none, as Calico's nodes and routerd's of earlier versions. While a key is
// replaced they may see that at different times; so the side that opens a connection
// follows the other one, among what that may have.
type Keyring struct {
	keys [2]key // the newest first; empty: there are no more
	open bool   // a node that has published keys may still do without
	why  string // there are none
}

type key struct {
	id   string
	text Password
}

// WithoutKeys is the keyring of a host that has none, for a reason.
func WithoutKeys(why string) Keyring { return Keyring{why: why} }

// NewKeyring returns the keys of a secret.
func NewKeyring(s *store.Secret) Keyring {
	k := Keyring{open: s.Open()}
	for i, b := range s.Keys() {
		k.keys[i] = key{store.KeyID(b), Password{hex.EncodeToString(b)}}
	}
	return k
}

// passwords returns what to sign a session with, given what this node and the peer have
// published of their keys, and what the peer may have instead while a key is replaced. If that
// is from the disk, which lacks what was published last before a loss of power, the peer may
// expect keys that the disk does not say it should; it is not offered less than the disk says.
func (k *Keyring) passwords(self, peer []string, fromDisk bool) (use Password, others []Password) {
	if k.keys[0].id == "" {
		return Password{}, nil
	}
	open := k.open
	if fromDisk && (len(self) == 0 || len(peer) == 0) {
		open = true
		if len(self) == 0 {
			self = k.ids() // a host publishes what it has
		}
	}
	var all []Password // those that both have, then those that the peer may have by now
	unsigned := len(self) == 0 || len(peer) == 0
	if unsigned {
		all = append(all, Password{})
	}
	if !unsigned || open {
		for _, both := range []bool{true, false} {
			for _, own := range k.keys {
				if own.id != "" && both == (slices.Contains(self, own.id) && slices.Contains(peer, own.id)) {
					all = append(all, own.text)
				}
			}
		}
	}
	if !unsigned && open {
		all = append(all, Password{})
	}
	return all[0], all[1:]
}

// ids are those of the keys, the newest first.
func (k *Keyring) ids() (ids []string) {
	for _, own := range k.keys {
		if own.id != "" {
			ids = append(ids, own.id)
		}
	}
	return ids
}

// sign has the session with another node of routerd's signed, unless it has a password of
// its own. By the disk every node may be one: it may have said so last.
func (d *derivation) sign(p *Peer, n nodeFacts) {
	if p.Secret != (SecretRef{}) || p.AO.N > 0 || !n.ours && !d.v.fromDisk {
		return
	}
	var theirs []string
	if n.ours {
		theirs = store.BGPKeysOf(n.keys)
	}
	use, others := d.v.keys.passwords(store.BGPKeysOf(d.self.keys), theirs, d.v.fromDisk)
	p.Password = use
	p.Others.n = copy(p.Others.list[:], others)
}

// CanSign says why this kernel cannot sign sessions; nil: it can.
func CanSign() error { return conn.CanSign() }

// SetKeys says which keys of the cluster this host has. It may be called at any time.
func (c *Controller) SetKeys(k Keyring) {
	c.mu.Lock()
	changed := c.view.keys != k
	if c.view.keys = k; changed {
		c.view.sessionsChanged()
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

// String says what sessions between nodes are signed with, without showing it.
func (k Keyring) String() string {
	switch now, former := k.keys[0].id, k.keys[1].id; {
	case now == "":
		return "not signed: " + k.why
	case former != "":
		return fmt.Sprintf("signed with key %s, or with %s where a node does not have it yet", now, former)
	case k.open:
		return fmt.Sprintf("signed with key %s with every node that has it", now)
	default:
		return "signed with key " + now
	}
}

// Format implements [fmt.Formatter]: no verb shows them.
func (k Keyring) Format(f fmt.State, _ rune) {
	fmt.Fprint(f, k.String())
}

func (p Passwords) reveal() (out conn.Passwords) {
	out.N = p.n
	for i, one := range p.list {
		out.List[i] = one.reveal()
	}
	return out
}
