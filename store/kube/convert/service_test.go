package convert

import (
	"encoding/json"
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/store"
)

// TestServiceDetail: a Service with its endpoints, as the API writes them.
func TestServiceDetail(t *testing.T) {
	t.Parallel()
	got, err := ServiceDetail([]byte(`{"metadata":{"namespace":"shop","name":"web"},"spec":{"clusterIP":"10.96.0.7","clusterIPs":["10.96.0.7"],"selector":{"tier":"front","app":"web"},
"externalTrafficPolicy":"Local","externalIPs":["172.16.0.7"],"ports":[{"name":"http","port":80,"targetPort":"http","nodePort":30080},{"name":"dns","protocol":"UDP","port":53}]}}`), []json.RawMessage{
		[]byte(`{"addressType":"IPv4","ports":[{"name":"http","port":8080,"protocol":"TCP"},{"name":"any"}],"endpoints":[
{"addresses":["192.168.1.6"],"nodeName":"node1","conditions":{"ready":false,"serving":true,"terminating":true},"hints":{"forZones":[{"name":"a"}]}},
{"addresses":["192.168.1.5"],"nodeName":"node1","targetRef":{"kind":"Pod","namespace":"shop","name":"web-0"}},
{"addresses":["not one"]},{"addresses":[]}]}`),
		[]byte(`{"addressType":"IPv6","endpoints":[{"addresses":["fd00::5"],"conditions":{"ready":false}}]}`),
	})
	want := store.ServiceDetail{
		Key: store.ServiceKey("shop", "web"), Selector: "app=web,tier=front",
		Service: store.Service{ClusterIPs: []string{"10.96.0.7"}, ExternalIPs: []string{"172.16.0.7"}, ExternalLocal: true, NodePorts: []uint16{30080}},
		Ports:   []store.ServicePort{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080}, {Name: "dns", Protocol: "UDP", Port: 53}},
		Endpoints: []store.ServiceEndpoint{
			{Addr: netip.MustParseAddr("192.168.1.5"), Node: "node1", Pod: "shop/web-0", Ready: true, Serving: true, Ports: map[string]uint16{"http": 8080}},
			{Addr: netip.MustParseAddr("192.168.1.6"), Node: "node1", Serving: true, Terminating: true, Zones: []string{"a"}, Ports: map[string]uint16{"http": 8080}},
			{Addr: netip.MustParseAddr("fd00::5"), Ports: map[string]uint16{}},
		},
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, store.Key{})); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for name, raw := range map[string]string{"headless": `{"spec":{"clusterIP":"None"}}`, "of another name": `{"spec":{"type":"ExternalName","externalName":"www.example.com"}}`} {
		d, err := ServiceDetail([]byte(raw), nil)
		if err != nil || d.Headless == (d.ExternalName != "") {
			t.Errorf("%s: %+v, %v", name, d, err)
		}
	}
	for _, raw := range []string{`[]`, `{"spec":{"clusterIP":"10.96"}}`} {
		if _, err := ServiceDetail([]byte(raw), nil); !errors.Is(err, store.ErrDecode) {
			t.Errorf("%s: %v", raw, err)
		}
	}
	if _, err := ServiceDetail([]byte(`{}`), []json.RawMessage{[]byte(`7`)}); !errors.Is(err, store.ErrDecode) {
		t.Errorf("a slice that is none: %v", err)
	}
}
