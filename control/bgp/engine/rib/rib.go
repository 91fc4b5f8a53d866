package rib

import (
	"net/netip"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/table"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/dataplane/dense"
)

// Peer is the number of a peer in a [RIB].
type Peer uint16

// PeerInfo is what the choice asks of a peer.
type PeerInfo struct {
	Addr     netip.Addr
	RouterID uint32
	External bool // in another AS
	Local    bool // stands for what originates here
	// Limit is how many paths of a family are accepted; 0: any number.
	Limit [wire.Families]int
}

// peer is what is kept of one.
type peer struct {
	PeerInfo
	used     bool
	families [wire.Families]announced
}

// announced is what a peer has announced of a family.
type announced struct {
	epoch     uint8 // of paths announced since the last restart
	restarts  uint8 // since nothing was stale
	longLived bool
	fresh     int
	stale     int
	refused   int // of both
}

// path is one way to a prefix, as a peer announced it. It has 20 bytes and no
// pointer: half a million of them are no work for the garbage collector.
type path struct {
	set   attrs.Handle
	id    uint32 // path identifier (RFC 7911)
	next  uint32 // of the same prefix
	since uint32 // by the clock of [RIB.SetTime]
	peer  Peer
	flags flags
	epoch uint8 // of the peer when it was announced
}

type flags uint8

const (
	refused flags = 1 << iota // never chosen
	best
	multipath // as good as the best up to the router id
	candidate // scratch of choose
)

const chosen = best | multipath

// Path is a path as others see it.
type Path struct {
	Set    attrs.Handle
	ID     uint32
	Peer   Peer
	Best   bool
	Multi  bool // of equal cost with the best, which has it too
	Stale  bool // kept over a restart of its peer (RFC 4724)
	Usable bool // takes part in the choice
	Since  uint32
}

// Reader is one of those who read changes, each at its own pace.
type Reader uint8

// Readers is how many there are.
const Readers = 2

// RIB holds the paths of all peers. Not safe for concurrent use.
type RIB struct {
	sets     *attrs.Table
	prefixes *table.Table[entry]
	paths    table.Slab[path]
	peers    []peer
	changed  [Readers][wire.Families]dense.Queue[uint32] // ids of prefixes in the order in which they changed
	time     uint32

	// Tap is called with every path that comes, changes, is announced again after its peer's restart,
	// or goes: as it was and as it is, of which one has no Set. Of rewritten ones the peer said nothing
	// new. The Set that was may be free. It must not change the RIB. nil: it is not called.
	Tap func(prefix wire.Prefix, before, after Path, rewritten bool)

	candidates []uint32 // scratch of choose
}

// entry is what is kept of a prefix.
type entry struct {
	head    uint32 // its paths, the best one first; 0: none
	pending uint8  // bits of the readers that are still to see it
}

// New returns an empty RIB. Its paths hold references to sets of the table.
func New(sets *attrs.Table) *RIB {
	return &RIB{sets: sets, prefixes: table.New[entry]()}
}

// SetTime sets the clock by which paths are noted, in units of the caller.
func (r *RIB) SetTime(now uint32) { r.time = now }

// AddPeer returns a number for a peer.
func (r *RIB) AddPeer(info PeerInfo) Peer {
	for i := range r.peers {
		if !r.peers[i].used {
			r.peers[i] = peer{PeerInfo: info, used: true}
			return Peer(i)
		}
	}
	r.peers = append(r.peers, peer{PeerInfo: info, used: true})
	return Peer(len(r.peers) - 1)
}

// SetPeer changes what is known of a peer. If it has paths, a [Walk] to choose anew
// has to follow.
func (r *RIB) SetPeer(p Peer, info PeerInfo) { r.peers[p].PeerInfo = info }

// RemovePeer gives the number of a peer back. It reports false while the peer has
// paths; see [RIB.Restart].
func (r *RIB) RemovePeer(p Peer) bool {
	q := &r.peers[p]
	for f := range q.families {
		if q.families[f].fresh+q.families[f].stale > 0 {
			return false
		}
	}
	*q = peer{}
	return true
}

// Count returns how many paths of a peer there are, and how many beside them are stale.
func (r *RIB) Count(p Peer, f wire.Family) (fresh, stale int) {
	return r.peers[p].families[f].fresh, r.peers[p].families[f].stale
}

// Refused returns how many of a peer's paths, stale or not, are never chosen.
func (r *RIB) Refused(p Peer, f wire.Family) int { return r.peers[p].families[f].refused }

// Len returns the number of prefixes, those included of which the reader has yet to
// see that they are gone.
func (r *RIB) Len(f wire.Family) int { return r.prefixes.Len(f) }

