package ownership

import (
	"fmt"
	"net/netip"
	"sync"
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
