package kernel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// maxInterrupted is how often an interrupted listing is repeated before we
// give up for now. Tables under constant change interrupt many in a row.
const maxInterrupted = 20

// list asks for one table and parses it. A listing that changes interrupted is
// thrown away and repeated.
func list[T any](ctx context.Context, nl transport, what string, typ uint16, head []byte, parse func([]byte) (T, bool)) ([]T, error) {
	var b builder
	for try := 0; ; try++ {
		var out []T
		b.reset()
		b.begin(typ, 0, head...)
		b.end()
		err := nl.dump(&b, func(m message) {
			if v, ok := parse(m.body); ok {
				out = append(out, v)
			}
		})
		switch {
		case err == nil:
			return out, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case !errors.Is(err, errInterrupted) || try == maxInterrupted:
			return nil, fmt.Errorf("list %s: %w", what, err)
		}
	}
}

// tables is a complete listing.
type tables struct {
	links      []ifLink
	addrs      []ifAddr
	neighbours []neighbour
	nextHops   []fibNextHop
	routes     []fibRoute
}

func (k *Kernel) listTables(ctx context.Context) (t tables, err error) {
	fam := func(f byte, size int) []byte { h := make([]byte, size); h[0] = f; return h }
	if t.links, err = list(ctx, k.nl, "links", unix.RTM_GETLINK, fam(unix.AF_UNSPEC, unix.SizeofIfInfomsg), parseLink); err != nil {
		return t, err
	}
	if t.addrs, err = list(ctx, k.nl, "addresses", unix.RTM_GETADDR, fam(unix.AF_UNSPEC, unix.SizeofIfAddrmsg), parseAddr); err != nil {
		return t, err
	}
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6, unix.AF_BRIDGE} {
		n, err := list(ctx, k.nl, "neighbours", unix.RTM_GETNEIGH, fam(f, unix.SizeofNdMsg), parseNeighbour)
		if err != nil && !unsupported(err) {
			return t, err
		}
		t.neighbours = append(t.neighbours, n...)
	}
	if t.nextHops, err = list(ctx, k.nl, "next hops", rtmGetNextHop, fam(unix.AF_UNSPEC, unix.SizeofNhmsg), parseNextHop); err != nil {
		return t, err
	}
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6} {
		r, err := list(ctx, k.nl, "routes", unix.RTM_GETROUTE, fam(f, unix.SizeofRtMsg), func(b []byte) (fibRoute, bool) {
			// A kernel without IPv6 answers with what it has.
			r, ok := parseRoute(b)
			return r, ok && b[0] == f && tracked(&r)
		})
		if err != nil && !unsupported(err) {
			return t, err
		}
		t.routes = append(t.routes, r...)
	}
	return t, nil
}

// unsupported reports whether err says that the kernel lacks a family.
func unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)
}

// check makes what we believe what a complete listing says.
func (k *Kernel) check(ctx context.Context) error {
	start := time.Now()
	first := k.dirty == "start"
	if err := k.drain(); err != nil { // what was said before is in the listing
		return err
	}
	t, err := k.listTables(ctx)
	if err != nil {
		return err
	}
	if k.dirty == "time" {
		clear(k.doubted)
	}
	k.dirty = ""
	m := newMirror()
	for _, l := range t.links {
		m.setLink(l)
	}
	for _, a := range t.addrs {
		m.addrs[a.link] = append(m.addrs[a.link], a)
	}
	for i := range t.routes {
		if r := &t.routes[i]; r.protocol != k.cfg.Protocol {
			r.behind = k.behindOurs(t.routes, i)
			m.setRoute(*r, false)
		}
	}
	for _, n := range t.nextHops {
		if n.protocol != k.cfg.Protocol {
			m.nextHops[n.id] = n
		}
	}
	k.mir = m
	clear(k.measured)
	for i := range t.routes {
		if r := &t.routes[i]; r.nh != 0 && (r.mtu != 0 || r.extra) {
			k.measured[r.nh] = struct{}{}
		}
	}
	have := k.gather(&t)
	k.admitCuts()
	ours := k.routesOfAsked()
	drift := slices.DeleteFunc(k.want.ReplaceHave(maps.All(have)), func(key dataplane.Key) bool { return ours[key] })
	if !first {
		k.notice = notice{by: "full check", at: start}
		for _, key := range drift {
			k.drifted(key)
		}
	}
	k.forgetDrift()
	k.retryFreed()
	clear(k.waits)
	k.want.RetryWaiting()
	k.changed()
	d := time.Since(start)
	k.listAt = time.Now().Add(2 * d)
	if h := k.cfg.Hooks.Listed; h != nil {
		h(d)
	}
	k.log.Debug("tables listed", "routes", len(t.routes), "duration", d)
	return nil
}