// Restart makes all paths of a peer and family stale, at once: its session ended, or
// it is about to announce all of them again. A [Walk] removes them, or those that were
// not announced again by then.
func (r *RIB) Restart(p Peer, f wire.Family) {
	q := &r.peers[p].families[f]
	q.longLived = false
	if q.stale == 0 {
		q.restarts = 0
	}
	if q.restarts++; q.restarts == 0 {
		// An epoch comes again, after 256 restarts without a sweep.
		w := Walk{Peer: p, Task: RemoveStale, Family: f, OneFamily: true}
		for !r.Step(&w, 1<<13) {
		}
		q.restarts = 1
	}
	q.epoch++
	q.stale += q.fresh
	q.fresh = 0
}

// SetLongLived says that a peer's stale paths of a family are kept for longer, as the
// last choice (RFC 9494). A Walk to choose anew has to follow.
func (r *RIB) SetLongLived(p Peer, f wire.Family) { r.peers[p].families[f].longLived = true }

// LongLived reports whether they are.
func (r *RIB) LongLived(p Peer, f wire.Family) bool { return r.peers[p].families[f].longLived }

// Announce has a peer announce a path, or replace the one with its path identifier.
// One that is not usable, because its next hop or a policy speaks against it, is kept
// and never chosen. The path gets a reference of its own to the set. It reports
// false, and does nothing, if the path would exceed the peer's limit.
func (r *RIB) Announce(p Peer, prefix wire.Prefix, set attrs.Handle, usable bool) bool {
	f := prefix.Family
	q, limit := &r.peers[p].families[f], r.peers[p].Limit[f]
	if limit > 0 && q.fresh >= limit && !r.announced(p, prefix) {
		return false
	}
	var state flags
	if !usable {
		state = refused
	}
	id := r.prefixes.Obtain(prefix)
	e := r.prefixes.At(f, id)
	_, at := r.pathOf(e, p, prefix.ID)
	if at == 0 {
		at = r.paths.Allocate()
		n := r.paths.At(at)
		*n = path{set: set, id: prefix.ID, peer: p, epoch: q.epoch, flags: state, since: r.time}
		r.sets.Retain(set)
		if e.head == 0 {
			e.head = at
		} else {
			head := r.paths.At(e.head)
			n.next, head.next = head.next, at
		}
		q.fresh++
		q.refused += int(state & refused)
		if r.Tap != nil {
			r.Tap(prefix, Path{}, r.path(f, n), false)
		}
		r.choose(f, id, e, false)
		return true
	}
	n := r.paths.At(at)
	var before Path
	if r.Tap != nil {
		before = r.path(f, n)
	}
	if n.epoch != q.epoch {
		q.stale--
		q.fresh++
		n.epoch = q.epoch
		if n.set == set && n.flags&refused == state && q.longLived {
			r.choose(f, id, e, false)
		}
	}
	r.sets.Retain(set)
	r.replace(f, id, e, n, set, state)
	if r.Tap != nil {
		// The choice may have moved the path in its list, not in memory.
		if after := r.path(f, n); before.Stale || before.Set != set || before.Usable != usable {
			r.Tap(prefix, before, after, false)
		}
	}
	return true
}

// replace gives a path other attributes, with the reference to them.
func (r *RIB) replace(f wire.Family, id uint32, e *entry, n *path, set attrs.Handle, state flags) {
	old := n.set
	if old == set && n.flags&refused == state {
		r.sets.Release(set)
		return
	}
	r.peers[n.peer].families[f].refused += int(state&refused) - int(n.flags&refused)
	visible := n.flags&chosen != 0 && old != set
	n.set, n.flags, n.since = set, n.flags&chosen|state, r.time
	r.choose(f, id, e, visible)
	r.sets.Release(old)
}

// announced reports whether a peer has announced a path since its last restart.
func (r *RIB) announced(p Peer, prefix wire.Prefix) bool {
	_, e := r.find(prefix)
	if e == nil {
		return false
	}
	_, at := r.pathOf(e, p, prefix.ID)
	return at != 0 && r.paths.At(at).epoch == r.peers[p].families[prefix.Family].epoch
}

// Withdraw removes a path of a peer and reports whether there was one.
func (r *RIB) Withdraw(p Peer, prefix wire.Prefix) bool {
	id, e := r.find(prefix)
	if e == nil {
		return false
	}
	before, at := r.pathOf(e, p, prefix.ID)
	if at == 0 {
		return false
	}
	if r.Tap != nil {
		r.Tap(prefix, r.path(prefix.Family, r.paths.At(at)), Path{}, false)
	}
	r.choose(prefix.Family, id, e, r.removePath(prefix.Family, e, before, at))
	return true
}

