package convert

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/go-cmp/cmp"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
)

// source returns the source of a kind whose objects call themselves that.
func source(t *testing.T, g Group, kind store.Kind, apiVersion, apiKind string) Source {
	t.Helper()
	for _, s := range Sources(g, kind) {
		if s.Resource.APIVersion() == apiVersion && s.Resource.APIKind == apiKind {
			return s
		}
	}
	t.Fatalf("%s comes from no %s of %s", kind, apiKind, apiVersion)
	return Source{}
}

func toJSON(t *testing.T, text string) []byte {
	t.Helper()
	b, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// same compares two JSON texts by what they say.
func same(t *testing.T, what string, want, got []byte) {
	t.Helper()
	var w, g any
	if err := json.Unmarshal(want, &w); err != nil {
		t.Fatalf("%s: %v in %s", what, err, want)
	}
	if err := json.Unmarshal(got, &g); err != nil {
		t.Fatalf("%s: %v in %s", what, err, got)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		setting string
		v1, v3  bool
		want    Group
	}{
		{"", true, false, V1},
		{"", false, true, V3},
		{"", true, true, V1}, // v3 is then served by Calico's own API server
		{"", false, false, V3},
		{"projectcalico.org/v3", true, true, V3},
		{"crd.projectcalico.org/v1", false, true, V1},
	} {
		if got := Choose(tt.setting, tt.v1, tt.v3); got != tt.want {
			t.Errorf("%q, v1 %v, v3 %v: %s, want %s", tt.setting, tt.v1, tt.v3, got, tt.want)
		}
	}
}

func TestResources(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		group     Group
		key       store.Key
		path      string // of the collection
		name      string
		namespace string
	}{
		{V1, store.ResourceKey(store.KindIPPool, "p"), "/apis/crd.projectcalico.org/v1/ippools", "p", ""},
		{V3, store.ResourceKey(store.KindIPPool, "p"), "/apis/projectcalico.org/v3/ippools", "p", ""},
		{V3, store.Key{Kind: store.KindNetworkSet, Namespace: "ns", Name: "s"}, "/apis/projectcalico.org/v3/namespaces/ns/networksets", "s", "ns"},
		{V1, store.Key{Kind: store.KindNetworkPolicy, Namespace: "ns", Name: "web"}, "/apis/crd.projectcalico.org/v1/namespaces/ns/networkpolicies", "web", "ns"},
		{V1, store.Key{Kind: store.KindNetworkPolicy, Namespace: "ns", Name: "knp.default.web"}, "/apis/networking.k8s.io/v1/namespaces/ns/networkpolicies", "web", "ns"},
		{V1, store.ResourceKey(store.KindProfile, "kns.prod"), "/api/v1/namespaces", "prod", ""},
		{V1, store.ResourceKey(store.KindProfile, "ksa.prod.web.admin"), "/api/v1/namespaces/prod/serviceaccounts", "web.admin", "prod"},
		{V1, store.ResourceKey(store.KindNode, "n1"), "/api/v1/nodes", "n1", ""},
		{V1, store.IncarnationKey("n1"), "/api/v1/nodes", "n1", ""},
		{V1, store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "ns", Name: "node--a-k8s-web--0-eth0"}, "/api/v1/namespaces/ns/pods", "web-0", "ns"},
		{V3, store.ServiceKey("ns", "web"), "/api/v1/namespaces/ns/services", "web", "ns"},
		{V3, store.EndpointSliceKey("ns", "web-x"), "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices", "web-x", "ns"},
		{V3, store.ServiceCIDRKey("kubernetes"), "/apis/networking.k8s.io/v1/servicecidrs", "kubernetes", ""},
		{V1, store.IPAMConfigKey(), "/apis/crd.projectcalico.org/v1/ipamconfigs", "default", ""},
		{V3, store.IPAMConfigKey(), "/apis/projectcalico.org/v3/ipamconfigurations", "default", ""},
		{V1, store.HandleKey("k8s-pod-network.ABC"), "/apis/crd.projectcalico.org/v1/ipamhandles", "k8s-pod-network.abc", ""},
		{V1, mustBlock(t, "10.0.0.0/26"), "/apis/crd.projectcalico.org/v1/ipamblocks", "10-0-0-0-26", ""},
		{V1, mustBlock(t, "fd00:10::/122"), "/apis/crd.projectcalico.org/v1/ipamblocks", "fd00-10---122", ""},
		{V1, store.Key{Kind: store.KindIPAMAffinity, Namespace: "n1", Name: "10.0.0.0/26"}, "/apis/crd.projectcalico.org/v1/blockaffinities", "n1-10-0-0-0-26", ""},
	} {
		s, namespace, name, ok := SourceOf(tt.group, tt.key)
		if !ok || s.Resource.Path(namespace) != tt.path || name != tt.name || namespace != tt.namespace {
			t.Errorf("%s: %s %s/%s, want %s %s/%s", tt.key, s.Resource.Path(namespace), namespace, name, tt.path, tt.namespace, tt.name)
		}
	}
	for _, key := range []store.Key{
		store.ResourceKey(store.KindProfile, "mine"),
		store.SecretKey("s"),
		{Kind: store.KindWorkloadEndpoint, Namespace: "ns", Name: "n1-cni-c-eth0"},
		{Kind: store.KindNetworkPolicy, Namespace: "ns", Name: "knp.default."},
	} {
		if s, _, _, ok := SourceOf(V1, key); ok {
			t.Errorf("%s is held by %s", key, s.Resource)
		}
	}
}

