package dataplane_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

func TestGroupMembers(t *testing.T) {
	for want, in := range map[dataplane.GroupMembers][]dataplane.GroupMember{
		"":         nil,
		"7":        {{ID: 7}},
		"1/2":      {{ID: 2, Weight: 1}, {ID: 1}},
		"1,3/2":    {{ID: 2}, {ID: 1, Weight: 3}},
		"1,5":      {{ID: 1, Weight: 2}, {ID: 1, Weight: 3}},
		"1,255/10": {{ID: 10}, {ID: 1, Weight: 1000}},
	} {
		if got := dataplane.GroupOf(in...); got != want {
			t.Errorf("GroupOf(%v) = %q, want %q", in, got, want)
		}
	}
	for _, s := range []dataplane.GroupMembers{"0", "2/1", "1/1", "1,1", "1,0", "1,256", "1,", "a", "1/", "4294967296", "+1", " 1"} {
		if m, err := s.Parse(); err == nil {
			t.Errorf("Parse(%q) = %v, want an error", s, m)
		}
	}
}

func TestGroupMembersRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var in []dataplane.GroupMember
		for range rapid.IntRange(0, 5).Draw(t, "n") {
			in = append(in, dataplane.GroupMember{
				ID: dataplane.NextHopID(rapid.Uint32Range(1, 9).Draw(t, "id")), Weight: rapid.IntRange(0, 300).Draw(t, "weight"),
			})
		}
		m := dataplane.GroupOf(in...)
		list, err := m.Parse()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(m, dataplane.GroupOf(list...)); diff != "" {
			t.Fatal(diff)
		}
	})
}
