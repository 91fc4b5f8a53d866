package rib

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// host is a routing table with what it decides by: one node, at 10.1.0.11 behind the
// gateway 10.1.0.1, with a pool that is not encapsulated.
type host struct {
	*RIB
	encap *encap.Planner
}

func newHost(tb testing.TB) *host {
	tb.Helper()
	nodes, pools, blocks, network, objects := topology.NewNodes("node1"), topology.NewPools(), topology.NewBlocks(), topology.NewNetwork(), desired.New()
	h := &host{encap: encap.New(nodes, pools, blocks, network, objects)}
	h.RIB = New(nodes, pools, blocks, network, h.encap, objects)
	h.setUnderlay(rack())
	node := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
	node.Spec.BGP = &store.NodeBGPSpec{IPv4Address: "10.1.0.11/24"}
	pool := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "pool"}}
	pool.Spec.CIDR = "192.168.0.0/16"
	store.SetEncapsulation(pool, store.Direct)
	n, isNode := decoded(store.ResourceKey(store.KindNode, "node1"), node).(*cluster.Node)
	p, isPool := decoded(store.ResourceKey(store.KindIPPool, "pool"), pool).(*cluster.Pool)
	if !isNode || !isPool {
		tb.Fatal("not decoded")
	}
	nodes.Replace("node1", n)
	pools.Replace("pool", p)
	h.encap.SetNode("node1", nil, n)
	h.encap.SetPool("pool", false)
	h.encap.Place()
	h.settle()
	return h
}

func decoded(key store.Key, v any) any {
	return cluster.Decode("node1", store.Event{Key: key, Object: store.Object{Key: key, Value: v}}).Value
}

func rack() dataplane.Underlay {
	return dataplane.Underlay{
		Links:     []dataplane.UnderlayLink{{Index: 1, Name: "lo", MTU: 65536, Up: true, Loopback: true}, {Index: 2, Name: "eth0", MTU: 1500, Up: true}},
		Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: netip.MustParsePrefix("10.1.0.11/24")}},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.1.0.1"), Link: "eth0"},
			{Prefix: netip.MustParsePrefix("10.1.0.0/24"), Link: "eth0", Protocol: 2},
		},
	}
}

func (h *host) setUnderlay(u dataplane.Underlay) { h.SetUnderlay(func() { h.network.Set(u) }) }

// settle chooses for all that is marked.
func (h *host) settle() {
	h.Follow(h.encap.Replan())
	h.Choose()
	if h.UseAgain() {
		h.Choose()
	}
	h.Tidy()
}

// handedOver is what of the desired state changed since it was last called.
func handedOver(h *host) ([]dataplane.Object, []dataplane.Key) {
	put, del := slices.Collect(maps.Values(h.objects.Put)), slices.Collect(maps.Keys(h.objects.Del))
	for r := range h.Changes().Put {
		put = append(put, r)
	}
	for k := range h.Changes().Del {
		del = append(del, k)
	}
	h.objects.HandedOver()
	h.HandedOver()
	return put, del
}

// changes returns what one change put and deleted.
func changes(h *host, f func()) (put, del []string) {
	handedOver(h)
	f()
	h.settle()
	puts, dels := handedOver(h)
	for _, o := range puts {
		put = append(put, o.Key().Kind().String())
	}
	for _, k := range dels {
		del = append(del, k.Kind().String())
	}
	slices.Sort(put)
	slices.Sort(del)
	return put, del
}

// desiredOf is what the kernel is to have, in a fixed order.
func desiredOf(h *host) []dataplane.Object {
	out := slices.Collect(h.objects.All())
	for r := range h.Routes() {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b dataplane.Object) int { return dataplane.CompareKeys(a.Key(), b.Key()) })
	return out
}

func TestHopIDCollision(t *testing.T) {
	t.Parallel()
	k := hopKey{Key: encap.Key{Pool: "pool", Node: "node2", Family: dataplane.IPv4}}
	first := hopID(k, func(dataplane.NextHopID) bool { return false })
	second := hopID(k, func(id dataplane.NextHopID) bool { return id == first })
	if first == second || first < firstID || second < firstID {
		t.Errorf("ids %d and %d: want two different ones of at least %d", first, second, firstID)
	}
}
