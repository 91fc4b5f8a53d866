package reconcile

import (
	"container/heap"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// Op is one thing to do: make Key be Want, or remove it when it is not Wanted.
type Op[K comparable, V comparable] struct {
	Key    K
	Want   V
	Wanted bool
	Have   V    // what there is now
	Exists bool // whether Have counts

	Attempts int // refusals in a row so far

	entry *entry // of the key, unless it was dropped meanwhile
}

// Outcome says what became of an [Op].
type Outcome uint8

// The outcomes.
const (
	// Succeeded: it is done, or was done already.
	Succeeded Outcome = iota
	// Refused: it was tried and failed; it is tried again after a delay that
	// grows with each refusal.
	Refused
	// Blocked: it waits for something else and is not tried again before
	// [Tracker.Retry] or [Tracker.RetryWaiting].
	Blocked
	// Lost: Have was wrong, there is nothing of that key. It is due again at
	// once, as new.
	Lost
	// Postponed: it was not tried and is due again at once.
	Postponed
)

// Result reports an [Op].
type Result[K comparable, V comparable] struct {
	Op      Op[K, V]
	Outcome Outcome
	Err     error // why it was Refused, or what Blocked waits for
}

// Due takes at most limit pieces of work of one class that can be done now:
// removals if remove is set, else all others. Better sources come first. The
// caller must report each.
func (t *Tracker[K, V]) Due(class int, remove bool, limit int) []Op[K, V] {
	return t.AppendDue(nil, class, remove, limit)
}

// AppendDue is [Tracker.Due] that appends to out, for who takes thousands again and again.
func (t *Tracker[K, V]) AppendDue(out []Op[K, V], class int, remove bool, limit int) []Op[K, V] {
	t.lock()
	defer t.mu.Unlock()
	t.wake()
	limit += len(out)
	n := len(t.cfg.Sources)
	first := t.queue(class, remove, 0)
	for q := first; q < first+n; q++ {
		ready := &t.ready[q]
		out = slices.Grow(out, min(limit-len(out), ready.Len()))
		for ready.Len() > 0 && len(out) < limit {
			if e := ready.Next(); e.valid(q) {
				e.set(isQueued, false)
				out = append(out, t.op(e))
			}
		}
	}
	return out
}

func (t *Tracker[K, V]) op(e *entry) Op[K, V] {
	o := Op[K, V]{Key: t.key(e), Want: t.wants(e), Wanted: e.wanted(), Have: t.has(e), Exists: e.exists(), entry: e}
	if e.failing() {
		o.Attempts = t.failure(e).attempts
	}
	return o
}

// Removals counts the keys of a class that can be removed now, by what there is of them: each
// is called once for a value that keys share.
func (t *Tracker[K, V]) Removals(class int, each func(have V, n int)) {
	t.lock()
	defer t.mu.Unlock()
	t.wake()
	counts := map[uint32]int{}
	t.epoch++
	first := t.queue(class, true, 0)
	for q := first; q < first+len(t.cfg.Sources); q++ {
		last, n := uint32(0), 0
		for e := range t.ready[q].All() {
			if !e.valid(q) || e.mark == t.epoch { // it may stand there twice
				continue
			}
			e.mark = t.epoch
			if e.have != last {
				counts[last] += n
				last, n = e.have, 0
			}
			n++
		}
		counts[last] += n
	}
	for have, n := range counts {
		if n > 0 {
			each(t.values.Value(have), n)
		}
	}
}

// HasDue reports whether there is work of that kind, of any class, that can be
// done now.
func (t *Tracker[K, V]) HasDue(remove bool) bool { return t.HasDueIn(remove, 0, t.cfg.Classes) }

// HasDueIn is [Tracker.HasDue] for the classes from one to before another.
func (t *Tracker[K, V]) HasDueIn(remove bool, from, to int) bool {
	t.lock()
	defer t.mu.Unlock()
	t.wake()
	n := len(t.cfg.Sources)
	for class := from; class < to; class++ {
		first := t.queue(class, remove, 0)
		for q := first; q < first+n; q++ {
			for ready := &t.ready[q]; ready.Len() > 0; ready.Next() {
				if ready.First().valid(q) {
					return true
				}
			}
		}
	}
	return false
}

// Next returns when the next delayed work is due.
func (t *Tracker[K, V]) Next() (time.Time, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.delayed) > 0 {
		d := t.delayed[0]
		if tr := t.failure(d.entry); tr != nil && tr.due.Equal(d.due) {
			return d.due, true
		}
		heap.Pop(&t.delayed)
	}
	return time.Time{}, false
}

