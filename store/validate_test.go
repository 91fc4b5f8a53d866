package store_test

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/storetest"
)

// resource makes a value of a kind with its defaults. spec is JSON.
func resource(t *testing.T, kind store.Kind, name, spec string) any {
	t.Helper()
	v := store.New(kind)
	if err := json.Unmarshal([]byte(`{"metadata":{"name":"`+name+`"},"spec":`+spec+`}`), v); err != nil {
		t.Fatalf("%s %s: %v", kind, spec, err)
	}
	store.SetDefaults(v)
	return v
}

func stored(t *testing.T, v any) store.Object {
	t.Helper()
	k, err := store.KeyOf(v)
	if err != nil {
		t.Fatal(err)
	}
	return store.Object{Key: k, Value: v, Revision: 1}
}

// The manifests in store/manifest/testdata hold the rules of Validate; here is
// what they cannot reach.
func TestValidate(t *testing.T) {
	t.Parallel()
	for _, tt := range storetest.Resources() {
		t.Run(tt.Case, func(t *testing.T) {
			t.Parallel()
			var got []string
			var errs store.FieldErrors
			err := store.Validate(resource(t, tt.Kind, tt.Name, tt.Spec))
			if err != nil && (!errors.As(err, &errs) || !errors.Is(err, store.ErrInvalid)) {
				t.Fatalf("%v is no list of fields", err)
			}
			for _, e := range errs {
				got = append(got, e.Field)
			}
			if diff := cmp.Diff(tt.Refused, got); diff != "" {
				t.Errorf("refused fields (-want +got):\n%s\n%v", diff, err)
			}
		})
	}
	if err := store.Validate(&store.Block{}); err == nil || errors.Is(err, store.ErrInvalid) {
		t.Errorf("a block, which has no manifest form: %v", err)
	}
}

