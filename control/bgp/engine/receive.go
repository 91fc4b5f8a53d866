package engine

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// inbound decides what becomes of what peers announce.
type inbound struct {
	table   *table
	policy  func(Peer) Judge
	log     *slog.Logger
	id      uint32
	clients map[uint32]int // of this side by the id of their cluster (RFC 4456)
}

// receive applies a message of a peer's session. An error ends the session.
func (c *core) receive(p *peer, s *fsm.Session, t wire.Type, body []byte) *wire.Error {
	if p.session != s {
		return nil // it came late
	}
	var fault *wire.Error
	if t == wire.RouteRefresh {
		fault = c.receiveRefresh(p, body)
	} else {
		fault = c.receiveUpdate(p, body)
	}
	c.settle()
	return fault
}

func (c *core) receiveUpdate(p *peer, body []byte) *wire.Error {
	var u wire.Update
	if err := p.decoder.Decode(body, &u); err != nil {
		return faultOf(err)
	}
	if f, ok := u.EndOfRIB(); ok {
		c.endOfRIB(p, f)
		return nil
	}
	return c.inbound.update(p, &u)
}

func (i *inbound) update(p *peer, u *wire.Update) *wire.Error {
	for _, list := range []wire.NLRI{u.Withdrawn, u.Unreach} {
		i.withdraw(p, list)
	}
	if !u.Reachable() {
		if len(u.Attrs) == 0 {
			return nil
		}
		context := p.context
		context.Reachable = false
		_, _, err := i.table.sets.Intern(context, u.Attrs, nil)
		return faultOf(err)
	}
	if fault := i.accept(p, u.Announced, u.Attrs, nil); fault != nil {
		return fault
	}
	return i.accept(p, u.Reach, u.Attrs, u.NextHop)
}

// faultOf is an error of wire's or attrs' as what ends a session; nil: none.
func faultOf(err error) *wire.Error {
	if err == nil {
		return nil
	}
	if e, ok := err.(*wire.Error); ok { //nolint:errorlint // it is documented to be one, unwrapped
		return e
	}
	return &wire.Error{Code: wire.CodeUpdate, Reason: err.Error()}
}

func (i *inbound) withdraw(p *peer, list wire.NLRI) {
	for prefix, ok := list.Next(); ok; prefix, ok = list.Next() {
		i.table.rib.Withdraw(p.number, prefix)
	}
}

// accept applies prefixes that have one set of attributes.
func (i *inbound) accept(p *peer, list wire.NLRI, attributes, hop []byte) *wire.Error {
	if list.Empty() {
		return nil
	}
	raw, result, err := i.table.sets.Intern(p.context, attributes, hop)
	if err != nil {
		return faultOf(err)
	}
	if result.Verdict != attrs.Accept && i.log != nil {
		i.log.Warn("bgp update with faulty attributes", "peer", p.config.Addr, "verdict", result.String())
	}
	if raw == 0 {
		i.withdraw(p, list)
		return nil
	}
	defer i.table.sets.Release(raw)
	looped := i.looped(p, raw)
	for prefix, ok := list.Next(); ok; prefix, ok = list.Next() {
		set, usable := raw, !looped
		if usable {
			set, usable = i.judge(p, prefix, raw)
		}
		kept := i.table.rib.Announce(p.number, prefix, set, usable)
		if set != raw {
			i.table.sets.Release(set)
		}
		if !kept {
			return p.limit(prefix.Family)
		}
	}
	return nil
}

// limit ends the session of a peer that announces too much (RFC 4486 section 4).
func (p *peer) limit(f wire.Family) *wire.Error {
	p.limited = true
	n := p.config.Families[f].Limit
	data := binary.BigEndian.AppendUint16(nil, f.AFI())
	data = binary.BigEndian.AppendUint32(append(data, 1), uint32(n))
	return &wire.Error{Code: fsm.CodeCease, Subcode: fsm.CeaseMaxPrefixes, Data: data, Reason: fmt.Sprintf("more than %d %s prefixes", n, f)}
}

