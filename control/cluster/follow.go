package cluster

import (
	"context"
	"fmt"
	"iter"
	"slices"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// Change is what became of an object. It is shared: do not change it, nor what it
// points at.
type Change struct {
	// Event is what the datastore says, or this host where Own is set: for those who
	// need the object as it is stored.
	store.Event

	// Value is what the object says: a *[Node], *[Pool], *[Block] or *[Controllers], and of other
	// kinds the event's own Value. It is nil where the object is gone or, with Err
	// set, makes no sense.
	Value any

	// Own is set on what this host made, or ended, and the watch has not shown yet:
	// see [Cluster.Announce]. Its Event has no revision.
	Own bool

	// Hidden is, of an endpoint that this host announced, or whose end it did, the endpoint that the
	// watch shows and that this one hides; nil: the watch has shown none since the step before.
	Hidden *store.WorkloadEndpoint
}

// Step is what changed since the step before, up to a revision. No transaction is
// divided between two steps, and a key that changed several times is in it once, as
// it is now, after all that changed before it did.
type Step struct {
	Changes  []*Change
	Revision store.Revision // 0: the datastore has said nothing yet

	// Source says what the steps up to this one come from: [Disk] for as long as
	// the reader has what [Cluster.Load] gave it.
	Source Source

	// Synced is set on the first step that completes the state, of the disk or of the
	// datastore, and on each that follows a resynchronisation: what is not there any
	// more has been reported as deleted by then.
	Synced bool

	// OwnOnly is set where of WorkloadEndpoints only this host's are known, or current: see
	// [Cluster.AskOthers].
	OwnOnly bool

	// Lacks are the kinds of which nothing is known, of those that the reader waived.
	Lacks []store.Kind

	// Err says why the datastore cannot be reached at the end of the step; nil: it
	// can. There is a step for the beginning and for the end of an outage, unless
	// it is over before the follower asks.
	Err error
}

// Follower is the place in the changes that one reader has come to. See
// [Cluster.Follow].
type Follower struct {
	c       *Cluster
	kinds   map[store.Kind]bool
	ownNode bool // of Nodes only this host's
	others  bool // of blocks on the disk also others'
	waived  []store.Kind
	wake    async.Signal

	// Guarded by the Cluster's lock.
	pending queue
	synced  bool // the pending changes complete the state
	turned  bool // whether the datastore answers is to be published
	working bool // the reader has a step
	// The keys that the reader has from the disk and the datastore has said nothing
	// of, and what it said of others, which waits until it has said all; disk is nil
	// where the reader follows the datastore.
	disk    map[store.Key]bool
	ownDisk bool         // of WorkloadEndpoints the disk has this host's
	lacks   []store.Kind // of waived, those that the disk does not have
	later   queue
	done    store.Revision // of the last step that the reader is through with
	taken   store.Revision // of the one that it has

	// How often something was added: at all, by the step that the reader has, and by
	// the last that it is through with.
	added, addedTaken, addedDone uint64
}

// Follow returns a follower of some kinds, from the empty state on. Outages reach
// followers of no kinds, too. It is to be called before [Cluster.Run]: the copy
// does not hold what all have seen.
func (c *Cluster) Follow(kinds ...store.Kind) *Follower {
	f := &Follower{c: c, kinds: make(map[store.Kind]bool, len(kinds)), wake: async.NewSignal()}
	for _, k := range kinds {
		if !slices.Contains(c.kinds(), k) {
			panic(fmt.Sprintf("cluster: no follower may watch %s", k))
		}
		f.kinds[k] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running {
		panic("cluster: Follow after Run")
	}
	c.followers = append(c.followers, f)
	return f
}

// OwnNode has the reader get of Nodes only this host's. It is to be called with
// [Cluster.Follow].
func (f *Follower) OwnNode() *Follower {
	f.ownNode = true
	return f
}

// OthersBlocks has the reader get from the disk also the blocks that do not concern this host: of
// them what routes go by ([store.Block.Routing]), or more. It is to be called with
// [Cluster.Follow].
func (f *Follower) OthersBlocks() *Follower {
	f.others = true
	return f
}

// Waive has the reader's state count as complete without some of its kinds, where the disk does
// not have them, or the datastore does not tell them. It is to be called with
// [Cluster.Follow].
func (f *Follower) Waive(kinds ...store.Kind) *Follower {
	f.waived = kinds
	return f
}

// needs reports whether without a kind the reader's state is not complete.
func (f *Follower) needs(k store.Kind) bool { return f.kinds[k] && !slices.Contains(f.waived, k) }

// wants reports whether the reader follows an object.
func (f *Follower) wants(key store.Key) bool {
	return f.kinds[key.Kind] && (!f.ownNode || key.Kind != store.KindNode || key.Name == f.c.cfg.Node)
}

// isOf reports whether the kinds that a follower needs are all among some.
func (f *Follower) isOf(kinds []store.Kind) bool {
	for k := range f.kinds {
		if f.needs(k) && !slices.Contains(kinds, k) {
			return false
		}
	}
	return true
}

// lacking returns the kinds that the reader waived and of which is holds.
func (f *Follower) lacking(is func(store.Kind) bool) (kinds []store.Kind) {
	for _, k := range f.waived {
		if is(k) {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// load has the reader begin with what the disk has, of some kinds. The caller has the
// Cluster's lock.
func (f *Follower) load(changes []*Change, kinds []store.Kind, ownOnly bool) {
	f.disk, f.ownDisk = make(map[store.Key]bool), ownOnly
	f.lacks = f.lacking(func(k store.Kind) bool { return !slices.Contains(kinds, k) })
	for _, ch := range changes {
		if f.wants(ch.Key) {
			f.disk[ch.Key] = true
			f.pending.put(ch)
		}
	}
	f.synced = true
	f.notify()
}

// FromDisk reports whether the reader has a state from the disk, and not the
// datastore's yet.
func (f *Follower) FromDisk() bool {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.disk != nil
}

// add appends changes, a key once, to those that the reader has not seen. The caller has the
// Cluster's lock.
func (f *Follower) add(changes []*Change, synced, turned bool) {
	if f.disk == nil && f.pending.n == 0 {
		f.pending.fill(changes, f.wants)
		changes = nil
	}
	for _, ch := range changes {
		switch {
		case !f.wants(ch.Key):
		case f.disk == nil:
			f.pending.put(ch)
		case !ch.Own:
			f.later.put(ch)
			delete(f.disk, ch.Key)
			turned = true // how far the datastore is may matter to the reader
		case ch.Key.Kind != store.KindWorkloadEndpoint && f.disk[ch.Key]:
			// A Profile is announced for want of one, and there is one.
		default:
			f.pending.put(ch.over(f.later.drop(ch.Key)))
			delete(f.disk, ch.Key)
		}
	}
	if synced && f.disk != nil {
		f.follow()
	}
	f.synced, f.turned = f.synced || synced, f.turned || turned
	f.notify()
}

// follow has the reader go on from the disk's state to the datastore's, which is
// complete. The caller has the Cluster's lock.
func (f *Follower) follow() {
	for _, ch := range f.later.take() {
		f.pending.put(ch)
	}
	for key := range f.disk {
		f.pending.put(&Change{Event: store.Event{Key: key, Object: store.Object{Key: key}}})
	}
	f.disk = nil
}

func (f *Follower) notify() {
	if f.news() {
		f.added++
		f.wake.Set()
	}
}

func (f *Follower) news() bool { return f.pending.n > 0 || f.synced || f.turned }

// queue holds the last change of each key, in their order. What comes while nothing waits,
// as a whole cluster does at a start, is often taken before more comes: so where a change is
// gets known with the first one that may take the place of another.
type queue struct {
	changes []*Change         // may have holes
	n       int               // without the holes
	at      map[store.Key]int // where in changes; nil: not known yet
}

// fill puts those of some changes into an empty queue that are wanted. Each is of another key.
func (q *queue) fill(changes []*Change, wanted func(store.Key) bool) {
	q.changes, q.at = nil, nil
	for _, ch := range changes {
		if wanted(ch.Key) {
			q.changes = append(q.changes, ch)
		}
	}
	q.n = len(q.changes)
}

func (q *queue) put(ch *Change) {
	ch = ch.over(q.drop(ch.Key))
	q.at[ch.Key] = len(q.changes)
	q.changes = append(q.changes, ch)
	if q.n++; len(q.changes) > 2*q.n+16 { // one busy key is not to make it grow
		q.compact()
	}
}

// over is ch in the place of a change that no reader has taken; nil: of none. What the watch said with
// that is not lost where this host's own takes its place.
func (ch *Change) over(was *Change) *Change {
	if was == nil || !ch.Own || ch.Hidden != nil {
		return ch
	}
	hidden := was.Hidden
	if ep, ok := was.Value.(*store.WorkloadEndpoint); ok && !was.Own {
		hidden = ep
	}
	if hidden == nil {
		return ch
	}
	next := *ch
	next.Hidden = hidden
	return &next
}

// drop removes the change of a key and returns it; nil: there is none.
func (q *queue) drop(key store.Key) (was *Change) {
	if q.at == nil {
		q.at = make(map[store.Key]int, len(q.changes))
		q.index()
	}
	if i, ok := q.at[key]; ok {
		was, q.changes[i] = q.changes[i], nil
		q.n--
		delete(q.at, key)
	}
	return was
}

func (q *queue) compact() {
	if q.n == len(q.changes) {
		return
	}
	q.changes = slices.DeleteFunc(q.changes, func(ch *Change) bool { return ch == nil })
	q.index()
}

func (q *queue) index() {
	for i, ch := range q.changes {
		q.at[ch.Key] = i
	}
}

// maxEmptied is how large a step may be after which the room for its keys is kept.
const maxEmptied = 1024

// take returns the changes, and empties the queue.
func (q *queue) take() []*Change {
	q.compact()
	out := q.changes
	q.changes, q.n = nil, 0
	if len(out) > maxEmptied {
		q.at = nil // a map never shrinks
	} else {
		clear(q.at)
	}
	return out
}

// Steps yields what changed, as often as something has, until ctx ends. Only one
// loop may read them. The reader is through with a step when it asks for the next.
func (f *Follower) Steps(ctx context.Context) iter.Seq[Step] {
	return func(yield func(Step) bool) {
		for ctx.Err() == nil {
			if s, ok := f.take(); ok {
				if !yield(s) {
					return
				}
				continue
			}
			select {
			case <-f.wake:
			case <-ctx.Done():
			}
		}
	}
}

// Each calls apply with every step until ctx ends, or apply fails.
func (f *Follower) Each(ctx context.Context, apply func(context.Context, Step) error) error {
	for s := range f.Steps(ctx) {
		if err := apply(ctx, s); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// take returns what is pending. It reports false where nothing is.
func (f *Follower) take() (Step, bool) {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	f.done, f.addedDone, f.working = max(f.done, f.taken), f.addedTaken, false
	defer c.advanced()
	if !f.news() {
		return Step{}, false
	}
	s := Step{Changes: f.pending.take(), Source: c.fresh.Source, Revision: c.revision, Synced: f.synced, OwnOnly: c.ownOnly, Err: c.fresh.Err}
	s.Lacks = f.lacking(func(k store.Kind) bool { return slices.Contains(c.unknown, k) })
	switch {
	case f.disk != nil:
		s.Revision, s.OwnOnly, s.Lacks = 0, f.ownDisk, f.lacks
	case s.Source == Disk:
		s.Source = Unread
	}
	f.synced, f.turned = false, false
	f.taken, f.addedTaken, f.working = s.Revision, f.added, true
	return s, true
}

// Wait waits until the reader is through with all changes up to a revision.
func (f *Follower) Wait(ctx context.Context, rev store.Revision) error {
	err := f.wait(ctx, func() bool {
		// What came since may not concern it.
		return f.done >= rev || f.disk == nil && !f.working && !f.news() && f.c.revision >= rev
	})
	if err != nil {
		return fmt.Errorf("wait for revision %d of the datastore: %w", rev, err)
	}
	return nil
}

// CatchUp waits until the reader is through with all that there is for it now,
// also with what this host announced.
func (f *Follower) CatchUp(ctx context.Context) error {
	f.c.mu.Lock()
	added := f.added
	f.c.mu.Unlock()
	return f.wait(ctx, func() bool { return f.addedDone >= added })
}

// wait waits until reached, which is called with the Cluster's lock held.
func (f *Follower) wait(ctx context.Context, reached func() bool) error {
	for {
		f.c.mu.Lock()
		if reached() {
			f.c.mu.Unlock()
			return nil
		}
		if f.c.moved == nil {
			f.c.moved = make(chan struct{})
		}
		moved := f.c.moved
		f.c.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
