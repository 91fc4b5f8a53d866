package rib

import (
	"fmt"
	"hash/fnv"
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"unique"

	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/dense"
)

// hopKey is the identity of a next-hop object: a node as reached for the
// prefixes of one pool, or what BGP named, one gateway or a group of them.
type hopKey struct {
	encap.Key // of what BGP named the family alone
	hops      nexthop.Set
	// rekeyed is the number of a group that stays in use for what it has become
	// (see [nextHops.rekey]); 0 otherwise.
	rekeyed dataplane.NextHopID
}

// hopKeyVia is the identity of a gateway that BGP named.
func hopKeyVia(a netip.Addr) hopKey {
	return hopKey{Key: encap.Key{Family: dataplane.FamilyOf(a)}, hops: nexthop.SetOf(a)}
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
	return fmt.Sprintf("%s %s for pool %s", k.Family, k.Node, k.Pool)
}

// firstID keeps our numbers apart from the small ones that people and other
// daemons choose by hand.
const firstID = 1 << 24

// hopID derives a number from the identity. The same identity gives the same
// number in every run of the daemon; taken says which are in use by other
// identities, so that two that fall on one number get different ones.
func hopID(k hopKey, taken func(dataplane.NextHopID) bool) dataplane.NextHopID {
	text := make([]byte, 0, 128)
	for _, s := range []string{k.Pool, k.Node, k.hops.Single().String()} {
		text = append(append(text, s...), 0)
	}
	text = strconv.AppendUint(text, uint64(k.Family), 10)
	if k.group() {
		text = append(append(text, 0), k.hops.Join(" ")...)
	}
	h := fnv.New32a()
	h.Write(text) //nolint:errcheck // hash.Hash never returns an error
	id := dataplane.NextHopID(h.Sum32()&0x7fffffff | firstID)
	for taken(id) {
		id = (id+1)&0x7fffffff | firstID
	}
	return id
}

// planHop asks the driver. It is a pure function of what the core knows.
func (n *nextHops) planHop(k hopKey, id dataplane.NextHopID) encap.Plan {
	switch {
	case k.group():
		return n.planGroup(k)
	case k.learned():
		return n.planVia(k.hops.Single(), id)
	}
	return n.planner.Plan(k.Key, id)
}

// planVia is the plan for a gateway that BGP named, resolved through the
// underlay. The family of the packets does not matter: IPv4 goes to IPv6
// gateways too (RFC 8950), and the reverse is refused before.
func (n *nextHops) planVia(a netip.Addr, id dataplane.NextHopID) encap.Plan {
	pl := encap.Plan{Driver: dataplane.DriverDirect}
	if n.down[a] {
		pl.Err = errDown
		return pl
	}
	gw, link, err := n.network.Resolve(a)
	if err != nil {
		pl.Err = err
		return pl
	}
	pl.Hop = dataplane.NextHop{ID: id, Link: link, Gateway: gw, OnLink: true}
	pl.Objects = []dataplane.Object{pl.Hop}
	return pl
}

// nextHops are the next hops in use. It is for the rib alone, which says what
// is in use.
type nextHops struct {
	network *topology.Network
	objects *desired.Objects
	planner *encap.Planner // of next hops that are nodes

	hops      map[hopKey]*hop
	ids       map[dataplane.NextHopID]*hop
	stale     map[hopKey]bool                    // cannot be used now, and keep their objects until the routes have moved
	down      map[netip.Addr]bool                // gateways that must not be used
	turned    set[hopKey]                        // their routes are to be chosen anew
	usableNow map[unique.Handle[hopKey]][]hopKey // usable members, of this round of choosing
	choices   *dense.Numbers[chosen]             // the routes in use, by a record's route
	offered   offer                              // of this round of choosing, the last one
}

// offer is what a next hop that is not in use would be.
type offer struct {
	key  hopKey
	id   dataplane.NextHopID
	plan encap.Plan
}

