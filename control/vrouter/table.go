package vrouter

import (
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// table joins the parts of the core: each event goes to the parts that it
// concerns, and what encap decides to the rib.
type table struct {
	nodes   *topology.Nodes
	pools   *topology.Pools
	blocks  *topology.Blocks
	network *topology.Network
	objects *desired.Objects
	encap   *encap.Planner
	rib     *rib.RIB

	pods podCIDRs
}

func newTable(self string) *table {
	t := &table{nodes: topology.NewNodes(self), pools: topology.NewPools(), blocks: topology.NewBlocks(), network: topology.NewNetwork(), objects: desired.New()}
	t.encap = encap.New(t.nodes, t.pools, t.blocks, t.network, t.objects)
	t.rib = rib.New(t.nodes, t.pools, t.blocks, t.network, t.encap, t.objects)
	t.encap.UseLearned(t.rib.LearnedVia)
	return t
}

// Kinds lists what the core follows of the cluster.
func Kinds() []store.Kind {
	return []store.Kind{store.KindNode, store.KindIPPool, store.KindIPAMBlock, store.KindFelixConfiguration}
}

// apply applies a change of the cluster. Objects that cannot be decoded leave the
// last known good in place.
func (t *table) apply(ch *cluster.Change) {
	if ch.Err != nil {
		return
	}
	t.pods.looked = false
	switch ch.Key.Kind {
	case store.KindNode:
		n, _ := ch.Value.(*cluster.Node)
		t.setNode(ch.Key.Name, n)
	case store.KindIPPool:
		p, _ := ch.Value.(*cluster.Pool)
		t.setPool(ch.Key.Name, p)
	case store.KindIPAMBlock:
		b, _ := ch.Value.(*cluster.Block)
		t.setBlock(ch.Key.CIDR(), b)
	case store.KindFelixConfiguration:
		r, _ := ch.Value.(*v3.FelixConfiguration)
		if t.pools.SetFelix(t.nodes.Self, ch.Key.Name, r) {
			t.encap.Changed()
		}
	}
}

func (t *table) setUnderlay(u dataplane.Underlay) {
	u = topology.WithoutWorkloads(u)
	if t.network.Same(u) {
		return
	}
	t.rib.SetUnderlay(func() { t.network.Set(u) })
	t.encap.RoutesChanged()
	t.placeHost()
}

// placeHost finds this host's place on the underlay anew. What cannot be
// found at the moment (the device is gone, say) stays as it was.
func (t *table) placeHost() {
	if t.encap.Place() {
		t.rib.FollowAll()
		t.rib.MarkAll()
	}
}

func (t *table) setNode(name string, n *cluster.Node) {
	old := t.nodes.ByName[name]
	if name == t.nodes.Self && (n == nil || len(n.Addrs()) == 0) && old != nil {
		// Somebody deleted this host's own resource or its address: keep
		// forwarding on what was known. Registration puts it back.
		return
	}
	for a := range t.nodes.Replace(name, n) {
		t.rib.MarkAround(a)
	}
	if t.pods.on {
		var cidrs []netip.Prefix
		if n != nil {
			cidrs = n.PodCIDRs
		}
		changed := t.blocks.SetPodCIDRs(name, cidrs)
		t.rib.MarkOrigins(changed)
		if name == t.nodes.Self && len(changed) > 0 {
			// What of another network is on this host is judged by them.
			t.rib.MarkOwn()
			t.encap.Changed()
		}
	}
	if t.encap.SetNode(name, old, n) {
		t.rib.FollowAll()
		t.placeHost()
	}
}

func (t *table) setPool(name string, p *cluster.Pool) {
	old, p, changed := t.pools.Replace(name, p)
	if !changed {
		return
	}
	// A change of encapsulation is one object per peer. Other pools may fall
	// back on the encapsulation of this one.
	gone := old != nil && (p == nil || old.Family() != p.Family())
	t.encap.SetPool(name, gone)
	if gone {
		t.rib.RefreshPool(name)
	}
	for _, p := range []*cluster.Pool{old, p} {
		if p != nil {
			t.rib.MarkWithin(p.CIDR)
		}
	}
}

func (t *table) setBlock(cidr netip.Prefix, b *cluster.Block) {
	before, changed := t.blocks.Replace(cidr, b)
	t.encap.SetBlock(before, b)
	t.rib.MarkOrigins(changed)
}

// maxRounds bounds how often one settling may change what it began with.
const maxRounds = 4

// settle derives what accepts packets on this host, and chooses anew for every
// prefix that is marked.
func (t *table) settle() {
	for range maxRounds {
		t.rib.Follow(t.encap.Replan())
		t.rib.Choose()
		if up := t.rib.UseAgain(); !up && !t.encap.Unsettled() {
			break
		}
	}
	t.rib.Tidy()
}
