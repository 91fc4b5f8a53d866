package policy_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// The random world is small, so that its parts meet: few names, few labels,
// few addresses.

func pick[T any](t *rapid.T, what string, list ...T) T {
	return list[rapid.IntRange(0, len(list)-1).Draw(t, what)]
}

func maybe(t *rapid.T, what string) bool { return rapid.Bool().Draw(t, what) }

func drawLabels(t *rapid.T) map[string]string {
	m := make(map[string]string)
	for _, k := range []string{"a", "b"} {
		if maybe(t, "label") {
			m[k] = pick(t, "value", "x", "y", "z")
		}
	}
	if pick(t, "reserved", 0, 0, 0, 1) == 1 {
		m["pcns.env"] = "forged"
	}
	return m
}

func drawSelector(t *rapid.T, depth int) string {
	top := 9
	if depth == 0 {
		top = 7
	}
	label := pick(t, "label", "a", "b", "env")
	value := pick(t, "value", "x", "y")
	switch rapid.IntRange(0, top).Draw(t, "form") {
	case 0:
		return "all()"
	case 1:
		return "has(" + label + ")"
	case 2:
		return label + " == '" + value + "'"
	case 3:
		return label + " != '" + value + "'"
	case 4:
		return label + " in {'x', 'z'}"
	case 5:
		return label + " not in {'y'}"
	case 6:
		return label + " starts with '" + value + "'"
	case 7:
		return "pcns.env == '" + value + "'"
	case 8:
		return "!(" + drawSelector(t, depth-1) + ")"
	}
	return "(" + drawSelector(t, depth-1) + pick(t, "op", " && ", " || ") + drawSelector(t, depth-1) + ")"
}

func drawEntity(t *rapid.T, family int, ports bool) v3.EntityRule {
	var e v3.EntityRule
	nets := func() []string {
		all := [][]string{{"10.0.0.0/30", "10.0.0.4", "10.0.0.0/24", "0.0.0.0/1"}, {"fd00::/126", "fd00::4", "fd00::/64"}}[family]
		return []string{pick(t, "net", all...), pick(t, "net", all...)}
	}
	if pick(t, "nets", 0, 0, 1) == 1 {
		e.Nets = nets()
	}
	if pick(t, "notNets", 0, 0, 1) == 1 {
		e.NotNets = nets()
	}
	switch pick(t, "who", 0, 1, 2, 3) {
	case 1:
		e.Selector = drawSelector(t, 2)
	case 2:
		e.NamespaceSelector = pick(t, "namespaces", "all()", "global()", "env == 'x'", "env != 'y'", "projectcalico.org/name == 'ns1'")
		if maybe(t, "selector too") {
			e.Selector = drawSelector(t, 1)
		}
	case 3:
		e.ServiceAccounts = &v3.ServiceAccountMatch{}
		if maybe(t, "names") {
			e.ServiceAccounts.Names = []string{"sa1"}
		}
		if maybe(t, "selector") {
			e.ServiceAccounts.Selector = pick(t, "accounts", "all()", "role == 'x'", "role != 'x'")
		}
	}
	if pick(t, "not", 0, 0, 1) == 1 {
		e.NotSelector = drawSelector(t, 1)
	}
	port := func() numorstring.Port {
		named := numorstring.NamedPort(pick(t, "name", "http", "dns"))
		if !ports {
			return named
		}
		return pick(t, "port", named, numorstring.SinglePort(80), numorstring.Port{MinPort: 50, MaxPort: 60})
	}
	if pick(t, "ports", 0, 0, 1) == 1 {
		e.Ports = []numorstring.Port{port(), port()}
	}
	if pick(t, "notPorts", 0, 0, 0, 1) == 1 {
		e.NotPorts = []numorstring.Port{port()}
	}
	return e
}

