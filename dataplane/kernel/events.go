package kernel

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

func isWorkload(link string) bool { return strings.HasPrefix(link, prefixWorkload) }

// drain applies all that the kernel has said so far. After a request was
// answered that includes all its consequences.
func (k *Kernel) drain() error {
	events, overrun, err := k.lis.take()
	if overrun {
		k.log.Warn("the kernel's notifications overran; listing everything")
		k.listing.ask("notifications were lost")
	}
	links := map[string]notice{}
	for _, m := range events {
		k.drift.notice = noticeOf(m)
		k.event(m, links)
	}
	for name, n := range links {
		k.drift.notice = n
		k.observe(name)
	}
	err = errors.Join(err, k.drainSettings())
	k.retryFreed()
	k.drift.log()
	return err
}

func (k *Kernel) event(m notification, links map[string]notice) {
	switch m.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if l, ok := parseLink(m.Body); ok {
			links[l.name] = k.drift.notice
			k.linkEvent(l, m.Type == unix.RTM_DELLINK)
			k.underlay.changed()
		}
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if a, ok := parseAddr(m.Body); ok {
			k.addrEvent(a, m.Type == unix.RTM_DELADDR)
			k.underlay.changed()
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if r, ok := parseRoute(m.Body); ok && tracked(&r) {
			// One that is added goes before those of its key, one appended behind.
			r.behind = m.Flags&unix.NLM_F_APPEND != 0 && r.key.Prefix.Addr().Is4()
			k.routeEvent(r, m.Type == unix.RTM_DELROUTE, m.Flags&unix.NLM_F_REPLACE != 0)
		}
	case unix.RTM_NEWNEXTHOP, rtmDelNextHop:
		if n, ok := parseNextHop(m.Body); ok {
			k.nextHopEvent(n, m.Type == rtmDelNextHop)
		}
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if n, ok := parseNeighbour(m.Body); ok {
			k.neighbourEvent(&n, m.Type == unix.RTM_DELNEIGH)
		}
	case unix.RTM_NEWNETCONF:
		if link, ok := parseNetconf(m.Body); ok {
			k.netconfEvent(link)
		}
	}
}

// lose notes that what has that key is gone.
func (k *Kernel) lose(key dataplane.Key) {
	lose := k.want.LoseHave
	if k.drift.cause != "" || k.drift.quiet {
		lose = k.want.LoseDependent
	}
	if lose(key) && !k.drift.quiet {
		k.drift.note(key)
	} else if len(k.drift.open) > 0 && k.want.Settled(key) {
		k.drift.righted(key, false)
	}
}

// set notes what is there.
func (k *Kernel) set(o dataplane.Object) {
	key, set := o.Key(), k.want.SetHave
	// What became of our own request is blamed on nobody; but a device that
	// the kernel does not give the settings that it was asked for is held
	// back, like one that somebody keeps changing.
	quiet := k.drift.quiet
	if quiet && key.Kind() != dataplane.KindLink {
		set = k.want.SetDependent
		// Nor does a request about a device add anything to it.
		_, quiet = k.want.Want(key)
	}
	if set(key, o) && !quiet {
		k.drift.note(key)
	} else if len(k.drift.open) > 0 && k.want.Settled(key) {
		k.drift.righted(key, false)
	}
}

// observe compares a device with what is wanted of it.
func (k *Kernel) observe(name string) {
	key := dataplane.LinkKey{Name: name}
	l := k.mirror.link(name)
	if l == nil || !k.isOurs(l) {
		k.lose(key)
		return
	}
	k.set(k.haveLink(l))
}

func (k *Kernel) linkEvent(l ifLink, gone bool) {
	old := k.mirror.links[l.index]
	switch {
	case gone:
		if old != nil {
			k.mirror.deleteLink(l.index)
			k.linkGone(l.index, l.name)
		}
		return
	case old == nil:
	case old.name != l.name:
		k.linkGone(l.index, old.name)
		k.observe(old.name)
	case old.up() && !l.up():
		k.linkDown(l.index, l.name, false)
	case old.carrier() && !l.carrier():
		k.linkDown(l.index, l.name, true)
	}
	k.mirror.setLink(l)
	k.wakeWaiting(dataplane.LinkKey{Name: l.name})
}

// linkGone derives what went with a device.
func (k *Kernel) linkGone(index int, name string) {
	defer k.drift.blame(name)()
	for key := range k.onLink[name] {
		k.lose(key)
	}
	k.loseUsers()
	k.forgetRoutes(func(r *fibRoute) bool { return r.only(index) })
	k.wakeWaiting(dataplane.LinkKey{Name: name}) // to wait for another reason
}

// linkDown derives what the kernel removed when a device went down, or lost
// only its carrier: it tells of neither the next hops nor the IPv4 routes
// (nexthop_flush_dev and fib_disable_ip in the kernel's source).
func (k *Kernel) linkDown(index int, name string, carrierOnly bool) {
	defer k.drift.blame(name)()
	for key := range k.onLink[name] {
		switch key.Kind() {
		case dataplane.KindNextHop:
			k.lose(key)
		case dataplane.KindRoute, dataplane.KindNeighbour:
			if !carrierOnly {
				k.lose(key)
			}
		}
	}
	k.loseUsers()
	k.forgetRoutes(func(r *fibRoute) bool {
		return r.key.Prefix.Addr().Is4() && (r.nh != 0 || !carrierOnly) && r.only(index)
	})
}

