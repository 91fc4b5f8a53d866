package store

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// envelope makes a stored object of the data model's short form: what follows
// kind, apiVersion and metadata.
func envelope(kind Kind, meta, rest string) string {
	return `{"kind":"` + string(kind) + `","apiVersion":"projectcalico.org/v3","metadata":{` + meta + `},` + rest + `}`
}

const born = `"uid":"ba499037-3f06-45d3-aa1b-fde5b999f36c","creationTimestamp":"2026-11-21T17:20:26Z"`

func block(cidr string) Key { return BlockKey(netip.MustParsePrefix(cidr)) }

// verbatim are values as Calico's own tools stored them, in forms that our
// types know completely.
var verbatim = []struct {
	key Key
	raw string
}{
	{ResourceKey(KindNode, "node-a"), `{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-a",` + born + `,"labels":{"rack":"r1"}},"spec":{"bgp":{"ipv4Address":"10.1.0.1/24"}},"status":{}}`},
	{ResourceKey(KindNode, "node-a"), envelope(KindNode, `"name":"node-a"`, `"spec":{"bgp":{"asNumber":64512,"ipv4Address":"10.1.0.1/24","ipv6Address":"fd00:1::1/64","ipv4IPIPTunnelAddr":"192.168.64.1","routeReflectorClusterID":"244.0.0.1"},"orchRefs":[{"nodeName":"node-a","orchestrator":"k8s"}],"addresses":[{"address":"10.1.0.1/24","type":"CalicoNodeIP"},{"address":"10.1.0.1","type":"InternalIP"}]},"status":{}`)},
	{ResourceKey(KindIPPool, "pool-v4"), envelope(KindIPPool, `"name":"pool-v4",`+born, `"spec":{"cidr":"192.168.0.0/16","vxlanMode":"Never","ipipMode":"CrossSubnet","natOutgoing":true,"blockSize":26,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`)},
	{ResourceKey(KindIPReservation, "resv1"), envelope(KindIPReservation, `"name":"resv1"`, `"spec":{"reservedCIDRs":["192.168.64.0/30"]}`)},
	{ResourceKey(KindClusterInformation, "default"), envelope(KindClusterInformation, `"name":"default"`, `"spec":{"clusterGUID":"08f7c4da8ec04385b189b65bc714604b","datastoreReady":true}`)},
	{ResourceKey(KindBGPConfiguration, "default"), envelope(KindBGPConfiguration, `"name":"default"`, `"spec":{"logSeverityScreen":"Info","nodeToNodeMeshEnabled":true,"asNumber":64512,"serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}],"serviceExternalIPs":[{"cidr":"172.16.0.0/24"}],"serviceClusterIPs":[{"cidr":"10.96.0.0/12"}],"serviceLoadBalancerAggregation":"Enabled","communities":[{"name":"c1","value":"65000:100"}],"prefixAdvertisements":[{"cidr":"192.168.0.0/16","communities":["c1","65000:200"]}],"listenPort":179,"nodeMeshMaxRestartTime":"1m0s","bindMode":"NodeIP","ignoredInterfaces":["docker*"]}`)},
	{ResourceKey(KindTier, "sec"), envelope(KindTier, `"name":"sec"`, `"spec":{"order":100,"defaultAction":"Deny"},"status":{}`)},
	{Key{KindWorkloadEndpoint, "ns1", "node--a-k8s-web--0-eth0"}, envelope(KindWorkloadEndpoint, `"name":"node--a-k8s-web--0-eth0","namespace":"ns1","labels":{"projectcalico.org/namespace":"ns1"},"annotations":{"a":"b"}`, `"spec":{"orchestrator":"k8s","node":"node-a","containerID":"abc123","pod":"web-0","endpoint":"eth0","serviceAccountName":"default","ipNetworks":["192.168.64.5/32"],"ipNATs":[{"internalIP":"192.168.64.5","externalIP":"198.51.100.4"}],"profiles":["kns.ns1"],"interfaceName":"cali12345","mac":"ee:ee:ee:ee:ee:ee","ports":[{"name":"http","protocol":"TCP","port":80,"hostPort":0,"hostIP":""}]}`)},
	{ResourceKey(KindProfile, "prof1"), envelope(KindProfile, `"name":"prof1"`, `"spec":{"ingress":[{"action":"Allow"}],"egress":[{"action":"Allow"}],"labelsToApply":{"prof":"p1"}}`)},
	// As an older Calico wrote it.
	{ResourceKey(KindProfile, "old"), envelope(KindProfile, `"name":"old"`, `"spec":{"ingress":[{"action":"Allow","source":{},"destination":{}}]}`)},
	{Key{KindNetworkPolicy, "ns1", "allow-web"}, envelope(KindNetworkPolicy, `"name":"allow-web","namespace":"ns1","labels":{"projectcalico.org/tier":"default"},"annotations":{"projectcalico.org/metadata":"{\"name\":\"allow-web\"}"}`, `"spec":{"tier":"default","ingress":[{"action":"Allow","protocol":"TCP","source":{"selector":"app == 'client'","namespaceSelector":"env == 'p'"},"destination":{"ports":[80,"8000:8100","http-alt"]}}],"selector":"app == 'web'","types":["Ingress"]}`)},
	{ResourceKey(KindGlobalNetworkPolicy, "gnp1"), envelope(KindGlobalNetworkPolicy, `"name":"gnp1","annotations":{"mine":"kept","projectcalico.org/metadata":"{\"name\":\"gnp1\"}"}`, `"spec":{"tier":"default","order":10.5,"ingress":[{"action":"Log"},{"action":"Deny","ipVersion":4,"protocol":"ICMP","icmp":{"type":8,"code":0},"source":{"nets":["10.0.0.0/8"],"notNets":["10.1.0.0/16"],"serviceAccounts":{"names":["sa1"],"selector":"x == 'y'"}},"metadata":{"annotations":{"a":"b"}}}],"selector":"has(host)","types":["Ingress","Egress"],"doNotTrack":true,"applyOnForward":true}`)},
	{ResourceKey(KindStagedGlobalNetworkPolicy, "s"), envelope(KindStagedGlobalNetworkPolicy, `"name":"s","annotations":{"projectcalico.org/metadata":"{\"name\":\"s\"}"}`, `"spec":{"stagedAction":"Set","tier":"default","ingress":[{"action":"Allow"}],"selector":"all()","types":["Ingress"]}`)},
	{Key{KindStagedKubernetesNetworkPolicy, "ns1", "s"}, envelope(KindStagedKubernetesNetworkPolicy, `"name":"s","namespace":"ns1"`, `"spec":{"stagedAction":"Set","podSelector":{}}`)},
	{Key{KindNetworkSet, "ns1", "ns-set"}, envelope(KindNetworkSet, `"name":"ns-set","namespace":"ns1"`, `"spec":{"nets":["10.0.0.0/24","10.0.1.5"]}`)},
	{ResourceKey(KindGlobalNetworkSet, "s"), envelope(KindGlobalNetworkSet, `"name":"s"`, `"spec":{"nets":["10.0.0.0/24"]}`)},
	{ResourceKey(KindHostEndpoint, "node-a-eth0"), envelope(KindHostEndpoint, `"name":"node-a-eth0"`, `"spec":{"node":"node-a","interfaceName":"eth0","expectedIPs":["10.1.0.1"],"profiles":["prof1"],"ports":[{"name":"ssh","protocol":"TCP","port":22}]}`)},
	// Of before v3.32: the tier is part of the name, which no annotation tells.
	{ResourceKey(KindGlobalNetworkPolicy, "default.old"), envelope(KindGlobalNetworkPolicy, `"name":"default.old"`, `"spec":{"tier":"default","selector":"all()","types":["Ingress"]}`)},
	{ResourceKey(KindBGPPeer, "p"), envelope(KindBGPPeer, `"name":"p"`, `"spec":{"nodeSelector":"a == 'b' \u0026\u0026 c","peerIP":"10.1.0.254"}`)},

	{AffinityKey("node-a", netip.MustParsePrefix("192.168.174.128/26")), `{"state":"confirmed","deleted":false}`},
	{HandleKey("net1.abc"), `{"block":{"192.168.174.128/26":1,"fd00:10:0:6d15:74ba:80e:4835:8080/122":1},"deleted":false}`},
	{IPAMConfigKey(), `{"strict_affinity":true,"auto_allocate_blocks":true,"maxBlocksPerHost":1,"kubeVirtVMAddressPersistence":"Enabled","ipCooldownSeconds":60}`},
	{SecretKey("reach"), `{"key":"c2VjcmV0"}`},
	{IncarnationKey("node-a"), `{"instance":"3f","bootID":"b1","machineID":"m1","process":"p1","epoch":3,"host":"a.example","addresses":["10.0.0.1"],"since":"2026-11-21T17:31:37Z","nodeCreated":17}`},
	{ChangeKey("mieq3k2f"), `{"time":"2026-11-21T17:31:37Z","user":"ann","host":"a.example","command":"apply -f x.yaml","objects":[{"kind":"Tier","name":"ops","after":{"kind":"Tier"}}],"lacks":"it also writes IPAM's records","confirmSeconds":60,"state":"unconfirmed"}`},
	{UnconfirmedKey("mieq3k2f"), `{"time":"2026-11-21T17:31:37Z","seconds":60,"by":"node-b"}`},
	{block("192.168.99.0/29"), `{"cidr":"192.168.99.0/29","affinity":"host:node-a","affinity_claim_time":"2026-11-21T17:31:37Z","allocations":[0,null,null,1,null,null,null,null],"unallocated":[1,2,4,5,6,7],"attributes":[{"handle_id":"net1.abc","secondary":{"namespace":"ns1","node":"node-a","pod":"web-0","timestamp":"2026-11-21 17:31:36.8948024 +0000 UTC"}},{"handle_id":"ipip-tunnel-addr-node-a","secondary":{"node":"node-a","type":"ipipTunnelAddress"}}],"sequenceNumber":1795282296903635739,"sequenceNumberForAllocation":{"0":1795282296903635738,"3":1795282296903635737},"deleted":false}`},
	{block("192.168.99.0/30"), `{"cidr":"192.168.99.0/30","affinity":null,"allocations":[null,null,null,null],"unallocated":[0,1,2,3],"attributes":[],"sequenceNumber":7,"sequenceNumberForAllocation":{},"deleted":false}`},
	{block("192.168.99.0/30"), `{"cidr":"192.168.99.0/30","affinity":"virtual:load-balancer","allocations":[0,null,null,null],"unallocated":[1,2,3],"attributes":[{"releasedAt":"2026-11-21T17:31:37Z"}],"sequenceNumber":7,"sequenceNumberForAllocation":{"0":6},"deleted":false}`},
}

