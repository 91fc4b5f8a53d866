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
	paths    map[netip.Prefix]*announced
	underlay *dataplane.Underlay

	// What was measured, by family of the underlay and node.
	reach    map[dataplane.Family]map[string]dataplane.Reach
	delivery map[dataplane.Family]map[string]map[dataplane.Form]dataplane.Delivery
	probing  map[dataplane.Family]bool // there is somebody who probes

	// What was measured of this host.
	kernel      map[dataplane.Form]formState // how far what takes a form in has come
	podMTU      map[dataplane.Family]int     // the largest of a workload, bytes; 0: not known
	unsupported map[dataplane.Form]error     // drivers and families that this kernel has no device for; nil: not known
	confirmed   bool                         // the kernel has every next hop as wanted
	inflight    *nodeForms                   // what is being published; nil: nothing
	inflightAt  store.Revision               // where it is in the store; 0: not known to be there

	// Derived from the above.
	settings       settings
	hosts          map[dataplane.Family]dataplane.Host // of the underlay
	nodesWith      map[familySet]int                   // other nodes, by their families
	peerUses       map[dataplane.Form]int              // other nodes that say they send it
	peerSends      map[poolMode]int                    // other nodes that have moved to it
	underlayRoutes *bart.Table[dataplane.UnderlayRoute]
	ownAddrs       map[netip.Addr]bool
	byNode         index[string, netip.Prefix] // origin's node → prefixes
	announced      map[announcement]*announced // all that paths are of
	byHop          map[hopKey]*behind          // what BGP names → prefixes
	hopsOf         index[netip.Addr, hopKey]   // BGP next hop → the keys of byHop that have it
	lost           map[netip.Addr]bool         // BGP next hops that must not be used
	found          []netip.Addr                // of those: they may, once the withdrawals are chosen for
	byAddr         index[netip.Addr, string]   // node address → nodes
	nodeAddrs      *bart.Table[netip.Addr]     // the keys of byAddr

	// How packets go to each node, and what follows for this host's devices.
	ways       map[hopKey]way
	sending    map[dataplane.Form]int // ways that use it or are to
	behind     map[string]int         // by pool, ways that are not as wanted
	prepared   map[hopKey][]dataplane.Object
	slots      map[dataplane.Form]int // which VXLAN device is whose
	formsDirty bool
	formKeys   map[dataplane.Form][]dataplane.Key // what takes it in
	formErrs   map[dataplane.Form]error           // why that cannot be told
	hostObjs   map[dataplane.Key]dataplane.Object

	// What is to be measured, by node, and the nodes where that may be out of
	// date.
	targeted map[string][]Target
	retarget set[string]

	// Chosen.
	routes map[netip.Prefix]chosen
	aims   map[hopKey]*aim // what routes want to go to
	hops   map[hopKey]*hop
	ids    map[dataplane.NextHopID]hopKey
	stale  map[hopKey]bool

	// The wish apart from the routes, with the number of users of each object,
	// and what of it changed since the last hand-over.
	objs  map[dataplane.Key]*wanted
	put   map[dataplane.Key]dataplane.Object
	del   set[dataplane.Key]
	moved set[netip.Prefix] // routes that changed since

	// What is to be chosen for anew: prefixes, and all of a key of byHop.
	dirty  set[netip.Prefix]
	turned set[hopKey]

	// Within one round of choosing nothing changes of what a next hop is.
	round   uint64
	members map[hopKey][]hopKey // usable members, of this round
	scratch []Candidate
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
		paths:          map[netip.Prefix]*announced{},
		reach:          map[dataplane.Family]map[string]dataplane.Reach{},
		delivery:       map[dataplane.Family]map[string]map[dataplane.Form]dataplane.Delivery{},
		probing:        map[dataplane.Family]bool{},
		kernel:         map[dataplane.Form]formState{},
		podMTU:         map[dataplane.Family]int{},
		settings:       newSettings(),
		hosts:          map[dataplane.Family]dataplane.Host{},
		nodesWith:      map[familySet]int{},
		peerUses:       map[dataplane.Form]int{},
		peerSends:      map[poolMode]int{},
		underlayRoutes: new(bart.Table[dataplane.UnderlayRoute]),
		ownAddrs:       map[netip.Addr]bool{},
		byNode:         index[string, netip.Prefix]{},
		announced:      map[announcement]*announced{},
		byHop:          map[hopKey]*behind{},
		hopsOf:         index[netip.Addr, hopKey]{},
		lost:           map[netip.Addr]bool{},
		byAddr:         index[netip.Addr, string]{},
		nodeAddrs:      new(bart.Table[netip.Addr]),
		ways:           map[hopKey]way{},
		sending:        map[dataplane.Form]int{},
		behind:         map[string]int{},
		prepared:       map[hopKey][]dataplane.Object{},
		slots:          map[dataplane.Form]int{},
		formKeys:       map[dataplane.Form][]dataplane.Key{},
		formErrs:       map[dataplane.Form]error{},
		hostObjs:       map[dataplane.Key]dataplane.Object{},
		targeted:       map[string][]Target{},
		retarget:       set[string]{},
		routes:         map[netip.Prefix]chosen{},
		aims:           map[hopKey]*aim{},
		hops:           map[hopKey]*hop{},
		ids:            map[dataplane.NextHopID]hopKey{},
		stale:          map[hopKey]bool{},
		objs:           map[dataplane.Key]*wanted{},
		put:            map[dataplane.Key]dataplane.Object{},
		del:            set[dataplane.Key]{},
		moved:          set[netip.Prefix]{},
		dirty:          set[netip.Prefix]{},
		turned:         set[hopKey]{},
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
		t.setNode(ev.Key.Name, r, ev.Object.Revision)
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
		t.formsDirty = true
		t.rechooseAll()
	}
}

func (t *table) setUnderlay(u dataplane.Underlay) {
	u = withoutWorkloads(u)
	if t.underlay != nil && slices.Equal(u.Links, t.underlay.Links) &&
		slices.Equal(u.Addresses, t.underlay.Addresses) && slices.Equal(u.Routes, t.underlay.Routes) {
		return
	}
	before := t.resolutions()
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
	for a, was := range before {
		now := t.resolution(a)
		if now == was {
			continue
		}
		// Another gateway is one object replaced, and so is a group that lost a
		// member; a way found or lost is a choice for every prefix behind it.
		t.followNextHop(a, now.ok != was.ok)
	}
	t.rebuildHost()
}

type resolution struct {
	gateway netip.Addr
	link    string
	ok      bool
}

// resolutions says how each next hop is reached that BGP names, or that is in
// use still by routes which are to be chosen anew: until then others would take
// it for as usable as it was.
func (t *table) resolutions() map[netip.Addr]resolution {
	out := make(map[netip.Addr]resolution, len(t.hopsOf))
	for a := range t.hopsOf {
		out[a] = t.resolution(a)
	}
	for k := range t.hops {
		if k.via.IsValid() {
			out[k.via] = t.resolution(k.via)
		}
	}
	return out
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
	t.formsDirty = true
	n := t.nodes[t.self]
	if n == nil {
		return
	}
	changed := false
	for _, f := range families() {
		h, ok := hostOf(n, t.underlay, f)
		if ok && h != t.hosts[f] {
			t.hosts[f] = h
			changed = true
		}
	}
	if !changed {
		return
	}
	t.rechooseAll()
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
