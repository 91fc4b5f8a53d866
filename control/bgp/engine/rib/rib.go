package rib

import (
	"math/rand/v2"
	"net/netip"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/wire"
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
	used      bool
	epoch     uint8 // of paths announced since its last restart
	restarts  uint8 // since nothing of it was stale
	longLived bool
	fresh     [wire.Families]int
	stale     [wire.Families]int
}

// path is one way to a prefix, as a peer announced it. It has 16 bytes and no
// pointer: half a million of them are no work for the garbage collector.
type path struct {
	set   attrs.Handle
	id    uint32 // path identifier (RFC 7911)
	next  uint32 // of the same prefix
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
}

// RIB holds the paths of all peers. Not safe for concurrent use.
type RIB struct {
	sets    *attrs.Table
	four    table[key4]
	six     table[key6]
	paths   slab[path]
	peers   []peer
	changed [wire.Families]queue

	candidates []uint32 // scratch of choose
}

// queue is ids of prefixes in the order in which they changed.
type queue struct {
	ids  []uint32
	read int
}

// New returns an empty RIB. Its paths hold references to sets of the table.
func New(sets *attrs.Table) *RIB {
	return &RIB{sets: sets, four: newTable[key4](rand.Uint64()), six: newTable[key6](rand.Uint64())}
}

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
	if q.fresh != [wire.Families]int{} || q.stale != [wire.Families]int{} {
		return false
	}
	*q = peer{}
	return true
}

// Count returns how many paths of a peer there are, and how many beside them are stale.
func (r *RIB) Count(p Peer, f wire.Family) (fresh, stale int) {
	return r.peers[p].fresh[f], r.peers[p].stale[f]
}

// Len returns the number of prefixes, those included of which the reader has yet to
// see that they are gone.
func (r *RIB) Len(f wire.Family) int {
	if f == wire.IPv4 {
		return r.four.live
	}
	return r.six.live
}

// Restart makes all paths of a peer stale, at once: its session ended. A [Walk]
// removes them, or those that were not announced again by then.
func (r *RIB) Restart(p Peer) {
	q := &r.peers[p]
	q.longLived = false
	if q.stale == [wire.Families]int{} {
		q.restarts = 0
	}
	if q.restarts++; q.restarts == 0 {
		// An epoch comes again, after 256 restarts in which nobody swept.
		w := Walk{Peer: p, Task: RemoveStale}
		for !r.Step(&w, piece) {
		}
		q.restarts = 1
	}
	q.epoch++
	for f := range q.fresh {
		q.stale[f] += q.fresh[f]
		q.fresh[f] = 0
	}
}

// SetLongLived says that a peer's stale paths are kept for longer, as the last choice
// (RFC 9494). A Walk to choose anew has to follow.
func (r *RIB) SetLongLived(p Peer) { r.peers[p].longLived = true }

// Announce has a peer announce a path, or replace the one with its path identifier.
// One that is not usable, because its next hop or a policy speaks against it, is kept
// and never chosen. The path gets a reference of its own to the set. It reports
// false, and does nothing, if the path would exceed the peer's limit.
func (r *RIB) Announce(p Peer, prefix wire.Prefix, set attrs.Handle, usable bool) bool {
	f, q := prefix.Family, &r.peers[p]
	if q.Limit[f] > 0 && q.fresh[f] >= q.Limit[f] && !r.announced(p, prefix) {
		return false
	}
	var state flags
	if !usable {
		state = refused
	}
	id, e := r.obtain(prefix)
	_, at := r.pathOf(e, p, prefix.ID)
	if at == 0 {
		at = r.paths.allocate()
		n := r.paths.at(at)
		*n = path{set: set, id: prefix.ID, peer: p, epoch: q.epoch, flags: state}
		r.sets.Retain(set)
		if e.head == 0 {
			e.head = at
		} else {
			head := r.paths.at(e.head)
			n.next, head.next = head.next, at
		}
		q.fresh[f]++
		r.choose(f, id, e, false)
		return true
	}
	n := r.paths.at(at)
	old, again := n.set, n.epoch == q.epoch
	if again && old == set && n.flags&refused == state {
		return true
	}
	if !again {
		q.stale[f]--
		q.fresh[f]++
	}
	r.sets.Retain(set)
	visible := n.flags&chosen != 0 && old != set
	n.set, n.epoch, n.flags = set, q.epoch, n.flags&chosen|state
	r.choose(f, id, e, visible)
	r.sets.Release(old)
	return true
}

// announced reports whether a peer has announced a path since its last restart.
func (r *RIB) announced(p Peer, prefix wire.Prefix) bool {
	_, e := r.find(prefix)
	if e == nil {
		return false
	}
	_, at := r.pathOf(e, p, prefix.ID)
	return at != 0 && r.paths.at(at).epoch == r.peers[p].epoch
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
	r.choose(prefix.Family, id, e, r.removePath(prefix.Family, e, before, at))
	return true
}

// removePath takes a path out of its prefix and reports whether it was chosen.
func (r *RIB) removePath(f wire.Family, e *entry, before, at uint32) bool {
	n := r.paths.at(at)
	q := &r.peers[n.peer]
	if n.epoch == q.epoch {
		q.fresh[f]--
	} else {
		q.stale[f]--
	}
	if before == 0 {
		e.head = n.next
	} else {
		r.paths.at(before).next = n.next
	}
	was := n.flags&chosen != 0
	r.sets.Release(n.set)
	*n = path{}
	r.paths.release(at)
	return was
}

// pathOf finds the path of a peer, and the one before it.
func (r *RIB) pathOf(e *entry, p Peer, id uint32) (before, at uint32) {
	for at = e.head; at != 0; before, at = at, r.paths.at(at).next {
		if n := r.paths.at(at); n.peer == p && n.id == id {
			break
		}
	}
	return before, at
}

