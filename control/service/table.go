package service

import (
	"maps"
	"net/netip"
	"slices"
	"unique"

	"github.com/routerd/routerd/store"
)

// Table is what is known of Services and of where their endpoints are, with what one
// node announces by it. Of ten thousand Services it is what a daemon holds most of: it keeps
// of each no more than decides. Make one with [NewTable]. It is not safe for concurrent use.
type Table struct {
	node     unique.Handle[string]
	ranges   Ranges
	services map[name]*entry
	slices   map[name]*slice

	own     map[netip.Addr]Announcement      // what the node announces
	lent    bool                             // own was handed out: it is copied before it changes
	several map[netip.Addr]map[name]struct{} // of own, the Services of what is announced for more than one
	changed Changes                          // of own, since they were taken
}

// Changes are addresses of which a node announces something else than when changes were last
// taken, or the same again, with whether it announced them then.
type Changes map[netip.Addr]bool

// name is the key of a Service or of an EndpointSlice.
type name struct{ namespace, name string }

func nameOf(k store.Key) name { return name{k.Namespace, k.Name} }

// entry is a Service and what the node announces for it.
type entry struct {
	service
	there   bool // else only slices name it
	decided []decided
	slices  []*slice
}

// slice is an EndpointSlice: where its endpoints are. It is never changed.
type slice struct {
	service string // in the slice's namespace
	six     bool
	nodes   []endpoints
}

// endpoints are those of a slice that serve on a node.
type endpoints struct {
	node unique.Handle[string] // a cluster has few nodes, and many slices that name one
	store.EndpointsHere
}

func sliceOf(s *store.EndpointSlice) *slice {
	out := &slice{service: s.Service, six: s.IPv6}
	if len(s.Nodes) > 0 {
		out.nodes = make([]endpoints, 0, len(s.Nodes))
	}
	for node, here := range s.Nodes {
		out.nodes = append(out.nodes, endpoints{unique.Make(node), here})
	}
	return out
}

// NewTable returns an empty table of a node. With no node the changes that concern any
// node are reported.
func NewTable(node string) *Table {
	return &Table{
		node: unique.Make(node), services: make(map[name]*entry), slices: make(map[name]*slice),
		own: make(map[netip.Addr]Announcement), several: make(map[netip.Addr]map[name]struct{}), changed: make(Changes),
	}
}

// of returns the entry of a Service, which it makes.
func (t *Table) of(n name) *entry {
	e := t.services[n]
	if e == nil {
		e = new(entry)
		t.services[n] = e
	}
	return e
}

// drop forgets an entry of which nothing is there.
func (t *Table) drop(n name, e *entry) {
	if !e.there && len(e.slices) == 0 {
		delete(t.services, n)
	}
}

// SetRanges takes the ranges, and reports whether they are others than before. What was
// announced by those before is none of the [Changes].
func (t *Table) SetRanges(r Ranges) bool {
	if t.ranges.Equal(r) {
		return false
	}
	t.ranges, t.lent = r, false
	t.own, t.several = make(map[netip.Addr]Announcement), make(map[netip.Addr]map[name]struct{})
	for n, e := range t.services {
		e.decided = t.decide(e, t.node)
		for _, d := range e.decided {
			t.put(n, d)
		}
	}
	t.changed = make(Changes)
	return true
}

// Ranges returns the ranges.
func (t *Table) Ranges() Ranges { return t.ranges }

// SetService takes a Service; nil: it is gone. It reports whether what the node
// announces is different.
func (t *Table) SetService(key store.Key, s *store.Service) bool {
	n := nameOf(key)
	e := t.of(n)
	was := e.decided
	e.there, e.service = s != nil, service{}
	if s != nil {
		e.service = serviceOf(s)
	}
	e.decided = t.decide(e, t.node)
	markJoined(was, e.decided, [2]bool{})
	t.drop(n, e)
	return t.replace(n, was, e.decided)
}

// replace has the node announce for a Service what was decided now, in place of what was
// before, and reports whether that is something else.
func (t *Table) replace(n name, was, now []decided) bool {
	if slices.Equal(was, now) {
		return t.node.Value() == ""
	}
	if t.lent {
		t.own, t.lent = maps.Clone(t.own), false
	}
	for _, d := range was {
		if !slices.ContainsFunc(now, func(e decided) bool { return e.addr == d.addr }) {
			t.withdraw(n, d.addr)
		}
	}
	for _, d := range now {
		t.put(n, d)
	}
	return true
}

// put has an address announced for a Service, if it is the one that counts.
func (t *Table) put(n name, d decided) {
	t.note(d.addr)
	now := d.announcement(n)
	had, ok := t.own[d.addr]
	of := t.several[d.addr]
	switch {
	case of == nil && (!ok || had.Service == now.Service):
		t.own[d.addr] = now
		return
	case of == nil:
		of = map[name]struct{}{nameOf(had.Service): {}}
		t.several[d.addr] = of
	}
	of[n] = struct{}{}
	t.choose(d.addr)
}

// withdraw has an address announced for a Service no more.
func (t *Table) withdraw(n name, a netip.Addr) {
	t.note(a)
	of := t.several[a]
	if of == nil {
		delete(t.own, a)
		return
	}
	delete(of, n)
	t.choose(a)
	if len(of) == 1 {
		delete(t.several, a)
	}
}

