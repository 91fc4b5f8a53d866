package engine

import (
	"cmp"
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

// updates is an update group and how its paths are made.
type updates struct {
	*group.Group
	groupKey
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

func (c *core) keyOf(p *peer) groupKey {
	s := p.session
	k := groupKey{
		export: p.config.ExportKey, as: p.config.AS, localAS: c.localAS(&p.config), local: p.local.WithZone(""), cluster: p.config.ClusterID,
		as4: s.AS4, extended: s.Wire.ExtendedNextHop, longest: s.LongestSent,
	}
	for f := range k.families {
		k.families[f] = s.Wire.Family[f].Enabled
		k.longLived[f] = s.Peer.Family[f].StaleTime > 0
	}
	return k
}

// updatesOf returns the group of a peer, which it makes if need be. One that is new is filled
// in steps: members are sent nothing of it before it is complete.
func (c *core) updatesOf(p *peer) *updates {
	key := c.keyOf(p)
	for _, u := range c.groups {
		if u.groupKey == key {
			return u
		}
	}
	u := &updates{
		Group: group.New(c.sets, group.Options{Longest: key.longest}), groupKey: key, of: p.config,
		external: p.external, judge: c.policy.Export(p.config), filling: true,
	}
	c.groups = append(c.groups, u)
	// What changes meanwhile is exported as it changes. A prefix that is exported twice is
	// the same twice.
	var at rib.Cursor
	c.fill(func(n int) bool {
		return u.members == 0 || c.rib.Scan(&at, n, func(prefix wire.Prefix, all rib.Paths) { c.export(u, prefix, all) })
	}, func() { c.filled(u) })
	return u
}

// filled lets peers hear of a group that has all it is to advertise.
func (c *core) filled(u *updates) {
	u.filling = false
	u.Flush()
	u.Release()
	arrivals := u.arrivals
	u.arrivals = nil
	for _, p := range arrivals {
		if p.moving == u {
			c.arrive(p)
		}
	}
}

func (c *core) join(p *peer, wake func()) {
	p.updates = c.updatesOf(p)
	p.updates.members++
	o := c.memberOptions(p, wake)
	o.Held = p.updates.filling
	p.member = p.updates.Join(p.number, o)
}

func (c *core) leave(p *peer) {
	c.stay(p)
	if p.member != nil {
		p.member.Leave()
		p.member = nil
		c.abandon(p.updates)
		p.updates = nil
	}
}

// abandon takes a member's group down with the last member.
func (c *core) abandon(u *updates) {
	if u.members--; u.members > 0 {
		return
	}
	u.Close()
	u.forget(c.sets)
	c.groups = slices.DeleteFunc(c.groups, func(o *updates) bool { return o == u })
}

// regroup moves a peer to the group that its settings ask for.
func (c *core) regroup(p *peer) {
	u := c.updatesOf(p)
	u.members++
	c.stay(p)
	p.moving = u
	switch {
	case u == p.updates:
		c.stay(p)
	case u.filling:
		u.arrivals = append(u.arrivals, p)
	default:
		c.arrive(p)
	}
}

// stay has a peer not go over to another group, should it be about to.
func (c *core) stay(p *peer) {
	if u := p.moving; u != nil {
		p.moving = nil
		c.abandon(u)
	}
}

// arrive has a peer go over to the group that it is about to.
func (c *core) arrive(p *peer) {
	old, u := p.updates, p.moving
	p.member, p.updates, p.moving = u.Move(p.member), u, nil
	c.abandon(old)
}

// settle hands changes of the table on to the groups.
func (c *core) settle() {
	if c.halted {
		return
	}
	for c.rib.Changes(forGroups, step, func(prefix wire.Prefix, chosen rib.Paths) {
		for _, u := range c.groups {
			c.export(u, prefix, chosen)
		}
		c.tap.chosen(c, prefix, chosen)
	}) {
	}
	c.tap.flush(c)
	for _, u := range c.groups {
		u.Flush()
	}
}

// export gives a group what it advertises of a prefix.
func (c *core) export(u *updates, prefix wire.Prefix, paths rib.Paths) {
	prefix.ID = 0
	best, ok := paths.Best()
	if !ok {
		u.Update(prefix, 0, group.None)
		return
	}
	source := best.Peer
	if source == c.local {
		source = group.None
	}
	if !u.Update(prefix, c.advertised(u, prefix, best), source) && c.options.Log != nil {
		c.options.Log.Warn("bgp path attributes leave no room in a message: the prefix is not advertised", "prefix", prefix.Netip())
	}
}

// advertised returns what a group is sent of a path, with a reference; 0: nothing.
func (c *core) advertised(u *updates, prefix wire.Prefix, best rib.Path) attrs.Handle {
	from := c.numbers[best.Peer] // nil: the path begins here
	if !u.families[prefix.Family] || from != nil && !c.mayGo(u, prefix.Family, from, best.Set) {
		return 0
	}
	var edit *attrs.Edit
	if u.judge != nil {
		c.path = c.pathOf(prefix, best)
		v := u.judge(&c.path)
		if !v.Accept {
			return 0
		}
		edit = v.Edit
	}
	m := &u.memo
	if m.in != best.Set || m.edit != edit || m.family != prefix.Family || m.from != best.Peer {
		out := c.make(u, prefix.Family, from, best.Set, edit)
		u.forget(c.sets)
		c.sets.Retain(best.Set)
		m.in, m.out, m.edit, m.family, m.from = best.Set, out, edit, prefix.Family, best.Peer
	}
	if m.out != 0 {
		c.sets.Retain(m.out)
	}
	return m.out
}

func (u *updates) forget(sets *attrs.Table) {
	for _, h := range []attrs.Handle{u.memo.in, u.memo.out} {
		if h != 0 {
			sets.Release(h)
		}
	}
	u.memo.in, u.memo.out = 0, 0
}

// mayGo reports whether BGP's own rules let a path of a peer go to a group (RFC 4271
// section 9.2, RFC 1997, RFC 4456 section 6, RFC 9494 section 4.3).
func (c *core) mayGo(u *updates, f wire.Family, from *peer, set attrs.Handle) bool {
	v := c.sets.View(set)
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
func (c *core) make(u *updates, f wire.Family, from *peer, set attrs.Handle, edit *attrs.Edit) attrs.Handle {
	hop := c.nextHop(u, f, from, set, edit)
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
	return c.sets.Advertise(set, &change)
}

// nextHop returns the next hop of a path as a group is sent it (RFC 4271 section
// 5.1.3, RFC 8950); nil: there is none that the peers can use.
func (c *core) nextHop(u *updates, f wire.Family, from *peer, set attrs.Handle, edit *attrs.Edit) []byte {
	v := c.sets.View(set)
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
