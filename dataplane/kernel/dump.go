package kernel

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// maxInterrupted is how often an interrupted listing is repeated before we
// give up for now. Tables under constant change interrupt many in a row.
const maxInterrupted = 20

// list asks for one table and appends what it parses to out. A listing that changes
// interrupted is thrown away and repeated.
func list[T any](ctx context.Context, c transport, what string, typ uint16, head []byte, out []T, parse func([]byte) (T, bool)) ([]T, error) {
	var b nl.Batch
	b.Begin(typ, 0, head...)
	before := len(out)
	err := nl.Undisturbed(maxInterrupted+1, func() error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		out = out[:before]
		return c.Dump(&b, func(m nl.Message) {
			if v, ok := parse(m.Body); ok {
				out = append(out, v)
			}
		})
	})
	if err != nil {
		return out[:before], fmt.Errorf("list %s: %w", what, err)
	}
	return out, nil
}

// transport carries requests to the kernel. Tests put one in between that
// refuses what they choose.
type transport interface {
	Batch(b *nl.Batch, answer func(int, nl.Message)) (map[int]error, error)
	Dump(b *nl.Batch, fn func(nl.Message)) error
	Port() uint32
	Close() error
}

var _ transport = (*nl.Conn)(nil)

// bufferBytes is the size asked for of the sockets' buffers. An overrun costs
// a full listing, so it is generous; memory is used only when needed.
const bufferBytes = 32 << 20

// dialConn opens a connection in the calling thread's network namespace.
func dialConn() (*nl.Conn, error) { return nl.Dial(unix.NETLINK_ROUTE, bufferBytes, bufferBytes) }

// spareRoutes is for how many routes a listing has room beside those of ours that are known.
const spareRoutes = 256

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
	if t.links, err = list(ctx, k.writer.conn, "links", unix.RTM_GETLINK, fam(unix.AF_UNSPEC, unix.SizeofIfInfomsg), nil, parseLink); err != nil {
		return t, err
	}
	if t.addrs, err = list(ctx, k.writer.conn, "addresses", unix.RTM_GETADDR, fam(unix.AF_UNSPEC, unix.SizeofIfAddrmsg), nil, parseAddr); err != nil {
		return t, err
	}
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6, unix.AF_BRIDGE} {
		t.neighbours, err = list(ctx, k.writer.conn, "neighbours", unix.RTM_GETNEIGH, fam(f, unix.SizeofNdMsg), t.neighbours, parseNeighbour)
		if err != nil && !unsupported(err) {
			return t, err
		}
	}
	if t.nextHops, err = list(ctx, k.writer.conn, "next hops", rtmGetNextHop, fam(unix.AF_UNSPEC, unix.SizeofNhmsg), nil, parseNextHop); err != nil {
		return t, err
	}
	t.routes = make([]fibRoute, 0, k.actual.hops.routes+k.actual.hops.routes/16+spareRoutes)
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6} {
		t.routes, err = list(ctx, k.writer.conn, "routes", unix.RTM_GETROUTE, fam(f, unix.SizeofRtMsg), t.routes, func(b []byte) (fibRoute, bool) {
			// A kernel without IPv6 answers with what it has.
			r, ok := parseRoute(b)
			return r, ok && b[0] == f && tracked(&r)
		})
		if err != nil && !unsupported(err) {
			return t, err
		}
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
	first := k.listing.why == "start"
	if err := k.observer.drain(); err != nil { // what was said before is in the listing
		return err
	}
	t, err := k.listTables(ctx)
	if err != nil {
		return err
	}
	if k.listing.why == "time" {
		clear(k.writer.doubted)
	}
	k.listing.why = ""
	m := newMirror()
	for _, l := range t.links {
		m.setLink(l)
	}
	for _, a := range t.addrs {
		m.addrs[a.link] = append(m.addrs[a.link], a)
	}
	for i := range t.routes {
		if r := &t.routes[i]; r.protocol != k.cfg.Protocol {
			r.behind = k.actual.behindOurs(t.routes, i)
			m.setRoute(*r, false)
		}
	}
	for _, n := range t.nextHops {
		if n.protocol != k.cfg.Protocol {
			m.nextHops[n.id] = n
		}
	}
	k.actual.mirror = m
	clear(k.actual.hops.measured)
	k.actual.hops.measure(t.routes...)
	have := k.actual.gather(&t)
	k.actual.applyFlushes()
	ours := k.actual.routesOfUnsure()
	drift := slices.DeleteFunc(k.want.ReplaceHave(have), func(k key) bool { return ours[k] })
	if !first {
		k.observer.drift.notice = notice{by: "full check", at: start}
		for _, d := range drift {
			k.observer.drift.note(d.whole())
		}
	}
	k.observer.drift.forgetSettled()
	k.actual.retryFreed()
	clear(k.observer.waiting)
	k.want.RetryWaiting()
	k.observer.underlay.changed()
	d := time.Since(start)
	k.listing.notBefore = time.Now().Add(2 * d)
	if h := k.cfg.Hooks.Listed; h != nil {
		h(d)
	}
	k.log.Debug("tables listed", "routes", len(t.routes), "duration", d)
	return nil
}