func drawRule(t *rapid.T) v3.Rule {
	r := v3.Rule{Action: pick(t, "action", v3.Allow, v3.Allow, v3.Deny, v3.Pass, v3.Log)}
	family := rapid.IntRange(0, 1).Draw(t, "family")
	ports := false
	switch pick(t, "protocol", 0, 1, 2, 3, 4, 5) {
	case 1:
		r.Protocol, ports = new(numorstring.ProtocolFromString("TCP")), true
	case 2:
		r.Protocol, ports = new(numorstring.ProtocolFromInt(17)), true
	case 3:
		r.Protocol = new(numorstring.ProtocolFromString(pick(t, "icmp", "ICMP", "ICMPv6")))
		f := &v3.ICMPFields{Type: new(pick(t, "type", 8, 3))}
		if maybe(t, "code") {
			f.Code = new(pick(t, "code", 0, 4))
		}
		if maybe(t, "not") {
			r.NotICMP = f
		} else {
			r.ICMP = f
		}
	case 4:
		r.NotProtocol = new(numorstring.ProtocolFromString("TCP"))
	}
	if pick(t, "version", 0, 0, 0, 1) == 1 {
		r.IPVersion = new([]int{4, 6}[family])
	}
	r.Source, r.Destination = drawEntity(t, family, ports), drawEntity(t, family, ports)
	for _, side := range []*v3.EntityRule{&r.Source, &r.Destination} {
		if pick(t, "service", 0, 0, 0, 0, 1) == 1 {
			*side = v3.EntityRule{Ports: side.Ports, Services: &v3.ServiceMatch{Namespace: pick(t, "namespace", "ns1", "ns2"), Name: pick(t, "service", "web", "dns")}}
		}
	}
	return r
}

func drawRules(t *rapid.T, action ...v3.Action) []v3.Rule {
	var list []v3.Rule
	for range rapid.IntRange(0, 3).Draw(t, "rules") {
		r := drawRule(t)
		if len(action) > 0 {
			r.Action = pick(t, "action", action...)
		}
		list = append(list, r)
	}
	return list
}

func drawTypes(t *rapid.T) []v3.PolicyType {
	return pick(t, "types", nil, []v3.PolicyType{"Ingress"}, []v3.PolicyType{"Egress"}, []v3.PolicyType{"Ingress", "Egress"})
}

func drawOrder(t *rapid.T) *float64 {
	return pick(t, "order", nil, new(1.0), new(1.0), new(2.5))
}

