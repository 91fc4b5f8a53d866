package group

import (
	"encoding/binary"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// phase is where a member reads.
type phase uint8

const (
	scanning  phase = iota // the table; the log after that
	following              // the log
	behind                 // nowhere yet: the log no longer has what it is to read next
	held                   // nowhere yet: the group does not have all that it advertises
)

// MemberOptions are those of one member.
type MemberOptions struct {
	Families  [wire.Families]bool // that its session has
	HoldEOR   bool                // End-of-RIB waits for [Member.AllowEOR]
	NoEOR     bool                // the peer has no use for it
	Demarcate bool                // what a refresh begins and ends with (RFC 7313)
	Held      bool                // nothing of the group is sent before [Group.Release]
	Wake      func()              // called when [Member.Next] has something again; it must not wait
}

// Member is a peer with a session.
type Member struct {
	MemberOptions
	group *Group
	peer  rib.Peer
	own   [][]byte // to be sent before all else
	idle  bool

	phase  phase
	pinned bool // the log waits for it
	cursor uint64
	lost   bool // while it walked the log has gone on without it

	// A walk is about what changed in generations from from, but before until.
	from, until uint32
	next        uint32 // from where the next walk goes on, should the log be lost
	fresh       bool   // it has nothing that could have to be withdrawn
	refreshing  bool   // it asked for the walk, or for one of which it is the rest
	refreshed   wire.Family
	last        wire.Family
	family      wire.Family
	at          uint32

	refresh [wire.Families]bool // asked for
	eorDue  bool
	eorAt   uint64 // it goes before this segment
}

// Join adds a peer, which is sent all that the group advertises.
func (g *Group) Join(p rib.Peer, o MemberOptions) *Member {
	m := &Member{MemberOptions: o, group: g, peer: p}
	g.members = append(g.members, m)
	if o.Held {
		m.phase = held
	} else {
		m.begin(0, true)
	}
	m.HoldEOR = o.HoldEOR && !o.NoEOR
	if !o.HoldEOR && !o.NoEOR {
		m.eorDue, m.eorAt = true, g.log.end()
	}
	m.idle = true
	m.rouse()
	return m
}

// Release has the members that are held sent what the group advertises.
func (g *Group) Release() {
	for _, m := range g.members {
		if m.phase == held {
			m.begin(0, true)
			m.rouse()
		}
	}
}

// Leave removes a member: its session has ended.
func (m *Member) Leave() {
	g := m.group
	g.Flush()
	g.unpin(m)
	g.members = slices.DeleteFunc(g.members, func(o *Member) bool { return o == m })
	g.purge()
}

// Move has a member of another group go over to this one: it is sent what differs.
// The member that it was is gone.
func (g *Group) Move(old *Member) *Member {
	from := old.group
	from.Flush()
	g.Flush()
	m := &Member{MemberOptions: old.MemberOptions, group: g, peer: old.peer, own: old.own, refresh: old.refresh}
	if old.phase == following {
		for ; old.cursor < from.log.end(); old.step() {
			if s := from.log.at(old.cursor); old.concerns(s) {
				m.own = append(m.own, s.data)
			}
		}
	}
	g.packer.Reset()
	for f := range wire.Family(wire.Families) {
		if !m.Families[f] || old.phase == held { // who was sent nothing
			continue
		}
		g.packer.Withdraw(f)
		for id := uint32(1); id < from.entries.End(f); id++ {
			if e := from.entries.At(f, id); e.gen != 0 {
				if p := from.entries.Prefix(f, id); g.Lookup(m.peer, p) == 0 {
					g.packer.Add(p)
				}
			}
		}
	}
	if b := g.packer.Bytes(); len(b) > 0 {
		m.own = append(m.own, slices.Clone(b))
	}
	old.Leave()
	g.members = append(g.members, m)
	m.begin(0, true)
	if old.phase == scanning && old.refreshing { // what has begun ends with this walk
		m.refreshing, m.refreshed = true, old.refreshed
	}
	if old.eorDue {
		m.eorDue, m.eorAt = true, g.log.end()
	}
	m.idle = true
	m.rouse()
	return m
}

// AllowEOR has End-of-RIB sent after what is advertised by now.
func (m *Member) AllowEOR() {
	if m.HoldEOR {
		m.group.Flush()
		m.HoldEOR, m.eorDue, m.eorAt = false, true, m.group.log.end()
		m.rouse()
	}
}

// Refresh has all of a family sent again (RFC 2918). Where that has a begin and an end it waits for End-of-RIB: who restarts has
// not all yet, and what is missing at the end would count as withdrawn (RFC 7313 section 4).
func (m *Member) Refresh(f wire.Family) {
	if m.Families[f] {
		m.refresh[f] = true
		m.rouse()
	}
}

// Send has one more message sent, in its turn.
func (m *Member) Send(b []byte) {
	m.own = append(m.own, b)
	m.rouse()
}

// rouse wakes a member that has run out of messages.
func (m *Member) rouse() {
	if m.idle {
		m.idle = false
		m.Wake()
	}
}

// Next returns messages for the member, of about limit bytes; none: Wake is called when
// there are some. They are not changed any more.
func (m *Member) Next(limit int) (out [][]byte) {
	g := m.group
	g.Flush()
	for size := 0; size < limit; {
		switch {
		case len(m.own) > 0:
			for _, b := range m.own {
				size += len(b)
			}
			out = append(out, m.own...)
			m.own = nil
		case m.phase == held:
			m.idle = len(out) == 0
			return out
		case m.phase == behind:
			m.begin(m.from, false)
		case m.phase == scanning:
			m.scan(limit - size)
		case m.eorDue && m.cursor >= m.eorAt:
			m.eorDue = false
			m.endOfRIB()
		case m.cursor < g.log.end():
			if s := g.log.at(m.cursor); m.concerns(s) {
				out = append(out, s.data)
				size += len(s.data)
			}
			m.step()
		case m.refresh != [wire.Families]bool{} && !(m.HoldEOR && m.Demarcate):
			m.beginRefresh()
		default:
			if len(out) == 0 {
				m.idle = true
			}
			g.log.trim()
			g.purge()
			return out
		}
	}
	g.log.trim()
	return out
}

// concerns reports whether a segment is for the member.
func (m *Member) concerns(s *segment) bool {
	return s.only == m.peer || s.only == None && s.skip != m.peer
}

// step leaves a segment behind.
func (m *Member) step() {
	m.group.log.at(m.cursor).waiting--
	m.cursor++
}

// begin begins a walk over what changed from a generation on. What changes from now
// on is the log's.
func (m *Member) begin(from uint32, fresh bool) {
	g := m.group
	g.Flush()
	g.gen++
	m.phase, m.lost, m.fresh, m.refreshing = scanning, false, fresh, false
	m.from, m.until, m.next = from, g.gen, g.gen
	m.family, m.last, m.at = 0, wire.Families-1, 1
	m.pin()
}

func (m *Member) pin() {
	if !m.pinned {
		m.pinned, m.cursor = true, m.group.log.end()
	}
}

// beginRefresh begins a walk over all of a family, whatever changes meanwhile: what is
// not sent before its end counts as withdrawn (RFC 7313).
func (m *Member) beginRefresh() {
	m.begin(0, true)
	for f := range m.refresh {
		if m.refresh[f] {
			m.refresh[f] = false
			m.family, m.last = wire.Family(f), wire.Family(f)
			break
		}
	}
	m.refreshing, m.refreshed, m.until = true, m.family, ^uint32(0)
	if m.Demarcate {
		m.own = append(m.own, demarcation(m.family, 1))
	}
}

// demarcation is the ROUTE-REFRESH that stands at the begin, 1, or end, 2, of a refresh
// (RFC 7313 section 3.2).
func demarcation(f wire.Family, subtype byte) []byte {
	body := binary.BigEndian.AppendUint16(nil, f.AFI())
	return wire.AppendMessage(nil, wire.RouteRefresh, append(body, subtype, 1))
}

// mayHave reports whether the member may have been sent, before it fell behind, what the group
// does not advertise to it any more, so that it may have a prefix of which it is the source
// itself: its walk, which would say so, passes over what has changed since it began.
func (m *Member) mayHave() bool { return m != nil && m.phase == scanning && !m.fresh }

// scanned is how many entries a walk looks at before others have their turn.
const scanned = 1 << 14

// scan walks on, for about limit bytes.
func (m *Member) scan(limit int) {
	g := m.group
	items := g.items[:0]
	for n := 0; n < scanned && len(items) <= limit/8 && m.family <= m.last; n++ {
		if !m.Families[m.family] || m.at >= g.entries.End(m.family) {
			m.family, m.at = m.family+1, 1
			continue
		}
		at := place{m.family, m.at}
		m.at++
		e := g.entries.At(at.family, at.id)
		switch {
		case e.gen == 0 || e.gen < m.from || e.gen >= m.until:
		case e.set != 0 && e.source != m.peer:
			items = append(items, item{place: at, announce: true, set: e.set})
		case !m.fresh:
			items = append(items, item{place: at})
		}
	}
	slices.SortStableFunc(items, func(a, b item) int { return a.compare(&b) })
	if len(items) > 0 {
		m.own = append(m.own, g.pack(items))
	}
	g.items = items[:0]
	if m.family <= m.last {
		return
	}
	if m.refreshing && m.Demarcate {
		m.own = append(m.own, demarcation(m.refreshed, 2))
	}
	if m.lost {
		m.begin(m.next, false)
		return
	}
	m.phase = following
}

func (m *Member) endOfRIB() {
	p := &m.group.packer
	p.Reset()
	for f := range wire.Family(wire.Families) {
		if m.Families[f] {
			p.EndOfRIB(f)
		}
	}
	m.own = append(m.own, slices.Clone(p.Bytes()))
}
