package desired

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
)

// TestDisagreement: of two objects with one key the same counts in whatever order they
// come, and the other takes its place when its last user is gone.
func TestDisagreement(t *testing.T) {
	t.Parallel()
	a, b := dataplane.Sysctl{Name: "x", Value: "1"}, dataplane.Sysctl{Name: "x", Value: "2"}
	for _, order := range [][]dataplane.Object{{a, b, a}, {b, a, a}, {a, a, b}} {
		s := New()
		for _, o := range order {
			s.Acquire(o)
		}
		if got := slices.Collect(s.All()); !slices.Equal(got, []dataplane.Object{a}) || s.Len() != 1 {
			t.Errorf("%v: desired %v, want %v", order, got, a)
		}
		s.HandedOver()
		s.Release(a)
		if len(s.Put)+len(s.Del) != 0 {
			t.Errorf("%v: one of two users gone: put %v, deleted %v", order, s.Put, s.Del)
		}
		s.Release(a)
		if want := map[dataplane.Key]dataplane.Object{a.Key(): b}; !maps.Equal(s.Put, want) || len(s.Del) != 0 {
			t.Errorf("%v: both gone: put %v, deleted %v, want %v", order, s.Put, s.Del, want)
		}
	}
}

// TestChanges: what is handed over is what changed, once, and what was cut again.
func TestChanges(t *testing.T) {
	t.Parallel()
	a, b, c := dataplane.NextHop{ID: 1}, dataplane.NextHop{ID: 2}, dataplane.NextHop{ID: 3}
	s := New()
	steps := []struct {
		what string
		do   func()
		put  []dataplane.Key
		del  []dataplane.Key
	}{
		{"acquired", func() { s.Acquire(a); s.Acquire(b) }, []dataplane.Key{a.Key(), b.Key()}, nil},
		{"nothing", func() {}, nil, nil},
		{"swapped", func() { s.Swap([]dataplane.Object{a, b}, []dataplane.Object{b, c}) }, []dataplane.Key{c.Key()}, []dataplane.Key{a.Key()}},
		{"back and forth", func() { s.Release(c); s.Acquire(c) }, []dataplane.Key{c.Key()}, nil},
		{"come and gone", func() { s.Acquire(a); s.Release(a) }, nil, []dataplane.Key{a.Key()}},
		{"again", func() { s.Again(b.Key()); s.Again(a.Key()) }, []dataplane.Key{b.Key()}, nil},
	}
	for _, st := range steps {
		st.do()
		put, del := slices.SortedFunc(maps.Keys(s.Put), dataplane.CompareKeys), slices.SortedFunc(maps.Keys(s.Del), dataplane.CompareKeys)
		equal := cmp.Comparer(func(a, b dataplane.Key) bool { return a == b })
		if diff := cmp.Diff(st.put, put, equal) + cmp.Diff(st.del, del, equal); diff != "" {
			t.Errorf("%s (-want +got):\n%s", st.what, diff)
		}
		s.HandedOver()
	}
}
