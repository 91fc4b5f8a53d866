package reconcile

import (
	"maps"
	"slices"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

// TestRemovals: each key that is due to be removed counts once by what there is of it, also one
// that was wanted again for a while and so stands in its queue twice, and nothing else does.
func TestRemovals(t *testing.T) {
	t.Parallel()
	src := dataplane.SourceCore
	tr := New(Config[string, int]{Sources: []dataplane.Source{src}})
	put := func(want map[string]int) { tr.Update(src, maps.All(want), slices.Values([]string(nil))) }
	del := func(keys ...string) { tr.Update(src, maps.All(map[string]int(nil)), slices.Values(keys)) }
	put(map[string]int{"a": 1, "b": 1, "c": 2, "d": 1})
	tr.Synced(src)
	for _, o := range tr.Due(0, false, 10) {
		tr.Report([]Result[string, int]{{Op: o}})
	}
	count := func(want map[int]int) {
		t.Helper()
		got := map[int]int{}
		tr.Removals(0, func(have, n int) { got[have] += n })
		if !maps.Equal(got, want) {
			t.Errorf("removals by value %v, want %v", got, want)
		}
	}
	count(map[int]int{})
	del("a", "c", "b")
	count(map[int]int{1: 2, 2: 1})
	put(map[string]int{"a": 1}) // as it is there
	count(map[int]int{1: 1, 2: 1})
	del("a")
	count(map[int]int{1: 2, 2: 1})
	put(map[string]int{"c": 3}) // to be changed
	count(map[int]int{1: 2})
	for len(tr.Due(0, true, 10)) > 0 {
	}
	count(map[int]int{})
}
