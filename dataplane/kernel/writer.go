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
}

// pulse says when the loop last turned: nanoseconds since the epoch.
type pulse struct{ at atomic.Int64 }

func (p *pulse) beat() { p.at.Store(time.Now().UnixNano()) }
