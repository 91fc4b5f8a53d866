package vrouter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gaissmai/bart"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

type set[K comparable] map[K]struct{}

// index maps a key to a set of values.
type index[K, V comparable] map[K]set[V]

func (x index[K, V]) add(k K, v V) {
	if x[k] == nil {
		x[k] = set[V]{}
	}
	x[k][v] = struct{}{}
}

func (x index[K, V]) remove(k K, v V) {
	delete(x[k], v)
	if len(x[k]) == 0 {
		delete(x, k)
	}
}

// table is the state of the core and all of its decisions.
type table struct {
	self string

	// What came in.
	nodes    map[string]*node
	pools    map[string]pool
	poolTree *bart.Table[string]                   // pool CIDR → pool name
	felix    map[string]*v3.FelixConfigurationSpec // by resource name
	blocks   map[store.Key]map[netip.Prefix]origin
	claims   map[netip.Prefix][]claim
	origins  map[netip.Prefix]origin // the claims that count
	paths    map[netip.Prefix]Path
	underlay *dataplane.Underlay

	// What was measured, by family of the underlay and node.
	reach    map[dataplane.Family]map[string]dataplane.Reach
	delivery map[dataplane.Family]map[string][]dataplane.Delivery

	// Derived from the above.
	settings       settings
	hosts          map[dataplane.Family]dataplane.Host
	hostObjs       map[dataplane.Key]dataplane.Object
	hostKeys       map[string][]dataplane.Key // by pool
	hostErrs       map[string]error           // by pool
	underlayRoutes *bart.Table[dataplane.UnderlayRoute]
	ownAddrs       map[netip.Addr]bool
	byNode         index[string, netip.Prefix]     // origin's node → prefixes
	byNextHop      index[netip.Addr, netip.Prefix] // BGP next hop → prefixes
	byAddr         index[netip.Addr, string]       // node address → nodes
	nodeAddrs      *bart.Table[netip.Addr]         // the keys of byAddr

	// Chosen.
	routes map[netip.Prefix]chosen
	hops   map[hopKey]*hop
	ids    map[dataplane.NextHopID]hopKey
	stale  map[hopKey]bool

	// The wish, with the number of users of each object, and what of it
	// changed since the last flush.
	objs map[dataplane.Key]*wanted
	put  map[dataplane.Key]dataplane.Object
	del  set[dataplane.Key]

	dirty set[netip.Prefix]
}

// chosen is the route in use for a prefix.
type chosen struct {
	route  dataplane.Route
	hop    hopKey // zero for a blackhole
	source string
}

func newTable(self string) *table {
	return &table{
		self:           self,
		nodes:          map[string]*node{},
		pools:          map[string]pool{},
		poolTree:       new(bart.Table[string]),
		felix:          map[string]*v3.FelixConfigurationSpec{},
		blocks:         map[store.Key]map[netip.Prefix]origin{},
		claims:         map[netip.Prefix][]claim{},
		origins:        map[netip.Prefix]origin{},
		paths:          map[netip.Prefix]Path{},
		reach:          map[dataplane.Family]map[string]dataplane.Reach{},
		delivery:       map[dataplane.Family]map[string][]dataplane.Delivery{},
		settings:       newSettings(),
		hosts:          map[dataplane.Family]dataplane.Host{},
		hostObjs:       map[dataplane.Key]dataplane.Object{},
		hostKeys:       map[string][]dataplane.Key{},
		hostErrs:       map[string]error{},
		underlayRoutes: new(bart.Table[dataplane.UnderlayRoute]),
		ownAddrs:       map[netip.Addr]bool{},
		byNode:         index[string, netip.Prefix]{},
		byNextHop:      index[netip.Addr, netip.Prefix]{},
		byAddr:         index[netip.Addr, string]{},
		nodeAddrs:      new(bart.Table[netip.Addr]),
		routes:         map[netip.Prefix]chosen{},
		hops:           map[hopKey]*hop{},
		ids:            map[dataplane.NextHopID]hopKey{},
		stale:          map[hopKey]bool{},
		objs:           map[dataplane.Key]*wanted{},
		put:            map[dataplane.Key]dataplane.Object{},
		del:            set[dataplane.Key]{},
		dirty:          set[netip.Prefix]{},
	}
}

