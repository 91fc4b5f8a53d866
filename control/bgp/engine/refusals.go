package engine

import (
	"log/slog"
	"net/netip"
	"sync"
	"time"
)

// refusalsEvery is how often it is logged that connections came which are no peer's:
// anybody who reaches the port can make thousands a second.
const refusalsEvery = time.Minute

// refusals counts connections that were closed because no peer is configured for their
// address, or the peer would not take them, and logs them at a bounded rate.
type refusals struct {
	log *slog.Logger // nil: nothing is logged

	mu   sync.Mutex
	more int       // since the last line
	next time.Time // before which nothing is logged
}

// note notes a connection; err says why it was not taken, nil that no peer has the
// address.
func (r *refusals) note(from netip.Addr, err error, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.log == nil || now.Before(r.next) {
		r.more++
		return
	}
	args := []any{"address", from, "others_since_last", r.more}
	if err != nil {
		args = append(args, "error", err)
	}
	r.log.Warn("bgp connection refused: it is said once a minute", args...)
	r.more, r.next = 0, now.Add(refusalsEvery)
}
