package service

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// ends makes endpoints of a short form: NODE, with - in front one that terminates and
// serves yet, with ! one that is not ready, and after @ the zones of its hints.
func ends(words ...string) []store.ServiceEndpoint {
	var out []store.ServiceEndpoint
	for i, w := range words {
		w, zones, hinted := strings.Cut(w, "@")
		leaving, broken := strings.HasPrefix(w, "-"), strings.HasPrefix(w, "!")
		e := store.ServiceEndpoint{
			Addr: netip.AddrFrom4([4]byte{192, 168, 1, byte(i)}), Node: strings.TrimLeft(w, "-!"),
			Ready: !leaving && !broken, Serving: !broken, Terminating: leaving, Ports: map[string]uint16{"http": 8080},
		}
		if hinted {
			e.Zones = strings.Split(zones, ",")
		}
		out = append(out, e)
	}
	return out
}

func TestChoose(t *testing.T) {
	t.Parallel()
	const vip, outer = "10.96.0.7", "172.16.0.7"
	inside, outside := Client{Node: "node1", Zone: "a"}, Client{Node: "node1", Zone: "a", Outside: true}
	internal, external := store.Service{InternalLocal: true}, store.Service{ExternalLocal: true}
	for _, tt := range []struct {
		name   string
		set    store.Service
		to     string
		from   Client
		of     []store.ServiceEndpoint
		chosen string
		sees   bool // the client's address
	}{
		{"any that is ready", store.Service{}, vip, inside, ends("node1", "!node2", "node3"), "node1 node3", true},
		{"those that terminate are the last", store.Service{}, vip, inside, ends("-node1", "node2"), "node2", true},
		{"they serve while there is no other", store.Service{}, vip, inside, ends("-node1", "!node2"), "node1", true},
		{"none is ready", store.Service{}, vip, inside, ends("!node1"), "", true},
		{"those of the node", internal, vip, inside, ends("node1", "node2"), "node1", true},
		{"that terminate", internal, vip, inside, ends("-node1", "node2"), "node1", true},
		{"none on the node", internal, vip, inside, ends("node2"), "", true},
		{"from inside to an address of outside", store.Service{}, outer, inside, ends("node1", "node2"), "node1 node2", false},
		{"the external policy is for others", external, vip, inside, ends("node1", "node2"), "node1 node2", true},
		{"and counts outside alone", external, outer, inside, ends("node2"), "node2", true},
		{"from outside", external, outer, outside, ends("node1", "node2"), "node1", true},
		{"from outside to any", store.Service{}, outer, outside, ends("node1", "node2"), "node1 node2", false},
		{"from outside to a cluster address", store.Service{}, vip, outside, ends("node2"), "node2", false},
		{"the node is not known", internal, vip, Client{}, ends("", "node2"), "", true},
		{"hints", store.Service{}, vip, inside, ends("node1@a", "node2@b", "node3@a,b"), "node1 node3", true},
		{"hints that are not complete", store.Service{}, vip, inside, ends("node1@a", "node2"), "node1 node2", true},
		{"hints for other zones", store.Service{}, vip, inside, ends("node1@b", "node2@c"), "node1 node2", true},
		{"of one that is not ready", store.Service{}, vip, inside, ends("node1@b", "!node2@a"), "node1", true},
	} {
		tt.set.ClusterIPs, tt.set.ExternalIPs = []string{vip}, []string{outer}
		c := Choose(store.ServiceDetail{Service: tt.set, Endpoints: tt.of}, netip.MustParseAddr(tt.to), store.ServicePort{Name: "http"}, tt.from)
		var got []string
		for _, e := range c.Chosen() {
			got = append(got, e.Node)
		}
		if s := strings.Join(got, " "); s != tt.chosen || c.Source != tt.sees {
			t.Errorf("%s: %q, its address is seen: %v; want %q, %v: %+v", tt.name, s, c.Source, tt.chosen, tt.sees, c)
		}
	}
	d := store.ServiceDetail{Endpoints: append(ends("node1"), store.ServiceEndpoint{Addr: netip.MustParseAddr("fd00::1"), Ready: true}), Service: store.Service{ClusterIPs: []string{vip}}}
	if c := Choose(d, netip.MustParseAddr(vip), store.ServicePort{Name: "dns"}, inside); len(c.Of) != 1 || c.Of[0].Not != "it has no port dns" {
		t.Errorf("a port that no endpoint has: %+v", c)
	}
}

