package engine

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/history"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

const (
	modelAS   = 65000
	restart   = 30 * time.Second
	staleTime = 100 * time.Second
	deferral  = 40 * time.Second
	noLLGR    = 0xffff0007
	noExport  = 0xffffff01
	noAdv     = 0xffffff02
)

var (
	modelLocal    = netip.MustParseAddr("10.9.9.9")
	modelPrefixes = []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("10.0.1.0/24"), netip.MustParsePrefix("172.16.0.0/12"),
	}
)

// modelPath is a path as the reference sees it.
type modelPath struct {
	pref        uint32 // 0: none
	path        []uint32
	hop         netip.Addr
	communities []uint32

	stale, longLived bool
}

// modelPeer is a fake peer and what it knows.
type modelPeer struct {
	t      *rapid.T
	m      *model
	config Peer
	id     uint32
	as4    bool
	llgr   bool
	gr     bool
	p      *peer // nil: it is not configured
	s      *fsm.Session
	woken  bool

	had   *history.History // what it was sent
	says  map[netip.Prefix]modelPath
	stage stage
	until time.Time

	ended    bool                    // it has sent End-of-RIB in this session
	said     bool                    // the caller has heard of that
	complete bool                    // it has announced all it has since it is configured
	promised map[netip.Prefix]string // what it has by its End-of-RIB, unless that changes before

	// It was removed before: while what it had announced goes in steps, that may be reflected to it, which ignores it for its
	// ORIGINATOR_ID (RFC 4456 section 8).
	again bool
}

func (m *modelPeer) external() bool { return m.config.AS != modelAS }

// modelPolicy is a policy that bit masks of prefixes describe.
type modelPolicy struct{ refuse, prefer, withhold int }

func bit(mask int, p netip.Prefix) bool { return mask>>slices.Index(modelPrefixes, p)&1 == 1 }

func (m modelPolicy) Import(q Peer) Judge {
	pref := uint32(300)
	edit := &attrs.Edit{LocalPref: &pref, Communities: []uint32{7}}
	return func(p *Path) Verdict {
		v := Verdict{Accept: !bit(m.refuse, p.Prefix) || q.Addr.As4()[3]%2 == 0}
		if bit(m.prefer, p.Prefix) {
			v.Edit = edit
		}
		return v
	}
}

func (m modelPolicy) Export(q Peer) Judge {
	return func(p *Path) Verdict { return Verdict{Accept: q.ExportKey[0] == 'x' || !bit(m.withhold, p.Prefix)} }
}

// model is a core, its peers, and what should be.
type model struct {
	t      *rapid.T
	c      *core
	now    time.Time
	policy modelPolicy
	own    map[netip.Prefix]Origin
	peers  []*modelPeer
	read   map[netip.Prefix]string
	seen   *seen

	waiting  bool // this side has restarted, and not all peers have announced what they have
	changing bool // the peers are being changed
}

// send has the core receive a message.
func (m *model) send(p *modelPeer, t wire.Type, msg []byte) {
	for len(msg) > 0 {
		_, body, n, err := wire.Frame(msg, wire.MaxLen)
		if err != nil || n == 0 {
			m.t.Fatal(err)
		}
		if fault := m.c.receive(p.p, p.s, t, body); fault != nil {
			m.t.Fatal(fault)
		}
		msg = msg[n:]
	}
}

