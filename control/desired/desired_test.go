package desired

import (
	"iter"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

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

// TestModel holds the objects to a list of users: whoever comes and goes in whatever order,
// a key is desired while it has users, as the least of what they want, and what is handed
// over brings who takes it to the same state.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := New()
		var users []dataplane.Object
		kernel := map[dataplane.Key]dataplane.Object{}
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			switch n := rapid.IntRange(0, 4).Draw(t, "step"); {
			case n == 0:
				maps.Copy(kernel, s.Put)
				maps.DeleteFunc(kernel, func(k dataplane.Key, _ dataplane.Object) bool { _, gone := s.Del[k]; return gone })
				s.HandedOver()
				want := map[dataplane.Key]dataplane.Object{}
				for _, o := range users {
					if best, ok := want[o.Key()]; !ok || o.String() < best.String() {
						want[o.Key()] = o
					}
				}
				if got := maps.Collect(pairs(s)); !maps.Equal(got, want) || !maps.Equal(kernel, want) || s.Len() != len(want) {
					t.Fatalf("users %v: desired %v, handed over %v, want %v", users, got, kernel, want)
				}
			case n == 1 && len(users) > 0:
				i := rapid.IntRange(0, len(users)-1).Draw(t, "who")
				s.Release(users[i])
				users = slices.Delete(users, i, i+1)
			default:
				o := dataplane.Sysctl{Name: rapid.SampledFrom([]string{"x", "y"}).Draw(t, "key"), Value: rapid.SampledFrom([]string{"1", "2", "3"}).Draw(t, "value")}
				s.Acquire(o)
				users = append(users, o)
			}
		}
	})
}

func pairs(s *Objects) iter.Seq2[dataplane.Key, dataplane.Object] {
	return func(yield func(dataplane.Key, dataplane.Object) bool) {
		for o := range s.All() {
			if !yield(o.Key(), o) {
				return
			}
		}
	}
}