// Stuck returns what is there of one class, is not as it should be, and was
// refused or waits. The ops are for reading only.
func (t *Tracker[K, V]) Stuck(class int) []Op[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	seen := make(map[*entry]struct{})
	var out []Op[K, V]
	see := func(e *entry) {
		if e.done() || !e.exists() || e.queued() || t.class(e) != class {
			return
		}
		if _, ok := seen[e]; !ok {
			seen[e] = struct{}{}
			out = append(out, t.op(e))
		}
	}
	for e := range t.waiting {
		see(e)
	}
	for _, d := range t.delayed {
		see(d.entry)
	}
	return out
}

// Report says what became of work that [Tracker.Due] handed out. A result
// that a later call has superseded changes only what there is.
func (t *Tracker[K, V]) Report(results []Result[K, V]) {
	t.lock()
	defer t.mu.Unlock()
	for i := range results {
		t.report(&results[i])
	}
	t.revisions.notify()
}

func (t *Tracker[K, V]) report(r *Result[K, V]) {
	e := r.Op.entry
	if p, ok := t.pack(r.Op.Key); e == nil || !ok || e.key != p { // a record that was dropped has no key, or another's
		e = t.find(r.Op.Key)
	}
	if e == nil {
		if r.Outcome != Succeeded || !r.Op.Wanted {
			return
		}
		// Withdrawn while it was done: it is there now, and to be removed.
		e = t.entry(r.Op.Key)
		e.set(isOurs, true)
	}
	var zero V
	same := e.wanted() == r.Op.Wanted && (!e.wanted() || t.wants(e) == r.Op.Want)
	switch r.Outcome {
	case Succeeded:
		if tr := t.failure(e); same && tr != nil && tr.drifts == 0 {
			t.clearFailure(e)
		} else if same && tr != nil {
			// Remember that others keep changing it.
			*tr = failure{drifts: tr.drifts, lastDrift: tr.lastDrift}
			delete(t.waiting, e)
		}
		if r.Op.Wanted {
			t.setHave(e, r.Op.Key, r.Op.Want, true)
		} else {
			t.setHave(e, r.Op.Key, zero, false)
		}
	case Lost:
		t.setHave(e, r.Op.Key, zero, false)
	case Postponed:
		t.settle(e)
	case Refused, Blocked:
		if same {
			t.fail(e, r)
		}
		t.settle(e)
	}
}

func (t *Tracker[K, V]) fail(e *entry, r *Result[K, V]) {
	tr := t.fails(e)
	tr.err = r.Err
	if r.Outcome == Blocked {
		tr.waiting, tr.failed, tr.due = true, false, time.Time{}
		t.waiting[e] = struct{}{}
		return
	}
	tr.attempts++
	tr.failed = true
	t.delay(e, t.backoff(tr.attempts))
}

// backoff is the delay before try number n+1: doubling from the least to the
// most, and up to a fifth less of it at random, so that what failed together
// is not tried together for ever.
func (t *Tracker[K, V]) backoff(n int) time.Duration {
	d := t.cfg.MaxBackoff
	if n < 32 {
		d = min(d, t.cfg.MinBackoff<<(n-1))
	}
	return d - time.Duration(t.cfg.Jitter()*float64(d)/5)
}

func (t *Tracker[K, V]) delay(e *entry, d time.Duration) {
	tr := t.failure(e)
	tr.due = t.cfg.Now().Add(d)
	heap.Push(&t.delayed, delayed{tr.due, e})
}

// Others that change a key more often than CalmLosses times with less than
// calmAfter in between make us wait before putting it back: two daemons that
// both insist would otherwise keep the machine busy for ever.
const (
	// CalmLosses is how often in a row a key is put right at once.
	CalmDrifts = 3
	calmAfter  = 2 * time.Second
)

// forgetRemoved forgets the keys that no other program has added again for long.
func (t *Tracker[K, V]) forgetRemoved() {
	for k, tr := range t.removed {
		if t.cfg.Now().Sub(tr.lastDrift) > 2*t.cfg.MaxBackoff {
			delete(t.removed, k)
		}
	}
}

