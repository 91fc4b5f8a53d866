package bgp

import (
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// peerCounts is what a backend has counted of one peer.
type peerCounts struct {
	families []FamilyCounts // that the session carries
	in, out  Messages
	keys     conn.KeyUse
}

// eventKind says which fields of an event count.
type eventKind uint8

const (
	eventChosen  eventKind = iota // chosen
	eventUp                       // families, canGR: the session is established
	eventLost                     // its paths are going to be withdrawn
	eventDown                     // reason, kept: it has ended
	eventFail                     // reason: an attempt has ended
	eventSwept                    // the paths of the session that has ended are gone
	eventResumed                  // a peer that was cut off is tried again
	eventExpired                  // the peer did not come back within its restart time
	eventEOR                      // families whose End-of-RIB came
)

// event is something that the backend reports. Those of one keep their order.
type event struct {
	from *backend
	kind eventKind
	time time.Time
	peer netip.Addr

	chosen []chosenPaths

	families []wire.Family // that both sides carry, or whose End-of-RIB came
	canGR    bool          // the peer announced graceful restart, and so End-of-RIB

	reason fsm.Reason
	kept   bool // the peer's paths are kept while it restarts
}

// chosenPaths are the paths in use of a prefix, the best one first; none: no peer
// announces it.
type chosenPaths struct {
	prefix wire.Prefix
	hops   []Hop // prefixes that follow each other share them; they never change
}

// queue passes events from a backend's goroutines to the speaker's loop. They may
// not be held up, so what they report is only appended, and the loop takes all at
// once. Who reports prefixes by the thousand waits for [queue.taken] before more.
type queue struct {
	mu    sync.Mutex
	items []event
	wake  chan struct{}
	empty chan struct{} // closed when the loop has taken all that is there; nil: nothing is
}

func newQueue() *queue { return &queue{wake: make(chan struct{}, 1)} }

// taken returns a channel that is closed once the loop has taken what is there now.
func (q *queue) taken() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.empty == nil {
		q.empty = make(chan struct{})
		if len(q.items) == 0 {
			close(q.empty)
			defer func() { q.empty = nil }()
		}
	}
	return q.empty
}

func (q *queue) put(e event) {
	q.mu.Lock()
	q.items = append(q.items, e)
	q.mu.Unlock()
	q.poke()
}

// poke makes the loop look at its clocks even without an event.
func (q *queue) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *queue) take() []event {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items = nil
	if q.empty != nil {
		close(q.empty)
		q.empty = nil
	}
	return items
}

// familyOf returns where a prefix or an address belongs: the unicast routes of
// its own family.
func familyOf(a netip.Addr) wire.Family {
	if a.Is4() {
		return wire.IPv4
	}
	return wire.IPv6
}

// families lists the families in use.
func families() []wire.Family { return []wire.Family{wire.IPv4, wire.IPv6} }