// announce is a path on the wire.
func (m *model) announce(p *modelPeer, prefix netip.Prefix, path modelPath) {
	b := []byte{0x40, 1, 1, 0}
	var as []byte
	if len(path.path) > 0 {
		as = []byte{2, byte(len(path.path))}
	}
	for _, n := range path.path {
		if p.as4 {
			as = binary.BigEndian.AppendUint32(as, n)
		} else {
			as = binary.BigEndian.AppendUint16(as, uint16(n))
		}
	}
	b = append(append(b, 0x40, 2, byte(len(as))), as...)
	if path.pref != 0 {
		b = binary.BigEndian.AppendUint32(append(b, 0x40, 5, 4), path.pref)
	}
	if len(path.communities) > 0 {
		b = append(b, 0xc0, 8, byte(4*len(path.communities)))
		for _, c := range path.communities {
			b = binary.BigEndian.AppendUint32(b, c)
		}
	}
	var pack wire.Packer
	if err := pack.Announce(wire.IPv4, path.hop.AsSlice(), b); err != nil {
		m.t.Fatal(err)
	}
	pack.Add(wire.FromNetip(prefix))
	m.send(p, wire.UpdateMessage, pack.Bytes())
}

// up begins a session.
func (m *model) up(p *modelPeer) {
	// The tag of paths that are kept for long comes in steps. Of a peer that comes back and goes
	// again before, they have none: there is no telling them from what it announced since.
	for p.stage == longLived && m.c.work() {
	}
	m.restarts()
	s := &fsm.Session{AS4: p.as4, Refresh: true, EnhancedRefresh: p.llgr, GracefulRestart: p.gr, LongestSent: wire.MaxLen}
	s.Peer = fsm.Open{AS: p.config.AS, ID: p.id}
	s.Wire.Family[wire.IPv4].Enabled = true
	s.Peer.GracefulRestart, s.Peer.RestartTime = p.gr, restart
	s.Peer.Family[wire.IPv4] = fsm.FamilyCapabilities{Enabled: true, Restart: p.gr, Forwarding: p.gr}
	if p.llgr {
		s.Peer.Family[wire.IPv4].StaleTime = staleTime
	}
	id := p.id
	if p.again && !m.idle() {
		id = 0
	}
	p.s, p.had = s, history.New(history.Peer{AS: p.config.AS, ID: id, External: p.external(), AS4: p.as4, Ends: p.gr, Session: s.Wire})
	p.p.local = modelLocal
	idle := m.idle()
	m.c.up(p.p, s, func() { p.woken = true })
	p.ended, p.said = false, false
	p.announced()
	if p.promised = nil; !m.waiting && idle {
		m.promise(p)
	}
	switch {
	case len(p.says) == 0:
		p.stage = nothing
	case p.gr:
		p.stage, p.until = announcing, m.now.Add(announcingTime)
	default:
		p.sweep()
	}
}

// end has a peer send End-of-RIB.
func (m *model) end(p *modelPeer) {
	var pack wire.Packer
	pack.EndOfRIB(wire.IPv4)
	m.send(p, wire.UpdateMessage, pack.Bytes())
	if p.stage == announcing {
		p.sweep()
	}
	p.ended = true
	p.announced()
}

// announced notes whether a peer has announced all it has.
func (p *modelPeer) announced() { p.complete = p.complete || p.s != nil && (!p.gr || p.ended) }

// idle reports whether all is judged and advertised.
func (m *model) idle() bool { return m.c.agenda.idle() }

// promise notes what a peer is to have by its End-of-RIB.
func (m *model) promise(p *modelPeer) {
	p.promised = map[netip.Prefix]string{}
	for _, prefix := range modelPrefixes {
		if s := m.sent(p, prefix); s != "" {
			p.promised[prefix] = s
		}
	}
}

// restarts holds when this side's restart is over against the core.
func (m *model) restarts() {
	over, idle, some := !m.waiting, m.idle(), false
	if m.waiting {
		over = true
		for _, p := range m.peers {
			some = some || p.p != nil
			over = over && (p.p == nil || p.complete)
		}
		over = over && some && idle && !m.changing || !m.now.Before(m.c.table.start.Add(deferral))
	}
	if m.c.starting.on == over {
		m.t.Fatalf("the restart is over: %t; of the peers %v are complete, all is advertised: %t, peers are being changed: %t", !m.c.starting.on, m.completes(), idle, m.changing)
	}
	for _, p := range m.peers {
		if m.waiting && over && idle && p.s != nil {
			m.promise(p)
		}
		for prefix, was := range p.promised {
			if m.sent(p, prefix) != was {
				delete(p.promised, prefix)
			}
		}
	}
	m.waiting = !over
}

