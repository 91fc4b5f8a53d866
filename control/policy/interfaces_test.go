package policy_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// TestHostInterfaces: a workload endpoint counts on a workload's interface only,
// whatever its record says, and a prefix of the host's interfaces makes none a
// workload's.
func TestHostInterfaces(t *testing.T) {
	t.Parallel()
	const long = "cali12345678901" // 15 bytes
	for _, tt := range []struct {
		name     string
		iface    string
		prefixes string
		links    []string // the host's by what they are
		address  string   // of the Node, on eth7 and cali9
		counts   bool
		problems []string // what they say, in order
	}{
		{name: "ADD's", iface: "cali1", counts: true},
		{name: "ADD's, although others are configured", iface: "cali1", prefixes: "tap", counts: true},
		{name: "configured", iface: "tap1", prefixes: "veth,tap", counts: true},
		{name: "not configured", iface: "tap1", problems: []string{"is not a workload's"}},
		{name: "uplink", iface: "eth0", problems: []string{"is the host's own"}},
		{name: "uplink of another name", iface: "net0", problems: []string{"is not a workload's"}},
		{name: "loopback", iface: "lo", problems: []string{"is the host's own"}},
		{name: "all", iface: "*", problems: []string{"is the host's own"}},
		{name: "tunnel", iface: "vxlan.calico", problems: []string{"is the host's own"}},
		{name: "further tunnel", iface: "vxlan.calico-3", problems: []string{"is the host's own"}},
		{name: "uplink with its prefix", iface: "eth0", prefixes: "eth", problems: []string{"interfacePrefix eth is not used", "is the host's own"}},
		{name: "loopback with its prefix", iface: "lo", prefixes: "l", problems: []string{"interfacePrefix l is not used", "is the host's own"}},
		{
			name: "device of a type that no workload has", iface: "net0", prefixes: "net,tap", links: []string{"net0"},
			problems: []string{"interfacePrefix net is not used: interface net0", "is the host's own"},
		},
		{
			name: "with the node's address", iface: "uplink7", prefixes: "uplink", address: "192.0.2.7",
			problems: []string{"interfacePrefix uplink is not used: interface uplink7", "is the host's own"},
		},
		{name: "ADD's name with the node's address", iface: "cali9", address: "192.0.2.9", problems: []string{"is the host's own"}},
		{name: "as long as a name can be", iface: long, counts: true},
		{name: "longer than a name can be", iface: long + "2", problems: []string{"at most 15 bytes"}},
		{name: "prefix that is longer than a name", iface: "cali1", prefixes: strings.Repeat("x", 65), counts: true, problems: []string{"longer than the 15 bytes"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, rules := newMirror(policy.Config{})
			links := make(map[string]bool)
			for _, l := range tt.links {
				links[l] = true
			}
			c.SetHostLinks(links)
			c.SetInterfaces(map[string][]netip.Addr{
				"uplink7": {netip.MustParseAddr("192.0.2.7")}, "cali9": {netip.MustParseAddr("192.0.2.9")},
			})
			n := &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: tt.address + "/24"}}}
			n.Name = thisNode
			w := &store.WorkloadEndpoint{Spec: store.WorkloadEndpointSpec{Node: thisNode, InterfaceName: tt.iface, IPNetworks: []string{"10.0.0.1/32"}}}
			objects := []store.Object{
				{Key: store.ResourceKey(store.KindNode, thisNode), Value: n},
				{Key: store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "ns1", Name: "w"}, Value: w},
			}
			if tt.prefixes != "" {
				objects = append(objects, felix("default", `{interfacePrefix: "`+tt.prefixes+`"}`))
			}
			c.Update(store.Batch{Events: events(objects), Synced: true})
			step(t, c, rules)
			if _, counts := rules.Endpoints[tt.iface]; counts != tt.counts || len(rules.Endpoints) > 1 {
				t.Errorf("endpoints %v, want %s: %t", rules.Endpoints, tt.iface, tt.counts)
			}
			for _, name := range []string{"eth0", "lo", "vxlan.calico", "net0"} {
				if slices.ContainsFunc(rules.Settings.WorkloadPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
					t.Errorf("%s is a workload's by %q", name, rules.Settings.WorkloadPrefixes)
				}
			}
			var reasons []string
			for _, p := range c.Problems() {
				reasons = append(reasons, p.Reason)
			}
			if !slices.EqualFunc(reasons, tt.problems, strings.Contains) {
				t.Errorf("problems (-want +got):\n%s", cmp.Diff(tt.problems, reasons))
			}
		})
	}
}

// TestUplinkComesLater: an endpoint stops counting when its interface turns out to
// be the host's own, and counts again when it is it no more.
func TestUplinkComesLater(t *testing.T) {
	t.Parallel()
	c, rules := newMirror(policy.Config{})
	w := &store.WorkloadEndpoint{Spec: store.WorkloadEndpointSpec{Node: thisNode, InterfaceName: "tap1", IPNetworks: []string{"10.0.0.1/32"}}}
	c.Update(store.Batch{Events: events([]store.Object{
		felix("default", `{interfacePrefix: "tap"}`),
		{Key: store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "ns1", Name: "w"}, Value: w},
	}), Synced: true})
	for _, hosts := range []bool{false, true, false} {
		c.SetHostLinks(map[string]bool{"tap1": hosts})
		if !hosts {
			c.SetHostLinks(nil)
		}
		step(t, c, rules)
		want := []string{"tap"}
		if hosts {
			want = []string{"cali"}
		}
		if _, counts := rules.Endpoints["tap1"]; counts == hosts || !slices.Equal(rules.Settings.WorkloadPrefixes, want) {
			t.Errorf("the host's %t: endpoints %v, prefixes %q", hosts, rules.Endpoints, rules.Settings.WorkloadPrefixes)
		}
	}
}

// TestVirtualLink: rules are made for IPVS while there is the device that kube-proxy has for it.
func TestVirtualLink(t *testing.T) {
	t.Parallel()
	c, rules := newMirror(policy.Config{})
	c.Update(store.Batch{Synced: true})
	for _, is := range []bool{false, true, false} {
		c.SetHostLinks(map[string]bool{"lo": true, "kube-ipvs0": is})
		step(t, c, rules)
		if rules.Settings.Virtual != is {
			t.Errorf("with the device %t: %t", is, rules.Settings.Virtual)
		}
	}
}

// TestLongSettings: text that the kernel does not take leaves in force what held
// without it.
func TestLongSettings(t *testing.T) {
	t.Parallel()
	c, rules := newMirror(policy.Config{})
	long := strings.Repeat("x", 65)
	c.Update(store.Batch{Events: events([]store.Object{
		felix("default", `{interfacePrefix: "tap", iptablesNATOutgoingInterfaceFilter: "eth+"}`),
		felix("node."+thisNode, `{interfacePrefix: "`+long+`", iptablesNATOutgoingInterfaceFilter: "`+long+`", defaultEndpointToHostAction: Return}`),
	}), Synced: true})
	step(t, c, rules)
	s := rules.Settings
	if !slices.Equal(s.WorkloadPrefixes, []string{"cali"}) || s.NAT.OutInterface != "eth+" || s.WorkloadToHost != filter.HostReturn {
		t.Errorf("prefixes %q, NAT to %q, to host %d; want cali, eth+, Return", s.WorkloadPrefixes, s.NAT.OutInterface, s.WorkloadToHost)
	}
	if n := len(c.Problems()); n != 2 {
		t.Errorf("%d problems, want 2: %v", n, c.Problems())
	}
}
