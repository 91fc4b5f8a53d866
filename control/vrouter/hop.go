package vrouter

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/crosssubnet"
	"github.com/routerd/routerd/dataplane/direct"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

// driverFor returns the driver that carries packets of an encapsulation.
func driverFor(e store.Encapsulation) dataplane.Driver {
	switch e {
	case store.IPIP:
		return ipip.Driver{}
	case store.VXLAN:
		return vxlan.Driver{}
	case store.IPIPCrossSubnet:
		return crosssubnet.Driver{Near: direct.Driver{}, Far: ipip.Driver{}}
	case store.VXLANCrossSubnet:
		return crosssubnet.Driver{Near: direct.Driver{}, Far: vxlan.Driver{}}
	case store.Direct:
	}
	return direct.Driver{}
}

// hopKey is the identity of a next-hop object: a node as reached for the
// prefixes of one pool, or a gateway that BGP named (then via is set).
type hopKey struct {
	pool string
	node string
	via  netip.Addr
	fam  dataplane.Family
}

func (k hopKey) String() string {
	if k.via.IsValid() {
		return "via " + k.via.String()
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
	err    error
}

// planHop asks the driver. It is a pure function of the table's inputs.
func (t *table) planHop(k hopKey, id dataplane.NextHopID) plan {
	h, ok := t.hosts[k.fam]
	if !ok {
		return plan{err: fmt.Errorf("%s address of this host: %w", k.fam, dataplane.ErrIncomplete)}
	}
	if k.via.IsValid() {
		gw, link, err := t.resolve(k.via)
		if err != nil {
			return plan{driver: direct.Driver{}.Name(), err: err}
		}
		return planWith(direct.Driver{}, h, dataplane.Peer{Name: k.via.String(), NextHop: id, Addr: k.via, Gateway: gw, Link: link})
	}
	n := t.nodes[k.node]
	if n == nil || !n.addr[k.fam].IsValid() {
		return plan{err: fmt.Errorf("%s address of node %s: %w", k.fam, k.node, dataplane.ErrIncomplete)}
	}
	p, ok := t.pools[k.pool]
	if !ok {
		return plan{err: fmt.Errorf("pool of the prefix: %w", dataplane.ErrIncomplete)}
	}
	return planWith(driverFor(p.encap), h, dataplane.Peer{
		Name: n.name, NextHop: id, Addr: n.addr[k.fam].Addr(),
		VXLANAddr: n.vxlanAddr[k.fam], VXLANMAC: n.vxlanMAC[k.fam],
	})
}

func planWith(d dataplane.Driver, h dataplane.Host, p dataplane.Peer) plan {
	if c, ok := d.(crosssubnet.Driver); ok {
		d = c.Choose(h, p)
	}
	objs, err := d.Peer(h, p)
	pl := plan{driver: d.Name(), objs: objs, err: err}
	for _, o := range objs {
		if nh, ok := o.(dataplane.NextHop); ok {
			pl.hop = nh
		}
	}
	return pl
}

// errUnresolved says that the underlay knows no way to a next hop.
var errUnresolved = errors.New("the underlay has no route to the next hop")

// resolve finds how the underlay reaches an address: the gateway and the
// device of the longest matching route that is not ours. Our own routes are
// never used, so a next hop cannot resolve through a pod's prefix.
func (t *table) resolve(a netip.Addr) (netip.Addr, string, error) {
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

// hop is a next hop that routes use.
type hop struct {
	id   dataplane.NextHopID
	refs int
	plan plan
}

// acquireHop returns the hop of k with one more user. The hop must be usable.
func (t *table) acquireHop(k hopKey) *hop {
	h, ok := t.hops[k]
	if !ok {
		h = &hop{id: hopID(k, t.idTaken)}
		h.plan = t.planHop(k, h.id)
		t.hops[k] = h
		t.ids[h.id] = k
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
