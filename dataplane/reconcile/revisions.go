package reconcile

import "github.com/routerd/routerd/dataplane"

// phase says how a key counts towards the revision that named it last.
type phase uint8

const (
	phaseNone    phase = iota // nothing to do
	phaseUntried              // not tried since it was named
	phaseWaiting              // waits for something else
	phaseFailed
	phases
)

// revisions counts what is not done of what each call named, and says to who waits for a
// call when that is over.
type revisions struct {
	groups  map[dataplane.Revision]*group
	open    map[dataplane.Source][]dataplane.Revision
	waiters map[*waiter]struct{}
}

// group counts, by phase, the keys that a revision named and that are not
// done.
type group [phases]int

type waiter struct {
	rev   dataplane.Revision
	ready chan struct{}
}

func newRevisions() revisions {
	return revisions{
		groups: make(map[dataplane.Revision]*group), open: make(map[dataplane.Source][]dataplane.Revision),
		waiters: make(map[*waiter]struct{}),
	}
}

// recount moves e from its place in the count of the revision that named it before to
// where it belongs in that of rev.
func (r *revisions) recount(e *entry, rev dataplane.Revision, now phase) {
	if rev == e.rev && now == e.counted() {
		return
	}
	if e.counted() != phaseNone {
		if g := r.groups[e.rev]; g != nil {
			if g[e.counted()]--; *g == (group{}) {
				delete(r.groups, e.rev)
			}
		}
	}
	e.rev = rev
	e.count(now)
	if now != phaseNone && rev != 0 {
		g := r.groups[rev]
		if g == nil {
			g = new(group)
			r.groups[rev] = g
		}
		g[now]++
		if now == phaseUntried {
			r.opened(rev)
		}
	}
}

// opened notes that rev has untried keys.
func (r *revisions) opened(rev dataplane.Revision) {
	src := sourceOf(rev)
	list := r.open[src]
	if n := len(list); n == 0 || list[n-1] < rev {
		r.open[src] = append(list, rev)
	}
}

// resolved reports whether a wait for rev is over: everything that its source
// named up to rev was tried, and what rev itself named does not wait.
func (r *revisions) resolved(rev dataplane.Revision) bool {
	src := sourceOf(rev)
	list := r.open[src]
	for len(list) > 0 {
		if g := r.groups[list[0]]; g != nil && g[phaseUntried] > 0 {
			break
		}
		list = list[1:]
	}
	r.open[src] = list
	if len(list) > 0 && list[0] <= rev {
		return false
	}
	g := r.groups[rev]
	return g == nil || g[phaseUntried] == 0 && (g[phaseWaiting] == 0 || g[phaseFailed] > 0)
}

// await returns who is notified when a wait for rev is over; nil: it is.
func (r *revisions) await(rev dataplane.Revision) *waiter {
	if r.resolved(rev) {
		return nil
	}
	w := &waiter{rev, make(chan struct{})}
	r.waiters[w] = struct{}{}
	return w
}

// notify wakes the waits that are over.
func (r *revisions) notify() {
	for w := range r.waiters {
		if r.resolved(w.rev) {
			delete(r.waiters, w)
			close(w.ready)
		}
	}
}
