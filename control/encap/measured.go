package encap

import (
	"maps"

	"github.com/routerd/routerd/dataplane"
)

// Unsupported says why this kernel has no device for a driver over a family of
// the underlay.
type Unsupported struct {
	Driver string
	Outer  dataplane.Family
	Err    error
}

// SetUnsupported notes all that this kernel has no devices for. It is published,
// so that a change to such a mode can be refused before it is begun. Before the
// first call what was published stays.
func (p *Planner) SetUnsupported(list []Unsupported) {
	p.unsupported = map[dataplane.Encap]error{}
	for _, u := range list {
		p.unsupported[dataplane.Encap{Driver: u.Driver, Outer: u.Outer}] = u.Err
	}
}

// SetReach applies what was measured of the underlay in one of its families, by node
// name, for the nodes that are named; the zero value says that nothing is known of a
// node any more.
func (s *sender) SetReach(f dataplane.Family, peers map[string]dataplane.Reach) {
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

// SetDelivery applies what probes through tunnels found, by node name, over one
// family of the underlay, for the nodes that are named; an empty list says that
// nothing is known of a node any more. An encapsulation with Unknown was probed
// without an answer; one that is missing was not probed yet, and from the first call
// on no peer is moved to one that was not.
func (s *sender) SetDelivery(f dataplane.Family, peers map[string][]dataplane.Delivery) {
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
func (r *receiver) setKernel(now map[dataplane.Encap]State) bool {
	changed := len(now) != len(r.kernel)
	for f, st := range now {
		old, ok := r.kernel[f]
		changed = changed || !ok || old.Done != st.Done || !sameError(old.Err, st.Err)
	}
	if !changed {
		return false
	}
	r.kernel = now
	r.devicesDirty = true
	return true
}

// MTU is what workloads of a family may send, in bytes: what every encapsulation takes
// that is in use or wanted, and every device as it is. 0 while the underlay is
// not known, and where this host reaches no peer in the family.
func (r *receiver) MTU(inner dataplane.Family) int {
	encaps := set[dataplane.Encap]{}
	pools := 0
	for _, p := range r.pools.ByName {
		if p.Family() != inner {
			continue
		}
		pools++
		for _, f := range r.encapsOf(r.pools.Mode(p), inner) {
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
		for _, k := range r.devices[f].Keys {
			lk, ok := k.(dataplane.LinkKey)
			if !ok {
				continue
			}
			// A device that is to be raised is not yet larger than it is.
			if have, ok := r.network.Device(lk.Name); ok && have.Up && have.MTU < mtu {
				mtu = have.MTU
			}
		}
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	return least
}

// Measured is what was measured of the ways to other nodes.
type Measured struct {
	reach    map[dataplane.Family]map[string]dataplane.Reach
	delivery map[dataplane.Family]map[string]map[dataplane.Encap]dataplane.Delivery
}

// Measured returns what was measured so far.
func (s *sender) Measured() Measured {
	m := Measured{map[dataplane.Family]map[string]dataplane.Reach{}, map[dataplane.Family]map[string]map[dataplane.Encap]dataplane.Delivery{}}
	for f, of := range s.reach {
		m.reach[f] = maps.Clone(of)
	}
	for f, of := range s.delivery {
		m.delivery[f] = maps.Clone(of)
	}
	return m
}

// Foresee has a new planner go by what another one measured, without waiting for probes
// of its own.
func (p *Planner) Foresee(m Measured) {
	p.reach, p.delivery = m.reach, m.delivery
	p.Changed()
}
