// Package stall records when a machine did not run what was ready to run, so
// that a test which measures time can tell the machine's part from that of the
// program under test. A virtual machine on a busy host stands still now and then,
// for a second or more, and so does a processor with more work than time.
package stall

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// period is the time for which each processor's thread sleeps.
	period = 5 * time.Millisecond
	// tolerance is by how much it may be late without this being a stall.
	tolerance = 5 * time.Millisecond
)

// span is a time in which a processor did not run the thread that was due.
type span struct{ from, to time.Time }

// Recorder knows when processors stalled. Its methods are safe for concurrent
// use.
type Recorder struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	spans []span
}

// Start records until ctx ends or [Recorder.Stop] is called: on each processor
// that this process may use, one thread that sleeps most of the time and sees
// when it is woken late.
func Start(ctx context.Context) (*Recorder, error) {
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return nil, fmt.Errorf("ask for the processors to use: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &Recorder{cancel: cancel}
	for cpu, left := 0, may.Count(); left > 0; cpu++ {
		if !may.IsSet(cpu) {
			continue
		}
		left--
		started := make(chan error)
		r.wg.Go(func() { r.watch(ctx, cpu, started) })
		if err := <-started; err != nil {
			r.Stop()
			return nil, fmt.Errorf("keep a thread to processor %d: %w", cpu, err)
		}
	}
	return r, nil
}

// Stop ends the recording; what was recorded stays.
func (r *Recorder) Stop() {
	r.cancel()
	r.wg.Wait()
}

// watch runs on a thread of its own, which ends with it.
func (r *Recorder) watch(ctx context.Context, cpu int, started chan<- error) {
	runtime.LockOSThread()
	var one unix.CPUSet
	one.Set(cpu)
	err := unix.SchedSetaffinity(0, &one)
	started <- err
	if err != nil {
		return
	}
	sleep := unix.NsecToTimespec(int64(period))
	for last := time.Now(); ctx.Err() == nil; {
		_ = unix.Nanosleep(&sleep, nil) // woken early by a signal, it just looks earlier
		now := time.Now()
		r.woke(last, now)
		last = now
	}
}

// woke notes that a thread which went to sleep at last was woken at now.
func (r *Recorder) woke(last, now time.Time) {
	due := last.Add(period)
	if now.Sub(due) <= tolerance {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spans = append(r.spans, span{due, now})
}

// Longest returns the longest of all stalls so far.
func (r *Recorder) Longest() (longest time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.spans {
		longest = max(longest, s.to.Sub(s.from))
	}
	return longest
}

// Within returns for how long, of the time between from and to, any processor
// stalled.
func (r *Recorder) Within(from, to time.Time) time.Duration {
	r.mu.Lock()
	spans := slices.Clone(r.spans)
	r.mu.Unlock()
	slices.SortFunc(spans, func(a, b span) int { return a.from.Compare(b.from) })
	var sum time.Duration
	for _, s := range spans {
		if s.from.Before(from) {
			s.from = from
		}
		if s.to.After(to) {
			s.to = to
		}
		if s.from.Before(s.to) {
			sum += s.to.Sub(s.from)
			from = s.to // what another processor stalled at the same time counts once
		}
	}
	return sum
}
