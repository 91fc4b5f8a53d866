package rib

import (
	"iter"
	"net/netip"
	"unique"

	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/dense"
)

type set[K comparable] map[K]struct{}

// RIB is the routing table: for each prefix the candidates, the best of them
// and the next hop in use. It chooses anew only for prefixes that are marked.
type RIB struct {
	nodes  *topology.Nodes
	pools  *topology.Pools
	blocks *topology.Blocks
	*nextHops
	*learnedPaths

	dirty dense.Queue[ref] // to be chosen for anew
	moved dense.Queue[ref] // routes that changed since the last hand-over
	up    []netip.Addr     // gateways that are down until the withdrawals before are chosen for

	waiting set[netip.Prefix] // see unready

	followAll bool // every next hop is to be brought up to date

	// What is known of other nodes' blocks may be old: what BGP says precedes it.
	preferLearned bool

	// Within one round of choosing nothing changes of what a next hop is.
	round   uint64
	scratch []Candidate
}

// New returns a table without routes, by what is known of nodes, pools, blocks and the
// network. Who changes these says so to the table afterwards.
func New(m *topology.Nodes, p *topology.Pools, b *topology.Blocks, u *topology.Network, planner *encap.Planner, o *desired.Objects) *RIB {
	return &RIB{nodes: m, pools: p, blocks: b, waiting: set[netip.Prefix]{}, nextHops: newNextHops(u, planner, o), learnedPaths: newLearnedPaths(newPrefixTable())}
}

// chosen is the route in use for some prefixes.
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

// mark has the route of a prefix chosen anew.
func (r *RIB) mark(at ref) {
	if rec := r.prefixes.At(at); rec.flags&isDirty == 0 {
		rec.flags |= isDirty
		r.dirty.Add(at)
	}
}

// Choose chooses anew for every prefix that is marked.
func (r *RIB) Choose() {
	r.begin()
	for r.dirty.Len() > 0 {
		at := r.dirty.Next()
		r.prefixes.At(at).flags &^= isDirty
		r.choose(at)
		r.prefixes.tidy(at)
	}
	r.offered = offer{}
}

// begin begins a round of choosing.
func (r *RIB) begin() {
	r.round++
	r.offered = offer{}
	clear(r.usableNow)
	for k := range r.turned {
		if by := r.byHop[k]; by != nil {
			for at := range r.behind(by) {
				r.mark(at)
			}
		}
	}
	clear(r.turned)
}

// Unsettled is about how many prefixes wait to be chosen for or handed over.
func (r *RIB) Unsettled() int { return max(r.dirty.Len(), r.moved.Len()) }

// choose takes the best usable candidate for a prefix.
func (r *RIB) choose(at ref) {
	rec := r.prefixes.At(at)
	was := rec.route
	old := r.choices.Value(was)
	now, by, ok := r.best(rec)
	if was != 0 && ok && old.typ == now.typ && old.mtu == now.mtu && r.mayStay(old, now) {
		if old.desired != now.desired {
			now.on = old.on
			rec.route = r.use(now)
			r.disuse(was)
		}
		return
	}
	rec.route = 0
	if ok {
		if now.desired != (unique.Handle[hopKey]{}) {
			now.on = r.hopFor(now.desired.Value(), by)
		}
		rec.route = r.use(now)
	}
	if (was != 0 || ok) && rec.flags&isMoved == 0 {
		rec.flags |= isMoved
		r.moved.Add(at)
	}
	if was != 0 {
		r.disuse(was)
	}
}

// hopFor is the hop of a key, by what has been learned if it was.
func (r *RIB) hopFor(k hopKey, by *learned) *hop {
	if by == nil {
		return r.hopOf(k)
	}
	if by.on == nil || by.on.refs == 0 || by.on.key != k {
		by.on = r.hopOf(k)
	}
	return by.on
}

// mayStay reports whether a route may stay on the next-hop object that it is
// on, now that it desires what now does.
func (r *RIB) mayStay(old, now chosen) bool {
	if old.on == nil || now.desired == (unique.Handle[hopKey]{}) {
		return old.desired == now.desired
	}
	if k := now.desired.Value(); old.desired == now.desired && old.on.key == k {
		return !r.stale[k]
	}
	return r.equals(old.on, now.desired)
}

// best returns the route to choose for a prefix, without the hop, and by what next hops
// of BGP's it was chosen, if it was by such.
func (r *RIB) best(rec *record) (now chosen, by *learned, ok bool) {
	p := rec.prefix()
	says := r.said.Value(rec.path)
	if _, owned := r.blocks.Origin(p); !owned && rec.path != 0 {
		if _, inPool := r.pools.Of(p); !inPool {
			// The usual case of large tables: what BGP says is all there is.
			w := r.completed(says.by)
			if w.reason != "" || r.usurped(p, says.Value()) != nil || wrongFamily(rec.family, says.by.key) {
				return chosen{}, nil, false
			}
			return chosen{desired: says.by.desired, mtu: w.mtu}, says.by, true
		}
	}
	r.scratch = r.candidates(p, rec.path, r.scratch[:0])
	for i := range r.scratch {
		if c := &r.scratch[i]; c.Reason == "" {
			now = chosen{mtu: c.route.MTU, typ: c.route.Type}
			if c.hop != (hopKey{}) {
				now.desired = unique.Make(c.hop)
			}
			return now, nil, true
		}
	}
	return chosen{}, nil, false
}

// Routes yields the routes that the kernel is to have.
func (r *RIB) Routes() iter.Seq[dataplane.Route] {
	return func(yield func(dataplane.Route) bool) {
		for _, rec := range r.prefixes.All() {
			if rec.route != 0 && !yield(r.choices.Value(rec.route).route(rec.prefix())) {
				return
			}
		}
	}
}

// Counts are the numbers of routes and of next hops in use.
func (r *RIB) Counts() (routes, hops int) {
	for id := range r.choices.Len() {
		routes += r.choices.Users(id)
	}
	return routes, len(r.hops)
}

// Changed reports whether routes changed since [RIB.HandedOver].
func (r *RIB) Changed() bool { return r.moved.Len() > 0 }

// Changes are the routes that changed since [RIB.HandedOver]. They are valid until the RIB changes.
func (r *RIB) Changes() dataplane.RouteChanges {
	return dataplane.RouteChanges{
		Put: func(yield func(dataplane.Route) bool) {
			for at := range r.moved.All() {
				if rec := r.prefixes.At(at); rec.route != 0 && !yield(r.choices.Value(rec.route).route(rec.prefix())) {
					return
				}
			}
		},
		Del: func(yield func(dataplane.RouteKey) bool) {
			for at := range r.moved.All() {
				if rec := r.prefixes.At(at); rec.route == 0 && !yield(dataplane.RouteKey{Prefix: rec.prefix(), Table: dataplane.MainTable}) {
					return
				}
			}
		},
	}
}

// HandedOver forgets which routes changed.
func (r *RIB) HandedOver() {
	for r.moved.Len() > 0 {
		at := r.moved.Next()
		r.prefixes.At(at).flags &^= isMoved
		r.prefixes.tidy(at)
	}
}
