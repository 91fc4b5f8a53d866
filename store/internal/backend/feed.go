package backend

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// lazily is how long a revision that changed nothing for the consumer may wait
// for company before it is delivered on its own.
const lazily = time.Second

// maxEmptied is how large a batch may be after which the room for its keys is kept.
const maxEmptied = 1024

// Feed is the half of a watch that looks towards the consumer. The backend
// reports to it what it reads; the feed remembers what the consumer knows (a
// revision and a hash per key, no values), works out differences, and joins what the
// consumer has not taken yet into one batch with at most one event per key, so
// that a slow consumer costs memory by keys, not by changes.
//
// The methods that report may be called from one goroutine, while [Feed.Run]
// runs in another.
type Feed struct {
	wants map[store.Kind]bool

	step    sync.Mutex // of what is reported together; taken before mu
	mu      sync.Mutex
	known   delivered // or pending
	seed    maphash.Seed
	pending []store.Event     // the last change of each key, by the order of changes; may have holes
	waiting int               // of pending, without the holes
	at      map[store.Key]int // where in pending; nil: not known yet
	rev     store.Revision    // of the store
	given   store.Revision    // the revision that the consumer knows
	synced  bool              // the pending state is complete
	due     bool              // the pending revision is worth a batch now
	err     error             // an outage that is not delivered yet
	out     error             // the last that was, and nothing since
	places  map[string]store.Revision
	// withheld is replaced, not changed: batches share it.
	withheld map[store.Kind]store.Withheld
	ownOnly  bool

	wake async.Signal
}

// NewFeed returns the feed of a watch for these kinds.
func NewFeed(kinds []store.Kind) *Feed {
	f := &Feed{
		wants: make(map[store.Kind]bool),
		known: make(delivered),
		seed:  maphash.MakeSeed(),
		wake:  async.NewSignal(),
	}
	for _, k := range kinds {
		f.wants[k] = true
	}
	return f
}

// Wants reports whether the consumer asked for a kind.
func (f *Feed) Wants(k store.Kind) bool { return f.wants[k] }

// Together calls report, and what that reports comes in one batch.
func (f *Feed) Together(report func()) {
	f.step.Lock()
	defer f.step.Unlock()
	report()
}

// Item is one key of a complete state.
type Item struct {
	Key store.Key
	Stored
	Err error // why it cannot be decoded, where the backend knows
}

// Event returns the event that an item was written.
func (it Item) Event() store.Event {
	if it.Err != nil {
		return store.Event{Key: it.Key, Object: store.Object{Key: it.Key, Revision: it.Revision, Raw: it.Raw}, Err: it.Err}
	}
	return Event(it.Key, it.Revision, it.Raw)
}

// Reset reports the complete state of the wanted kinds at rev. The consumer gets
// what differs from what it knows, marked as synced; only that is decoded.
func (f *Feed) Reset(rev store.Revision, items []Item) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reset(rev, items, func(store.Key) bool { return true })
}

// ResetBut is [Feed.Reset] for a state that could not be read of some kinds: the batch says
// which, and what the consumer knows of them holds.
func (f *Feed) ResetBut(rev store.Revision, items []Item, withheld map[store.Kind]store.Withheld) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.withheld = withheld
	f.reset(rev, items, func(key store.Key) bool { _, ok := withheld[key.Kind]; return !ok })
}

// reset replaces what belongs to the state that was read. The lock is held.
func (f *Feed) reset(rev store.Revision, items []Item, belongs func(store.Key) bool) {
	f.replace(rev, items, belongs)
	f.rev, f.synced = rev, true
	f.err = nil // an outage that ended before it was delivered is no news
	f.wake.Set()
}

// ResetPart is [Feed.Reset] for a backend that reads its state in parts: it reports
// the complete state of those keys that belong to one.
func (f *Feed) ResetPart(rev store.Revision, items []Item, belongs func(store.Key) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.replace(rev, items, belongs)
	f.rev, f.synced = max(f.rev, rev), true
	f.wake.Set()
}

