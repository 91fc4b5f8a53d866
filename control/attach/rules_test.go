package attach

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/store"
)

// ADD answers when the rules of the endpoint are in force, and not before: also
// when it is repeated.
func TestRulesAreAwaited(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	type asked struct {
		device string
		addrs  []netip.Addr
		known  bool // the endpoint was in the datastore
	}
	var calls []asked
	var refuse error
	w.cfg = func(c *Config) {
		c.Rules = func(ctx context.Context, device string, addrs []netip.Addr) error {
			list, _, err := w.store.List(ctx, store.KindWorkloadEndpoint, "")
			if err != nil {
				return err
			}
			calls = append(calls, asked{device, addrs, len(list) == 1})
			return refuse
		}
	}
	a := w.start()
	req := w.request(1)
	refuse = errors.New("nftables refused them")
	_, err := a.Add(t.Context(), req)
	if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "policy rules") || !strings.Contains(err.Error(), "nftables refused them") {
		t.Errorf("ADD without its rules: %v, want ErrNotReady with the reason", err)
	}
	w.expectClean()
	refuse = nil
	res := w.add(a, req)
	w.add(a, req)
	if len(calls) != 3 {
		t.Fatalf("asked %d times, want once for each ADD: %v", len(calls), calls)
	}
	for _, c := range calls[1:] {
		if c.device != res.Device || len(c.addrs) != 1 || c.addrs[0] != res.Addresses[0].Addr || !c.known {
			t.Errorf("asked %+v of %+v", c, res)
		}
	}
	w.del(a, req)
	w.expectClean()
}

// Rules that never come fail the ADD at its own deadline, not at the caller's.
func TestRulesThatNeverCome(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cfg = func(c *Config) {
		c.RulesTimeout = 20 * time.Millisecond
		c.Rules = func(ctx context.Context, _ string, _ []netip.Addr) error { <-ctx.Done(); return ctx.Err() }
	}
	_, err := w.start().Add(t.Context(), w.request(1))
	if !errors.Is(err, ErrNotReady) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ADD: %v, want ErrNotReady because of the deadline", err)
	}
	w.expectClean()
}
