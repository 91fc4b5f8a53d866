package reach

import (
	"context"
	"time"

	"github.com/routerd/routerd/store"
)

// secretName is the name of the key that the hosts of a cluster share.
const secretName = "reach"

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
		k, err := store.SharedSecret(attempt, p.cfg.Store, secretName)
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
