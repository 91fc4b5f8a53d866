package group

import (
	"cmp"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/table"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// None is the source of what came from no peer.
const None = ^rib.Peer(0)

const (
	// logLimit is how much of what some member has yet to read is kept.
	logLimit = 16 << 20
	// span is after how many bytes of the log a member that falls behind is not sent
	// again what it has had.
	span = 1 << 20
)

// Options are what the messages of all members have in common.
type Options struct {
	Longest int // message; 0: [wire.MaxLen]
}

// Group is one update group.
type Group struct {
	sets     *attrs.Table
	longest  int
	entries  *table.Table[entry]
	gen      uint32 // of changes; a walk of a member is about those of some generations
	batch    []change
	packer   wire.Packer
	log      log
	members  []*Member
	bySource map[rib.Peer]*[wire.Families]int
	count    [wire.Families]int
	gone     []place // entries of withdrawn prefixes, kept for members that have yet to hear of it

	items []item // scratch
}

// entry is what is advertised of a prefix. set 0: it was, and is no longer.
type entry struct {
	set    attrs.Handle
	gen    uint32 // of the last change; 0: the entry is not in use
	source rib.Peer
	dirty  bool // in batch
	listed bool // in gone
}

// place is an entry's.
type place struct {
	family wire.Family
	id     uint32
}

// change is one of an entry that is not in the log yet.
type change struct {
	place
	was    attrs.Handle // with a reference; 0: it was not advertised
	source rib.Peer     // of that
}

// New returns a group without members, whose sets are those of a table.
func New(sets *attrs.Table, o Options) *Group {
	g := &Group{sets: sets, longest: cmp.Or(o.Longest, wire.MaxLen), entries: table.New[entry](), gen: 1, bySource: map[rib.Peer]*[wire.Families]int{}}
	g.packer.Longest = g.longest
	g.log.limit = logLimit
	return g
}

// Update says what is advertised of a prefix from now on, and which peer it came from;
// set 0: nothing is. The group takes over the reference to the set. It reports false
// if the set leaves no room for a prefix in a message: then nothing is advertised.
// Messages are packed by [Group.Flush].
func (g *Group) Update(p wire.Prefix, set attrs.Handle, source rib.Peer) (fits bool) {
	fits = true
	if set != 0 && !g.fits(set) {
		g.sets.Release(set)
		set, fits = 0, false
	}
	var id uint32
	if set == 0 {
		source = None
		if id = g.entries.Find(p); id == 0 {
			return fits
		}
	} else {
		id = g.entries.Obtain(p)
	}
	e := g.entries.At(p.Family, id)
	if e.dirty {
		g.Flush()
		if id = g.entries.Find(p); id == 0 {
			if set == 0 {
				return fits
			}
			id = g.entries.Obtain(p)
		}
		e = g.entries.At(p.Family, id)
	}
	if e.set == set && (set == 0 || e.source == source) {
		if set != 0 {
			g.sets.Release(set)
		}
		return fits
	}
	g.tally(e, p.Family, -1)
	g.batch = append(g.batch, change{place{p.Family, id}, e.set, e.source})
	e.set, e.source, e.gen, e.dirty = set, source, g.gen, true
	g.tally(e, p.Family, 1)
	return fits
}

// fits reports whether a message has room for a prefix with a set.
func (g *Group) fits(set attrs.Handle) bool {
	hop, list := g.sets.Canonical(set)
	return wire.HeaderLen+len(hop)+len(list)+40 <= g.longest
}

// tally counts an entry.
func (g *Group) tally(e *entry, f wire.Family, n int) {
	if e.set == 0 {
		return
	}
	g.count[f] += n
	if e.source == None {
		return
	}
	c := g.bySource[e.source]
	if c == nil {
		c = &[wire.Families]int{}
		g.bySource[e.source] = c
	}
	if c[f] += n; *c == [wire.Families]int{} {
		delete(g.bySource, e.source)
	}
}

// Advertised returns how many prefixes of a family a peer is advertised.
func (g *Group) Advertised(p rib.Peer, f wire.Family) int {
	n := g.count[f]
	if c := g.bySource[p]; c != nil {
		n -= c[f]
	}
	return n
}

// Lookup returns what a peer is advertised of a prefix; 0: nothing.
func (g *Group) Lookup(p rib.Peer, prefix wire.Prefix) attrs.Handle {
	id := g.entries.Find(prefix)
	if id == 0 {
		return 0
	}
	e := g.entries.At(prefix.Family, id)
	if e.source == p {
		return 0
	}
	return e.set
}

// Cursor is how far a [Group.Scan] has come.
type Cursor struct {
	family wire.Family
	at     uint32
}

// Scan goes over n more prefixes and hands on what a peer is advertised. It reports
// whether that was all. visit must not change the group.
func (g *Group) Scan(c *Cursor, n int, p rib.Peer, visit func(wire.Prefix, attrs.Handle)) (done bool) {
	for ; c.family < wire.Families; c.family, c.at = c.family+1, 0 {
		for end := g.entries.End(c.family); c.at+1 < end; {
			if n--; n < 0 {
				return false
			}
			c.at++
			if e := g.entries.At(c.family, c.at); e.set != 0 && e.source != p {
				visit(g.entries.Prefix(c.family, c.at), e.set)
			}
		}
	}
	return true
}

// item is one prefix in a message.
type item struct {
	place
	announce   bool
	only, skip rib.Peer // the only member that is sent it; the one that is not
	set        attrs.Handle
}

func (i *item) compare(o *item) int {
	if i.announce != o.announce {
		if o.announce {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(i.only, o.only), cmp.Compare(i.skip, o.skip), cmp.Compare(i.family, o.family), cmp.Compare(i.set, o.set))
}

// Flush packs what was updated, and wakes the members that wait for it.
//
// A prefix that comes from another peer than before is withdrawn from that one alone,
// if it had it, and advertised to all others.
func (g *Group) Flush() {
	if len(g.batch) == 0 {
		return
	}
	g.publish()
	for _, c := range g.batch {
		e := g.entries.At(c.family, c.id)
		e.dirty = false
		if c.was != 0 {
			g.sets.Release(c.was)
		}
		switch {
		case e.set != 0 || e.listed:
		case len(g.members) == 0:
			g.entries.Remove(c.family, c.id)
		default:
			e.listed = true
			g.gone = append(g.gone, c.place)
		}
	}
	g.batch = g.batch[:0]
	g.purge()
}

// publish puts what was updated into the log, if anybody reads it.
func (g *Group) publish() {
	if !slices.ContainsFunc(g.members, func(m *Member) bool { return m.pinned }) {
		for _, m := range g.members {
			if m.phase == behind {
				m.rouse()
			}
		}
		return
	}
	items := g.items[:0]
	first, settled := g.gen, g.settled()
	for _, c := range g.batch {
		e := g.entries.At(c.family, c.id)
		first = min(first, e.gen)
		if e.set == 0 {
			skip := c.source
			if g.member(skip).mayHave() {
				skip = None
			}
			items = append(items, item{place: c.place, only: None, skip: skip})
			continue
		}
		if m := g.member(e.source); m != nil && (c.was != 0 && c.source != e.source || m.mayHave()) {
			items = append(items, item{place: c.place, only: e.source, skip: None})
		}
		switch {
		case c.was != e.set || !settled: // a walk passes over what has changed since it began
			items = append(items, item{place: c.place, announce: true, only: None, skip: e.source, set: e.set})
		case g.member(c.source) != nil: // the others have it
			items = append(items, item{place: c.place, announce: true, only: c.source, skip: None, set: e.set})
		}
	}
	compare := func(a, b item) int { return a.compare(&b) }
	if !slices.IsSortedFunc(items, compare) {
		slices.SortStableFunc(items, compare)
	}
	g.items = items[:0]
	for len(items) > 0 {
		n := 1
		for n < len(items) && items[n].only == items[0].only && items[n].skip == items[0].skip {
			n++
		}
		g.append(segment{data: g.pack(items[:n]), only: items[0].only, skip: items[0].skip, gen: first})
		items = items[n:]
	}
}

// pack packs items that are in order into messages.
func (g *Group) pack(items []item) []byte {
	p := &g.packer
	p.Reset()
	for i := range items {
		it := &items[i]
		if i == 0 || it.announce != items[i-1].announce || it.family != items[i-1].family || it.set != items[i-1].set {
			if !it.announce {
				p.Withdraw(it.family)
			} else if hop, list := g.sets.Canonical(it.set); p.Announce(it.family, hop, list) != nil {
				continue // cannot be: Update has made sure of it
			}
		}
		p.Add(g.entries.Prefix(it.family, it.id))
	}
	return slices.Clone(p.Bytes())
}

// append adds a segment to the log and wakes members.
func (g *Group) append(s segment) {
	if len(g.members) == 0 {
		return
	}
	for _, m := range g.members {
		if m.pinned {
			s.waiting++
		}
	}
	if s.waiting > 0 {
		if g.log.append(s); g.log.sinceGen > span {
			g.log.sinceGen = 0
			g.gen++
		}
		for g.log.size > g.log.limit {
			g.overflow()
		}
	}
	for _, m := range g.members {
		m.rouse()
	}
}

// overflow drops the oldest segment. Who has not read it is behind.
func (g *Group) overflow() {
	for _, m := range g.members {
		if !m.pinned || m.cursor != g.log.base {
			continue
		}
		from := g.log.segments[0].gen
		g.unpin(m)
		if m.phase == scanning {
			m.lost = true
		} else {
			m.phase, m.from = behind, from
		}
	}
	g.log.trim()
}

// unpin has the log no longer wait for a member.
func (g *Group) unpin(m *Member) {
	if !m.pinned {
		return
	}
	m.pinned = false
	for i := m.cursor; i < g.log.end(); i++ {
		g.log.at(i).waiting--
	}
	g.log.trim()
}

// purge forgets prefixes that are no longer advertised, once all members know.
func (g *Group) purge() {
	if len(g.gone) == 0 || len(g.log.segments) > 0 {
		return
	}
	if !g.settled() {
		return
	}
	for _, at := range g.gone {
		e := g.entries.At(at.family, at.id)
		e.listed = false
		if e.set == 0 && !e.dirty {
			g.entries.Remove(at.family, at.id)
		}
	}
	g.gone = nil
}

// settled reports whether all members read the log.
func (g *Group) settled() bool {
	return !slices.ContainsFunc(g.members, func(m *Member) bool { return m.phase != following })
}

// Close gives back what the group holds. It must have no members.
func (g *Group) Close() {
	g.Flush()
	for f := range wire.Family(wire.Families) {
		for id := uint32(1); id < g.entries.End(f); id++ {
			if e := g.entries.At(f, id); e.set != 0 {
				g.sets.Release(e.set)
			}
		}
	}
	g.entries = table.New[entry]()
}

func (g *Group) member(p rib.Peer) *Member {
	if p == None {
		return nil
	}
	i := slices.IndexFunc(g.members, func(m *Member) bool { return m.peer == p })
	if i < 0 {
		return nil
	}
	return g.members[i]
}