// Widen is [Feed.ResetPart] for a part that was not followed before: the consumer was not
// without the others meanwhile, and its state is no other one than it was.
func (f *Feed) Widen(rev store.Revision, items []Item, belongs func(store.Key) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.replace(rev, items, belongs)
	f.rev = max(f.rev, rev)
	f.wake.Set()
}

// Place notes how far one of the watches is whose changes were reported; 0: it is
// nowhere.
func (f *Feed) Place(watch string, rev store.Revision) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if rev == 0 {
		delete(f.places, watch)
		return
	}
	if f.places == nil {
		f.places = make(map[string]store.Revision)
	}
	f.places[watch] = rev
}

// Withhold says of which kinds nothing new is reported. The caller does not change the
// map after that.
func (f *Feed) Withhold(kinds map[store.Kind]store.Withheld) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.withheld, f.due = kinds, true
	f.wake.Set()
}

// OwnOnly says whether of WorkloadEndpoints those of one node are reported alone, as
// [store.Batch] has it.
func (f *Feed) OwnOnly(is bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ownOnly == is {
		return
	}
	f.ownOnly = is
	if f.err == nil {
		f.err = f.out // a batch without would say that the store is back
	}
	f.due = f.due || f.err == nil && f.given != 0 // before the first state there is nothing that it is said of
	f.wake.Set()
}

// Synced reports that all was reported again, after an outage in which nothing had to
// be read anew.
func (f *Feed) Synced() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.synced, f.err = true, nil
	f.wake.Set()
}

// replace adds what differs between what the consumer knows of some keys and
// what is there.
func (f *Feed) replace(rev store.Revision, items []Item, belongs func(store.Key) bool) {
	if len(f.known) == 0 && f.waiting == 0 {
		f.fill(items)
		return
	}
	there := make(map[store.Key]bool, len(items))
	for _, it := range items {
		there[it.Key] = true
		if have, _ := f.known.get(it.Key); have.rev != it.Revision {
			f.add(it.Event())
		}
	}
	var gone []store.Key
	for key := range f.known.keys() {
		if !there[key] && belongs(key) {
			gone = append(gone, key)
		}
	}
	slices.SortFunc(gone, compareKeys)
	for _, key := range gone {
		f.add(Deletion(key, rev))
	}
}

// fill reports items, each of another key, to a consumer that knows nothing. It may take them all
// before more comes: so what of pending is where gets known with the first change that may take the
// place of another.
func (f *Feed) fill(items []Item) {
	f.known.grow(items)
	f.pending, f.at = make([]store.Event, 0, len(items)), nil
	for _, it := range items {
		e := it.Event()
		f.pending = append(f.pending, e)
		f.note(e)
	}
	f.waiting = len(items)
}

// Contradiction says in what way a complete state cannot follow from what the
// consumer knows: a key was last written earlier than it is known to have been, or has
// other content as of the same revision. It returns "" where it can.
func (f *Feed) Contradiction(items []Item) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, it := range items {
		switch have, ok := f.known.get(it.Key); {
		case !ok || it.Revision > have.rev:
		case it.Revision < have.rev:
			return fmt.Sprintf("%s was written at revision %d, and is as of %d", it.Key, have.rev, it.Revision)
		case maphash.Bytes(f.seed, it.Raw) != have.sum:
			return fmt.Sprintf("%s has other content as of the same revision, %d", it.Key, it.Revision)
		}
	}
	return ""
}

func compareKeys(a, b store.Key) int {
	switch pa, pb := a.Path(), b.Path(); {
	case pa < pb:
		return -1
	case pa > pb:
		return 1
	}
	return 0
}

// Change reports the changes of consecutive revisions, in order, of which rev is
// the last. Without events for the consumer, the revision is delivered when there
// is something else to deliver, or after a second.
func (f *Feed) Change(rev store.Revision, events []store.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range events {
		f.add(e)
	}
	f.rev = max(f.rev, rev)
	f.wake.Set()
}