// actual is what there is in the kernel, and which of it is ours.
type actual struct {
	cfg      *Config
	log      *slog.Logger
	want     tracker
	sysctls  *sysctls
	offloads *ethtool // nil: the kernel has none

	mirror *mirror
	onLink map[string]map[dataplane.Key]struct{} // what there is of ours, by device
	hops   *nextHops
}

// behindOurs reports whether a route of ours with the key of the one at i is
// before it: the kernel lists the IPv4 routes of a prefix in the order in which
// it asks them. Of IPv6 routes with one metric it takes now this, now that.
func (ac *actual) behindOurs(routes []fibRoute, i int) bool {
	key := routes[i].key
	for i--; key.Prefix.Addr().Is4() && i >= 0 && routes[i].key == key; i-- {
		if routes[i].protocol == ac.cfg.Protocol && routes[i].tos == 0 {
			return true
		}
	}
	return false
}

// repeated reports whether the first of some routes is listed once more with the same
// key and protocol: the last counts.
func repeated(routes []fibRoute) bool {
	r := &routes[0]
	return len(routes) > 1 && routes[1].key == r.key && routes[1].tos == r.tos && routes[1].protocol == r.protocol
}

// gather returns what is ours of a listing. Routes, of which there may be a million, are
// made while it is ranged over.
func (ac *actual) gather(t *tables) iter.Seq2[key, shape] {
	have := make(map[dataplane.Key]dataplane.Object, len(t.nextHops))
	put := func(o dataplane.Object) { have[o.Key()] = o }
	owned := map[int]bool{}
	for i := range t.links {
		if l := &t.links[i]; ac.isOurs(l) {
			h := ac.haveLink(l)
			put(h)
			owned[l.index] = ac.owns(h)
		}
	}
	for _, a := range t.addrs {
		if owned[a.link] && !ac.keepsAddress(a) {
			put(dataplane.Address{Link: ac.mirror.linkName(a.link), Prefix: a.prefix})
		}
	}
	for key := range ac.sysctls.made {
		name := key.(dataplane.SysctlKey).Name
		if v, ok, err := ac.sysctls.read(name); err != nil {
			ac.log.Warn("sysctl cannot be read", "sysctl", name, "error", err)
		} else if ok {
			put(dataplane.Sysctl{Name: name, Value: v})
		}
	}
	for name := range ac.onLink {
		ac.haveFeatures(name, put)
	}
	for i := range t.neighbours {
		n := &t.neighbours[i]
		if o := ac.haveNeighbour(n); o != nil && n.permanent() && (owned[n.link] || ac.wantedWorkload(o)) {
			put(o)
		}
	}
	for i := range t.nextHops {
		if n := &t.nextHops[i]; n.protocol == ac.cfg.Protocol {
			put(ac.haveNextHop(n))
		}
	}
	return func(yield func(key, shape) bool) {
		for k, o := range have {
			if !yield(keyOf(k), shapeOf(o)) {
				return
			}
		}
		for i := range t.routes {
			r := &t.routes[i]
			if r.protocol != ac.cfg.Protocol || repeated(t.routes[i:]) {
				continue
			}
			if o := ac.haveRoute(r); !yield(keyOf(o.Key()), shapeOf(o)) {
				return
			}
		}
	}
}

