package ipam

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// TestForeseeTunnel: what becomes of the address of a tunnel is what EnsureTunnel makes of it.
func TestForeseeTunnel(t *testing.T) {
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
		f := New(Config{Store: memory.New(), Node: "a", Log: slog.New(slog.DiscardHandler)}).Foresight(tt.pools)
		f.Node(&cluster.Node{Name: "a", Labels: map[string]string{"rack": "r1"}})
		keep, from := f.Tunnel(VXLANTunnel, tt.have)
		if keep != tt.keep || from != tt.from {
			t.Errorf("%s: kept %t, else from pool %q; want %t, %q", name, keep, from, tt.keep, tt.from)
		}
	}
}

// TestForeseeLeaving: a block goes with a tunnel's address that is about to be released, if the pool does not select its node any more.
func TestForeseeLeaving(t *testing.T) {
	t.Parallel()
	pool := func(selector string) *v3.IPPool {
		p := newPool("one", "10.1.0.0/16", blockSize(28), func(s *v3.IPPoolSpec) { s.NodeSelector = selector })
		store.SetEncapsulation(p, store.VXLAN)
		return p
	}
	w := newWorld(t, pool("all()"))
	h := w.host("a", nil)
	settle(t, h, "the pool", func(s *state) bool { return len(s.pools) == 1 })
	got, _, err := h.EnsureTunnel(await.Context(t), VXLANTunnel, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, published := range []bool{true, false} {
		p := pool("!all()")
		f := h.Foresight([]*cluster.Pool{cluster.NewPool(store.Object{Key: store.ResourceKey(store.KindIPPool, p.Name), Value: p})})
		n := &cluster.Node{Name: "a"}
		if published {
			n.VXLANAddr.IPv4 = got.Addr
		}
		f.Node(n)
		blocks := f.Blocks()
		if goes := len(blocks) == 1 && blocks[0].CIDR == got.Block && blocks[0].Holder == ""; goes == published {
			t.Errorf("published %t: %v", published, blocks)
		}
	}
}

// TestForesight: after a change of pools or labels, hosts hold the blocks that were foreseen, when they have a tunnel's address
// from where it was foreseen and have filled their reserves; and every host foresees the same.
func TestForesight(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := foreseen{t: rt, st: memory.New(), clock: newClock(), pools: map[string]*v3.IPPool{}, labels: map[string]map[string]string{}, tunnels: map[string]netip.Addr{}}
		defer func() { _ = w.st.Close() }()
		pick := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(rt, what) }
		pool := func(name, cidr string) *v3.IPPool {
			p := newPool(name, cidr, blockSize(28))
			store.SetEncapsulation(p, store.Encapsulation(pick("mode", string(store.Direct), string(store.VXLAN))))
			p.Spec.NodeSelector, p.Spec.Disabled = pick("selector", "all()", `rack == "1"`), rapid.Bool().Draw(rt, "disabled")
			return p
		}
		w.put(pool("one", "10.1.0.0/16"), pool("two", "10.2.0.0/16"))
		for _, name := range []string{"a", "b", "c"} {
			w.put(newNode(name, map[string]string{"rack": pick("rack", "1", "2")}))
			h := reserving(rt, w.st, name, w.clock.time, ReserveConfig{Min: 4, Max: 4})
			defer h.stop()
			w.hosts = append(w.hosts, h)
		}
		w.settles(nil)
		for range rapid.IntRange(1, 4).Draw(rt, "changes") {
			switch rapid.IntRange(0, 3).Draw(rt, "change") {
			case 0:
				w.change(pool("one", "10.1.0.0/16"))
			case 1:
				w.change(pool("two", "10.2.0.0/16"))
			case 2:
				w.change(newNode(pick("node", "a", "b", "c"), map[string]string{"rack": pick("rack", "1", "2")}))
			case 3: // a workload keeps a block from being given up
				h := rapid.SampledFrom(w.hosts).Draw(rt, "host")
				if _, err := h.Assign(context.Background(), v4(fmt.Sprint("workload", rapid.IntRange(0, 99).Draw(rt, "workload")))); err != nil && !errors.Is(err, ErrNoPool) {
					rt.Fatal(err)
				}
				w.settles(nil)
			}
		}
	})
}

