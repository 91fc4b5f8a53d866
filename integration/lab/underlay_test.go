package lab

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

func TestAddLinkWaitsForModule(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		err    error
		until  time.Duration // err is the answer for so long, then success
		want   error
		within time.Duration
	}{
		{"there", nil, 0, nil, 0},
		{"being loaded", unix.EOPNOTSUPP, 100 * time.Millisecond, nil, 120 * time.Millisecond},
		{"lacking", unix.EOPNOTSUPP, time.Hour, unix.EOPNOTSUPP, 320 * time.Millisecond},
		{"another error", unix.EEXIST, time.Hour, unix.EEXIST, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				err := addLink(300*time.Millisecond, func() error {
					if time.Since(begin) < tt.until {
						return tt.err
					}
					return nil
				})
				if !errors.Is(err, tt.want) {
					t.Errorf("got %v, want %v", err, tt.want)
				}
				if d := time.Since(begin); d > tt.within {
					t.Errorf("took %v, want at most %v", d, tt.within)
				}
			})
		})
	}
}
