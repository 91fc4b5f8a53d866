package kernel

import (
	"context"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// coalesce is how long changes of the underlay are gathered before they are
// published.
const coalesce = 10 * time.Millisecond

// publisher hands out snapshots of the underlay.
type publisher struct {
	// Of the loop alone.
	at    time.Time     // when to publish; zero: nothing new
	pause time.Duration // before the next

	mu     sync.Mutex
	last   dataplane.Underlay
	known  bool
	closed bool
	subs   map[chan dataplane.Underlay]struct{}
}

// Underlay returns a channel that carries the network around this host: at
// once if it is known, else after the first listing, and then whenever it
// changed. Changes are gathered for 10 ms. A slow reader gets only the newest
// snapshot. The channel is closed when ctx ends or the Kernel stops.
func (k *Kernel) Underlay(ctx context.Context) <-chan dataplane.Underlay {
	return k.observer.underlay.subscribe(ctx)
}

func (s *publisher) subscribe(ctx context.Context) <-chan dataplane.Underlay {
	ch := make(chan dataplane.Underlay, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		close(ch)
		return ch
	}
	if s.subs == nil {
		s.subs = make(map[chan dataplane.Underlay]struct{})
	}
	s.subs[ch] = struct{}{}
	if s.known {
		ch <- s.last
	}
	context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.drop(ch)
	})
	return ch
}

func (s *publisher) drop(ch chan dataplane.Underlay) {
	if _, ok := s.subs[ch]; ok {
		delete(s.subs, ch)
		close(ch)
	}
}

func (s *publisher) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for ch := range s.subs {
		s.drop(ch)
	}
}

// publish hands u to every subscriber if it is new.
func (s *publisher) publish(u dataplane.Underlay) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known && u.Same(s.last) {
		return
	}
	s.last, s.known = u, true
	for ch := range s.subs {
		select {
		case <-ch: // the reader is slow: the newest replaces what it did not read
		default:
		}
		ch <- u
	}
}

// changed notes that the underlay is to be published soon.
func (s *publisher) changed() {
	if s.at.IsZero() {
		s.at = time.Now().Add(s.pause)
	}
}

// publishUnderlay publishes the underlay when it is time. To render a large one
// takes long, so the pause grows with it: at most a tenth of the time goes there.
func (ob *observer) publishUnderlay() {
	start := time.Now()
	if ob.underlay.at.IsZero() || start.Before(ob.underlay.at) {
		return
	}
	ob.underlay.at = time.Time{}
	u := ob.mirror.underlay()
	if err := ob.sysctls.addTo(&u); err != nil {
		ob.log.Warn("settings of devices cannot be read", "error", err)
	}
	ob.underlay.publish(u)
	ob.underlay.pause = max(coalesce, 10*time.Since(start))
}
