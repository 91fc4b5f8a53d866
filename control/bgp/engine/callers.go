package engine

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/conn"
)

// caller is a connection from an address that is to be a peer's.
type caller struct {
	conn    *net.TCPConn
	timeout *time.Timer
}

// callTime is for how long a caller waits for [Engine.SetPeers].
const callTime = 10 * time.Second

// hold keeps a connection for the peer that its address is to have; a newer one replaces it. The caller holds e.mu.
func (e *Engine) hold(from netip.Addr, c *net.TCPConn) *caller {
	if old := e.callers[from]; old != nil {
		old.timeout.Stop()
		old.conn.Close()
	}
	held := &caller{conn: c}
	held.timeout = time.AfterFunc(callTime, func() {
		if e.drop(from, held) {
			c.Close()
		}
	})
	e.callers[from] = held
	return held
}

// drop reports whether a connection was still held, and holds it no longer.
func (e *Engine) drop(from netip.Addr, held *caller) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.callers[from] != held {
		return false
	}
	held.timeout.Stop()
	delete(e.callers, from)
	return true
}

// SetRanges has connections from these prefixes signed, but for those of peers that have their own. Of TCP-AO
// all addresses of a prefix have its keys.
func (e *Engine) SetRanges(ranges map[netip.Prefix]conn.Auth) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	if e.stopped {
		return ErrStopped
	}
	if maps.Equal(e.ranges, ranges) { // what failed is not in them
		return nil
	}
	var errs []error
	own, had := e.ownKeys(), e.ranges
	e.ranges = maps.Clone(ranges)
	set := func(r netip.Prefix, a conn.Auth) {
		if own[r] {
			return
		}
		if err := e.signAll(r, a); err != nil {
			errs = append(errs, err)
			delete(e.ranges, r) // it is tried again
		}
	}
	for r := range had {
		if ranges[r] == (conn.Auth{}) {
			set(r, conn.Auth{})
		}
	}
	for r, a := range ranges {
		if a != (conn.Auth{}) && had[r] != a {
			set(r, a)
		}
	}
	return errors.Join(errs...)
}

// ownKeys are the ranges of one address that a peer with its own signatures has.
func (e *Engine) ownKeys() map[netip.Prefix]bool {
	own := map[netip.Prefix]bool{}
	for _, p := range e.Configured() {
		if p.signsAlone() {
			own[alone(p.Addr)] = true
		}
	}
	return own
}

// signsAlone reports whether listeners have something to sign for the peer alone.
func (p Peer) signsAlone() bool { return p.Auth != (conn.Auth{}) && p.hears() }

// sign has listeners sign for a peer in the place of how they do, or were just asked to; what is not signed
// is by the range of its address alone.
func (e *Engine) sign(p Peer, a conn.Auth) error {
	if p.Auth == (conn.Auth{}) && a == (conn.Auth{}) || !p.hears() {
		return nil
	}
	r := alone(p.Addr)
	switch {
	case a == (conn.Auth{}):
		a = e.ranges[r]
	case e.haveKeys(p.Addr, a.Keys):
		return nil
	}
	return e.signAll(r, a)
}

// haveKeys reports whether a range has its addresses signed with these keys, which the kernel does not take for one of them again.
func (e *Engine) haveKeys(a netip.Addr, k conn.Keys) bool {
	for r, has := range e.ranges {
		if k.N > 0 && has.Keys == k && r.Contains(a.WithZone("")) {
			return true
		}
	}
	return false
}

// signAll has the listeners of a prefix's family sign for it.
func (e *Engine) signAll(r netip.Prefix, a conn.Auth) error {
	var errs []error
	for at, l := range e.listeners {
		if at.Addr().Is4() == r.Addr().Is4() {
			errs = append(errs, l.Sign(r, a))
		}
	}
	return errors.Join(errs...)
}

// alone is the range of one address, whose password is to the kernel that of a peer with the address.
func alone(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a.WithZone(""), a.BitLen()) }
