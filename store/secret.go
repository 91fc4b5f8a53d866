package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
)

// Names of the keys of probes, beside [BGPSecret].
const (
	ProbeSecret = "probe" // of tunnels
	ReachSecret = "reach" // of the underlay
)

// secretLen is the length of a shared key in bytes.
const secretLen = 32

func freshKey() []byte {
	key := make([]byte, secretLen)
	_, _ = rand.Read(key) // never fails: see crypto/rand
	return key
}

// SharedSecret returns the key of this name that the hosts of a cluster share,
// and makes it when there is none. Of two hosts that make it at once, both get
// the one that was first.
func SharedSecret(ctx context.Context, s Store, name string) ([]byte, error) {
	obj, err := s.Get(ctx, SecretKey(name))
	if errors.Is(err, ErrNotFound) {
		fresh := freshKey()
		obj, err = Modify(ctx, s, SecretKey(name), func(cur Object) (any, error) {
			if cur.Value != nil {
				return nil, nil //nolint:nilnil // another host was first
			}
			return &Secret{Key: fresh}, nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read the shared key %s: %w", name, err)
	}
	k, ok := obj.Value.(*Secret)
	if !ok || len(k.Key) < secretLen {
		return nil, fmt.Errorf("read the shared key %s: %s holds fewer than %d bytes; delete it, and a new one is made", name, obj.Key.Path(), secretLen)
	}
	return k.Key, nil
}
