package await

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// failed is a test that keeps what it failed with.
type failed string

func (*failed) Helper() {}

func (f *failed) Fatalf(format string, args ...any) { *f = failed(fmt.Sprintf(format, args...)) }

// What never comes fails the test with the last error, after the bound and not
// before it.
func TestNever(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var f failed
		looks, begin := 0, time.Now()
		until(&f, time.Second, "the answer", func() error {
			looks++
			return fmt.Errorf("look %d", looks)
		})
		if want := fmt.Sprintf("the answer: not within 1s: look %d", looks); string(f) != want || looks < 100 {
			t.Errorf("failed with %q, want %q", f, want)
		}
		if d := time.Since(begin); d < time.Second || d > time.Second+2*longestPause {
			t.Errorf("failed after %s", d)
		}
	})
}

func TestTrueNever(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var f failed
		True(&f, "the answer", func() bool { return false })
		if want := "the answer: not within 2m0s: it is not so"; string(f) != want {
			t.Errorf("failed with %q, want %q", f, want)
		}
	})
}

// What comes ends the wait, also when the look that sees it takes longer than
// the bound.
func TestComes(t *testing.T) {
	t.Parallel()
	for _, takes := range []time.Duration{0, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var f failed
			looks := 0
			Until(&f, "the third look", func() error {
				<-time.After(takes)
				if looks++; looks < 3 && takes == 0 {
					return errors.New("not yet")
				}
				return nil
			})
			True(&f, "what is so", func() bool { return true })
			if f != "" {
				t.Errorf("failed with %q", f)
			}
		})
	}
}

func TestContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := Context(t)
		begin := time.Now()
		<-ctx.Done()
		if d := time.Since(begin); d != Patience {
			t.Errorf("ended after %s, want %s", d, Patience)
		}
	})
}
