package bgp

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// backend is what a [Speaker] drives: sessions, the table, and what peers are
// told. A change of the AS, the router id or the listener needs a new one. What
// happens it tells as events, and nothing any more once stop was called.
type backend interface {
	// listens reports whether it has a listener.
	listens() bool

	// setPolicy makes the judgement of routes that of c in place of old's, for what
	// comes from now on; [backend.rejudge] does the rest.
	setPolicy(ctx context.Context, old, c *Config) error

	// announce makes what this node originates that of c.
	announce(c *Config) error

	// addPeer starts a session. restarting says that this host forwards as before
	// although its speaker is new (RFC 4724 section 3).
	addPeer(ctx context.Context, c *Config, p Peer, restarting bool) error

	// deletePeer ends a session for good. Of one that is not known it does nothing.
	deletePeer(ctx context.Context, p Peer) error

	// rejudge looks again at what c judges otherwise than old: what peers have sent,
	// and what they were told. What fails is done by the next call.
	rejudge(ctx context.Context, old, c *Config) error

	// chosen calls fn for each prefix that peers announce with the paths in use, the
	// best one first.
	chosen(ctx context.Context, fn func(netip.Prefix, []Hop)) error

	// routes calls fn with the paths of each prefix that a query is about, the best
	// one first, without what has to be judged. The error is [ErrNoPeer] for a peer
	// that is not known.
	routes(ctx context.Context, q Query, fn func([]Route)) error

	// state is the state of a peer's machine.
	state(peer netip.Addr) fsm.State

	// counts is what it has counted of its peers.
	counts(ctx context.Context) (map[netip.Addr]peerCounts, error)

	// stop ends all sessions and waits, at most until ctx ends. With graceful peers
	// are told nothing, and keep this node's routes for the restart time (RFC 4724
	// section 4.2).
	stop(ctx context.Context, graceful bool) error
}

// peerCounts is what a backend has counted of one peer.
type peerCounts struct {
	families []FamilyCounts // that the session carries
	in, out  Messages
}

// eventKind says which fields of an event count.
type eventKind uint8

const (
	eventPaths   eventKind = iota // paths
	eventChosen                   // chosen
	eventUp                       // families, canGR: the session is established
	eventLost                     // its paths are going to be withdrawn
	eventDown                     // reason, kept: it has ended
	eventFail                     // reason, sure: an attempt has ended
	eventSwept                    // the paths of the session that has ended are gone
	eventResumed                  // a peer that was cut off is tried again
	eventExpired                  // the peer did not come back within its restart time
	eventEOR                      // families whose End-of-RIB came
)

// event is something that a backend tells. Those of one backend keep their order.
type event struct {
	from backend
	kind eventKind
	time time.Time
	peer netip.Addr

	paths  []pathChange
	chosen []chosenPaths

	families []wire.Family // that both sides carry, or whose End-of-RIB came
	canGR    bool          // the peer announced graceful restart, and so End-of-RIB

	reason fsm.Reason
	kept   bool // the peer's paths are kept while it restarts
	sure   bool // the reason was looked for and found: later failures say less
}

// pathChange is a change of the paths in use of a prefix: that of a peer is now
// hop, or is not among them any more.
type pathChange struct {
	prefix netip.Prefix
	from   netip.Addr
	hop    Hop
	used   bool
}

// chosenPaths are the paths in use of a prefix, the best one first; none: nobody
// announces it.
type chosenPaths struct {
	prefix netip.Prefix
	hops   []Hop
}

// queue passes events from a backend's goroutines to the speaker's loop. They may
// not be held up, so what they tell is only appended, and the loop takes all at
// once.
type queue struct {
	mu    sync.Mutex
	items []event
	wake  chan struct{}
}

func newQueue() *queue { return &queue{wake: make(chan struct{}, 1)} }

// put appends an event. Paths that wait for the loop become one event.
func (q *queue) put(e event) {
	q.mu.Lock()
	if n := len(q.items); e.kind == eventPaths && n > 0 && q.items[n-1].kind == eventPaths && q.items[n-1].from == e.from {
		q.items[n-1].paths = append(q.items[n-1].paths, e.paths...)
	} else {
		q.items = append(q.items, e)
	}
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