// removePath takes a path out of its prefix and reports whether it was chosen.
func (r *RIB) removePath(f wire.Family, e *entry, before, at uint32) bool {
	n := r.paths.At(at)
	q := &r.peers[n.peer].families[f]
	if n.epoch == q.epoch {
		q.fresh--
	} else {
		q.stale--
	}
	q.refused -= int(n.flags & refused)
	if before == 0 {
		e.head = n.next
	} else {
		r.paths.At(before).next = n.next
	}
	was := n.flags&chosen != 0
	r.sets.Release(n.set)
	*n = path{}
	r.paths.Release(at)
	return was
}

// pathOf finds the path of a peer, and the one before it.
func (r *RIB) pathOf(e *entry, p Peer, id uint32) (before, at uint32) {
	for at = e.head; at != 0; before, at = at, r.paths.At(at).next {
		if n := r.paths.At(at); n.peer == p && n.id == id {
			break
		}
	}
	return before, at
}

// Paths are paths of one prefix, the best one first, valid until the RIB changes.
type Paths struct {
	r          *RIB
	family     wire.Family
	head       uint32
	onlyChosen bool
}

// All is an iterator over them.
func (l Paths) All(yield func(Path) bool) {
	for at := l.head; at != 0; at = l.r.paths.At(at).next {
		n := l.r.paths.At(at)
		if l.onlyChosen && n.flags&chosen == 0 {
			continue
		}
		if !yield(l.r.path(l.family, n)) {
			return
		}
	}
}

// path is a path as others see it.
func (r *RIB) path(f wire.Family, n *path) Path {
	return Path{
		Set: n.set, ID: n.id, Peer: n.peer, Best: n.flags&best != 0, Multi: n.flags&multipath != 0,
		Stale: n.epoch != r.peers[n.peer].families[f].epoch, Usable: n.flags&refused == 0, Since: n.since,
	}
}

// Best returns the best path; false: no path of the prefix is usable.
func (l Paths) Best() (Path, bool) {
	if l.head == 0 {
		return Path{}, false
	}
	n := l.r.paths.At(l.head)
	if n.flags&best == 0 {
		return Path{}, false
	}
	return l.r.path(l.family, n), true
}

// Paths returns all paths of a prefix, whatever its path identifier.
func (r *RIB) Paths(prefix wire.Prefix) Paths {
	_, e := r.find(prefix)
	if e == nil {
		return Paths{}
	}
	return Paths{r: r, family: prefix.Family, head: e.head}
}

// Cursor is how far a walk over all prefixes has come. The zero Cursor is
// at the beginning.
type Cursor struct {
	family wire.Family
	at     uint32
}

// Scan goes over n more prefixes and hands on those that have paths. It reports
// whether that was all. visit must not change the RIB.
func (r *RIB) Scan(c *Cursor, n int, visit func(prefix wire.Prefix, all Paths)) (done bool) {
	for ; c.family < wire.Families; c.family, c.at = c.family+1, 0 {
		for end := r.prefixes.End(c.family); c.at+1 < end; {
			if n--; n < 0 {
				return false
			}
			c.at++
			if e := r.prefixes.At(c.family, c.at); e.head != 0 {
				visit(r.prefixes.Prefix(c.family, c.at), Paths{r: r, family: c.family, head: e.head})
			}
		}
	}
	return true
}

// Changes hands a reader up to n prefixes whose chosen paths are others than when
// it last saw them: the best one first, none if there are none any more. A prefix is
// there once, as it is now, and going stale is no change. It reports whether more
// are left. visit must not change the RIB.
func (r *RIB) Changes(reader Reader, n int, visit func(prefix wire.Prefix, chosen Paths)) (more bool) {
	left := n - min(n/2, r.Pending(reader, wire.IPv6)) // so that one family does not hold up the other
	for f := range wire.Family(wire.Families) {
		c := &r.changed[reader][f]
		for ; left > 0 && c.Len() > 0; left-- {
			n--
			id := c.Next()
			e := r.prefixes.At(f, id)
			e.pending &^= 1 << reader
			visit(r.prefixes.Prefix(f, id), Paths{r: r, family: f, head: e.head, onlyChosen: true})
			if e.head == 0 && e.pending == 0 {
				r.prefixes.Remove(f, id)
			}
		}
		more = more || c.Len() > 0
		left = n
	}
	return more
}

// Pending returns how many prefixes of a family a reader has yet to see. It is handed
// them in the order in which they changed.
func (r *RIB) Pending(reader Reader, f wire.Family) int {
	return r.changed[reader][f].Len()
}

// Task is what a walk does with the paths of a peer.
type Task uint8

// The tasks.
const (
	RemoveStale Task = iota // since its last restart not announced again
	Choose                  // choose anew, for something of the peer changed
	Rewrite                 // see Walk.Rewrite
)

