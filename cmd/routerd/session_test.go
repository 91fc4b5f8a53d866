package main

import (
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

// session asks what changes would do to a connection of a client to this host. Values that
// are keys are deleted.
func (r *running) session(client, host string, changes ...any) string {
	r.t.Helper()
	stream, err := r.op.Session(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, v := range changes { // in parts
		c := &apiv1.BGPChange{}
		if key, ok := v.(store.Key); ok {
			c.Key = key.Path()
		} else {
			key, err := store.KeyOf(v)
			if err != nil {
				r.t.Fatal(err)
			}
			if c.Value, err = store.Encode(key, v, nil); err != nil {
				r.t.Fatal(err)
			}
			c.Key = key.Path()
		}
		if err := stream.Send(&apiv1.SessionRequest{Changes: []*apiv1.BGPChange{c}, Client: client, Host: host}); err != nil {
			r.t.Fatal(err)
		}
	}
	a, err := stream.CloseAndRecv()
	if err != nil {
		r.t.Fatal(err)
	}
	return a.GetEnds()
}

// TestSession: a change is foretold that ends an operator's connection to the host: rules that deny
// it, rules that let it in and go, a pool around where it comes from.
func TestSession(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.ip("route add default via 10.1.0.1")
	r := h.start()
	r.ready()
	const ssh, other, near, far = "10.1.0.11:22", "10.1.0.11:2222", "10.1.0.50:50000", "198.51.100.7:50000"
	endpoint := &v3.HostEndpoint{ObjectMeta: metav1.ObjectMeta{Name: "node-eth0", Labels: map[string]string{"host": ""}}, Spec: v3.HostEndpointSpec{Node: r.ready().GetName(), InterfaceName: "eth0"}}
	order, first := 100., 1.
	open := &v3.GlobalNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "open"}, Spec: v3.GlobalNetworkPolicySpec{
		Tier: "default", Order: &order, Selector: "has(host)", Types: []v3.PolicyType{v3.PolicyTypeIngress}, Ingress: []v3.Rule{{Action: v3.Allow, Source: v3.EntityRule{Nets: []string{"198.51.100.0/24"}}}},
	}}
	closed := open.DeepCopy()
	closed.Name, closed.Spec.Ingress = "closed", []v3.Rule{{Action: v3.Deny, Source: v3.EntityRule{Nets: []string{"198.51.100.7/32"}}}}
	closed.Spec.Order = &first
	pool := func(cidr string) *v3.IPPool {
		return &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "around"}, Spec: v3.IPPoolSpec{CIDR: cidr, NodeSelector: "all()"}}
	}
	for _, tt := range []struct {
		name, client, host string
		changes            []any
		want               string // empty: it goes on
	}{
		{"a host endpoint without policies denies", far, other, []any{endpoint}, "denied at HostEndpoint(node-eth0)"},
		{"to a failsafe port", far, ssh, []any{endpoint}, ""},
		{"to another host", far, "10.1.0.12:2222", []any{endpoint}, ""},
		{"a policy beside it lets it in", far, other, []any{endpoint, open}, ""},
		{"and not from elsewhere", near, other, []any{endpoint, open}, "denied at HostEndpoint(node-eth0)"},
		{"a rule denies it", far, other, []any{endpoint, open, closed}, "denied at HostEndpoint(node-eth0) by GlobalNetworkPolicy(closed) rule 0: IPv4 from 198.51.100.7/32"},
		{"a pool around its source", far, ssh, []any{pool("198.51.100.0/24")}, "198.51.100.7 lies in 198.51.100.0/24 of pool around"},
		{"a pool elsewhere", far, ssh, []any{pool("203.0.113.0/24")}, ""},
	} {
		if got := r.session(tt.client, tt.host, tt.changes...); (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	s := h.store("")
	for _, o := range []any{endpoint, open} {
		if _, err := store.Create(t.Context(), s, o); err != nil {
			t.Fatal(err)
		}
	}
	r.when("the rules follow", func(*apiv1.NodeResponse) error { return h.denies("198.51.100.0/24") })
	if got := r.session(far, other, store.ResourceKey(store.KindGlobalNetworkPolicy, open.Name)); !strings.Contains(got, "denied at HostEndpoint(node-eth0)") {
		t.Errorf("the policy that lets it in goes: %q", got)
	}
	if got := r.session(near, other, store.ResourceKey(store.KindGlobalNetworkPolicy, open.Name)); got != "" {
		t.Errorf("what is not let in now: %q", got)
	}
}
