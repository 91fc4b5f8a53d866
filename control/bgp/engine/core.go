package engine

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/group"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Who reads the table's changes.
const (
	forCaller rib.Reader = iota
	forGroups
)

// step is how many prefixes are gone over before others have their turn.
const step = 4096

// core is the engine without connections, goroutines and clock. Its caller holds a lock.
type core struct {
	options Options
	id      uint32
	start   time.Time
	now     time.Time

	sets     *attrs.Table
	rib      *rib.RIB
	peers    map[netip.Addr]*peer
	numbers  []*peer // by rib.Peer; nil: the local one, or none
	local    rib.Peer
	own      map[wire.Prefix]attrs.Handle // what it originates; the path of each holds its attributes
	policy   Policy
	clusters map[uint32]int // clients of this side by the id of their cluster (RFC 4456)
	groups   []*updates     // in the order in which they were made
	tasks    []task
	fills    []task // of new groups, which wait for no task
	news     news
	waiting  restarting
	orders   []order
	stride   int    // prefixes of a step
	tap      *tap   // nil: there is no monitor
	halted   bool   // nothing more is advertised or withdrawn: the engine ends
	path     Path   // that others are shown
	poke     func() // has the caller see to tasks, orders and times; it must not wait
}

// peer is what the core knows of one.
type peer struct {
	config   Peer
	number   rib.Peer
	judge    Judge // of what it announces; nil: all is accepted
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

// task is something that is done in steps.
type task struct {
	step func(n int) (done bool)
	done func() // nil: nothing
}

// order is something that the core has its caller do without the lock.
type order struct {
	kind orderKind
	peer *peer
}

type orderKind uint8

const (
	orderPause      orderKind = iota // stop the peer for the time after a limit
	orderForwarding                  // later OPENs say that routes were kept
	orderRestarted                   // later OPENs of all peers say no more that this side restarts
)

func newCore(o Options, now time.Time) *core {
	c := &core{
		options: o, id: idOf(o.RouterID), start: now, now: now, sets: attrs.NewTable(), peers: map[netip.Addr]*peer{},
		own: map[wire.Prefix]attrs.Handle{}, clusters: map[uint32]int{}, policy: o.Policy, stride: step, poke: func() {},
	}
	if c.policy == nil {
		c.policy = openPolicy{}
	}
	c.rib = rib.New(c.sets)
	c.local = c.rib.AddPeer(rib.PeerInfo{RouterID: c.id, Local: true})
	c.number(c.local, nil)
	if o.Restarting {
		c.waiting = restarting{on: true, until: now.Add(o.Deferral)}
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

func (c *core) number(n rib.Peer, p *peer) {
	for int(n) >= len(c.numbers) {
		c.numbers = append(c.numbers, nil)
	}
	c.numbers[n] = p
}

// at sets the time.
func (c *core) at(now time.Time) {
	c.now = now
	c.rib.SetTime(uint32(now.Sub(c.start) / time.Second))
}

func (c *core) do(kind orderKind, p *peer) {
	c.orders = append(c.orders, order{kind, p})
	c.poke()
}

// localAS is this side's AS on a session.
func (c *core) localAS(p *Peer) uint32 {
	if p.LocalAS != 0 {
		return p.LocalAS
	}
	return c.options.AS
}

func (c *core) info(p *peer) rib.PeerInfo {
	i := rib.PeerInfo{Addr: p.config.Addr, RouterID: p.open.ID, External: p.external}
	for f := range i.Limit {
		i.Limit[f] = p.config.Families[f].Limit
	}
	return i
}

func (c *core) addPeer(config Peer) *peer {
	p := &peer{config: config, external: config.AS != c.localAS(&config), judge: c.policy.Import(config)}
	p.number = c.rib.AddPeer(c.info(p))
	c.number(p.number, p)
	c.peers[config.Addr] = p
	c.cluster(config.ClusterID, 1)
	return p
}

// changePeer gives a peer settings that do not concern its session.
func (c *core) changePeer(p *peer, config Peer) {
	was := p.config
	p.config = config
	p.judge = c.policy.Import(config)
	c.rib.SetPeer(p.number, c.info(p))
	if p.member != nil {
		c.regroup(p)
	}
	if was.AllowOwnAS != config.AllowOwnAS {
		c.rejudge(Scope{Import: true, Peers: []netip.Addr{config.Addr}})
	}
	c.cluster(was.ClusterID, -1)
	c.cluster(config.ClusterID, 1)
	if was.ClusterID != config.ClusterID { // others' are no longer reflected to it, or its own to others
		c.rejudge(Scope{Import: true, Export: true})
	}
	c.settle()
}

// removePeer has no more to do with a peer whose session has been ended. What it
// announced goes in steps.
func (c *core) removePeer(p *peer) {
	p.removed = true
	c.cluster(p.config.ClusterID, -1)
	if p.session != nil {
		c.down(p, p.session, fsm.Reason{Cause: fsm.Stopped})
	}
	delete(c.peers, p.config.Addr)
	for f := range wire.Family(wire.Families) {
		c.rib.Restart(p.number, f)
		p.families[f] = familyState{}
	}
	w := &rib.Walk{Peer: p.number, Task: rib.RemoveStale}
	c.later(func(n int) bool { return c.rib.Step(w, n) }, func() {
		c.settle() // groups still know the number
		c.rib.RemovePeer(p.number)
		c.number(p.number, nil)
	})
	c.checkRestarted()
}

// fill has a new group filled in steps.
func (c *core) fill(step func(n int) (done bool), done func()) {
	if !c.halted {
		c.fills = append(c.fills, task{step, done})
		c.poke()
	}
}

// later has something done in steps, after what is under way.
func (c *core) later(step func(n int) bool, done func()) {
	if !c.halted {
		c.tasks = append(c.tasks, task{step, done})
		c.poke()
	}
}

// work does the next step of what is under way, and reports whether there is more.
func (c *core) work() (more bool) {
	if c.halted {
		return false
	}
	for _, list := range []*[]task{&c.fills, &c.tasks} {
		if len(*list) == 0 {
			continue
		}
		t := (*list)[0]
		done := t.step(c.stride)
		c.settle()
		if done {
			*list = slices.Delete(*list, 0, 1)
			if t.done != nil {
				t.done()
			}
		}
	}
	more = len(c.fills)+len(c.tasks) > 0
	if !more {
		c.checkRestarted()
	}
	return more
}

// announce makes the own paths those of a list: new ones first, so that an aggregate or
// a part of it is there throughout.
func (c *core) announce(list []Origin) {
	c.put(list)
	want := make(map[wire.Prefix]bool, len(list))
	for i := range list {
		want[wire.FromNetip(list[i].Prefix)] = true
	}
	for p := range c.own {
		if !want[p] {
			c.end(p)
		}
	}
	c.settle()
}

// update makes some of the own paths others, and ends some, in that order.
func (c *core) update(list []Origin, gone []netip.Prefix) {
	c.put(list)
	for _, p := range gone {
		if p := wire.FromNetip(p); c.own[p] != 0 {
			c.end(p)
		}
	}
	c.settle()
}

// put makes own paths.
func (c *core) put(list []Origin) {
	var set attrs.Handle // of the origin before, which most share
	for i := range list {
		if i == 0 || !list[i].equal(&list[i-1]) {
			c.release(set)
			set = c.originate(&list[i])
		}
		p := wire.FromNetip(list[i].Prefix)
		if old, ok := c.own[p]; ok && old == set {
			continue
		}
		c.own[p] = set
		c.rib.Announce(c.local, p, set, true)
	}
	c.release(set)
}

// end ends an own path.
func (c *core) end(p wire.Prefix) {
	c.rib.Withdraw(c.local, p)
	delete(c.own, p)
}

// release releases a set; zero: there is none.
func (c *core) release(h attrs.Handle) {
	if h != 0 {
		c.sets.Release(h)
	}
}

// equal reports whether two have the same attributes.
func (o *Origin) equal(q *Origin) bool {
	return o.Prefix.Addr().Is6() == q.Prefix.Addr().Is6() &&
		o.NextHop == q.NextHop && o.LocalPref == q.LocalPref && slices.Equal(o.Communities, q.Communities) && slices.Equal(o.Large, q.Large)
}

// originate returns the attributes of an own path.
func (c *core) originate(o *Origin) attrs.Handle {
	hop := make([]byte, 4)
	if o.Prefix.Addr().Is6() {
		hop = make([]byte, 16)
	}
	if o.NextHop.IsValid() && !o.NextHop.IsUnspecified() {
		hop = o.NextHop.AsSlice()
	}
	bare := c.sets.Put(hop, []byte{0x40, 1, 1, 0, 0x40, 2, 0}) // ORIGIN IGP, an empty AS_PATH
	defer c.sets.Release(bare)
	e := &attrs.Edit{Communities: o.Communities, Large: o.Large}
	if o.LocalPref != 0 {
		e.LocalPref = &o.LocalPref
	}
	return c.sets.Advertise(bare, &attrs.Change{Edit: e})
}

// setPolicy judges what comes from now on by another policy.
func (c *core) setPolicy(p Policy) {
	c.policy = p
	for _, q := range c.peers {
		q.judge = p.Import(q.config)
	}
	for _, q := range c.ordered() {
		if u := cmp.Or(q.moving, q.updates); u != nil {
			u.of = q.config
		}
	}
	for _, u := range c.groups {
		u.judge = p.Export(u.of)
		u.forget(c.sets)
	}
}
