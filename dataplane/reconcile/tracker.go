package reconcile

import (
	"iter"
	"math/rand/v2"
	"sync"
	"time"
)

// Source numbers a producer of wishes. The lowest number wins a key that
// several want.
type Source uint8

// Revision numbers a call that changed wishes. It grows with each call. The
// low byte is the source, so that waiting for one source need not wait for
// another.
type Revision uint64

func (r Revision) source() Source { return Source(r & 0xff) }

// State says how far a wanted key has come.
type State uint8

// The states of a wanted key.
const (
	Pending State = iota // not tried yet, or waiting for something else
	Done                 // as wanted
	Failed               // tried and refused; it will be tried again
)

// Config says how a [Tracker] works. The zero value of an optional field is
// replaced by the default named with it.
type Config[K comparable, V comparable] struct {
	// Sources are the sources that must be synced before leftovers are
	// removed, best first. Required; other sources are a programmer's error.
	Sources []Source

	// Classes is the number of classes of keys and Class gives the class of
	// a key, 0 ≤ class < Classes. [Tracker.Due] hands out one class at a
	// time. Optional: one class.
	Classes int
	Class   func(K) int

	// Equal reports whether what there is satisfies a wish. Optional: ==.
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

type wish[V comparable] struct {
	src   Source
	value V
}

// trouble is kept only for keys that are not done, and for those that others
// keep changing.
type trouble struct {
	err      error
	attempts int       // refusals in a row
	due      time.Time // zero: not delayed
	waiting  bool      // for something else, until Retry
	failed   bool      // the last thing that happened was a refusal

	// Recent repairs: how often in a row, and when the last one was.
	losses   int
	lastLoss time.Time
}

type entry[K comparable, V comparable] struct {
	key     K
	want    V
	have    V
	losers  []wish[V] // by source
	trouble *trouble
	rev     Revision // of the last call that named the key
	group   Revision // in whose count the key is
	since   time.Time
	place   int // queue, while queued
	mark    uint32
	src     Source
	state   State
	counted phase // how the key counts in its revision's group
	wanted  bool
	exists  bool
	ours    bool // was wanted in this life
	done    bool // nothing to do
	queued  bool
	gone    bool // no longer tracked: nobody wants it and it is not there
}

// Tracker holds wishes and what there is. Its methods are safe for concurrent
// use; work taken with [Tracker.Due] must be reported by the taker.
type Tracker[K comparable, V comparable] struct {
	cfg     Config[K, V]
	srcs    map[Source]int
	mu      sync.Mutex
	entries map[K]*entry[K, V]
	spoken  map[Source]bool
	synced  map[Source]bool
	listed  bool // what there is was told once
	swept   bool // all sources are synced
	counter uint64
	epoch   uint32

	ready   [][]*entry[K, V] // by class, kind of work, source
	delayed delays[K, V]
	// ghosts are keys that nobody wants, that somebody added and we removed.
	ghosts  map[K]trouble
	waiting map[*entry[K, V]]struct{}

	groups  map[Revision]*group
	open    map[Source][]Revision
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
		srcs:    make(map[Source]int),
		entries: make(map[K]*entry[K, V]),
		spoken:  make(map[Source]bool),
		synced:  make(map[Source]bool),
		ready:   make([][]*entry[K, V], cfg.Classes*2*len(cfg.Sources)),
		ghosts:  make(map[K]trouble),
		waiting: make(map[*entry[K, V]]struct{}),
		groups:  make(map[Revision]*group),
		open:    make(map[Source][]Revision),
		waiters: make(map[*waiter]struct{}),
	}
	for i, s := range cfg.Sources {
		t.srcs[s] = i
	}
	return t
}

// Replace makes want the whole wish of src. Where want names a key twice, the
// later value counts.
func (t *Tracker[K, V]) Replace(src Source, want iter.Seq2[K, V]) Revision {
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
		if e.mark != t.epoch && e.wishes(src) {
			t.withdraw(e, src, rev)
		}
	}
	t.notify()
	return rev
}

