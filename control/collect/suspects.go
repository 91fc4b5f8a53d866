package collect

import (
	"hash/maphash"
	"time"
)

// maxSuspects bounds what a look remembers, and so the memory: each takes about
// a hundred bytes. What is over is found by the next look.
const maxSuspects = 50_000

// suspect is what was seen of a leak.
type suspect struct {
	version uint64    // what it was: an address's sequence, a key's revision
	first   time.Time // when it was seen first
	round   uint64    // of the last look that saw it
}

// suspects are the leaks in sight, by a hash of their names. It decides only,
// and is not safe for concurrent use.
type suspects struct {
	seed  maphash.Seed
	round uint64
	known map[uint64]suspect
}

func newSuspects() *suspects {
	return &suspects{seed: maphash.MakeSeed(), known: map[uint64]suspect{}}
}

// begin starts a look.
func (s *suspects) begin() { s.round++ }

// see notes a suspect and reports whether it is due: seen by an earlier look,
// unchanged, and grace has passed since.
func (s *suspects) see(name string, version uint64, now time.Time, grace time.Duration) bool {
	id := maphash.String(s.seed, name)
	have, ok := s.known[id]
	switch {
	case !ok && len(s.known) >= maxSuspects:
		return false
	case !ok || have.version != version:
		s.known[id] = suspect{version: version, first: now, round: s.round}
		return false
	case have.round == s.round:
		return false // twice in one look: written meanwhile
	}
	have.round = s.round
	s.known[id] = have
	return now.Sub(have.first) >= grace
}

// knows reports whether an earlier look saw a suspect.
func (s *suspects) knows(name string) bool {
	_, ok := s.known[maphash.String(s.seed, name)]
	return ok
}

// end forgets what the look did not see any more.
func (s *suspects) end() {
	for id, have := range s.known {
		if have.round != s.round {
			delete(s.known, id)
		}
	}
}

// clear forgets all: an office lost and won again begins anew.
func (s *suspects) clear() { clear(s.known) }
