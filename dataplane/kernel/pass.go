package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

type (
	op     = reconcile.Op[key, shape]
	result = reconcile.Result[key, shape]
)

const (
	// batchSize is the number of messages in one send. Above 64 nothing more
	// is gained; the acknowledgement of a batch is one message.
	batchSize = 512
	// turnSize is the number of objects of a kind in one turn, after which
	// new and better work gets its chance: a few milliseconds.
	turnSize = 4096
	// noLimit takes everything.
	noLimit = 1 << 30
	// maxRetries is how often a message is sent again at once when the
	// kernel was short of something.
	maxRetries = 3
)

// turn does a part of what is due and reports whether there is more: first all
// that is to be made, in order, and when nothing of that is left, what is to
// go, in reverse order.
//
// What is wanted may change at any time, and what is due with it. So before the
// work of one kind begins, all that has to come before it is looked at again.
func (wr *writer) turn() bool {
	for _, kind := range dataplane.Kinds() {
		ops := wr.due(class(kind), false)
		if affectsForwarding(kind) && wr.preempted(ops, false, 0, class(kind)) {
			wr.flushDue()
			return true
		}
		wr.make(kind, ops)
	}
	wr.flushDue()
	if wr.listing.needed() || wr.want.HasDue(false) {
		return true
	}
	wr.removeAll()
	if wr.want.HasDue(false) || wr.want.HasDue(true) {
		return true
	}
	wr.shrink()
	return false
}

// shrink gives back the room that a burst took for its work, now that it is over.
func (wr *writer) shrink() {
	if max(cap(wr.ops), cap(wr.results), cap(wr.sent)) > batchSize/2 {
		wr.ops, wr.results, wr.sent, wr.batch = nil, nil, nil, builder{}
	}
}

// due takes a turn of work of one class. It is valid until the next call.
func (wr *writer) due(class int, remove bool) []op {
	clear(wr.ops)
	wr.ops = wr.want.AppendDue(wr.ops[:0], class, remove, turnSize)
	return wr.ops
}

// flushDue flushes what is queued, unless the tables have to be listed first.
func (wr *writer) flushDue() {
	if !wr.listing.needed() {
		wr.flushNextHops()
	}
}

// affectsForwarding reports whether objects of a kind lead packets to others, which must be
// there before. What is on a device follows each change of the device at once:
// with its address the kernel throws away all neighbours, and the packets that
// wait for them if that happens twice.
func affectsForwarding(kind dataplane.Kind) bool {
	return kind == dataplane.KindNextHop || kind == dataplane.KindNextHopGroup || kind == dataplane.KindRoute
}

// preempted reports whether there is work by now that is to be done before ops:
// of the classes from one to before another. They are put back then. A next hop
// must not come before its neighbour is there, nor a neighbour go while a next
// hop that has just been moved is not yet written.
func (wr *writer) preempted(ops []op, remove bool, from, to int) bool {
	if len(ops) == 0 || !wr.want.HasDueIn(remove, from, to) {
		return false
	}
	results := make([]result, len(ops))
	for i, o := range ops {
		results[i] = result{Op: o, Outcome: reconcile.Postponed}
	}
	wr.report(results)
	return true
}

// make creates and changes.
func (wr *writer) make(kind dataplane.Kind, ops []op) {
	switch kind {
	case dataplane.KindLink:
		for _, o := range ops {
			wr.putLink(o)
		}
	case dataplane.KindSysctl:
		for _, o := range ops {
			r := wr.putSysctl(o)
			wr.sysctls.refused.note(o.Key.other, r.Outcome == reconcile.Refused)
			wr.report([]result{r})
		}
	case dataplane.KindFeature:
		for _, o := range ops {
			wr.report([]result{wr.putFeature(o)})
		}
	default:
		wr.inBatches(ops, wr.encodePut, wr.judgePut)
	}
}