// apply takes in one event of the store. Objects that cannot be decoded leave
// the last known good in place.
func (t *table) apply(ev store.Event) {
	if ev.Err != nil {
		return
	}
	switch ev.Key.Kind {
	case store.KindNode:
		r, _ := ev.Object.Value.(*store.Node)
		t.setNode(ev.Key.Name, r)
	case store.KindIPPool:
		r, _ := ev.Object.Value.(*v3.IPPool)
		t.setPool(ev.Key.Name, r)
	case store.KindIPAMBlock:
		b, _ := ev.Object.Value.(*store.Block)
		t.setBlock(ev.Key, b)
	case store.KindFelixConfiguration:
		r, _ := ev.Object.Value.(*v3.FelixConfiguration)
		t.setFelix(ev.Key.Name, r)
	}
}

func (t *table) setNode(name string, r *store.Node) {
	old := t.nodes[name]
	var n *node
	if r != nil {
		n = newNode(r)
	}
	if name == t.self && (n == nil || len(n.addr) == 0) && old != nil {
		// Somebody deleted this host's own resource or its address: keep
		// forwarding on what was known. Registration puts it back.
		return
	}
	if n.equal(old) {
		return
	}
	if old != nil {
		for _, a := range old.addr {
			t.byAddr.remove(a.Addr(), name)
			if len(t.byAddr[a.Addr()]) == 0 {
				t.nodeAddrs.Delete(single(a.Addr()))
			}
			t.markAround(a.Addr())
		}
	}
	delete(t.nodes, name)
	if n != nil {
		t.nodes[name] = n
		for _, a := range n.addr {
			t.byAddr.add(a.Addr(), name)
			t.nodeAddrs.Insert(single(a.Addr()), a.Addr())
			t.markAround(a.Addr())
		}
	}
	if name == t.self {
		t.rebuildHost()
		return
	}
	t.refreshNode(name)
}

// refreshNode brings all that depends on a node up to date: its next hops in
// place where they stay usable, and its prefixes anew where that may have
// changed.
func (t *table) refreshNode(name string) {
	for _, p := range t.pools {
		for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			t.refresh(hopKey{pool: p.name, node: name, fam: f})
		}
	}
	for p := range t.byNode[name] {
		if c, ok := t.routes[p]; !ok || c.hop.node != name || t.stale[c.hop] {
			t.dirty[p] = struct{}{}
		}
	}
}

// nodeAt returns the node with an address. Registration refuses a second one;
// should the store hold two, all hosts take the same.
func (t *table) nodeAt(a netip.Addr) (string, bool) {
	best, ok := "", false
	for n := range t.byAddr[a] {
		if !ok || n < best {
			best, ok = n, true
		}
	}
	return best, ok
}

func (t *table) refresh(k hopKey) {
	if _, ok := t.hops[k]; !ok {
		return
	}
	if t.refreshHop(k) {
		delete(t.stale, k)
	} else {
		t.stale[k] = true
	}
}

func (t *table) setFelix(name string, r *v3.FelixConfiguration) {
	if r == nil {
		delete(t.felix, name)
	} else {
		t.felix[name] = &r.Spec
	}
	if s := newSettings(t.felix["default"], t.felix["node."+t.self]); s != t.settings {
		t.settings = s
		t.rebuildHost()
	}
}

// setPaths takes in best paths from BGP.
func (t *table) setPaths(u PathUpdate) {
	if u.Reset {
		keep := make(set[netip.Prefix], len(u.Put))
		for _, p := range u.Put {
			keep[p.Prefix] = struct{}{}
		}
		for p := range t.paths {
			if _, ok := keep[p]; !ok {
				t.deletePath(p)
			}
		}
	}
	for _, p := range u.Del {
		t.deletePath(p)
	}
	for _, p := range u.Put {
		old, had := t.paths[p.Prefix]
		if had && old == p {
			continue
		}
		if had {
			t.byNextHop.remove(old.NextHop, p.Prefix)
		}
		t.paths[p.Prefix] = p
		t.byNextHop.add(p.NextHop, p.Prefix)
		t.dirty[p.Prefix] = struct{}{}
	}
}

func (t *table) deletePath(p netip.Prefix) {
	if old, ok := t.paths[p]; ok {
		t.byNextHop.remove(old.NextHop, p)
		delete(t.paths, p)
		t.dirty[p] = struct{}{}
	}
}