func (m *model) completes() (out []netip.Addr) {
	for _, p := range m.peers {
		if p.p != nil && p.complete {
			out = append(out, p.config.Addr)
		}
	}
	return out
}

// event is what the caller hears.
func (m *model) event(e Event) {
	i := slices.IndexFunc(m.peers, func(p *modelPeer) bool { return p.config.Addr == e.Peer })
	if p := m.peers[i]; e.Kind == EndOfRIB {
		if p.said = true; p.s == nil || !p.ended {
			m.t.Fatalf("the caller hears of End-of-RIB of %s, which has not sent it in its session", e.Peer)
		}
	}
}

// ends checks that a peer may be sent End-of-RIB now.
func (p *modelPeer) ends() {
	if p.m.waiting {
		p.t.Fatalf("%s is sent End-of-RIB before the restart is over", p.config.Addr)
	}
	has := map[netip.Prefix]bool{}
	for prefix := range p.had.All() {
		has[prefix.Netip()] = true
	}
	for prefix, s := range p.promised {
		if !has[prefix] {
			p.t.Fatalf("%s is sent End-of-RIB without %s, which is %s", p.config.Addr, prefix, s)
		}
	}
	p.promised = nil
}

func (p *modelPeer) sweep() {
	p.stage = nothing
	maps.DeleteFunc(p.says, func(_ netip.Prefix, path modelPath) bool { return path.stale })
}

func (p *modelPeer) age(longLived bool) {
	for prefix, path := range p.says {
		path.stale = true
		path.longLived = path.longLived || longLived
		p.says[prefix] = path
	}
}

func (m *model) down(p *modelPeer, r fsm.Reason) {
	m.c.down(p.p, p.s, r)
	p.s = nil
	p.age(false)
	if p.gr && r.Cause == fsm.Lost {
		p.stage, p.until = awaited, m.now.Add(restart)
	} else {
		p.sweep()
	}
}

func (m *model) pass(d time.Duration) {
	m.now = m.now.Add(d)
	m.c.table.at(m.now)
	m.c.tick()
	for _, p := range m.peers {
		if p.stage == nothing || m.now.Before(p.until) {
			continue
		}
		if p.stage != awaited || !p.llgr || len(p.says) == 0 {
			p.sweep()
			continue
		}
		p.stage, p.until = longLived, m.now.Add(staleTime)
		p.age(true)
		maps.DeleteFunc(p.says, func(_ netip.Prefix, path modelPath) bool { return slices.Contains(path.communities, noLLGR) })
	}
}

// drain applies what a peer is sent.
func (p *modelPeer) drain(limit int) {
	if p.s == nil || !p.woken {
		return
	}
	out := p.p.member.Next(limit)
	p.woken = len(out) > 0
	for _, b := range out {
		ended := p.had.Ended(wire.IPv4)
		if err := p.had.Bytes(b); err != nil {
			p.t.Fatalf("%s is sent: %v", p.config.Addr, err)
		}
		if !ended && p.had.Ended(wire.IPv4) {
			p.ends()
		}
	}
}

func viewText(v attrs.View) string {
	c := slices.Sorted(v.Communities())
	pref, originator := uint32(0), uint32(0)
	if v.Flags&attrs.HasLocalPref != 0 {
		pref = v.LocalPref
	}
	if v.Flags&attrs.HasOriginator != 0 {
		originator = v.Originator
	}
	return textOf(v.NextHopAddr(), v.PathText(), pref, c, originator, slices.Collect(v.Clusters()))
}

func textOf(hop netip.Addr, path string, pref uint32, communities []uint32, originator uint32, clusters []uint32) string {
	return fmt.Sprintf("via %s [%s] pref %d %v from %d by %v", hop, path, pref, communities, originator, clusters)
}

