package operator

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// TestServiceFault: what is wrong before a packet is on its way to an endpoint.
func TestServiceFault(t *testing.T) {
	t.Parallel()
	end := func(node string, ready bool) store.ServiceEndpoint {
		return store.ServiceEndpoint{Addr: netip.MustParseAddr("192.168.1.5"), Node: node, Pod: "shop/web-0", Ready: ready, Serving: ready, Ports: map[string]uint16{"": 8080}}
	}
	announcers := func(prefix string) []bgp.Announcer {
		why := service.Reach{Why: "serviceExternalIPs of BGPConfiguration default has no range with 172.16.0.7"}
		if prefix != "" {
			why = service.Reach{Prefix: netip.MustParsePrefix(prefix)}
		}
		return []bgp.Announcer{{Node: "node2", Reach: why}, {Node: "node3", Reach: why}}
	}
	inside := location{node: "node1", name: "client", addrs: []netip.Addr{netip.MustParseAddr("192.168.9.9")}}
	outside := location{name: "outside", addrs: []netip.Addr{netip.MustParseAddr("198.51.100.7")}}
	for _, tt := range []struct {
		name       string
		set        store.Service
		selector   string
		from       location
		to         string
		port       string
		of         []store.ServiceEndpoint
		announcers []bgp.Announcer
		check      string // empty: there is nothing wrong
		says       string
	}{
		{name: "well", from: inside, of: []store.ServiceEndpoint{end("node3", true)}},
		{name: "no pods", selector: "app=web", from: inside, check: "no-endpoints", says: "no pod with an address has the labels app=web; kubectl get pods -n shop -l app=web -o wide"},
		{name: "no selector", from: inside, check: "no-endpoints", says: "it has no selector, and no EndpointSlice exists for it; kubectl get endpointslices -n shop -l kubernetes.io/service-name=web"},
		{name: "not ready", selector: "app=web", from: inside, of: []store.ServiceEndpoint{end("node3", false)}, check: "no-endpoints", says: "none of the 1 endpoints of Service shop/web is ready: 192.168.1.5 (shop/web-0)"},
		{name: "not here", set: store.Service{InternalLocal: true}, from: inside, of: []store.ServiceEndpoint{end("node3", true)}, check: "no-local-endpoints", says: `no ready endpoint on node1, and internalTrafficPolicy is Local; the Service proxy on that node drops packets to it; kubectl patch service -n shop web -p '{"spec":{"internalTrafficPolicy":"Cluster"}}'`},
		{name: "a port of no container", from: inside, port: "http", of: []store.ServiceEndpoint{end("node3", true)}, check: "no-port", says: `has the port "http"`},
		{name: "of the other family", from: inside, of: []store.ServiceEndpoint{{Addr: netip.MustParseAddr("fd00::5"), Ready: true}}, check: "no-endpoints", says: "no endpoint of the family of 10.96.0.7"},
		{name: "announced", from: outside, to: "172.16.0.7", of: []store.ServiceEndpoint{end("node3", true)}, announcers: announcers("172.16.0.0/24")},
		{name: "not announced", from: outside, to: "172.16.0.7", of: []store.ServiceEndpoint{end("node3", true)}, announcers: announcers(""), check: "not-announced", says: "no node announces 172.16.0.7 of Service shop/web: serviceExternalIPs of BGPConfiguration default has no range with 172.16.0.7 (node2, node3)"},
		{name: "by a range alone, where nobody serves", set: store.Service{ExternalLocal: true}, from: outside, to: "172.16.0.7", of: []store.ServiceEndpoint{end("node4", true)}, announcers: announcers("172.16.0.0/24"), check: "no-local-endpoints", says: `"externalTrafficPolicy":"Cluster"`},
	} {
		tt.set.ClusterIPs, tt.set.ExternalIPs = []string{"10.96.0.7"}, []string{"172.16.0.7"}
		w := &toService{
			detail: store.ServiceDetail{Key: store.ServiceKey("shop", "web"), Service: tt.set, Selector: tt.selector, Ports: []store.ServicePort{{Name: tt.port, Protocol: "TCP", Port: 80}}, Endpoints: tt.of},
			from:   tt.from, announcers: tt.announcers,
		}
		if tt.to != "" {
			w.addr = netip.MustParseAddr(tt.to)
		}
		if err := w.complete(&apiv1.TraceRequest{}); err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		client := service.Client{Node: tt.from.node, Outside: tt.from.node == ""}
		var choice service.Choice
		entries := w.entries(client)
		for _, client.Node = range entries {
			if choice = service.Choose(w.detail, w.addrOrFamily(), w.port, client); len(choice.Chosen()) > 0 {
				break
			}
		}
		f := w.fault(client, choice, len(entries) > 0)
		switch {
		case f == nil && tt.check != "":
			t.Errorf("%s: nothing is found, want %s", tt.name, tt.check)
		case f != nil && (f.Check != tt.check || f.Cure == "" || !strings.Contains(f.What+"; "+f.Cause+"; "+f.Cure, tt.says)):
			t.Errorf("%s: %s: %s; %s; %s; want %s: %s", tt.name, f.Check, f.What, f.Cause, f.Cure, tt.check, tt.says)
		}
	}
}

