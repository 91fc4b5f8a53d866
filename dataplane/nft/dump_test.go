package nft

import (
	"errors"
	"testing"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

func TestUndisturbed(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for _, tt := range []struct {
		name        string
		interrupted int // reads that others interrupt before the last one
		last, want  error
		calls       int
	}{
		{"quiet", 0, nil, nil, 1},
		{"others come in between", 3, nil, nil, 4},
		{"an error is told at once", 1, refused, refused, 2},
		{"others never end", 1000, nil, nl.ErrInterrupted, 10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			err := undisturbed(func() error {
				if calls++; calls <= tt.interrupted {
					return nl.ErrInterrupted
				}
				return tt.last
			})
			if !errors.Is(err, tt.want) || calls != tt.calls {
				t.Errorf("%d calls, %v; want %d, %v", calls, err, tt.calls, tt.want)
			}
		})
	}
}
