package oldapi

import (
	"encoding/json"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store/manifest"
)

func TestConvert(t *testing.T) {
	t.Parallel()
	in, err := os.Open("testdata/v1.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	docs, err := manifest.ReadForeign("v1.yaml", in, Kinds(), false)
	if err != nil {
		t.Fatal(err)
	}
	var list []json.RawMessage
	for _, d := range docs {
		raw, err := manifest.JSON(d.Object)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, raw)
	}
	all, err := manifest.Plain(list)
	if err != nil {
		t.Fatal(err)
	}
	got, err := manifest.YAML(all)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/v3.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	again, err := manifest.Read("v3.yaml", strings.NewReader(string(got)))
	if err != nil || len(again) != len(docs) {
		t.Errorf("what is printed cannot be read again: %d documents, %v", len(again), err)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, in, want string }{
		{"mask", "kind: ipPool\nmetadata: {cidr: 10.1.0.0/166}", `ipPool(10.1.0.0/166): metadata.cidr: "10.1.0.0/166": want a network`},
		{"no cidr", "kind: ipPool\nmetadata: {}", "ipPool: metadata.cidr: required"},
		{"mode", "kind: ippool\nmetadata: {cidr: 10.0.0.0/16}\nspec: {ipip: {mode: on-subnet}}", `spec.ipip.mode: "on-subnet": want always or cross-subnet`},
		{"a field of version 3", "kind: ipPool\nmetadata: {cidr: 10.0.0.0/16}\nspec: {natOutgoing: true}", "spec.natOutgoing: unknown field; did you mean spec.nat-outgoing?"},
		{"a pool that cannot be", "kind: ipPool\nmetadata: {cidr: 10.0.0.0/30}", `becomes IPPool(10-0-0-0-30), in which spec.cidr: "10.0.0.0/30"`},
		{"scope", "kind: bgpPeer\nmetadata: {peerIP: 10.0.0.1, scope: rack}", `metadata.scope: "rack": want global or node`},
		{"a global peer's node", "kind: bgpPeer\nmetadata: {peerIP: 10.0.0.1, scope: global, node: a}", `metadata.node: "a": a peer of scope global`},
		{"no address", "kind: bgpPeer\nmetadata: {scope: global}", "metadata.peerIP: required"},
		{"a node's bgp", "kind: node\nmetadata: {name: a}\nspec: {bgp: {asNumber: 1}}", "spec.bgp: want ipv4Address or ipv6Address"},
		{"action", "kind: policy\nmetadata: {name: a}\nspec: {ingress: [{action: permit}]}", `policy(a): spec.ingress[0].action: "permit": want allow, deny, log or pass`},
		{"both nets", "kind: policy\nmetadata: {name: a}\nspec: {egress: [{source: {net: 1.0.0.0/8, nets: [2.0.0.0/8]}}]}", "spec.egress[0].source.net: \"1.0.0.0/8\": a rule has net or nets"},
		{"types", "kind: policy\nmetadata: {name: a}\nspec: {types: [in]}", `spec.types[0]: "in": want ingress or egress`},
		{"selector", "kind: policy\nmetadata: {name: a}\nspec: {selector: a ==}", "becomes GlobalNetworkPolicy(a), in which spec.selector"},
		{"tag", "kind: profile\nmetadata: {name: a, tags: [x], labels: {x: y}}", `metadata.tags[0]: "x": there is a label of that name`},
		{"workload", "kind: workloadEndpoint\nmetadata: {name: a, node: b, orchestrator: k8s, workload: c}", `metadata.workload: "c": want NAMESPACE.POD`},
		{"mac", "kind: workloadEndpoint\nmetadata: {name: a, node: b, orchestrator: cni, workload: c}\nspec: {mac: x}", `spec.mac: "x": want a MAC address`},
		{"expected", "kind: hostEndpoint\nmetadata: {name: a, node: b}\nspec: {expectedIPs: [x]}", `spec.expectedIPs[0]: "x": want an address`},
		{"kind", "kind: pod", `kind: must be one of ipPool, bgpPeer, node, policy, profile, hostEndpoint, workloadEndpoint with apiVersion v1; found "pod"`},
	} {
		_, err := manifest.ReadForeign("f", strings.NewReader("apiVersion: v1\n"+tt.in), Kinds(), false)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.want)
		}
	}
	if docs, err := manifest.ReadForeign("f", strings.NewReader("apiVersion: v1\nkind: ipPool\nmetadata: {cidr: 10.0.0.0/30}"), Kinds(), true); err != nil || len(docs) != 1 {
		t.Errorf("unchecked: %d documents, %v", len(docs), err)
	}
	if _, err := manifest.ReadForeign("f", strings.NewReader("apiVersion: projectcalico.org/v3\nkind: IPPool"), Kinds(), false); err == nil || !strings.Contains(err.Error(), "it is what others are converted to") {
		t.Errorf("a resource: %v", err)
	}
}

// The names are Calico's (its names_test.go has them, and of the hash that it is there).
func TestNames(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ got, want string }{
		{uniqueName("abcdef"), "abcdef"},
		{uniqueName("abc---def"), "abc---def"},
		{uniqueName("abc/def"), "abc.def-0d06c5df"},
		{uniqueName("abc$!$def"), "abc-def-49aaf888"},
		{uniqueName("abc.-.def"), "abc.def-e8d71b6f"},
		{uniqueName("-abc.def"), "abc.def-ba464174"},
		{uniqueName("$ABC/DeF-123.-456!"), "abc.def-123.456-3f42689c"},
		{undottedName("$ABC/DeF-123.-456!"), "abc-def-123-456-3f42689c"},
		{plainName("$ABC/DeF-123.-456!"), "abc.def-123.456"},
		{addrName(netip.MustParseAddr("192.168.0.1")), "192-168-0-1"},
		{addrName(netip.MustParseAddr("aa:bb::")), "00aa-00bb-0000-0000-0000-0000-0000-0000"},
		{cidrName(netip.MustParsePrefix("fd00:1::/64")), "fd00-1---64"},
		{profileName("k8s_ns.default"), "kns.default"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
}

// A name that could be stored stays, and any other becomes one that can.
func TestNamesAreValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		name := "x" + rapid.StringMatching(`[-._/A-Za-z0-9äß]{0,20}`).Draw(t, "name")
		got := undottedName(name)
		if again := undottedName(got); again != got {
			t.Fatalf("%q becomes %q, and that %q", name, got, again)
		}
		if strings.Trim(got, "-") != got || strings.Trim(got, "-abcdefghijklmnopqrstuvwxyz0123456789") != "" {
			t.Fatalf("%q becomes %q", name, got)
		}
	})
}
