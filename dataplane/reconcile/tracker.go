package reconcile

import (
	"iter"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// Config says how a [Tracker] works. The zero value of an optional field is
// replaced by the default named with it.
type Config[K comparable, V comparable] struct {
	// Sources are the sources that must be synced before leftovers are
	// removed, best first. Required; other sources are a programmer's error.
	Sources []dataplane.Source

	// Classes is the number of classes of keys and Class gives the class of
	// a key, 0 ≤ class < Classes. [Tracker.Due] hands out one class at a
	// time. Optional: one class.
	Classes int
	Class   func(K) int

	// Equal reports whether what there is satisfies what is wanted. Optional: ==.
	Equal func(want, have V) bool

	// OnHave is called, with the tracker's lock held, for each change of
	// what there is; had and has say which of the values count. It must not
	// call the tracker. Optional.
	OnHave func(k K, old V, had bool, now V, has bool)

	// Now is the clock. Optional: time.Now.
	Now func() time.Time
	// Jitter returns a number in [0, 1) that spreads retries. Optional:
	// math/rand/v2.
	Jitter func() float64
	// MinBackoff and MaxBackoff bound the delay before a refused key is
	// tried again. Optional: 100 ms and 1 min.
	MinBackoff, MaxBackoff time.Duration
}

type claim[V comparable] struct {
	src   dataplane.Source
	value V
}

// failure is kept only for keys that are not done, and for those that others
// keep changing.
type failure struct {
	err      error
	attempts int       // refusals in a row
	due      time.Time // zero: not delayed
	waiting  bool      // for something else, until Retry
	failed   bool      // the last thing that happened was a refusal

	// Recent repairs: how often in a row, and when the last one was.
	drifts    int
	lastDrift time.Time
}

type entry[K comparable, V comparable] struct {
	key     K
	want    V
	have    V
	losers  []claim[V] // by source
	failure *failure
	rev     dataplane.Revision // of the last call that named the key
	group   dataplane.Revision // in whose count the key is
	since   time.Time
	place   int // queue, while queued
	mark    uint32
	src     dataplane.Source
	state   dataplane.State
	counted phase // how the key counts in its revision's group
	wanted  bool
	exists  bool
	ours    bool // was wanted in this run
	done    bool // nothing to do
	queued  bool
	gone    bool // no longer tracked: nobody wants it and it is not there
}

// Tracker holds wantedBy and what there is. Its methods are safe for concurrent
// use; work taken with [Tracker.Due] must be reported by the taker.
type Tracker[K comparable, V comparable] struct {
	cfg     Config[K, V]
	srcs    map[dataplane.Source]int
	mu      sync.Mutex
	entries map[K]*entry[K, V]
	spoken  map[dataplane.Source]bool
	synced  map[dataplane.Source]bool
	listed  bool // what there is was told once
	swept   bool // all sources are synced
	counter uint64
	epoch   uint32

	ready   [][]*entry[K, V] // by class, kind of work, source
	delayed delays[K, V]
	// removed are keys that nobody wants, that somebody added and we removed.
	removed map[K]failure
	waiting map[*entry[K, V]]struct{}

	groups  map[dataplane.Revision]*group
	open    map[dataplane.Source][]dataplane.Revision
	waiters map[*waiter]struct{}
}

// New returns an empty tracker.
func New[K comparable, V comparable](cfg Config[K, V]) *Tracker[K, V] {
	if cfg.Classes == 0 {
		cfg.Classes = 1
	}
	if cfg.Class == nil {
		cfg.Class = func(K) int { return 0 }
	}
	if cfg.Equal == nil {
		cfg.Equal = func(want, have V) bool { return want == have }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Jitter == nil {
		cfg.Jitter = rand.Float64
	}
	if cfg.MinBackoff == 0 {
		cfg.MinBackoff = 100 * time.Millisecond
	}
	if cfg.MaxBackoff == 0 {
		cfg.MaxBackoff = time.Minute
	}
	t := &Tracker[K, V]{
		cfg:     cfg,
		srcs:    make(map[dataplane.Source]int),
		entries: make(map[K]*entry[K, V]),
		spoken:  make(map[dataplane.Source]bool),
		synced:  make(map[dataplane.Source]bool),
		ready:   make([][]*entry[K, V], cfg.Classes*2*len(cfg.Sources)),
		removed: make(map[K]failure),
		waiting: make(map[*entry[K, V]]struct{}),
		groups:  make(map[dataplane.Revision]*group),
		open:    make(map[dataplane.Source][]dataplane.Revision),
		waiters: make(map[*waiter]struct{}),
	}
	for i, s := range cfg.Sources {
		t.srcs[s] = i
	}
	return t
}

// Replace makes want all that src wants. Where want names a key twice, the
// later value counts.
func (t *Tracker[K, V]) Replace(src dataplane.Source, want iter.Seq2[K, V]) dataplane.Revision {
	t.mu.Lock()
	defer t.mu.Unlock()
	rev := t.next(src)
	t.epoch++
	for k, v := range want {
		e := t.entry(k)
		e.mark = t.epoch
		t.put(e, src, v, rev)
	}
	for _, e := range t.entries {
		if e.mark != t.epoch && e.wantedBy(src) {
			t.withdraw(e, src, rev)
		}
	}
	t.notify()
	return rev
}

// Update changes some keys of what src wants: put adds or replaces, del
// withdraws. A key in both is put. A key that is named although what is wanted stays
// the same is tried again at once, whatever its delay.
func (t *Tracker[K, V]) Update(src dataplane.Source, put iter.Seq2[K, V], del iter.Seq[K]) dataplane.Revision {
	t.mu.Lock()
	defer t.mu.Unlock()
	rev := t.next(src)
	t.epoch++
	for k, v := range put {
		e := t.entry(k)
		e.mark = t.epoch
		t.put(e, src, v, rev)
		t.retry(e)
	}
	for k := range del {
		if e := t.entries[k]; e != nil && e.mark != t.epoch {
			t.withdraw(e, src, rev)
		}
	}
	t.notify()
	return rev
}

// Synced says that src has said all that it wants. When all sources are, what
// nobody wanted in this run is removed.
func (t *Tracker[K, V]) Synced(src dataplane.Source) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.index(src)
	t.spoken[src], t.synced[src] = true, true
	if t.swept || len(t.synced) < len(t.cfg.Sources) {
		return
	}
	t.swept = true
	for _, e := range t.entries {
		t.settle(e)
	}
	t.notify()
}

// Unsynced returns the sources that have not said that they are synced.
func (t *Tracker[K, V]) Unsynced() []dataplane.Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.without(t.synced)
}

