package vrouter

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"unique"

	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/dataplane"
)

// hopKey is the identity of a next-hop object: a node as reached for the
// prefixes of one pool, or what BGP named, one gateway or a group of them.
type hopKey struct {
	pool, node string
	hops       nexthop.Set
	fam        dataplane.Family
	// rekeyed is the number of a group that stays in use for what it has become
	// (see [table.rekey]); 0 otherwise.
	rekeyed dataplane.NextHopID
}

// hopKeyVia is the identity of a gateway that BGP named.
func hopKeyVia(a netip.Addr) hopKey {
	return hopKey{hops: nexthop.SetOf(a), fam: dataplane.FamilyOf(a)}
}

// learned reports whether the key names what BGP did.
func (k hopKey) learned() bool { return k.hops != nexthop.Set{} }

// group reports whether the object is a group, be it of one.
func (k hopKey) group() bool { return k.rekeyed != 0 || k.hops.Len() > 1 }

func (k hopKey) String() string {
	switch {
	case k.group():
		return "via one of " + k.hops.Join(" ")
	case k.learned():
		return "via " + k.hops.Join("")
	}
	return fmt.Sprintf("%s %s for pool %s", k.fam, k.node, k.pool)
}

// firstID keeps our numbers apart from the small ones that people and other
// daemons choose by hand.
const firstID = 1 << 24

// hopID derives a number from the identity. The same identity gives the same
// number in every run of the daemon; taken says which are in use by other
// identities, so that two that fall on one number get different ones.
func hopID(k hopKey, taken func(dataplane.NextHopID) bool) dataplane.NextHopID {
	h := fnv.New32a()
	// Writing to a hash never fails.
	fmt.Fprintf(h, "%s\x00%s\x00%s\x00%d", k.pool, k.node, k.hops.Single(), k.fam) //nolint:errcheck // hash.Hash never returns an error
	if k.group() {
		fmt.Fprintf(h, "\x00%s", k.hops.Join(" ")) //nolint:errcheck // as above
	}
	id := dataplane.NextHopID(h.Sum32()&0x7fffffff | firstID)
	for taken(id) {
		id = (id+1)&0x7fffffff | firstID
	}
	return id
}

// plan is how a next hop is reached: the driver and the objects it takes.
type plan struct {
	driver string
	objs   []dataplane.Object
	hop    dataplane.NextHop
	mtu    uint32 // of the routes; 0: the device's
	err    error
}

// planHop asks the driver. It is a pure function of the table's inputs.
func (n *nextHops) planHop(k hopKey, id dataplane.NextHopID) plan {
	switch {
	case k.group():
		return n.planGroup(k)
	case k.learned():
		return n.planVia(k.hops.Single(), id)
	}
	return n.sender.planNode(k, id)
}

// planVia is the plan for a gateway that BGP named, resolved through the
// underlay. The family of the packets does not matter: IPv4 goes to IPv6
// gateways too (RFC 8950), and the reverse is refused before.
func (n *nextHops) planVia(a netip.Addr, id dataplane.NextHopID) plan {
	pl := plan{driver: dataplane.DriverDirect}
	if n.down[a] {
		pl.err = errDown
		return pl
	}
	gw, link, err := n.resolve(a)
	if err != nil {
		pl.err = err
		return pl
	}
	pl.hop = dataplane.NextHop{ID: id, Link: link, Gateway: gw, OnLink: true}
	pl.objs = []dataplane.Object{pl.hop}
	return pl
}

func planWith(d dataplane.Driver, h dataplane.Host, p dataplane.Peer) plan {
	objs, err := d.Peer(h, p)
	pl := plan{driver: d.Name(), objs: objs, err: err}
	for _, o := range objs {
		if nh, ok := o.(dataplane.NextHop); ok {
			pl.hop = nh
		}
	}
	return pl
}

// nextHops are the next hops in use. It is for the rib alone, which says what
// is in use.
type nextHops struct {
	*network
	*objects
	sender *sender // plans next hops that are nodes

	hops      map[hopKey]*hop
	ids       map[dataplane.NextHopID]hopKey
	stale     map[hopKey]bool     // cannot be used now, and keep their objects until the routes have moved
	down      map[netip.Addr]bool // gateways that must not be used
	turned    set[hopKey]         // their routes are to be chosen anew
	usableNow map[hopKey][]hopKey // usable members, of this round of choosing
}

func newNextHops(n *network, s *sender, o *objects) *nextHops {
	return &nextHops{
		network: n, objects: o, sender: s,
		hops: map[hopKey]*hop{}, ids: map[dataplane.NextHopID]hopKey{}, stale: map[hopKey]bool{}, down: map[netip.Addr]bool{}, turned: set[hopKey]{},
		usableNow: map[hopKey][]hopKey{},
	}
}

// hop is a next hop that routes use.
type hop struct {
	key     hopKey
	id      dataplane.NextHopID
	refs    int // routes, and groups that it is a member of
	plan    plan
	members []hopKey                      // of a group: those that can be used
	routes  map[unique.Handle[hopKey]]int // of a group: its routes, by what they desire
}

// acquireHop returns the hop of k with one more user. The hop must be usable.
func (n *nextHops) acquireHop(k hopKey) *hop {
	h, ok := n.hops[k]
	if !ok {
		h = &hop{key: k, id: hopID(k, n.idTaken)}
		n.hops[k] = h
		n.ids[h.id] = k
		if k.group() {
			n.fillGroup(h)
		} else {
			h.plan = n.planHop(k, h.id)
		}
		for _, o := range h.plan.objs {
			n.acquire(o)
		}
	}
	h.refs++
	return h
}

func (n *nextHops) releaseHop(k hopKey) {
	h := n.hops[k]
	if h.refs--; h.refs > 0 {
		return
	}
	for _, o := range h.plan.objs {
		n.release(o)
	}
	delete(n.hops, k)
	delete(n.ids, h.id)
	n.forgetGroup(h)
}

func (n *nextHops) idTaken(id dataplane.NextHopID) bool {
	_, ok := n.ids[id]
	return ok
}

// refreshHop plans a hop in use again after something it depends on changed.
// It reports whether the hop is still usable; when it is not, the old objects
// stay until the routes have moved away.
func (n *nextHops) refreshHop(k hopKey) bool {
	h, ok := n.hops[k]
	if !ok {
		return true
	}
	if k.group() {
		return n.refreshGroup(h)
	}
	p := n.planHop(k, h.id)
	if p.err != nil {
		return false
	}
	old := h.plan.objs
	h.plan = p
	for _, o := range p.objs {
		n.acquire(o)
	}
	for _, o := range old {
		n.release(o)
	}
	return true
}

// usable returns the plan for k without making it.
func (n *nextHops) usable(k hopKey) plan {
	if h, ok := n.hops[k]; ok && !n.stale[k] {
		return h.plan
	}
	return n.planHop(k, hopID(k, func(id dataplane.NextHopID) bool { o, ok := n.ids[id]; return ok && o != k }))
}

func (n *nextHops) refresh(k hopKey) {
	if _, ok := n.hops[k]; !ok {
		return
	}
	if n.refreshHop(k) {
		delete(n.stale, k)
	} else {
		n.stale[k] = true
	}
}

// tidy forgets of next hops that are no longer in use that they could not be
// used.
func (n *nextHops) tidy() {
	for k := range n.stale {
		if _, ok := n.hops[k]; !ok {
			delete(n.stale, k)
		}
	}
}