func TestValidateMetadata(t *testing.T) {
	t.Parallel()
	p := resource(t, store.KindIPPool, "x", `{"cidr":"10.0.0.0/16"}`).(*v3.IPPool)
	p.ObjectMeta = metav1.ObjectMeta{
		GenerateName: "x-",
		Labels:       map[string]string{"a b": "", "rack": "r 1", "ok": "r1"},
		Annotations:  map[string]string{"/": "", "Example.com/Fine": "any thing"},
	}
	const want = `metadata.name: required; ` +
		`metadata.generateName: "x-": is not supported; give a name in metadata.name; ` +
		`metadata.labels: "a b": is not a valid key: use at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit, after an optional DNS name and '/', such as example.com/rack; ` +
		`metadata.labels.rack: "r 1": is not a valid value: use at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit, or nothing; ` +
		`metadata.annotations: "/": is not a valid key: use at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit, after an optional DNS name and '/', such as example.com/rack`
	if diff := cmp.Diff(want, store.Validate(p).Error()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestValidateAgainst(t *testing.T) {
	t.Parallel()
	pool := func(name, spec string) any { return resource(t, store.KindIPPool, name, spec) }
	block := func(cidr string) store.Object {
		return store.Object{Key: store.BlockKey(netip.MustParsePrefix(cidr)), Value: &store.Block{CIDR: cidr}, Revision: 1}
	}
	pools := []store.Object{
		stored(t, pool("a", `{"cidr":"10.0.0.0/16"}`)),
		stored(t, pool("lb", `{"cidr":"172.16.0.0/24","allowedUses":["LoadBalancer"]}`)),
		stored(t, pool("six", `{"cidr":"fd00::/64"}`)),
	}
	// As an old Calico left it: without what later became a default.
	old := stored(t, &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "old"}, Spec: v3.IPPoolSpec{CIDR: "10.9.0.0/16"}})
	node := func(name, addr string) any {
		return resource(t, store.KindNode, name, `{"bgp":{"ipv4Address":"`+addr+`"}}`)
	}
	services := []store.Object{stored(t, resource(t, store.KindBGPConfiguration, "default",
		`{"serviceClusterIPs":[{"cidr":"10.96.0.0/12"}],"serviceExternalIPs":[{"cidr":"172.16.0.0/24"}],"serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}]}`))}
	for _, tt := range []struct {
		name   string
		v      any
		others []store.Object
		want   string
	}{
		{"apart", pool("b", `{"cidr":"10.1.0.0/16"}`), pools, ""},
		{
			"inside", pool("b", `{"cidr":"10.0.3.0/24"}`), pools,
			`spec.cidr: "10.0.3.0/24": IPPool(b) overlaps IPPool(a) with CIDR 10.0.0.0/16; choose a range apart from it`,
		},
		{
			"around", pool("b", `{"cidr":"10.0.0.0/8"}`), pools,
			`spec.cidr: "10.0.0.0/8": IPPool(b) overlaps IPPool(a) with CIDR 10.0.0.0/16; choose a range apart from it`,
		},
		{
			"a node's network", pool("b", `{"cidr":"10.2.0.0/15"}`),
			[]store.Object{stored(t, node("n1", "10.9.0.1/24")), stored(t, node("n2", "10.3.0.7/24")), stored(t, node("n3", "10.3.0.8/24"))},
			`spec.cidr: "10.2.0.0/15": IPPool(b) overlaps 10.3.0.0/24, the network of Node(n2), whose address is 10.3.0.7/24; choose a range apart from the hosts' networks`,
		},
		{"a node's network, and the pool exists", pool("a", `{"cidr":"10.0.0.0/16","disabled":true}`), append(pools[:1:1], stored(t, node("n1", "10.0.0.7/24"))), ""},
		{
			"services", pool("b", `{"cidr":"10.96.4.0/22"}`), services,
			`spec.cidr: "10.96.4.0/22": IPPool(b) overlaps serviceClusterIPs 10.96.0.0/12 of BGPConfiguration(default), from which services get addresses; choose a range apart from it`,
		},
		{
			"external addresses of services", pool("b", `{"cidr":"172.16.0.0/16"}`), services,
			`spec.cidr: "172.16.0.0/16": IPPool(b) overlaps serviceExternalIPs 172.16.0.0/24 of BGPConfiguration(default), from which services get addresses; choose a range apart from it`,
		},
		{
			"addresses of load balancers", pool("b", `{"cidr":"172.17.0.0/16"}`), services,
			`spec.cidr: "172.17.0.0/16": IPPool(b) overlaps serviceLoadBalancerIPs 172.17.0.0/24 of BGPConfiguration(default), from which services get addresses; choose a range apart from it`,
		},
		{"addresses of load balancers, in a pool for them", pool("b", `{"cidr":"172.17.0.0/24","allowedUses":["LoadBalancer"]}`), services, ""},
		{"itself", pool("a", `{"cidr":"10.0.0.0/16","vxlanMode":"Always"}`), pools, ""},
		{
			"another cidr", pool("a", `{"cidr":"10.5.0.0/16"}`), pools,
			`spec.cidr: "10.5.0.0/16": cannot be changed from 10.0.0.0/16; make a new pool, disable this one, move the workloads, then delete it`,
		},
		{
			"another block size", pool("a", `{"cidr":"10.0.0.0/16","blockSize":28}`), pools,
			`spec.blockSize: 28: cannot be changed from 26; make a new pool with the other size`,
		},
		{
			"no longer for load balancers", pool("lb", `{"cidr":"172.16.0.0/24"}`), pools,
			`spec.allowedUses: [Workload Tunnel]: cannot be changed to or from LoadBalancer; it is [LoadBalancer]`,
		},
		{"older than the defaults", pool("old", `{"cidr":"10.9.0.0/16"}`), []store.Object{old}, ""},
		{"blocks of the same size", pool("b", `{"cidr":"10.1.0.0/16"}`), []store.Object{block("10.1.0.64/26")}, ""},
		{
			"blocks of another size", pool("b", `{"cidr":"10.1.0.0/16"}`),
			[]store.Object{block("10.1.0.64/28"), block("10.2.0.0/29")},
			`spec.blockSize: 26: the block 10.1.0.64/28 of size 28 exists in 10.1.0.0/16; use blockSize 28, or release its addresses first`,
		},
		{"blocks when the pool exists", pool("a", `{"cidr":"10.0.0.0/16"}`), append(pools[:1:1], block("10.0.0.0/28")), ""},
		{"filter there", resource(t, store.KindBGPPeer, "p", `{"filters":["f"]}`), []store.Object{stored(t, resource(t, store.KindBGPFilter, "f", `{}`))}, ""},
		{
			"filter missing", resource(t, store.KindBGPPeer, "p", `{"filters":["f","g"]}`),
			[]store.Object{stored(t, resource(t, store.KindBGPFilter, "f", `{}`))},
			`spec.filters[1]: "g": no BGPFilter of this name exists; create it first or in the same manifest (there are [f])`,
		},
		{
			"no filter at all", resource(t, store.KindBGPPeer, "p", `{"filters":["f"]}`), nil,
			`spec.filters[0]: "f": no BGPFilter of this name exists; create it first or in the same manifest (there is none yet)`,
		},
		{"node's own address", node("n1", "10.0.0.1/24"), []store.Object{stored(t, node("n1", "10.0.0.1/24"))}, ""},
		{
			"another node's address", node("n1", "10.0.0.1/24"),
			[]store.Object{stored(t, node("n2", "10.0.0.1"))},
			`spec.bgp.ipv4Address: "10.0.0.1/24": Node(n1) cannot have the address of Node(n2), which is 10.0.0.1; give it one of its own`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := ""
			if err := store.ValidateAgainst(tt.v, tt.others); err != nil {
				if !errors.Is(err, store.ErrInvalid) {
					t.Errorf("%v does not match ErrInvalid", err)
				}
				got = err.Error()
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// No pool can be where nothing is routed.
func TestPoolRanges(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ cidr, want string }{
		{"169.254.0.0/20", "overlaps the link-local range 169.254.0.0/16"},
		{"127.1.0.0/16", "overlaps the loopback range 127.0.0.0/8"},
		{"239.0.0.0/16", "overlaps the multicast range 224.0.0.0/4"},
		{"0.0.0.0/16", `overlaps the range 0.0.0.0/8 of "this host"`},
		{"255.255.255.0/24", "overlaps the broadcast address"},
		{"fe80::/64", "overlaps the link-local range fe80::/10"},
		{"ff05::/64", "overlaps the multicast range ff00::/8"},
		{"::/112", "overlaps the loopback address ::1"},
		{"100.64.0.0/16", ""},
		{"fd00::/64", ""},
	} {
		got := ""
		if err := store.Validate(resource(t, store.KindIPPool, "p", `{"cidr":"`+tt.cidr+`"}`)); err != nil {
			got = err.Error()
		}
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want it to say %q", tt.cidr, got, tt.want)
		}
	}
}

func TestRelatedKinds(t *testing.T) {
	t.Parallel()
	want := map[store.Kind][]store.Kind{
		store.KindIPPool:  {store.KindIPPool, store.KindIPAMBlock, store.KindNode, store.KindBGPConfiguration},
		store.KindBGPPeer: {store.KindBGPFilter},
		store.KindNode:    {store.KindNode},

		store.KindNetworkPolicy:             {store.KindTier},
		store.KindGlobalNetworkPolicy:       {store.KindTier},
		store.KindStagedNetworkPolicy:       {store.KindTier},
		store.KindStagedGlobalNetworkPolicy: {store.KindTier},
	}
	for _, k := range store.Kinds() {
		if diff := cmp.Diff(want[k], store.RelatedKinds(k)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", k, diff)
		}
	}
}

func TestSetDefaults(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		kind store.Kind
		name string
		spec string
		want string
	}{
		{store.KindIPPool, "a", `{"cidr":"192.168.0.0/16"}`, `{"cidr":"192.168.0.0/16","vxlanMode":"Never","ipipMode":"Never","blockSize":26,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`},
		{store.KindIPPool, "a", `{"cidr":"FD00:10:0::/48"}`, `{"cidr":"fd00:10::/48","vxlanMode":"Never","ipipMode":"Never","blockSize":122,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`},
		{store.KindIPPool, "a", `{"cidr":"wrong"}`, `{"cidr":"wrong","vxlanMode":"Never","ipipMode":"Never","nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`},
		{store.KindBGPConfiguration, "node.a", `{}`, `{"logSeverityScreen":"Info","serviceLoadBalancerAggregation":"Enabled"}`},
		{store.KindFelixConfiguration, "default", `{}`, `{"nftablesMode":"Auto","bpfLogLevel":"","bpfConnectTimeLoadBalancing":"TCP","bpfHostNetworkedNATWithoutCTLB":"Enabled","floatingIPs":"Disabled"}`},
		{store.KindTier, "sec", `{}`, `{"order":1000000,"defaultAction":"Deny"}`},
		{store.KindTier, "kube-admin", `{}`, `{"order":1000,"defaultAction":"Pass"}`},
		{store.KindNode, "n", `{}`, `{}`},
	} {
		v := resource(t, tt.kind, tt.name, tt.spec)
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Kind, APIVersion string
			Spec             any
		}
		var want any
		if err := errors.Join(json.Unmarshal(raw, &got), json.Unmarshal([]byte(tt.want), &want)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got.Spec); diff != "" {
			t.Errorf("%s %s (-want +got):\n%s", tt.kind, tt.spec, diff)
		}
		if got.Kind != string(tt.kind) || got.APIVersion != store.APIVersion {
			t.Errorf("%s: kind %q, apiVersion %q", tt.kind, got.Kind, got.APIVersion)
		}
	}
}

