package kernel

import (
	"sync/atomic"
	"time"
)

// writer makes the kernel's tables what is wanted, by what the observer knows of
// them.
type writer struct {
	*observer
	conn     *connection
	ns       *namespace // of whose settings files it writes
	toFlush  flushQueue // safe for concurrent use
	doubted  doubted
	quiescer quiescer
	pulse    pulse        // safe for concurrent use
	writes   atomic.Int64 // messages that change something, and sysctls

	// Scratch of a turn.
	ops     []op
	results []result
	sent    []op
	batch   builder
	gone    result // of what there is no message for
}

// pulse says when the loop last turned; nil: it has not yet. The time is kept whole,
// with its monotonic part: the host's clock may jump.
type pulse struct{ at atomic.Pointer[time.Time] }

func (p *pulse) beat() {
	now := time.Now()
	p.at.Store(&now)
}
