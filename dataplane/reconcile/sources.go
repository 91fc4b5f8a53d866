package reconcile

import "github.com/routerd/routerd/dataplane"

// sources are those who want something: how far each is in saying what, and the numbers of
// their calls.
type sources struct {
	order  []dataplane.Source
	places map[dataplane.Source]int
	spoken map[dataplane.Source]bool
	synced map[dataplane.Source]bool
	calls  uint64
}

func newSources(order []dataplane.Source) sources {
	s := sources{
		order: order, places: make(map[dataplane.Source]int, len(order)),
		spoken: make(map[dataplane.Source]bool), synced: make(map[dataplane.Source]bool),
	}
	for i, src := range order {
		s.places[src] = i
	}
	return s
}

// place is where a source is in the order.
func (s *sources) place(src dataplane.Source) int {
	i, ok := s.places[src]
	if !ok {
		panic("reconcile: unknown source")
	}
	return i
}

// next numbers a call of a source.
func (s *sources) next(src dataplane.Source) dataplane.Revision {
	s.place(src)
	s.spoken[src] = true
	s.calls++
	return dataplane.Revision(s.calls<<8 | uint64(src))
}

// last is not less than the number of any call so far, and less than those of calls to come.
func (s *sources) last() dataplane.Revision { return dataplane.Revision(s.calls<<8 | 0xff) }

// said notes that a source has said all that it wants, and reports whether now all have.
func (s *sources) said(src dataplane.Source) (all bool) {
	s.place(src)
	s.spoken[src], s.synced[src] = true, true
	return len(s.synced) == len(s.order)
}

// without returns the sources that are not in a set.
func (s *sources) without(set map[dataplane.Source]bool) []dataplane.Source {
	var out []dataplane.Source
	for _, src := range s.order {
		if !set[src] {
			out = append(out, src)
		}
	}
	return out
}

// sourceOf is the source of a call: the low byte of its number, so that to wait
// for one source need not be to wait for another.
func sourceOf(rev dataplane.Revision) dataplane.Source { return dataplane.Source(rev & 0xff) }
