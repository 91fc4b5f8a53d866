package vrouter

import (
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// chosen is the route in use for a prefix. There may be hundreds of thousands,
// so what they share stands elsewhere.
type chosen struct {
	aim *aim // as wanted; nil for a blackhole
	on  *hop // in use: that of aim, or one that has become the same; nil for a blackhole
	mtu uint32
	typ dataplane.RouteType
}

// route is what the kernel is to have for p.
func (c chosen) route(p netip.Prefix) dataplane.Route {
	r := dataplane.Route{Prefix: p, Table: dataplane.MainTable, Type: c.typ, MTU: c.mtu}
	if c.on != nil {
		r.NextHop = c.on.id
	}
	return r
}

// aim is a next hop that routes want to go to.
type aim struct {
	key  hopKey
	set  HopSet // what BGP named, one next hop or several; empty if it did not
	refs int    // routes
}

// join puts a route that wants k on h, which was acquired for it.
func (t *table) join(h *hop, k hopKey) *aim {
	a := t.aims[k]
	if a == nil {
		a = &aim{key: k, set: k.whole().set}
		t.aims[k] = a
	}
	a.refs++
	if h.key == k {
		h.owners++
		return a
	}
	if h.guests == nil {
		h.guests = map[*aim]int{}
	}
	h.guests[a]++
	return a
}

// leave takes a route that wants a from h.
func (t *table) leave(h *hop, a *aim) {
	if h.key == a.key {
		h.owners--
	} else if h.guests[a]--; h.guests[a] == 0 {
		delete(h.guests, a)
	}
	if a.refs--; a.refs == 0 {
		delete(t.aims, a.key)
	}
}

// settle derives what takes packets in on this host, and chooses anew for
// every dirty prefix.
func (t *table) settle() {
	for range maxRounds {
		if t.formsDirty {
			t.rebuildForms()
		}
		t.begin()
		for p := range t.dirty {
			t.choose(p)
		}
		emptied(&t.dirty)
		if !t.formsDirty && len(t.found) == 0 {
			break
		}
		t.setLost(nil, t.found)
		t.found = nil
	}
	for k := range t.stale {
		if _, ok := t.hops[k]; !ok {
			delete(t.stale, k)
		}
	}
}

// begin begins a round of choosing.
func (t *table) begin() {
	t.round++
	t.members = map[hopKey][]hopKey{}
	for k := range t.turned {
		if b := t.byHop[k]; b != nil {
			for p := range b.prefixes {
				t.dirty[p] = struct{}{}
			}
		}
	}
	clear(t.turned)
}

// unsettled is about how many prefixes wait to be chosen for or handed over.
func (t *table) unsettled() int { return max(len(t.dirty), len(t.moved)) }

// maxEmptied is how large a map may be to be kept for further use: to clear a
// map costs by the most that it ever had.
const maxEmptied = 16384

func emptied[K comparable, V any, M ~map[K]V](m *M) {
	if len(*m) > maxEmptied {
		*m = M{}
		return
	}
	clear(*m)
}

// maxRounds bounds how often one settling may change what it began with: a
// device that takes another's place moves next hops, once.
const maxRounds = 4

// choose takes the best usable candidate for a prefix.
func (t *table) choose(p netip.Prefix) {
	old, had := t.routes[p]
	c := t.best(p)
	if had && c != nil && old.typ == c.route.Type && old.mtu == c.route.MTU && t.keep(old, c.hop) {
		if old.aim != nil && old.aim.key != c.hop {
			was := old.aim
			old.aim = t.join(old.on, c.hop)
			t.leave(old.on, was)
			t.disown(old.on)
			t.routes[p] = old
		}
		return
	}
	if c != nil {
		now := chosen{typ: c.route.Type, mtu: c.route.MTU}
		if c.hop != (hopKey{}) {
			now.on = t.acquireHop(c.hop)
			now.aim = t.join(now.on, c.hop)
		}
		t.routes[p] = now
	} else {
		delete(t.routes, p)
	}
	if had || c != nil {
		t.moved[p] = struct{}{}
	}
	if had && old.on != nil {
		t.leave(old.on, old.aim)
		t.disown(old.on)
		t.releaseHop(old.on.key)
	}
}

// keep reports whether a route may stay on the next-hop object that it has,
// now that it wants k.
func (t *table) keep(old chosen, k hopKey) bool {
	switch {
	case old.on == nil:
		return k == hopKey{}
	case old.aim.key == k && old.on.key == k:
		return !t.stale[k]
	}
	return t.stands(old.on, k)
}

// best returns the candidate to use for p, until the next call; nil: none.
func (t *table) best(p netip.Prefix) *Candidate {
	t.scratch = t.candidates(p, t.scratch[:0])
	for i := range t.scratch {
		if t.scratch[i].Reason == "" {
			return &t.scratch[i]
		}
	}
	return nil
}

// routeChanges lists what is to be handed over of the routes.
func (t *table) routeChanges() (put []dataplane.Object, del []dataplane.Key) {
	for p := range t.moved {
		if c, ok := t.routes[p]; ok {
			put = append(put, c.route(p))
		} else {
			del = append(del, dataplane.Route{Prefix: p, Table: dataplane.MainTable}.Key())
		}
	}
	return put, del
}
