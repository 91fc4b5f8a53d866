package kubecontrollers

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func addrs(texts ...string) (out []netip.Addr) {
	for _, s := range texts {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// config reads a KubeControllersConfiguration that says of host endpoints what text says.
func config(t *testing.T, text string) store.Object {
	t.Helper()
	key := store.ResourceKey(store.KindKubeControllersConfiguration, store.DefaultName)
	raw := []byte(fmt.Sprintf(`{"kind":"KubeControllersConfiguration","apiVersion":"projectcalico.org/v3","metadata":{"name":"default"},"spec":{"controllers":{"node":{"hostEndpoint":%s}}},"status":{}}`, text))
	v, err := store.Decode(key, raw)
	if err != nil {
		t.Fatal(err)
	}
	return store.Object{Key: key, Value: v, Raw: raw}
}

// TestWanted holds which endpoints Calico's controller makes, by its names.
func TestWanted(t *testing.T) {
	t.Parallel()
	n := &cluster.Node{Name: "n1", Labels: map[string]string{"rack": "r1", "side": "none"}, Hosts: addrs("192.0.2.1"), Inner: addrs("10.0.0.64")}
	interfaces := map[string][]netip.Addr{"eth0": addrs("192.0.2.1"), "eth1": addrs("198.51.100.1", "2001:db8::1"), "eth2": nil}
	long := strings.Repeat("a", 250)
	for _, tt := range []struct {
		name, asked string
		node        *cluster.Node
		want        []string // name interface addresses labels
		problems    []string
	}{
		{name: "nothing", asked: `{}`},
		{name: "switched off", asked: `{"autoCreate":"Disabled","templates":[{"generateName":"a","interfaceSelector":".*"}]}`},
		{name: "one of all", asked: `{"autoCreate":"Enabled"}`, want: []string{"n1-auto-hep * 192.0.2.1,10.0.0.64,198.51.100.1,2001:db8::1 rack=r1,side=none"}},
		{
			name: "of addresses", asked: `{"autoCreate":"Enabled","createDefaultHostEndpoint":"Disabled","templates":[
				{"generateName":"outer","interfaceCIDRs":["198.51.100.0/24","2001:db8::/32"],"labels":{"side":"outer"}},
				{"generateName":"none","interfaceCIDRs":["203.0.113.0/24"]}]}`,
			want: []string{"n1-outer-auto-hep  198.51.100.1,2001:db8::1 rack=r1,side=outer"},
		},
		{
			name: "of interfaces", asked: `{"autoCreate":"Enabled","createDefaultHostEndpoint":"Disabled","templates":[{"generateName":"e","interfaceSelector":"^eth[12]$","interfaceCIDRs":["10.0.0.0/8"]}]}`,
			want: []string{"n1-e-eth1-auto-hep eth1 10.0.0.64,198.51.100.1,2001:db8::1 rack=r1,side=none", "n1-e-eth2-auto-hep eth2 10.0.0.64 rack=r1,side=none"},
		},
		{
			name: "the field's later name", asked: `{"autoCreate":"Enabled","createDefaultHostEndpoint":"Disabled","templates":[{"generateName":"e","interfacePattern":"eth2"}]}`,
			want: []string{"n1-e-eth2-auto-hep eth2  rack=r1,side=none"},
		},
		{
			name: "of other nodes", asked: `{"autoCreate":"Enabled","createDefaultHostEndpoint":"Disabled","templates":[{"generateName":"e","interfaceSelector":"eth0","nodeSelector":"rack == 'r2'"}]}`,
		},
		{
			name: "what makes no sense", asked: `{"autoCreate":"Enabled","createDefaultHostEndpoint":"Disabled","templates":[{"generateName":"a"},{"interfaceSelector":"eth0"},
				{"generateName":"b","interfaceSelector":"eth("},{"generateName":"c","interfaceCIDRs":["x"]},{"generateName":"d","interfaceSelector":"eth2","nodeSelector":"a =="},
				{"generateName":"e","interfaceSelector":"eth2"},{"generateName":"e","interfaceSelector":"eth0"}]}`,
			want:     []string{"n1-e-eth2-auto-hep eth2  rack=r1,side=none"},
			problems: []string{"templates[0].interfaceCIDRs", "templates[1].generateName", "templates[2].interfaceSelector", "templates[3].interfaceCIDRs[0]", "templates[4].nodeSelector", "templates[6].generateName"},
		},
		{
			name: "a long name", asked: `{"autoCreate":"Enabled"}`, node: &cluster.Node{Name: long},
			want: []string{"9ibrbdeg5xt1htqtq6swvarawfmtgzfiag9ch4wja-auto-hep * 192.0.2.1,198.51.100.1,2001:db8::1 "},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := config(t, tt.asked)
			a := cluster.Decode("", store.Event{Key: o.Key, Object: o}).Value.(*cluster.Controllers)
			node := n
			if tt.node != nil {
				node = tt.node
			}
			var got []string
			if a.Create {
				for name, h := range wanted(a, node, interfaces) {
					if err := store.Validate(h); err != nil && tt.node == nil {
						t.Errorf("what is made is refused: %v", err)
					}
					if !made(h) || h.Name != name || h.Spec.Node != node.Name || len(h.Name) > maxName || !slices.Equal(h.Spec.Profiles, []string{store.DefaultAllowProfile}) {
						t.Errorf("made: %+v", h)
					}
					var labels []string
					for _, l := range slices.Sorted(maps.Keys(h.Labels)) {
						if l != LabelCreatedBy {
							labels = append(labels, l+"="+h.Labels[l])
						}
					}
					got = append(got, fmt.Sprintf("%s %s %s %s", h.Name, h.Spec.InterfaceName, strings.Join(h.Spec.ExpectedIPs, ","), strings.Join(labels, ",")))
				}
			}
			slices.Sort(got)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("endpoints (-want +got):\n%s", diff)
			}
			if len(a.Problems) != len(tt.problems) {
				t.Fatalf("problems: %q", a.Problems)
			}
			for i, want := range tt.problems {
				if !strings.Contains(a.Problems[i], want) {
					t.Errorf("problem %q, want one of %s", a.Problems[i], want)
				}
			}
		})
	}
}

