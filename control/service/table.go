package service

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/store"
)

// Table is what is known of Services and of where their endpoints are, with what one
// node announces by it. Make one with [NewTable]. It is not safe for concurrent use.
type Table struct {
	node     string
	ranges   Ranges
	services map[store.Key]*entry
	slices   map[store.Key]*store.EndpointSlice
	of       map[store.Key]map[store.Key]bool // Service → its slices
	own      map[netip.Addr]Announcement      // what the node announces; nil: to be made
}

// entry is a Service and what the node announces for it.
type entry struct {
	service
	decided []decided
}

// NewTable returns an empty table of a node. With no node the changes that concern any
// node are reported.
func NewTable(node string) *Table {
	return &Table{
		node: node, services: make(map[store.Key]*entry), slices: make(map[store.Key]*store.EndpointSlice),
		of: make(map[store.Key]map[store.Key]bool),
	}
}

// SetRanges takes the ranges, and reports whether they are others than before.
func (t *Table) SetRanges(r Ranges) bool {
	if t.ranges.Equal(r) {
		return false
	}
	t.ranges, t.own = r, nil
	for key, e := range t.services {
		e.decided = t.decide(key, e.service, t.node)
	}
	return true
}

// Ranges returns the ranges.
func (t *Table) Ranges() Ranges { return t.ranges }

// SetService takes a Service; nil: it is gone. It reports whether what the node
// announces is different.
func (t *Table) SetService(key store.Key, s *store.Service) bool {
	var was, now []decided
	if e := t.services[key]; e != nil {
		was = e.decided
	}
	if s == nil {
		delete(t.services, key)
	} else {
		e := &entry{service: serviceOf(s)}
		e.decided = t.decide(key, e.service, t.node)
		markJoined(was, e.decided, [2]bool{})
		t.services[key], now = e, e.decided
	}
	return t.changed(was, now)
}

// changed takes note of whether the node announces something else for a Service.
func (t *Table) changed(was, now []decided) bool {
	if slices.Equal(was, now) {
		return t.node == ""
	}
	t.own = nil
	return true
}

// SetSlice takes an EndpointSlice; nil: it is gone. It reports as [Table.SetService]
// does.
func (t *Table) SetSlice(key store.Key, s *store.EndpointSlice) bool {
	var touched []store.Key
	before := make(map[store.Key][2]bool, 2) // whether other nodes served a Service, by family
	touch := func(of store.Key) {
		if touched = append(touched, of); t.services[of] == nil {
			return
		}
		before[of] = [2]bool{t.serving(of, t.node, false).elsewhere, t.serving(of, t.node, true).elsewhere}
	}
	if was := t.slices[key]; was != nil {
		of := store.ServiceKey(key.Namespace, was.Service)
		touch(of)
		if delete(t.of[of], key); len(t.of[of]) == 0 {
			delete(t.of, of)
		}
		delete(t.slices, key)
	}
	if s != nil {
		of := store.ServiceKey(key.Namespace, s.Service)
		if !slices.Contains(touched, of) {
			touch(of)
		}
		if t.of[of] == nil {
			t.of[of] = make(map[store.Key]bool, 1)
		}
		t.of[of][key], t.slices[key] = true, s
	}
	changed := false
	for _, of := range touched {
		e := t.services[of]
		if e == nil {
			continue
		}
		now := t.decide(of, e.service, t.node)
		markJoined(e.decided, now, before[of])
		changed = t.changed(e.decided, now) || changed
		e.decided = now
	}
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
	out := &Table{
		node: t.node, ranges: t.ranges, own: t.own, slices: maps.Clone(t.slices),
		services: make(map[store.Key]*entry, len(t.services)), of: make(map[store.Key]map[store.Key]bool, len(t.of)),
	}
	for key, e := range t.services {
		same := *e
		out.services[key] = &same
	}
	for key, l := range t.of {
		out.of[key] = maps.Clone(l)
	}
	return out
}

// decide returns what a node announces for a Service.
func (t *Table) decide(key store.Key, s service, node string) []decided {
	return s.decide(t.ranges, func(six bool) serving { return t.serving(key, node, six) })
}

// serving says how the endpoints of a Service serve a family.
func (t *Table) serving(of store.Key, node string, six bool) serving {
	var out serving
	for key := range t.of[of] {
		s := t.slices[key]
		if s.IPv6 != six {
			continue
		}
		for name, e := range s.Nodes {
			now := Leaving
			if e.Ready {
				now = Serving
			}
			out.anywhere = max(out.anywhere, now)
			if here := name == node && name != ""; here {
				out.here = max(out.here, now)
			} else {
				out.elsewhere = out.elsewhere || e.Ready
			}
		}
	}
	return out
}

// Announced returns the addresses that a node announces by themselves, which are not to
// be changed. Of Services that have one address the one that serves counts.
func (t *Table) Announced(node string) map[netip.Addr]Announcement {
	if node == t.node && t.own != nil {
		return t.own
	}
	out := make(map[netip.Addr]Announcement)
	for key, e := range t.services {
		list := e.decided
		if node != t.node {
			list = t.decide(key, e.service, node)
		}
		for _, d := range list {
			now := Announcement{State: d.state, Elsewhere: d.elsewhere, Joined: d.joined, Service: key}
			if had, ok := out[d.addr]; !ok || now.better(had) {
				out[d.addr] = now
			}
		}
	}
	if node == t.node {
		t.own = out
	}
	return out
}