// removeAll removes what is due to go, dependants first. It stops after a
// turn's worth of one kind, so that nothing goes before what depends on it.
func (wr *writer) removeAll() {
	for _, kind := range []dataplane.Kind{dataplane.KindNextHopGroup, dataplane.KindNextHop} {
		hops := wr.want.Due(class(kind), true, noLimit)
		if wr.preempted(hops, false, 0, len(dataplane.Kinds())) {
			return
		}
		wr.removeNextHops(kind, wr.removeWithRoutes(hops))
	}
	kinds := dataplane.Kinds()
	slices.Reverse(kinds)
	for _, kind := range kinds {
		ops := wr.due(class(kind), true)
		if wr.preempted(ops, false, 0, len(kinds)) || wr.preempted(ops, true, class(kind)+1, len(kinds)) {
			return
		}
		full := len(ops) == turnSize
		if !affectsForwarding(kind) {
			ops = wr.keepUsed(ops)
		}
		if len(ops) > 0 {
			wr.quiescer.before(kind)
		}
		if kind == dataplane.KindNextHop || kind == dataplane.KindNextHopGroup {
			wr.removeNextHops(kind, ops)
		} else {
			wr.remove(kind, ops)
		}
		if full {
			return
		}
	}
}

// keepUsed holds back the removal of what next hops lead through that could not
// be moved away or removed: the device with its addresses, the neighbour, its FDB
// entry. It returns the other ops.
func (wr *writer) keepUsed(ops []op) []op {
	if len(ops) == 0 {
		return ops
	}
	users := make(map[dataplane.Key]dataplane.Key)
	for _, o := range wr.want.Stuck(class(dataplane.KindNextHop)) {
		h, ok := o.Have.other.(dataplane.NextHop)
		if !ok {
			continue
		}
		neighbour := dataplane.NeighbourKey{Link: h.Link, Addr: h.Gateway}
		users[dataplane.LinkKey{Name: h.Link}], users[neighbour] = o.Key.other, o.Key.other
		if have, ok := wr.want.Have(neighbour); ok {
			if n, ok := have.(dataplane.Neighbour); ok {
				users[dataplane.FDBKey{Link: n.Link, MAC: n.MAC}] = o.Key.other
			}
		}
	}
	if len(users) == 0 {
		return ops
	}
	var free []op
	var results []result
	for _, o := range ops {
		used := o.Key.whole()
		if a, ok := used.(dataplane.AddressKey); ok {
			used = dataplane.LinkKey{Name: a.Link}
		}
		if user, ok := users[used]; ok {
			r := wr.waiting.add(o.Key.whole(), user, fmt.Errorf("%s leads there and cannot be changed yet", user))
			r.Op = o
			results = append(results, *r)
		} else {
			free = append(free, o)
		}
	}
	wr.report(results)
	return free
}

// removeNextHops removes next hops, or groups, but not those that routes or
// groups use: the kernel would change these with them. They are tried again
// when the last user is gone.
func (wr *writer) removeNextHops(kind dataplane.Kind, ops []op) {
	var free []op
	var results []result
	for _, o := range ops {
		id := idOf(o.Key.other)
		if n := wr.hops.users[id]; n > 0 {
			wr.hops.held[id] = o.Key.other
			results = append(results, result{Op: o, Outcome: reconcile.Blocked, Err: fmt.Errorf("%d routes or groups use it", n)})
		} else {
			free = append(free, o)
		}
	}
	wr.report(results)
	wr.remove(kind, free)
}

// remove removes objects of one kind.
func (wr *writer) remove(kind dataplane.Kind, ops []op) {
	switch kind {
	case dataplane.KindLink:
		for _, o := range ops {
			wr.removeLink(o)
		}
	case dataplane.KindSysctl, dataplane.KindFeature:
		// What the value was before is not known: it stays.
		results := make([]result, len(ops))
		for i, o := range ops {
			results[i] = result{Op: o}
		}
		wr.report(results)
	default:
		wr.inBatches(ops, wr.encodeRemove, judgeRemove)
	}
}

