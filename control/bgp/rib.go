package bgp

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// batchSize bounds the prefixes in one [Changes]: the reader holds that many at
// a time, and what changes again meanwhile is told once.
const batchSize = 8192

// gather is the least time between two [Changes], unless there is a whole batch
// or a next hop was lost. One change alone is told at once; while a peer tells
// its table, each step of what follows would cost more than what is in it.
const gather = 5 * time.Millisecond

// rib holds the paths of equal cost that were learned of each prefix, and which
// prefixes the reader has not heard of. A slow reader costs at most one entry
// per prefix, and what is there when the reader comes is one batch. Prefixes
// with the same paths share them. It is safe for concurrent use.
type rib struct {
	mu      sync.Mutex
	wake    chan struct{} // holds a token when there is something to take
	urgent  chan struct{} // and it is not to wait for more
	taken   time.Time     // when something was last taken
	known   map[netip.Prefix]*PathSet
	pending map[netip.Prefix]struct{} // changed and not taken
	most    int                       // the most that pending has held
	stale   map[netip.Prefix]struct{} // told before the engine was started anew and not told again yet
	started bool                      // Reset has been given
	synced  bool                      // Synced waits to be given
	sets    pathSets

	// Next hops that went with a session. What is lost is told at once, and
	// what is found when the withdrawals that belong to it have been taken.
	lost  map[netip.Addr]netip.Addr // next hop → the peer with which it went
	tell  []netip.Addr              // lost and not told
	again []netip.Addr              // told as lost, and no longer so; told when nothing is pending
}

func newRIB() *rib {
	return &rib{
		wake: make(chan struct{}, 1), urgent: make(chan struct{}, 1), known: map[netip.Prefix]*PathSet{}, pending: map[netip.Prefix]struct{}{},
		stale: map[netip.Prefix]struct{}{}, lost: map[netip.Addr]netip.Addr{}, sets: newPathSets(),
	}
}

// add notes that h is among the paths of p, in place of any other from its
// peer.
func (r *rib) add(p netip.Prefix, h Hop) {
	h.Stale = false // going stale is no change
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.known[p]
	if _, ok := r.stale[p]; ok {
		delete(r.stale, p)
		r.change(p, r.sets.single(h))
		r.pending[p] = struct{}{} // told again, so that the reader sees that it came
		r.signal()
		return
	}
	r.change(p, r.sets.with(old, h))
}

// remove notes that a peer's path is not among those of p any more.
func (r *rib) remove(p netip.Prefix, peer netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.stale[p]; ok {
		return // of which the engine, started anew, has told nothing
	}
	if old := r.known[p]; old != nil {
		r.change(p, r.sets.without(old, peer))
	}
}

// set makes hops the paths of p that peers sent, the best one first.
func (r *rib) set(p netip.Prefix, hops []Hop) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, stale := r.stale[p]
	switch {
	case stale && len(hops) == 0:
		return // of which the engine, started anew, has told nothing
	case stale:
		delete(r.stale, p)
	}
	r.replace(p, hops)
	if stale {
		r.pending[p] = struct{}{} // told again, so that the reader sees that it came
		r.signal()
	}
}

// replace gives p these paths of peers, beside what is configured.
func (r *rib) replace(p netip.Prefix, hops []Hop) {
	all := make([]Hop, 0, len(hops)+1)
	for _, h := range hops {
		h.Stale = false // going stale is no change
		all = append(all, h)
	}
	if old := r.known[p]; old != nil {
		for _, h := range old.hops {
			if !h.PeerAddr.IsValid() { // configured
				all = append(all, h)
			}
		}
	}
	if len(all) == 0 {
		r.change(p, nil)
		return
	}
	slices.SortFunc(all, func(a, b Hop) int { return a.PeerAddr.Compare(b.PeerAddr) })
	r.change(p, r.sets.of(all)) // at once: a set that no prefix has would stay for good
}

// change gives p the paths of s; nil: none.
func (r *rib) change(p netip.Prefix, s *PathSet) {
	old := r.known[p]
	if s == old {
		return
	}
	if s != nil {
		s.refs++
		r.known[p] = s
	} else {
		delete(r.known, p)
	}
	r.sets.release(old)
	r.pending[p] = struct{}{}
	r.most = max(r.most, len(r.pending))
	r.signal()
	if len(r.pending) == batchSize {
		r.hurry()
	}
}

// restart says that the engine forgets what it had told; a prefix that does not come
// again is deleted when sync is called.
func (r *rib) restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.known {
		r.stale[p] = struct{}{}
	}
	r.synced = false
	for hop := range r.lost {
		r.again = append(r.again, hop)
	}
	clear(r.lost)
}

func (r *rib) sync() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.stale {
		r.change(p, nil)
	}
	clear(r.stale)
	r.synced = true
	r.signal()
}

// lose says that the session with a peer has ended and that its paths are going
// to be withdrawn: next hops that no other peer gave are lost.
func (r *rib) lose(peer netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, hop := range r.sets.only(peer) {
		if _, ok := r.lost[hop]; ok {
			continue
		}
		r.lost[hop] = peer
		r.tell = append(r.tell, hop)
		r.again = slices.DeleteFunc(r.again, func(a netip.Addr) bool { return a == hop })
		r.signal()
		r.hurry()
	}
}

// recover says that all paths of a peer's last session have been withdrawn.
func (r *rib) recover(peer netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for hop, p := range r.lost {
		if p == peer {
			delete(r.lost, hop)
			r.again = append(r.again, hop)
			r.signal()
		}
	}
}

// hurry ends the wait for more.
func (r *rib) hurry() {
	select {
	case r.urgent <- struct{}{}:
	default:
	}
}

// pause is how long to wait for more.
func (r *rib) pause() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.urgent: // of what is looked at here
	default:
	}
	if len(r.pending) >= batchSize || len(r.tell) > 0 || r.taken.IsZero() {
		return 0
	}
	return gather - time.Since(r.taken)
}

func (r *rib) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// next waits for something to be there and takes it, at most a batch.
func (r *rib) next(ctx context.Context) (Changes, error) {
	for {
		select {
		case <-ctx.Done():
			return Changes{}, ctx.Err()
		case <-r.wake:
		}
		if d := r.pause(); d > 0 {
			timer := time.NewTimer(d)
			select {
			case <-ctx.Done():
			case <-r.urgent:
			case <-timer.C:
			}
			timer.Stop()
		}
		if c := r.take(); !c.Empty() {
			return c, nil
		}
	}
}

func (r *rib) take() Changes {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := Changes{Reset: !r.started, Down: r.tell}
	if len(r.pending) == 0 && !r.synced && len(r.tell)+len(r.again) == 0 {
		return Changes{}
	}
	r.started, r.tell, r.taken = true, nil, time.Now()
	for p := range r.pending {
		if len(c.Put)+len(c.Del) == batchSize {
			break
		}
		if s := r.known[p]; s != nil {
			if c.Put == nil {
				c.Put = make([]Path, 0, min(len(r.pending), batchSize))
			}
			c.Put = append(c.Put, Path{p, s})
		} else {
			c.Del = append(c.Del, p)
		}
		delete(r.pending, p)
	}
	if len(r.pending) > 0 {
		r.signal()
		return c
	}
	if r.most > batchSize { // a map does not shrink
		r.pending, r.most = map[netip.Prefix]struct{}{}, 0
	}
	c.Synced, c.Up = r.synced, r.again
	r.synced, r.again = false, nil
	return c
}
