package vrouter

import (
	"context"
	"sync"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
)

// WorkloadMTU says how large packets this host's workloads of a family send at
// most, in bytes. A tunnel that takes less is not used before they are
// lowered, and its device not lowered; see [Core.MTU]. Before the first call
// workloads are taken to follow at once.
func (c *Core) WorkloadMTU(ctx context.Context, f dataplane.Family, mtu int) error {
	return c.post(ctx, func(l *loop) { l.encap.SetWorkloadMTU(f, mtu) })
}

// Unsupported says all that this kernel has no devices for. It is published,
// so that a change to such a mode can be refused before it is begun. Before the
// first call what was published stays.
func (c *Core) Unsupported(ctx context.Context, list []encap.Unsupported) error {
	return c.post(ctx, func(l *loop) { l.encap.SetUnsupported(list) })
}

// Reach applies what was measured of the underlay in one of its families, by node
// name, for the nodes that are named; the zero value says that nothing is known of a
// node any more. The map belongs to the core from now on.
func (c *Core) Reach(ctx context.Context, f dataplane.Family, peers map[string]dataplane.Reach) error {
	return c.post(ctx, func(l *loop) { l.encap.SetReach(f, peers) })
}

// Delivery applies what probes through tunnels found, by node name, over one
// family of the underlay, for the nodes that are named; an empty list says that
// nothing is known of a node any more. An encapsulation with Unknown was probed without an
// answer; one that is missing was not probed yet, and from the first call on no
// peer is moved to one that was not. The map belongs to the core
// from now on.
func (c *Core) Delivery(ctx context.Context, f dataplane.Family, peers map[string][]dataplane.Delivery) error {
	return c.post(ctx, func(l *loop) { l.encap.SetDelivery(f, peers) })
}

// Probes returns a channel that carries all that is to be measured, by node
// and family, each underlay before its tunnels: now, and whenever it changed. A slow reader gets only the newest
// list, which it must not change. The channel is closed when ctx ends.
func (c *Core) Probes(ctx context.Context) <-chan []dataplane.ProbeTarget {
	return c.targets.subscribe(ctx)
}

// latest hands the newest value to its subscribers. Its zero value is ready.
type latest[T any] struct {
	mu    sync.Mutex
	known bool
	value T
	subs  map[chan T]struct{}
}

func (s *latest[T]) subscribe(ctx context.Context) <-chan T {
	ch := make(chan T, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.subs == nil {
		s.subs = map[chan T]struct{}{}
	}
	s.subs[ch] = struct{}{}
	if s.known {
		ch <- s.value
	}
	context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.subs, ch)
		close(ch)
	})
	return ch
}

// publish replaces the value, also where a reader has not taken the one
// before.
func (s *latest[T]) publish(v T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value, s.known = v, true
	for ch := range s.subs {
		select {
		case <-ch:
		default:
		}
		ch <- v
	}
}