// Beside reports changes, in order, of kinds that a watch of their own follows: how far that
// of the others is they do not say.
func (f *Feed) Beside(events []store.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range events {
		f.add(e)
	}
	f.wake.Set()
}

// Progress reports that the store is at rev and that all changes up to it were
// reported.
func (f *Feed) Progress(rev store.Revision) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if rev > f.rev {
		f.rev, f.due = rev, true
		f.wake.Set()
	}
}

// Outage reports that the store cannot be reached. The caller calls it once per
// outage.
func (f *Feed) Outage(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	f.wake.Set()
}

// add puts e at the end of the pending events, in place of an earlier one of
// its key.
func (f *Feed) add(e store.Event) {
	_, knew := f.known.get(e.Key)
	if e.Deleted() && !knew {
		return // the consumer has nothing to forget
	}
	if f.at == nil {
		f.at = make(map[store.Key]int, len(f.pending))
		f.index()
	}
	if i, ok := f.at[e.Key]; ok {
		f.pending[i] = store.Event{}
		f.waiting--
	}
	f.at[e.Key] = len(f.pending)
	f.pending = append(f.pending, e)
	f.waiting++
	f.note(e)
	if len(f.pending) > 2*f.waiting+16 {
		f.compact()
	}
}

// note notes what the consumer knows by an event, or will.
func (f *Feed) note(e store.Event) {
	if e.Deleted() {
		f.known.remove(e.Key)
	} else {
		f.known.set(e.Key, known{e.Object.Revision, maphash.Bytes(f.seed, e.Object.Raw)})
	}
}

// compact closes the holes in pending, so that one busy key cannot make it
// grow.
func (f *Feed) compact() {
	if f.waiting == len(f.pending) {
		return
	}
	f.pending = slices.DeleteFunc(f.pending, func(e store.Event) bool { return e.Key == store.Key{} })
	f.index()
}

func (f *Feed) index() {
	for i, e := range f.pending {
		f.at[e.Key] = i
	}
}

// take returns the next batch and removes it. It reports false when there is
// nothing to deliver; lazy then says that there is a bare revision.
func (f *Feed) take(even bool) (b store.Batch, ok, lazy bool) {
	f.step.Lock()
	defer f.step.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.waiting > 0 || f.synced || f.due || even && f.rev > f.given:
		f.compact()
		b = store.Batch{Events: f.pending, Revision: f.rev, Synced: f.synced, Places: maps.Clone(f.places), Withheld: f.withheld, OwnOnly: f.ownOnly}
		f.pending, f.waiting, f.synced, f.due, f.given, f.out = nil, 0, false, false, f.rev, nil
		if len(b.Events) > maxEmptied {
			f.at = nil // a map never shrinks
		} else {
			clear(f.at)
		}
		return b, true, false
	case f.err != nil:
		// With the bare revision, if one waits: delivered later, it would look as if
		// the store were back.
		b = store.Batch{Revision: f.rev, Err: f.err, Withheld: f.withheld, OwnOnly: f.ownOnly}
		f.err, f.out, f.given = nil, f.err, f.rev
		return b, true, false
	}
	return store.Batch{}, false, f.rev > f.given
}

// Run hands batches to out until ctx ends. What is reported while the consumer is
// busy comes as one batch.
func (f *Feed) Run(ctx context.Context, out chan<- store.Batch) {
	var timer *time.Timer
	var fired <-chan time.Time
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	even := false
	for {
		b, ok, lazy := f.take(even)
		even = false
		if ok {
			select {
			case out <- b:
				fired = nil
				continue
			case <-ctx.Done():
				return
			}
		}
		// The wait is not begun anew at each wake: a stream of changes that
		// concern others must not put it off for ever.
		if lazy && fired == nil {
			timer = time.NewTimer(lazily)
			fired = timer.C
		}
		select {
		case <-f.wake:
		case <-fired:
			even, fired = true, nil
		case <-ctx.Done():
			return
		}
	}
}