// drawObject makes one object of the small world, new or in place of another.
func drawObject(t *rapid.T) store.Object {
	ns := pick(t, "namespace", "ns1", "ns2")
	n := rapid.IntRange(1, 3).Draw(t, "number")
	tierName := pick(t, "tier", "default", "default", "t1", "t2", "kube-admin")
	meta := metav1.ObjectMeta{Labels: drawLabels(t)}
	key := store.Key{Name: fmt.Sprintf("p%d", n)}
	var v any
	switch pick(t, "kind", 0, 0, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 11) {
	case 11:
		s := &store.EndpointSlice{Service: pick(t, "of", "web", "dns", "")}
		if pick(t, "told", 0, 1, 1, 1) == 1 {
			s.Endpoints = &store.SliceEndpoints{}
			for _, a := range rapid.SliceOfN(rapid.SampledFrom([]string{"10.0.0.1", "10.0.0.2", "203.0.113.7", "fd00::1", "fd00::4"}), 0, 3).Draw(t, "endpoints") {
				s.Endpoints.Addrs = append(s.Endpoints.Addrs, netip.MustParseAddr(a))
			}
			s.Endpoints.Ports = pick(t, "of them", nil, []store.SlicePort{{Protocol: "TCP", Port: 80}}, []store.SlicePort{{Protocol: "TCP", Port: 8080}, {Protocol: "UDP", Port: 53}})
		}
		key = store.EndpointSliceKey(ns, fmt.Sprintf("e%d", n))
		return store.Object{Key: key, Value: s, Revision: 1}
	case 0:
		key.Kind, key.Namespace = store.KindNetworkPolicy, ns
		v = &v3.NetworkPolicy{Spec: v3.NetworkPolicySpec{
			Tier: tierName, Order: drawOrder(t), Selector: drawSelector(t, 1), Types: drawTypes(t), Ingress: drawRules(t), Egress: drawRules(t),
			ServiceAccountSelector: pick(t, "accounts", "", "", "role == 'x'"),
		}}
	case 1:
		key.Kind = store.KindGlobalNetworkPolicy
		s := v3.GlobalNetworkPolicySpec{
			Tier: tierName, Order: drawOrder(t), Selector: drawSelector(t, 1), Types: drawTypes(t), Ingress: drawRules(t), Egress: drawRules(t),
			NamespaceSelector: pick(t, "namespaces", "", "", "env == 'x'", "all()"), ApplyOnForward: maybe(t, "forward"),
		}
		switch pick(t, "hook", 0, 0, 0, 1, 2) {
		case 1:
			s.DoNotTrack, s.ApplyOnForward = true, true
		case 2:
			s.PreDNAT, s.ApplyOnForward, s.Egress, s.Types = true, true, nil, []v3.PolicyType{"Ingress"}
		}
		v = &v3.GlobalNetworkPolicy{Spec: s}
	case 2:
		key.Kind, key.Name = store.KindTier, pick(t, "tier", "t1", "t2", "default")
		v = &v3.Tier{Spec: v3.TierSpec{Order: drawOrder(t), DefaultAction: pick(t, "end", nil, new(v3.Deny), new(v3.Pass))}}
	case 3:
		key.Kind, key.Name = store.KindProfile, pick(t, "profile", "kns.ns1", "kns.ns2", "ksa.ns1.sa1", "extra")
		lends := map[string]string{"pcns.env": pick(t, "env", "x", "y"), "pcns.projectcalico.org/name": ns, "a": pick(t, "a", "x", "y")}
		if strings.HasPrefix(key.Name, "ksa") {
			lends = map[string]string{"pcsa.role": pick(t, "role", "x", "y")}
		}
		v = &v3.Profile{Spec: v3.ProfileSpec{LabelsToApply: lends, Ingress: drawRules(t), Egress: drawRules(t)}}
	case 4:
		key.Kind, key.Name = store.KindHostEndpoint, fmt.Sprintf("h%d", n)
		v = &v3.HostEndpoint{Spec: v3.HostEndpointSpec{
			Node: pick(t, "node", "n1", "n1", "n2"), InterfaceName: pick(t, "interface", "eth0", "eth1", "*", ""),
			ExpectedIPs: []string{pick(t, "address", "192.0.2.1", "198.51.100.1", "10.0.0.4")},
			Profiles:    pick(t, "profiles", nil, []string{"extra"}, []string{"projectcalico-default-allow"}, []string{"extra", "projectcalico-default-allow"}),
			Ports:       []v3.EndpointPort{{Name: "http", Protocol: numorstring.ProtocolFromString("TCP"), Port: 80}, {Name: "dns", Protocol: numorstring.ProtocolFromString("UDP"), Port: 53}},
		}}
	case 5:
		w := drawWorkload(t, ns, n)
		key = store.Key{Kind: store.KindWorkloadEndpoint, Namespace: ns, Name: fmt.Sprintf("w%d", n)}
		v = w
	case 6:
		key.Kind, key.Namespace, key.Name = store.KindNetworkSet, ns, fmt.Sprintf("s%d", n)
		v = &v3.NetworkSet{Spec: v3.NetworkSetSpec{Nets: drawNets(t)}}
	case 7:
		key.Kind, key.Name = store.KindGlobalNetworkSet, fmt.Sprintf("s%d", n)
		v = &v3.GlobalNetworkSet{Spec: v3.GlobalNetworkSetSpec{Nets: drawNets(t)}}
	case 8:
		key.Kind, key.Name = store.KindFelixConfiguration, pick(t, "configuration", "default", "node.n1")
		s := v3.FelixConfigurationSpec{
			DefaultEndpointToHostAction: pick(t, "to host", "", "Drop", "accept", "Return"), WorkloadSourceSpoofing: pick(t, "spoofing", "", "Any", "Disabled"),
			NATOutgoingExclusions:         pick(t, "exclusions", nil, new(v3.NATOutgoingExclusionsIPPoolsAndHostIPs)),
			VXLANPort:                     pick(t, "vxlan port", nil, new(4789), new(4790)),
			AllowIPIPPacketsFromWorkloads: pick(t, "ipip", nil, new(true), new(false)), AllowVXLANPacketsFromWorkloads: pick(t, "vxlan", nil, nil, new(true)),
		}
		if maybe(t, "failsafe") {
			s.FailsafeInboundHostPorts = &[]v3.ProtoPort{{Protocol: "tcp", Port: 80, Net: "10.0.0.0/30"}}
		}
		v = &v3.FelixConfiguration{Spec: s}
	case 9:
		key.Kind = store.KindStagedGlobalNetworkPolicy
		v = &v3.StagedGlobalNetworkPolicy{Spec: v3.StagedGlobalNetworkPolicySpec{
			Tier: tierName, Order: drawOrder(t), Selector: drawSelector(t, 1), Types: drawTypes(t), Ingress: drawRules(t),
			StagedAction: pick(t, "staged", v3.StagedActionSet, v3.StagedActionDelete),
		}}
	case 10:
		if maybe(t, "pool or node") {
			key.Kind, key.Name = store.KindIPPool, fmt.Sprintf("pool%d", n)
			v = &v3.IPPool{Spec: v3.IPPoolSpec{CIDR: pick(t, "cidr", "10.0.0.0/24", "10.1.0.0/16", "fd00::/64"), NATOutgoing: maybe(t, "nat")}}
			switch pick(t, "tunnel", "", "", "vxlan", "ipip") {
			case "vxlan":
				store.SetEncapsulation(v.(*v3.IPPool), store.VXLANCrossSubnet)
			case "ipip":
				store.SetEncapsulation(v.(*v3.IPPool), store.IPIP)
			}
		} else {
			key.Kind, key.Name = store.KindNode, fmt.Sprintf("n%d", n)
			node := &store.Node{}
			node.Spec.BGP = &store.NodeBGPSpec{IPv4Address: fmt.Sprintf("192.0.2.%d/24", n)}
			meta.Annotations = map[string]string{
				store.AnnotationAccepts: pick(t, "accepts", "", "ipip,vxlan/4096/4789", "vxlan/4096/4790,vxlan6/4096/4791", "vxlan/77/53"),
				store.AnnotationUses:    pick(t, "uses", "", "vxlan/4096/4790"),
			}
			v = node
		}
	}
	m := store.Meta(v)
	*m = meta
	m.Name, m.Namespace = key.Name, key.Namespace
	return store.Object{Key: key, Value: v, Revision: 1}
}

