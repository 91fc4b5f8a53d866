package etcd

import (
	"context"
	"fmt"
	"time"

	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/routerd/routerd/control/async"
)

const (
	// electionRoot is beside what Calico's tools read.
	electionRoot = "/routerd/v1/elections/"

	// resignTimeout bounds the farewell: the lease's end does the same, later.
	resignTimeout = 2 * time.Second

	campaignPauseMin, campaignPauseMax = 2 * time.Second, 30 * time.Second
)

// Lead calls lead while this process is the one of the cluster that holds the
// lease called name, and waits for it otherwise. Its holder is known
// by a lease of ttl (whole seconds, at least 1 s), as etcd's own elections are:
// when it dies, another follows within about ttl. lead's context ends when the
// lease is lost, and it should return then; in a process that is cut off it
// may go on for a moment beside its successor, so that what it writes has to be
// conditional. Lead returns when ctx ends, and gives up the lease; trouble
// with the datastore is logged, and it tries again.
func (s *Store) Lead(ctx context.Context, name, id string, ttl time.Duration, lead func(context.Context)) {
	pause := async.Backoff{Min: campaignPauseMin, Max: campaignPauseMax, Jitter: 0.5}
	for ctx.Err() == nil {
		held, err := s.campaign(ctx, electionRoot+name, id, max(1, int(ttl/time.Second)), lead)
		if ctx.Err() != nil {
			return
		}
		if held {
			pause.Reset()
		}
		s.log.Debug("leader-election lease lost; will stand again", "lease", name, "error", err)
		_ = pause.Wait(ctx) // the loop looks at ctx
	}
}

// campaign stands for election once, and reports whether it was held.
func (s *Store) campaign(ctx context.Context, key, id string, ttl int, lead func(context.Context)) (held bool, err error) {
	session, err := concurrency.NewSession(s.client, concurrency.WithTTL(ttl), concurrency.WithContext(ctx))
	if err != nil {
		return false, fmt.Errorf("get a lease: %w", s.explain(ctx, err))
	}
	defer func() {
		// The session's context may have ended: the lease is given back in one of
		// its own.
		bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), resignTimeout)
		defer cancel()
		session.Orphan()
		_, _ = s.client.Revoke(bye, session.Lease())
	}()
	standing, cancel := context.WithCancel(ctx)
	defer cancel()
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		select {
		case <-session.Done():
			cancel()
		case <-standing.Done():
		}
	}()
	defer func() { cancel(); <-lost }()
	if err := concurrency.NewElection(session, key).Campaign(standing, id); err != nil {
		return false, fmt.Errorf("stand for %s: %w", key, s.explain(ctx, err))
	}
	lead(standing)
	return true, standing.Err()
}
