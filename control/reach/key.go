package reach

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/routerd/routerd/store"
)

// secretName is the name of the key that the hosts of a cluster share, and
// keyLen its length in bytes.
const (
	secretName = "reach"
	keyLen     = 32
)

// readKey returns the cluster's key for probes, and makes it when there is
// none. Of two hosts that make it at once, both get the one that was first.
func readKey(ctx context.Context, s store.Store) ([]byte, error) {
	obj, err := s.Get(ctx, store.SecretKey(secretName))
	if errors.Is(err, store.ErrNotFound) {
		fresh := make([]byte, keyLen)
		// It never fails: see crypto/rand.
		_, _ = rand.Read(fresh)
		obj, err = store.Modify(ctx, s, store.SecretKey(secretName), func(cur store.Object) (any, error) {
			if cur.Value != nil {
				return nil, nil //nolint:nilnil // another host was first
			}
			return &store.Secret{Key: fresh}, nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read the key for probes: %w", err)
	}
	k, ok := obj.Value.(*store.Secret)
	if !ok || len(k.Key) < keyLen {
		return nil, fmt.Errorf("read the key for probes: %s holds fewer than %d bytes; delete it, and a new one is made", obj.Key.Path(), keyLen)
	}
	return k.Key, nil
}

// The pace of reading the key again after messages with a wrong code: somebody
// may have replaced it.
const (
	keyRetryMin = 200 * time.Millisecond
	keyRetryMax = 30 * time.Second
	keyAgain    = time.Minute
	storeWithin = 10 * time.Second
)

// followKey keeps the key until ctx ends: it reads it at the start, and again
// when it is doubted, at most once a minute.
func (p *Prober) followKey(ctx context.Context) {
	pause := keyRetryMin
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, storeWithin)
		k, err := readKey(attempt, p.cfg.Store)
		cancel()
		if err != nil {
			p.setState(err)
			if !wait(ctx, pause) {
				return
			}
			pause = min(2*pause, keyRetryMax)
			continue
		}
		pause = keyRetryMin
		p.setState(nil)
		if p.key.Swap(&k) == nil {
			p.poke()
		}
		if !wait(ctx, keyAgain) {
			return
		}
		select {
		case <-ctx.Done():
		case <-p.doubt:
		}
	}
}

func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
