package engine

import (
	"time"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Who reads the table's changes.
const (
	forCaller rib.Reader = iota
	forGroups
)

// table is what peers have announced, and who and when.
type table struct {
	sets  *attrs.Table
	rib   *rib.RIB
	peers []*peer // by rib.Peer; nil: the local one, or none
	start time.Time
	now   time.Time
	path  Path // that others are shown
}

func newTable(now time.Time) *table {
	sets := attrs.NewTable()
	return &table{sets: sets, rib: rib.New(sets), start: now, now: now}
}

// at sets the time.
func (t *table) at(now time.Time) {
	t.now = now
	t.rib.SetTime(uint32(now.Sub(t.start) / time.Second))
}

// add returns the number of a new peer; p is nil for the local one.
func (t *table) add(p *peer, info rib.PeerInfo) rib.Peer {
	n := t.rib.AddPeer(info)
	t.peers = append(t.peers, make([]*peer, max(0, int(n)+1-len(t.peers)))...)
	t.peers[n] = p
	return n
}

// remove frees the number of a peer that has no paths any more.
func (t *table) remove(n rib.Peer) {
	t.rib.RemovePeer(n)
	t.peers[n] = nil
}

// pathOf is a path as others see it.
func (t *table) pathOf(prefix wire.Prefix, p rib.Path) Path {
	out := Path{
		Prefix: prefix.Netip(), Set: p.Set, View: t.sets.View(p.Set), Best: p.Best, Multi: p.Multi, Stale: p.Stale, Accepted: p.Usable,
		Since: t.start.Add(time.Duration(p.Since) * time.Second),
	}
	if from := t.peers[p.Peer]; from != nil {
		out.Peer, out.RouterID, out.External = from.config.Addr, from.open.ID, from.external
	}
	return out
}

// tagStale returns a set with the community LLGR_STALE (RFC 9494).
func (t *table) tagStale(set attrs.Handle) attrs.Handle {
	return t.sets.Derive(set, &attrs.Change{Communities: []uint32{llgrStale}})
}

// status is how a peer is, but for what its connections know.
func (t *table) status(p *peer) Status {
	s := Status{Addr: p.config.Addr, Session: p.session, RouterID: p.open.ID, Local: p.local, Limited: p.limited}
	for f := range wire.Family(wire.Families) {
		o := &s.Families[f]
		fresh, stale := t.rib.Count(p.number, f)
		o.Received, o.Stale, o.Accepted = fresh+stale, stale, fresh+stale-t.rib.Refused(p.number, f)
		if p.member != nil {
			o.Enabled, o.Advertised = p.session.Wire.Family[f].Enabled, p.updates.Advertised(p.number, f)
		}
	}
	return s
}
