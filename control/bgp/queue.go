package bgp

import (
	"net/netip"
	"sync"
	"time"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// eventKind says which fields of an event count.
type eventKind uint8

const (
	eventPaths eventKind = iota // paths
	eventState                  // peer, state, reason, caps
	eventEOR                    // peer, families
	eventLog                    // peer, text, detail, code, subcode
)

// event is something that GoBGP told. Events of one engine keep their order.
type event struct {
	from *engine
	kind eventKind
	time time.Time
	peer netip.Addr

	paths []*apiutil.Path

	state  packet.FSMState
	reason string // why a session went down
	canGR  bool   // the peer announced graceful restart, and so End-of-RIB
	keeps  bool   // with a family for which it keeps forwarding

	families []packet.Family // that the peer can carry, or whose End-of-RIB came

	text, detail  string
	code, subcode uint8
}

// queue passes events from GoBGP's callbacks to the speaker's loop. GoBGP
// queues without bound while a callback runs, so a callback only appends here
// and the loop takes all at once.
type queue struct {
	mu    sync.Mutex
	items []event
	wake  chan struct{}
}

func newQueue() *queue { return &queue{wake: make(chan struct{}, 1)} }

// put appends an event. GoBGP tells paths one by one: those that wait for the
// loop become one event.
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