// TestEntries: what comes from outside comes in by the longest prefix, and by nodes that are
// about to go only after the others.
func TestEntries(t *testing.T) {
	t.Parallel()
	one, all := netip.MustParsePrefix("172.16.0.7/32"), netip.MustParsePrefix("172.16.0.0/24")
	w := &toService{announcers: []bgp.Announcer{
		{Node: "node1", Reach: service.Reach{Prefix: one, Leaving: true}}, {Node: "node2", Reach: service.Reach{Prefix: all}}, {Node: "node3", Reach: service.Reach{Prefix: one}}, {Node: "node4"},
	}}
	if got := w.entries(service.Client{Outside: true}); !slices.Equal(got, []string{"node3", "node1"}) {
		t.Errorf("it comes in by %v", got)
	}
	w = &toService{unknown: []string{"who announces it"}, detail: store.ServiceDetail{Endpoints: []store.ServiceEndpoint{{Node: "node5"}}}}
	if got := w.entries(service.Client{Outside: true}); !slices.Equal(got, []string{"node5"}) {
		t.Errorf("while nobody says: %v", got)
	}
}

// TestDestination: a word is a Service where no workload and no node has that name.
func TestDestination(t *testing.T) {
	t.Parallel()
	find := func(word string) (location, error) {
		switch {
		case word == "shop/pod":
			return location{node: "node1", name: word}, nil
		case word == "198.51.100.7":
			return location{name: "outside"}, nil
		}
		return location{}, fmt.Errorf("%q is no endpoint", word)
	}
	read := func(_ context.Context, key store.Key) (store.ServiceDetail, error) {
		if key.Name == "gone" {
			return store.ServiceDetail{}, store.ErrNotFound
		}
		return store.ServiceDetail{Key: key}, nil
	}
	for _, tt := range []struct {
		word    string
		none    bool   // the datastore has no Services
		service string // empty: an end
		fails   string
	}{
		{word: "shop/pod"},
		{word: "shop/web", service: "shop/web"},
		{word: "web", service: "default/web"},
		{word: "svc/shop/pod", service: "shop/pod"},
		{word: "service/web", service: "default/web"},
		{word: "shop/gone", fails: `there is no Service shop/gone, and "shop/gone" is neither a workload nor a node`},
		{word: "shop/pod", none: true},
		{word: "198.51.100.7", none: true},
		{word: "shop/web", none: true, fails: `"shop/web" is no endpoint. Kubernetes Services and EndpointSlices are known only with datastore.kind kubernetes`},
		{word: "service/shop/web", none: true, fails: "service/shop/web: Kubernetes Services"},
	} {
		s := &Server{cfg: Config{Service: read}}
		if tt.none {
			s.cfg.Service = nil
		}
		w, to, err := s.destination(t.Context(), find, tt.word)
		switch {
		case tt.fails != "":
			if err == nil || !strings.Contains(err.Error(), tt.fails) {
				t.Errorf("%s: %v, want %s", tt.word, err, tt.fails)
			}
		case err != nil:
			t.Errorf("%s: %v", tt.word, err)
		case (w == nil) != (tt.service == "") || w != nil && w.detail.Key.Namespace+"/"+w.detail.Key.Name != tt.service:
			t.Errorf("%s: %+v, %+v; want Service %q", tt.word, w, to, tt.service)
		}
	}
}
