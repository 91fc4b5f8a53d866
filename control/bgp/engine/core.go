package engine

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/group"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// core is the engine without connections, goroutines and clock: the peers, and what one does to all that its
// parts own. Its caller holds a lock.
type core struct {
	options  Options
	peers    map[netip.Addr]*peer
	table    *table
	inbound  inbound
	own      origins
	groups   groups
	kept     retention
	agenda   *agenda
	events   *events
	starting restarting
	tap      *tap // nil: there is no monitor
	halted   bool // nothing more is advertised or withdrawn: the engine ends
}

// peer is what the core knows of one.
type peer struct {
	config   Peer
	number   rib.Peer
	judge    Judge // of what it announces, by the policy as it is now; nil: not made yet, or all is accepted
	localAS  uint32
	external bool
	removed  bool // from the configuration: what it announced is going

	session *fsm.Session // nil: none is up
	open    fsm.Open     // the last one of the peer
	local   netip.Addr
	decoder wire.Decoder
	context attrs.Context
	updates *updates
	moving  *updates // it is to be a member of this one, which is being filled; nil: no other
	member  *group.Member
	limited bool

	localPort, remotePort uint16 // of the session's connection

	complete bool // it has announced all it has since the engine was started
	families [wire.Families]familyState
}

func newCore(o Options, now time.Time) *core {
	t, a := newTable(now), &agenda{stride: step, poke: func() {}}
	e := &events{table: t}
	id := idOf(o.RouterID)
	c := &core{
		options: o, peers: map[netip.Addr]*peer{}, table: t, agenda: a, events: e,
		inbound: inbound{table: t, log: o.Log, id: id, clients: map[uint32]int{}},
		own:     origins{table: t, local: t.add(nil, rib.PeerInfo{RouterID: id, Local: true}), sets: map[wire.Prefix]attrs.Handle{}},
		groups:  groups{table: t, agenda: a, log: o.Log},
		kept:    retention{table: t, agenda: a, events: e},
	}
	if o.Policy == nil {
		o.Policy = openPolicy{}
	}
	c.setPolicy(o.Policy)
	if o.Restarting {
		c.starting = restarting{on: true, until: now.Add(o.Deferral)}
	}
	return c
}

// openPolicy accepts everything.
type openPolicy struct{}

func (openPolicy) Import(Peer) Judge { return nil }
func (openPolicy) Export(Peer) Judge { return nil }

func idOf(a netip.Addr) uint32 {
	if !a.Is4() {
		return 0
	}
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// localAS is this side's AS on a session.
func (o *Options) localAS(p *Peer) uint32 { return cmp.Or(p.LocalAS, o.AS) }

func (p *peer) info() rib.PeerInfo {
	i := rib.PeerInfo{Addr: p.config.Addr, RouterID: p.open.ID, External: p.external}
	for f := range i.Limit {
		i.Limit[f] = p.config.Families[f].Limit
	}
	return i
}

// ordered are the peers in the order of their addresses.
func (c *core) ordered() []*peer {
	return slices.SortedFunc(maps.Values(c.peers), func(a, b *peer) int { return a.config.Addr.Compare(b.config.Addr) })
}

func (c *core) addPeer(config Peer) *peer {
	p := &peer{config: config, localAS: c.options.localAS(&config)}
	p.external = config.AS != p.localAS
	p.number = c.table.add(p, p.info())
	c.peers[config.Addr] = p
	c.inbound.count(config.ClusterID, 1)
	return p
}

// changePeer gives a peer settings that do not concern its session.
func (c *core) changePeer(p *peer, config Peer) {
	was := p.config
	p.config = config
	p.judge = nil
	c.table.rib.SetPeer(p.number, p.info())
	if p.member != nil {
		c.groups.move(p)
	}
	if was.AllowOwnAS != config.AllowOwnAS {
		c.rejudge(Scope{Import: true, Peers: []netip.Addr{config.Addr}})
	}
	c.inbound.count(was.ClusterID, -1)
	c.inbound.count(config.ClusterID, 1)
	if was.ClusterID != config.ClusterID { // others' are no longer reflected to it, or its own to others
		c.rejudge(Scope{Import: true, Export: true})
	}
	c.settle()
}

// removePeer has no more to do with a peer whose session has been ended. What it
// announced goes in steps.
func (c *core) removePeer(p *peer) {
	p.removed = true
	c.inbound.count(p.config.ClusterID, -1)
	if p.session != nil {
		c.down(p, p.session, fsm.Reason{Cause: fsm.Stopped})
	}
	delete(c.peers, p.config.Addr)
	for f := range wire.Family(wire.Families) {
		c.table.rib.Restart(p.number, f)
		p.families[f] = familyState{}
	}
	c.agenda.walk(c.table, &rib.Walk{Peer: p.number, Task: rib.RemoveStale}, func() {
		c.settle() // groups still know the number
		c.table.remove(p.number)
	})
	c.checkRestarted()
}

// work does the next step of what is under way, and reports whether there is more.
func (c *core) work() (more bool) {
	if c.halted {
		return false
	}
	c.agenda.work(c.settle)
	if c.agenda.idle() {
		c.checkRestarted()
		return false
	}
	return true
}

// settle hands changes of the table on to the groups.
func (c *core) settle() {
	if c.halted {
		return
	}
	for c.table.rib.Changes(forGroups, step, func(prefix wire.Prefix, chosen rib.Paths) {
		for _, u := range c.groups.list {
			u.export(prefix, chosen)
		}
		c.tap.chosen(prefix, chosen)
	}) {
	}
	c.tap.flush()
	for _, u := range c.groups.list {
		u.Flush()
	}
}

// announce makes the own paths those of a list.
func (c *core) announce(list []Origin) {
	c.own.announce(list)
	c.settle()
}

// update makes some of the own paths others, and ends some, in that order.
func (c *core) update(list []Origin, gone []netip.Prefix) {
	c.own.update(list, gone)
	c.settle()
}

// setPolicy judges what comes from now on by another policy.
func (c *core) setPolicy(p Policy) {
	c.inbound.policy, c.groups.policy = p.Import, p.Export
	last := map[*updates]*peer{} // of each group, by address
	for _, q := range c.peers {
		q.judge = nil
		if u := cmp.Or(q.moving, q.updates); u != nil && (last[u] == nil || last[u].config.Addr.Less(q.config.Addr)) {
			last[u] = q
		}
	}
	for u, q := range last {
		u.of = q.config
	}
	for _, u := range c.groups.list {
		u.judge = p.Export(u.of)
		u.forget()
	}
}