// behindOurs reports whether a route of ours with the key of the one at i is
// before it: the kernel lists the IPv4 routes of a prefix in the order in which
// it asks them. Of IPv6 routes with one metric it takes now this, now that.
func (k *Kernel) behindOurs(routes []fibRoute, i int) bool {
	key := routes[i].key
	for i--; key.Prefix.Addr().Is4() && i >= 0 && routes[i].key == key; i-- {
		if routes[i].protocol == k.cfg.Protocol && routes[i].tos == 0 {
			return true
		}
	}
	return false
}

// gather returns what is ours of a listing.
func (k *Kernel) gather(t *tables) map[dataplane.Key]dataplane.Object {
	have := make(map[dataplane.Key]dataplane.Object, len(t.routes)+len(t.nextHops))
	put := func(o dataplane.Object) { have[o.Key()] = o }
	owned := map[int]bool{}
	for i := range t.links {
		if l := &t.links[i]; k.takes(l) {
			h := k.haveLink(l)
			put(h)
			owned[l.index] = k.owns(h)
		}
	}
	for _, a := range t.addrs {
		if owned[a.link] && !k.keepsAddress(a) {
			put(dataplane.Address{Link: k.mir.linkName(a.link), Prefix: a.prefix})
		}
	}
	for key := range k.sysctls {
		name := key.(dataplane.SysctlKey).Name
		if v, ok, err := k.readSysctl(name); err != nil {
			k.log.Warn("sysctl cannot be read", "sysctl", name, "error", err)
		} else if ok {
			put(dataplane.Sysctl{Name: name, Value: v})
		}
	}
	for name := range k.onLink {
		k.haveFeatures(name, put)
	}
	for i := range t.neighbours {
		n := &t.neighbours[i]
		if o := k.haveNeighbour(n); o != nil && n.permanent() && (owned[n.link] || k.wantedWorkload(o)) {
			put(o)
		}
	}
	for i := range t.nextHops {
		if n := &t.nextHops[i]; n.protocol == k.cfg.Protocol {
			put(k.haveNextHop(n))
		}
	}
	for i := range t.routes {
		if r := &t.routes[i]; r.protocol == k.cfg.Protocol {
			put(k.haveRoute(r))
		}
	}
	return have
}

// takes reports whether a device is ours, or would be if it were of the kind
// that is wanted under its name.
func (k *Kernel) takes(l *ifLink) bool {
	if l.alias == ours && l.kind == kindOf(l.name) {
		return true
	}
	_, ok := k.want.Want(dataplane.LinkKey{Name: l.name})
	return ok
}

// owns reports whether what is on a device that we take is ours too: not if it
// is of another kind than wanted.
func (k *Kernel) owns(h haveLink) bool {
	w, ok := k.want.Want(h.Link.Key())
	return !ok || w.(dataplane.Link).Type == h.Type
}

// ownsName is owns for what is known to be there. A device of which we have
// heard only now counts: what came to it after that may be told already.
func (k *Kernel) ownsName(name string) bool {
	o, ok := k.want.Have(dataplane.LinkKey{Name: name})
	if !ok {
		l := k.mir.link(name)
		return l != nil && k.takes(l) && k.owns(k.haveLink(l))
	}
	switch h := o.(type) {
	case haveLink:
		return k.owns(h)
	default:
		return true
	}
}