func TestWorkloadEndpointName(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		spec store.WorkloadEndpointSpec
		want string
	}{
		{store.WorkloadEndpointSpec{Node: "node-a", Orchestrator: "k8s", Pod: "web-0", Endpoint: "eth0"}, "node--a-k8s-web--0-eth0"},
		{store.WorkloadEndpointSpec{Node: "a", Orchestrator: "cni", ContainerID: "c1", Pod: "no", Endpoint: "eth0"}, "a-cni-c1-eth0"},
		{store.WorkloadEndpointSpec{Node: "a", Orchestrator: "libnetwork", Endpoint: "e"}, "a-libnetwork-libnetwork-e"},
		{store.WorkloadEndpointSpec{Node: "a", Orchestrator: "nomad", Workload: "w", Endpoint: "e"}, "a-nomad-w-e"},
	} {
		got, err := store.WorkloadEndpointName(&tt.spec)
		if err != nil || got != tt.want {
			t.Errorf("got %q, %v, want %q", got, err, tt.want)
		}
	}
	_, err := store.WorkloadEndpointName(&store.WorkloadEndpointSpec{Node: "a-", Orchestrator: "k8s"})
	const want = `spec.node: "a-": is part of the endpoint's name, so it must not begin or end with '-'; ` +
		`spec.pod: required: it is part of the endpoint's name; spec.endpoint: required: it is part of the endpoint's name`
	if err == nil || err.Error() != want || !errors.Is(err, store.ErrInvalid) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// Endpoints that differ in any segment have different names, dashes or not.
