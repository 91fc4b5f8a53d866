package engine

import (
	"cmp"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/group"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// groupKey is all that decides what a peer is sent, but for what came from itself.
type groupKey struct {
	export      string
	as, localAS uint32
	local       netip.Addr // this side's address, which is the next hop
	cluster     netip.Addr // valid: clients of a route reflector
	families    [wire.Families]bool
	longLived   [wire.Families]bool // the peer has RFC 9494
	as4         bool
	extended    bool // RFC 8950
	longest     int
}

// groups is the update groups, and which peer is a member of which.
type groups struct {
	table  *table
	agenda *agenda
	policy func(Peer) Judge
	log    *slog.Logger
	list   []*updates // in the order in which they were made
}

// updates is an update group and how its paths are made.
type updates struct {
	*group.Group
	groupKey
	table    *table
	log      *slog.Logger
	of       Peer // one of its peers
	external bool
	judge    Judge // nil: all is advertised
	members  int   // peers that are members, or are to be
	filling  bool
	arrivals []*peer // members of other groups that are to be of this one when it is filled

	// memo is what was made last: prefixes come by the hundred with one set.
	memo struct {
		in, out attrs.Handle // with a reference each
		edit    *attrs.Edit
		family  wire.Family
		from    rib.Peer
	}
}

func (p *peer) groupKey() groupKey {
	s := p.session
	k := groupKey{
		export: p.config.ExportKey, as: p.config.AS, localAS: p.localAS, local: p.local.WithZone(""), cluster: p.config.ClusterID,
		as4: s.AS4, extended: s.Wire.ExtendedNextHop, longest: s.LongestSent,
	}
	for f := range k.families {
		k.families[f] = s.Wire.Family[f].Enabled
		k.longLived[f] = s.Peer.Family[f].StaleTime > 0
	}
	return k
}

// of returns the group of a peer, which it makes if need be. One that is new is filled
// in steps: members are sent nothing of it before it is complete.
func (g *groups) of(p *peer) *updates {
	key := p.groupKey()
	for _, u := range g.list {
		if u.groupKey == key {
			return u
		}
	}
	u := &updates{
		Group: group.New(g.table.sets, group.Options{Longest: key.longest}), groupKey: key, table: g.table, log: g.log, of: p.config,
		external: p.external, judge: g.policy(p.config), filling: true,
	}
	g.list = append(g.list, u)
	// What changes meanwhile is exported as it changes. A prefix that is exported twice is
	// the same twice.
	var at rib.Cursor
	g.agenda.fill(func(n int) bool { return u.members == 0 || g.table.rib.Scan(&at, n, u.export) }, func() { g.filled(u) })
	return u
}

// filled lets peers hear of a group that has all it is to advertise.
func (g *groups) filled(u *updates) {
	u.filling = false
	u.Flush()
	u.Release()
	arrivals := u.arrivals
	u.arrivals = nil
	for _, p := range arrivals {
		if p.moving == u {
			g.arrive(p)
		}
	}
}

// join makes a peer whose session is up a member of its group.
func (g *groups) join(p *peer, o group.MemberOptions) {
	p.updates = g.of(p)
	p.updates.members++
	o.NoEOR, o.Demarcate, o.Held = !p.open.GracefulRestart, p.session.EnhancedRefresh, p.updates.filling
	for f := range o.Families {
		o.Families[f] = p.session.Wire.Family[f].Enabled
	}
	p.member = p.updates.Join(p.number, o)
}

func (g *groups) leave(p *peer) {
	g.stay(p)
	if p.member != nil {
		p.member.Leave()
		p.member = nil
		g.abandon(p.updates)
		p.updates = nil
	}
}

// abandon takes a member's group down with the last member.
func (g *groups) abandon(u *updates) {
	if u.members--; u.members > 0 {
		return
	}
	u.Close()
	u.forget()
	g.list = slices.DeleteFunc(g.list, func(o *updates) bool { return o == u })
}

// move moves a peer to the group that its settings ask for.
func (g *groups) move(p *peer) {
	u := g.of(p)
	u.members++
	g.stay(p)
	p.moving = u
	switch {
	case u == p.updates:
		g.stay(p)
	case u.filling:
		u.arrivals = append(u.arrivals, p)
	default:
		g.arrive(p)
	}
}

// stay has a peer not go over to another group, should it be about to.
func (g *groups) stay(p *peer) {
	if u := p.moving; u != nil {
		p.moving = nil
		g.abandon(u)
	}
}

// arrive has a peer go over to the group that it is about to.
func (g *groups) arrive(p *peer) {
	old, u := p.updates, p.moving
	p.member, p.updates, p.moving = u.Move(p.member), u, nil
	g.abandon(old)
}

// export has the group advertise what it does of a prefix.
func (u *updates) export(prefix wire.Prefix, paths rib.Paths) {
	prefix.ID = 0
	best, ok := paths.Best()
	if !ok {
		u.Update(prefix, 0, group.None)
		return
	}
	from, source := u.table.peers[best.Peer], best.Peer
	if from == nil {
		source = group.None // the path begins here
	}
	if !u.Update(prefix, u.advertised(prefix, best, from), source) && u.log != nil {
		u.log.Warn("bgp path attributes leave no room in a message: the prefix is not advertised", "prefix", prefix.Netip())
	}
}

// advertised returns what the group is sent of a path of a peer, nil for an own one, with a reference; 0: nothing.
func (u *updates) advertised(prefix wire.Prefix, best rib.Path, from *peer) attrs.Handle {
	if !u.families[prefix.Family] || from != nil && !u.mayGo(prefix.Family, from, best.Set) {
		return 0
	}
	var edit *attrs.Edit
	if u.judge != nil {
		u.table.path = u.table.pathOf(prefix, best)
		v := u.judge(&u.table.path)
		if !v.Accept {
			return 0
		}
		edit = v.Edit
	}
	m := &u.memo
	if m.in != best.Set || m.edit != edit || m.family != prefix.Family || m.from != best.Peer {
		out := u.make(prefix.Family, from, best.Set, edit)
		u.forget()
		u.table.sets.Retain(best.Set)
		m.in, m.out, m.edit, m.family, m.from = best.Set, out, edit, prefix.Family, best.Peer
	}
	if m.out != 0 {
		u.table.sets.Retain(m.out)
	}
	return m.out
}

func (u *updates) forget() {
	for _, h := range []attrs.Handle{u.memo.in, u.memo.out} {
		if h != 0 {
			u.table.sets.Release(h)
		}
	}
	u.memo.in, u.memo.out = 0, 0
}

// mayGo reports whether BGP's own rules let a path of a peer go to a group (RFC 4271
// section 9.2, RFC 1997, RFC 4456 section 6, RFC 9494 section 4.3).
func (u *updates) mayGo(f wire.Family, from *peer, set attrs.Handle) bool {
	v := u.table.sets.View(set)
	switch {
	case v.Flags&attrs.NoAdvertise != 0,
		u.external && v.Flags&(attrs.NoExport|attrs.NoExportSubconfed) != 0,
		v.Flags&attrs.LLGRStale != 0 && !u.longLived[f],
		!u.external && !from.external && !u.cluster.IsValid() && !from.config.ClusterID.IsValid():
		return false
	}
	return v.PathLen == 0 || v.CountAS(u.as) == 0
}

// make returns the attributes of a path as a group is sent it; 0: there is no next hop
// for it.
func (u *updates) make(f wire.Family, from *peer, set attrs.Handle, edit *attrs.Edit) attrs.Handle {
	hop := u.nextHop(f, from, set, edit)
	if hop == nil {
		return 0
	}
	change := attrs.Change{Edit: edit, NextHop: hop, TwoOctet: !u.as4}
	switch {
	case u.external:
		change.PrependAS, change.External = u.localAS, true
		change.Drop = attrs.InternalAttributes
		if from != nil {
			change.Drop = append(slices.Clone(attrs.MED), attrs.InternalAttributes...)
		}
	case from != nil && !from.external: // reflected
		change.LocalPref, change.Originator = true, from.open.ID
		change.Cluster = idOf(cmp.Or(u.cluster, from.config.ClusterID))
	default:
		change.LocalPref = true
	}
	return u.table.sets.Advertise(set, &change)
}

// nextHop returns the next hop of a path as a group is sent it (RFC 4271 section
// 5.1.3, RFC 8950); nil: there is none that the peers can use.
func (u *updates) nextHop(f wire.Family, from *peer, set attrs.Handle, edit *attrs.Edit) []byte {
	v := u.table.sets.View(set)
	hop := v.NextHopAddr()
	mode := attrs.NextHopAuto
	if edit != nil {
		mode = edit.NextHop
	}
	self := mode == attrs.NextHopSelf || !hop.IsValid() || hop.IsUnspecified()
	if mode == attrs.NextHopAuto && from != nil {
		self = self || u.external || hop.IsLinkLocalUnicast() // which means something on its link only
	}
	if self {
		hop = u.local
	}
	if f == wire.IPv6 && !hop.Is6() || f == wire.IPv4 && hop.Is6() && !u.extended {
		return nil
	}
	return hop.AsSlice()
}
