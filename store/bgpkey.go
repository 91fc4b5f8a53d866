package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BGPSecret is the name of the key with which nodes sign their BGP sessions between each
// other. A cluster that is made with routerd has one from its beginning; others get one
// from [RotateBGPKey].
const BGPSecret = "bgp"

// AnnotationBGPKeys of a Node lists the keys of [BGPSecret] that the node has, by their
// ids, the newest first. Who has none published speaks without: Calico's nodes, and those
// of versions before. On the BGPConfiguration named default it says what the secret holds
// since it was last changed, so that nodes look there at once: the watch shows no secrets.
const AnnotationBGPKeys = "routerd.io/bgpKeys"

// KeyID is the name of a key, which does not tell it.
func KeyID(key []byte) string {
	sum := sha256.Sum256(append([]byte("routerd key id\x00"), key...))
	return hex.EncodeToString(sum[:4])
}

// KeyIDs are the names of a secret's keys, the newest first. A nil secret has none.
func (s *Secret) KeyIDs() []string {
	var ids []string
	for _, k := range s.Keys() {
		ids = append(ids, KeyID(k))
	}
	return ids
}

// Keys are a secret's keys, the newest first.
func (s *Secret) Keys() [][]byte {
	switch {
	case s == nil:
		return nil
	case len(s.Former) == 0 || s.Open():
		return [][]byte{s.Key}
	}
	return [][]byte{s.Key, s.Former}
}

// noKey is in the place of the key before the first one.
const noKey = "none"

// Open reports whether some hosts may still do without any key.
func (s *Secret) Open() bool { return string(s.Former) == noKey }

// SetBGPKeys writes an annotation [AnnotationBGPKeys], and reports whether it was another.
func SetBGPKeys(n *Node, ids []string) (changed bool) {
	text := strings.Join(ids, ",")
	if n.Annotations[AnnotationBGPKeys] == text {
		return false
	}
	if text == "" {
		delete(n.Annotations, AnnotationBGPKeys)
		return true
	}
	if n.Annotations == nil {
		n.Annotations = map[string]string{}
	}
	n.Annotations[AnnotationBGPKeys] = text
	return true
}

// BGPKeysOf reads an annotation [AnnotationBGPKeys].
func BGPKeysOf(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

// RotateBGPKey begins to replace the key of BGP, or makes the first one. What was begun
// before and is not finished is returned as it is.
func RotateBGPKey(ctx context.Context, s Store) (*Secret, error) {
	return changeBGPKey(ctx, s, func(cur *Secret) *Secret {
		switch {
		case cur == nil:
			return &Secret{Key: freshKey(), Former: []byte(noKey)}
		case len(cur.Former) > 0:
			return cur
		}
		return &Secret{Key: freshKey(), Former: cur.Key}
	})
}

// FinishBGPKey ends what [RotateBGPKey] began: nothing but the newest key counts any more.
// The id says which one that is to be.
func FinishBGPKey(ctx context.Context, s Store, id string) (*Secret, error) {
	return changeBGPKey(ctx, s, func(cur *Secret) *Secret {
		if cur == nil || KeyID(cur.Key) != id {
			return nil
		}
		return &Secret{Key: cur.Key}
	})
}

// errBGPKeyChanged says that somebody else replaced the key meanwhile.
var errBGPKeyChanged = errors.New("somebody else changed it meanwhile: look, and begin again")

func changeBGPKey(ctx context.Context, s Store, change func(*Secret) *Secret) (*Secret, error) {
	obj, err := Modify(ctx, s, SecretKey(BGPSecret), func(cur Object) (any, error) {
		var had *Secret
		if cur.Revision != 0 {
			var err error
			if had, err = bgpKeyOf(cur); err != nil {
				return nil, err
			}
		}
		switch next := change(had); {
		case next == nil:
			return nil, errBGPKeyChanged
		case had != nil && next == had:
			return nil, nil //nolint:nilnil // nothing to write
		default:
			return next, nil
		}
	})
	if errors.Is(err, ErrDecode) {
		_, err = bgpKeyOf(obj)
	}
	if err != nil {
		return nil, fmt.Errorf("change the key of BGP: %w", err)
	}
	k := obj.Value.(*Secret)
	return k, tellBGPKey(ctx, s, k)
}

// bgpKeyOf reads the secret.
func bgpKeyOf(obj Object) (*Secret, error) {
	k, ok := obj.Value.(*Secret)
	if !ok {
		return nil, fmt.Errorf("%s %w: %s", SecretKey(BGPSecret).Path(), ErrDecode, bgpKeyCure)
	}
	for _, one := range k.Keys() {
		if len(one) != secretLen {
			return nil, fmt.Errorf("%s has a key of %d bytes, not of %d: %s", SecretKey(BGPSecret).Path(), len(one), secretLen, bgpKeyCure)
		}
	}
	return k, nil
}

const bgpKeyCure = "delete it (routerctl bgp key off), and make a new one (routerctl bgp key rotate)"

// tellBGPKey has the nodes look at the secret.
func tellBGPKey(ctx context.Context, s Store, k *Secret) error {
	text := strings.Join(k.KeyIDs(), ",")
	switch {
	case k == nil:
		text = "none"
	case k.Open():
		text += ",none"
	}
	_, err := Modify(ctx, s, ResourceKey(KindBGPConfiguration, DefaultName), func(cur Object) (any, error) {
		c := &v3.BGPConfiguration{ObjectMeta: metav1.ObjectMeta{Name: DefaultName}}
		if cur.Value != nil {
			c = Clone(cur.Value).(*v3.BGPConfiguration)
		}
		if c.Annotations == nil {
			c.Annotations = map[string]string{}
		}
		c.Annotations[AnnotationBGPKeys] = text
		return c, nil
	})
	if err != nil {
		return fmt.Errorf("the key of BGP is changed, which the nodes see within ten minutes; tell them now: %w", err)
	}
	return nil
}

// BGPKey returns the key of BGP; nil: the cluster has none.
func BGPKey(ctx context.Context, s Store) (*Secret, error) {
	obj, err := s.Get(ctx, SecretKey(BGPSecret))
	if errors.Is(err, ErrNotFound) {
		return nil, nil //nolint:nilnil // there need be none
	}
	if err != nil && !errors.Is(err, ErrDecode) { // what cannot be decoded has no value
		return nil, fmt.Errorf("read the key of BGP: %w", err)
	}
	return bgpKeyOf(obj)
}

// DropBGPKey has nodes do without a key.
func DropBGPKey(ctx context.Context, s Store) error {
	if _, err := s.Txn(ctx, Op{Action: Remove, Object: Object{Key: SecretKey(BGPSecret)}}); err != nil {
		return fmt.Errorf("delete the key of BGP: %w", err)
	}
	return tellBGPKey(ctx, s, nil)
}
