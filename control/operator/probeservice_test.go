package operator

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// TestPrepareServiceProbe: a packet to a Service is sent from this host alone, and its sender's host, the proxy's and those of
// the endpoints watch, as many as may.
func TestPrepareServiceProbe(t *testing.T) {
	t.Parallel()
	host := func(n int) location {
		return location{node: fmt.Sprintf("node%d", n), name: fmt.Sprintf("node%d", n), addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, 0, byte(n)})}}
	}
	find := func(word string) (location, error) {
		a := netip.MustParseAddr(word)
		n := int(a.As4()[3])
		return location{node: fmt.Sprintf("node%d", n), iface: fmt.Sprintf("cali%d", n), name: word, addrs: []netip.Addr{a}}, nil
	}
	choice := func(nodes ...int) (out service.Choice) {
		for _, n := range nodes {
			out.Of = append(out.Of, service.Candidate{Port: 8080, ServiceEndpoint: store.ServiceEndpoint{Addr: netip.AddrFrom4([4]byte{192, 168, 0, byte(n)}), Pod: fmt.Sprintf("shop/web-%d", n)}})
		}
		return out
	}
	var many []int
	for n := range 30 {
		many = append(many, n+1)
	}
	not := choice(2, 3)
	not.Of[1].Not = "it is not ready"
	for _, tt := range []struct {
		name   string
		from   int
		node   int // whose port it is for; 0: the Service's address
		choice service.Choice
		to     string
		hosts  []string
		says   string // of what is not watched, or the error
	}{
		{name: "to the Service's address", from: 1, choice: choice(2, 3), to: "10.96.0.7:80", hosts: []string{"node1", "node2", "node3"}},
		{name: "an endpoint that may not be chosen", from: 1, choice: not, to: "10.96.0.7:80", hosts: []string{"node1", "node2"}},
		{name: "an endpoint here", from: 1, choice: choice(1), to: "10.96.0.7:80", hosts: []string{"node1"}},
		{name: "to a port of a node", from: 1, node: 4, choice: choice(2, 4), to: "10.1.0.4:30080", hosts: []string{"node1", "node4", "node2"}},
		{name: "many endpoints", from: 1, choice: choice(many...), to: "10.96.0.7:80", hosts: []string{"node1", "node2"}, says: "node17, node18, node19, node20, node21 and 9 more did not watch for the packet: at most 16 hosts"},
		{name: "from elsewhere", from: 2, choice: choice(3), says: "node2 is not on this host, and a host sends probes only for commands run on itself: run the command on node2"},
	} {
		s := &Server{cfg: Config{Node: "node1"}}
		w := &toService{addr: netip.MustParseAddr("10.96.0.7"), port: store.ServicePort{Protocol: "TCP", Port: 80, NodePort: 30080}, from: host(tt.from)}
		proxy := w.from.node
		if tt.node != 0 {
			w.node, w.addr, proxy = host(tt.node), host(tt.node).addrs[0], host(tt.node).node
		}
		p, err := s.prepareServiceProbe(&apiv1.TraceRequest{}, find, w, proxy, tt.choice)
		if err != nil {
			if tt.to != "" || status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s: %v", tt.name, err)
			}
			continue
		}
		var hosts []string
		for _, h := range p.facts.Hosts {
			hosts = append(hosts, h.Node)
		}
		if p.facts.To.String() != tt.to || p.facts.Proxy != proxy || !slices.Equal(hosts[:len(tt.hosts)], tt.hosts) || len(hosts) > watchHosts || !strings.Contains(strings.Join(p.facts.Unknown, "\n"), tt.says) {
			t.Errorf("%s: %+v, watched by %q", tt.name, p.facts, hosts)
		}
		if n := len(p.facts.Endpoints); n != len(tt.choice.Chosen()) || p.facts.Endpoints[0].Device == "" || !strings.HasPrefix(p.facts.Endpoints[0].Name, "shop/web-") {
			t.Errorf("%s: endpoints %+v", tt.name, p.facts.Endpoints)
		}
		if p.packet.Mark == 0 || p.packet.SrcPort == 0 || !slices.Contains(p.ports, 8080) || !slices.Contains(p.ports, p.packet.DstPort) {
			t.Errorf("%s: packet %+v, ports %v", tt.name, p.packet, p.ports)
		}
	}
}

// TestWatcher: what another host asks to watch for is looked at first.
func TestWatcher(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		req   *apiv1.WatchRequest
		fails string
	}{
		{"a connection", &apiv1.WatchRequest{Source: "10.0.0.1", Destination: "10.0.0.2", Protocol: unix.IPPROTO_TCP}, ""},
		{"a mark", &apiv1.WatchRequest{Protocol: unix.IPPROTO_TCP, Mark: 7}, ""},
		{"nothing", &apiv1.WatchRequest{Protocol: unix.IPPROTO_TCP}, "want two addresses of one family"},
		{"two families", &apiv1.WatchRequest{Source: "10.0.0.1", Destination: "fd00::1"}, "want two addresses of one family"},
	} {
		_, err := watcher(tt.req)
		if (err == nil) != (tt.fails == "") || err != nil && !strings.Contains(err.Error(), tt.fails) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.fails)
		}
	}
}
