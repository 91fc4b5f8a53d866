package operator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// TestWithPort: a port may stand behind what a packet is for.
func TestWithPort(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		to   string
		port uint32
		want string // TO PORT, or what the error says
	}{
		{"node2", 80, "node2 80"},
		{"node2:30080", 0, "node2 30080"},
		{"node2:30080", 30080, "node2 30080"},
		{"10.1.0.12:30080", 0, "10.1.0.12 30080"},
		{"[fd00::12]:30080", 0, "fd00::12 30080"},
		{"fd00::12", 0, "fd00::12 0"},
		{"service/default/web:80", 0, "service/default/web 80"},
		{"node2:30080", 80, "--port says 80"},
		{"node2:http", 0, "want a port from 1 to 65535"},
		{"node2:0", 0, "want a port"},
		{"node2:70000", 0, "want a port"},
	} {
		req := &apiv1.TraceRequest{To: tt.to, Port: tt.port}
		got, err := withPort(req)
		text := fmt.Sprintf("%s %d", got.GetTo(), got.GetPort())
		if err != nil {
			text = err.Error()
		}
		if !strings.Contains(text, tt.want) || req.GetTo() != tt.to {
			t.Errorf("%s, --port %d: %q, want %q", tt.to, tt.port, text, tt.want)
		}
	}
}

// services is a datastore that has one Service.
type services struct {
	store.Store
	err error
}

func (s services) List(context.Context, store.Kind, string) ([]store.Object, store.Revision, error) {
	return []store.Object{{Key: store.ServiceKey("shop", "web"), Value: &store.Service{NodePorts: []uint16{30080}}}}, 0, s.err
}

// TestAtNodePort: a packet to a port of a node is for the Service that has it.
func TestAtNodePort(t *testing.T) {
	t.Parallel()
	web := store.ServiceDetail{
		Key: store.ServiceKey("shop", "web"), Service: store.Service{ClusterIPs: []string{"10.96.0.7"}, NodePorts: []uint16{30080}, ExternalLocal: true},
		Ports:     []store.ServicePort{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080}},
		Endpoints: []store.ServiceEndpoint{{Addr: netip.MustParseAddr("192.168.1.5"), Node: "node1", Ready: true, Serving: true, Ports: map[string]uint16{"http": 8080}}},
	}
	node := func(name, addr string) location {
		return location{node: name, name: name, addrs: []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr(addr)}}
	}
	pod, outside := node("node2", "192.168.2.5"), location{name: "outside", addrs: []netip.Addr{netip.MustParseAddr("198.51.100.7")}}
	pod.iface = "cali1"
	for _, tt := range []struct {
		name     string
		from, to location
		protocol string
		port     uint32
		err      error
		none     bool   // it is for the node itself
		outside  bool   // the proxy of the node takes it as one from outside
		chosen   int    // endpoints
		fault    string // its check
	}{
		{name: "from outside", from: outside, to: node("node1", "10.1.0.11"), port: 30080, outside: true, chosen: 1},
		{name: "to a node without endpoints", from: outside, to: node("node2", "10.1.0.12"), port: 30080, outside: true, fault: "no-local-endpoints"},
		{name: "from a pod to another node", from: pod, to: node("node1", "10.1.0.11"), port: 30080, outside: true, chosen: 1},
		{name: "from a pod to its own node", from: pod, to: node("node2", "10.1.0.12"), protocol: "tcp", port: 30080, chosen: 1},
		{name: "another port", from: outside, to: node("node1", "10.1.0.11"), port: 30081, none: true},
		{name: "another protocol", from: outside, to: node("node1", "10.1.0.11"), protocol: "udp", port: 30080, none: true},
		{name: "a pod", from: outside, to: pod, port: 30080, none: true},
		{name: "the API is away", from: outside, to: node("node1", "10.1.0.11"), port: 30080, none: true, err: errors.New("away")},
	} {
		s := &Server{cfg: Config{Store: services{err: tt.err}, Service: func(context.Context, store.Key) (store.ServiceDetail, error) { return web, nil }}}
		req := &apiv1.TraceRequest{Protocol: tt.protocol, Port: tt.port}
		w, err := s.atNodePort(t.Context(), req, tt.to)
		if !errors.Is(err, tt.err) || (w == nil) != tt.none {
			t.Errorf("%s: %+v, %v; want none: %v, error %v", tt.name, w, err, tt.none, tt.err)
		}
		if w == nil {
			continue
		}
		w.from = tt.from
		if err := w.complete(req); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		c := w.client()
		choice := service.Choose(w.detail, w.addr, w.port, c)
		fault := ""
		if f := w.fault(c, choice, true); f != nil {
			fault = f.Check
		}
		if c.Node != tt.to.node || c.Outside != tt.outside || len(choice.Chosen()) != tt.chosen || fault != tt.fault || w.addr != tt.to.addrs[1] {
			t.Errorf("%s: %+v of %s, fault %q, endpoints %+v", tt.name, c, w.addr, fault, choice)
		}
		if want := " port 30080 (node port of Service shop/web)"; !strings.HasSuffix(w.packet(), want) {
			t.Errorf("%s: %q does not end with %q", tt.name, w.packet(), want)
		}
	}
}