func TestWorkloadEndpointNamesDiffer(t *testing.T) {
	t.Parallel()
	segment := rapid.StringMatching(`[ab](-?[ab]){0,3}`)
	spec := rapid.Custom(func(t *rapid.T) store.WorkloadEndpointSpec {
		return store.WorkloadEndpointSpec{
			Node: segment.Draw(t, "node"), Orchestrator: "k8s",
			Pod: segment.Draw(t, "pod"), Endpoint: segment.Draw(t, "endpoint"),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := spec.Draw(t, "a"), spec.Draw(t, "b")
		na, err := store.WorkloadEndpointName(&a)
		if err != nil {
			t.Fatal(err)
		}
		nb, err := store.WorkloadEndpointName(&b)
		if err != nil {
			t.Fatal(err)
		}
		if same := a.Node == b.Node && a.Pod == b.Pod && a.Endpoint == b.Endpoint; same != (na == nb) {
			t.Fatalf("%+v is %q and %+v is %q", a, na, b, nb)
		}
	})
}

// Defaults make every pool with a legal CIDR valid, and applying them twice
// changes nothing.
func TestDefaultsOfPools(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		addr := netip.AddrFrom4([4]byte{10, rapid.Byte().Draw(t, "b"), rapid.Byte().Draw(t, "c"), 0})
		cidr := netip.PrefixFrom(addr, rapid.IntRange(8, 26).Draw(t, "bits")).Masked()
		p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v3.IPPoolSpec{CIDR: cidr.String()}}
		store.SetDefaults(p)
		if err := store.Validate(p); err != nil {
			t.Fatalf("%s: %v", cidr, err)
		}
		again := p.DeepCopy()
		store.SetDefaults(again)
		if diff := cmp.Diff(p, again); diff != "" {
			t.Fatalf("a second time changed (-first +second):\n%s", diff)
		}
		// Two pools are at odds when they share an address, whichever comes first.
		other := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Spec: v3.IPPoolSpec{
			CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, rapid.Byte().Draw(t, "e"), 0, 0}), rapid.IntRange(8, 26).Draw(t, "bits2")).Masked().String(),
		}}
		store.SetDefaults(other)
		overlap := netip.MustParsePrefix(other.Spec.CIDR).Overlaps(cidr)
		ab := store.ValidateAgainst(p, []store.Object{{Key: store.ResourceKey(store.KindIPPool, "q"), Value: other}})
		ba := store.ValidateAgainst(other, []store.Object{{Key: store.ResourceKey(store.KindIPPool, "p"), Value: p}})
		if (ab != nil) != overlap || (ba != nil) != overlap {
			t.Fatalf("%s and %s: %v, %v", p.Spec.CIDR, other.Spec.CIDR, ab, ba)
		}
	})
}