func TestPortOf(t *testing.T) {
	t.Parallel()
	d := func(ports ...string) store.ServiceDetail {
		out := store.ServiceDetail{Key: store.ServiceKey("shop", "web")}
		for _, p := range ports {
			var s store.ServicePort
			if _, err := fmt.Sscanf(p, "%d/%s", &s.Port, &s.Protocol); err != nil {
				t.Fatal(err)
			}
			out.Ports = append(out.Ports, s)
		}
		return out
	}
	for _, tt := range []struct {
		of       store.ServiceDetail
		protocol string
		port     uint16
		want     string
	}{
		{d("80/TCP"), "", 0, "80/TCP"},
		{d("80/TCP", "443/TCP"), "tcp", 443, "443/TCP"},
		{d("53/UDP", "53/TCP"), "", 53, "53/TCP"},
		{d("53/UDP", "53/TCP"), "udp", 0, "53/UDP"},
		{d("80/TCP", "443/TCP"), "", 0, "Service shop/web has the ports 80/tcp, 443/tcp: name one by --port"},
		{d("80/TCP"), "udp", 80, "Service shop/web has no such port: it has 80/tcp"},
		{d(), "", 80, "Service shop/web has no ports"},
	} {
		p, err := PortOf(tt.of, tt.protocol, tt.port)
		got := fmt.Sprintf("%d/%s", p.Port, p.Protocol)
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%v %s %d: %s, want %s", tt.of.Ports, tt.protocol, tt.port, got, tt.want)
		}
	}
}

// TestNodePortOf: which port of a Service a node's is.
func TestNodePortOf(t *testing.T) {
	t.Parallel()
	d := store.ServiceDetail{Ports: []store.ServicePort{{Name: "dns", Protocol: "UDP", Port: 53, NodePort: 30053}, {Name: "dns-tcp", Protocol: "TCP", Port: 53, NodePort: 30053}, {Name: "none", Protocol: "TCP", Port: 80}}}
	for _, tt := range []struct {
		protocol string
		port     uint16
		want     string
	}{{"", 30053, "dns-tcp"}, {"udp", 30053, "dns"}, {"sctp", 30053, ""}, {"tcp", 53, ""}, {"tcp", 0, ""}} {
		if p, ok := NodePortOf(d, tt.protocol, tt.port); p.Name != tt.want || ok != (tt.want != "") {
			t.Errorf("%s %d: %+v, %v; want %q", tt.protocol, tt.port, p, ok, tt.want)
		}
	}
}

// TestReach: how each node announces an address, or why it does not.
func TestReach(t *testing.T) {
	t.Parallel()
	key, slice := store.ServiceKey("default", "web"), store.EndpointSliceKey("default", "web-1")
	tab := NewTable("node1")
	tab.SetRanges(Ranges{External: prefixes("172.16.0.0/24"), LoadBalancer: prefixes("172.17.0.0/24"), Single: true})
	tab.SetService(key, &store.Service{ClusterIPs: []string{"10.96.0.7"}, ExternalIPs: []string{"172.16.0.7"}, LoadBalancerIPs: []string{"172.17.0.7"}, ExternalLocal: true})
	tab.SetSlice(slice, &store.EndpointSlice{Service: "web", Nodes: map[string]store.EndpointsHere{"node1": {Ready: true}, "node2": {Leaving: true}}})
	for _, tt := range []struct{ node, addr, want string }{
		{"node1", "172.17.0.7", "172.17.0.7/32"},
		{"node2", "172.17.0.7", "172.17.0.7/32 leaving"},
		{"node3", "172.17.0.7", "- none of its endpoints that serve is on this node, and its traffic policy is Local"},
		{"node3", "172.16.0.7", "172.16.0.0/24 none of its endpoints that serve is on this node, and its traffic policy is Local"},
		{"node1", "10.96.0.7", "- serviceClusterIPs of BGPConfiguration default has no range with 10.96.0.7"},
	} {
		r := tab.Reach(tt.node, key, netip.MustParseAddr(tt.addr))
		got := "-"
		if r.Prefix.IsValid() {
			got = r.Prefix.String()
		}
		if r.Leaving {
			got += " leaving"
		}
		if r.Why != "" {
			got += " " + r.Why
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s on %s (-want +got):\n%s", tt.addr, tt.node, diff)
		}
	}
	if r := tab.Reach("node1", store.ServiceKey("default", "other"), netip.MustParseAddr("10.96.0.7")); r.Why == "" {
		t.Errorf("of a Service that nobody told: %+v", r)
	}
}