// bench is a datastore whose changes a Keeper and a StatusWriter follow.
type bench struct {
	t *testing.T
	s store.Store
}

func newBench(t *testing.T, node string) (*bench, *Keeper) {
	t.Helper()
	b := &bench{t, memory.New()}
	k := NewKeeper(node, b.s, func(name string) bool { return name == "lo" || name == "cali1" }, slog.New(slog.DiscardHandler))
	b.run(k.HandleStore, Kinds()...)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = k.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return b, k
}

// run publishes what is in the datastore until the test ends.
func (b *bench) run(handle func(cluster.Step), kinds ...store.Kind) {
	ctx, cancel := context.WithCancel(b.t.Context())
	ended := make(chan struct{})
	batches := b.s.Watch(ctx, kinds...)
	go func() {
		defer close(ended)
		for batch := range batches {
			step := cluster.Step{Revision: batch.Revision, Source: cluster.Live, Synced: batch.Synced}
			for _, ev := range batch.Events {
				step.Changes = append(step.Changes, cluster.Decode("n1", ev))
			}
			handle(step)
		}
	}()
	b.t.Cleanup(func() { cancel(); <-ended })
}

func (b *bench) put(v any) {
	b.t.Helper()
	kind, _ := store.KindOf(v)
	if _, err := store.Modify(b.t.Context(), b.s, store.ResourceKey(kind, store.Meta(v).Name), func(store.Object) (any, error) { return store.Clone(v), nil }); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) remove(kind store.Kind, name string) {
	b.t.Helper()
	if _, err := b.s.Txn(b.t.Context(), store.Op{Action: store.Remove, If: store.Always(), Object: store.Object{Key: store.ResourceKey(kind, name)}}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) asks(text string) { b.t.Helper(); b.put(config(b.t, text).Value) }

// has waits until the host endpoints are those.
func (b *bench) has(want ...string) {
	b.t.Helper()
	await.Until(b.t, "the host endpoints are those that are asked for", func() error {
		list, _, err := b.s.List(b.t.Context(), store.KindHostEndpoint, "")
		if err != nil {
			return err
		}
		var got []string
		for _, o := range list {
			h := o.Value.(*v3.HostEndpoint)
			got = append(got, h.Name+" "+h.Spec.InterfaceName+" "+h.Labels["rack"])
		}
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}
		return nil
	})
}