func TestVerbatim(t *testing.T) {
	t.Parallel()
	for _, tt := range verbatim {
		v, err := Decode(tt.key, []byte(tt.raw))
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		forms := map[string][]byte{"new": nil, "over what was there": []byte(tt.raw)}
		if strings.HasSuffix(tt.key.Name, "old") {
			delete(forms, "new") // a new object gets today's form
		}
		for name, old := range forms {
			got, err := Encode(tt.key, v, old)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if diff := cmp.Diff(tt.raw, string(got)); diff != "" {
				t.Errorf("%s %s (-want +got):\n%s", tt.key, name, diff)
			}
		}
	}
}

func TestDecodeOldForms(t *testing.T) {
	t.Parallel()
	node := "node-a"
	tests := []struct {
		name string
		key  Key
		raw  string
		want any
	}{
		{"affinity without a value", AffinityKey("n", netip.MustParsePrefix("10.0.0.0/26")), ``, &Affinity{}},
		{"affinity without a state", AffinityKey("n", netip.MustParsePrefix("10.0.0.0/26")), `{}`, &Affinity{}},
		{
			"fresh block with null attributes", block("10.0.0.0/31"), `{"cidr":"10.0.0.0/31","affinity":"host:node-a","strictAffinity":false,"allocations":[null,null],"unallocated":[0,1],"attributes":null,"deleted":false}`,
			&Block{CIDR: "10.0.0.0/31", Affinity: new("host:" + node), Allocations: []*int{nil, nil}, Unallocated: []int{0, 1}},
		},
		{
			"block with hostAffinity", block("10.0.0.0/31"), `{"cidr":"10.0.0.0/31","hostAffinity":"node-a","allocations":[null,null],"unallocated":[0,1],"attributes":null}`,
			&Block{CIDR: "10.0.0.0/31", Affinity: new("host:" + node), Allocations: []*int{nil, nil}, Unallocated: []int{0, 1}},
		},
	}
	for _, tt := range tests {
		got, err := Decode(tt.key, []byte(tt.raw))
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		} else if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestDecodeNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	pool := ResourceKey(KindIPPool, "p")
	tests := []struct {
		key       Key
		raw, want string
	}{
		{pool, ``, "the value is empty"},
		{pool, `null`, "no JSON object"},
		{pool, `{"kind":`, "unexpected end of JSON input"},
		{pool, `{"kind":"BGPPeer","metadata":{"name":"p"}}`, `holds a "BGPPeer"`},
		{pool, `{"kind":"IPPool","metadata":{"name":"q"}}`, `calls itself "q"`},
		{pool, `{"kind":"IPPool","metadata":{"name":"p"},"spec":{"blockSize":"x"}}`, "blockSize"},
		{block("10.0.0.0/30"), `{"cidr":"10.0.1.0/30"}`, `cidr is "10.0.1.0/30"`},
		{block("10.0.0.0/30"), `{"cidr":"10.0.0.0/30","allocations":[0,null,null,null],"attributes":[]}`, "allocations[0] is 0, but there are 0 attributes"},
		{block("10.0.0.0/30"), `{"cidr":"10.0.0.0/30","allocations":[null,null,null,null],"unallocated":[4]}`, "unallocated[0] is 4"},
		{block("10.0.0.0/31"), `{"cidr":"10.0.0.0/31","allocations":[null,null,null]}`, "3 entries for 2 addresses"},
		{Key{Kind: "Nonsense", Name: "x"}, `{}`, "unknown kind"},
	}
	for _, tt := range tests {
		_, err := Decode(tt.key, []byte(tt.raw))
		if !errors.Is(err, ErrDecode) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.key.String()) {
			t.Errorf("Decode(%s, %s): got %v, want it to say %q", tt.key, tt.raw, err, tt.want)
		}
	}
}

