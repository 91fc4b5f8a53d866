package probe

import (
	"bytes"
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// The names of the keys that the hosts of a cluster share. There are two, for
// hosts of earlier versions know no other.
const (
	underlaySecret = store.ReachSecret
	tunnelSecret   = store.ProbeSecret
)

// The pace of reading a key: until it is known, when messages arrive with a wrong
// code, for somebody may have replaced it, and now and then.
const (
	retryMin    = 200 * time.Millisecond
	retryMax    = 30 * time.Second
	doubtAfter  = time.Minute
	rereadAfter = 10 * time.Minute
	storeWithin = 10 * time.Second
)

// secret is a key that the hosts share in the datastore. Its methods may be
// called from any goroutine.
type secret struct {
	name  string
	key   atomic.Pointer[[]byte] // nil: not known yet
	err   atomic.Pointer[error]  // why not
	doubt async.Signal           // the key may be another
}

func newSecret(name string) *secret { return &secret{name: name, doubt: async.NewSignal()} }

// get returns the key; nil: it is not known yet.
func (s *secret) get() []byte {
	if k := s.key.Load(); k != nil {
		return *k
	}
	return nil
}

// state says why there is no key; empty: there is one.
func (s *secret) state() string {
	switch err := s.err.Load(); {
	case s.get() != nil:
		return ""
	case err != nil:
		return (*err).Error()
	}
	return "the cluster's key is not read yet"
}

// follow keeps the key until ctx ends, and calls changed when it is another. A
// key that was read serves for as long as the datastore is away.
func (s *secret) follow(ctx context.Context, st store.Store, log *slog.Logger, changed func()) {
	pause := async.Backoff{Min: retryMin, Max: retryMax}
	for {
		attempt, cancel := context.WithTimeout(ctx, storeWithin)
		k, err := store.SharedSecret(attempt, st, s.name)
		cancel()
		if err != nil {
			if s.err.Swap(&err) == nil && s.get() == nil && ctx.Err() == nil {
				log.Warn("no key for probes; what was known stays in use", "secret", s.name, "error", err)
			}
			if pause.Wait(ctx) != nil {
				return
			}
			continue
		}
		pause.Reset()
		s.err.Store(nil)
		if old := s.key.Swap(&k); old == nil || !bytes.Equal(*old, k) {
			changed()
		}
		if async.Sleep(ctx, doubtAfter) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-s.doubt:
		case <-time.After(rereadAfter - doubtAfter):
		}
	}
}
