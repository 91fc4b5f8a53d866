package ownership

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
)

// An event says that somebody began to own an address, or that he owns it no
// more. Of an operation whose outcome is unknown there is none: its owner was
// told of no address and uses none. A release is noted before it is asked for.
type event struct {
	addr  netip.Addr
	owner string
	gain  bool
}

// history is what happened, in order.
type history struct {
	mu     sync.Mutex
	events []event
}

func (h *history) note(addr netip.Addr, owner string, gain bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{addr, owner, gain})
}

// gains returns how often somebody began to own an address.
func (h *history) gains() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.events {
		if e.gain {
			n++
		}
	}
	return n
}

// check goes through a whole history and returns what is wrong with it: two
// owners of one address at one time, or an end without a beginning. It returns
// who owns what in the end, too.
func check(events []event) (owners map[netip.Addr]string, wrong []string) {
	owners = map[netip.Addr]string{}
	for i, e := range events {
		switch have, owned := owners[e.addr]; {
		case e.gain && owned:
			wrong = append(wrong, fmt.Sprintf("event %d: %s is given to %s while %s owns it", i, e.addr, e.owner, have))
		case e.gain:
			owners[e.addr] = e.owner
		case have != e.owner:
			wrong = append(wrong, fmt.Sprintf("event %d: %s gives up %s, which %q owns", i, e.owner, e.addr, have))
		default:
			delete(owners, e.addr)
		}
	}
	return owners, wrong
}

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