// Paths are paths of one prefix, the best one first, valid until the RIB changes.
type Paths struct {
	r          *RIB
	head       uint32
	onlyChosen bool
}

// All is an iterator over them.
func (l Paths) All(yield func(Path) bool) {
	for at := l.head; at != 0; at = l.r.paths.at(at).next {
		n := l.r.paths.at(at)
		if l.onlyChosen && n.flags&chosen == 0 {
			continue
		}
		if !yield(Path{
			Set: n.set, ID: n.id, Peer: n.peer, Best: n.flags&best != 0, Multi: n.flags&multipath != 0,
			Stale: n.epoch != l.r.peers[n.peer].epoch, Usable: n.flags&refused == 0,
		}) {
			return
		}
	}
}

// Paths returns all paths of a prefix, whatever its path identifier.
func (r *RIB) Paths(prefix wire.Prefix) Paths {
	_, e := r.find(prefix)
	if e == nil {
		return Paths{}
	}
	return Paths{r: r, head: e.head}
}

// Changes hands the reader up to n prefixes whose chosen paths are others than when
// it last saw them: the best one first, none if there are none any more. A prefix is
// there once, as it is now, and going stale is no change. It reports whether more
// are left. visit must not change the RIB.
func (r *RIB) Changes(n int, visit func(prefix wire.Prefix, chosen Paths)) (more bool) {
	for f := range wire.Family(wire.Families) {
		c := &r.changed[f]
		for ; n > 0 && c.read < len(c.ids); n-- {
			id := c.ids[c.read]
			c.read++
			e := r.entry(f, id)
			e.pending = false
			visit(r.prefix(f, id), Paths{r: r, head: e.head, onlyChosen: true})
			if e.head == 0 {
				r.remove(f, id)
			}
		}
		if c.read == len(c.ids) {
			c.ids, c.read = c.ids[:0], 0
		}
		more = more || len(c.ids) > 0
	}
	return more
}

// Task is what a walk does with the paths of a peer.
type Task uint8

// The tasks.
const (
	RemoveStale  Task = iota // since its last restart not announced again
	RemoveNoLLGR             // those of them that are not to be kept for long (RFC 9494 section 4.3)
	Choose                   // choose anew, for something of the peer changed
)

// Walk is a task that goes over all prefixes, in steps between which others have
// their turn. What is announced meanwhile stays.
type Walk struct {
	Peer   Peer
	Task   Task
	family wire.Family
	at     uint32
}

// Step goes over n more prefixes and reports whether the walk is over.
func (r *RIB) Step(w *Walk, n int) (done bool) {
	q := &r.peers[w.Peer]
	for ; w.family < wire.Families; w.family, w.at = w.family+1, 0 {
		left := q.stale[w.family]
		if w.Task == Choose {
			left += q.fresh[w.family]
		}
		if left == 0 {
			continue
		}
		for last := r.ids(w.family); w.at < last; w.at++ {
			if n--; n < 0 {
				return false
			}
			r.walked(w, q)
		}
	}
	return true
}

// walked does the task of a walk for one prefix.
func (r *RIB) walked(w *Walk, q *peer) {
	e := r.entry(w.family, w.at)
	visible, found := false, false
	for before, at := uint32(0), e.head; at != 0; {
		n := r.paths.at(at)
		next := n.next
		mine := n.peer == w.Peer && (w.Task == Choose || n.epoch != q.epoch)
		found = found || mine
		if mine && (w.Task == RemoveStale || w.Task == RemoveNoLLGR && r.sets.Summary(n.set).Flags&attrs.NoLLGR != 0) {
			visible = r.removePath(w.family, e, before, at) || visible
		} else {
			before = at
		}
		at = next
	}
	if found {
		r.choose(w.family, w.at, e, visible)
	}
}

func keyOf4(p wire.Prefix) key4 { return key4(p.Hi | uint64(p.Bits)) }

func keyOf6(p wire.Prefix) key6 { return key6{p.Hi, p.Lo, uint64(p.Bits)} }

// find returns the id and entry of a prefix; nil: there is none.
func (r *RIB) find(p wire.Prefix) (id uint32, e *entry) {
	if p.Family == wire.IPv4 {
		id, _, _ = r.four.find(keyOf4(p))
	} else {
		id, _, _ = r.six.find(keyOf6(p))
	}
	if id == 0 {
		return 0, nil
	}
	return id, r.entry(p.Family, id)
}

// obtain returns the id and entry of a prefix, which it adds if need be.
func (r *RIB) obtain(p wire.Prefix) (id uint32, e *entry) {
	if p.Family == wire.IPv4 {
		id = r.four.obtain(keyOf4(p))
	} else {
		id = r.six.obtain(keyOf6(p))
	}
	return id, r.entry(p.Family, id)
}

func (r *RIB) entry(f wire.Family, id uint32) *entry {
	if f == wire.IPv4 {
		return &r.four.records.at(id).entry
	}
	return &r.six.records.at(id).entry
}

func (r *RIB) prefix(f wire.Family, id uint32) wire.Prefix {
	if f == wire.IPv4 {
		return r.four.records.at(id).key.prefix()
	}
	return r.six.records.at(id).key.prefix()
}

func (r *RIB) remove(f wire.Family, id uint32) {
	if f == wire.IPv4 {
		r.four.remove(id)
	} else {
		r.six.remove(id)
	}
}

// ids returns the first id of a family that was never used.
func (r *RIB) ids(f wire.Family) uint32 {
	if f == wire.IPv4 {
		return r.four.records.next
	}
	return r.six.records.next
}