// Update changes some keys of the wish of src: put adds or replaces, del
// withdraws. A key in both is put. A key that is named although its wish stays
// the same is tried again at once, whatever its delay.
func (t *Tracker[K, V]) Update(src Source, put iter.Seq2[K, V], del iter.Seq[K]) Revision {
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

// Synced says that the wish of src is complete. When all sources are, what
// nobody wanted in this life is removed.
func (t *Tracker[K, V]) Synced(src Source) {
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
func (t *Tracker[K, V]) Unsynced() []Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.without(t.synced)
}

// Silent returns the sources that have not said anything yet: what they want
// is not known. One that has spoken may have more to say; see
// [Tracker.Unsynced].
func (t *Tracker[K, V]) Silent() []Source {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.without(t.spoken)
}

// without returns the sources that are not in a set.
func (t *Tracker[K, V]) without(set map[Source]bool) []Source {
	var out []Source
	for _, s := range t.cfg.Sources {
		if !set[s] {
			out = append(out, s)
		}
	}
	return out
}

func (t *Tracker[K, V]) next(src Source) Revision {
	t.index(src)
	t.spoken[src] = true
	t.counter++
	return Revision(t.counter<<8 | uint64(src))
}

// index returns the place of src among the sources.
func (t *Tracker[K, V]) index(src Source) int {
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
		if tr, ok := t.ghosts[k]; ok {
			e.trouble = &trouble{losses: tr.losses, lastLoss: tr.lastLoss}
			delete(t.ghosts, k)
		}
		t.entries[k] = e
	}
	return e
}

// wishes reports whether src wants the key.
func (e *entry[K, V]) wishes(src Source) bool {
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

func (t *Tracker[K, V]) put(e *entry[K, V], src Source, v V, rev Revision) {
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

// win makes v of src the wish that counts.
func (t *Tracker[K, V]) win(e *entry[K, V], src Source, v V) {
	if e.wanted && e.want == v {
		e.src = src
		return
	}
	e.wanted, e.ours, e.src, e.want = true, true, src, v
	e.state, e.since = Pending, t.cfg.Now()
	t.forgive(e)
}

// lose keeps v of src for when the winner withdraws.
func (e *entry[K, V]) lose(src Source, v V) {
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
	e.losers = append(e.losers, wish[V]{})
	copy(e.losers[i+1:], e.losers[i:])
	e.losers[i] = wish[V]{src, v}
}

func (e *entry[K, V]) dropLoser(src Source) {
	for i, w := range e.losers {
		if w.src == src {
			e.losers = append(e.losers[:i], e.losers[i+1:]...)
			return
		}
	}
}

func (t *Tracker[K, V]) withdraw(e *entry[K, V], src Source, rev Revision) {
	if !e.wishes(src) {
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
		t.forgive(e)
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
			t.lost(e)
		case stray:
			drift = append(drift, e.key)
		case e.done && e.trouble != nil && t.cfg.Now().Sub(e.trouble.lastLoss) > t.cfg.MaxBackoff:
			t.forgive(e)
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
	t.forgetGhosts()
	t.notify()
	return drift
}

// SetHave says that k is there with value v. It returns true if k was as it
// should be before, which for a key that nobody wants is absent, and is not
// now. It is true too of a key that was never wanted and comes between the first
// listing and the sweep, for which it waits as what an earlier life left does.
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
func (t *Tracker[K, V]) LoseWhere(lost func(K, V) bool) []K {
	t.mu.Lock()
	defer t.mu.Unlock()
	var drift []K
	var zero V
	for _, e := range t.entries {
		if !e.exists || !lost(e.key, e.have) {
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
		t.lost(e)
	}
	return true
}

// Losses returns how often in a row somebody undid k, and when it is put right
// again if that is held back.
func (t *Tracker[K, V]) Losses(k K) (n int, due time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[k]; e != nil && e.trouble != nil {
		return e.trouble.losses, e.trouble.due
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

// Want returns the wish that counts for k.
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

// Trouble returns why k was refused last, or what it waits for; nil if it has
// no trouble.
func (t *Tracker[K, V]) Trouble(k K) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.entries[k]; e != nil && e.trouble != nil {
		return e.trouble.err
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
