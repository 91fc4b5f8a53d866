package ipam

import (
	"net/netip"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// TestForesee: what becomes of the address of a tunnel is what EnsureTunnel makes of it.
func TestForesee(t *testing.T) {
	pool := func(name, cidr string, e store.Encapsulation, edit func(*v3.IPPoolSpec)) *cluster.Pool {
		p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v3.IPPoolSpec{CIDR: cidr, NodeSelector: "all()"}}
		store.SetEncapsulation(p, e)
		if edit != nil {
			edit(&p.Spec)
		}
		return cluster.NewPool(store.Object{Key: store.ResourceKey(store.KindIPPool, name), Value: p})
	}
	workloads := func(s *v3.IPPoolSpec) { s.AllowedUses = []v3.IPPoolAllowedUse{v3.IPPoolAllowedUseWorkload} }
	elsewhere := func(s *v3.IPPoolSpec) { s.NodeSelector = `rack == "r2"` }
	have := netip.MustParseAddr("10.1.0.1")
	for name, tt := range map[string]struct {
		have  netip.Addr
		pools []*cluster.Pool
		keep  bool
		from  string
	}{
		"it has one in the pool":                 {have: have, pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.VXLAN, nil)}, keep: true},
		"it has none yet":                        {pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.VXLANCrossSubnet, nil)}, from: "a"},
		"its pool has another encapsulation":     {have: have, pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.IPIP, nil)}},
		"another pool has the encapsulation":     {have: have, pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.Direct, nil), pool("b", "10.2.0.0/16", store.VXLAN, nil)}, from: "b"},
		"the pool is disabled, and still there":  {have: have, pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.VXLAN, func(s *v3.IPPoolSpec) { s.Disabled = true })}, keep: true},
		"the pool is disabled, and there is one": {have: have, pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.VXLAN, func(s *v3.IPPoolSpec) { s.Disabled = true }), pool("b", "10.2.0.0/16", store.VXLAN, nil)}, from: "b"},
		"the pool is for workloads alone":        {pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.VXLAN, workloads)}},
		"the pool is other nodes'":               {have: have, pools: []*cluster.Pool{pool("a", "10.1.0.0/16", store.VXLAN, elsewhere)}},
		"no pool of the family":                  {pools: []*cluster.Pool{pool("a", "fd00:1::/112", store.VXLAN, nil)}},
	} {
		keep, from := VXLANTunnel.Foresee(tt.have, map[string]string{"rack": "r1"}, tt.pools)
		if keep != tt.keep || from != tt.from {
			t.Errorf("%s: kept %t, else from pool %q; want %t, %q", name, keep, from, tt.keep, tt.from)
		}
	}
}
