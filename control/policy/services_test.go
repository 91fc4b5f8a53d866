package policy_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// slice makes an EndpointSlice. name is namespace/name, ports are like "TCP/80 UDP/53"; endpoints are
// of base or addresses, with "" for none, and "-" for a slice that does not say who they are.
func slice(name, service, ports, endpoints string) store.Object {
	ns, rest, _ := strings.Cut(name, "/")
	s := &store.EndpointSlice{Service: service, Endpoints: &store.SliceEndpoints{}}
	for p := range strings.FieldsSeq(ports) {
		protocol, number, _ := strings.Cut(p, "/")
		var port uint16
		if err := json.Unmarshal([]byte(number), &port); err != nil {
			panic(err)
		}
		s.Endpoints.Ports = append(s.Endpoints.Ports, store.SlicePort{Protocol: protocol, Port: port})
	}
	for e := range strings.FieldsSeq(endpoints) {
		if e == "-" {
			s.Endpoints = nil
			break
		}
		if both, ok := addresses[e]; ok {
			s.Endpoints.Addrs = append(s.Endpoints.Addrs, netip.MustParseAddr(both[0]), netip.MustParseAddr(both[1]))
			continue
		}
		s.Endpoints.Addrs = append(s.Endpoints.Addrs, netip.MustParseAddr(e))
	}
	return store.Object{Key: store.EndpointSliceKey(ns, rest), Value: s, Revision: 1}
}

// onClient is the beginning of a policy for the pod client.
const onClient = `selector: "app == 'client'", namespaceSelector: "env == 'live'", `

func to(action, rule string) string {
	return `{` + onClient + `types: [Egress], egress: [{action: ` + action + `, ` + rule + `}, {action: Allow, destination: {nets: [203.0.113.0/24]}}]}`
}

func from(action, rule string) string {
	return `{` + onWeb + `types: [Ingress], ingress: [{action: ` + action + `, ` + rule + `}, {action: Allow, source: {nets: [10.0.1.0/24]}}]}`
}