// undone notes that another program undid e.
func (t *Tracker[K, V]) undone(e *entry) {
	tr := t.fails(e)
	now := t.cfg.Now()
	if now.Sub(tr.lastDrift) > max(calmAfter, 2*t.cfg.MinBackoff<<min(tr.drifts, 10)) {
		tr.drifts = 0
	}
	tr.drifts++
	tr.lastDrift = now
	if n := tr.drifts - CalmDrifts; n > 0 {
		e.set(isQueued, false)
		t.delay(e, t.backoff(n))
	}
}

// Retry makes k due at once if it waits or is delayed.
func (t *Tracker[K, V]) Retry(keys ...K) {
	t.lock()
	defer t.mu.Unlock()
	for _, k := range keys {
		if e := t.find(k); e != nil {
			t.retry(e)
		}
	}
}

// RetryWaiting makes all keys due that were [Blocked].
func (t *Tracker[K, V]) RetryWaiting() {
	t.lock()
	defer t.mu.Unlock()
	for e := range t.waiting {
		t.retry(e)
	}
}

func (t *Tracker[K, V]) retry(e *entry) {
	if tr := t.failure(e); tr != nil {
		tr.waiting, tr.failed, tr.due = false, false, time.Time{}
		delete(t.waiting, e)
		t.settle(e)
	}
}

// wake makes due what was delayed until now.
func (t *Tracker[K, V]) wake() {
	now := t.cfg.Now()
	for len(t.delayed) > 0 && !t.delayed[0].due.After(now) {
		d := heap.Pop(&t.delayed).(delayed)
		if tr := t.failure(d.entry); tr != nil && tr.due.Equal(d.due) {
			tr.due = time.Time{}
			t.settle(d.entry)
		}
	}
}

// settle derives what is to be done for e from what is wanted and what there is.
// Whoever changes an entry calls it.
func (t *Tracker[K, V]) settle(e *entry) { t.settleAs(e, e.rev) }

// settleAs is settle after a call that named the key.
func (t *Tracker[K, V]) settleAs(e *entry, rev dataplane.Revision) {
	if e.wanted() {
		e.set(isDone, e.exists() && (e.want == e.have || t.cfg.Equal(t.wants(e), t.has(e))))
	} else {
		e.set(isDone, !e.exists() || !e.ours() && !t.swept)
	}
	tr := t.failure(e)
	state := dataplane.Pending
	switch {
	case e.done():
		state = dataplane.Done
	case tr != nil && tr.failed:
		state = dataplane.Failed
	}
	if state != e.state() {
		t.turned(e, state)
	}
	t.revisions.recount(e, rev, e.phase(tr))
	if e.done() {
		e.set(isQueued, false)
		if !e.wanted() && !e.exists() {
			t.drop(e)
		} else if tr != nil && tr.drifts == 0 {
			t.clearFailure(e)
		}
		return
	}
	if tr != nil && (tr.waiting || !tr.due.IsZero()) {
		e.set(isQueued, false)
		return
	}
	t.enqueue(e)
}

// enqueue puts e where Due finds it. An entry may be in several queues when
// what is wanted changed; all but the right one are skipped.
func (t *Tracker[K, V]) enqueue(e *entry) {
	q := t.place(e)
	if e.valid(q) {
		return
	}
	e.place = uint8(q)
	e.set(isQueued, true)
	t.ready[q].Add(e)
}

// valid reports whether e, found in queue q, is still to be done from there: it, or what
// has its place in the table now.
func (e *entry) valid(q int) bool {
	return e.queued() && int(e.place) == q
}

func (t *Tracker[K, V]) place(e *entry) int {
	i := 0
	if e.wanted() {
		i = t.sources.places[e.src]
	}
	return t.queue(t.class(e), !e.wanted(), i)
}

// class is the class of an entry's key.
func (t *Tracker[K, V]) class(e *entry) int { return int(e.place) / (2 * len(t.cfg.Sources)) }

func (t *Tracker[K, V]) queue(class int, remove bool, src int) int {
	q := class * 2
	if remove {
		q++
	}
	return q*len(t.cfg.Sources) + src
}

type delayed struct {
	due   time.Time
	entry *entry
}

// delays is a heap of delayed entries, the next first. An element whose time
// is no longer that of its entry is stale.
type delays []delayed

func (d delays) Len() int           { return len(d) }
func (d delays) Less(i, j int) bool { return d[i].due.Before(d[j].due) }
func (d delays) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *delays) Push(x any)        { *d = append(*d, x.(delayed)) }
func (d *delays) Pop() any {
	old := *d
	n := len(old) - 1
	x := old[n]
	old[n] = delayed{}
	*d = old[:n]
	return x
}