func drawNets(t *rapid.T) []string {
	all := []string{"10.0.0.0/8", "10.0.0.0/30", "10.0.0.4", "10.0.0.1/32", "0.0.0.0/0", "203.0.113.0/24", "fd00::/64", "fd00::4/128", "::/0"}
	return rapid.SliceOfN(rapid.SampledFrom(all), 0, 4).Draw(t, "nets")
}

func drawWorkload(t *rapid.T, ns string, n int) *store.WorkloadEndpoint {
	addr := rapid.IntRange(1, 4).Draw(t, "address")
	w := &store.WorkloadEndpoint{Spec: store.WorkloadEndpointSpec{
		Orchestrator: "k8s", Node: pick(t, "node", "n1", "n1", "n2"), InterfaceName: pick(t, "interface", "cali1", "cali2", "cali3", "eth1"),
		IPNetworks: []string{fmt.Sprintf("10.0.0.%d/32", addr), fmt.Sprintf("fd00::%d/128", addr)},
		Profiles: pick(t, "profiles", nil, []string{"kns." + ns}, []string{"kns." + ns, "ksa.ns1.sa1", "extra"}, []string{"extra", "kns." + ns},
			[]string{"extra", "projectcalico-default-allow"}),

		ServiceAccountName:         pick(t, "account", "", "sa1", "sa2"),
		AllowSpoofedSourcePrefixes: pick(t, "spoof", nil, []string{"203.0.113.0/24"}),
	}}
	if maybe(t, "ports") {
		w.Spec.Ports = []store.WorkloadEndpointPort{
			{Name: "http", Protocol: numorstring.ProtocolFromString("TCP"), Port: pick(t, "http", uint16(80), 8080)},
			{Name: "dns", Protocol: numorstring.ProtocolFromString("UDP"), Port: 53},
		}
	}
	return w
}

// tweak changes a little of an object: what leaves most of what follows from
// it as it was.
func tweak(t *rapid.T, o store.Object) store.Object {
	if o.Key.Kind == store.KindEndpointSlice {
		return o
	}
	o.Value = store.Clone(o.Value)
	store.Meta(o.Value).Labels = drawLabels(t)
	switch v := o.Value.(type) {
	case *v3.NetworkPolicy:
		tweakPolicy(t, &v.Spec.Order, &v.Spec.Types, &v.Spec.Tier, v.Spec.Ingress)
	case *v3.GlobalNetworkPolicy:
		if !v.Spec.PreDNAT {
			tweakPolicy(t, &v.Spec.Order, &v.Spec.Types, &v.Spec.Tier, v.Spec.Ingress)
		}
		if !v.Spec.PreDNAT && !v.Spec.DoNotTrack {
			v.Spec.ApplyOnForward = maybe(t, "forward")
		}
	case *v3.Tier:
		v.Spec.DefaultAction = pick(t, "end", nil, new(v3.Deny), new(v3.Pass))
	case *v3.Profile:
		for k := range v.Spec.LabelsToApply {
			v.Spec.LabelsToApply[k] = pick(t, "lent", "x", "y")
		}
	case *v3.FelixConfiguration:
		v.Spec.WorkloadSourceSpoofing = pick(t, "spoofing", "Any", "Disabled")
	case *v3.NetworkSet:
		v.Spec.Nets = drawNets(t)
	}
	return o
}

func tweakPolicy(t *rapid.T, order **float64, types *[]v3.PolicyType, tier *string, ingress []v3.Rule) {
	switch pick(t, "what", 0, 1, 2, 3) {
	case 0:
		*order = drawOrder(t)
	case 1:
		*types = drawTypes(t)
	case 2:
		*tier = pick(t, "tier", "default", "t1", "t2")
	case 3:
		if len(ingress) > 0 {
			ingress[0] = drawRule(t)
		}
	}
}

