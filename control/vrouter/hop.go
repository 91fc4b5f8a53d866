package vrouter

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// hopKey is the identity of a next-hop object: a node as reached for the
// prefixes of one pool, a gateway that BGP named (then via is set), or a group
// of such gateways (then set is).
type hopKey struct {
	pool string
	node string
	via  netip.Addr
	set  HopSet
	fam  dataplane.Family
	// orphan is the number of a group that stays in use for what it has become
	// (see table.keep); 0 otherwise.
	orphan dataplane.NextHopID
}

// learned reports whether the key names what BGP did.
func (k hopKey) learned() bool { return k.via.IsValid() || k.set != "" }

func (k hopKey) String() string {
	if k.via.IsValid() {
		return "via " + k.via.String()
	}
	if k.set != "" {
		return "via one of " + string(k.set)
	}
	return fmt.Sprintf("%s %s for pool %s", k.fam, k.node, k.pool)
}

// firstID keeps our numbers apart from the small ones that people and other
// daemons choose by hand.
const firstID = 1 << 24

// hopID derives a number from the identity. The same identity gives the same
// number in every life of the daemon; taken says which are in use by other
// identities, so that two that fall on one number get different ones.
func hopID(k hopKey, taken func(dataplane.NextHopID) bool) dataplane.NextHopID {
	h := fnv.New32a()
	// Writing to a hash never fails.
	fmt.Fprintf(h, "%s\x00%s\x00%s\x00%d", k.pool, k.node, k.via, k.fam) //nolint:errcheck // hash.Hash never returns an error
	if k.set != "" {
		fmt.Fprintf(h, "\x00%s", k.set) //nolint:errcheck // as above
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
func (t *table) planHop(k hopKey, id dataplane.NextHopID) plan {
	switch {
	case k.via.IsValid():
		return t.planVia(k.via, id)
	case k.set != "":
		return t.planSet(k)
	}
	w, ok := t.ways[k]
	if !ok {
		return plan{err: fmt.Errorf("node %s: %w", k.node, dataplane.ErrIncomplete)}
	}
	if w.err != nil {
		return plan{driver: w.target.Driver, err: w.err}
	}
	h, p := t.wayEnds(k, w.outer, w.form, id)
	pl := planWith(driverOf(w.form), h, p)
	pl.mtu = t.pathMTU(k, w)
	return pl
}

// planVia is the plan for a gateway that BGP named, resolved through the
// underlay. The family of the packets does not matter: IPv4 goes to IPv6
// gateways too (RFC 8950), and the reverse is refused before.
func (t *table) planVia(a netip.Addr, id dataplane.NextHopID) plan {
	pl := plan{driver: dataplane.DriverDirect}
	if t.lost[a] {
		pl.err = errLost
		return pl
	}
	gw, link, err := t.resolve(a)
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

// pathMTU is what the path to a node leaves for workloads where that was
// measured to be less than the device takes, in bytes; 0: what the device
// takes. Both the underlay and the tunnel itself are measured; the less counts.
func (t *table) pathMTU(k hopKey, w way) uint32 {
	mtu := t.reach[w.outer][k.node].MTU - driverOf(w.form).Overhead(w.outer)
	if inside := t.delivery[w.outer][k.node][w.form].MTU; saneMTU(inside) && (inside < mtu || !saneMTU(mtu)) {
		mtu = inside
	}
	if !saneMTU(mtu) || mtu >= t.formMTU(w.form) {
		return 0
	}
	return uint32(mtu)
}

// errUnresolved says that the underlay knows no way to a next hop.
var errUnresolved = errors.New("the underlay has no route to the next hop")

// resolve finds how the underlay reaches an address: the gateway and the
// device of the longest matching route that is not ours. Our own routes are
// never used, so a next hop cannot resolve through a pod's prefix.
func (t *table) resolve(a netip.Addr) (netip.Addr, string, error) {
	if a.Is6() && a.IsLinkLocalUnicast() {
		return t.resolveLinkLocal(a)
	}
	r, ok := t.underlayRoutes.Lookup(a)
	if !ok {
		return netip.Addr{}, "", fmt.Errorf("%s: %w", a, errUnresolved)
	}
	if t.ownAddrs[a] {
		return netip.Addr{}, "", fmt.Errorf("next hop %s is this host itself", a)
	}
	if r.Gateway.IsValid() {
		return r.Gateway, r.Link, nil
	}
	return a, r.Link, nil
}

// resolveLinkLocal finds an address that is known on one device alone, which its
// zone names (RFC 4007, section 11): a peer of an unnumbered session.
func (t *table) resolveLinkLocal(a netip.Addr) (netip.Addr, string, error) {
	if a.Zone() == "" {
		return netip.Addr{}, "", fmt.Errorf("link-local next hop %s comes without its device: %w", a, errUnresolved)
	}
	if t.underlay != nil {
		for _, l := range t.underlay.Links {
			if l.Name == a.Zone() && l.Up {
				return a.WithZone(""), l.Name, nil
			}
		}
	}
	return netip.Addr{}, "", fmt.Errorf("%s: device %s is gone, down or without carrier: %w", a.WithZone(""), a.Zone(), errUnresolved)
}

// hop is a next hop that routes use.
type hop struct {
	key     hopKey
	id      dataplane.NextHopID
	refs    int          // routes, and groups that it is a member of
	owners  int          // of a group: the routes that want exactly its set
	guests  map[*aim]int // of a group: the other routes, which want a set that has become the same
	members []hopKey
	plan    plan
}

// acquireHop returns the hop of k with one more user. The hop must be usable.
func (t *table) acquireHop(k hopKey) *hop {
	h, ok := t.hops[k]
	if !ok {
		h = &hop{key: k, id: hopID(k, t.idTaken)}
		t.hops[k] = h
		t.ids[h.id] = k
		if k.set != "" {
			t.fillGroup(h)
		} else {
			h.plan = t.planHop(k, h.id)
		}
		for _, o := range h.plan.objs {
			t.acquire(o)
		}
	}
	h.refs++
	return h
}

func (t *table) releaseHop(k hopKey) {
	h := t.hops[k]
	if h.refs--; h.refs > 0 {
		return
	}
	for _, o := range h.plan.objs {
		t.release(o)
	}
	delete(t.hops, k)
	delete(t.ids, h.id)
	t.forgetGroup(h)
}

func (t *table) idTaken(id dataplane.NextHopID) bool {
	_, ok := t.ids[id]
	return ok
}

// refreshHop plans a hop in use again after something it depends on changed.
// It reports whether the hop is still usable; when it is not, the old objects
// stay until the routes have moved away.
func (t *table) refreshHop(k hopKey) bool {
	h, ok := t.hops[k]
	if !ok {
		return true
	}
	if k.set != "" {
		return t.refreshGroup(h)
	}
	p := t.planHop(k, h.id)
	if p.err != nil {
		return false
	}
	old := h.plan.objs
	h.plan = p
	for _, o := range p.objs {
		t.acquire(o)
	}
	for _, o := range old {
		t.release(o)
	}
	return true
}

// usable returns the plan for k without making it.
func (t *table) usable(k hopKey) plan {
	if h, ok := t.hops[k]; ok && !t.stale[k] {
		return h.plan
	}
	return t.planHop(k, hopID(k, func(id dataplane.NextHopID) bool { o, ok := t.ids[id]; return ok && o != k }))
}