// choose announces an address for the one of several Services that counts.
func (t *Table) choose(a netip.Addr) {
	var best Announcement
	for n := range t.several[a] {
		e := t.services[n]
		if e == nil {
			continue // it is about to be told
		}
		i := slices.IndexFunc(e.decided, func(d decided) bool { return d.addr == a })
		if i < 0 {
			continue
		}
		if now := e.decided[i].announcement(n); best.State == None || now.better(best) {
			best = now
		}
	}
	t.own[a] = best
}

// note takes note that an address is about to change.
func (t *Table) note(a netip.Addr) {
	if _, noted := t.changed[a]; !noted {
		_, was := t.own[a]
		t.changed[a] = was
	}
}

// Changes takes what has changed since it was last asked, or since the ranges were set.
func (t *Table) Changes() Changes {
	if len(t.changed) == 0 {
		return nil
	}
	out := t.changed
	t.changed = make(Changes)
	return out
}

// SetSlice takes an EndpointSlice; nil: it is gone. It reports as [Table.SetService]
// does.
func (t *Table) SetSlice(key store.Key, s *store.EndpointSlice) bool {
	n := nameOf(key)
	was := t.slices[n]
	var now *slice
	if s != nil && s.Service != "" { // one that is of no Service says nothing
		now = sliceOf(s)
		t.slices[n] = now
	} else {
		delete(t.slices, n)
	}
	changed := false
	if was != nil && (now == nil || now.service != was.service) {
		changed = t.swap(name{n.namespace, was.service}, was, nil)
		was = nil
	}
	if now != nil {
		changed = t.swap(name{n.namespace, now.service}, was, now) || changed
	}
	return changed
}

// swap has a slice take the place of another one of a Service; nil: there is none.
func (t *Table) swap(of name, was, now *slice) (changed bool) {
	e := t.of(of)
	// Whether other nodes served it, by family.
	before := [2]bool{e.serving(t.node, false).elsewhere, e.serving(t.node, true).elsewhere}
	i := slices.Index(e.slices, was)
	switch {
	case i < 0:
		e.slices = append(e.slices, now)
	case now != nil:
		e.slices[i] = now
	default:
		e.slices = slices.Delete(e.slices, i, i+1)
	}
	if e.there {
		decided := t.decide(e, t.node)
		markJoined(e.decided, decided, before)
		was := e.decided
		e.decided = decided
		changed = t.replace(of, was, decided)
	}
	t.drop(of, e)
	return changed
}

// markJoined says of what is announced now, and was not, that it was served elsewhere before.
func markJoined(was, now []decided, before [2]bool) {
	for i, d := range now {
		if j := slices.IndexFunc(was, func(w decided) bool { return w.addr == d.addr }); j >= 0 {
			now[i].joined = was[j].joined
			continue
		}
		family := 0
		if d.addr.Is6() {
			family = 1
		}
		now[i].joined = before[family]
	}
}

// Clone returns a table that may be changed without changing t.
func (t *Table) Clone() *Table {
	t.lent = true
	out := &Table{
		node: t.node, ranges: t.ranges, own: t.own, lent: true, slices: maps.Clone(t.slices), services: make(map[name]*entry, len(t.services)),
		several: make(map[netip.Addr]map[name]struct{}, len(t.several)), changed: maps.Clone(t.changed),
	}
	for a, of := range t.several {
		out.several[a] = maps.Clone(of)
	}
	for n, e := range t.services {
		same := *e
		same.slices = slices.Clone(e.slices)
		out.services[n] = &same
	}
	return out
}

// decide returns what a node announces for a Service.
func (t *Table) decide(e *entry, node unique.Handle[string]) []decided {
	return e.decide(t.ranges, func(six bool) serving { return e.serving(node, six) })
}

// serving says how the endpoints of a Service serve a family.
func (e *entry) serving(node unique.Handle[string], six bool) serving {
	var out serving
	known := node.Value() != ""
	for _, s := range e.slices {
		if s.six != six {
			continue
		}
		for _, n := range s.nodes {
			now := Leaving
			if n.Ready {
				now = Serving
			}
			out.anywhere = max(out.anywhere, now)
			if known && n.node == node {
				out.here = max(out.here, now)
			} else {
				out.elsewhere = out.elsewhere || n.Ready
			}
		}
	}
	return out
}

// announcement is that of a Service's address.
func (d decided) announcement(n name) Announcement {
	return Announcement{State: d.state, Elsewhere: d.elsewhere, Joined: d.joined, Service: store.ServiceKey(n.namespace, n.name)}
}

// Announced returns the addresses that a node announces by themselves, which are not to
// be changed. Of Services that have one address the one that serves counts.
func (t *Table) Announced(node string) map[netip.Addr]Announcement {
	of := unique.Make(node)
	if of == t.node {
		t.lent = true
		return t.own
	}
	out := make(map[netip.Addr]Announcement)
	for n, e := range t.services {
		for _, d := range t.decide(e, of) {
			now := d.announcement(n)
			if had, ok := out[d.addr]; !ok || now.better(had) {
				out[d.addr] = now
			}
		}
	}
	return out
}

// Announcement is that of one address by the table's own node; ok is false if there is none.
func (t *Table) Announcement(a netip.Addr) (now Announcement, ok bool) {
	now, ok = t.own[a]
	return now, ok
}