// Silent returns the sources that have not said anything yet: what they want
// is not known. One that has spoken may have more to say; see
// [Tracker.Unsynced].
func (t *Tracker[K, V]) Silent() []dataplane.Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.without(t.spoken)
}

// without returns the sources that are not in a set.
func (t *Tracker[K, V]) without(set map[dataplane.Source]bool) []dataplane.Source {
	var out []dataplane.Source
	for _, s := range t.cfg.Sources {
		if !set[s] {
			out = append(out, s)
		}
	}
	return out
}

func (t *Tracker[K, V]) next(src dataplane.Source) dataplane.Revision {
	t.index(src)
	t.spoken[src] = true
	t.counter++
	return dataplane.Revision(t.counter<<8 | uint64(src))
}

// sourceOf is the source of a call: the low byte of its number, so that to wait
// for one source need not be to wait for another.
func sourceOf(rev dataplane.Revision) dataplane.Source { return dataplane.Source(rev & 0xff) }

// index returns the place of src among the sources.
func (t *Tracker[K, V]) index(src dataplane.Source) int {
	i, ok := t.srcs[src]
	if !ok {
		panic("reconcile: unknown source")
	}
	return i
}

func (t *Tracker[K, V]) entry(k K) *entry[K, V] {
	e := t.entries[k]
	if e == nil {
		e = &entry[K, V]{key: k, done: true, since: t.cfg.Now()}
		if tr, ok := t.removed[k]; ok {
			e.failure = &failure{drifts: tr.drifts, lastDrift: tr.lastDrift}
			delete(t.removed, k)
		}
		t.entries[k] = e
	}
	return e
}

