package vrouter

import (
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// objects is what the kernel is to have apart from routes, with the number of
// users of each object, and what of it changed since the last hand-over.
type objects struct {
	objs map[dataplane.Key]*sharedObject
	put  map[dataplane.Key]dataplane.Object
	del  set[dataplane.Key]
}

func newObjects() *objects {
	return &objects{objs: map[dataplane.Key]*sharedObject{}, put: map[dataplane.Key]dataplane.Object{}, del: set[dataplane.Key]{}}
}

// sharedObject is a desired object with its users. Two users may disagree about
// one key, when two nodes claim one VTEP address, say: then the same one wins
// whatever the order in which the claims came.
type sharedObject struct {
	obj      dataplane.Object
	variants []variant
}

type variant struct {
	obj  dataplane.Object
	refs int
}

// acquire makes o desired, with one more user.
func (s *objects) acquire(o dataplane.Object) {
	k := o.Key()
	w, ok := s.objs[k]
	if !ok {
		w = &sharedObject{}
		s.objs[k] = w
	}
	if i := slices.IndexFunc(w.variants, func(v variant) bool { return v.obj == o }); i >= 0 {
		w.variants[i].refs++
		return
	}
	w.variants = append(w.variants, variant{o, 1})
	s.elect(k, w)
}

// release takes back one [table.acquire] of o.
func (s *objects) release(o dataplane.Object) {
	k := o.Key()
	w := s.objs[k]
	i := slices.IndexFunc(w.variants, func(v variant) bool { return v.obj == o })
	if w.variants[i].refs--; w.variants[i].refs > 0 {
		return
	}
	w.variants = slices.Delete(w.variants, i, i+1)
	if len(w.variants) > 0 {
		s.elect(k, w)
		return
	}
	delete(s.objs, k)
	delete(s.put, k)
	s.del[k] = struct{}{}
}

func (s *objects) elect(k dataplane.Key, w *sharedObject) {
	best := w.variants[0].obj
	for _, v := range w.variants[1:] {
		if v.obj.String() < best.String() {
			best = v.obj
		}
	}
	if best != w.obj {
		w.obj = best
		s.put[k] = best
		delete(s.del, k)
	}
}
