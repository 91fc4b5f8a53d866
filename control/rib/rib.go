package rib

import (
	"iter"
	"net/netip"
	"unique"

	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
)

type set[K comparable] map[K]struct{}

// RIB is the routing table: for each prefix the candidates, the best of them
// and the next hop in use. It chooses anew only for prefixes that are marked.
type RIB struct {
	nodes *topology.Nodes
	pools *topology.Pools
	*nextHops
	*origins
	*learnedPaths

	routes map[netip.Prefix]chosen
	dirty  set[netip.Prefix] // to be chosen for anew
	moved  set[netip.Prefix] // routes that changed since the last hand-over
	up     []netip.Addr      // gateways that are down until the withdrawals before are chosen for

	followAll bool // every next hop is to be brought up to date

	// Within one round of choosing nothing changes of what a next hop is.
	round   uint64
	scratch []Candidate
}

// New returns a table without routes, by what is known of nodes, pools and the
// network. Who changes these says so to the table afterwards.
func New(m *topology.Nodes, p *topology.Pools, u *topology.Network, planner *encap.Planner, o *desired.Objects) *RIB {
	return &RIB{
		nodes: m, pools: p, nextHops: newNextHops(u, planner, o), origins: newOrigins(), learnedPaths: newLearnedPaths(),
		routes: map[netip.Prefix]chosen{}, dirty: set[netip.Prefix]{}, moved: set[netip.Prefix]{},
	}
}

// chosen is the route in use for a prefix. There may be hundreds of thousands,
// so what they share stands elsewhere.
type chosen struct {
	desired unique.Handle[hopKey] // zero for a blackhole
	on      *hop                  // the desired next hop, or a group that equals it; nil for a blackhole
	mtu     uint32
	typ     dataplane.RouteType
}

// route is what the kernel is to have for p.
func (c chosen) route(p netip.Prefix) dataplane.Route {
	r := dataplane.Route{Prefix: p, Table: dataplane.MainTable, Type: c.typ, MTU: c.mtu}
	if c.on != nil {
		r.NextHop = c.on.id
	}
	return r
}

// count adds n to the routes on a group that desire k.
func (h *hop) count(k unique.Handle[hopKey], n int) {
	if !h.key.group() {
		return
	}
	if h.routes == nil {
		h.routes = map[unique.Handle[hopKey]]int{}
	}
	if h.routes[k] += n; h.routes[k] == 0 {
		delete(h.routes, k)
	}
}

// Choose chooses anew for every prefix that is marked.
func (r *RIB) Choose() {
	r.begin()
	for p := range r.dirty {
		r.choose(p)
	}
	emptied(&r.dirty)
}

// begin begins a round of choosing.
func (r *RIB) begin() {
	r.round++
	clear(r.usableNow)
	for k := range r.turned {
		if b := r.byHop[k]; b != nil {
			for p := range b.prefixes {
				r.dirty[p] = struct{}{}
			}
		}
	}
	emptied(&r.turned)
}

// Unsettled is about how many prefixes wait to be chosen for or handed over.
func (r *RIB) Unsettled() int { return max(len(r.dirty), len(r.moved)) }

// maxEmptied is how large a map may be to be kept for further use: to clear a
// map costs by the most that it ever had, and so does to keep it.
const maxEmptied = 1024

func emptied[K comparable, V any, M ~map[K]V](m *M) {
	if len(*m) > maxEmptied {
		*m = M{}
		return
	}
	clear(*m)
}

// choose takes the best usable candidate for a prefix.
func (r *RIB) choose(p netip.Prefix) {
	old, had := r.routes[p]
	c := r.best(p)
	if had && c != nil && old.typ == c.route.Type && old.mtu == c.route.MTU && r.mayStay(old, c.hop) {
		if old.on == nil || old.desired.Value() == c.hop {
			return
		}
		now := unique.Make(c.hop)
		old.on.count(now, 1)
		old.on.count(old.desired, -1)
		r.rekey(old.on)
		old.desired = now
		r.routes[p] = old
		return
	}
	if c != nil {
		now := chosen{typ: c.route.Type, mtu: c.route.MTU}
		if c.hop != (hopKey{}) {
			now.on, now.desired = r.acquireHop(c.hop), unique.Make(c.hop)
			now.on.count(now.desired, 1)
		}
		r.routes[p] = now
	} else {
		delete(r.routes, p)
	}
	if had || c != nil {
		r.moved[p] = struct{}{}
	}
	if had && old.on != nil {
		old.on.count(old.desired, -1)
		r.rekey(old.on)
		r.releaseHop(old.on.key)
	}
}

// mayStay reports whether a route may stay on the next-hop object that it is
// on, now that it desires k.
func (r *RIB) mayStay(old chosen, k hopKey) bool {
	switch {
	case old.on == nil:
		return k == hopKey{}
	case old.on.key == k && old.desired.Value() == k:
		return !r.stale[k]
	}
	return r.equals(old.on, k)
}

// best returns the candidate to use for p, until the next call; nil: none.
func (r *RIB) best(p netip.Prefix) *Candidate {
	r.scratch = r.candidates(p, r.scratch[:0])
	for i := range r.scratch {
		if r.scratch[i].Reason == "" {
			return &r.scratch[i]
		}
	}
	return nil
}

// Routes yields the routes that the kernel is to have.
func (r *RIB) Routes() iter.Seq[dataplane.Route] {
	return func(yield func(dataplane.Route) bool) {
		for p, c := range r.routes {
			if !yield(c.route(p)) {
				return
			}
		}
	}
}

// Counts are the numbers of routes and of next hops in use.
func (r *RIB) Counts() (routes, hops int) { return len(r.routes), len(r.hops) }

// Changes lists which routes changed since [RIB.HandedOver].
func (r *RIB) Changes() (put []dataplane.Object, del []dataplane.Key) {
	for p := range r.moved {
		if c, ok := r.routes[p]; ok {
			put = append(put, c.route(p))
		} else {
			del = append(del, dataplane.Route{Prefix: p, Table: dataplane.MainTable}.Key())
		}
	}
	return put, del
}

// HandedOver forgets which routes changed.
func (r *RIB) HandedOver() { emptied(&r.moved) }