func (t *table) setUnderlay(u dataplane.Underlay) {
	u = withoutWorkloads(u)
	if t.underlay != nil && slices.Equal(u.Links, t.underlay.Links) &&
		slices.Equal(u.Addresses, t.underlay.Addresses) && slices.Equal(u.Routes, t.underlay.Routes) {
		return
	}
	before := make(map[netip.Addr]resolution, len(t.byNextHop))
	for a := range t.byNextHop {
		before[a] = t.resolution(a)
	}
	t.underlay = &u
	t.underlayRoutes = new(bart.Table[dataplane.UnderlayRoute])
	for _, r := range u.Routes {
		if old, ok := t.underlayRoutes.Get(r.Prefix); !ok || r.Metric < old.Metric {
			t.underlayRoutes.Insert(r.Prefix, r)
		}
	}
	t.ownAddrs = make(map[netip.Addr]bool, len(u.Addresses))
	for _, a := range u.Addresses {
		t.ownAddrs[a.Prefix.Addr()] = true
	}
	for a := range t.byNextHop {
		now := t.resolution(a)
		if now == before[a] {
			continue
		}
		// Another gateway is one object replaced; a way found or lost is a
		// choice for every prefix behind it.
		t.refresh(hopKey{via: a, fam: dataplane.FamilyOf(a)})
		if now.ok != before[a].ok {
			t.markNextHop(a)
		}
	}
	t.rebuildHost()
}

type resolution struct {
	gateway netip.Addr
	link    string
	ok      bool
}

func (t *table) resolution(a netip.Addr) resolution {
	gw, link, err := t.resolve(a)
	return resolution{gw, link, err == nil}
}

// withoutWorkloads leaves out the devices of workloads, which come and go all
// the time: no next hop is resolved through one, and none is an uplink.
func withoutWorkloads(u dataplane.Underlay) dataplane.Underlay {
	return dataplane.Underlay{
		Links:     slices.DeleteFunc(slices.Clone(u.Links), func(l dataplane.UnderlayLink) bool { return isWorkloadLink(l.Name) }),
		Addresses: slices.DeleteFunc(slices.Clone(u.Addresses), func(a dataplane.UnderlayAddress) bool { return isWorkloadLink(a.Link) }),
		Routes:    slices.DeleteFunc(slices.Clone(u.Routes), func(r dataplane.UnderlayRoute) bool { return isWorkloadLink(r.Link) }),
	}
}

func isWorkloadLink(name string) bool { return strings.HasPrefix(name, "cali") }

// rebuildHost derives this host's place on the underlay. What cannot be
// derived at the moment (the device is gone, say) stays as it was.
func (t *table) rebuildHost() {
	n := t.nodes[t.self]
	if n == nil {
		return
	}
	changed := false
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		h, ok := hostOf(n, t.underlay, t.settings, f)
		if ok && h != t.hosts[f] {
			t.hosts[f] = h
			changed = true
		}
	}
	if !changed {
		return
	}
	t.rebuildHostObjects()
	for k := range t.hops {
		t.refresh(k)
	}
	for p := range t.origins {
		t.dirty[p] = struct{}{}
	}
	for p := range t.paths {
		t.dirty[p] = struct{}{}
	}
}

// rebuildHostObjects derives what exists once per host: forwarding, and the
// devices of all drivers that some pool uses.
func (t *table) rebuildHostObjects() {
	now := map[dataplane.Key]dataplane.Object{}
	clear(t.hostKeys)
	clear(t.hostErrs)
	if h, ok := t.hosts[dataplane.IPv4]; ok {
		forward := dataplane.Sysctl{Name: "net/ipv4/ip_forward", Value: "1"}
		now[forward.Key()] = forward
		for _, p := range t.pools {
			if dataplane.FamilyOf(p.cidr.Addr()) != dataplane.IPv4 {
				continue
			}
			objs, err := driverFor(p.encap).Host(h)
			if err != nil {
				t.hostErrs[p.name] = fmt.Errorf("pool %s (%s): %w", p.name, p.encap, err)
				continue
			}
			for _, o := range objs {
				now[o.Key()] = o
				t.hostKeys[p.name] = append(t.hostKeys[p.name], o.Key())
			}
		}
	}
	for _, o := range now {
		t.acquire(o)
	}
	for _, o := range t.hostObjs {
		t.release(o)
	}
	t.hostObjs = now
}

func (t *table) markNextHop(a netip.Addr) {
	for p := range t.byNextHop[a] {
		t.dirty[p] = struct{}{}
	}
}

