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
	own      map[netip.Addr]Announcement // what the node announces; nil: to be made
}

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
	return &Table{node: unique.Make(node), services: make(map[name]*entry), slices: make(map[name]*slice)}
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

// SetRanges takes the ranges, and reports whether they are others than before.
func (t *Table) SetRanges(r Ranges) bool {
	if t.ranges.Equal(r) {
		return false
	}
	t.ranges, t.own = r, nil
	for _, e := range t.services {
		e.decided = t.decide(e, t.node)
	}
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
	return t.changed(was, e.decided)
}

// changed takes note of whether the node announces something else for a Service.
func (t *Table) changed(was, now []decided) bool {
	if slices.Equal(was, now) {
		return t.node.Value() == ""
	}
	t.own = nil
	return true
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
		changed = t.changed(e.decided, decided)
		e.decided = decided
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
	out := &Table{node: t.node, ranges: t.ranges, own: t.own, slices: maps.Clone(t.slices), services: make(map[name]*entry, len(t.services))}
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

// Announced returns the addresses that a node announces by themselves, which are not to
// be changed. Of Services that have one address the one that serves counts.
func (t *Table) Announced(node string) map[netip.Addr]Announcement {
	of := unique.Make(node)
	if of == t.node && t.own != nil {
		return t.own
	}
	out := make(map[netip.Addr]Announcement)
	for n, e := range t.services {
		list := e.decided
		if of != t.node {
			list = t.decide(e, of)
		}
		for _, d := range list {
			now := Announcement{State: d.state, Elsewhere: d.elsewhere, Joined: d.joined, Service: store.ServiceKey(n.namespace, n.name)}
			if had, ok := out[d.addr]; !ok || now.better(had) {
				out[d.addr] = now
			}
		}
	}
	if of == t.node {
		t.own = out
	}
	return out
}