// Walk is a task that goes over all prefixes, in steps between which others have
// their turn. What is announced meanwhile stays.
type Walk struct {
	Peer      Peer
	All       bool // Rewrite: the paths of all peers
	Task      Task
	Family    wire.Family
	OneFamily bool // only Family

	// Rewrite returns what a path is to be: its attributes, with a reference, and
	// whether it is usable; 0: the path goes. It must not change the RIB.
	Rewrite func(prefix wire.Prefix, p Path) (set attrs.Handle, usable bool)

	// Notify says that readers see a prefix for a path that Rewrite did not change, if it is
	// chosen. nil: they do not.
	Notify func(prefix wire.Prefix, p Path) bool

	bounded bool  // RemoveStale: only what was stale at epoch
	epoch   uint8 // of the peer when the walk was asked for

	begun  bool
	family wire.Family
	at     uint32
}

// Sweep returns a walk that removes the paths of a peer and family that are stale now.
// Those that become stale before the walk is over stay.
func (r *RIB) Sweep(p Peer, f wire.Family) *Walk {
	return &Walk{Peer: p, Task: RemoveStale, Family: f, OneFamily: true, bounded: true, epoch: r.peers[p].families[f].epoch}
}

// Step goes over n more prefixes and reports whether the walk is over.
func (r *RIB) Step(w *Walk, n int) (done bool) {
	if !w.begun {
		w.begun, w.family, w.at = true, 0, 1
		if w.OneFamily {
			w.family = w.Family
		}
	}
	for ; w.family < wire.Families; w.family, w.at = w.family+1, 1 {
		if w.OneFamily && w.family != w.Family {
			return true
		}
		if r.left(w) == 0 {
			continue
		}
		for end := r.prefixes.End(w.family); w.at < end; w.at++ {
			if n--; n < 0 {
				return false
			}
			r.walked(w)
		}
	}
	return true
}

// left is how many paths of the family a walk is about.
func (r *RIB) left(w *Walk) int {
	if w.All {
		return r.prefixes.Len(w.family)
	}
	q := &r.peers[w.Peer].families[w.family]
	if w.Task == RemoveStale {
		return q.stale
	}
	return q.stale + q.fresh
}

// walked does the task of a walk for one prefix.
func (r *RIB) walked(w *Walk) {
	f, id := w.family, w.at
	e := r.prefixes.At(f, id)
	visible, found := false, false
	for before, at := uint32(0), e.head; at != 0; {
		n := r.paths.At(at)
		next := n.next
		if !w.All && n.peer != w.Peer {
			before, at = at, next
			continue
		}
		gone := false
		switch w.Task {
		case RemoveStale:
			epoch := r.peers[n.peer].families[f].epoch
			if gone = n.epoch != epoch; w.bounded {
				gone = epoch-n.epoch > epoch-w.epoch
			}
			found = found || gone
		case Choose:
			found = true
		case Rewrite:
			prefix := r.prefixes.Prefix(f, id)
			prefix.ID = n.id
			set, usable := w.Rewrite(prefix, r.path(f, n))
			if gone = set == 0; gone {
				found = true
				break
			}
			var was Path
			if r.Tap != nil {
				was = r.path(f, n)
			}
			changed, seen := r.rewrite(f, n, set, usable)
			if changed && r.Tap != nil {
				r.Tap(prefix, was, r.path(f, n), true)
			}
			if w.Notify != nil && n.flags&chosen != 0 && w.Notify(prefix, r.path(f, n)) {
				changed, seen = true, true
			}
			found, visible = found || changed, visible || seen
		}
		if gone {
			if r.Tap != nil {
				r.Tap(r.prefixes.Prefix(f, id), r.path(f, n), Path{}, false)
			}
			visible = r.removePath(f, e, before, at) || visible
		} else {
			before = at
		}
		at = next
	}
	if found {
		r.choose(f, id, e, visible)
	}
}

// rewrite gives a path other attributes, with the reference to them, and reports
// whether the choice has to be made anew, and whether readers see a difference.
func (r *RIB) rewrite(f wire.Family, n *path, set attrs.Handle, usable bool) (changed, visible bool) {
	state := refused
	if usable {
		state = 0
	}
	old := n.set
	changed = old != set || n.flags&refused != state
	visible = n.flags&chosen != 0 && old != set
	r.peers[n.peer].families[f].refused += int(state) - int(n.flags&refused)
	n.set, n.flags = set, n.flags&chosen|state
	r.sets.Release(old)
	return changed, visible
}

// find returns the id and entry of a prefix; nil: there is none.
func (r *RIB) find(p wire.Prefix) (id uint32, e *entry) {
	if id = r.prefixes.Find(p); id == 0 {
		return 0, nil
	}
	return id, r.prefixes.At(p.Family, id)
}