func mustBlock(t *testing.T, cidr string) store.Key {
	t.Helper()
	key := store.Key{Kind: store.KindIPAMBlock, Name: cidr}
	if !key.CIDR().IsValid() {
		t.Fatal(cidr)
	}
	return key
}

// TestAffinityName holds the form of names that would be too long.
func TestAffinityName(t *testing.T) {
	t.Parallel()
	cidr := mustBlock(t, "10.0.0.0/26").CIDR()
	longest := strings.Repeat("n", 252-len("-10-0-0-0-26"))
	if got, want := AffinityName(longest, cidr), longest+"-10-0-0-0-26"; got != want {
		t.Errorf("got %s", got)
	}
	got := AffinityName(longest+"n", cidr)
	if len(got) != 252 || !strings.HasPrefix(got, strings.Repeat("n", 228)+"-10-0-0-0-26-") {
		t.Errorf("%d bytes: %s", len(got), got)
	}
	if other := AffinityName(longest+"m", cidr); other == got {
		t.Errorf("two nodes have one name: %s", got)
	}
}

func TestCIDRNames(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := 4
		if rapid.Bool().Draw(t, "six") {
			n = 16
		}
		raw := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 10, 255}), n, n).Draw(t, "addr")
		key := store.BlockKey(prefixOf(raw, rapid.IntRange(0, 8*n).Draw(t, "bits")))
		got, ok := parseCIDRName(CIDRName(key.CIDR()))
		if !ok || got != key.CIDR() {
			t.Fatalf("%s: %s, %v", key, got, ok)
		}
	})
}

// TestTurnUID holds what Calico makes of a uid.
func TestTurnUID(t *testing.T) {
	t.Parallel()
	const in, want = types.UID("01020304-0506-4708-890a-0b0c0d0e0f10"), types.UID("8040c020-a060-4710-8950-d030b070f008")
	if got := turnUID(in); got != want || turnUID(got) != in {
		t.Errorf("%s, and back %s", got, turnUID(got))
	}
	if got := turnUID("mine"); got != "mine" {
		t.Errorf("got %s", got)
	}
}

func TestReadNotOurs(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		s    Source
		text string
		want error
	}{
		"pod on its host's network": {source(t, V1, store.KindWorkloadEndpoint, "v1", "Pod"), `{metadata: {name: p, namespace: ns, resourceVersion: "5"}, spec: {hostNetwork: true, nodeName: n1}}`, ErrNotOurs},
		"pod on no host":            {source(t, V1, store.KindWorkloadEndpoint, "v1", "Pod"), `{metadata: {name: p, namespace: ns, resourceVersion: "5"}, spec: {}}`, ErrNotOurs},
		"affinity of no node":       {source(t, V1, store.KindIPAMAffinity, V1.APIVersion(), "BlockAffinity"), `{metadata: {name: x, resourceVersion: "5"}, spec: {type: virtual, node: load-balancer, cidr: 10.0.0.0/26}}`, ErrNotOurs},
		"another configuration":     {source(t, V1, store.KindIPAMConfig, V1.APIVersion(), "IPAMConfig"), `{metadata: {name: other, resourceVersion: "5"}, spec: {}}`, ErrNotOurs},
		"no revision":               {source(t, V1, store.KindIPPool, V1.APIVersion(), "IPPool"), `{metadata: {name: x}, spec: {}}`, store.ErrDecode},
		"block of another name":     {source(t, V1, store.KindIPAMBlock, V1.APIVersion(), "IPAMBlock"), `{metadata: {name: 10-0-0-0-26, resourceVersion: "5"}, spec: {cidr: 10.1.0.0/26}}`, store.ErrDecode},
		"metadata that are no JSON": {source(t, V1, store.KindIPPool, V1.APIVersion(), "IPPool"), `{metadata: {name: x, resourceVersion: "5", annotations: {projectcalico.org/metadata: "{"}}, spec: {}}`, store.ErrDecode},
	} {
		if _, err := tt.s.Read(toJSON(t, tt.text)); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestNodePatch: what is written to a Node is what is read of it.
func TestNodePatch(t *testing.T) {
	t.Parallel()
	s := source(t, V1, store.KindNode, "v1", "Node")
	api := toJSON(t, `{metadata: {name: n1, resourceVersion: "5", labels: {zone: a}, annotations: {mine: kept, projectcalico.org/IPv4IPIPTunnelAddr: 10.1.1.1}}, spec: {}}`)
	o, err := s.Read(api)
	if err != nil {
		t.Fatal(err)
	}
	v, err := store.Decode(o.Key, o.Raw)
	if err != nil {
		t.Fatal(err)
	}
	n := store.Clone(v).(*store.Node)
	n.Labels["rack"] = "r1"
	as := numorstring.ASNumber(64512)
	n.Spec.BGP = &store.NodeBGPSpec{ASNumber: &as, IPv4Address: "10.0.0.1/24"}
	n.Spec.VXLANTunnelMACAddr = "66:cf:23:df:22:07"
	n.Annotations["routerd.io/uses"] = "direct"
	n.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Up"}}
	patch, err := NodePatch(n, 5)
	if err != nil {
		t.Fatal(err)
	}
	patched, err := jsonpatch.MergePatch(api, patch)
	if err != nil {
		t.Fatal(err)
	}
	if o, err = s.Read(patched); err != nil {
		t.Fatal(err)
	}
	n.Spec.Addresses = []store.NodeAddress{{Address: "10.0.0.1/24", Type: "CalicoNodeIP"}} // which the API says by itself
	want, err := store.Encode(o.Key, n, nil)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "read", want, o.Raw)
	var got struct {
		Metadata struct {
			ResourceVersion string
			Labels          map[string]string
			Annotations     map[string]string
		}
	}
	if err := json.Unmarshal(patched, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"zone": "a"}, got.Metadata.Labels); diff != "" {
		t.Errorf("the Node's own labels (-want +got):\n%s", diff)
	}
	if a := got.Metadata.Annotations; a["mine"] != "kept" || a[labelsAnnotation] != `{"rack":"r1"}` || a["projectcalico.org/IPv4IPIPTunnelAddr"] != "" {
		t.Errorf("annotations: %v", a)
	}
}