func aNode(name, rack string) *store.Node {
	n := store.New(store.KindNode).(*store.Node)
	n.Name, n.Labels = name, map[string]string{"rack": rack}
	n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: "192.0.2.1/24"}
	return n
}

func hep(name, node, by string) *v3.HostEndpoint {
	h := store.New(store.KindHostEndpoint).(*v3.HostEndpoint)
	h.Name, h.Spec.Node, h.Spec.InterfaceName = name, node, "*"
	if by != "" {
		h.Labels = map[string]string{LabelCreatedBy: by}
	}
	return h
}

// TestKeeper: what is asked for is made, follows the Node and the host's interfaces, and goes;
// what users made stays, as does all while nothing is asked or another does it.
func TestKeeper(t *testing.T) {
	t.Parallel()
	b, k := newBench(t, "n1")
	u := dataplane.Underlay{
		Links:     []dataplane.UnderlayLink{{Name: "lo"}, {Name: "eth0"}, {Name: "eth1"}, {Name: "cali1"}},
		Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: netip.MustParsePrefix("192.0.2.1/24")}, {Link: "eth1", Prefix: netip.MustParsePrefix("fe80::1/64")}},
	}
	k.HandleUnderlay(u)
	b.put(aNode("n1", "r1"))
	b.put(hep("n1-old-auto-hep", "n1", CreatedBy))
	b.put(hep("n1-e-eth1-auto-hep", "n1", "someone"))
	b.put(hep("n2-auto-hep", "n2", CreatedBy))
	const user, other = "n1-e-eth1-auto-hep * ", "n2-auto-hep * "
	b.asks(`{"autoCreate":"Enabled","templates":[{"generateName":"e","interfaceSelector":".*"}]}`)
	b.has("n1-auto-hep * r1", user, "n1-e-eth0-auto-hep eth0 r1", other)
	b.put(aNode("n1", "r2"))
	b.has("n1-auto-hep * r2", user, "n1-e-eth0-auto-hep eth0 r2", other)
	u.Links = append(u.Links, dataplane.UnderlayLink{Name: "eth2"})
	k.HandleUnderlay(u)
	b.has("n1-auto-hep * r2", user, "n1-e-eth0-auto-hep eth0 r2", "n1-e-eth2-auto-hep eth2 r2", other)
	b.remove(store.KindHostEndpoint, "n1-auto-hep") // by hand
	b.has("n1-auto-hep * r2", user, "n1-e-eth0-auto-hep eth0 r2", "n1-e-eth2-auto-hep eth2 r2", other)
	b.remove(store.KindHostEndpoint, "n1-e-eth1-auto-hep") // the name is free
	b.has("n1-auto-hep * r2", "n1-e-eth0-auto-hep eth0 r2", "n1-e-eth1-auto-hep eth1 r2", "n1-e-eth2-auto-hep eth2 r2", other)
	b.asks(`{"autoCreate":"Enabled","createDefaultHostEndpoint":"Disabled"}`)
	b.has(other)
	b.asks(`{"autoCreate":"Enabled"}`)
	b.has("n1-auto-hep * r2", other)

	elsewhere := config(t, `{"autoCreate":"Disabled"}`).Value.(*v3.KubeControllersConfiguration)
	elsewhere.Status.EnvironmentVars = map[string]string{"AUTO_HOST_ENDPOINTS": "enabled"}
	b.put(elsewhere)
	b.put(aNode("n1", "r3"))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); k.RunCluster(ctx) }()
	b.has("n1-auto-hep * r2") // the Node n2 is not there
	cancel()
	<-ended
}

