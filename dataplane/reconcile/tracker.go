package reconcile

import (
	"cmp"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/dense"
)

// Config says how a [Tracker] works. The zero value of an optional field is
// replaced by the default named with it.
type Config[K comparable, V comparable] struct {
	// Sources are the sources that must be synced before leftovers are
	// removed, best first. Required; other sources are a programmer's error.
	Sources []dataplane.Source

	// Classes is the number of classes of keys and Class gives the class of
	// a key, 0 ≤ class < Classes. [Tracker.Due] hands out one class at a
	// time. Twice the classes times the sources are 256 at most. Optional: one class.
	Classes int
	Class   func(K) int

	// Equal reports whether what there is satisfies what is wanted; equal values always
	// do. Optional: ==.
	Equal func(want, have V) bool

	// Packing is for keys of which there are many. Optional.
	Packing Packing[K]

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

// claim is what a source wants that does not count.
type claim struct {
	src   dataplane.Source
	value uint32
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

// Tracker holds what is wanted and what there is. Its methods are safe for concurrent
// use; work taken with [Tracker.Due] must be reported by the taker.
type Tracker[K comparable, V comparable] struct {
	cfg      Config[K, V]
	sources  sources
	start    time.Time
	mu       sync.Mutex
	now      ticks // of the call under way
	table    *dense.Table[Packed, entry]
	keys     *dense.Numbers[K] // of keys that are not packed
	values   *dense.Numbers[V] // of what is wanted and what there is
	failures map[*entry]*failure
	losers   map[*entry][]claim // by source
	listed   bool               // what there is was listed once
	swept    bool               // all sources are synced
	epoch    uint32

	ready   []dense.Queue[*entry] // by class, kind of work, source
	delayed delays
	// removed are keys that no source wants, that another program added and we removed.
	removed map[K]failure
	waiting map[*entry]struct{}

	revisions revisions
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
	if cfg.Packing.Pack == nil {
		cfg.Packing.Pack = func(K) (Packed, bool) { return Packed{}, false }
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
	return &Tracker[K, V]{
		cfg:       cfg,
		start:     cfg.Now(),
		sources:   newSources(cfg.Sources),
		table:     dense.New(func(e *entry) *Packed { return &e.key }),
		keys:      dense.NewNumbers[K](),
		values:    dense.NewNumbers[V](),
		failures:  make(map[*entry]*failure),
		losers:    make(map[*entry][]claim),
		ready:     make([]dense.Queue[*entry], cfg.Classes*2*len(cfg.Sources)),
		removed:   make(map[K]failure),
		waiting:   make(map[*entry]struct{}),
		revisions: newRevisions(),
	}
}

// lock begins a call that may change entries.
func (t *Tracker[K, V]) lock() {
	t.mu.Lock()
	t.now = ticks(t.cfg.Now().Sub(t.start) / tick)
}

// Replace makes want all that src wants. Where want names a key twice, the
// later value counts.
func (t *Tracker[K, V]) Replace(src dataplane.Source, want iter.Seq2[K, V]) dataplane.Revision {
	t.lock()
	defer t.mu.Unlock()
	rev := t.sources.next(src)
	t.epoch++
	for k, v := range want {
		e := t.entry(k)
		e.mark = t.epoch
		t.put(e, src, v, rev)
	}
	for _, e := range t.table.All() {
		if e.mark != t.epoch && t.wantedBy(e, src) {
			t.withdraw(e, src, rev)
		}
	}
	t.revisions.notify()
	return rev
}

// Update changes some keys of what src wants: put adds or replaces, del
// withdraws. A key in both is put. A key that is named although what is wanted stays
// the same is tried again at once, whatever its delay.
func (t *Tracker[K, V]) Update(src dataplane.Source, put iter.Seq2[K, V], del iter.Seq[K]) dataplane.Revision {
	t.lock()
	defer t.mu.Unlock()
	rev := t.sources.next(src)
	t.epoch++
	for k, v := range put {
		e := t.entry(k)
		e.mark = t.epoch
		t.put(e, src, v, rev)
		t.retry(e)
	}
	for k := range del {
		if e := t.find(k); e != nil && e.mark != t.epoch {
			t.withdraw(e, src, rev)
		}
	}
	t.revisions.notify()
	return rev
}

// Synced says that src has said all that it wants. When all sources are, what
// none of them wanted in this run is removed.
func (t *Tracker[K, V]) Synced(src dataplane.Source) {
	t.lock()
	defer t.mu.Unlock()
	if all := t.sources.said(src); t.swept || !all {
		return
	}
	t.swept = true
	for _, e := range t.table.All() {
		t.settle(e)
	}
	t.revisions.notify()
}

// Unsynced returns the sources that have not said that they are synced.
func (t *Tracker[K, V]) Unsynced() []dataplane.Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sources.without(t.sources.synced)
}

// Silent returns the sources that have not said anything yet: what they want
// is not known. One that has spoken may have more to say; see
// [Tracker.Unsynced].
func (t *Tracker[K, V]) Silent() []dataplane.Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sources.without(t.sources.spoken)
}

// Last returns a revision that is not less than that of any call so far, and less than
// those of calls to come.
func (t *Tracker[K, V]) Last() dataplane.Revision {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sources.last()
}

// wantedBy reports whether src wants the key.
func (t *Tracker[K, V]) wantedBy(e *entry, src dataplane.Source) bool {
	return e.wanted() && e.src == src || e.contested() && slices.ContainsFunc(t.losers[e], func(c claim) bool { return c.src == src })
}

func (t *Tracker[K, V]) put(e *entry, src dataplane.Source, v V, rev dataplane.Revision) {
	switch {
	case !e.wanted() || e.src == src:
		t.win(e, src, t.take(v))
	case src < e.src:
		lost := claim{e.src, t.take(t.wants(e))}
		t.dropLoser(e, src)
		t.win(e, src, t.take(v))
		t.lose(e, lost)
	default:
		t.lose(e, claim{src, t.take(v)})
	}
	t.settleAs(e, rev)
}

// win makes a value of src what counts.
func (t *Tracker[K, V]) win(e *entry, src dataplane.Source, value uint32) {
	old := e.want
	same := e.wanted() && old == value
	e.src, e.want = src, value
	t.values.Leave(old)
	if same {
		return
	}
	e.set(isWanted|isOurs, true)
	t.turned(e, dataplane.Pending)
	t.clearFailure(e)
}

// lose keeps what a source wants for when the winner withdraws.
func (t *Tracker[K, V]) lose(e *entry, c claim) {
	t.dropLoser(e, c.src)
	list := append(t.losers[e], c)
	slices.SortFunc(list, func(a, b claim) int { return cmp.Compare(a.src, b.src) })
	t.losers[e] = list
	e.set(isContested, true)
}

func (t *Tracker[K, V]) dropLoser(e *entry, src dataplane.Source) {
	if !e.contested() {
		return
	}
	list := slices.DeleteFunc(t.losers[e], func(c claim) bool {
		if c.src == src {
			t.values.Leave(c.value)
		}
		return c.src == src
	})
	if t.losers[e] = list; len(list) == 0 {
		delete(t.losers, e)
		e.set(isContested, false)
	}
}

func (t *Tracker[K, V]) withdraw(e *entry, src dataplane.Source, rev dataplane.Revision) {
	switch {
	case !t.wantedBy(e, src):
		return
	case e.src != src:
		t.dropLoser(e, src)
	case e.contested():
		next := t.losers[e][0]
		t.losers[e][0].value = 0 // it is the winner's now
		t.dropLoser(e, next.src)
		t.win(e, next.src, next.value)
	default:
		t.values.Leave(e.want)
		e.want = 0
		e.set(isWanted, false)
		t.clearFailure(e)
	}
	t.settleAs(e, rev)
}

// ReplaceHave makes have all that there is, and returns the keys that were
// done and, by this, no longer are, and those for which [Tracker.SetHave] would
// be true: what others changed, removed or added unnoticed.
func (t *Tracker[K, V]) ReplaceHave(have iter.Seq2[K, V]) []K {
	t.lock()
	defer t.mu.Unlock()
	t.epoch++
	var drift []K
	see := func(e *entry, k K, v V, exists bool) {
		was, stray := e.done(), exists && t.strays(e)
		t.setHave(e, k, v, exists)
		switch {
		case was && !e.done():
			drift = append(drift, k)
			t.undone(e)
		case stray:
			drift = append(drift, k)
		case e.done() && e.failing() && t.cfg.Now().Sub(t.failure(e).lastDrift) > t.cfg.MaxBackoff:
			t.clearFailure(e)
		}
	}
	for k, v := range have {
		e := t.entry(k)
		e.mark = t.epoch
		see(e, k, v, true)
	}
	var zero V
	for _, e := range t.table.All() {
		if e.exists() && e.mark != t.epoch {
			see(e, t.key(e), zero, false)
		}
	}
	t.listed = true
	t.forgetRemoved()
	t.revisions.notify()
	return drift
}

// SetHave says that k is there with value v. It returns true if k was as it
// should be before, which for a key that no source wants is absent, and is not
// now. It is true too of a key that was never wanted and comes between the first
// listing and the sweep, for which it waits as what the previous run left does.
func (t *Tracker[K, V]) SetHave(k K, v V) bool { return t.set(k, v, true) }

// SetDependent is SetHave for a key that changed with something else, as
// [Tracker.LoseDependent] is LoseHave.
func (t *Tracker[K, V]) SetDependent(k K, v V) bool { return t.set(k, v, false) }

func (t *Tracker[K, V]) set(k K, v V, blame bool) bool {
	t.lock()
	defer t.mu.Unlock()
	e := t.entry(k)
	was, stray := e.done(), t.strays(e)
	t.setHave(e, k, v, true)
	return t.drifted(e, was, blame) || stray
}

// strays reports whether e, should it come now, is one that waits for the
// sweep.
func (t *Tracker[K, V]) strays(e *entry) bool {
	return t.listed && !t.swept && !e.exists() && !e.wanted() && !e.ours()
}

// LoseHave says that another program removed k. It returns true if k was as wanted
// before.
func (t *Tracker[K, V]) LoseHave(k K) bool { return t.gone(k, true) }

// LoseDependent is LoseHave for a key that went with something else: no program
// insists on its absence, so it is never held back for being lost often.
func (t *Tracker[K, V]) LoseDependent(k K) bool { return t.gone(k, false) }

func (t *Tracker[K, V]) gone(k K, blame bool) bool {
	t.lock()
	defer t.mu.Unlock()
	e := t.find(k)
	if e == nil {
		return false
	}
	was := e.done()
	var zero V
	t.setHave(e, k, zero, false)
	return t.drifted(e, was, blame)
}

// LoseWhere is LoseDependent for all keys for which lost, called with what
// there was, returns true. It looks at every key and returns those that were
// as wanted before.
func (t *Tracker[K, V]) LoseWhere(undone func(K, V) bool) []K {
	t.lock()
	defer t.mu.Unlock()
	var drift []K
	var zero V
	for _, e := range t.table.All() {
		k := t.key(e)
		if !e.exists() || !undone(k, t.has(e)) {
			continue
		}
		was := e.done() && e.wanted()
		t.setHave(e, k, zero, false)
		if was && !e.done() {
			drift = append(drift, k)
		}
	}
	t.revisions.notify()
	return drift
}

func (t *Tracker[K, V]) drifted(e *entry, was, blame bool) bool {
	defer t.revisions.notify()
	if !was || e.done() {
		return false
	}
	if blame {
		t.undone(e)
	}
	return true
}

// Drifts returns how often in a row another program undid k, and when it is put right
// again if that is held back.
func (t *Tracker[K, V]) Drifts(k K) (n int, due time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(k); e != nil && e.failing() {
		return t.failure(e).drifts, t.failure(e).due
	}
	return 0, time.Time{}
}

func (t *Tracker[K, V]) setHave(e *entry, k K, v V, exists bool) {
	had := e.exists()
	if had != exists || exists && t.has(e) != v {
		old := e.have
		e.have = 0
		e.set(isThere, exists)
		if exists {
			e.have = t.take(v)
		}
		if t.cfg.OnHave != nil {
			t.cfg.OnHave(k, t.values.Value(old), had, v, exists)
		}
		t.values.Leave(old)
	}
	t.settle(e)
}

// Settled reports whether k is as it should be: as wanted, or absent where
// no source wants it.
func (t *Tracker[K, V]) Settled(k K) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(k)
	return e == nil || e.done() && (e.wanted() || !e.exists())
}

// Want returns what is wanted of k.
func (t *Tracker[K, V]) Want(k K) (V, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(k); e != nil && e.wanted() {
		return t.wants(e), true
	}
	var zero V
	return zero, false
}

// Keys returns the keys of all that there is, in no order.
func (t *Tracker[K, V]) Keys() []K {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []K
	for _, e := range t.table.All() {
		if e.exists() {
			out = append(out, t.key(e))
		}
	}
	return out
}

// Failure returns why k was refused last, or what it waits for; nil if it has
// no failure.
func (t *Tracker[K, V]) Failure(k K) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(k); e != nil && e.failing() {
		return t.failure(e).err
	}
	return nil
}

// Have returns what there is of k.
func (t *Tracker[K, V]) Have(k K) (V, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(k); e != nil && e.exists() {
		return t.has(e), true
	}
	var zero V
	return zero, false
}
