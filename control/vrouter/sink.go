package vrouter

import (
	"context"
	"errors"
	"time"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
)

// Sink is what a [Core] hands the desired state to.
type Sink interface {
	dataplane.Sink
	// UpdateRoutes is Update of routes and other objects, in one call.
	UpdateRoutes(src dataplane.Source, routes dataplane.RouteChanges, put []dataplane.Object, del []dataplane.Key) dataplane.Revision
	// Flush withdraws next hops, given by their keys, and takes them out of the
	// kernel at once with all routes that lead to them, whatever their number:
	// for what cannot be reached any more. The Update that withdraws these
	// routes, or moves them, is to follow. A next hop that is the member of a
	// group which stays is withdrawn as by Update.
	Flush(src dataplane.Source, hops []dataplane.Key) dataplane.Revision
}

// hintAfter bounds how long a hint waits for one call to the sink: another
// object of the call may wait for a device for ever.
const hintAfter = time.Second

// hintAt asks for a look at the sink when all that a call named is done.
func (c *Core) hintAt(rev dataplane.Revision) {
	if c.cfg.Status == nil {
		return
	}
	select {
	case <-c.hint: // the newer call is waited for instead
	default:
	}
	c.hint <- rev
}

// followSink wakes the loop when the sink is done with what it was handed.
func (c *Core) followSink(ctx context.Context) {
	for {
		var rev dataplane.Revision
		select {
		case <-ctx.Done():
			return
		case rev = <-c.hint:
		}
		wait, cancel := context.WithTimeout(ctx, hintAfter)
		_ = c.cfg.Sink.Wait(wait, rev) // what became of each object is looked up
		cancel()
		if err := c.post(ctx, func(*loop) {}); err != nil {
			return
		}
	}
}

// look sees how far the sink is. It reports whether anything came out
// different.
func (c *Core) look(l *loop) bool {
	devices := l.encap.Devices()
	now := make(map[dataplane.Encap]encap.State, len(devices))
	for f, d := range devices {
		if d.Err == nil {
			now[f] = c.encapState(d.Keys)
		}
	}
	return l.encap.SetKernel(now, c.confirmed(l))
}

// confirmed reports whether the kernel has left every next hop that is not
// wanted any more, as far as this run knows. Before the desired state is complete
// the kernel still sends as the previous run desired where this one has no route
// yet: what only BGP knows comes late.
func (c *Core) confirmed(l *loop) bool {
	if !l.synced {
		return false
	}
	if c.cfg.Status == nil {
		l.unsure, l.removals = map[dataplane.Key]struct{}{}, nil
		return true
	}
	some := len(l.unsure) > 0
	for k := range l.unsure {
		if st, ok := c.cfg.Status(k); !ok || st.State == dataplane.Done {
			delete(l.unsure, k)
		}
	}
	if some && len(l.unsure) == 0 {
		l.unsure = map[dataplane.Key]struct{}{} // it may have been large, and a map never shrinks
	}
	// To wait with a context that has ended is to ask: an error of the context
	// says that something was not tried or waits. What was refused is tried
	// again by the sink, and holds nothing up here.
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for len(l.removals) > 0 {
		if err := c.cfg.Sink.Wait(ended, l.removals[0]); errors.Is(err, context.Canceled) {
			break
		}
		l.removals = l.removals[1:]
	}
	return len(l.unsure)+len(l.removals) == 0
}

// encapState sums up the states of what accepts an encapsulation.
func (c *Core) encapState(keys []dataplane.Key) encap.State {
	if c.cfg.Status == nil {
		return encap.State{Done: true}
	}
	out := encap.State{Done: true}
	for _, k := range keys {
		st, ok := c.cfg.Status(k)
		switch {
		case !ok || st.State == dataplane.Pending:
			out.Done = false
		case st.State == dataplane.Failed:
			return encap.State{Err: st.Err}
		}
	}
	return out
}
