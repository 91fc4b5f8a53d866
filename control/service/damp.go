package service

import (
	"math"
	"net/netip"
	"time"
)

// How addresses are damped, by the figure of merit of RFC 2439 section 4.4, which is
// the number of losses here, less with time.
const (
	halfLife  = 30 * time.Second
	suppress  = 2.0 // with so many an address that comes back is held back
	reuse     = 1.0 // until there are no more than these
	mostFlaps = 4.0 // more do not count: nothing is held back for longer than two half-lives
)

// settle is how long an address that other nodes serve is held back where it joins them:
// kube-proxy follows a change up to its minSyncPeriod later, 1 s by default, and the time
// that it takes, and drops until then what comes for a Service with a policy Local.
const settle = 3 * time.Second

// Damper holds back addresses that come and go, and for a moment those that other nodes
// serve already. A loss is never delayed, nor is an address that no other node serves.
// The zero value has seen nothing, and holds nothing back of what it sees first: a daemon that
// starts announced it before. It is not safe for concurrent use.
type Damper struct {
	begun  bool
	flaps  map[netip.Addr]flaps
	joined map[netip.Addr]time.Time // since when they are held back for settle
}

// flaps is the history of an address that was lost.
type flaps struct {
	merit float64 // at the time
	at    time.Time
	held  bool
}

func (f flaps) now(t time.Time) float64 {
	return f.merit * math.Exp2(-float64(t.Sub(f.at))/float64(halfLife))
}

// Damp takes which addresses have changed since the last call, and says of what is to be
// announced now what is held back, and for how long that holds if nothing else happens; 0:
// forever. It costs by what has changed, and by what came and went of late.
func (d *Damper) Damp(now time.Time, want func(netip.Addr) (Announcement, bool), changed Changes) (held map[netip.Addr]bool, again time.Duration) {
	hold := func(a netip.Addr, left time.Duration) {
		if held == nil {
			held = make(map[netip.Addr]bool)
		}
		held[a] = true
		if left += time.Millisecond; again == 0 || left < again { // a moment more, so that it is over then
			again = left
		}
	}
	if !d.begun {
		d.begun, changed = true, nil
	}
	d.settle(now, want, changed, hold)
	for a, had := range changed {
		if _, wanted := want(a); wanted || !had {
			continue
		}
		if d.flaps == nil {
			d.flaps = make(map[netip.Addr]flaps)
		}
		f := d.flaps[a]
		d.flaps[a] = flaps{merit: min(f.now(now)+1, mostFlaps), at: now}
	}
	for a, f := range d.flaps {
		w, wanted := want(a)
		had, moved := changed[a]
		merit := f.now(now)
		switch {
		case merit < reuse/2:
			delete(d.flaps, a) // it does not matter any more
			continue
		case !wanted:
			continue
		case !w.Elsewhere || f.held && merit <= reuse:
			f.held = false
		case moved && !had && merit >= suppress:
			f.held = true
		}
		if d.flaps[a] = f; !f.held {
			continue
		}
		hold(a, time.Duration(math.Log2(merit/reuse)*float64(halfLife)))
	}
	return held, again
}

// settle holds back what has just joined other nodes.
func (d *Damper) settle(now time.Time, want func(netip.Addr) (Announcement, bool), changed Changes, hold func(netip.Addr, time.Duration)) {
	for a, had := range changed {
		if w, wanted := want(a); had || !wanted || !w.Joined {
			continue
		}
		if d.joined == nil {
			d.joined = make(map[netip.Addr]time.Time)
		}
		d.joined[a] = now
	}
	for a, since := range d.joined {
		w, wanted := want(a)
		if left := settle - now.Sub(since); wanted && w.Elsewhere && left > 0 {
			hold(a, left)
		} else {
			delete(d.joined, a)
		}
	}
}