func newNextHops(n *topology.Network, p *encap.Planner, o *desired.Objects) *nextHops {
	return &nextHops{
		network: n, objects: o, planner: p,
		hops: map[hopKey]*hop{}, ids: map[dataplane.NextHopID]*hop{}, stale: map[hopKey]bool{}, down: map[netip.Addr]bool{}, turned: set[hopKey]{},
		usableNow: map[unique.Handle[hopKey]][]hopKey{}, choices: dense.NewNumbers[chosen](),
	}
}

// hop is a next hop that routes use.
type hop struct {
	key     hopKey
	id      dataplane.NextHopID
	refs    int // choices, and groups that it is a member of
	plan    encap.Plan
	members []hopKey // of a group: those that can be used
	choices []uint32 // the routes on it
}

// acquireHop returns the hop of k with one more user. The hop must be usable.
func (n *nextHops) acquireHop(k hopKey) *hop {
	h := n.hopOf(k)
	h.refs++
	return h
}

// hopOf returns the hop of k, which must be usable; a new one has no user yet.
func (n *nextHops) hopOf(k hopKey) *hop {
	h, ok := n.hops[k]
	if !ok {
		made := n.offered
		if made.key != k || n.idTaken(made.id) {
			made = offer{key: k, id: hopID(k, n.idTaken)}
			if !k.group() {
				made.plan = n.planHop(k, made.id)
			}
		}
		h = &hop{key: k, id: made.id, plan: made.plan}
		n.hops[k] = h
		n.ids[h.id] = h
		if k.group() {
			n.fillGroup(h)
		}
		for _, o := range h.plan.Objects {
			n.objects.Acquire(o)
		}
	}
	return h
}

// use notes that one prefix more has this route.
func (n *nextHops) use(c chosen) uint32 {
	id, first := n.choices.Take(c)
	if first && c.on != nil {
		c.on.refs++
		c.on.choices = append(c.on.choices, id)
	}
	return id
}

// disuse takes back use.
func (n *nextHops) disuse(id uint32) {
	h := n.choices.Value(id).on
	if !n.choices.Leave(id) || h == nil {
		return
	}
	h.choices = slices.DeleteFunc(h.choices, func(c uint32) bool { return c == id })
	n.rekey(h)
	n.releaseHop(h.key)
}

// desired yields what the routes on a hop desire, with the number of the routes.
func (n *nextHops) desired(h *hop) iter.Seq2[unique.Handle[hopKey], int] {
	return func(yield func(unique.Handle[hopKey], int) bool) {
		for _, id := range h.choices {
			if !yield(n.choices.Value(id).desired, n.choices.Users(id)) {
				return
			}
		}
	}
}

func (n *nextHops) releaseHop(k hopKey) {
	h := n.hops[k]
	if h.refs--; h.refs > 0 {
		return
	}
	for _, o := range h.plan.Objects {
		n.objects.Release(o)
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
	if p.Err != nil {
		return false
	}
	if slices.Equal(h.plan.Objects, p.Objects) {
		p.Objects = h.plan.Objects // they are in use: the others are not kept
	} else {
		n.objects.Swap(h.plan.Objects, p.Objects)
	}
	h.plan = p
	return true
}

// usable returns the plan for k without making it.
func (n *nextHops) usable(k hopKey) encap.Plan {
	if h, ok := n.hops[k]; ok && !n.stale[k] {
		return h.plan
	}
	id := hopID(k, func(id dataplane.NextHopID) bool { o, ok := n.ids[id]; return ok && o.key != k })
	n.offered = offer{k, id, n.planHop(k, id)}
	return n.offered.plan
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

// Tidy forgets of next hops that are no longer in use that they could not be
// used.
func (n *nextHops) Tidy() {
	for k := range n.stale {
		if _, ok := n.hops[k]; !ok {
			delete(n.stale, k)
		}
	}
}

// resolution is how the underlay reaches a next hop.
type resolution struct {
	gateway netip.Addr
	link    string
	ok      bool
}

func (n *nextHops) resolution(a netip.Addr) resolution {
	gw, link, err := n.network.Resolve(a)
	return resolution{gw, link, err == nil}
}
