package engine

import (
	"errors"
	"net"
	"net/netip"
	"time"
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

// SetRanges has connections from these prefixes signed with a password each, but for those of peers that have their own.
func (e *Engine) SetRanges(passwords map[netip.Prefix]string) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	if e.stopped {
		return ErrStopped
	}
	var errs []error
	own := e.ownKeys()
	set := func(r netip.Prefix, password string) {
		if own[r] {
			return
		}
		for a, l := range e.listeners {
			if a.Addr().Is4() == r.Addr().Is4() {
				errs = append(errs, l.SetRangePassword(r, password))
			}
		}
	}
	for r := range e.ranges {
		if passwords[r] == "" {
			set(r, "")
		}
	}
	for r, password := range passwords {
		if password != "" && e.ranges[r] != password {
			set(r, password)
		}
	}
	e.ranges = passwords
	return errors.Join(errs...)
}

// ownKeys are the ranges of one address that a peer with a password has.
func (e *Engine) ownKeys() map[netip.Prefix]bool {
	own := map[netip.Prefix]bool{}
	for _, p := range e.Configured() {
		if p.Password != "" && p.hears() {
			own[alone(p.Addr)] = true
		}
	}
	return own
}

// alone is the range of one address, whose password is to the kernel that of a peer with the address.
func alone(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