// removeWithRoutes removes those of the next hops all of whose routes are to go
// too, which takes the routes along in one message, and returns the others. The routes
// are then found to be gone in their turn: to take them all in hand takes 200 bytes each.
func (wr *writer) removeWithRoutes(hops []op) []op {
	worth := func(o op) bool { return wr.hops.worthFlushing(idOf(o.Key.other)) }
	if !slices.ContainsFunc(hops, worth) || wr.want.HasDue(false) {
		return hops
	}
	routes := map[dataplane.NextHopID]int{}
	wr.want.Removals(class(dataplane.KindRoute), func(have shape, n int) { routes[have.hop()] += n })
	var whole, rest []op
	for _, o := range hops {
		if id := idOf(o.Key.other); worth(o) && routes[id] == wr.hops.users[id] {
			whole = append(whole, o)
		} else {
			rest = append(rest, o)
		}
	}
	wr.flushEach(whole)
	return rest
}

// inBatches sends a message for each op, many at once. encode appends it to
// the builder, or returns what else becomes of the op; judge turns the
// kernel's answer into a result.
func (wr *writer) inBatches(ops []op, encode func(*builder, op) *result, judge func(op, error) result) {
	if len(ops) == 0 {
		return
	}
	results, sent, b := wr.results, wr.sent, wr.batch
	wr.results, wr.sent, wr.batch = nil, nil, builder{} // in use
	defer func() {
		clear(results[:cap(results)])
		clear(sent[:cap(sent)])
		wr.results, wr.sent, wr.batch = results[:0], sent[:0], b
	}()
	for len(ops) > 0 {
		n := min(len(ops), batchSize)
		sent = sent[:0]
		b.Reset()
		for _, o := range ops[:n] {
			if r := encode(&b, o); r != nil {
				r.Op = o
				results = append(results, *r)
			} else {
				sent = append(sent, o)
			}
		}
		ops = ops[n:]
		results = wr.sendAll(&b, sent, results, encode, judge)
		wr.pulse.beat()
		// Who wants more has the tracker meanwhile: it is not asked for after each batch.
		if len(results) >= turnSize || len(ops) == 0 {
			wr.report(results)
			results = results[:0]
		}
	}
}

// sendAll sends the messages in b, which are those of ops, judges the
// answers and appends what becomes of each to results. What the kernel was short of something for is sent again.
func (wr *writer) sendAll(b *builder, ops []op, results []result, encode func(*builder, op) *result, judge func(op, error) result) []result {
	for try := 0; len(ops) > 0; try++ {
		wr.writes.Add(int64(b.Len()))
		errs, err := wr.conn.Batch(&b.Batch, nil)
		if err != nil {
			wr.conn.redial(err)
			for _, o := range ops {
				results = append(results, result{Op: o, Outcome: reconcile.Refused, Err: err})
			}
			return results
		}
		var again []op
		done := 0
		for i, o := range ops {
			if try < maxRetries && transient(errs[i]) {
				again = append(again, o)
				continue
			}
			r := judge(o, errs[i])
			if r.Op = o; r.Outcome == reconcile.Succeeded && errs[i] == nil {
				done++
			}
			results = append(results, r)
		}
		wr.wrote(ops[0].Key.kind(), !ops[0].Wanted, done)
		ops = nil
		b.Reset()
		for _, o := range again {
			if r := encode(b, o); r != nil {
				r.Op = o
				results = append(results, *r)
			} else {
				ops = append(ops, o)
			}
		}
	}
	return results
}

// transient reports whether the kernel was short of something for a moment.
func transient(err error) bool {
	return errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM)
}

func (wr *writer) wrote(kind dataplane.Kind, removed bool, n int) {
	switch kind {
	case dataplane.KindRoute, dataplane.KindNextHop, dataplane.KindNextHopGroup:
		wr.quiescer.needed = wr.quiescer.needed || n > 0
	default:
	}
	if h := wr.cfg.Hooks.Written; h != nil && n > 0 {
		h(kind, removed, n)
	}
}

