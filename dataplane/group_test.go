package dataplane_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

func TestGroupMembers(t *testing.T) {
	for want, in := range map[string][]dataplane.GroupMember{
		"":             nil,
		"7":            {{ID: 7}},
		"1/2":          {{ID: 2, Weight: 1}, {ID: 1}},
		"1,3/2":        {{ID: 2}, {ID: 1, Weight: 3}},
		"1,5":          {{ID: 1, Weight: 2}, {ID: 1, Weight: 3}},
		"1,255/10":     {{ID: 10}, {ID: 1, Weight: 1000}},
		"1/4294967295": {{ID: 1<<32 - 1}, {ID: 1}},
	} {
		got := dataplane.GroupOf(in...)
		if got.String() != want {
			t.Errorf("GroupOf(%v) = %q, want %q", in, got, want)
		}
		if (got == dataplane.GroupMembers{}) != (len(in) == 0) {
			t.Errorf("GroupOf(%v): is it without members?", in)
		}
	}
}

// What has the same members, in whatever order, is the same.
func TestGroupMembersAreEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gen := func(label string) (in []dataplane.GroupMember, want map[dataplane.NextHopID]int) {
			want = map[dataplane.NextHopID]int{}
			for range rapid.IntRange(0, 4).Draw(t, label) {
				m := dataplane.GroupMember{ID: dataplane.NextHopID(rapid.Uint32Range(1, 3).Draw(t, "id")), Weight: rapid.IntRange(0, 3).Draw(t, "weight")}
				in = append(in, m)
				want[m.ID] += max(1, m.Weight)
			}
			return in, want
		}
		in, want := gen("n")
		other, otherWant := gen("m")
		a := dataplane.GroupOf(in...)
		got := map[dataplane.NextHopID]int{}
		last := dataplane.NextHopID(0)
		for m := range a.All() {
			if m.ID <= last {
				t.Fatalf("%s: %d after %d", a, m.ID, last)
			}
			got[m.ID], last = m.Weight, m.ID
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
		if equal := a == dataplane.GroupOf(other...); equal != maps.Equal(want, otherWant) {
			t.Fatalf("%s and %s: equal %v", a, dataplane.GroupOf(other...), equal)
		}
		if a != dataplane.GroupOf(slices.Collect(a.All())...) {
			t.Fatalf("%s is not the set of its members", a)
		}
	})
}
