package conn

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestOtherAt: each of a peer's other passwords has two turns among the first
// retransmissions, and what follows has the one that was heard.
func TestOtherAt(t *testing.T) {
	t.Parallel()
	for others, want := range [][]int{{0, 0, 0, 0, 0, 0}, {0, 0, 1, 0, 1, 0, 0, 0}, {0, 0, 1, 2, 0, 1, 2, 0, 0, 0}} {
		var got []int
		for unheard := range want {
			got = append(got, otherAt(unheard, others))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d others (-want +got):\n%s", others, diff)
		}
	}
}