func pathText(list []uint32) string { return strings.Trim(fmt.Sprint(list), "[]") }

// candidate is a path that may be chosen, as the policy has made it.
type candidate struct {
	modelPath
	from *modelPeer // nil: own
}

func (c *candidate) is(community uint32) bool { return slices.Contains(c.communities, community) }

// best is the reference's choice.
func (m *model) best(prefix netip.Prefix) *candidate {
	var all []candidate
	if o, ok := m.own[prefix]; ok {
		all = append(all, candidate{modelPath{pref: o.LocalPref, hop: o.NextHop}, nil})
	}
	for _, p := range m.peers {
		path, ok := p.says[prefix]
		if !ok || slices.Contains(path.path, modelAS) || bit(m.policy.refuse, prefix) && p.config.Addr.As4()[3]%2 == 1 {
			continue
		}
		path.communities = slices.Clone(path.communities)
		if bit(m.policy.prefer, prefix) {
			path.pref, path.communities = 300, append(path.communities, 7)
		}
		if path.longLived {
			path.communities = append(path.communities, llgrStale)
		}
		all = append(all, candidate{path, p})
	}
	if len(all) == 0 {
		return nil
	}
	rank := func(c candidate) []int {
		yes := func(b bool) int {
			if b {
				return 0
			}
			return 1
		}
		id := 0
		if c.from != nil {
			id = int(c.from.id)
		}
		return []int{yes(!c.is(llgrStale)), -int(cmp.Or(c.pref, 100)), yes(c.from == nil), len(c.path), yes(c.from != nil && c.from.external()), id}
	}
	slices.SortFunc(all, func(a, b candidate) int { return slices.Compare(rank(a), rank(b)) })
	return &all[0]
}

// sent is what a peer should have of a prefix; empty: nothing.
func (m *model) sent(to *modelPeer, prefix netip.Prefix) string {
	b := m.best(prefix)
	if b == nil || b.from == to || to.config.ExportKey[0] != 'x' && bit(m.policy.withhold, prefix) {
		return ""
	}
	if f := b.from; f != nil {
		if b.is(noAdv) || to.external() && b.is(noExport) || b.is(llgrStale) && !to.llgr || slices.Contains(b.path, to.config.AS) ||
			!to.external() && !f.external() && !to.config.ClusterID.IsValid() && !f.config.ClusterID.IsValid() {
			return ""
		}
	}
	c := slices.Sorted(slices.Values(b.communities))
	if to.external() {
		hop := b.hop
		if b.from != nil {
			hop = modelLocal
		}
		return textOf(hop, pathText(append([]uint32{modelAS}, b.path...)), 0, c, 0, nil)
	}
	if b.from != nil && !b.from.external() {
		return textOf(b.hop, pathText(b.path), cmp.Or(b.pref, 100), c, b.from.id, []uint32{5})
	}
	return textOf(b.hop, pathText(b.path), cmp.Or(b.pref, 100), c, 0, nil)
}

