package engine

import (
	"net/netip"
	"slices"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// seen is a monitor, which applies what it is told.
type seen struct {
	t    *rapid.T
	sets *attrs.Table
	up   map[netip.Addr]bool
	has  map[seenView]map[netip.Prefix]string
}

type seenView struct {
	view View
	peer netip.Addr // invalid: of Chosen
}

func newSeen(t *rapid.T) *seen {
	return &seen{t: t, sets: attrs.NewTable(), up: map[netip.Addr]bool{}, has: map[seenView]map[netip.Prefix]string{{view: Chosen}: {}}}
}

func (*seen) Begun() {}

func (s *seen) Up(m Monitored) {
	if s.up[m.Peer.Addr] {
		s.t.Fatalf("%s is up twice", m.Peer.Addr)
	}
	s.up[m.Peer.Addr] = true
	for _, v := range []View{Announced, Accepted} {
		s.has[seenView{v, m.Peer.Addr}] = map[netip.Prefix]string{}
	}
}

func (s *seen) Down(m Monitored, _ fsm.Reason, _ bool) {
	if !s.up[m.Peer.Addr] {
		s.t.Fatalf("%s is down twice", m.Peer.Addr)
	}
	delete(s.up, m.Peer.Addr)
	for _, v := range []View{Announced, Accepted} {
		delete(s.has, seenView{v, m.Peer.Addr})
	}
}

func (s *seen) Updates(v View, m Monitored, updates []byte) {
	has := s.has[seenView{v, m.Peer.Addr}]
	if has == nil {
		s.t.Fatalf("view %d of %s, which is not up", v, m.Peer.Addr)
	}
	var d wire.Decoder
	d.Session.Family[wire.IPv4].Enabled, d.Session.Family[wire.IPv6].Enabled = true, true
	for len(updates) > 0 {
		_, body, n, err := wire.Frame(updates, wire.MaxExtended)
		if err != nil || n == 0 {
			s.t.Fatal(err)
		}
		updates = updates[n:]
		var u wire.Update
		if err := d.Decode(body, &u); err != nil {
			s.t.Fatal(err)
		}
		for prefix, ok := u.Withdrawn.Next(); ok; prefix, ok = u.Withdrawn.Next() {
			delete(has, prefix.Netip())
		}
		for prefix, ok := u.Announced.Next(); ok; prefix, ok = u.Announced.Next() {
			h, r, err := s.sets.Intern(attrs.Context{AS4: true, Reachable: true}, u.Attrs, nil)
			if err != nil || r.Verdict != attrs.Accept && r.Fault != attrs.Missing {
				s.t.Fatalf("%s monitored as %v, %v", prefix.Netip(), r, err)
			}
			has[prefix.Netip()] = ""
			if h != 0 {
				v := s.sets.View(h)
				has[prefix.Netip()] = textOf(v.NextHopAddr(), v.PathText(), v.LocalPref, slices.Sorted(v.Communities()), 0, nil)
			}
		}
	}
}

// check holds what a monitor has to the reference.
func (m *model) check(s *seen) {
	for _, p := range m.peers {
		announced, accepted := s.has[seenView{Announced, p.config.Addr}], s.has[seenView{Accepted, p.config.Addr}]
		if s.up[p.config.Addr] != (p.s != nil) {
			m.t.Fatalf("%s monitored as up: %t", p.config.Addr, s.up[p.config.Addr])
		}
		if p.s == nil {
			continue
		}
		for _, prefix := range modelPrefixes {
			said, ok := p.says[prefix]
			got, has := announced[prefix]
			if ok && said.stale {
				continue // monitored if it was announced in this session
			}
			if has != ok {
				m.t.Fatalf("%s of %s: announced %t, monitored %t", prefix, p.config.Addr, ok, has)
			}
			lets := ok && !slices.Contains(said.path, modelAS) && (!bit(m.policy.refuse, prefix) || p.config.Addr.As4()[3]%2 == 0)
			made, has := accepted[prefix]
			if has != lets {
				m.t.Fatalf("%s of %s: accepted %t, monitored %t", prefix, p.config.Addr, lets, has)
			}
			want := textOf(said.hop, pathText(said.path), said.pref, slices.Sorted(slices.Values(said.communities)), 0, nil)
			if ok && got != "" && got != want {
				m.t.Fatalf("%s of %s: announced\n%s, monitored\n%s", prefix, p.config.Addr, want, got)
			}
			if bit(m.policy.prefer, prefix) {
				want = textOf(said.hop, pathText(said.path), 300, slices.Sorted(slices.Values(append(slices.Clone(said.communities), 7))), 0, nil)
			}
			if lets && made != "" && made != want {
				m.t.Fatalf("%s of %s: accepted as\n%s, monitored as\n%s", prefix, p.config.Addr, want, made)
			}
		}
	}
	for _, prefix := range modelPrefixes {
		b := m.best(prefix)
		got, has := s.has[seenView{view: Chosen}][prefix]
		if has != (b != nil) {
			m.t.Fatalf("%s: chosen %t, monitored %t", prefix, b != nil, has)
		}
		if b != nil && got != "" {
			if want := textOf(b.hop, pathText(b.path), b.pref, slices.Sorted(slices.Values(b.communities)), 0, nil); got != want {
				m.t.Fatalf("%s: chosen\n%s, monitored\n%s", prefix, want, got)
			}
		}
	}
}
