package bgp

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/store"
)

// AOKey is a key of a BGPPeer for TCP-AO (RFC 5925).
type AOKey struct {
	store.TCPAOKey
	Text Password // what the secret holds, filled in by the controller
}

func (k AOKey) ref() SecretRef { return SecretRef{k.Name, k.TCPAOKey.Key} }

// id names the key by its ids.
func (k AOKey) id() string { return conn.Key{Send: k.Send, Receive: k.Receive}.String() }

// AOKeys are those of a BGPPeer, the one first that the peer is asked to sign with. They can be compared.
type AOKeys struct {
	N    int
	List [store.MaxTCPAOKeys]AOKey
}

func aoKeys(list []store.TCPAOKey) (k AOKeys) {
	for _, one := range list[:min(len(list), len(k.List))] {
		k.List[k.N] = AOKey{TCPAOKey: one}
		k.N++
	}
	return k
}

func (k *AOKeys) all() []AOKey { return k.List[:k.N] }

// String says which keys there are, without showing them.
func (k AOKeys) String() string {
	var out []string
	for _, one := range k.all() {
		out = append(out, fmt.Sprintf("%s (%s, %s)", one.id(), one.ref(), one.Algorithm))
	}
	return strings.Join(out, ", ")
}

// Format implements [fmt.Formatter]: no verb shows them.
func (k AOKeys) Format(f fmt.State, _ rune) { fmt.Fprint(f, k.String()) }

func (k AOKeys) engineKeys(secret func(AOKey) string) (out conn.Keys) {
	for _, one := range k.all() {
		out.List[out.N] = conn.Key{Send: one.Send, Receive: one.Receive, Algorithm: one.Algorithm, Secret: secret(one)}
		out.N++
	}
	return out
}

func (k AOKeys) reveal() conn.Keys {
	return k.engineKeys(func(one AOKey) string { return one.Text.reveal() })
}

// follow reports whether a session goes on when its keys become these. Of keys that were never read it is the secrets' names that count.
func (k AOKeys) follow(old AOKeys) bool {
	secret := func(one AOKey) string { return one.ref().String() + "\x00" + one.Text.reveal() }
	return k.engineKeys(secret).Follow(old.engineKeys(secret))
}

// withTexts fills in what the secrets hold. A key that cannot be had is left out, which left says, so that a session goes on with
// the others; with none of them there is none.
func (k AOKeys) withTexts(read func(SecretRef) (Password, error), try func(conn.Key) error) (out AOKeys, left string, err error) {
	var errs []error
	for _, one := range k.all() {
		text, err := read(one.ref())
		if err == nil {
			one.Text = text
			err = try(AOKeys{1, [store.MaxTCPAOKeys]AOKey{one}}.reveal().List[0])
		}
		if errors.Is(err, unix.ENOPROTOOPT) { // the kernel has none of it
			return AOKeys{}, "", fmt.Errorf("annotation %s: %w", store.AnnotationTCPAO, err)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("key %s: %w", one.id(), err))
			continue
		}
		out.List[out.N] = one
		out.N++
	}
	if err := errors.Join(errs...); err != nil {
		left = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	if out.N == 0 {
		return AOKeys{}, "", fmt.Errorf("annotation %s: %s", store.AnnotationTCPAO, left)
	}
	if left != "" {
		left = "left out: " + left
	}
	return out, left, nil
}

// describeKeys says of a session which keys it uses, and [Peer.Unread].
func describeKeys(use conn.KeyUse, unread string) string {
	out := ""
	if use.On {
		out = fmt.Sprintf("; TCP-AO: signs with key %d, asks for key %d", use.Current, use.Next)
	}
	if unread != "" {
		out += "; " + unread
	}
	return out
}