// foreseen is hosts whose blocks are foreseen.
type foreseen struct {
	t       *rapid.T
	st      *memory.Store
	clock   *clock
	hosts   []*host
	pools   map[string]*v3.IPPool
	labels  map[string]map[string]string // of nodes
	tunnels map[string]netip.Addr        // of nodes, where they have one
}

func (w *foreseen) put(values ...any) {
	w.note(values...)
	put(w.t, w.st, values...)
}

func (w *foreseen) note(values ...any) {
	for _, v := range values {
		switch v := v.(type) {
		case *v3.IPPool:
			w.pools[v.Name] = v
		case *store.Node:
			w.labels[v.Name] = v.Labels
		}
	}
}

// change foresees a change, and makes it.
func (w *foreseen) change(v any) {
	w.note(v)
	var pools []*cluster.Pool
	for _, p := range w.pools {
		pools = append(pools, cluster.NewPool(store.Object{Key: store.ResourceKey(store.KindIPPool, p.Name), Value: p}))
	}
	var want map[string]string
	for _, h := range w.hosts {
		got, f := w.held(), h.Foresight(pools)
		for _, name := range slices.Sorted(maps.Keys(w.labels)) {
			have := w.tunnels[name]
			f.Node(&cluster.Node{Name: name, Labels: w.labels[name], VXLANAddr: cluster.Families[netip.Addr]{IPv4: have}})
			if keep, _ := f.Tunnel(VXLANTunnel, have); !keep && have.IsValid() {
				f.Release(have)
			}
			for _, b := range f.Blocks() {
				if got[b.CIDR.String()] = b.Holder; b.Holder == "" {
					delete(got, b.CIDR.String())
				}
			}
		}
		if want == nil {
			want = got
		}
		mustDiff(w.t, h.cfg.Node+" foresees otherwise than "+w.hosts[0].cfg.Node, want, got)
	}
	w.put(v)
	w.settles(want)
}

// held is which node holds each block.
func (w *foreseen) held() map[string]string {
	list, _, err := w.st.List(context.Background(), store.KindIPAMBlock, "")
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string]string{}
	for _, o := range list {
		out[o.Key.CIDR().String()] = o.Value.(*store.Block).Holder()
	}
	return out
}

// settles waits until hosts have followed the pools, and hold these blocks; nil: whichever.
func (w *foreseen) settles(want map[string]string) {
	w.t.Helper()
	await.Until(w.t, "the hosts follow", func() error {
		for _, h := range w.hosts {
			if err := w.follow(h); err != nil {
				return err
			}
		}
		if diff := cmp.Diff(want, w.held()); want != nil && diff != "" {
			return fmt.Errorf("blocks (-foreseen +held):\n%s", diff)
		}
		for _, h := range w.hosts {
			catchUp(w.t, h, w.st)
			h.mu.Lock()
			rest := len(h.state.tidyable()) + len(h.state.reserve.filling)
			for _, p := range h.state.pools {
				if ready := len(h.state.ready(p, w.clock.time())); h.state.reserves(p, w.clock.time()) != (ready > 0) {
					rest++
				}
			}
			h.mu.Unlock()
			if rest > 0 {
				return fmt.Errorf("%s has not followed", h.cfg.Node)
			}
		}
		return nil
	})
}

// follow does for a host's tunnel what its agent does.
func (w *foreseen) follow(h *host) error {
	h.mu.Lock()
	known := maps.Equal(h.state.labels, w.labels[h.cfg.Node])
	for name, p := range w.pools {
		now := cluster.NewPool(store.Object{Key: store.ResourceKey(store.KindIPPool, name), Value: p})
		is := h.state.pools[name]
		known = known && is != nil && is.encap == now.Encap && is.off == now.Off && is.nodes.String() == now.Nodes.String()
	}
	h.mu.Unlock()
	if !known {
		return fmt.Errorf("%s does not know of the change", h.cfg.Node)
	}
	got, _, err := h.EnsureTunnel(context.Background(), VXLANTunnel, false)
	if err != nil && !errors.Is(err, ErrNoPool) {
		return err
	}
	if err := h.ReleaseTunnel(context.Background(), VXLANTunnel, got.Addr); err != nil {
		return err
	}
	if w.tunnels[h.cfg.Node] = got.Addr; !got.Addr.IsValid() {
		delete(w.tunnels, h.cfg.Node)
	}
	return nil
}