func (k *Kernel) haveLink(l *ifLink) haveLink {
	h := haveLink{
		Link: dataplane.Link{Name: l.name, Type: dataplane.LinkType(l.kind), MTU: l.mtu},
		up:   l.up(), marked: l.alias == ours, learning: l.learning, speaks: l.speaks(), shape: l.shape, taken: l.taken(), metadata: l.metadata,
	}
	switch h.Type {
	case dataplane.LinkVXLAN:
		h.MAC, h.VNI, h.Port = l.mac, l.vni, l.port
	case dataplane.LinkIP6TNL:
	case dataplane.LinkIPIP:
		return h
	}
	h.Local = l.local
	if l.parent != 0 {
		h.Parent = k.mir.linkName(l.parent)
	}
	return h
}

// keepsAddress reports whether an address on a device of ours is the kernel's:
// the link-local ones are on a device that makes them by itself.
func (k *Kernel) keepsAddress(a ifAddr) bool {
	if !a.prefix.Addr().Is6() || !a.prefix.Addr().IsLinkLocalUnicast() {
		return false
	}
	l := k.mir.links[a.link]
	return l == nil || l.kind != string(dataplane.LinkVXLAN) && l.kind != string(dataplane.LinkIP6TNL)
}

// wantedWorkload reports whether o is on a workload's device and wanted.
func (k *Kernel) wantedWorkload(o dataplane.Object) bool {
	if !isWorkload(linkName(o)) {
		return false
	}
	_, ok := k.want.Want(o.Key())
	return ok
}

// haveNeighbour renders a neighbour or FDB entry; nil if it is of a kind that
// is never ours, such as a bridge's own FDB.
func (k *Kernel) haveNeighbour(n *neighbour) dataplane.Object {
	name := k.mir.linkName(n.link)
	if !n.bridge {
		o := dataplane.Neighbour{Link: name, Addr: n.addr, MAC: n.mac}
		if n.flags != 0 {
			return oddNeighbour{o, n.flags}
		}
		return o
	}
	if n.flags&unix.NTF_SELF == 0 {
		return nil
	}
	o := dataplane.FDBEntry{Link: name, MAC: n.mac, Dst: n.addr, Port: n.port}
	if o.Port == 0 {
		// The kernel does not show a port that is the device's.
		if w, ok := k.want.Want(o.Key()); ok && w.(dataplane.FDBEntry).Port == k.mir.links[n.link].portOrZero() {
			o.Port = w.(dataplane.FDBEntry).Port
		}
	}
	if n.flags != unix.NTF_SELF || n.state&^unix.NUD_NOARP != unix.NUD_PERMANENT {
		return oddFDBEntry{o, n.state}
	}
	return o
}

func (k *Kernel) haveNextHop(n *fibNextHop) dataplane.Object {
	if n.group != nil {
		g := dataplane.NextHopGroup{ID: n.id, Members: dataplane.GroupOf(n.group...)}
		if n.extra {
			return oddGroup{g}
		}
		return g
	}
	o := dataplane.NextHop{ID: n.id, Gateway: n.gateway, OnLink: n.flags&unix.RTNH_F_ONLINK != 0}
	if n.link != 0 {
		o.Link = k.mir.linkName(n.link)
	}
	odd := n.extra || !n.gateway.IsValid()
	if l := k.mir.links[n.link]; n.encap.dst.IsValid() {
		o.Gateway = n.encap.dst
		odd = n.extra || n.gateway.IsValid() || l == nil || l.kind != string(dataplane.LinkIP6TNL) || l.local != n.encap.src || n.encap.ttl != hopLimit
		o.OnLink = true // the other end of a tunnel is, whatever a wish says
		if w, ok := k.want.Want(o.Key()); ok {
			o.OnLink = w.(dataplane.NextHop).OnLink
		}
	}
	if odd {
		return oddNextHop{o, n.flags, n.encap, n.extra}
	}
	return o
}

func (k *Kernel) haveRoute(r *fibRoute) dataplane.Object {
	o := dataplane.Route{Prefix: r.key.Prefix, Table: r.key.Table, Metric: r.key.Metric, MTU: r.mtu}
	odd := r.extra || r.tos != 0 || r.prefSrc.IsValid()
	switch {
	case r.typ == unix.RTN_BLACKHOLE:
		o.Type = dataplane.Blackhole
	case r.typ == unix.RTN_UNICAST && r.nh != 0:
		o.NextHop = r.nh
	case r.typ == unix.RTN_UNICAST && len(r.legs) == 1 && !r.legs[0].gateway.IsValid():
		o.Link = k.mir.linkName(r.legs[0].link)
		odd = odd || r.scope != unix.RT_SCOPE_LINK && o.Prefix.Addr().Is4()
	default:
		odd = true
	}
	if odd {
		return oddRoute{o, r.tos, fmt.Sprint(r.typ, r.nh, r.legs, r.prefSrc)}
	}
	return o
}