// encodePut appends the message that makes o.Want be there.
func (wr *writer) encodePut(b *builder, o op) *result {
	if r, ok := o.Want.route(o.Key); ok {
		return wr.encodeRoute(b, o, r)
	}
	if err := validate(o.Want.other); err != nil {
		return &result{Outcome: reconcile.Refused, Err: err}
	}
	switch w := o.Want.other.(type) {
	case dataplane.Address:
		if !wr.ownsName(w.Link) {
			return wr.waitForLink(o, w.Link)
		}
		b.address(unix.RTM_NEWADDR, createReplace, w.Prefix, wr.mirror.names[w.Link])
	case dataplane.Neighbour:
		if !wr.usable(w.Link) {
			return wr.waitForLink(o, w.Link)
		}
		b.putNeighbour(w, wr.mirror.names[w.Link])
	case dataplane.FDBEntry:
		if !wr.usable(w.Link) {
			return wr.waitForLink(o, w.Link)
		}
		b.putFDB(w, wr.mirror.names[w.Link])
	case dataplane.NextHop:
		return wr.encodeNextHop(b, o, w)
	case dataplane.NextHopGroup:
		return wr.encodeGroup(b, o, w)
	}
	return nil
}

// usable reports whether neighbours may be set on a device: ours, and there.
func (ac *actual) usable(name string) bool {
	return isWorkload(name) && ac.mirror.link(name) != nil || ac.ownsName(name)
}

func (wr *writer) encodeNextHop(b *builder, o op, w dataplane.NextHop) *result {
	wr.applyFlushOf(w.ID)
	if s, ok := wr.mirror.nextHops[w.ID]; ok {
		return &result{Outcome: reconcile.Refused, Err: &ClashError{o.Key.whole(), s.protocol, wr.cfg.Protocol}}
	}
	l := wr.mirror.link(w.Link)
	if l == nil {
		return wr.waitForLink(o, w.Link)
	}
	if !l.carrier() {
		return wr.waiting.add(o.Key.whole(), dataplane.LinkKey{Name: w.Link}, fmt.Errorf("waiting for link %s, which is down or has no carrier", w.Link))
	}
	if l.kind == string(dataplane.LinkIP6TNL) && !w.Gateway.Is6() {
		return &result{Outcome: reconcile.Refused, Err: check(false, "gateway", "a tunnel over IPv6 leads to an IPv6 address")}
	}
	b.putNextHop(w, o.Exists, wr.cfg.Protocol, l)
	return nil
}

func (wr *writer) encodeRoute(b *builder, o op, w dataplane.Route) *result {
	if err := validateRoute(w); err != nil {
		return &result{Outcome: reconcile.Refused, Err: err}
	}
	over, alone := wr.mirror.foreignRoute(o.Key.routeKey())
	if over != nil && (o.Exists || !alone || !wr.takesOver(over, w)) {
		return &result{Outcome: reconcile.Refused, Err: &ClashError{o.Key.whole(), over.protocol, wr.cfg.Protocol}}
	}
	link := 0
	switch {
	case w.NextHop != 0:
		if !wr.hops.has(w.NextHop) {
			return wr.waiting.add(o.Key.whole(), dataplane.NextHopKey{ID: w.NextHop}, fmt.Errorf("waiting for next hop %d", w.NextHop))
		}
	case w.Link != "":
		l := wr.mirror.link(w.Link)
		if l == nil {
			return wr.waitForLink(o, w.Link)
		}
		if !l.up() {
			return wr.waiting.add(o.Key.whole(), dataplane.LinkKey{Name: w.Link}, fmt.Errorf("waiting for link %s, which is down", w.Link))
		}
		link = l.index
	}
	if w.MTU != 0 {
		wr.hops.measured[w.NextHop] = struct{}{}
	}
	_, bare := wr.hops.measured[w.NextHop]
	flags := uint16(create)
	switch {
	case over != nil:
		flags = createReplace // it may have gone since
	case o.Exists && !wr.hops.wasFlushed(o.Have.hop()):
		flags = replace
	}
	b.putRoute(w, flags, wr.cfg.Protocol, link, bare && w.MTU == 0 && w.NextHop != 0)
	return nil
}

