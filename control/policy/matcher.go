package policy

import (
	"slices"

	"github.com/routerd/routerd/store/selector"
)

type (
	itemID  int32 // of something with labels; small numbers, given out again
	queryID int32 // of a selector in use; likewise
)

// matcher keeps which of its items each of its queries matches. It is the
// index that makes a change cost what it changes: an item is tried against the
// queries that ask for one of its labels, a query on the items that have one of
// its labels.
type matcher struct {
	items []matchItem            // by id
	index map[string]*labelIndex // the items, by label
	free  []queryID

	queries []query // by id
	watch   map[selector.Condition][]queryID
	always  []queryID // queries to try on every item

	// change is published when an item that changes begins or ceases to match.
	change func(queryID, itemID, bool)
}

type matchItem struct {
	labels  *labels // nil: none
	matches []queryID
}

type query struct {
	sel   *selector.Selector // nil: none
	cover []selector.Condition
	all   bool // no cover is known
}

// labelIndex is the items that have one label. Lists are sorted.
type labelIndex struct {
	count  int
	values map[string][]itemID
}

func newMatcher(change func(queryID, itemID, bool)) *matcher {
	return &matcher{
		index:  make(map[string]*labelIndex),
		watch:  make(map[selector.Condition][]queryID),
		change: change,
	}
}

// insertSorted adds an element that is not there.
func insertSorted[T ~int32](list []T, v T) []T {
	if n := len(list); n == 0 || list[n-1] < v {
		return append(list, v) // the way in which lists grow at first
	}
	i, _ := slices.BinarySearch(list, v)
	return slices.Insert(list, i, v)
}

