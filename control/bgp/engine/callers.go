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
	set := func(r netip.Prefix, password string) {
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