func drawFlow(t *rapid.T) filter.Flow {
	interfaces := []string{"", "eth0", "eth1", "cali1", "cali2", "cali3", "calix", "lo"}
	f := filter.Flow{In: pick(t, "in", interfaces...), Out: pick(t, "out", interfaces...)}
	p := &f.Packet
	four := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "203.0.113.7", "192.0.2.1", "192.0.2.2"}
	six := []string{"fd00::1", "fd00::2", "fd00::3", "fd00::4", "2001:db8::7"}
	list := four
	if pick(t, "family", 4, 4, 6) == 6 {
		list = six
	}
	p.Src, p.Dst = netip.MustParseAddr(pick(t, "src", list...)), netip.MustParseAddr(pick(t, "dst", list...))
	p.Protocol = pick(t, "protocol", uint8(6), 6, 17, 1, 58, 47, 4, 41)
	switch p.Protocol {
	case 6, 17:
		p.SrcPort, p.DstPort = pick(t, "sport", uint16(40000), 53, 80), pick(t, "dport", uint16(80), 53, 8080, 22, 4789, 4790, 4791)
	case 1, 58:
		p.ICMPType, p.ICMPCode = pick(t, "type", uint8(8), 3), pick(t, "code", uint8(0), 4)
	}
	return f
}

// TestDifferential makes random worlds in random steps. After every step the
// ruleset that the deltas led to is the one that a fresh calculator makes of
// the state, and for random packets it says what the reference says.
func TestDifferential(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		auto := maybe(t, "automatic host endpoints")
		hostPorts := []filter.Tunnel{{Protocol: 6, Port: 8080}}
		tells := pick(t, "of Services is told", policy.AllServices, policy.AllServices, policy.BroughtServices, policy.NoServices)
		c, mirror := newMirror(policy.Config{AutoHostEndpoints: auto, HostPorts: hostPorts, Services: tells})
		state := make(map[store.Key]store.Object)
		interfaces := map[string][]netip.Addr{}
		for i := range rapid.IntRange(1, 8).Draw(t, "steps") {
			var b store.Batch
			n := rapid.IntRange(1, 5).Draw(t, "events")
			if i == 0 {
				n += 15 // enough for the rest to meet something
			}
			for range n {
				if len(state) > 0 && pick(t, "delete", 0, 0, 0, 1) == 1 {
					keys := sortedKeys(state)
					k := keys[rapid.IntRange(0, len(keys)-1).Draw(t, "which")]
					delete(state, k)
					b.Events = append(b.Events, gone(k))
					continue
				}
				o := drawObject(t)
				if len(state) > 0 && maybe(t, "tweak") {
					keys := sortedKeys(state)
					o = tweak(t, state[keys[rapid.IntRange(0, len(keys)-1).Draw(t, "which")]])
				}
				state[o.Key] = o
				b.Events = append(b.Events, event(o))
			}
			if i == 1 {
				interfaces = hostInterfaces()
				c.SetInterfaces(interfaces)
			}
			b.Synced = true
			c.Update(b)
			step(t, c, mirror)

			objects := make([]store.Object, 0, len(state))
			for _, k := range sortedKeys(state) {
				objects = append(objects, state[k])
			}
			fresh, freshMirror := newMirror(policy.Config{AutoHostEndpoints: auto, HostPorts: hostPorts, Services: tells})
			fresh.SetInterfaces(interfaces)
			fresh.Update(store.Batch{Events: events(rapid.Permutation(objects).Draw(t, "order")), Synced: true})
			step(t, fresh, freshMirror)
			if !reflect.DeepEqual(freshMirror, mirror) {
				t.Fatalf("the steps do not lead where the state is (-fresh +steps):\n%s", diffRulesets(freshMirror, mirror))
			}

			if auto {
				continue // the reference knows nothing of them
			}
			w := world(objects)
			w.Interfaces, w.HostPorts = interfaces, hostPorts
			w.NoSlices, w.Brought = tells == policy.NoServices, tells == policy.BroughtServices
			for range 6 {
				f := drawFlow(t)
				want, got := w.Judge(f), mirror.Judge(f)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Fatalf("%+v (-reference +calculator):\n%s", f, diff)
				}
			}
		}
	})
}

func sortedKeys(m map[store.Key]store.Object) []store.Key {
	var keys []store.Key
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b store.Key) int { return strings.Compare(a.String(), b.String()) })
	return keys
}
