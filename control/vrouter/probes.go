package vrouter

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"github.com/routerd/routerd/dataplane"
)

// Target is what is to be measured towards one peer over one family of the
// underlay.
type Target struct {
	Node   string
	Family dataplane.Family // of the underlay
	Uplink string           // this host's device towards the underlay
	Local  netip.Prefix     // this host's own address there, with its subnet's length

	// Addrs are the peer's addresses, in the order in which to try them: the
	// registered one, then the one that its routerd.io/tunnelAddress says.
	Addrs []netip.Addr

	Forms []Tunnel // those in use and wanted, without direct; by form
}

// Tunnel is a form in which packets go to a peer, with both ends.
type Tunnel struct {
	Form    dataplane.Form
	Inner   dataplane.Family // of the workloads' packets
	Device  string           // on this host
	MTU     int              // of the device, bytes
	Local   netip.Addr       // this host's address on its device; invalid: none
	Peer    netip.Addr       // the peer's address on its own device; invalid: none
	Gateway netip.Addr       // of the peer's next hop on the device
	InUse   bool             // packets go this way; else they are to
}

func (t Target) equal(o Target) bool {
	return t.Node == o.Node && t.Family == o.Family && t.Uplink == o.Uplink && t.Local == o.Local &&
		slices.Equal(t.Addrs, o.Addrs) && slices.Equal(t.Forms, o.Forms)
}

// Reach takes in what was measured of the underlay towards all peers in one
// family of the underlay, by node name. A peer that is missing was not
// measured. The map belongs to the core from now on.
func (c *Core) Reach(ctx context.Context, f dataplane.Family, peers map[string]dataplane.Reach) error {
	return c.post(ctx, func(l *loop) { l.setReach(f, peers) })
}

// Delivery takes in what probes through tunnels found, by node name, over one
// family of the underlay. A form with Unknown was asked about without an
// answer; a form that is missing was not asked about yet, and from the first
// call on no peer is moved to a form that was not. The map belongs to the core
// from now on.
func (c *Core) Delivery(ctx context.Context, f dataplane.Family, peers map[string][]dataplane.Delivery) error {
	return c.post(ctx, func(l *loop) { l.setDelivery(f, peers) })
}

// Probes returns a channel that carries all that is to be measured, by node
// and family: now, and whenever it changed. A slow reader gets only the newest
// list, which it must not change. The channel is closed when ctx ends.
func (c *Core) Probes(ctx context.Context) <-chan []Target { return c.targets.subscribe(ctx) }

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