// looped reports whether a path has been here before (RFC 4271 section 9.1.2, RFC 4456
// section 8).
func (i *inbound) looped(p *peer, raw attrs.Handle) bool {
	v := i.table.sets.View(raw)
	if v.PathLen > 0 && v.CountAS(p.localAS) > p.config.AllowOwnAS {
		return true
	}
	if p.external {
		return false
	}
	if v.Flags&attrs.HasOriginator != 0 && v.Originator == i.id {
		return true
	}
	if v.ClusterLen > 0 {
		for id := range v.Clusters() {
			if i.clients[id] > 0 || len(i.clients) == 0 && id == i.id { // RFC 4456 section 7
				return true
			}
		}
	}
	return false
}

// count counts a client of this side by its cluster; n is 1 or -1.
func (i *inbound) count(cluster netip.Addr, n int) {
	if !cluster.Is4() {
		return
	}
	id := idOf(cluster)
	if i.clients[id] += n; i.clients[id] == 0 {
		delete(i.clients, id)
	}
}

// receiveRefresh applies ROUTE-REFRESH (RFC 2918, RFC 7313).
func (c *core) receiveRefresh(p *peer, body []byte) *wire.Error {
	if len(body) != 4 {
		return &wire.Error{Code: 7, Subcode: 1, Data: body, Reason: fmt.Sprintf("ROUTE-REFRESH of %d bytes", len(body))} // RFC 7313 section 5
	}
	f := wire.Family(binary.BigEndian.Uint16(body) - 1)
	if f >= wire.Families || body[3] != 1 || !p.session.Wire.Family[f].Enabled {
		return nil
	}
	subtype := body[2]
	if !p.session.EnhancedRefresh {
		subtype = 0 // a reserved field (RFC 2918)
	}
	// What is kept over the peer's restart goes with its End-of-RIB alone (RFC 7313 section 4).
	if subtype != 0 && p.session.GracefulRestart && !p.families[f].ended {
		if c.options.Log != nil {
			c.options.Log.Warn("bgp refresh is marked before End-of-RIB: the mark is ignored", "peer", p.config.Addr, "family", f.String())
		}
		return nil
	}
	switch subtype {
	case 0:
		if p.session.Refresh {
			p.member.Refresh(f)
		}
	case 1:
		c.table.rib.Restart(p.number, f)
		c.kept.keep(p, f, announcing, announcingTime)
	case 2:
		if p.families[f].stage == announcing {
			c.kept.sweep(p, f)
		}
	}
	return nil
}

// judge has the policy judge a path of a peer. The set that it returns, if it is not raw,
// has a reference for the caller.
func (i *inbound) judge(p *peer, prefix wire.Prefix, raw attrs.Handle) (set attrs.Handle, usable bool) {
	if p.judge == nil { // most peers have nothing to be judged between two policies
		p.judge = i.policy(p.config)
	}
	if p.judge == nil {
		return raw, true
	}
	t := i.table
	t.path = Path{Prefix: prefix.Netip(), Peer: p.config.Addr, RouterID: p.open.ID, External: p.external, Set: raw, View: t.sets.View(raw)}
	v := p.judge(&t.path)
	if !v.Accept {
		return raw, false
	}
	if v.Edit == nil {
		return raw, true
	}
	return t.sets.Derive(raw, &attrs.Change{Edit: v.Edit}), true
}

// rewritten is what a path of the table is to be by the policy as it is now.
func (i *inbound) rewritten(p *peer, prefix wire.Prefix, old rib.Path) (set attrs.Handle, usable bool) {
	raw := i.table.sets.Base(old.Set)
	i.table.sets.Retain(raw)
	set, usable = raw, !i.looped(p, raw)
	if usable {
		if set, usable = i.judge(p, prefix, raw); set != raw {
			i.table.sets.Release(raw)
		}
	}
	// Also one whose peer has come back and gone again before it announced the path anew.
	if old.Stale && (i.table.rib.LongLived(p.number, prefix.Family) || i.table.sets.Summary(old.Set).Flags&attrs.LLGRStale != 0) {
		tagged := i.table.tagStale(set)
		i.table.sets.Release(set)
		set = tagged
	}
	return set, usable
}
