package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// BGPSecret is the name of the key with which nodes sign their BGP sessions between each
// other. A cluster that is made with routerd has one from its beginning; others get one
// from [RotateBGPKey].
const BGPSecret = "bgp"

// AnnotationBGPKeys of a Node lists the keys of [BGPSecret] that the node has, by their
// ids, the newest first. Who has none published speaks without: Calico's nodes, and those
// of versions before.
const AnnotationBGPKeys = "routerd.io/bgpKeys"

// KeyID is the name of a key, which does not tell it.
func KeyID(key []byte) string {
	sum := sha256.Sum256(append([]byte("routerd key id\x00"), key...))
	return hex.EncodeToString(sum[:4])
}

// KeyIDs are the names of a secret's keys, the newest first. A nil secret has none.
func (s *Secret) KeyIDs() []string {
	var ids []string
	for _, k := range s.keys() {
		ids = append(ids, KeyID(k))
	}
	return ids
}

func (s *Secret) keys() (out [][]byte) {
	if s == nil {
		return nil
	}
	for _, k := range [][]byte{s.Key, s.Former} {
		if len(k) > 0 {
			out = append(out, k)
		}
	}
	return out
}

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
			return &Secret{Key: freshKey(), Open: true}
		case len(cur.Former) > 0 || cur.Open:
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
		had, _ := cur.Value.(*Secret)
		switch next := change(had); {
		case next == nil:
			return nil, errBGPKeyChanged
		case next == had:
			return nil, nil //nolint:nilnil // nothing to write
		default:
			return next, nil
		}
	})
	if err != nil {
		return nil, fmt.Errorf("change the key of BGP: %w", err)
	}
	k, ok := obj.Value.(*Secret)
	if !ok || len(k.Key) < secretLen {
		return nil, fmt.Errorf("change the key of BGP: %s holds fewer than %d bytes; delete it, and make a new one", obj.Key.Path(), secretLen)
	}
	return k, nil
}

// BGPKey returns the key of BGP; nil: the cluster has none.
func BGPKey(ctx context.Context, s Store) (*Secret, error) {
	obj, err := s.Get(ctx, SecretKey(BGPSecret))
	if errors.Is(err, ErrNotFound) {
		return nil, nil //nolint:nilnil // there need be none
	}
	if err != nil {
		return nil, fmt.Errorf("read the key of BGP: %w", err)
	}
	k, _ := obj.Value.(*Secret)
	return k, nil
}

// DropBGPKey has nodes do without a key.
func DropBGPKey(ctx context.Context, s Store) error {
	if _, err := s.Txn(ctx, Op{Action: Remove, Object: Object{Key: SecretKey(BGPSecret)}}); err != nil {
		return fmt.Errorf("delete the key of BGP: %w", err)
	}
	return nil
}

// WithoutBGPKey returns the nodes of a list that have published a key and not the newest
// one, and those that have published none, in order.
func WithoutBGPKey(nodes []Object, newest string) (former, none []string) {
	for _, o := range nodes {
		n, ok := o.Value.(*Node)
		if !ok {
			continue
		}
		switch ids := BGPKeysOf(n.Annotations[AnnotationBGPKeys]); {
		case len(ids) == 0:
			none = append(none, n.Name)
		case !slices.Contains(ids, newest):
			former = append(former, n.Name)
		}
	}
	return former, none
}
