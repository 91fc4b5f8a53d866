package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// heard makes an event of an object of Kubernetes; a nil value: it is gone.
func heard(key store.Key, value any) store.Event {
	return store.Event{Key: key, Object: store.Object{Key: key, Value: value}}
}

func svc(name string, s store.Service) store.Event {
	return heard(store.ServiceKey("default", name), &s)
}

// endpoints makes a slice of a Service: of the nodes that have endpoints, which are ready
// or, with a minus in front, terminate.
func endpoints(of string, nodes ...string) store.Event {
	s := &store.EndpointSlice{Service: of, Nodes: map[string]store.EndpointsHere{}}
	for _, n := range nodes {
		name, leaving := strings.CutPrefix(n, "-")
		s.Nodes[name] = store.EndpointsHere{Ready: !leaving, Leaving: leaving}
	}
	return heard(store.EndpointSliceKey("default", of), s)
}

// single lists what of service addresses a configuration announces.
func (c Config) single() []string {
	out := []string{}
	for _, p := range c.Announce {
		if p.Addr().Is4() && p.Addr().As4()[0] == 192 {
			continue // a block
		}
		out = append(out, strings.TrimSpace(fmt.Sprint(p, " ", c.serviceOf(p), " ", c.Tags[p], map[bool]string{true: " last"}[c.localPrefOf(p) == drainPreference])))
	}
	return out
}

