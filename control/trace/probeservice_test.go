package trace

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// passed makes sightings of a host, each as "[back] in|out DEVICE FROM TO".
func passed(node, device string, at ...string) ProbeEnd {
	e := ProbeEnd{Node: node, Device: device}
	for _, a := range at {
		s := seenAt(node, a)[0]
		f := strings.Fields(a)
		s.Source, s.Destination = f[len(f)-2], f[len(f)-1]
		e.Seen = append(e.Seen, s)
	}
	return e
}

// TestAddServiceProbe: what hosts saw of a packet whose addresses the proxy of Services translates.
func TestAddServiceProbe(t *testing.T) {
	t.Parallel()
	const tcp, udp = 6, 17
	const pod, vip, end, masqueraded = "192.168.1.2", "10.96.0.7:80", "192.168.3.5:8080", "10.1.0.2"
	endpoints := []ProbeEndpoint{
		{Addr: netip.MustParseAddrPort("192.168.9.9:8080"), Node: "node9", Device: "cali9", Name: "shop/web-9"},
		{Addr: netip.MustParseAddrPort(end), Node: "node3", Device: "cali3", Name: "shop/web-3"},
	}
	nodePort := "10.1.0.12:30080"
	own := []ProbeEndpoint{{Addr: netip.MustParseAddrPort("10.1.0.12:8080"), Node: "node2", Name: "node2"}}
	here := passed("node1", "cali1", "in cali1 "+pod+" "+vip, "out vxlan "+pod+" "+end, "back in vxlan "+end+" "+pod, "back out cali1 "+vip+" "+pod)
	sent := passed("node1", "cali1", "in cali1 "+pod+" "+vip, "out vxlan "+pod+" "+end)
	there := passed("node3", "", "in vxlan "+pod+" "+end, "out cali3 "+pod+" "+end, "back in cali3 "+end+" "+pod, "back out vxlan "+end+" "+pod)
	toNode := passed("node1", "cali1", "in cali1 "+pod+" "+nodePort, "out eth0 10.1.0.11 "+nodePort)
	for _, tt := range []struct {
		name      string
		protocol  uint8
		to, proxy string
		hosts     []ProbeEnd
		of        []ProbeEndpoint
		err       error
		unknown   string
		before    string // verdict
		verdict   string
		check     string // "CHECK NODE" of the fault
		result    string
	}{
		{name: "answered", hosts: []ProbeEnd{here, there}, verdict: Whole, result: "it arrived at 192.168.3.5:8080 (shop/web-3), and its answer came back"},
		{name: "lost at the endpoint's host", hosts: []ProbeEnd{sent, passed("node3", "", "in vxlan "+pod+" "+end)}, verdict: Broken, check: "probe node3", result: "on its way to 192.168.3.5:8080 (shop/web-3) it was seen last on node3, coming in by vxlan"},
		{name: "lost before it was translated", hosts: []ProbeEnd{passed("node1", "cali1", "in cali1 "+pod+" "+vip), {Node: "node3"}}, verdict: Broken, check: "probe node1", result: "it was seen last on node1, coming in by cali1"},
		{name: "its answer is lost", hosts: []ProbeEnd{sent, there}, verdict: Broken, check: "probe node3", result: "it arrived at 192.168.3.5:8080 (shop/web-3), and its answer was seen last on node3, leaving by vxlan"},
		{name: "a datagram", protocol: udp, hosts: []ProbeEnd{sent, passed("node3", "", "in vxlan "+pod+" "+end, "out cali3 "+pod+" "+end)}, verdict: Whole, result: "it arrived at 192.168.3.5:8080 (shop/web-3); an answer to it is up to the program, and none was seen"},
		{name: "not translated", hosts: []ProbeEnd{passed("node1", "cali1", "in cali1 "+pod+" "+vip, "out eth0 "+pod+" "+vip), {Node: "node3"}}, verdict: Broken, check: "not-translated node1", result: "nothing on node1 translates 10.96.0.7:80 to an endpoint, and it was seen last on node1, leaving by eth0"},
		{name: "nowhere", hosts: []ProbeEnd{{Node: "node1", Device: "cali1"}, {Node: "node3"}}, verdict: Broken, check: "probe node1", result: "it was not seen at all: it did not leave where it was sent"},
		{name: "not sent", hosts: []ProbeEnd{{Node: "node1", Device: "cali1"}}, err: errors.New("no route"), verdict: Whole, result: "not sent: no route"},
		{name: "somebody did not watch", hosts: []ProbeEnd{sent, {Node: "node3", Err: errors.New("late")}}, verdict: Whole, result: "on its way to 192.168.3.5:8080 (shop/web-3) it was seen last on node1, leaving by vxlan"},
		{name: "too many to watch", hosts: []ProbeEnd{sent}, unknown: "node3 did not watch", verdict: Whole, result: "on its way to 192.168.3.5:8080 (shop/web-3) it was seen last on node1, leaving by vxlan"},
		{name: "something else is wrong", hosts: []ProbeEnd{sent}, before: Broken, verdict: Broken, result: "on its way to 192.168.3.5:8080 (shop/web-3) it was seen last on node1, leaving by vxlan"},
		{
			name: "a port of another node", to: nodePort, proxy: "node2", verdict: Whole, result: "it arrived at 192.168.3.5:8080 (shop/web-3), and its answer came back",
			hosts: []ProbeEnd{
				passed("node1", "cali1", "in cali1 "+pod+" "+nodePort, "out eth0 10.1.0.11 "+nodePort, "back in eth0 "+nodePort+" 10.1.0.11", "back out cali1 "+nodePort+" "+pod),
				passed("node2", "", "in eth0 10.1.0.11 "+nodePort, "out vxlan "+masqueraded+" "+end, "back in vxlan "+end+" "+masqueraded, "back out eth0 "+nodePort+" 10.1.0.11"),
				passed("node3", "", "in vxlan "+masqueraded+" "+end, "out cali3 "+masqueraded+" "+end, "back in cali3 "+end+" "+masqueraded, "back out vxlan "+end+" "+masqueraded),
			},
		},
		{
			name: "the node itself refuses it", to: nodePort, proxy: "node2", verdict: Broken, check: "not-translated node2", result: "node2 answered it by itself: nothing there translates 10.1.0.12:30080 to an endpoint",
			hosts: []ProbeEnd{
				passed("node1", "cali1", "in cali1 "+pod+" "+nodePort, "out eth0 10.1.0.11 "+nodePort, "back in eth0 "+nodePort+" 10.1.0.11", "back out cali1 "+nodePort+" "+pod),
				passed("node2", "", "in eth0 10.1.0.11 "+nodePort, "back out eth0 "+nodePort+" 10.1.0.11"),
			},
		},
		{
			name: "the node itself is an endpoint", to: nodePort, proxy: "node2", of: own, verdict: Whole, result: "it arrived, and its answer came back",
			hosts: []ProbeEnd{
				passed("node1", "cali1", "in cali1 "+pod+" "+nodePort, "out eth0 10.1.0.11 "+nodePort, "back in eth0 "+nodePort+" 10.1.0.11", "back out cali1 "+nodePort+" "+pod),
				passed("node2", "", "in eth0 10.1.0.11 "+nodePort, "back out eth0 "+nodePort+" 10.1.0.11"),
			},
		},
		{name: "a datagram to a node that is an endpoint", protocol: udp, to: nodePort, proxy: "node2", of: own, hosts: []ProbeEnd{toNode, passed("node2", "", "in eth0 10.1.0.11 "+nodePort)}, verdict: Whole, result: "it arrived; an answer to it is up to the program, and none was seen"},
		{name: "lost on its way to the node", to: nodePort, proxy: "node2", hosts: []ProbeEnd{toNode, {Node: "node2"}}, verdict: Broken, check: "probe node1", result: "it was seen last on node1, leaving by eth0"},
	} {
		f := ServiceProbeFacts{Protocol: tcp, Err: tt.err, To: netip.MustParseAddrPort(vip), Proxy: "node1", Hosts: tt.hosts, Endpoints: endpoints}
		if tt.protocol != 0 {
			f.Protocol = tt.protocol
		}
		if tt.to != "" {
			f.To, f.Proxy = netip.MustParseAddrPort(tt.to), tt.proxy
		}
		if tt.of != nil {
			f.Endpoints = tt.of
		}
		if tt.unknown != "" {
			f.Unknown = []string{tt.unknown}
		}
		out := &apiv1.TraceResponse{Verdict: Whole}
		if tt.before != "" {
			out.Verdict = tt.before
		}
		AddServiceProbe(out, f)
		check := ""
		if out.GetFault() != nil {
			check = out.GetFault().GetCheck() + " " + out.GetFault().GetNode()
		}
		if out.GetVerdict() != tt.verdict || check != tt.check || out.GetProbe().GetResult() != tt.result {
			t.Errorf("%s: %s, %q, %q; want %s, %q, %q", tt.name, out.GetVerdict(), check, out.GetProbe().GetResult(), tt.verdict, tt.check, tt.result)
		}
		if out.GetFault() != nil && out.GetFault().GetCure() == "" {
			t.Errorf("%s: no cure: %v", tt.name, out.GetFault())
		}
	}
}
