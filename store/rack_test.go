package store

import "testing"

func TestGroupOf(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		labels   map[string]string
		by, want string
	}{
		{map[string]string{LabelRack: "r1", LabelZone: "z1"}, LabelRack, "r1"},
		{map[string]string{LabelZone: "z1"}, LabelRack, "z1"},
		{map[string]string{LabelRack: "", LabelZone: "z1"}, LabelRack, "z1"},
		{map[string]string{LabelRack: "r1"}, LabelZone, ""},
		{map[string]string{LabelZone: "z1"}, "row", ""},
		{map[string]string{"row": "a"}, "row", "a"},
		{nil, LabelRack, ""},
	} {
		if got := GroupOf(tt.labels, tt.by); got != tt.want {
			t.Errorf("%v by %s: %q, want %q", tt.labels, tt.by, got, tt.want)
		}
	}
}
