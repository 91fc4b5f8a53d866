package workload

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

func TestWhole(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for _, tt := range []struct {
		name        string
		interrupted int // dumps that changes interrupt before the last one
		last, want  error
		calls       int
	}{
		{"quiet", 0, nil, nil, 1},
		{"changes come in between", 3, nil, nil, 4},
		{"an error is told at once", 1, refused, refused, 2},
		{"changes never end", dumpTries, nil, netlink.ErrDumpInterrupted, dumpTries},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			got, err := whole(func() ([]int, error) {
				if calls++; calls <= tt.interrupted {
					return []int{1}, netlink.ErrDumpInterrupted
				}
				return []int{1, 2}, tt.last
			})
			if !errors.Is(err, tt.want) || calls != tt.calls {
				t.Errorf("%d calls, %v; want %d, %v", calls, err, tt.calls, tt.want)
			}
			if diff := cmp.Diff([]int{1, 2}, got); tt.want == nil && diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
		})
	}
}