// takes reports whether a device is ours, or would be if it were of the kind
// that is wanted under its name.
func (ac *actual) isOurs(l *ifLink) bool {
	if l.alias == ours && l.kind == kindOf(l.name) {
		return true
	}
	_, ok := ac.want.Want(dataplane.LinkKey{Name: l.name})
	return ok
}

// owns reports whether what is on a device that we take is ours too: not if it
// is of another kind than wanted.
func (ac *actual) owns(h haveLink) bool {
	w, ok := ac.want.Want(h.Link.Key())
	return !ok || w.(dataplane.Link).Type == h.Type
}

// ownsName is owns for what is known to be there. A device of which we have
// heard only now counts: what came to it after that may be notified already.
func (ac *actual) ownsName(name string) bool {
	o, ok := ac.want.Have(dataplane.LinkKey{Name: name})
	if !ok {
		l := ac.mirror.link(name)
		return l != nil && ac.isOurs(l) && ac.owns(ac.haveLink(l))
	}
	switch h := o.(type) {
	case haveLink:
		return ac.owns(h)
	default:
		return true
	}
}

func (ac *actual) haveLink(l *ifLink) haveLink {
	h := haveLink{
		Link: dataplane.Link{Name: l.name, Type: dataplane.LinkType(l.kind), MTU: l.mtu},
		up:   l.up(), marked: l.alias == ours, learning: l.learning, autoLinkLocal: l.autoLinkLocal(), shape: l.shape, obstructed: l.obstructed(), metadata: l.metadata,
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
		h.Parent = ac.mirror.linkName(l.parent)
	}
	return h
}

// keepsAddress reports whether an address on a device of ours is the kernel's:
// the link-local ones are on a device that makes them by itself.
func (ac *actual) keepsAddress(a ifAddr) bool {
	if !a.prefix.Addr().Is6() || !a.prefix.Addr().IsLinkLocalUnicast() {
		return false
	}
	l := ac.mirror.links[a.link]
	return l == nil || l.kind != string(dataplane.LinkVXLAN) && l.kind != string(dataplane.LinkIP6TNL)
}

// wantedWorkload reports whether o is on a workload's device and wanted.
func (ac *actual) wantedWorkload(o dataplane.Object) bool {
	if !isWorkload(linkName(o)) {
		return false
	}
	_, ok := ac.want.Want(o.Key())
	return ok
}

// haveNeighbour renders a neighbour or FDB entry; nil if it is of a kind that
// is never ours, such as a bridge's own FDB.
func (ac *actual) haveNeighbour(n *neighbour) dataplane.Object {
	name := ac.mirror.linkName(n.link)
	if !n.bridge {
		o := dataplane.Neighbour{Link: name, Addr: n.addr, MAC: n.mac}
		if n.flags != 0 {
			return noncanonicalNeighbour{o, n.flags}
		}
		return o
	}
	if n.flags&unix.NTF_SELF == 0 {
		return nil
	}
	o := dataplane.FDBEntry{Link: name, MAC: n.mac, Dst: n.addr, Port: n.port}
	if o.Port == 0 {
		// The kernel does not show a port that is the device's.
		if w, ok := ac.want.Want(o.Key()); ok && w.(dataplane.FDBEntry).Port == ac.mirror.links[n.link].portOrZero() {
			o.Port = w.(dataplane.FDBEntry).Port
		}
	}
	if n.flags != unix.NTF_SELF || n.state&^unix.NUD_NOARP != unix.NUD_PERMANENT {
		return noncanonicalFDBEntry{o, n.state}
	}
	return o
}

