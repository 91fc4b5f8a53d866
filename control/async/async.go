// Package async holds what code with goroutines writes again and again: a signal that
// somebody has work, a growing pause between attempts, a pause that ends with its
// context, and the wait for a counter to stand still. It uses the standard library alone, so that
// every package may import it.
package async

import (
	"context"
	"math/rand/v2"
	"time"
)

// Signal tells one goroutine that there is something to do. Signals that are sent
// before the receiver looks count once. Make it with [NewSignal]; receive from it
// as from a channel.
type Signal chan struct{}

// NewSignal returns a Signal that has not been set.
func NewSignal() Signal { return make(Signal, 1) }

// Set sets s. It never blocks, and may be called from any goroutine.
func (s Signal) Set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Backoff is a pause that doubles with every failed attempt, from Min to Max. The
// zero value of the rest is ready. It is not safe for concurrent use.
type Backoff struct {
	Min, Max time.Duration
	// Jitter is the part of each pause, from 0 to 1, that is left to chance, so
	// that many hosts do not come back at the same moment.
	Jitter float64

	next time.Duration
}

// Next returns how long to wait after one more failed attempt.
func (b *Backoff) Next() time.Duration {
	d := max(b.next, b.Min)
	b.next = min(2*d, b.Max)
	d = min(d, b.Max)
	if b.Jitter > 0 {
		d -= time.Duration(rand.Float64() * b.Jitter * float64(d)) //nolint:gosec // no secret
	}
	return d
}

// Reset starts again from Min: an attempt succeeded.
func (b *Backoff) Reset() { b.next = 0 }

// Wait sleeps for [Backoff.Next]. It returns ctx's error if that ends first.
func (b *Backoff) Wait(ctx context.Context) error { return Sleep(ctx, b.Next()) }

// Sleep waits for d, or until ctx ends, whose error it then returns.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Still waits until a counter, which it looks at every second, has stood still for a
// while, or ctx ends, whose error it then returns. count says where it stands, and known whether that is so: what is not
// known may have moved. Its error ends the wait. moved, if not nil, is told by how much
// the counter grew, and since when.
func Still(ctx context.Context, quiet time.Duration, count func() (n uint64, known bool, err error), moved func(by uint64, took time.Duration)) error {
	var last uint64
	since := time.Now()
	for seen := false; ; {
		n, known, err := count()
		if err != nil {
			return err
		}
		now := time.Now()
		switch {
		case !known:
			since = now
		case !seen || n != last:
			if seen && n > last && moved != nil {
				moved(n-last, now.Sub(since))
			}
			seen, last, since = true, n, now
		}
		if known && now.Sub(since) >= quiet {
			return nil
		}
		if err := Sleep(ctx, time.Second); err != nil {
			return err
		}
	}
}

// Retry calls f until it succeeds, with b's pauses between. It returns nil then,
// and ctx's error when that ends first. f reports its own errors.
func Retry(ctx context.Context, b Backoff, f func(context.Context) error) error {
	for {
		if err := f(ctx); err == nil {
			return nil
		}
		if err := b.Wait(ctx); err != nil {
			return err
		}
	}
}
