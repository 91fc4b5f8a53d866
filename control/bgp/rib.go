package bgp

import (
	"context"
	"net/netip"
	"sync"
)

// rib holds best paths that were learned and not yet taken by the reader. It
// coalesces by prefix, so a slow reader costs at most one entry per prefix,
// and what is there when the reader comes is one batch. It is safe for
// concurrent use.
type rib struct {
	mu      sync.Mutex
	wake    chan struct{}         // holds a token when there is something to take
	pending map[netip.Prefix]Path // without a next hop: gone
	stale   map[netip.Prefix]bool // told before GoBGP was started anew and not told again yet; nil: no start is pending
	started bool                  // Reset has been given
	synced  bool                  // Synced waits to be given
}

func newRIB() *rib {
	return &rib{wake: make(chan struct{}, 1), pending: map[netip.Prefix]Path{}}
}

func (r *rib) put(p Path) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending[p.Prefix] = p
	delete(r.stale, p.Prefix)
	r.signal()
}

func (r *rib) del(prefix netip.Prefix) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending[prefix] = Path{Prefix: prefix}
	delete(r.stale, prefix)
	r.signal()
}

// restart says that GoBGP forgets what it had told; a prefix in told that does
// not come again is deleted when sync is called.
func (r *rib) restart(told []netip.Prefix) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stale == nil {
		r.stale = make(map[netip.Prefix]bool, len(told))
	}
	for _, p := range told {
		r.stale[p] = true
	}
	for p, path := range r.pending {
		if path.NextHop.IsValid() {
			r.stale[p] = true
		}
	}
	r.synced = false
}

func (r *rib) sync() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.stale {
		r.pending[p] = Path{Prefix: p}
	}
	r.stale = nil
	r.synced = true
	r.signal()
}

func (r *rib) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// next waits for something to be there and takes all of it.
func (r *rib) next(ctx context.Context) (Changes, error) {
	for {
		select {
		case <-ctx.Done():
			return Changes{}, ctx.Err()
		case <-r.wake:
		}
		if c := r.take(); !c.Empty() {
			return c, nil
		}
	}
}

func (r *rib) take() Changes {
	r.mu.Lock()
	pending, c := r.pending, Changes{Reset: !r.started, Synced: r.synced}
	if len(pending) == 0 && !c.Synced {
		r.mu.Unlock()
		return Changes{}
	}
	r.pending = map[netip.Prefix]Path{}
	r.started, r.synced = true, false
	r.mu.Unlock()

	for prefix, p := range pending {
		if p.NextHop.IsValid() {
			c.Put = append(c.Put, p)
		} else {
			c.Del = append(c.Del, prefix)
		}
	}
	return c
}