// noteHave keeps the indexes of what there is. The tracker calls it for each
// change, on the loop's goroutine.
func (k *Kernel) noteHave(key dataplane.Key, old dataplane.Object, had bool, now dataplane.Object, has bool) {
	kind := key.Kind()
	if had {
		if n := linkName(old); n != "" {
			delete(k.onLink[n], key)
			if len(k.onLink[n]) == 0 {
				delete(k.onLink, n)
			}
		}
		k.countUsers(old, -1)
	}
	if has {
		if n := linkName(now); n != "" {
			if k.onLink[n] == nil {
				k.onLink[n] = make(map[dataplane.Key]struct{})
			}
			k.onLink[n][key] = struct{}{}
		}
		k.countUsers(now, 1)
	}
	if had == has {
		return
	}
	switch kind {
	case dataplane.KindRoute:
		if has {
			k.routes++
		} else {
			k.routes--
		}
	case dataplane.KindNextHop, dataplane.KindNextHopGroup:
		id := idOf(key)
		if has {
			k.nextHops[id] = struct{}{}
		} else {
			delete(k.nextHops, id)
		}
		if kind == dataplane.KindNextHopGroup && has {
			k.groups[id] = struct{}{}
		} else {
			delete(k.groups, id)
		}
	case dataplane.KindSysctl:
		if has {
			k.sysctls[key] = struct{}{}
		} else {
			delete(k.sysctls, key)
			k.settings.remove(key.(dataplane.SysctlKey).Name)
		}
	}
}

// countUsers counts n more users of the next hops that o uses: a route's one,
// a group's members.
func (k *Kernel) countUsers(o dataplane.Object, n int) {
	k.countUser(nextHopOf(o), n)
	for _, m := range membersOf(o) {
		k.countUser(m.ID, n)
	}
}

// idOf is the number of a next hop or a group.
func idOf(key dataplane.Key) dataplane.NextHopID {
	switch key := key.(type) {
	case dataplane.NextHopKey:
		return key.ID
	case dataplane.NextHopGroupKey:
		return key.ID
	}
	return 0
}

func (k *Kernel) countUser(id dataplane.NextHopID, n int) {
	if id == 0 {
		return
	}
	if k.users[id] += n; k.users[id] > 0 {
		return
	}
	delete(k.users, id)
	delete(k.cut, id)
	if key, ok := k.held[id]; ok {
		delete(k.held, id)
		k.freed = append(k.freed, key)
	}
}

// retryFreed makes due the removal of next hops that nothing uses any more.
func (k *Kernel) retryFreed() {
	if len(k.freed) > 0 {
		k.want.Retry(k.freed...)
		k.freed = k.freed[:0]
	}
}

// report tells the tracker what became of work and settles what follows.
func (k *Kernel) report(results []reconcile.Result[dataplane.Key, dataplane.Object]) {
	k.want.Report(results)
	k.retryFreed()
	for _, r := range results {
		if r.Outcome == reconcile.Succeeded {
			delete(k.doubted, r.Op.Key)
			k.righted(r.Op.Key, true)
			switch r.Op.Key.Kind() {
			case dataplane.KindNextHop, dataplane.KindNextHopGroup:
				k.wakeWaiting(dataplane.NextHopKey{ID: idOf(r.Op.Key)}) // who uses one need not know which it is
			case dataplane.KindLink:
				k.wakeWaiting(r.Op.Key)
			}
		}
	}
	k.logResults(results)
}

// wakeWaiting makes due what waits for key.
func (k *Kernel) wakeWaiting(key dataplane.Key) {
	if keys := k.waits[key]; len(keys) > 0 {
		delete(k.waits, key)
		k.want.Retry(slices.Clone(keys)...)
	}
}