// wanted is an object of the wish with its users. Two users may disagree about
// one key, when two nodes claim one VTEP address, say: then the same one wins
// whatever the order in which the claims came.
type wanted struct {
	obj      dataplane.Object
	variants []variant
}

type variant struct {
	obj  dataplane.Object
	refs int
}

// acquire makes o part of the wish, with one more user.
func (t *table) acquire(o dataplane.Object) {
	k := o.Key()
	w, ok := t.objs[k]
	if !ok {
		w = &wanted{}
		t.objs[k] = w
	}
	if i := slices.IndexFunc(w.variants, func(v variant) bool { return v.obj == o }); i >= 0 {
		w.variants[i].refs++
		return
	}
	w.variants = append(w.variants, variant{o, 1})
	t.elect(k, w)
}

// release takes back one [table.acquire] of o.
func (t *table) release(o dataplane.Object) {
	k := o.Key()
	w := t.objs[k]
	i := slices.IndexFunc(w.variants, func(v variant) bool { return v.obj == o })
	if w.variants[i].refs--; w.variants[i].refs > 0 {
		return
	}
	w.variants = slices.Delete(w.variants, i, i+1)
	if len(w.variants) > 0 {
		t.elect(k, w)
		return
	}
	delete(t.objs, k)
	delete(t.put, k)
	t.del[k] = struct{}{}
}

func (t *table) elect(k dataplane.Key, w *wanted) {
	best := w.variants[0].obj
	for _, v := range w.variants[1:] {
		if v.obj.String() < best.String() {
			best = v.obj
		}
	}
	if best != w.obj {
		w.obj = best
		t.put[k] = best
		delete(t.del, k)
	}
}

// settle chooses anew for every dirty prefix.
func (t *table) settle() {
	for p := range t.dirty {
		t.choose(p)
	}
	clear(t.dirty)
	for k := range t.stale {
		if _, ok := t.hops[k]; !ok {
			delete(t.stale, k)
		}
	}
}

// choose takes the best usable candidate for a prefix.
func (t *table) choose(p netip.Prefix) {
	old, had := t.routes[p]
	now, ok := t.best(p)
	if had && ok && old.hop == now.hop && !t.stale[old.hop] && old.route.Type == now.route.Type {
		t.routes[p] = chosen{route: old.route, hop: old.hop, source: now.source}
		return
	}
	if ok {
		if now.hop != (hopKey{}) {
			now.route.NextHop = t.acquireHop(now.hop).id
		}
		t.acquire(now.route)
		t.routes[p] = now
	} else {
		delete(t.routes, p)
	}
	if had {
		t.release(old.route)
		if old.hop != (hopKey{}) {
			t.releaseHop(old.hop)
		}
	}
}

func (t *table) best(p netip.Prefix) (chosen, bool) {
	for _, c := range t.candidates(p) {
		if c.Reason == "" {
			return chosen{route: c.route, hop: c.hop, source: c.Source}, true
		}
	}
	return chosen{}, false
}

// ready reports whether the table knows enough of this host for its wish to be
// complete, and what is missing otherwise.
func (t *table) ready() error {
	switch {
	case t.underlay == nil:
		return fmt.Errorf("the host's links: %w", dataplane.ErrIncomplete)
	case t.nodes[t.self] == nil:
		return fmt.Errorf("node %s is not registered: %w", t.self, dataplane.ErrIncomplete)
	case len(t.hosts) == 0:
		return fmt.Errorf("no device of this host holds the address of node %s: %w", t.self, dataplane.ErrIncomplete)
	}
	return nil
}

// mtu is what the encapsulations of all pools leave for workloads, in bytes; 0
// while the underlay is not known.
func (t *table) mtu(f dataplane.Family) int {
	h, ok := t.hosts[f]
	if !ok {
		return 0
	}
	mtu := h.UplinkMTU
	for _, p := range t.pools {
		if dataplane.FamilyOf(p.cidr.Addr()) != f {
			continue
		}
		d := driverFor(p.encap)
		mtu = min(mtu, h.UplinkMTU-d.Overhead(dataplane.FamilyOf(h.Addr.Addr())))
	}
	for _, o := range t.hostObjs {
		if l, ok := o.(dataplane.Link); ok {
			mtu = min(mtu, l.MTU)
		}
	}
	return mtu
}
