package bgp

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/table"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/dataplane/dense"
)

// batchSize bounds the prefixes in one [Changes]: the reader holds that many at
// a time, and what changes again meanwhile is reported once.
const batchSize = 8192

// gather is the least time between two [Changes], unless there is a whole batch
// or a next hop was lost. One change alone is reported at once; while a peer sends
// its table, each step of what follows would cost more than what is in it.
const gather = 5 * time.Millisecond

// rib holds the paths of equal cost that were learned of each prefix, and which
// prefixes the reader has not heard of. A slow reader costs at most one entry
// per prefix, and what is there when the reader comes is one batch. Prefixes
// with the same paths share them, so that one is kept in a few bytes without a
// pointer. It is safe for concurrent use.
type rib struct {
	mu      sync.Mutex
	wake    chan struct{} // holds a token when there is something to take
	urgent  chan struct{} // and it is not to wait for more
	taken   time.Time     // when something was last taken
	known   *table.Table[known]
	pending dense.Queue[ref] // of which the reader has not heard, in the order in which they changed
	stale   int              // prefixes that are stale
	started bool             // Reset has been given
	synced  bool             // Synced waits to be given
	sets    pathSets

	// The paths that were set last, and their set if it has users still: prefixes come
	// by the hundred with the same.
	last    []Hop
	lastSet *PathSet

	// Next hops that went with a session. What is lost is reported at once, and
	// what is found when the withdrawals that belong to it have been taken.
	lost  map[netip.Addr]netip.Addr // next hop → the peer with which it went
	tell  []netip.Addr              // lost and not reported
	again []netip.Addr              // reported as lost, and no longer so; reported when nothing is pending
}

// known is what is kept of a prefix that has paths, or of which the reader has yet to
// hear that it has none.
type known struct {
	set     uint32 // number of its paths; 0: none
	pending bool   // changed and not taken
	stale   bool   // reported before the engine was started anew and not again yet
}

// ref is a prefix in the table of what is known.
type ref struct {
	id     uint32
	family wire.Family
}

func newRIB() *rib {
	return &rib{
		wake: make(chan struct{}, 1), urgent: make(chan struct{}, 1), known: table.New[known](),
		lost: map[netip.Addr]netip.Addr{}, sets: newPathSets(),
	}
}

// find returns the entry of a prefix, a new one if it has none.
func (r *rib) find(p wire.Prefix) (ref, *known) {
	at := ref{r.known.Obtain(p), p.Family}
	return at, r.known.At(at.family, at.id)
}

// add notes that h is among the paths of p, in place of any other from its
// peer.
func (r *rib) add(p netip.Prefix, h Hop) {
	h.Stale = false // going stale is no change
	r.mu.Lock()
	defer r.mu.Unlock()
	at, k := r.find(wire.FromNetip(p))
	if r.freshen(k) {
		r.change(at, k, r.sets.single(h))
		r.note(at, k) // reported again, so that the reader sees that it came
		return
	}
	r.change(at, k, r.sets.with(r.sets.numbered(k.set), h))
}

// remove notes that a peer's path is not among those of p any more.
func (r *rib) remove(p netip.Prefix, peer netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, k := r.find(wire.FromNetip(p))
	if old := r.sets.numbered(k.set); old != nil && !k.stale { // of a stale one the engine, started anew, has reported nothing
		r.change(at, k, r.sets.without(old, peer))
	}
	r.tidy(at, k)
}

// set makes hops the paths of p that peers sent, the best one first. They are not
// changed afterwards.
func (r *rib) set(p wire.Prefix, hops []Hop) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, k := r.find(p)
	if k.stale && len(hops) == 0 {
		return // of which the engine, started anew, has reported nothing
	}
	stale := r.freshen(k)
	r.replace(at, k, hops)
	if stale {
		r.note(at, k) // reported again, so that the reader sees that it came
	}
	r.tidy(at, k)
}