func TestEncodeStrips(t *testing.T) {
	t.Parallel()
	pool := New(KindIPPool).(*v3.IPPool)
	pool.ObjectMeta = metav1.ObjectMeta{
		Name: "p", GenerateName: "g", SelfLink: "/s", UID: "u", ResourceVersion: "77", Generation: 3,
		Labels: map[string]string{}, Finalizers: []string{"f"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
	}
	pool.Kind, pool.APIVersion = "", "" // as a Go program may leave them
	before := pool.DeepCopy()
	got, err := Encode(ResourceKey(KindIPPool, "p"), pool, []byte(`{"metadata":{"name":"p","resourceVersion":"5","selfLink":"x","managedFields":[],"creationTimestamp":null}}`))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"p","uid":"u","finalizers":["f"]},"spec":{"cidr":""}}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, pool); diff != "" {
		t.Errorf("Encode changed its argument (-before +after):\n%s", diff)
	}
}

func TestEncodeRefuses(t *testing.T) {
	t.Parallel()
	named := func(n string) *v3.IPPool { return &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: n}} }
	tests := []struct {
		key   Key
		value any
		old   string
		kind  error
		want  string
	}{
		{ResourceKey(KindIPPool, "p"), &v3.BGPPeer{}, "", ErrInvalid, "the value is a *v3.BGPPeer"},
		{ResourceKey(KindIPPool, "p"), nil, "", ErrInvalid, "the value is a <nil>"},
		{ResourceKey(KindIPPool, "p"), (*v3.IPPool)(nil), "", ErrInvalid, "the value is a *v3.IPPool"},
		{ResourceKey(KindIPPool, "p"), named("q"), "", ErrInvalid, `metadata names "q"`},
		{ResourceKey(KindIPPool, "a/b"), named("a/b"), "", ErrInvalid, "slash"},
		{ResourceKey(KindIPPool, ""), named(""), "", ErrInvalid, "metadata.name is missing"},
		{Key{KindIPAMBlock, "", "10.0.0.1/24"}, &Block{}, "", ErrInvalid, "canonical CIDR"},
		{ResourceKey(KindIPPool, "p"), named("p"), `{"spec`, ErrDecode, "what is stored"},
	}
	for _, tt := range tests {
		_, err := Encode(tt.key, tt.value, []byte(tt.old))
		if !errors.Is(err, tt.kind) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Encode(%s): got %v, want %q", tt.key, err, tt.want)
		}
	}
}

