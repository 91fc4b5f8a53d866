// Package desired counts which objects the parts of the core want the kernel to
// have, and keeps what changed since that was last handed over. Routes are not
// among them: each is of one part alone, and there may be hundreds of thousands.
package desired

import (
	"iter"
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// Objects is what the kernel is to have apart from routes, with the number of
// users of each object. It is not safe for concurrent use.
type Objects struct {
	// What changed since the last [Objects.HandedOver].
	Put map[dataplane.Key]dataplane.Object
	Del map[dataplane.Key]struct{}

	objs map[dataplane.Key]*shared
}

// New returns no objects.
func New() *Objects {
	return &Objects{objs: map[dataplane.Key]*shared{}, Put: map[dataplane.Key]dataplane.Object{}, Del: map[dataplane.Key]struct{}{}}
}

// shared is a desired object with its users. Two users may disagree about
// one key, when two nodes claim one VTEP address, say: then the same one wins
// whatever the order in which the claims came.
type shared struct {
	obj  dataplane.Object
	refs int
	// variants are all that users want, where they disagree; nil: nowhere, as nearly always.
	variants *[]variant
}

type variant struct {
	obj  dataplane.Object
	refs int
}

// Len is how many objects there are.
func (s *Objects) Len() int { return len(s.objs) }

// All yields the desired objects.
func (s *Objects) All() iter.Seq[dataplane.Object] {
	return func(yield func(dataplane.Object) bool) {
		for _, w := range s.objs {
			if !yield(w.obj) {
				return
			}
		}
	}
}

// Acquire makes o desired, with one more user.
func (s *Objects) Acquire(o dataplane.Object) {
	k := o.Key()
	w, ok := s.objs[k]
	switch {
	case !ok:
		w = &shared{refs: 1}
		s.objs[k] = w
		s.put(k, w, o)
		return
	case w.variants == nil && w.obj == o:
		w.refs++
		return
	case w.variants == nil:
		w.variants = &[]variant{{w.obj, w.refs}}
	}
	if i := w.variant(o); i >= 0 {
		(*w.variants)[i].refs++
		return
	}
	*w.variants = append(*w.variants, variant{o, 1})
	s.elect(k, w)
}

// Release takes back one [Objects.Acquire] of o.
func (s *Objects) Release(o dataplane.Object) {
	k := o.Key()
	w := s.objs[k]
	if w.variants == nil {
		if w.refs--; w.refs > 0 {
			return
		}
		delete(s.objs, k)
		delete(s.Put, k)
		s.Del[k] = struct{}{}
		return
	}
	i := w.variant(o)
	if (*w.variants)[i].refs--; (*w.variants)[i].refs > 0 {
		return
	}
	*w.variants = slices.Delete(*w.variants, i, i+1)
	s.elect(k, w)
}

// variant is where an object is among the variants; -1: it is none.
func (w *shared) variant(o dataplane.Object) int {
	return slices.IndexFunc(*w.variants, func(v variant) bool { return v.obj == o })
}

// Swap acquires the objects of now and then releases those of old, so that one that is
// in both stays.
func (s *Objects) Swap(old, now []dataplane.Object) {
	for _, o := range now {
		s.Acquire(o)
	}
	for _, o := range old {
		s.Release(o)
	}
}

// elect chooses among variants, of which there are some.
func (s *Objects) elect(k dataplane.Key, w *shared) {
	list := *w.variants
	best := list[0]
	for _, v := range list[1:] {
		if v.obj.String() < best.obj.String() {
			best = v
		}
	}
	if len(list) == 1 {
		w.refs, w.variants = best.refs, nil
	}
	if best.obj != w.obj {
		s.put(k, w, best.obj)
	}
}

// put has an object handed over.
func (s *Objects) put(k dataplane.Key, w *shared, o dataplane.Object) {
	w.obj = o
	s.Put[k] = o
	delete(s.Del, k)
}

// Again has an object handed over once more, if it is desired: the kernel may not have
// it.
func (s *Objects) Again(k dataplane.Key) {
	if w, ok := s.objs[k]; ok {
		s.Put[k] = w.obj
	}
}

// HandedOver forgets what changed.
func (s *Objects) HandedOver() {
	s.Put, s.Del = map[dataplane.Key]dataplane.Object{}, map[dataplane.Key]struct{}{}
}
