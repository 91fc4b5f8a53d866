package engine

import (
	"context"
	"net/netip"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// View is a table that is monitored.
type View uint8

// The views.
const (
	Announced View = iota // what a peer announced, as it did
	Accepted              // what of that the policy let in, as it made it
	Chosen                // the best path of each prefix
)

// Monitored is a session that is up.
type Monitored struct {
	Peer       Peer
	ID         uint32 // the peer's BGP identifier
	Local      netip.AddrPort
	RemotePort uint16
	Session    *fsm.Session
}

// Monitor is notified of what happens with sessions and tables, which a collector then has as they are
// here. Its methods are called with the engine's lock: they must not wait, and not call
// the engine.
type Monitor interface {
	// Begun says that the engine's own Monitor is notified of all that happens after what this one is
	// now; it is for [Engine.Monitor]'s.
	Begun()
	// Up says that a session is established. Of what its peer announced before nothing is known.
	Up(m Monitored)
	// Down says that a session has ended, and with it what its peer announced.
	Down(m Monitored, r fsm.Reason, removed bool)
	// Updates has UPDATEs that bring a view of a peer up to date; Chosen is of no peer. They are
	// valid until it returns.
	Updates(v View, m Monitored, updates []byte)
}

// SetMonitor has m notified of what happens from now on; nil: no monitor is. [Engine.Monitor] says what is
// there.
func (e *Engine) SetMonitor(m Monitor) { e.locked(func(c *core) { c.setMonitor(m) }) }

func (c *core) setMonitor(m Monitor) {
	if m == nil {
		c.tap, c.table.rib.Tap = nil, nil
		return
	}
	c.tap = newTap(m, c.table)
	c.table.rib.Tap = c.tap.path
}

// Monitor reports to m what there is: each session that is up, then its tables as UPDATEs with an
// End-of-RIB each. It goes over the table in steps; between them pause is called without
// the lock, whose error ends it, and what changes is reported to the engine's own Monitor. That comes
// later: reported in that order the end is what is in the table.
func (e *Engine) Monitor(ctx context.Context, m Monitor, pause func() error) error {
	next := e.core.monitor(m)
	for done := false; !done; {
		if err := ctx.Err(); err != nil {
			return err
		}
		e.locked(func(*core) { done = next() })
		if err := pause(); err != nil {
			return err
		}
	}
	return nil
}

// monitor reports to a monitor what there is in steps: it returns what does the next one, and
// reports when all is said.
func (c *core) monitor(m Monitor) (next func() (done bool)) {
	t := newTap(m, c.table)
	sessions := map[*peer]*fsm.Session{}
	var at rib.Cursor
	stands := func(p *peer) bool { return p != nil && p.session != nil && sessions[p] == p.session }
	begun := false
	return func() bool {
		if !begun {
			begun = true
			c.settle() // what is reported from here on has come after what is reported now
			m.Begun()
			for _, p := range c.ordered() {
				if p.session != nil {
					sessions[p] = p.session
					t.up(p)
				}
			}
		}
		done := c.table.rib.Scan(&at, c.agenda.stride, func(prefix wire.Prefix, all rib.Paths) {
			for path := range all.All {
				if p := c.table.peers[path.Peer]; stands(p) && !path.Stale {
					t.path(prefix, rib.Path{}, path, false)
				}
			}
			if best, ok := all.Best(); ok {
				t.add(Chosen, nil, prefix, best.Set)
			}
		})
		t.flush()
		if !done {
			return false
		}
		for _, p := range c.ordered() {
			if stands(p) {
				t.endOfRIB(p, Announced)
				t.endOfRIB(p, Accepted)
			}
		}
		t.endOfRIB(nil, Chosen)
		return true
	}
}

// tap turns what happens to the table into UPDATEs for a monitor. Its methods do nothing on a nil one.
type tap struct {
	monitor Monitor
	table   *table
	packs   map[packOf]*pack
}

func newTap(m Monitor, t *table) *tap { return &tap{monitor: m, table: t, packs: map[packOf]*pack{}} }

type packOf struct {
	view View
	peer *peer // nil: of Chosen
}

// pack is UPDATEs of one view of a peer that come together.
type pack struct {
	wire.Packer
	set    attrs.Handle // of the prefixes that come, with a reference; 0: they are withdrawn
	family wire.Family
	begun  bool
}

func monitored(p *peer) Monitored {
	if p == nil {
		return Monitored{}
	}
	return Monitored{Peer: p.config, ID: p.open.ID, Local: netip.AddrPortFrom(p.local.WithZone(""), p.localPort), RemotePort: p.remotePort, Session: p.session}
}

func (t *tap) up(p *peer) {
	if t != nil {
		t.flush()
		t.monitor.Up(monitored(p))
	}
}

func (t *tap) down(p *peer, r fsm.Reason) {
	if t != nil {
		t.flush()
		t.monitor.Down(monitored(p), r, p.removed)
	}
}

// path reports a change of a path.
func (t *tap) path(prefix wire.Prefix, before, after rib.Path, rewritten bool) {
	from := after.Peer
	if after.Set == 0 {
		from = before.Peer
	}
	p := t.table.peers[from]
	if p == nil || p.session == nil || after.Stale {
		return // it is not there for who monitors
	}
	if !rewritten {
		raw := attrs.Handle(0)
		if after.Set != 0 {
			raw = t.table.sets.Base(after.Set)
		}
		t.add(Announced, p, prefix, raw)
	}
	switch {
	case after.Set != 0 && after.Usable:
		t.add(Accepted, p, prefix, after.Set)
	case before.Set != 0 && before.Usable:
		t.add(Accepted, p, prefix, 0)
	}
}

// chosen reports a change of the choice.
func (t *tap) chosen(prefix wire.Prefix, paths rib.Paths) {
	if t != nil {
		best, _ := paths.Best()
		t.add(Chosen, nil, prefix, best.Set)
	}
}

// add packs one more prefix; set 0: it is withdrawn.
func (t *tap) add(v View, p *peer, prefix wire.Prefix, set attrs.Handle) {
	of := packOf{v, p}
	k := t.packs[of]
	if k == nil {
		k = &pack{}
		t.packs[of] = k
	}
	prefix.ID = 0
	if !k.begun || k.set != set || k.family != prefix.Family {
		k.release(t.table.sets)
		if k.begun, k.set, k.family = true, set, prefix.Family; set == 0 {
			k.Withdraw(prefix.Family)
		} else {
			t.table.sets.Retain(set)
			hop, list := t.table.sets.Canonical(set)
			if k.Longest = 0; k.Announce(prefix.Family, hop, list) != nil {
				k.Longest = wire.MaxExtended // it came in a message of RFC 8654
				if k.Announce(prefix.Family, hop, list) != nil {
					k.begun = false
					k.release(t.table.sets)
					return // by now it has grown beyond that
				}
			}
		}
	}
	k.Add(prefix)
}

func (k *pack) release(sets *attrs.Table) {
	if k.set != 0 {
		sets.Release(k.set)
		k.set = 0
	}
}

// flush hands over what has come together.
func (t *tap) flush() {
	if t == nil || len(t.packs) == 0 {
		return
	}
	for of, k := range t.packs {
		k.release(t.table.sets)
		t.monitor.Updates(of.view, monitored(of.peer), k.Bytes())
	}
	clear(t.packs)
}

// endOfRIB reports that a view is complete.
func (t *tap) endOfRIB(p *peer, v View) {
	for f := range wire.Family(wire.Families) {
		if p == nil || p.session.Wire.Family[f].Enabled {
			var k wire.Packer
			k.EndOfRIB(f)
			t.monitor.Updates(v, monitored(p), k.Bytes())
		}
	}
}