// change decodes what is stored, changes it and encodes it again over it.
func change[T any](t *testing.T, key Key, raw string, edit func(*T)) string {
	t.Helper()
	v, err := Decode(key, []byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	edit(any(v).(*T))
	got, err := Encode(key, v, []byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return string(got)
}

func sameJSON(t *testing.T, want, got string) {
	t.Helper()
	var w, g any
	if err := json.Unmarshal([]byte(want), &w); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(got), &g); err != nil {
		t.Fatalf("%v in %s", err, got)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestUpdateKeepsUnknownMembers(t *testing.T) {
	t.Parallel()
	t.Run("BGPPeer", func(t *testing.T) {
		t.Parallel()
		raw := envelope(KindBGPPeer, `"name":"peer1","ours":{"x":1}`, `"spec":{"nodeSelector":"rack == 'r1'","peerIP":"10.1.0.254:1790","asNumber":64999,"password":{"secretKeyRef":{"name":"s","key":"k","newer":[1,{"a":null}]}},"maxRestartTime":"1m30s","keepaliveTime":"20s","filters":["filt1"]},"status":{"a":1}`)
		got := change(t, ResourceKey(KindBGPPeer, "peer1"), raw, func(p *v3.BGPPeer) { p.Spec.ASNumber = 65001; p.Spec.Filters = nil })
		sameJSON(t, strings.NewReplacer("64999", "65001", `,"filters":["filt1"]`, "").Replace(raw), got)
	})
	t.Run("BGPFilter", func(t *testing.T) {
		t.Parallel()
		raw := envelope(KindBGPFilter, `"name":"filt1"`, `"spec":{"exportV4":[{"cidr":"10.0.0.0/8","prefixLength":{"min":16,"max":24},"source":"RemotePeers","interface":"eth*","matchOperator":"In","peerType":"eBGP","communities":{"values":["65000:1"]},"asPathPrefix":[65000],"priority":1024,"action":"Accept","operations":[{"addCommunity":{"value":"65000:2"}}]},{"action":"Reject"}],"importV6":[{"cidr":"fd00::/8","matchOperator":"NotIn","action":"Reject"}]}`)
		key := ResourceKey(KindBGPFilter, "filt1")
		got := change(t, key, raw, func(f *v3.BGPFilter) { f.Spec.ExportV4[0].CIDR = "10.0.0.0/9"; f.Spec.ImportV6 = nil })
		sameJSON(t, strings.NewReplacer("10.0.0.0/8", "10.0.0.0/9", `,"importV6":[{"cidr":"fd00::/8","matchOperator":"NotIn","action":"Reject"}]`, "").Replace(raw), got)

		// With another number of rules nobody can say which is which.
		got = change(t, key, raw, func(f *v3.BGPFilter) { f.Spec.ExportV4 = f.Spec.ExportV4[:1]; f.Spec.ImportV6 = nil })
		sameJSON(t, envelope(KindBGPFilter, `"name":"filt1"`, `"spec":{"exportV4":[{"cidr":"10.0.0.0/8","prefixLength":{"min":16,"max":24},"source":"RemotePeers","interface":"eth*","matchOperator":"In","action":"Accept"}]}`), got)
	})
	t.Run("a member written in another case is known", func(t *testing.T) {
		t.Parallel()
		raw := envelope(KindIPPool, `"name":"p"`, `"spec":{"CIDR":"10.0.0.0/8"}`)
		got := change(t, ResourceKey(KindIPPool, "p"), raw, func(p *v3.IPPool) { p.Spec.CIDR = "10.0.0.0/9" })
		sameJSON(t, envelope(KindIPPool, `"name":"p"`, `"spec":{"cidr":"10.0.0.0/9"}`), got)
	})
	t.Run("Tier's status", func(t *testing.T) {
		t.Parallel()
		raw := envelope(KindTier, `"name":"t"`, `"spec":{"order":1},"status":{"conditions":[]}`)
		got := change(t, ResourceKey(KindTier, "t"), raw, func(p *v3.Tier) { p.Spec.Order = new(2.0) })
		sameJSON(t, envelope(KindTier, `"name":"t"`, `"spec":{"order":2},"status":{"conditions":[]}`), got)
	})
	t.Run("Block", func(t *testing.T) {
		t.Parallel()
		raw := `{"cidr":"10.0.0.0/31","hostAffinity":"a","allocations":[0,null],"unallocated":[1],"attributes":[{"handle_id":"h","newer":1}],"sequenceNumber":1,"sequenceNumberForAllocation":null,"deleted":false,"newer":{}}`
		got := change(t, block("10.0.0.0/31"), raw, func(b *Block) { b.SequenceNumber++ })
		sameJSON(t, `{"cidr":"10.0.0.0/31","affinity":"host:a","allocations":[0,null],"unallocated":[1],"attributes":[{"handle_id":"h","newer":1}],"sequenceNumber":2,"sequenceNumberForAllocation":null,"deleted":false,"newer":{}}`, got)
	})
}

func TestCreationTimestampIsNeverNull(t *testing.T) {
	t.Parallel()
	for _, kind := range Kinds() {
		v := New(kind)
		meta := Meta(v)
		meta.Name = "x"
		if kind.Namespaced() {
			meta.Namespace = "ns"
		}
		key, err := KeyOf(v)
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		raw, err := Encode(key, v, nil)
		if err != nil || strings.Contains(string(raw), "creationTimestamp") {
			t.Errorf("%s: %s, %v", kind, raw, err)
		}
		meta.CreationTimestamp = metav1.NewTime(time.Date(2026, 11, 21, 18, 20, 26, 5, time.FixedZone("", 3600)))
		raw, err = Encode(key, v, nil)
		if err != nil || !strings.Contains(string(raw), `"creationTimestamp":"2026-11-21T17:20:26Z"`) {
			t.Errorf("%s: %s, %v", kind, raw, err)
		}
		back, err := Decode(key, raw)
		if err != nil {
			t.Errorf("%s: %v", kind, err)
		} else if got, _ := KindOf(back); got != kind {
			t.Errorf("%s comes back as %s", kind, got)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, tt := range verbatim {
		f.Add(tt.key.Path(), []byte(tt.raw))
	}
	f.Add(block("10.0.0.0/31").Path(), []byte(`{"cidr":"10.0.0.0/31","hostAffinity":"a","allocations":[0],"attributes":[{}]}`))
	f.Fuzz(func(t *testing.T, path string, raw []byte) {
		key, ok := ParsePath(path)
		if !ok {
			return
		}
		v, err := Decode(key, raw)
		if err != nil {
			if !errors.Is(err, ErrDecode) {
				t.Fatalf("%v does not match ErrDecode", err)
			}
			return
		}
		// What was decoded can be written back over what was there, and means
		// the same then.
		again, err := Encode(key, v, raw)
		if err != nil {
			t.Fatalf("encode what was decoded: %v", err)
		}
		v2, err := Decode(key, again)
		if err != nil {
			t.Fatalf("decode %s: %v", again, err)
		}
		third, err := Encode(key, v2, again)
		if err != nil || string(third) != string(again) {
			t.Fatalf("not stable: %s, then %s, %v", again, third, err)
		}
	})
}

func FuzzParsePath(f *testing.F) {
	for _, tt := range verbatim {
		f.Add(tt.key.Path())
	}
	f.Add("/calico/ipam/v2/assignment/ipv6/block/fd00:0::-122")
	f.Fuzz(func(t *testing.T, path string) {
		key, ok := ParsePath(path)
		if ok && key.Path() != path {
			t.Errorf("%q is read as %v, whose path is %q", path, key, key.Path())
		}
	})
}

func TestPolicyName(t *testing.T) {
	t.Parallel()
	const noted = `{"metadata":{"annotations":{"projectcalico.org/metadata":"{\"name\":\"default.p\"}"}}}`
	for _, tt := range []struct{ name, tier, raw, want string }{
		{"p", "default", `{}`, "p"},
		{"default.p", "default", `{}`, "p"},
		{"sec.p", "sec", `{}`, "p"},
		{"sec.p", "default", `{}`, "sec.p"},
		{"default.p", "default", noted, "default.p"},
		{"default.p", "default", "", "default.p"},
		{"default.", "default", `{}`, "default."},
	} {
		o := Object{Key: ResourceKey(KindGlobalNetworkPolicy, tt.name), Raw: []byte(tt.raw)}
		if got := PolicyName(o, tt.tier); got != tt.want {
			t.Errorf("PolicyName(%s, %s) of %q = %q, want %q", tt.name, tt.tier, tt.raw, got, tt.want)
		}
	}
}

// The annotation is the store's: a user neither sees it nor can set it.
func TestPolicyAnnotationIsHidden(t *testing.T) {
	t.Parallel()
	key := ResourceKey(KindGlobalNetworkPolicy, "p")
	p := New(KindGlobalNetworkPolicy).(*v3.GlobalNetworkPolicy)
	p.Name = "p"
	p.Annotations = map[string]string{"a": "b", "projectcalico.org/metadata": "forged"}
	raw, err := Encode(key, p, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(raw), `"projectcalico.org/metadata":"{\"name\":\"p\"}"`) {
		t.Errorf("stored as %s", raw)
	}
	v, err := Decode(key, raw)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "b"}, Meta(v).Annotations); diff != "" {
		t.Errorf("annotations as read (-want +got):\n%s", diff)
	}
}
