package vrouter

import (
	"context"
	"maps"

	"github.com/routerd/routerd/dataplane"
)

// WorkloadMTU says how large packets this host's workloads of a family send at
// most, in bytes. A tunnel that takes less is not used before they are
// lowered, and its device not lowered; see [Core.MTU]. Before the first call
// workloads are taken to follow at once.
func (c *Core) WorkloadMTU(ctx context.Context, f dataplane.Family, mtu int) error {
	return c.post(ctx, func(l *loop) { l.setWorkloadMTU(f, mtu) })
}

// Unsupported says why this kernel has no device for a driver over a family of
// the underlay.
type Unsupported struct {
	Driver string
	Outer  dataplane.Family
	Err    error
}

// Unsupported says all that this kernel has no devices for. It is published,
// so that a change to such a mode can be refused before it is begun. Before the
// first call what was published stays.
func (c *Core) Unsupported(ctx context.Context, list []Unsupported) error {
	return c.post(ctx, func(l *loop) {
		l.unsupported = map[dataplane.Encap]error{}
		for _, u := range list {
			l.unsupported[dataplane.Encap{Driver: u.Driver, Outer: u.Outer}] = u.Err
		}
	})
}

// setReach applies what was measured of the underlay towards some peers in a family.
func (s *sender) setReach(f dataplane.Family, peers map[string]dataplane.Reach) {
	if s.reach[f] == nil {
		s.reach[f] = map[string]dataplane.Reach{}
	}
	for name, r := range peers {
		if s.reach[f][name] == r {
			continue
		}
		if s.reach[f][name] = r; r == (dataplane.Reach{}) {
			delete(s.reach[f], name)
		}
		s.touched[name] = struct{}{}
	}
}

// setDelivery applies what probes through tunnels found of some peers in a family.
func (s *sender) setDelivery(f dataplane.Family, peers map[string][]dataplane.Delivery) {
	if !s.probing[f] {
		s.probing[f] = true
		s.replanAll = true
	}
	if s.delivery[f] == nil {
		s.delivery[f] = map[string]map[dataplane.Encap]dataplane.Delivery{}
	}
	for name, list := range peers {
		now := make(map[dataplane.Encap]dataplane.Delivery, len(list))
		for _, d := range list {
			now[d.Encap] = d
		}
		old := s.delivery[f][name]
		if s.delivery[f][name] = now; len(now) == 0 {
			delete(s.delivery[f], name)
		}
		if !maps.Equal(old, now) {
			s.touched[name] = struct{}{}
		}
	}
}

// setKernel notes how far the kernel is with what accepts encapsulations. It
// reports whether that is new.
func (r *receiver) setKernel(now map[dataplane.Encap]encapState) bool {
	changed := len(now) != len(r.kernel)
	for f, st := range now {
		old, ok := r.kernel[f]
		changed = changed || !ok || old.done != st.done || !sameError(old.err, st.err)
	}
	if !changed {
		return false
	}
	r.kernel = now
	r.devicesDirty = true
	return true
}

// mtu is what workloads of a family may send, in bytes: what every encapsulation takes
// that is in use or wanted, and every device as it is. 0 while the underlay is
// not known, and where this host reaches nobody in the family.
func (r *receiver) mtu(inner dataplane.Family) int {
	encaps := set[dataplane.Encap]{}
	pools := 0
	for _, p := range r.pools {
		if familyOf(p) != inner {
			continue
		}
		pools++
		for _, f := range r.encapsOf(r.modeOf(p), inner) {
			encaps[f] = struct{}{}
		}
	}
	if pools == 0 {
		return r.hosts[inner].UplinkMTU
	}
	_, uses := r.own()
	for f := range uses {
		encaps[f] = struct{}{}
	}
	least := 0
	for _, outer := range r.outers(inner) {
		if h := r.hosts[outer]; least == 0 || h.UplinkMTU < least {
			least = h.UplinkMTU
		}
	}
	for f := range encaps {
		mtu := r.encapMTU(f)
		if mtu == 0 {
			continue
		}
		for _, k := range r.deviceKeys[f] {
			lk, ok := k.(dataplane.LinkKey)
			if !ok {
				continue
			}
			// A device that is to be raised is not yet larger than it is.
			if have, ok := r.device(lk.Name); ok && have.Up && have.MTU < mtu {
				mtu = have.MTU
			}
		}
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	return least
}