func (wr *writer) waitForLink(o op, name string) *result {
	return wr.waiting.add(o.Key.whole(), dataplane.LinkKey{Name: name}, fmt.Errorf("waiting for link %s", name))
}

// waiting lists who waits for what.
type waiting map[dataplane.Key][]dataplane.Key

// add notes that who waits for what, and says why.
func (w waiting) add(who, what dataplane.Key, why error) *result {
	w[what] = append(w[what], who)
	return &result{Outcome: reconcile.Blocked, Err: why}
}

// take returns who waits for what; they wait no longer.
func (w waiting) take(what dataplane.Key) []dataplane.Key {
	who := w[what]
	delete(w, what)
	return who
}

// judgePut says what an answer to encodePut's message means.
func (wr *writer) judgePut(o op, err error) result {
	switch {
	case err == nil:
		if o.Key.kind() == dataplane.KindRoute && !o.Exists {
			wr.tookOver(o.Key.routeKey())
		}
		return wr.madeGroup(o)
	case errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENETDOWN):
		// It went after we looked: looking again finds out what to wait for.
		if wr.doubted.first(o.Key) {
			return result{Outcome: reconcile.Postponed}
		}
	case o.Exists && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)):
		return result{Outcome: reconcile.Lost}
	case !o.Exists && errors.Is(err, unix.EEXIST):
		// Ours, and we lost sight of it, or a foreign one that has just come:
		// a listing shows.
		if wr.doubted.first(o.Key) {
			wr.listing.ask("found what should not be there")
			return result{Outcome: reconcile.Postponed}
		}
	}
	if o.Attempts == 0 {
		wr.listing.ask("an object was refused")
	}
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: run as root or give the process CAP_NET_ADMIN", err)
	}
	return result{Outcome: reconcile.Refused, Err: err}
}

// doubted are the keys about which the last answer contradicted what we believed.
type doubted map[key]struct{}

// first reports whether an answer that contradicts what we believe is the first
// in a row about that key.
func (d doubted) first(k key) bool {
	if _, ok := d[k]; ok {
		delete(d, k)
		return false
	}
	d[k] = struct{}{}
	return true
}

// encodeRemove appends the message that removes what o.Have is.
func (wr *writer) encodeRemove(b *builder, o op) *result {
	link := 0
	switch o.Key.kind() {
	case dataplane.KindRoute:
		if wr.hops.wasFlushed(o.Have.hop()) {
			wr.gone = result{}
			return &wr.gone
		}
	case dataplane.KindAddress, dataplane.KindNeighbour, dataplane.KindFDB:
		var ok bool
		if link, ok = wr.mirror.names[linkName(o.Have.other)]; !ok {
			return &result{} // it went with its device
		}
	}
	switch key := o.Key.other.(type) {
	case nil:
		b.deleteRoute(o.Key.routeKey(), 0, wr.cfg.Protocol)
	case dataplane.AddressKey:
		b.address(unix.RTM_DELADDR, 0, key.Prefix, link)
	case dataplane.NeighbourKey:
		b.deleteNeighbour(key, link)
	case dataplane.FDBKey:
		b.deleteFDB(key, link)
	case dataplane.NextHopKey, dataplane.NextHopGroupKey:
		b.deleteNextHop(idOf(key))
	case noncanonicalRouteKey:
		b.deleteRoute(key.RouteKey, key.tos, wr.cfg.Protocol)
	}
	return nil
}

// judgeRemove says what an answer to a removal means: what is not there is
// removed.
func judgeRemove(o op, err error) result {
	for _, gone := range []unix.Errno{unix.ESRCH, unix.ENODEV, unix.ENXIO, unix.ENOENT, unix.EADDRNOTAVAIL} {
		if errors.Is(err, gone) {
			err = nil
		}
	}
	if err != nil {
		return result{Outcome: reconcile.Refused, Err: err}
	}
	return result{}
}