// text is what was logged.
type text struct {
	mu sync.Mutex
	b  strings.Builder
}

func (t *text) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.Write(p)
}

func (t *text) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}

// TestStatusWriter: the status says what is in force, follows the resource, and is left to a program
// that writes it too.
func TestStatusWriter(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		running Running
		want    string
	}{
		{"with the API", Running{API: true}, `{"runningConfig":{"controllers":{"node":{"syncLabels":"Disabled","hostEndpoint":{"autoCreate":"Enabled","createDefaultHostEndpoint":"Enabled","templates":[{"generateName":"e","interfaceSelector":"eth0"}]},"leakGracePeriod":"1m0s"}}},"environmentVars":{"DATASTORE_TYPE":"kubernetes"}}`},
		{"with etcd beside it", Running{Mirrored: true}, `{"runningConfig":{"controllers":{"node":{"syncLabels":"Enabled","hostEndpoint":{"autoCreate":"Enabled","createDefaultHostEndpoint":"Enabled","templates":[{"generateName":"e","interfaceSelector":"eth0"}]},"leakGracePeriod":"1m0s"},"policy":{},"workloadEndpoint":{},"serviceAccount":{},"namespace":{}}}}`},
		{"without Kubernetes", Running{}, `{"runningConfig":{"controllers":{"node":{"syncLabels":"Disabled","hostEndpoint":{"autoCreate":"Enabled","createDefaultHostEndpoint":"Enabled","templates":[{"generateName":"e","interfaceSelector":"eth0"}]},"leakGracePeriod":"1m0s"}}}}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b := &bench{t, memory.New()}
			tt.running.LeakGrace = func(*v3.KubeControllersConfiguration) time.Duration { return time.Minute }
			log := new(text)
			writer := NewStatusWriter(tt.running, b.s, slog.New(slog.NewTextHandler(log, nil)))
			b.run(writer.HandleStore, store.KindKubeControllersConfiguration)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); writer.Run(ctx) }()
			defer func() { cancel(); <-ended }()
			key := store.ResourceKey(store.KindKubeControllersConfiguration, store.DefaultName)
			says := func(want string) store.Object {
				t.Helper()
				var cur store.Object
				await.Until(t, "the status says what is in force", func() (err error) {
					if cur, err = b.s.Get(t.Context(), key); err == nil && !strings.Contains(string(cur.Raw), want) {
						err = fmt.Errorf("%s", cur.Raw)
					}
					return err
				})
				return cur
			}
			b.asks(`{"autoCreate":"Enabled","templates":[{"generateName":"e","interfaceSelector":"eth0","labels":{}},{"generateName":"none"}]}`)
			first := says(tt.want)
			b.asks(`{"autoCreate":"Disabled"}`)
			if last := says(`"autoCreate":"Disabled","createDefaultHostEndpoint":"Enabled"`); last.Revision <= first.Revision {
				t.Errorf("revision %d after %d", last.Revision, first.Revision)
			}
			for range maxTurns { // another program, which goes by its own variables
				says(`"autoCreate":"Disabled","createDefaultHostEndpoint":"Enabled"`)
				if _, err := store.ModifyStatus(t.Context(), b.s, key, func(cur store.Object) (any, error) {
					c := store.Clone(cur.Value).(*v3.KubeControllersConfiguration)
					c.Status = v3.KubeControllersConfigurationStatus{EnvironmentVars: map[string]string{"ENABLED_CONTROLLERS": "node"}}
					return c, nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			await.Until(t, "it is left to the other", func() error {
				if !strings.Contains(log.String(), "it is left to it") {
					return fmt.Errorf("logged is %s", log.String())
				}
				return nil
			})
			says("ENABLED_CONTROLLERS")
		})
	}
}