// TestUndecodable: what cannot be decoded has its key, its revision, and what is
// there.
func TestUndecodable(t *testing.T) {
	t.Parallel()
	o, err := source(t, V3, store.KindIPPool, V3.APIVersion(), "IPPool").Read(toJSON(t, `{metadata: {name: x, resourceVersion: "5"}, spec: {cidr: 5}}`))
	if err != nil || o.Key != store.ResourceKey(store.KindIPPool, "x") || o.Revision != 5 {
		t.Fatalf("%+v, %v", o, err)
	}
	if _, err := store.Decode(o.Key, o.Raw); !errors.Is(err, store.ErrDecode) {
		t.Errorf("%s: %v", o.Raw, err)
	}
	o, err = source(t, V1, store.KindIPAMBlock, V1.APIVersion(), "IPAMBlock").Read(toJSON(t, `{metadata: {name: 10-0-0-0-26, resourceVersion: "5"}, spec: {cidr: [1]}}`))
	if err != nil || o.Key != mustBlock(t, "10.0.0.0/26") {
		t.Errorf("%+v, %v", o, err)
	}
}

// TestAway: what of a Node says that its host or its daemon is gone.
func TestAway(t *testing.T) {
	t.Parallel()
	for conditions, want := range map[string]string{
		``: "",
		`{type: Ready, status: "True"}, {type: NetworkUnavailable, status: "False", reason: RouterdIsUp}`: "",
		`{type: Ready, status: "False", reason: KubeletNotReady}`:                                         "",
		`{type: NetworkUnavailable, status: "True", reason: RouterdIsNotReady}`:                           "",
		`{type: NetworkUnavailable, status: "True", reason: RouterdIsGone}`:                               "its daemon has no pod that is ready",
		`{type: Ready, status: Unknown, reason: NodeStatusUnknown}`:                                       "its kubelet is not heard from",
		`{type: Ready, status: Unknown, reason: NodeStatusNeverUpdated}`:                                  "",
	} {
		// What an operator, or an import, has put there is not gone by.
		o, err := source(t, V1, store.KindNode, "v1", "Node").Read(toJSON(t, `{metadata: {name: n1, resourceVersion: "5", annotations: {projectcalico.org/annotations: '{"routerd.io/away":"written"}'}}, status: {conditions: [`+conditions+`]}}`))
		if err != nil {
			t.Fatal(err)
		}
		v, err := store.Decode(o.Key, o.Raw)
		if err != nil {
			t.Fatal(err)
		}
		n := v.(*store.Node)
		if got := n.Annotations[store.AnnotationAway]; got != want {
			t.Errorf("%s: %q, want %q", conditions, got, want)
		}
		if patch, err := NodePatch(n, 5); err != nil || strings.Contains(string(patch), "away") {
			t.Errorf("%s: it is written: %s, %v", conditions, patch, err)
		}
	}
}
