package operator

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// planned is a speaker that keeps what it is asked to plan.
type planned struct {
	rpc.BGP
	changes []string
}

func (p *planned) Plan(_ context.Context, changes []store.Event, _ func(bgp.Plan) error) error {
	for _, ev := range changes {
		what := ev.Key.Path()
		if b, ok := ev.Object.Value.(*store.Block); ok {
			what += " of " + b.Holder()
		}
		p.changes = append(p.changes, what)
	}
	return nil
}

// TestSpeakerPlan: BGP plans by the blocks that hosts would take of a pool: for a tunnel's address, or for their reserves, and
// by none where no pool and no Node changes, of a pool that goes, and for a Node that does.
func TestSpeakerPlan(t *testing.T) {
	pool := func(e store.Encapsulation) store.Event {
		p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "new"}, Spec: v3.IPPoolSpec{CIDR: "10.77.0.0/24", BlockSize: 28, NodeSelector: "has(rack)"}}
		store.SetEncapsulation(p, e)
		return store.Event{Key: store.ResourceKey(store.KindIPPool, "new"), Object: store.Object{Value: p}}
	}
	n := func(name string, labels map[string]string) store.Event {
		return store.Event{Key: store.ResourceKey(store.KindNode, name), Object: store.Object{Value: &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}}}
	}
	gone := func(ev store.Event) store.Event { return store.Event{Key: ev.Key} }
	racked := n("a", map[string]string{"rack": "1"})
	holds := []store.Event{racked, n("b", nil)}
	for _, tt := range []struct {
		name    string
		reserve int
		change  store.Event
		want    []string // beside the change
		pool    bool     // there is one already
	}{
		{"a tunnel's address", 0, pool(store.VXLAN), []string{"10.77.0.96-28 of a", "host/a/ipv4/block/10.77.0.96-28"}, false},
		{"nothing to take one for", 0, pool(store.Direct), nil, false},
		{"the reserve", 8, pool(store.Direct), []string{"10.77.0.96-28 of a", "host/a/ipv4/block/10.77.0.96-28"}, false},
		{"no pool", 8, store.Event{Key: store.ResourceKey(store.KindBGPPeer, "x"), Object: store.Object{Value: &v3.BGPPeer{}}}, nil, false},
		{"a pool that goes", 8, gone(pool(store.Direct)), nil, true},
		{"a Node that goes", 8, gone(racked), nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			st := memory.New()
			defer st.Close() //nolint:errcheck // it is in memory
			s := New(Config{
				Node: "a", TunnelKind: func(node.Tunnel) ipam.TunnelKind { return ipam.VXLANTunnel },
				IPAM: ipam.New(ipam.Config{Store: st, Node: "a", Log: slog.New(slog.DiscardHandler), Reserve: ipam.ReserveConfig{Min: tt.reserve, Max: 8}}),
			})
			s.cfg.Snapshot = func(wanted func(store.Key) bool) (out []*cluster.Change, err error) {
				held := holds
				if tt.pool {
					held = append(slices.Clone(holds), pool(store.Direct))
				}
				for _, ev := range held {
					if wanted(ev.Key) {
						out = append(out, cluster.Decode("a", ev))
					}
				}
				return out, nil
			}
			p := &planned{}
			if err := (Speaker{BGP: p, Server: s}).Plan(t.Context(), []store.Event{tt.change}, nil); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, c := range p.changes[1:] {
				c = strings.TrimPrefix(strings.TrimPrefix(c, "/calico/ipam/v2/assignment/ipv4/block/"), "/calico/ipam/v2/")
				got = append(got, c)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for _, ev := range claim("a", &cluster.Block{CIDR: netip.MustParsePrefix("10.77.0.0/28")}) {
		if !ev.Deleted() {
			t.Errorf("a block that is given up: %v", ev)
		}
	}
}