// replace gives a prefix these paths of peers, beside what is configured.
func (r *rib) replace(at ref, k *known, hops []Hop) {
	old := r.sets.numbered(k.set)
	configured := old != nil && !old.hops[0].PeerAddr.IsValid() // the first, for it has no address
	if len(hops) == 0 && !configured {
		r.change(at, k, nil)
		return
	}
	same := !configured && len(hops) == len(r.last) && &hops[0] == &r.last[0]
	if same && r.lastSet != nil {
		r.change(at, k, r.lastSet)
		return
	}
	all := make([]Hop, 0, len(hops)+1)
	for _, h := range hops {
		h.Stale = false // going stale is no change
		all = append(all, h)
	}
	if configured {
		all = append(all, old.hops[0])
	}
	slices.SortFunc(all, func(a, b Hop) int { return a.PeerAddr.Compare(b.PeerAddr) })
	s := r.sets.of(all)
	r.change(at, k, s) // at once: a set that no prefix has would stay for good
	if !configured {
		r.last, r.lastSet = hops, s
	}
}

// freshen notes that the engine, started anew, has reported a prefix. It reports whether
// it was stale.
func (r *rib) freshen(k *known) bool {
	if !k.stale {
		return false
	}
	k.stale = false
	r.stale--
	return true
}

// change gives a prefix the paths of s; nil: none.
func (r *rib) change(at ref, k *known, s *PathSet) {
	old := r.sets.numbered(k.set)
	if s == old {
		return
	}
	k.set = 0
	if s != nil {
		s.refs++
		k.set = s.id
	}
	if r.sets.release(old) && old == r.lastSet {
		r.last, r.lastSet = nil, nil
	}
	r.note(at, k)
}

// note has the reader hear of a prefix.
func (r *rib) note(at ref, k *known) {
	if !k.pending {
		k.pending = true
		if r.pending.Add(at); r.pending.Len() == batchSize {
			r.hurry()
		}
	}
	r.signal()
}

// tidy forgets a prefix of which there is nothing to be known.
func (r *rib) tidy(at ref, k *known) {
	if *k == (known{}) {
		r.known.Remove(at.family, at.id)
	}
}

// all yields every prefix that is known.
func (r *rib) all(yield func(ref, *known) bool) {
	for f := range wire.Family(wire.Families) {
		for id := uint32(1); id < r.known.End(f); id++ {
			if k := r.known.At(f, id); *k != (known{}) && !yield(ref{id, f}, k) {
				return
			}
		}
	}
}

// restart says that the engine forgets what it had reported; a prefix that does not come
// again is deleted when sync is called.
func (r *rib) restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.all {
		if k.set != 0 && !k.stale {
			k.stale = true
			r.stale++
		}
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
	if r.stale > 0 {
		for at, k := range r.all {
			if r.freshen(k) {
				r.change(at, k, nil)
			}
		}
	}
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
	if r.pending.Len() >= batchSize || len(r.tell) > 0 || r.taken.IsZero() {
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
	if r.pending.Len() == 0 && !r.synced && len(r.tell)+len(r.again) == 0 {
		return Changes{}
	}
	r.started, r.tell, r.taken = true, nil, time.Now()
	for range min(r.pending.Len(), batchSize) {
		at := r.pending.Next()
		k := r.known.At(at.family, at.id)
		p := r.known.Prefix(at.family, at.id).Netip()
		if s := r.sets.numbered(k.set); s != nil {
			if c.Put == nil {
				c.Put = make([]Path, 0, min(1+r.pending.Len(), batchSize))
			}
			c.Put = append(c.Put, Path{p, s})
		} else {
			c.Del = append(c.Del, p)
		}
		k.pending = false
		r.tidy(at, k)
	}
	if r.pending.Len() > 0 {
		r.signal()
		return c
	}
	c.Synced, c.Up = r.synced, r.again
	r.synced, r.again = false, nil
	return c
}