// TestModel runs a core beside the reference: random paths, sessions that come and go
// with graceful restart and without, policies that change, refreshes, time that
// passes, peers that read little, and peers that go and are configured anew, while this
// side restarts too. Once all is done each peer has what the reference says, and so has
// the caller; with peers in groups, or each in its own. A restart is over when all peers
// have announced what they have, and no peer is sent End-of-RIB before it has all.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		grouped := rapid.Bool().Draw(t, "grouped")
		now := time.Unix(1e9, 0)
		m := &model{t: t, now: now, own: map[netip.Prefix]Origin{}, read: map[netip.Prefix]string{}, waiting: rapid.Bool().Draw(t, "restarting")}
		m.c = newCore(Options{AS: modelAS, RouterID: netip.MustParseAddr("0.0.0.99"), Policy: m.policy, Restarting: m.waiting, Deferral: deferral}, now)
		for i := range 5 {
			p := &modelPeer{t: t, m: m, id: uint32(20 - i), as4: i != 3, llgr: i%2 == 0, gr: i != 1, says: map[netip.Prefix]modelPath{}}
			p.config = Peer{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), AS: modelAS, ExportKey: "x"}
			if i >= 3 {
				p.config.AS = uint32(64990 + i)
			}
			if i < 2 {
				p.config.ClusterID = netip.MustParseAddr("0.0.0.5")
			}
			if i == 2 || i == 4 {
				p.config.ExportKey = "y"
			}
			if !grouped {
				p.config.ExportKey += fmt.Sprint(i)
			}
			p.config.Families[wire.IPv4] = Family{Enabled: true}
			if p.llgr {
				p.config.Families[wire.IPv4].StaleTime = 2 * staleTime
			}
			if !m.waiting || i < 3 {
				p.p = m.c.addPeer(p.config)
			}
			m.peers = append(m.peers, p)
		}
		any := func(t *rapid.T, up bool) *modelPeer {
			p := rapid.SampledFrom(m.peers).Draw(t, "peer")
			if p.p == nil || (p.s != nil) != up {
				t.Skip()
			}
			return p
		}
		prefix := func(t *rapid.T) netip.Prefix { return rapid.SampledFrom(modelPrefixes).Draw(t, "prefix") }
		take := func(n int) bool {
			return m.c.events.take(n, m.event, func(prefix wire.Prefix, chosen func(func(*Path) bool)) {
				p := prefix.Netip()
				next, stop := iter.Pull(chosen)
				defer stop()
				if path, ok := next(); ok {
					m.read[p] = path.Peer.String()
				} else {
					delete(m.read, p)
				}
			})
		}
		m.c.agenda.stride = rapid.SampledFrom([]int{1, 2, step}).Draw(t, "stride")
		monitor := func(t *rapid.T) {
			m.seen = newSeen(t)
			m.c.setMonitor(m.seen)
			for next := m.c.monitor(m.seen); !next(); {
			}
		}
		if rapid.Bool().Draw(t, "monitored") {
			monitor(t)
		}
		t.Repeat(map[string]func(*rapid.T){
			"configure": func(t *rapid.T) { // it goes over to another group
				p := rapid.SampledFrom(m.peers).Draw(t, "peer")
				p.config.ExportKey = rapid.SampledFrom([]string{"x", "y"}).Draw(t, "export") + strings.TrimLeft(p.config.ExportKey, "xy")
				if p.p != nil {
					m.c.changePeer(p.p, p.config)
				}
			},
			"change of peers": func(*rapid.T) { // begins, or is over
				if m.changing = !m.changing; m.changing {
					m.c.incomplete(1)
				} else {
					m.c.incomplete(-1)
				}
			},
			"add or remove": func(t *rapid.T) {
				p := rapid.SampledFrom(m.peers).Draw(t, "peer")
				if !m.changing {
					t.Skip()
				}
				if p.complete = false; p.p == nil {
					p.p = m.c.addPeer(p.config)
					return
				}
				m.c.removePeer(p.p)
				p.p, p.s, p.woken, p.stage, p.again = nil, nil, false, nothing, true
				clear(p.says)
			},
			"announce": func(t *rapid.T) {
				p, prefix := any(t, true), prefix(t)
				path := modelPath{hop: netip.AddrFrom4([4]byte{10, 7, 0, byte(rapid.IntRange(1, 2).Draw(t, "hop"))})}
				if p.external() {
					path.path = append([]uint32{p.config.AS}, rapid.SliceOfN(rapid.SampledFrom([]uint32{1, 64993, 64994, modelAS}), 0, 2).Draw(t, "path")...)
				} else {
					path.pref = rapid.SampledFrom([]uint32{50, 100, 200}).Draw(t, "pref")
				}
				path.communities = slices.Compact(slices.Sorted(slices.Values(rapid.SliceOfN(rapid.SampledFrom([]uint32{1, noLLGR, noExport, noAdv}), 0, 2).Draw(t, "communities"))))
				m.announce(p, prefix, path)
				p.says[prefix] = path
			},
			"announce again": func(t *rapid.T) {
				p, prefix := any(t, true), prefix(t)
				path, ok := p.says[prefix]
				if !ok || path.longLived {
					t.Skip()
				}
				path.stale = false
				m.announce(p, prefix, path)
				p.says[prefix] = path
			},
			"withdraw": func(t *rapid.T) {
				p, prefix := any(t, true), prefix(t)
				var pack wire.Packer
				pack.Withdraw(wire.IPv4)
				pack.Add(wire.FromNetip(prefix))
				m.send(p, wire.UpdateMessage, pack.Bytes())
				delete(p.says, prefix)
			},
			"own": func(t *rapid.T) {
				var list []Origin
				clear(m.own)
				for _, i := range rapid.SliceOfDistinct(rapid.IntRange(0, 3), rapid.ID).Draw(t, "own") {
					o := Origin{Prefix: modelPrefixes[i], NextHop: netip.MustParseAddr("10.9.9.1"), LocalPref: 150}
					list, m.own[o.Prefix] = append(list, o), o
				}
				m.c.announce(list)
			},
			"some of own": func(t *rapid.T) {
				var list []Origin
				var gone []netip.Prefix
				for i := range 4 {
					p := modelPrefixes[i]
					switch rapid.IntRange(0, 2).Draw(t, "change") {
					case 1:
						o := Origin{Prefix: p, NextHop: netip.MustParseAddr("10.9.9.1"), LocalPref: 150}
						list, m.own[p] = append(list, o), o
					case 2:
						gone = append(gone, p) // also what is not there
						delete(m.own, p)
					}
				}
				m.c.update(list, gone)
			},
			"up": func(t *rapid.T) { m.up(any(t, false)) },
			"come back": func(t *rapid.T) {
				p := any(t, false)
				m.up(p)
				m.end(p)
			},
			"down": func(t *rapid.T) {
				r := rapid.SampledFrom([]fsm.Reason{{Cause: fsm.Lost}, {Cause: fsm.Received, Notification: fsm.Cease(fsm.CeaseShutdown, "")}}).Draw(t, "reason")
				m.down(any(t, true), r)
			},
			"end": func(t *rapid.T) { m.end(any(t, true)) },
			"refresh begins": func(t *rapid.T) {
				p := any(t, true)
				if !p.s.EnhancedRefresh {
					t.Skip()
				}
				m.send(p, wire.RouteRefresh, wire.AppendMessage(nil, wire.RouteRefresh, []byte{0, 1, 1, 1}))
				if p.gr && !p.ended {
					return // it is ignored
				}
				p.age(false)
				p.stage, p.until = announcing, m.now.Add(announcingTime)
			},
			"refresh ends": func(t *rapid.T) {
				p := any(t, true)
				if !p.s.EnhancedRefresh {
					t.Skip()
				}
				m.send(p, wire.RouteRefresh, wire.AppendMessage(nil, wire.RouteRefresh, []byte{0, 1, 2, 1}))
				if p.stage == announcing && (p.ended || !p.gr) {
					p.sweep()
				}
			},
			"asks": func(t *rapid.T) {
				m.send(any(t, true), wire.RouteRefresh, wire.AppendMessage(nil, wire.RouteRefresh, []byte{0, 1, 0, 1}))
			},
			"policy": func(t *rapid.T) {
				old := m.policy
				mask := rapid.IntRange(0, 15)
				m.policy = modelPolicy{mask.Draw(t, "refuse"), mask.Draw(t, "prefer"), mask.Draw(t, "withhold")}
				m.c.setPolicy(m.policy)
				s := Scope{Import: true, Export: true}
				if rapid.Bool().Draw(t, "scope") {
					s.Within = []netip.Prefix{}
					for i, p := range modelPrefixes {
						if ((old.refuse^m.policy.refuse)|(old.prefer^m.policy.prefer)|(old.withhold^m.policy.withhold))>>i&1 == 1 {
							s.Within = append(s.Within, p)
						}
					}
				}
				m.c.rejudge(s)
			},
			"time": func(t *rapid.T) {
				m.pass(rapid.SampledFrom([]time.Duration{time.Second, restart, staleTime}).Draw(t, "time"))
			},
			"monitor": monitor,
			"work":    func(*rapid.T) { m.c.work() },
			"take":    func(*rapid.T) { take(2) },
			"read": func(t *rapid.T) {
				any(t, true).drain(rapid.SampledFrom([]int{1, 1 << 16}).Draw(t, "limit"))
			},
			"": func(*rapid.T) { m.restarts() },
		})
		for m.c.work() {
		}
		m.restarts()
		for take(100) {
		}
		if m.seen != nil {
			m.seen.t = t
			m.check(m.seen)
		}
		want := map[netip.Prefix]string{}
		for _, prefix := range modelPrefixes {
			if b := m.best(prefix); b != nil {
				if want[prefix] = "invalid IP"; b.from != nil {
					want[prefix] = b.from.config.Addr.String()
				}
			}
		}
		if !maps.Equal(m.read, want) {
			t.Fatalf("the caller has %v, chosen are %v", m.read, want)
		}
		for i, p := range m.peers {
			if p.s != nil && p.said != p.ended {
				t.Fatalf("peer %d: End-of-RIB came: %t, the caller has heard of it: %t", i, p.ended, p.said)
			}
			received := 0
			q := m.c.query(Query{Table: Received, Peer: p.config.Addr}, func(path *Path) bool {
				if said, ok := p.says[path.Prefix]; !ok || path.PathText() != pathText(said.path) || path.Stale != said.stale {
					t.Fatalf("peer %d: received %s [%s] stale %t, announced %+v", i, path.Prefix, path.PathText(), path.Stale, said)
				}
				received++
				return true
			})
			for !q() {
			}
			if p.p == nil {
				continue
			}
			if s := m.c.table.status(p.p).Families[wire.IPv4]; received != len(p.says) || s.Received != received {
				t.Fatalf("peer %d: %d received, counted %d, announced %v", i, received, s.Received, p.says)
			}
			if p.s == nil {
				continue
			}
			for n := 0; p.woken; n++ {
				if p.drain(1 << 12); n > 1000 {
					t.Fatal("messages without end")
				}
			}
			want := map[netip.Prefix]string{}
			for _, prefix := range modelPrefixes {
				if s := m.sent(p, prefix); s != "" {
					want[prefix] = s
				}
			}
			had := map[netip.Prefix]string{}
			for prefix, v := range p.had.All() {
				had[prefix.Netip()] = viewText(v)
			}
			if !maps.Equal(had, want) {
				t.Fatalf("peer %d has\n%v, where\n%v is to be advertised", i, had, want)
			}
			if p.had.Ended(wire.IPv4) != (p.gr && !m.waiting) {
				t.Fatalf("peer %d: End-of-RIB came: %t", i, p.had.Ended(wire.IPv4))
			}
			if n := m.c.table.status(p.p).Families[wire.IPv4].Advertised; n != len(want) {
				t.Fatalf("peer %d: %d advertised, counted %d", i, len(want), n)
			}
		}
		for _, p := range m.peers {
			if p.p != nil {
				m.c.removePeer(p.p)
			}
		}
		m.c.announce(nil)
		for m.c.work() {
		}
		for take(100) {
		}
		if n := m.c.table.sets.Len(); n != 0 || m.c.table.rib.Len(wire.IPv4) != 0 || len(m.c.groups.list) != 0 || len(m.read) != 0 {
			t.Fatalf("%d sets, %d prefixes, %d groups are left; the caller has %v", n, m.c.table.rib.Len(wire.IPv4), len(m.c.groups.list), m.read)
		}
	})
}
