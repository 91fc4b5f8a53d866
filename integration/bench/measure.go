package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Each calls fn for 0 to n-1 from that many callers at once and returns how
// long each call took, in no order. It stops at the first error.
func Each(ctx context.Context, n, callers int, fn func(ctx context.Context, i int) error) ([]time.Duration, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	took := make([]time.Duration, n)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				start := time.Now()
				if err := fn(ctx, i); err != nil {
					cancel(fmt.Errorf("number %d: %w", i, err))
					return
				}
				took[i] = time.Since(start)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return took, nil
}

// Rate returns how many calls a second Each makes for at least that long. n
// is how many calls one round makes; setup, which may be nil, is called before
// each round and not counted.
func Rate(ctx context.Context, atLeast time.Duration, n, callers int, setup func(round int) error, fn func(ctx context.Context, round, i int) error) (float64, error) {
	if n < 1 || callers < 1 {
		return 0, errors.New("a rate needs at least one call and one caller")
	}
	var spent time.Duration
	calls := 0
	for round := 0; spent < atLeast; round++ {
		if setup != nil {
			if err := setup(round); err != nil {
				return 0, err
			}
		}
		start := time.Now()
		if _, err := Each(ctx, n, callers, func(ctx context.Context, i int) error { return fn(ctx, round, i) }); err != nil {
			return 0, err
		}
		spent += time.Since(start)
		calls += n
	}
	return float64(calls) / spent.Seconds(), nil
}