// only reports whether a route leads through that device alone.
func (r *fibRoute) only(link int) bool {
	return len(r.legs) > 0 && !slices.ContainsFunc(r.legs, func(l leg) bool { return l.link != link })
}

// loseUsers notes that routes are gone whose next hop is, and that groups have
// lost a member.
func (k *Kernel) loseUsers() {
	k.shrinkGroups()
	missing := false
	for id := range k.hops.users {
		if k.vanished(id) {
			missing = true
			break
		}
	}
	if !missing {
		return
	}
	for _, key := range k.want.LoseWhere(func(_ dataplane.Key, o dataplane.Object) bool {
		id := nextHopOf(o)
		return id != 0 && k.vanished(id)
	}) {
		if !k.drift.quiet {
			k.drift.note(key)
		}
	}
}

// vanished reports whether a next hop is not there, and was not flushed.
func (k *Kernel) vanished(id dataplane.NextHopID) bool {
	_, flushed := k.hops.flushed[id]
	return !flushed && !k.hasNextHop(id)
}

// hasNextHop reports whether there is a next hop of that number, ours or not.
func (k *Kernel) hasNextHop(id dataplane.NextHopID) bool {
	_, foreign := k.mirror.nextHops[id]
	return foreign || k.hops.has(id)
}

// forgetRoutes forgets foreign routes that the kernel removed in silence.
func (k *Kernel) forgetRoutes(gone func(*fibRoute) bool) {
	if freed := k.mirror.dropRoutes(gone); len(freed) > 0 {
		k.want.Retry(freed...)
	}
	k.underlay.changed()
}

func (k *Kernel) addrEvent(a ifAddr, gone bool) {
	name := k.mirror.linkName(a.link)
	o := dataplane.Address{Link: name, Prefix: a.prefix}
	mine := k.ownsName(name) && !k.keepsAddress(a)
	if !gone {
		k.mirror.setAddr(a)
		if mine {
			k.set(o)
		}
		return
	}
	k.mirror.deleteAddr(a)
	if mine {
		k.lose(o.Key())
	}
	if !a.prefix.Addr().Is4() {
		return
	}
	last := k.mirror.lastIPv4(a.link)
	if last {
		defer k.drift.blame(name)()
		// The kernel tells of the neighbours, but not why (arp_ifdown).
		for key := range k.onLink[name] {
			n, neigh := key.(dataplane.NeighbourKey)
			if key.Kind() == dataplane.KindRoute || neigh && n.Addr.Is4() {
				k.lose(key)
			}
		}
	}
	k.forgetRoutes(func(r *fibRoute) bool {
		return r.prefSrc == a.prefix.Addr() || last && r.nh == 0 && r.key.Prefix.Addr().Is4() && r.only(a.link)
	})
}

func (k *Kernel) routeEvent(r fibRoute, gone, replaced bool) {
	mine := r.protocol == k.cfg.Protocol
	k.hops.measure(r)
	switch {
	case mine && gone:
		if have := k.haveRoute(&r); !k.hops.wasFlushed(have) { // IPv6: the kernel tells of each
			k.lose(have.Key())
		}
	case mine:
		k.set(k.haveRoute(&r))
	case gone:
		if k.mirror.deleteRoute(r) {
			k.want.Retry(r.key)
		}
		k.underlay.changed()
	default:
		if replaced && r.tos == 0 {
			k.lose(r.key)
		}
		k.mirror.setRoute(r, replaced)
		k.underlay.changed()
	}
}

func (k *Kernel) nextHopEvent(n fibNextHop, gone bool) {
	key := k.haveNextHop(&n).Key()
	mine := n.protocol == k.cfg.Protocol
	switch {
	case mine && gone:
		k.lose(key)
		k.loseUsers()
	case mine:
		k.applyFlushOf(n.id)
		k.set(k.haveNextHop(&n))
		if n.group == nil {
			k.wakeWaiting(key) // a group may be short of it
		}
	case gone:
		delete(k.mirror.nextHops, n.id)
		k.want.Retry(dataplane.NextHopKey{ID: n.id}, dataplane.NextHopGroupKey{ID: n.id})
		k.loseUsers()
	default:
		k.mirror.nextHops[n.id] = n
		k.lose(key) // replaced by a foreign one
	}
}

func (k *Kernel) neighbourEvent(n *neighbour, gone bool) {
	name := k.mirror.linkName(n.link)
	if !isWorkload(name) && !k.ownsName(name) {
		return
	}
	if n.bridge && !n.addr.IsValid() {
		// Before Linux 6.3 rtnetlink itself tells of an FDB entry too, without
		// its destination; the driver has said it all.
		return
	}
	o := k.haveNeighbour(n)
	if o == nil || isWorkload(name) && !k.wantedWorkload(o) {
		return
	}
	if gone || !n.permanent() {
		k.lose(o.Key())
	} else {
		k.set(o)
	}
}
