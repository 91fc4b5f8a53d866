package attach

import (
	"maps"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
)

// maxRetry is the longest pause between tries of [Attacher.Run].
const maxRetry = time.Minute

// schedule says when to try again what failed: each attachment has a back-off of
// its own, so that one that keeps failing delays no other. The zero ID is
// [reclaimer]'s.
type schedule struct {
	changed async.Signal // a try is to come that was not before
	first   time.Duration

	mu sync.Mutex
	by map[ID]retry
}

type retry struct {
	backoff async.Backoff
	at      time.Time
	awaits  bool // nothing failed: see schedule.await
}

func newSchedule(first time.Duration) *schedule {
	return &schedule{changed: async.NewSignal(), first: first, by: make(map[ID]retry)}
}

// failed has attachments tried again after a pause: something of them failed just
// now, and trying at once would only repeat it.
func (s *schedule) failed(ids ...ID) { s.failedAt(time.Now(), ids...) }

func (s *schedule) failedAt(now time.Time, ids ...ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		r, ok := s.by[id]
		if ok && r.at.After(now) {
			continue // more failures do not put off a try that is to come
		}
		if !ok {
			r.backoff = async.Backoff{Min: s.first, Max: maxRetry}
		}
		r.at, r.awaits = now.Add(r.backoff.Next()), false
		s.by[id] = r
	}
	s.changed.Set()
}

// await has an attachment tried after a time, for something that is to come by then.
func (s *schedule) await(id ID, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.by[id] = retry{backoff: async.Backoff{Min: s.first, Max: maxRetry}, at: time.Now().Add(d), awaits: true}
	s.changed.Set()
}

// awaited returns what waits so.
func (s *schedule) awaited() (ids []ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, r := range s.by {
		if r.awaits {
			ids = append(ids, id)
		}
	}
	return ids
}

// armed reports whether a try is to come or due.
func (s *schedule) armed(id ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.by[id]
	return ok
}

// waits reports whether a try is to come and not due.
func (s *schedule) waits(id ID) bool { return s.waitsAt(time.Now(), id) }

func (s *schedule) waitsAt(now time.Time, id ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.by[id].at.After(now)
}

// gather has others go with the first of some attachments whose time has come: of those that
// wait for something, the ones that may.
func (s *schedule) gather(all map[ID]record, of func(record) bool, later func(ID) bool, may func(record) bool) {
	due := false
	for id, r := range all {
		due = due || of(r) && !later(id)
	}
	if !due {
		return
	}
	for _, id := range s.awaited() {
		if r := all[id]; of(r) && may(r) {
			s.done(id)
		}
	}
}

// done forgets past failures of an attachment: what is to be done about it now is
// something else.
func (s *schedule) done(id ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.by, id)
}

// clear forgets all past failures, and not what waits for something else.
func (s *schedule) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.by, func(_ ID, r retry) bool { return !r.awaits })
}

// tried forgets what was due at a time and has not failed since: it was tried, or
// is there no more.
func (s *schedule) tried(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.by, func(_ ID, r retry) bool { return !r.at.After(at) })
}

// next returns when the first try is due.
func (s *schedule) next() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.by {
		if !ok || r.at.Before(at) {
			at, ok = r.at, true
		}
	}
	return at, ok
}