// removeSorted removes an element that may be there.
func removeSorted[T ~int32](list []T, v T) []T {
	if i, ok := slices.BinarySearch(list, v); ok {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// put gives an item its labels and publishes what it matches now and did not
// before, and the other way round.
func (m *matcher) put(id itemID, l *labels) {
	for len(m.items) <= int(id) {
		m.items = append(m.items, matchItem{})
	}
	it := &m.items[id]
	m.reindex(id, it.labels, l)
	it.labels = l
	if len(m.queries) == len(m.free) {
		return
	}
	now := m.matching(l)
	was := it.matches
	it.matches = now
	for i, j := 0, 0; i < len(was) || j < len(now); {
		switch {
		case j == len(now) || i < len(was) && was[i] < now[j]:
			m.change(was[i], id, false)
			i++
		case i == len(was) || now[j] < was[i]:
			m.change(now[j], id, true)
			j++
		default:
			i++
			j++
		}
	}
}

// forget makes an item match nothing, without telling, until it is put again.
func (m *matcher) forget(id itemID) {
	if int(id) < len(m.items) {
		m.items[id].matches = nil
	}
}

// remove takes an item out and publishes what it matched.
func (m *matcher) remove(id itemID) {
	if int(id) >= len(m.items) || m.items[id].labels == nil {
		return
	}
	it := m.items[id]
	m.reindex(id, it.labels, nil)
	m.items[id] = matchItem{}
	for _, q := range it.matches {
		m.change(q, id, false)
	}
}

// matches returns the queries that match an item, sorted. It is not to be
// changed.
func (m *matcher) matches(id itemID) []queryID {
	if int(id) >= len(m.items) {
		return nil
	}
	return m.items[id].matches
}

// reindex moves an item from the places of its old labels to those of its new
// ones, touching only what differs.
func (m *matcher) reindex(id itemID, old, l *labels) {
	if old != nil {
		old.each(func(name, value string) {
			if l != nil {
				if v, ok := l.Get(name); ok && v == value {
					return
				}
			}
			m.unlist(id, name, value)
		})
	}
	if l == nil {
		return
	}
	l.each(func(name, value string) {
		if old != nil {
			if v, ok := old.Get(name); ok && v == value {
				return
			}
		}
		x := m.index[name]
		if x == nil {
			x = &labelIndex{values: make(map[string][]itemID)}
			m.index[name] = x
		}
		x.count++
		x.values[value] = insertSorted(x.values[value], id)
	})
}

func (m *matcher) unlist(id itemID, name, value string) {
	x := m.index[name]
	x.count--
	if list := removeSorted(x.values[value], id); len(list) > 0 {
		x.values[value] = list
	} else {
		delete(x.values, value)
	}
	if x.count == 0 {
		delete(m.index, name)
	}
}

// matching returns the queries that match labels, sorted.
func (m *matcher) matching(l *labels) []queryID {
	var found []queryID
	try := func(ids []queryID) {
		for _, q := range ids {
			if m.queries[q].sel.MatchesLabels(l) {
				found = append(found, q)
			}
		}
	}
	try(m.always)
	l.each(func(name, value string) {
		try(m.watch[selector.Condition{Label: name, Value: value}])
		try(m.watch[selector.Condition{Label: name, Any: true}])
	})
	slices.Sort(found)
	return slices.Clip(slices.Compact(found))
}

// add takes a selector into use and returns the items that it matches.
func (m *matcher) add(sel *selector.Selector) (queryID, []itemID) {
	q := queryID(len(m.queries))
	if n := len(m.free); n > 0 {
		q, m.free = m.free[n-1], m.free[:n-1]
	} else {
		m.queries = append(m.queries, query{})
	}
	cover, known := m.cheapest(sel.Covers())
	m.queries[q] = query{sel: sel, cover: cover, all: !known}
	if !known {
		m.always = insertSorted(m.always, q)
	}
	for _, c := range cover {
		m.watch[c] = insertSorted(m.watch[c], q)
	}
	var found []itemID
	m.candidates(q, func(id itemID) {
		if it := &m.items[id]; sel.MatchesLabels(it.labels) {
			it.matches = insertSorted(it.matches, q)
			found = append(found, id)
		}
	})
	return q, found
}

// drop takes a query out of use. It publishes nothing.
func (m *matcher) drop(q queryID) {
	m.candidates(q, func(id itemID) {
		it := &m.items[id]
		it.matches = removeSorted(it.matches, q)
	})
	for _, c := range m.queries[q].cover {
		if list := removeSorted(m.watch[c], q); len(list) > 0 {
			m.watch[c] = list
		} else {
			delete(m.watch, c)
		}
	}
	m.always = removeSorted(m.always, q)
	m.queries[q] = query{}
	m.free = append(m.free, q)
}

// each calls f with every item that a query matches.
func (m *matcher) each(q queryID, f func(itemID)) {
	m.candidates(q, func(id itemID) {
		if _, ok := slices.BinarySearch(m.items[id].matches, q); ok {
			f(id)
		}
	})
}

// candidates calls f once with every item that a query might match.
func (m *matcher) candidates(q queryID, f func(itemID)) {
	if m.queries[q].all {
		for id := range m.items {
			if m.items[id].labels != nil {
				f(itemID(id))
			}
		}
		return
	}
	var lists [][]itemID
	for _, c := range m.queries[q].cover {
		x := m.index[c.Label]
		switch {
		case x == nil:
		case !c.Any:
			lists = append(lists, x.values[c.Value])
		default:
			for _, list := range x.values {
				lists = append(lists, list)
			}
		}
	}
	if len(lists) == 1 {
		for _, id := range lists[0] {
			f(id)
		}
		return
	}
	// An item can fulfil several conditions, of different labels.
	ids := slices.Concat(lists...)
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		f(id)
	}
}

// cheapest returns the cover that fewest items fulfil today, without repeats.
// A tie goes to the one that asks for values, since it will stay narrow.
func (m *matcher) cheapest(covers [][]selector.Condition) (best []selector.Condition, known bool) {
	type cost struct{ items, presence int }
	var least cost
	for _, cover := range covers {
		var now cost
		for _, c := range cover {
			x := m.index[c.Label]
			if c.Any {
				now.presence++
			}
			switch {
			case x == nil:
			case c.Any:
				now.items += x.count
			default:
				now.items += len(x.values[c.Value])
			}
		}
		if !known || now.items < least.items || now.items == least.items && now.presence < least.presence {
			best, least, known = cover, now, true
		}
	}
	return withoutRepeats(best), known
}

func withoutRepeats(cover []selector.Condition) []selector.Condition {
	var list []selector.Condition
	for _, c := range cover {
		if !slices.Contains(list, c) {
			list = append(list, c)
		}
	}
	return list
}
