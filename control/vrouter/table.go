package vrouter

import (
	"fmt"
	"maps"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

type set[K comparable] map[K]struct{}

func (s set[K]) add(ks []K) {
	for _, k := range ks {
		s[k] = struct{}{}
	}
}

// index maps a key to a set of values. It is for sets that are of one nearly always, thousands
// of them.
type index[K, V comparable] map[K][]V

func (x index[K, V]) add(k K, v V) {
	if !slices.Contains(x[k], v) {
		x[k] = append(x[k], v)
	}
}

func (x index[K, V]) remove(k K, v V) {
	left := slices.DeleteFunc(x[k], func(o V) bool { return o == v })
	if x[k] = left; len(left) == 0 {
		delete(x, k)
	}
}

// table joins the parts of the core: each event goes to the parts that it
// concerns, and what the live change of encapsulation decides to the RIB.
type table struct {
	*members
	*poolTable
	*network
	*ends
	*objects
	*publishing
	*receiver
	*sender
	*probeTargets
	*rib
}

func newTable(self string) *table {
	t := &table{members: newMembers(self), poolTable: newPoolTable(), network: newNetwork(), objects: newObjects()}
	t.ends = newEnds(t.members, t.poolTable, t.network)
	t.publishing = newPublishing(t.ends)
	t.receiver = newReceiver(t.ends, t.publishing, t.objects)
	t.sender = newSender(t.receiver)
	t.probeTargets = newProbeTargets(t.sender)
	t.rib = newRIB(t.members, t.poolTable, newNextHops(t.network, t.sender, t.objects))
	return t
}

// apply applies a change of the cluster. Objects that cannot be decoded leave the
// last known good in place.
func (t *table) apply(ch *cluster.Change) {
	if ch.Err != nil {
		return
	}
	switch ch.Key.Kind {
	case store.KindNode:
		n, _ := ch.Value.(*cluster.Node)
		t.setNode(ch.Key.Name, n)
	case store.KindIPPool:
		p, _ := ch.Value.(*cluster.Pool)
		t.setPool(ch.Key.Name, p)
	case store.KindIPAMBlock:
		b, _ := ch.Value.(*cluster.Block)
		t.vteps.setBlock(ch.Key, b, t.touched)
		for _, p := range t.setBlock(ch.Key, b) {
			t.dirty[p] = struct{}{}
			t.markParts(p)
		}
	case store.KindFelixConfiguration:
		r, _ := ch.Value.(*v3.FelixConfiguration)
		t.setFelix(ch.Key.Name, r)
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
		t.devicesDirty = true
		t.replanAll = true
	}
}

func (t *table) setUnderlay(u dataplane.Underlay) {
	u = withoutWorkloads(u)
	if t.same(u) {
		return
	}
	before := t.resolutions()
	t.network.set(u)
	for a, was := range before {
		now := t.resolution(a)
		if now == was {
			continue
		}
		// Another gateway is one object replaced, and so is a group that lost a
		// member; one that came up or went down is a choice for every prefix behind it.
		t.followNextHop(a, now.ok != was.ok)
	}
	t.rebuildHost()
}

// rebuildHost derives this host's place on the underlay. What cannot be
// derived at the moment (the device is gone, say) stays as it was.
func (t *table) rebuildHost() {
	t.devicesDirty = true
	if !t.place() {
		return
	}
	t.replanAll = true
	t.followAll = true
	t.markAll()
}

// ready reports whether the table knows enough of this host for the desired state to
// be complete, and what is missing otherwise.
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

func (t *table) setNode(name string, n *cluster.Node) {
	old := t.nodes[name]
	if name == t.self && (n == nil || familiesOf(n) == familySet{}) && old != nil {
		// Somebody deleted this host's own resource or its address: keep
		// forwarding on what was known. Registration puts it back.
		return
	}
	same := sameNode(n, old)
	sameEncaps := same && (n == nil || sameEncaps(n.Encaps.NodeEncaps, old.Encaps.NodeEncaps))
	if name != t.self {
		t.countPeer(old, n)
	}
	if n == nil {
		t.dropNode(name)
	}
	for a := range t.replace(name, n) {
		t.markAround(a)
		// Whether a pool lies over the hosts' network counts for all of its prefixes.
		if pool, ok := t.poolTree.LookupPrefix(single(a)); ok {
			t.markWithin(t.pools[pool].CIDR)
		}
	}
	if !same {
		t.vteps.replaceNode(name, old, n, t.touched)
	}
	switch {
	case name == t.self:
		t.setSelf(sameEncaps)
	case !sameEncaps:
		t.touched[name] = struct{}{}
	}
}

// setSelf follows this host's own resource.
func (t *table) setSelf(sameEncaps bool) {
	settled := t.settleInflight()
	if sameEncaps && !settled {
		return
	}
	t.rebuildHost()
	t.replanAll = true
	t.followAll = true
}

func (t *table) setPool(name string, p *cluster.Pool) {
	if p != nil && !p.CIDR.IsValid() {
		p = nil
	}
	old := t.pools[name]
	if samePool(old, p) {
		return
	}
	delete(t.pools, name)
	if p != nil {
		t.pools[name] = p
	}
	// A change of encapsulation is one object per peer. Other pools may fall
	// back on the encapsulation of this one.
	if old != nil && (p == nil || familyOf(old) != familyOf(p)) {
		t.dropPool(name)
		t.refreshPool(name)
	}
	t.replanAll = true
	for _, p := range []*cluster.Pool{old, p} {
		if p != nil {
			t.electPool(p.CIDR)
			t.markWithin(p.CIDR)
		}
	}
	t.devicesDirty = true
}

// maxRounds bounds how often one settling may change what it began with: a
// device that takes another's place moves next hops, once.
const maxRounds = 4

// settle derives what accepts packets on this host, and chooses anew for every
// prefix that is marked.
func (t *table) settle() {
	for range maxRounds {
		follow := t.replan()
		if t.devicesDirty && t.rebuildDevices() {
			t.replanAll, t.followAll = true, true
			maps.Copy(follow, t.replan())
		}
		t.follow(follow)
		t.chooseDirty()
		if !t.devicesDirty && len(t.up) == 0 {
			break
		}
		t.setDown(nil, t.up)
		t.up = nil
	}
	t.tidy()
}

// setWorkloadMTU notes how large packets workloads send.
func (t *table) setWorkloadMTU(f dataplane.Family, mtu int) {
	if t.podMTU[f] == mtu {
		return
	}
	t.podMTU[f] = mtu
	t.devicesDirty = true
	t.replanAll = true
}

// setKernel notes how far the kernel is with what accepts encapsulations. It
// reports whether that is new.
func (t *table) setKernel(now map[dataplane.Encap]encapState) bool {
	if !t.receiver.setKernel(now) {
		return false
	}
	t.replanAll = true
	return true
}