// TestServices holds the calculator and the reference against what is written in the table of rules
// that name a Service: as Calico's, where it is known who its endpoints are, and closed where it is not.
func TestServices(t *testing.T) {
	t.Parallel()
	const (
		dst, src = "destination: {services: {name: web, namespace: prod}}", "source: {services: {name: web, namespace: prod}}"
		rule     = "GlobalNetworkPolicy/p[0]"
		passed   = "allow: Profile/kns.prod[0]" // of the pod that it comes to
		tierEnd  = "deny: end of default"
		after    = "allow: GlobalNetworkPolicy/p[1]"
		nobody   = "; until they are, the rule matches nobody"
		closed   = "; until they are, it denies whatever else the rule matches"
	)
	web := slice("prod/web-1", "web", "TCP/80 UDP/53", "web far")
	for name, tt := range map[string]struct {
		tells   policy.Services
		objects []store.Object
		flow    string
		want    string
		problem string // contained in what is said of the policy
	}{
		"destination: address and port":            {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>web tcp/80", passed, ""},
		"destination: IPv6":                        {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>web tcp/80 6", passed, ""},
		"destination: its other port":              {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>web udp/53", passed, ""},
		"destination: another port":                {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>web tcp/81", tierEnd, ""},
		"destination: the port of the other kind":  {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>web udp/80", tierEnd, ""},
		"destination: a protocol without ports":    {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>web icmp/8.0", tierEnd, ""},
		"destination: another address":             {policy.AllServices, one(gnp("p", to("Allow", dst)), web), "client>other tcp/80", tierEnd, ""},
		"destination: SCTP":                        {policy.AllServices, one(gnp("p", to("Allow", dst)), slice("prod/web-1", "web", "SCTP/9000", "web")), "client>web sctp/9000", passed, ""},
		"destination: no ports":                    {policy.AllServices, one(gnp("p", to("Allow", dst)), slice("prod/web-1", "web", "", "web")), "client>web tcp/80", tierEnd, ""},
		"destination: an address outside":          {policy.AllServices, one(gnp("p", to("Deny", dst)), slice("prod/web-1", "web", "TCP/443", "203.0.113.7")), "client>world tcp/443", "deny: " + rule, ""},
		"destination: and what else it asks for":   {policy.AllServices, one(gnp("p", to("Allow", "protocol: UDP, "+dst)), web), "client>web tcp/80", tierEnd, ""},
		"destination: a slice of another Service":  {policy.AllServices, one(gnp("p", to("Allow", dst)), slice("prod/web-1", "dns", "TCP/80", "web")), "client>web tcp/80", tierEnd, ""},
		"destination: of another namespace":        {policy.AllServices, one(gnp("p", to("Allow", dst)), slice("dev/web-1", "web", "TCP/80", "web")), "client>web tcp/80", tierEnd, ""},
		"destination: ports by slice":              {policy.AllServices, one(gnp("p", to("Allow", dst)), web, slice("prod/web-2", "web", "TCP/8080", "other")), "client>web tcp/8080", tierEnd, ""},
		"destination: a second slice":              {policy.AllServices, one(gnp("p", to("Allow", dst)), web, slice("prod/web-2", "web", "TCP/8080", "other")), "client>other tcp/8080", "allow: Profile/kns.dev[0]", ""},
		"destination: in the policy's namespace":   {policy.AllServices, one(np("prod/p", `{selector: "app == 'client'", types: [Egress], egress: [{action: Allow, destination: {services: {name: web}}}]}`), web), "client>web tcp/80", passed, ""},
		"destination: Deny":                        {policy.AllServices, one(gnp("p", to("Deny", dst)), web), "client>web tcp/80", "deny: " + rule, ""},
		"destination: Deny of others":              {policy.AllServices, one(gnp("p", to("Deny", dst)), web), "client>world tcp/80", after, ""},
		"a Service without slices has nobody":      {policy.AllServices, one(gnp("p", to("Deny", dst))), "client>world tcp/80", after, ""},
		"a slice without endpoints":                {policy.AllServices, one(gnp("p", to("Deny", dst)), slice("prod/web-1", "web", "TCP/80", "")), "client>world tcp/80", after, ""},
		"source: address":                          {policy.AllServices, one(gnp("p", from("Allow", src)), slice("prod/web-1", "web", "TCP/80", "client")), "client>web tcp/9 from=1", "allow: " + rule, ""},
		"source: a protocol without ports":         {policy.AllServices, one(gnp("p", from("Allow", src)), slice("prod/web-1", "web", "TCP/80", "client")), "client>web icmp/8.0", "allow: " + rule, ""},
		"source: no ports":                         {policy.AllServices, one(gnp("p", from("Allow", src)), slice("prod/web-1", "web", "", "client")), "client>web tcp/80", "allow: " + rule, ""},
		"source: IPv6":                             {policy.AllServices, one(gnp("p", from("Allow", src)), slice("prod/web-1", "web", "", "client")), "client>web tcp/80 6", "allow: " + rule, ""},
		"source: another address":                  {policy.AllServices, one(gnp("p", from("Allow", src)), slice("prod/web-1", "web", "TCP/80", "client")), "other>web tcp/80", tierEnd, ""},
		"source: Deny":                             {policy.AllServices, one(gnp("p", from("Deny", src)), web), "far>web tcp/80", "deny: " + rule, ""},
		"source: Deny of others":                   {policy.AllServices, one(gnp("p", from("Deny", src)), slice("prod/web-1", "web", "", "client")), "far>web tcp/80", after, ""},
		"source: Pass":                             {policy.AllServices, one(gnp("p", from("Pass", src)), web), "far>web tcp/80", "allow: Profile/kns.prod[0]", ""},
		"unknown: no such datastore, Allow":        {policy.NoServices, one(gnp("p", to("Allow", dst)), web), "client>web tcp/80", tierEnd, "spec.egress[0].destination.services: the endpoints of Service prod/web are not known: EndpointSlices are known only where datastore.kind is kubernetes, or kubernetes.enabled is set" + nobody},
		"unknown: no such datastore, Deny":         {policy.NoServices, one(gnp("p", to("Deny", dst))), "client>world tcp/80", "deny: " + rule, closed},
		"unknown: Deny of what else it asks for":   {policy.NoServices, one(gnp("p", to("Deny", "protocol: UDP, "+dst))), "client>world tcp/80", after, closed},
		"unknown: source, Allow":                   {policy.NoServices, one(gnp("p", from("Allow", src))), "client>web tcp/80", tierEnd, "spec.ingress[0].source.services: "},
		"unknown: source, Deny":                    {policy.NoServices, one(gnp("p", from("Deny", src))), "far>web tcp/80", "deny: " + rule, closed},
		"unknown: Pass denies":                     {policy.NoServices, one(gnp("p", from("Pass", src))), "far>web tcp/80", "deny: " + rule, closed},
		"unknown: Log logs nothing":                {policy.NoServices, one(gnp("p", from("Log", src))), "far>web tcp/80", after, nobody},
		"unknown: in a profile":                    {policy.NoServices, one(profile("kns.prod", `{ingress: [{action: Deny, `+src+`}, {action: Allow}], egress: [{action: Allow}]}`)), "far>web tcp/80", "deny: Profile/kns.prod[0]", closed},
		"unknown: no slice was brought, Deny":      {policy.BroughtServices, one(gnp("p", to("Deny", dst))), "client>world tcp/80", "deny: " + rule, "the datastore has no EndpointSlice of it" + closed},
		"unknown: no slice was brought, Allow":     {policy.BroughtServices, one(gnp("p", to("Allow", dst))), "client>web tcp/80", tierEnd, nobody},
		"brought":                                  {policy.BroughtServices, one(gnp("p", to("Deny", dst)), web), "client>world tcp/80", after, ""},
		"unknown: a slice of an earlier version":   {policy.BroughtServices, one(gnp("p", to("Deny", dst)), web, slice("prod/web-2", "web", "", "-")), "client>world tcp/80", "deny: " + rule, "EndpointSlice prod/web-2 does not say who they are"},
		"unknown: half of it allows nobody either": {policy.BroughtServices, one(gnp("p", to("Allow", dst)), web, slice("prod/web-2", "web", "", "-")), "client>web tcp/80", tierEnd, nobody},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects := later(append(base(), tt.objects...))
			f := flow(t, tt.flow)
			w := world(objects)
			w.NoSlices, w.Brought = tt.tells == policy.NoServices, tt.tells == policy.BroughtServices
			want := w.Judge(f)
			if got := say(want); got != tt.want {
				t.Errorf("the reference says %q, want %q: %+v", got, tt.want, want.Steps)
			}
			s := newSim(t, policy.Config{Services: tt.tells}, objects...)
			s.says(tt.flow, tt.want)
			if diff := cmp.Diff(want, s.mirror.Judge(f)); diff != "" {
				t.Errorf("steps (-reference +calculator):\n%s", diff)
			}
			said := ""
			for _, p := range s.calc.Problems() {
				said += p.Key.String() + ": " + p.Reason
			}
			if !strings.Contains(said, tt.problem) || (said == "") != (tt.problem == "") {
				t.Errorf("problems: %q, want %q", said, tt.problem)
			}
		})
	}
}

// TestServicesFollowed: the endpoints of a Service come and go as single members, and whether they are
// known as its policies' rules; what no rule in force names changes nothing.
func TestServicesFollowed(t *testing.T) {
	t.Parallel()
	deny := gnp("p", to("Deny", "destination: {services: {name: web, namespace: prod}}"))
	s := newSim(t, policy.Config{Services: policy.BroughtServices}, append(base(), deny)...)
	is := func(what string, d filter.Delta, policies, add, del int) {
		t.Helper()
		added, deleted := 0, 0
		for _, m := range d.Members {
			added, deleted = added+len(m.Add), deleted+len(m.Del)
		}
		if len(d.PutPolicies) != policies || added != add || deleted != del || len(d.PutEndpoints) > 0 {
			t.Errorf("%s: %d policies, %d members more and %d less, want %d, %d and %d: %+v", what, len(d.PutPolicies), added, deleted, policies, add, del, d)
		}
	}
	s.says("client>world tcp/443", "deny: GlobalNetworkPolicy/p[0]")
	is("a slice that no rule is about", s.send(event(slice("prod/other-1", "other", "TCP/80", "web"))), 0, 0, 0)
	is("the first slice", s.send(event(slice("prod/web-1", "web", "TCP/80", "web"))), 1, 2, 0)
	s.says("client>web tcp/80", "deny: GlobalNetworkPolicy/p[0]")
	s.says("client>world tcp/443", "allow: GlobalNetworkPolicy/p[1]")
	if got := s.problem(deny.Key); got != "" {
		t.Errorf("the endpoints are known: %s", got)
	}
	is("one endpoint more", s.send(event(slice("prod/web-1", "web", "TCP/80", "web 203.0.113.7"))), 0, 1, 0)
	s.says("client>world tcp/80", "deny: GlobalNetworkPolicy/p[0]")
	is("the same in another slice", s.send(event(slice("prod/web-2", "web", "TCP/80", "203.0.113.7"))), 0, 0, 0)
	is("the first of both goes", s.send(event(slice("prod/web-1", "web", "TCP/80", ""))), 0, 0, 2)
	s.says("client>world tcp/80", "deny: GlobalNetworkPolicy/p[0]")
	is("another port", s.send(event(slice("prod/web-2", "web", "TCP/443", "203.0.113.7"))), 0, 1, 1)
	is("the slice of another Service", s.send(event(slice("prod/web-2", "other", "TCP/443", "203.0.113.7"))), 0, 0, 1)
	s.says("client>world tcp/443", "allow: GlobalNetworkPolicy/p[1]")

	if d := s.send(store.Event{Key: store.EndpointSliceKey("prod", "web-1"), Err: errors.New("no JSON")}); !d.Empty() {
		t.Errorf("a slice that cannot be read any more changes %+v", d)
	}
	s.send(store.Event{Key: store.EndpointSliceKey("prod", "web-3"), Err: errors.New("no JSON")})
	s.says("client>world tcp/443", "deny: GlobalNetworkPolicy/p[0]")
	if got := s.problem(deny.Key); !strings.Contains(got, "EndpointSlice prod/web-3 cannot be read, which may be of it") {
		t.Errorf("of a slice that was never read is said %q", got)
	}
	s.send(gone(store.EndpointSliceKey("prod", "web-3")))
	s.says("client>world tcp/443", "allow: GlobalNetworkPolicy/p[1]")
	s.send(gone(store.EndpointSliceKey("prod", "web-1")))
	s.says("client>world tcp/443", "deny: GlobalNetworkPolicy/p[0]")
	if diff := cmp.Diff([]store.Key{store.ServiceKey("prod", "web")}, s.calc.Services(), cmp.AllowUnexported(store.Key{})); diff != "" {
		t.Errorf("Services (-want +got):\n%s", diff)
	}
	s.send(gone(deny.Key))
	if got := s.calc.Services(); len(got) > 0 || len(s.calc.Problems()) > 0 {
		t.Errorf("without the policy: %v, %v", got, s.calc.Problems())
	}
	s.says("client>world tcp/443", "allow: Profile/kns.prod[0]")
}

// TestServicesWithinStep: of two policies that name a Service one comes before its endpoints are known,
// and the other before they go, in one step. Both are closed at its end.
func TestServicesWithinStep(t *testing.T) {
	t.Parallel()
	s := newSim(t, policy.Config{Services: policy.BroughtServices}, base()...)
	web := slice("prod/web-1", "web", "TCP/80", "web")
	const dst = "destination: {services: {name: web, namespace: prod}}"
	s.send(event(gnp("o", to("Deny", dst))), event(web), event(gnp("p", to("Deny", dst))), gone(web.Key))
	s.send(gone(store.Key{Kind: store.KindGlobalNetworkPolicy, Name: "o"}))
	s.says("client>world tcp/443", "deny: GlobalNetworkPolicy/p[0]")
}

// TestServicesWithheld: where the datastore tells nothing of EndpointSlices, as for want of a right,
// rules that name a Service are closed until it does.
func TestServicesWithheld(t *testing.T) {
	t.Parallel()
	deny := gnp("p", to("Deny", "destination: {services: {name: web, namespace: prod}}"))
	c, mirror := newMirror(policy.Config{Services: policy.AllServices})
	c.SetInterfaces(hostInterfaces())
	tell := func(lacks []store.Kind, want string, list ...store.Object) {
		t.Helper()
		s := cluster.Step{Synced: true, Lacks: lacks}
		for _, o := range list {
			s.Changes = append(s.Changes, cluster.Decode(thisNode, event(o)))
		}
		c.HandleStore(s)
		step(t, c, mirror)
		if got := say(mirror.Judge(flow(t, "client>world tcp/443"))); got != want {
			t.Errorf("lacks %v: %s, want %s", lacks, got, want)
		}
		if problems := c.Problems(); (len(problems) > 0) != (len(lacks) > 0) {
			t.Errorf("lacks %v: problems %v", lacks, problems)
		}
	}
	tell(policy.ServiceKinds(), "deny: GlobalNetworkPolicy/p[0]", append(base(), deny)...)
	tell(nil, "allow: GlobalNetworkPolicy/p[1]")
	tell(policy.ServiceKinds(), "deny: GlobalNetworkPolicy/p[0]")
	tell(nil, "allow: GlobalNetworkPolicy/p[1]", slice("prod/web-1", "web", "TCP/443", "web"))
}

// BenchmarkServices changes one endpoint of one of 10,000 Services: of one that a rule names, and of
// one that none does. heap-MB is what the calculator keeps of them.
func BenchmarkServices(b *testing.B) {
	const services = 10_000
	of := func(i, n int) store.Event {
		return event(slice(fmt.Sprintf("prod/s%d-x", i), fmt.Sprintf("s%d", i), "TCP/80", fmt.Sprintf("10.1.%d.%d 10.2.%d.%d 10.3.%d.%d", i/256, i%256, i/256, i%256, n%2, 1+i%250)))
	}
	c, mirror := newMirror(policy.Config{Services: policy.AllServices})
	c.SetInterfaces(hostInterfaces())
	c.Update(store.Batch{Events: events(append(base(), gnp("p", to("Allow", "destination: {services: {name: s7, namespace: prod}}")))), Synced: true})
	before := heap()
	for i := range services {
		c.Update(store.Batch{Events: []store.Event{of(i, 0)}})
	}
	step(b, c, mirror)
	kept := float64(heap()-before) / (1 << 20)
	for name, i := range map[string]int{"named": 7, "not named": 8} {
		b.Run(name, func(b *testing.B) {
			n := 0
			for b.Loop() {
				n++
				c.Update(store.Batch{Events: []store.Event{of(i, n)}})
				if d, _ := c.Flush(); d.Empty() != (i != 7) {
					b.Fatalf("%+v", d)
				}
			}
			b.ReportMetric(kept, "heap-MB")
		})
	}
}
