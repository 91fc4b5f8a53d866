package ownership

import (
	"net/netip"
	"strings"
	"testing"
)

// TestCheck: the checker finds what it is for.
func TestCheck(t *testing.T) {
	t.Parallel()
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for _, tt := range []struct {
		name   string
		events []event
		wrong  string // in the only complaint; empty: none
		left   int
	}{
		{"one after the other", []event{{a, "x", true}, {a, "x", false}, {a, "y", true}}, "", 1},
		{"two addresses", []event{{a, "x", true}, {b, "y", true}}, "", 2},
		{"two owners", []event{{a, "x", true}, {a, "y", true}}, "10.0.0.1 is given to y while x owns it", 1},
		{"the same twice", []event{{a, "x", true}, {a, "x", true}}, "while x owns it", 1},
		{"another's given up", []event{{a, "x", true}, {a, "y", false}}, "y gives up 10.0.0.1", 1},
		{"nobody's given up", []event{{a, "x", false}}, "x gives up", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			left, wrong := check(tt.events)
			if len(left) != tt.left || len(wrong) != min(1, len(tt.wrong)) || len(wrong) == 1 && !strings.Contains(wrong[0], tt.wrong) {
				t.Errorf("left %v, wrong %q", left, wrong)
			}
		})
	}
}