// wantedBy reports whether src wants the key.
func (e *entry[K, V]) wantedBy(src dataplane.Source) bool {
	if e.wanted && e.src == src {
		return true
	}
	for _, w := range e.losers {
		if w.src == src {
			return true
		}
	}
	return false
}

func (t *Tracker[K, V]) put(e *entry[K, V], src dataplane.Source, v V, rev dataplane.Revision) {
	e.rev = rev
	switch {
	case !e.wanted:
		t.win(e, src, v)
	case e.src == src:
		t.win(e, src, v)
	case src < e.src:
		e.lose(e.src, e.want)
		e.dropLoser(src)
		t.win(e, src, v)
	default:
		e.lose(src, v)
	}
	t.settle(e)
}

// win makes v of src what counts.
func (t *Tracker[K, V]) win(e *entry[K, V], src dataplane.Source, v V) {
	if e.wanted && e.want == v {
		e.src = src
		return
	}
	e.wanted, e.ours, e.src, e.want = true, true, src, v
	e.state, e.since = dataplane.Pending, t.cfg.Now()
	t.clearFailure(e)
}

// lose keeps v of src for when the winner withdraws.
func (e *entry[K, V]) lose(src dataplane.Source, v V) {
	for i := range e.losers {
		if e.losers[i].src == src {
			e.losers[i].value = v
			return
		}
	}
	i := 0
	for i < len(e.losers) && e.losers[i].src < src {
		i++
	}
	e.losers = append(e.losers, claim[V]{})
	copy(e.losers[i+1:], e.losers[i:])
	e.losers[i] = claim[V]{src, v}
}

func (e *entry[K, V]) dropLoser(src dataplane.Source) {
	for i, w := range e.losers {
		if w.src == src {
			e.losers = append(e.losers[:i], e.losers[i+1:]...)
			return
		}
	}
}

func (t *Tracker[K, V]) withdraw(e *entry[K, V], src dataplane.Source, rev dataplane.Revision) {
	if !e.wantedBy(src) {
		return
	}
	e.rev = rev
	switch {
	case e.src != src:
		e.dropLoser(src)
	case len(e.losers) > 0:
		w := e.losers[0]
		e.dropLoser(w.src)
		t.win(e, w.src, w.value)
	default:
		var zero V
		e.wanted, e.want = false, zero
		t.clearFailure(e)
	}
	t.settle(e)
}

// ReplaceHave makes have all that there is, and returns the keys that were
// done and, by this, no longer are, and those for which [Tracker.SetHave] would
// be true: what others changed, removed or added unnoticed.
func (t *Tracker[K, V]) ReplaceHave(have iter.Seq2[K, V]) []K {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.epoch++
	var drift []K
	see := func(e *entry[K, V], v V, exists bool) {
		was, stray := e.done, exists && t.strays(e)
		t.setHave(e, v, exists)
		switch {
		case was && !e.done:
			drift = append(drift, e.key)
			t.undone(e)
		case stray:
			drift = append(drift, e.key)
		case e.done && e.failure != nil && t.cfg.Now().Sub(e.failure.lastDrift) > t.cfg.MaxBackoff:
			t.clearFailure(e)
		}
	}
	for k, v := range have {
		e := t.entry(k)
		e.mark = t.epoch
		see(e, v, true)
	}
	var zero V
	for _, e := range t.entries {
		if e.exists && e.mark != t.epoch {
			see(e, zero, false)
		}
	}
	t.listed = true
	t.forgetRemoved()
	t.notify()
	return drift
}

// SetHave says that k is there with value v. It returns true if k was as it
// should be before, which for a key that nobody wants is absent, and is not
// now. It is true too of a key that was never wanted and comes between the first
// listing and the sweep, for which it waits as what the previous run left does.
func (t *Tracker[K, V]) SetHave(k K, v V) bool { return t.set(k, v, true) }

