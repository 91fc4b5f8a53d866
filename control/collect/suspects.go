package collect

import (
	"hash/maphash"
	"time"
)

// maxSuspects bounds what a look remembers, and so the memory: each takes about
// fifty bytes. What is over is found when these are gone. A leaked block has
// about four: an address, itself, the claim on it and a handle.
const maxSuspects = 200_000

// suspect is what was seen of a leak.
type suspect struct {
	version uint64        // what it was: an address's sequence, a key's revision
	first   time.Duration // when it was seen first, since the first of all
	round   uint32        // of the last look that saw it
}

// suspects are the leaks in sight, by a hash of their names. It decides only,
// and is not safe for concurrent use.
type suspects struct {
	seed  maphash.Seed
	start time.Time // when something was seen first; its monotonic part counts: the host's clock may jump
	round uint32
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
	if s.start.IsZero() {
		s.start = now
	}
	at := now.Sub(s.start)
	id := maphash.String(s.seed, name)
	have, ok := s.known[id]
	switch {
	case !ok && len(s.known) >= maxSuspects:
		return false
	case !ok || have.version != version:
		s.known[id] = suspect{version: version, first: at, round: s.round}
		return false
	case have.round == s.round:
		return false // twice in one look: written meanwhile
	}
	have.round = s.round
	s.known[id] = have
	return at-have.first >= grace
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

// clear forgets all: a lease that was lost and won again begins anew.
func (s *suspects) clear() { clear(s.known) }