// TestServices is what a node announces step by step, and whether the steps concern it.
func TestServices(t *testing.T) {
	t.Parallel()
	v := &View{self: "node1", hasServices: true}
	now := time.Unix(1e9, 0)
	balancers := `{"serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}],"prefixAdvertisements":[{"cidr":"172.17.0.0/24","communities":["65000:1"]}]}`
	local := store.Service{ClusterIPs: []string{"10.96.0.1"}, LoadBalancerIPs: []string{"172.17.0.1"}, ExternalLocal: true}
	for _, s := range []struct {
		name    string
		events  []store.Event
		want    []string
		unmoved bool // the step does not concern the node
		held    bool
	}{
		{"the state", []store.Event{
			bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), conf(t, "default", balancers),
			svc("web", local), endpoints("web", "node2"), affinity(t, "node1", "192.168.1.0/26", "confirmed"),
		}, []string{"172.17.0.0/24  65000:1"}, false, false},
		{"another one elsewhere", []store.Event{endpoints("web", "node2", "node3")}, []string{"172.17.0.0/24  65000:1"}, true, false},
		{"one here", []store.Event{endpoints("web", "node1", "node2")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1"}, false, false},
		{"it terminates", []store.Event{endpoints("web", "-node1", "node2")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1 65535:0 last"}, false, false},
		{"it is gone", []store.Event{endpoints("web", "node2")}, []string{"172.17.0.0/24  65000:1"}, false, false},
		{"back", []store.Event{endpoints("web", "node1", "node2")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1"}, false, false},
		{"gone again", []store.Event{endpoints("web", "node2")}, []string{"172.17.0.0/24  65000:1"}, false, false},
		{"back again", []store.Event{endpoints("web", "node1", "node2")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1"}, false, false},
		{"and gone again", []store.Event{endpoints("web", "node2")}, []string{"172.17.0.0/24  65000:1"}, false, false},
		{"it flaps", []store.Event{endpoints("web", "node1", "node2")}, []string{"172.17.0.0/24  65000:1"}, false, true},
		{"nobody else serves it", []store.Event{endpoints("web", "node1")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1"}, false, false},
		{"excluded", []store.Event{labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"`+excludeLabel+`":"true"`, "")}, []string{}, false, false},
		{"not excluded", []store.Event{bgpNode(t, "node1", "10.1.0.11/24")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1"}, false, false},
		{"drained", []store.Event{labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), "", `"`+store.AnnotationDrain+`":"shift"`)}, []string{"172.17.0.0/24  65000:1 65535:0 last", "172.17.0.1/32 Service default/web 65000:1 65535:0 last"}, false, false},
		{"drained, and it terminates", []store.Event{endpoints("web", "-node1")}, []string{"172.17.0.0/24  65000:1 65535:0 last", "172.17.0.1/32 Service default/web 65000:1 65535:0 last"}, false, false},
		{"no more", []store.Event{bgpNode(t, "node1", "10.1.0.11/24"), endpoints("web", "node1")}, []string{"172.17.0.0/24  65000:1", "172.17.0.1/32 Service default/web 65000:1"}, false, false},
		{"one by one", []store.Event{conf(t, "default", `{"serviceLoadBalancerAggregation":"Disabled","serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}]}`)}, []string{"172.17.0.1/32 Service default/web"}, false, false},
		{"with ServiceCIDRs, unasked", []store.Event{heard(store.ServiceCIDRKey("kubernetes"), &store.ServiceCIDR{CIDRs: []string{"10.96.0.0/16"}})}, []string{"172.17.0.1/32 Service default/web"}, true, false},
		{"asked", []store.Event{labelled(t, conf(t, "default", `{}`), "", `"routerd.io/announceServiceCIDRs":"true"`)}, []string{"10.96.0.0/16", "10.96.0.1/32 Service default/web"}, false, false},
		{"another one", []store.Event{heard(store.ServiceCIDRKey("more"), &store.ServiceCIDR{CIDRs: []string{"10.97.0.0/16", "fd00:96::/112"}})}, []string{"10.96.0.0/16", "10.96.0.1/32 Service default/web", "10.97.0.0/16"}, false, false},
		{"the first is gone", []store.Event{heard(store.ServiceCIDRKey("kubernetes"), nil)}, []string{"10.97.0.0/16"}, false, false},
		{"a range of one address", []store.Event{conf(t, "default", `{"serviceExternalIPs":[{"cidr":"172.16.0.1/32"}]}`), svc("web", store.Service{ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{"172.16.0.1"}}), heard(store.EndpointSliceKey("default", "web"), nil)}, []string{"172.16.0.1/32 Service default/web"}, false, false},
		{"that needs an endpoint", []store.Event{labelled(t, conf(t, "default", `{"serviceExternalIPs":[{"cidr":"172.16.0.1/32"}]}`), "", `"routerd.io/servicesNeedEndpoints":"true"`)}, []string{}, false, false},
		{"which is there", []store.Event{endpoints("web", "node7")}, []string{"172.16.0.1/32 Service default/web"}, false, false},
		{"the Service is gone", []store.Event{heard(store.ServiceKey("default", "web"), nil)}, []string{}, false, false},
	} {
		now = now.Add(time.Second)
		changed, err := v.Apply(clustertest.Step("", store.Batch{Events: s.events, Synced: true}))
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		v.damp(now)
		now = now.Add(3 * time.Second) // what joined other nodes has waited
		again := v.damp(now)
		c, err := Desired(v, "node1")
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if diff := cmp.Diff(s.want, c.single()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", s.name, diff)
		}
		if changed == s.unmoved || (again > 0) != s.held {
			t.Errorf("%s: changed %v, to be looked at in %v", s.name, changed, again)
		}
		for _, p := range slices.Concat(v.services.Ranges().All()) {
			if !slices.Contains(c.Own, p) {
				t.Errorf("%s: %s would be learned of others", s.name, p)
			}
		}
	}
	if v.damp(now.Add(time.Hour)) != 0 {
		t.Error("something is held back for ever")
	}
}

// TestServicesNotTold: without the objects of Kubernetes the ranges are announced, and
// nothing else.
func TestServicesNotTold(t *testing.T) {
	t.Parallel()
	v := &View{self: "node1", hasServices: true}
	if v.damp(time.Unix(1e9, 0)) != 0 {
		t.Error("an empty view holds something back")
	}
	step := clustertest.Step("", store.Batch{Synced: true, Events: []store.Event{
		bgpNode(t, "node1", "10.1.0.11/24"), conf(t, "default", `{"serviceClusterIPs":[{"cidr":"10.96.0.0/16"}],"serviceExternalIPs":[{"cidr":"172.16.0.1/32"}]}`),
	}})
	if _, err := v.Apply(step); err != nil {
		t.Fatal(err)
	}
	c, err := Desired(v, "node1")
	if diff := cmp.Diff([]string{"10.96.0.0/16"}, c.single()); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// TestPlanOfServices: a plan says what a change of the ranges does to each node's
// addresses of Services, and changes nothing of the view.
func TestPlanOfServices(t *testing.T) {
	t.Parallel()
	v := &View{self: "node1", hasServices: true}
	events := []store.Event{
		bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), conf(t, "default", `{"serviceExternalIPs":[{"cidr":"172.16.0.0/24"}]}`),
		svc("web", store.Service{ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{"172.16.0.1"}, ExternalLocal: true}), endpoints("web", "node2"),
	}
	if _, err := v.Apply(clustertest.Step("", store.Batch{Events: events, Synced: true})); err != nil {
		t.Fatal(err)
	}
	got := map[string][]netip.Prefix{}
	err := v.Plan(t.Context(), []store.Event{conf(t, "default", `{}`)}, func(p Plan) error {
		got[p.Node] = p.Withdraw
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	all := netip.MustParsePrefix("172.16.0.0/24")
	if want := map[string][]netip.Prefix{"node1": {all}, "node2": {all, netip.MustParsePrefix("172.16.0.1/32")}}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("withdrawn: %v, want %v", got, want)
	}
	if c, err := Desired(v, "node2"); err != nil || len(c.Services) != 1 {
		t.Errorf("afterwards node2 announces %v, %v", c.Services, err)
	}
}

// manyServices is a view of a node among so many Services, all of which it announces.
func manyServices(tb testing.TB, n int) *View {
	tb.Helper()
	v := &View{self: "node1", hasServices: true}
	events := []store.Event{bgpNode(tb, "node1", "10.1.0.11/24"), conf(tb, "default", `{"serviceLoadBalancerIPs":[{"cidr":"172.16.0.0/12"}]}`)}
	addr := netip.MustParseAddr("172.16.0.0")
	for i := range n {
		addr = addr.Next()
		name := fmt.Sprint("s", i)
		events = append(events, svc(name, store.Service{ClusterIPs: []string{"10.96.0.1"}, LoadBalancerIPs: []string{addr.String()}, ExternalLocal: true}), endpoints(name, "node1"))
	}
	if _, err := v.Apply(clustertest.Step("", store.Batch{Events: events, Synced: true})); err != nil {
		tb.Fatal(err)
	}
	return v
}

// BenchmarkServices is what one change of an endpoint costs a node that announces the addresses
// of so many Services, up to BGP's own table: as the controller does it, and with all made anew.
func BenchmarkServices(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		for _, whole := range []bool{false, true} {
			b.Run(fmt.Sprintf("services=%d/whole=%t", n, whole), func(b *testing.B) {
				v := manyServices(b, n)
				s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
				b.Cleanup(func() {
					if err := s.Stop(context.WithoutCancel(b.Context()), false); err != nil {
						b.Error(err)
					}
				})
				var m memo
				apply := func() {
					c, err := m.desired(v, "node1")
					if err != nil {
						b.Fatal(err)
					}
					c.ListenPort, c.ListenAddrs = 0, nil
					if err := s.Apply(b.Context(), c); err != nil {
						b.Fatal(err)
					}
				}
				v.damp(time.Unix(0, 0))
				v.takeTouched()
				apply()
				steps := []store.Event{endpoints("s1", "node1"), endpoints("s1", "-node1")}
				i := 0
				for b.Loop() {
					i++
					if changed, err := v.Apply(clustertest.Step("", store.Batch{Events: steps[i%2 : i%2+1]})); err != nil || !changed {
						b.Fatal(changed, err)
					}
					v.damp(time.Unix(int64(i)*3600, 0))
					some, narrow := m.touchedOf(v, "node1", v.takeTouched())
					switch {
					case !narrow || len(some) != 1:
						b.Fatal(narrow, some)
					case whole:
						apply()
					default:
						if err := s.update(some); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}

// originated is what a speaker originates, with what each is for.
func originated(t *testing.T, s *Speaker) []string {
	t.Helper()
	var out []string
	err := s.Query(t.Context(), Query{Table: TableBest}, func(r Route) bool {
		if r.Own {
			out = append(out, fmt.Sprint(r.Prefix, " ", r.Owner, " ", r.Communities, " ", r.LocalPref))
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestUpdateOfServices: a speaker that is told of changes of Services alone originates, and
// says of what it originates, the same as one that is told all; and what it is told then
// is judged by what it originated last.
func TestUpdateOfServices(t *testing.T) {
	t.Parallel()
	v := manyServices(t, 5)
	s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() {
		if err := s.Stop(context.WithoutCancel(t.Context()), false); err != nil {
			t.Error(err)
		}
	})
	var m memo
	apply := func() []string {
		t.Helper()
		c, err := m.desired(v, "node1")
		c.ListenPort, c.ListenAddrs = 0, nil
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		return originated(t, s)
	}
	v.damp(time.Unix(0, 0))
	v.takeTouched()
	first := apply()
	if len(first) != 6 || !strings.HasPrefix(first[1], "172.16.0.1/32 Service default/s0 [] ") {
		t.Fatalf("at first it originates %q", first)
	}
	events := []store.Event{
		endpoints("s1", "-node1"), endpoints("s2"), heard(store.ServiceKey("default", "s3"), nil),
		svc("new", store.Service{LoadBalancerIPs: []string{"172.16.9.9"}, ExternalLocal: true}), endpoints("new", "node1"),
	}
	if _, err := v.Apply(clustertest.Step("", store.Batch{Events: events})); err != nil {
		t.Fatal(err)
	}
	v.damp(time.Unix(3600, 0))
	some, narrow := m.touchedOf(v, "node1", v.takeTouched())
	if !narrow || len(some) != 4 {
		t.Fatalf("%v, %+v", narrow, some)
	}
	if err := s.update(some); err != nil {
		t.Fatal(err)
	}
	got := originated(t, s)
	if want := apply(); !slices.Equal(got, want) || slices.Equal(got, first) {
		t.Errorf("told of what changed it originates\n%q\ntold all\n%q", got, want)
	}

	// What was announced since the last whole configuration and stays is judged again.
	if _, err := v.Apply(clustertest.Step("", store.Batch{Events: []store.Event{endpoints("s2", "node1")}})); err != nil {
		t.Fatal(err)
	}
	v.damp(time.Unix(7200, 0))
	if some, narrow = m.touchedOf(v, "node1", v.takeTouched()); !narrow {
		t.Fatal("more than Services changed")
	}
	if err := s.update(some); err != nil {
		t.Fatal(err)
	}
	was, err := m.desired(v, "node1")
	if err != nil {
		t.Fatal(err)
	}
	if got := fold(s.cfg.Announce, s.late); !slices.Equal(got, was.Announce) {
		t.Errorf("it takes %v for announced, want %v", got, was.Announce)
	}
}

// announces is what a configuration has announced for addresses of Services, and else.
func (c *Config) announces() map[netip.Prefix]string {
	out := map[netip.Prefix]string{}
	for _, p := range c.Announce {
		out[p] = fmt.Sprint(c.Tags[p], " ", c.localPrefOf(p), " ", c.nextHopOf(p), " ", c.serviceOf(p))
	}
	return out
}

// TestTouched: what changes of the announcements of Services alone, step by step and
// whatever else changes between, comes to what follows from the whole state; what
// depends on more is not said to depend on Services alone.
func TestTouched(t *testing.T) {
	t.Parallel()
	confs := []store.Event{
		conf(t, "default", `{"serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}],"prefixAdvertisements":[{"cidr":"172.17.0.0/24","communities":["65000:1"]}]}`),
		conf(t, "default", `{"serviceLoadBalancerAggregation":"Disabled","serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}],"serviceExternalIPs":[{"cidr":"172.17.0.3/32"},{"cidr":"fd00:17::/64"}]}`),
	}
	nodes := []store.Event{
		bgpNode(t, "node1", "10.1.0.11/24"), labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"`+excludeLabel+`":"true"`, ""),
		labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), "", `"`+store.AnnotationDrain+`":"shift"`), bgpNode(t, "node2", "10.1.0.12/24"),
	}
	others := []store.Event{
		affinity(t, "node1", "172.17.0.1/32", "confirmed"), affinity(t, "node1", "172.17.0.1/32", "pending"), affinity(t, "node1", "192.168.1.0/26", "confirmed"),
		ippool(t, "hidden", `{"cidr":"172.17.0.2/32","disableBGPExport":true}`), ippool(t, "hidden", `{"cidr":"192.168.0.0/16"}`),
	}
	narrowed := 0
	rapid.Check(t, func(t *rapid.T) {
		v := &View{self: "node1", hasServices: true}
		now := time.Unix(1e9, 0)
		var m memo
		var applied map[netip.Prefix]string // nil: nothing
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			var events []store.Event
			for range rapid.IntRange(0, 3).Draw(t, "events") {
				name := rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "name")
				switch rapid.IntRange(0, 9).Draw(t, "what") {
				case 0:
					events = append(events, rapid.SampledFrom(confs).Draw(t, "conf"))
				case 1:
					events = append(events, rapid.SampledFrom(nodes).Draw(t, "node"))
				case 2:
					events = append(events, rapid.SampledFrom(others).Draw(t, "other"))
				case 3:
					events = append(events, heard(store.ServiceKey("default", name), nil))
				case 4, 5:
					events = append(events, svc(name, store.Service{
						LoadBalancerIPs: rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"172.17.0.1", "172.17.0.2", "172.17.0.3", "fd00:17::1"}), 0, 3, rapid.ID[string]).Draw(t, "balancers"),
						ExternalIPs:     rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"172.17.0.3", "fd00:17::1"}), 0, 2, rapid.ID[string]).Draw(t, "external"),
						ExternalLocal:   rapid.Bool().Draw(t, "local"),
					}))
				default:
					events = append(events, endpoints(name, rapid.SampledFrom([][]string{nil, {"node1"}, {"-node1"}, {"node1", "node2"}, {"-node1", "node2"}, {"node2"}}).Draw(t, "at")...))
				}
			}
			now = now.Add(time.Duration(rapid.IntRange(0, 10_000).Draw(t, "ms")) * time.Millisecond)
			if _, err := v.Apply(clustertest.Step("", store.Batch{Events: events, Synced: true})); err != nil {
				t.Fatal(err)
			}
			v.damp(now)
			other, touched := v.other, v.takeTouched()
			v.other = false
			some, narrow := m.touchedOf(v, "node1", touched)
			want, err := m.desired(v, "node1")
			switch {
			case err != nil:
				applied = nil
				continue
			case applied == nil || other || !narrow:
				applied = want.announces()
			default:
				narrowed++
				one := want // which has the settings
				one.Announce, one.Tags, one.Leaving, one.Services = nil, map[netip.Prefix]string{}, map[netip.Prefix]bool{}, map[netip.Addr]service.Announcement{}
				for _, a := range some {
					delete(applied, a.Prefix)
					if a.Service != nil {
						one.Announce = append(one.Announce, a.Prefix)
						one.Tags[a.Prefix], one.Leaving[a.Prefix], one.Services[a.Addr()] = a.Tags, a.Service.State == service.Leaving, *a.Service
					}
				}
				maps.Copy(applied, one.announces())
			}
			if diff := cmp.Diff(want.announces(), applied, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("narrow %v, other %v (-want +got):\n%s", narrow, other, diff)
			}
		}
	})
	if narrowed == 0 {
		t.Error("no step was of Services alone")
	}
}

// TestAnnouncers: of each node it is said how it announces an address, or why not.
func TestAnnouncers(t *testing.T) {
	t.Parallel()
	v := &View{self: "node1", hasServices: true}
	step := clustertest.Step("", store.Batch{Synced: true, Events: []store.Event{
		bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), node(t, "node3", `{}`),
		labelled(t, bgpNode(t, "node4", "10.1.0.14/24"), `"`+excludeLabel+`":"true"`, ""), bgpNode(t, "node5", "10.1.0.15/24"),
		conf(t, "default", `{"serviceExternalIPs":[{"cidr":"172.16.0.0/24"}]}`),
		svc("web", store.Service{ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{"172.16.0.1"}, ExternalLocal: true}), endpoints("web", "node1", "-node2", "node4"),
	}})
	if _, err := v.Apply(step); err != nil {
		t.Fatal(err)
	}
	v.held = map[netip.Addr]bool{netip.MustParseAddr("172.16.0.2"): true}
	got := map[string]string{}
	for _, a := range v.announcers(store.ServiceKey("default", "web"), netip.MustParseAddr("172.16.0.1")) {
		got[a.Node] = fmt.Sprint(a.Prefix, a.Leaving, " ", a.Why)
	}
	if diff := cmp.Diff(map[string]string{
		"node1": "172.16.0.1/32 false ", "node2": "172.16.0.1/32 true ", "node3": "invalid Prefix false it takes no part in BGP",
		"node4": "invalid Prefix false its label " + excludeLabel + " keeps Services' addresses off it",
		"node5": "172.16.0.0/24 false none of its endpoints that serve is on this node, and its traffic policy is Local",
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