// SetDependent is SetHave for a key that changed with something else, as
// [Tracker.LoseDependent] is LoseHave.
func (t *Tracker[K, V]) SetDependent(k K, v V) bool { return t.set(k, v, false) }

func (t *Tracker[K, V]) set(k K, v V, blame bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entry(k)
	was, stray := e.done, t.strays(e)
	t.setHave(e, v, true)
	return t.drifted(e, was, blame) || stray
}

// strays reports whether e, should it come now, is one that waits for the
// sweep.
func (t *Tracker[K, V]) strays(e *entry[K, V]) bool {
	return t.listed && !t.swept && !e.exists && !e.wanted && !e.ours
}

// LoseHave says that somebody removed k. It returns true if k was as wanted
// before.
func (t *Tracker[K, V]) LoseHave(k K) bool { return t.lose(k, true) }

// LoseDependent is LoseHave for a key that went with something else: nobody
// insists on its absence, so it is never held back for being lost often.
func (t *Tracker[K, V]) LoseDependent(k K) bool { return t.lose(k, false) }

func (t *Tracker[K, V]) lose(k K, blame bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[k]
	if e == nil {
		return false
	}
	was := e.done
	var zero V
	t.setHave(e, zero, false)
	return t.drifted(e, was, blame)
}

// LoseWhere is LoseDependent for all keys for which lost, called with what
// there was, returns true. It looks at every key and returns those that were
// as wanted before.
func (t *Tracker[K, V]) LoseWhere(undone func(K, V) bool) []K {
	t.mu.Lock()
	defer t.mu.Unlock()
	var drift []K
	var zero V
	for _, e := range t.entries {
		if !e.exists || !undone(e.key, e.have) {
			continue
		}
		was := e.done && e.wanted
		t.setHave(e, zero, false)
		if was && !e.done {
			drift = append(drift, e.key)
		}
	}
	t.notify()
	return drift
}

func (t *Tracker[K, V]) drifted(e *entry[K, V], was, blame bool) bool {
	defer t.notify()
	if !was || e.done {
		return false
	}
	if blame {
		t.undone(e)
	}
	return true
}

// Drifts returns how often in a row somebody undid k, and when it is put right
// again if that is held back.
func (t *Tracker[K, V]) Drifts(k K) (n int, due time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[k]; e != nil && e.failure != nil {
		return e.failure.drifts, e.failure.due
	}
	return 0, time.Time{}
}

func (t *Tracker[K, V]) setHave(e *entry[K, V], v V, exists bool) {
	old, had := e.have, e.exists
	e.have, e.exists = v, exists
	if t.cfg.OnHave != nil && (had || exists) && (had != exists || old != v) {
		t.cfg.OnHave(e.key, old, had, v, exists)
	}
	t.settle(e)
}

// Settled reports whether k is as it should be: as wanted, or absent where
// nobody wants it.
func (t *Tracker[K, V]) Settled(k K) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[k]
	return e == nil || e.done && (e.wanted || !e.exists)
}

// Want returns what is wanted of k.
func (t *Tracker[K, V]) Want(k K) (V, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[k]; e != nil && e.wanted {
		return e.want, true
	}
	var zero V
	return zero, false
}

// Keys returns the keys of all that there is, in no order.
func (t *Tracker[K, V]) Keys() []K {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []K
	for k, e := range t.entries {
		if e.exists {
			out = append(out, k)
		}
	}
	return out
}

// Failure returns why k was refused last, or what it waits for; nil if it has
// no failure.
func (t *Tracker[K, V]) Failure(k K) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[k]; e != nil && e.failure != nil {
		return e.failure.err
	}
	return nil
}

// Have returns what there is of k.
func (t *Tracker[K, V]) Have(k K) (V, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[k]; e != nil && e.exists {
		return e.have, true
	}
	var zero V
	return zero, false
}
