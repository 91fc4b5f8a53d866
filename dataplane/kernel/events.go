package kernel

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// observer keeps what is known of the kernel true to what it notifies of, and has put
// right what others change of ours.
type observer struct {
	*actual
	lis      *listener
	listing  *listing
	underlay publisher
	drift    *driftLog
	waiting  waiting
}

func isWorkload(link string) bool { return strings.HasPrefix(link, prefixWorkload) }

// drain applies all that the kernel has said so far. After a request was
// answered that includes all its consequences.
func (ob *observer) drain() error {
	events, overrun, err := ob.lis.take()
	if overrun {
		ob.log.Warn("the kernel's notifications overran; listing everything")
		ob.listing.ask("notifications were lost")
	}
	links := map[string]notice{}
	for _, m := range events {
		ob.drift.notice = noticeOf(m)
		ob.event(m, links)
	}
	for name, n := range links {
		ob.drift.notice = n
		ob.observe(name)
	}
	err = errors.Join(err, ob.drainSettings())
	ob.retryFreed()
	ob.drift.log()
	return err
}

func (ob *observer) event(m notification, links map[string]notice) {
	switch m.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if l, ok := parseLink(m.Body); ok {
			links[l.name] = ob.drift.notice
			ob.linkEvent(l, m.Type == unix.RTM_DELLINK)
			ob.underlay.changed()
		}
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if a, ok := parseAddr(m.Body); ok {
			ob.addrEvent(a, m.Type == unix.RTM_DELADDR)
			ob.underlay.changed()
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if r, ok := parseRoute(m.Body); ok && tracked(&r) {
			// One that is added goes before those of its key, one appended behind.
			r.behind = m.Flags&unix.NLM_F_APPEND != 0 && r.key.Prefix.Addr().Is4()
			ob.routeEvent(r, m.Type == unix.RTM_DELROUTE, m.Flags&unix.NLM_F_REPLACE != 0)
		}
	case unix.RTM_NEWNEXTHOP, rtmDelNextHop:
		if n, ok := parseNextHop(m.Body); ok {
			ob.nextHopEvent(n, m.Type == rtmDelNextHop)
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if n, ok := parseNeighbour(m.Body); ok {
			ob.neighbourEvent(&n, m.Type == unix.RTM_DELNEIGH)
		}
	case unix.RTM_NEWNETCONF:
		if link, ok := parseNetconf(m.Body); ok {
			ob.netconfEvent(link)
		}
	}
}

// lose notes that what has that key is gone.
func (ob *observer) lose(key dataplane.Key) {
	lose := ob.want.LoseHave
	if ob.drift.cause != "" || ob.drift.quiet {
		lose = ob.want.LoseDependent
	}
	if lose(key) && !ob.drift.quiet {
		ob.drift.note(key)
	} else if len(ob.drift.open) > 0 && ob.want.Settled(key) {
		ob.drift.righted(key, false)
	}
}

// set notes what is there.
func (ob *observer) set(o dataplane.Object) {
	key, set := o.Key(), ob.want.SetHave
	// What became of our own request is not blamed on another program; but a device that
	// the kernel does not give the settings that it was asked for is held
	// back, like one that a program keeps changing.
	quiet := ob.drift.quiet
	if quiet && key.Kind() != dataplane.KindLink {
		set = ob.want.SetDependent
		// Nor does a request about a device add anything to it.
		_, quiet = ob.want.Want(key)
	}
	if set(key, o) && !quiet {
		ob.drift.note(key)
	} else if len(ob.drift.open) > 0 && ob.want.Settled(key) {
		ob.drift.righted(key, false)
	}
}

// observe compares a device with what is wanted of it.
func (ob *observer) observe(name string) {
	key := dataplane.LinkKey{Name: name}
	l := ob.mirror.link(name)
	if l == nil || !ob.isOurs(l) {
		ob.lose(key)
		return
	}
	ob.set(ob.haveLink(l))
}

func (ob *observer) linkEvent(l ifLink, gone bool) {
	old := ob.mirror.links[l.index]
	switch {
	case gone:
		if old != nil {
			ob.mirror.deleteLink(l.index)
			ob.linkGone(l.index, l.name)
		}
		return
	case old == nil:
	case old.name != l.name:
		ob.linkGone(l.index, old.name)
		ob.observe(old.name)
	case old.up() && !l.up():
		ob.linkDown(l.index, l.name, false)
	case old.carrier() && !l.carrier():
		ob.linkDown(l.index, l.name, true)
	}
	ob.mirror.setLink(l)
	ob.wakeWaiting(dataplane.LinkKey{Name: l.name})
}

// linkGone derives what went with a device.
func (ob *observer) linkGone(index int, name string) {
	defer ob.drift.blame(name)()
	for key := range ob.onLink[name] {
		ob.lose(key)
	}
	ob.loseUsers()
	ob.forgetRoutes(func(r *fibRoute) bool { return r.only(index) })
	ob.wakeWaiting(dataplane.LinkKey{Name: name}) // to wait for another reason
}

// linkDown derives what the kernel removed when a device went down, or lost
// only its carrier: it notifies of neither the next hops nor the IPv4 routes
// (nexthop_flush_dev and fib_disable_ip in the kernel's source).
func (ob *observer) linkDown(index int, name string, carrierOnly bool) {
	defer ob.drift.blame(name)()
	for key := range ob.onLink[name] {
		switch key.Kind() {
		case dataplane.KindNextHop:
			ob.lose(key)
		case dataplane.KindRoute, dataplane.KindNeighbour:
			if !carrierOnly {
				ob.lose(key)
			}
		}
	}
	ob.loseUsers()
	ob.forgetRoutes(func(r *fibRoute) bool {
		return r.key.Prefix.Addr().Is4() && (r.nh != 0 || !carrierOnly) && r.only(index)
	})
}

// only reports whether a route leads through that device alone.
func (r *fibRoute) only(link int) bool {
	return len(r.legs) > 0 && !slices.ContainsFunc(r.legs, func(l leg) bool { return l.link != link })
}

// loseUsers notes that routes are gone whose next hop is, and that groups have
// lost a member.
func (ob *observer) loseUsers() {
	ob.shrinkGroups()
	missing := false
	for id := range ob.hops.users {
		if ob.vanished(id) {
			missing = true
			break
		}
	}
	if !missing {
		return
	}
	for _, k := range ob.want.LoseWhere(func(_ key, have shape) bool {
		id := have.hop()
		return id != 0 && ob.vanished(id)
	}) {
		if !ob.drift.quiet {
			ob.drift.note(k.whole())
		}
	}
}

// vanished reports whether a next hop is not there, and was not flushed.
func (ob *observer) vanished(id dataplane.NextHopID) bool {
	_, flushed := ob.hops.flushed[id]
	return !flushed && !ob.hasNextHop(id)
}

// hasNextHop reports whether there is a next hop of that number, ours or not.
func (ac *actual) hasNextHop(id dataplane.NextHopID) bool {
	_, foreign := ac.mirror.nextHops[id]
	return foreign || ac.hops.has(id)
}

// forgetRoutes forgets foreign routes that the kernel removed in silence.
func (ob *observer) forgetRoutes(gone func(*fibRoute) bool) {
	if freed := ob.mirror.dropRoutes(gone); len(freed) > 0 {
		ob.want.Retry(freed...)
	}
	ob.underlay.changed()
}

func (ob *observer) addrEvent(a ifAddr, gone bool) {
	name := ob.mirror.linkName(a.link)
	o := dataplane.Address{Link: name, Prefix: a.prefix}
	mine := ob.ownsName(name) && !ob.keepsAddress(a)
	if !gone {
		ob.mirror.setAddr(a)
		if mine {
			ob.set(o)
		}
		return
	}
	ob.mirror.deleteAddr(a)
	if mine {
		ob.lose(o.Key())
	}
	if !a.prefix.Addr().Is4() {
		return
	}
	last := ob.mirror.lastIPv4(a.link)
	if last {
		defer ob.drift.blame(name)()
		// The kernel notifies of the neighbours, but not why (arp_ifdown).
		for key := range ob.onLink[name] {
			n, neigh := key.(dataplane.NeighbourKey)
			if key.Kind() == dataplane.KindRoute || neigh && n.Addr.Is4() {
				ob.lose(key)
			}
		}
	}
	ob.forgetRoutes(func(r *fibRoute) bool {
		return r.prefSrc == a.prefix.Addr() || last && r.nh == 0 && r.key.Prefix.Addr().Is4() && r.only(a.link)
	})
}

func (ob *observer) routeEvent(r fibRoute, gone, replaced bool) {
	mine := r.protocol == ob.cfg.Protocol
	ob.hops.measure(r)
	switch {
	case mine && gone:
		if have := ob.haveRoute(&r); !ob.hops.wasFlushed(nextHopOf(have)) { // IPv6: the kernel notifies of each
			ob.lose(have.Key())
		}
	case mine:
		ob.set(ob.haveRoute(&r))
	case gone:
		if ob.mirror.deleteRoute(r) {
			ob.want.Retry(r.key)
		}
		ob.underlay.changed()
	default:
		if replaced && r.tos == 0 {
			ob.lose(r.key)
		}
		ob.mirror.setRoute(r, replaced)
		ob.underlay.changed()
	}
}

func (ob *observer) nextHopEvent(n fibNextHop, gone bool) {
	key := ob.haveNextHop(&n).Key()
	mine := n.protocol == ob.cfg.Protocol
	switch {
	case mine && gone:
		ob.lose(key)
		ob.loseUsers()
	case mine:
		ob.applyFlushOf(n.id)
		ob.set(ob.haveNextHop(&n))
		if n.group == nil {
			ob.wakeWaiting(key) // a group may be short of it
		}
	case gone:
		delete(ob.mirror.nextHops, n.id)
		ob.want.Retry(dataplane.NextHopKey{ID: n.id}, dataplane.NextHopGroupKey{ID: n.id})
		ob.loseUsers()
	default:
		ob.mirror.nextHops[n.id] = n
		ob.lose(key) // replaced by a foreign one
	}
}

func (ob *observer) neighbourEvent(n *neighbour, gone bool) {
	name := ob.mirror.linkName(n.link)
	if !isWorkload(name) && !ob.ownsName(name) {
		return
	}
	if n.bridge && !n.addr.IsValid() {
		// Before Linux 6.3 rtnetlink itself notifies of an FDB entry too, without
		// its destination; the driver has said it all.
		return
	}
	o := ob.haveNeighbour(n)
	if o == nil || isWorkload(name) && !ob.wantedWorkload(o) {
		return
	}
	if gone || !n.permanent() {
		ob.lose(o.Key())
	} else {
		ob.set(o)
	}
}