func (ac *actual) haveNextHop(n *fibNextHop) dataplane.Object {
	if n.group != nil {
		g := dataplane.NextHopGroup{ID: n.id, Members: dataplane.GroupOf(n.group...)}
		if n.extra {
			return noncanonicalGroup{g}
		}
		return g
	}
	o := dataplane.NextHop{ID: n.id, Gateway: n.gateway, OnLink: n.flags&unix.RTNH_F_ONLINK != 0}
	if n.link != 0 {
		o.Link = ac.mirror.linkName(n.link)
	}
	noncanonical := n.extra || !n.gateway.IsValid()
	if l := ac.mirror.links[n.link]; n.encap.dst.IsValid() {
		o.Gateway = n.encap.dst
		noncanonical = n.extra || n.gateway.IsValid() || l == nil || l.kind != string(dataplane.LinkIP6TNL) || l.local != n.encap.src || n.encap.ttl != hopLimit
		o.OnLink = true // the other end of a tunnel is, whatever is wanted
		if w, ok := ac.want.Want(o.Key()); ok {
			o.OnLink = w.(dataplane.NextHop).OnLink
		}
	}
	if noncanonical {
		return noncanonicalNextHop{o, n.flags, n.encap, n.extra}
	}
	return o
}

func (ac *actual) haveRoute(r *fibRoute) dataplane.Object {
	o := dataplane.Route{Prefix: r.key.Prefix, Table: r.key.Table, Metric: r.key.Metric, MTU: r.mtu}
	noncanonical := r.extra || r.tos != 0 || r.prefSrc.IsValid()
	switch {
	case r.typ == unix.RTN_BLACKHOLE:
		o.Type = dataplane.Blackhole
	case r.typ == unix.RTN_UNICAST && r.nh != 0:
		o.NextHop = r.nh
	case r.typ == unix.RTN_UNICAST && len(r.legs) == 1 && !r.legs[0].gateway.IsValid():
		o.Link = ac.mirror.linkName(r.legs[0].link)
		noncanonical = noncanonical || r.scope != unix.RT_SCOPE_LINK && o.Prefix.Addr().Is4()
	default:
		noncanonical = true
	}
	if noncanonical {
		return noncanonicalRoute{o, r.tos, fmt.Sprint(r.typ, r.nh, r.legs, r.prefSrc)}
	}
	return o
}

// noteHave keeps the indexes of what there is. The tracker calls it for each
// change, on the loop's goroutine.
func (ac *actual) noteHave(k key, old shape, had bool, now shape, has bool) {
	if had {
		if n := linkName(old.other); n != "" {
			delete(ac.onLink[n], k.whole())
			if len(ac.onLink[n]) == 0 {
				delete(ac.onLink, n)
			}
		}
		ac.hops.count(old, -1)
	}
	if has {
		if n := linkName(now.other); n != "" {
			if ac.onLink[n] == nil {
				ac.onLink[n] = make(map[dataplane.Key]struct{})
			}
			ac.onLink[n][k.whole()] = struct{}{}
		}
		ac.hops.count(now, 1)
	}
	if had == has {
		return
	}
	if has {
		ac.hops.appeared(k)
	} else {
		ac.hops.gone(k)
	}
	if key, ok := k.other.(dataplane.SysctlKey); ok {
		ac.sysctls.note(key, has)
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

// retryFreed makes due the removal of next hops that nothing uses any more.
func (ac *actual) retryFreed() {
	if freed := ac.hops.takeFreed(); len(freed) > 0 {
		ac.want.Retry(freed...)
	}
}

// report gives the tracker what became of work and settles what follows.
func (wr *writer) report(results []result) {
	wr.want.Report(results)
	wr.retryFreed()
	for i := range results {
		if r := &results[i]; r.Outcome == reconcile.Succeeded {
			if len(wr.doubted) > 0 {
				delete(wr.doubted, r.Op.Key)
			}
			if len(wr.drift.open) > 0 {
				wr.drift.righted(r.Op.Key.whole(), true)
			}
			switch r.Op.Key.kind() {
			case dataplane.KindNextHop, dataplane.KindNextHopGroup:
				wr.wakeWaiting(dataplane.NextHopKey{ID: idOf(r.Op.Key.other)}) // who uses one need not know which it is
			case dataplane.KindLink:
				wr.wakeWaiting(r.Op.Key.other)
			}
		}
	}
	wr.logResults(results)
}

// wakeWaiting makes due what waits for key.
func (ob *observer) wakeWaiting(key dataplane.Key) {
	if keys := ob.waiting.take(key); len(keys) > 0 {
		ob.want.Retry(keys...)
	}
}
