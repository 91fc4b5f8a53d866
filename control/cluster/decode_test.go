package cluster

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

func read(t *testing.T, key store.Key, raw string) *Change {
	t.Helper()
	v, err := store.Decode(key, []byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return Decode("node1", store.Event{Key: key, Object: store.Object{Revision: 5, Value: v, Raw: []byte(raw)}})
}

func nodeOf(t *testing.T, annotations, spec string) *Node {
	t.Helper()
	ch := read(t, store.ResourceKey(store.KindNode, "node2"),
		`{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node2","labels":{"rack":"r1"},"annotations":{`+annotations+`}},"spec":{`+spec+`}}`)
	n, ok := ch.Value.(*Node)
	if !ok {
		t.Fatalf("it is a %T: %v", ch.Value, ch.Err)
	}
	return n
}

func TestNode(t *testing.T) {
	t.Parallel()
	both := func(v4, v6 string) (f Families[netip.Addr]) {
		f.IPv4, _ = netip.ParseAddr(v4)
		f.IPv6, _ = netip.ParseAddr(v6)
		return f
	}
	addrs := func(texts ...string) (list []netip.Addr) {
		for _, s := range texts {
			list = append(list, netip.MustParseAddr(s))
		}
		return list
	}
	for _, tt := range []struct {
		name, annotations, spec string
		want                    Node
		err                     string
	}{
		{name: "empty", want: Node{}},
		{
			name: "everything", annotations: `"routerd.io/tunnelAddress":"198.51.100.7, 2001:db8::7","routerd.io/tunnelSources":"10.1.0.13","routerd.io/away":"its kubelet is not heard from"`,
			spec: `"bgp":{"asNumber":64513,"routeReflectorClusterID":"1.0.0.1","ipv4Address":"10.1.0.12/24","ipv6Address":"fd00:1::12/64","ipv4IPIPTunnelAddr":"192.168.2.0"},
				"ipv4VXLANTunnelAddr":"192.168.2.1","ipv6VXLANTunnelAddr":"fd10::1","vxlanTunnelMACAddr":"66:00:00:00:00:01",
				"wireguard":{"interfaceIPv4Address":"192.168.2.2","interfaceIPv6Address":"fd10::2"},
				"addresses":[{"address":"10.1.0.12/24","type":"CalicoNodeIP"},{"address":"10.7.0.12","type":"InternalIP"},{"address":"fe80::1%eth0"},{"address":"it"}]`,
			want: Node{
				Away: true, BGP: true, ASN: 64513, ClusterID: "1.0.0.1",
				Addr:   Families[netip.Prefix]{netip.MustParsePrefix("10.1.0.12/24"), netip.MustParsePrefix("fd00:1::12/64")},
				Public: both("198.51.100.7", "2001:db8::7"), IPIPAddr: both("192.168.2.0", ""), VXLANAddr: both("192.168.2.1", "fd10::1"),
				VXLANMAC: Families[dataplane.MAC]{IPv4: dataplane.MAC{0x66, 0, 0, 0, 0, 1}},
				Hosts:    addrs("10.1.0.12", "fd00:1::12", "10.7.0.12"), Inner: addrs("192.168.2.0", "192.168.2.1", "fd10::1", "192.168.2.2", "fd10::2"),
				Sources: addrs("10.1.0.13"),
			},
		},
		{
			name: "a bare address", spec: `"bgp":{"ipv4Address":"10.1.0.12"}`,
			want: Node{BGP: true, Addr: Families[netip.Prefix]{IPv4: netip.MustParsePrefix("10.1.0.12/32")}, Hosts: addrs("10.1.0.12")},
		},
		{
			name: "what makes no sense is not set, the rest counts", spec: `"bgp":{"ipv4Address":"ten","ipv6Address":"fd00:1::12/64","ipv4IPIPTunnelAddr":"?"},"vxlanTunnelMACAddr":"66"`,
			want: Node{BGP: true, Addr: Families[netip.Prefix]{IPv6: netip.MustParsePrefix("fd00:1::12/64")}, Hosts: addrs("fd00:1::12")}, err: `spec.bgp.ipv4Address "ten"`,
		},
		{
			name: "an annotation of Kubernetes' Node that is no address", annotations: `"routerd.io/problems":"annotation projectcalico.org/IPv4Address: \"ten\""`,
			spec: `"bgp":{"ipv6Address":"fd00:1::12/64"}`,
			want: Node{BGP: true, Addr: Families[netip.Prefix]{IPv6: netip.MustParsePrefix("fd00:1::12/64")}, Hosts: addrs("fd00:1::12")}, err: `IPv4Address: "ten"`,
		},
		{
			name: "an address of the other family", spec: `"bgp":{"ipv4Address":"fd00:1::12/64"}`,
			want: Node{BGP: true, Addr: Families[netip.Prefix]{IPv6: netip.MustParsePrefix("fd00:1::12/64")}, Hosts: addrs("fd00:1::12")}, err: "want an IPv4 address",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := nodeOf(t, tt.annotations, tt.spec)
			if s := text(got.AddrErr); (s == "") != (tt.err == "") || !strings.Contains(s, tt.err) {
				t.Errorf("error %q, want %q", s, tt.err)
			}
			tt.want.Name, tt.want.Revision, tt.want.Labels = "node2", 5, map[string]string{"rack": "r1"}
			tt.want.Encaps, tt.want.AddrErr = got.Encaps, got.AddrErr
			if diff := cmp.Diff(&tt.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
				cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b error) bool { return text(a) == text(b) })); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestEncapsAreShared: thousands of nodes publish the same, and that is kept once.
func TestEncapsAreShared(t *testing.T) {
	t.Parallel()
	d := newDecoder("node1")
	node := func(name, accepts string) *Encaps {
		n := &store.Node{}
		n.Name = name
		store.SetNodeEncaps(n, store.NodeEncaps{
			Published: true, Accepts: []string{accepts, "later/1"}, Sends: map[string]string{"p": "Direct", "q": "Later"}, Refuses: map[string]string{"ipip": "no", "later": "no"},
		})
		return d.node(n, 1).Encaps
	}
	a, b, c := node("a", "vxlan/4096/4789"), node("b", "vxlan/4096/4789"), node("c", "direct")
	if a != b || a == c {
		t.Error("the same is kept twice, or another taken for it")
	}
	vx := dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, VNI: 4096, Port: 4789}
	if _, ok := a.Accept[vx]; !ok || len(a.Accept) != 1 || len(a.Accepted) != 1 {
		t.Errorf("it accepts %v", a.Accept)
	}
	if len(a.Send) != 1 || a.Send["p"].Encapsulation != store.Direct || len(a.Refuse) != 1 {
		t.Errorf("it sends %v and refuses %v", a.Send, a.Refuse)
	}
	if plain := d.node(&store.Node{}, 1).Encaps; plain.Published || plain == nil {
		t.Errorf("a node without annotations has %v", plain)
	}
}

func TestPool(t *testing.T) {
	t.Parallel()
	of := func(spec string) *Pool {
		ch := read(t, store.ResourceKey(store.KindIPPool, "p"), `{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"p"},"spec":{`+spec+`}}`)
		return ch.Value.(*Pool)
	}
	selects := func(p *Pool, labels map[string]string) bool {
		return p.Nodes != nil && p.Nodes.Matches(labels)
	}
	for _, tt := range []struct {
		spec            string
		cidr            string
		encap           store.Encapsulation
		tunnels, hidden bool
		selected        bool // nodes in the rack r1
		err             string
	}{
		{spec: `"cidr":"10.0.0.5/16"`, cidr: "10.0.0.0/16", encap: store.Direct, tunnels: true, selected: true},
		{spec: `"cidr":"10.0.0.0/16","vxlanMode":"CrossSubnet","nodeSelector":"rack == 'r1'","disableBGPExport":true`, cidr: "10.0.0.0/16", encap: store.VXLANCrossSubnet, tunnels: true, hidden: true, selected: true},
		{spec: `"cidr":"10.0.0.0/16","nodeSelector":"rack == 'r2'","disabled":true`, cidr: "10.0.0.0/16", encap: store.Direct},
		{spec: `"cidr":"10.0.0.0/16","nodeSelector":"rack =="`, cidr: "10.0.0.0/16", encap: store.Direct, tunnels: true},
		{spec: `"cidr":"10.0.0.0/16","allowedUses":["Workload"]`, cidr: "10.0.0.0/16", encap: store.Direct, selected: true},
		{spec: `"cidr":"ten"`, encap: store.Direct, tunnels: true, selected: true, err: `"ten" is not a CIDR`},
	} {
		p := of(tt.spec)
		cidr, _ := netip.ParsePrefix(tt.cidr)
		if p.CIDR != cidr || p.Encap != tt.encap || p.Tunnels != tt.tunnels || p.Hidden != tt.hidden || selects(p, map[string]string{"rack": "r1"}) != tt.selected || !strings.Contains(text(p.Err), tt.err) {
			t.Errorf("%s: %+v", tt.spec, p)
		}
	}
}

func TestBlock(t *testing.T) {
	t.Parallel()
	of := func(raw string) *Block {
		return read(t, store.BlockKey(netip.MustParsePrefix("10.0.0.0/30")), `{"cidr":"10.0.0.0/30",`+raw+`}`).Value.(*Block)
	}
	const attributes = `"attributes":[{"handle_id":"h","secondary":{"node":"node1"}},{"secondary":{"node":"node3"}},{"releasedAt":"2026-01-02T03:04:05Z","secondary":{"node":"node3"}}],`
	b := of(attributes + `"affinity":"host:node1","affinity_claim_time":"2026-01-01T00:00:00Z","allocations":[0,1,2,null],"unallocated":[3]`)
	cooling := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	if b.Holder != "node1" || b.Virtual || b.Size != 4 || b.Used != 3 || !b.Cooling.Equal(cooling) || b.Claimed.IsZero() || b.Revision != 5 || b.Value() == nil {
		t.Errorf("%+v", b)
	}
	if diff := cmp.Diff([]Borrowed{{netip.MustParseAddr("10.0.0.1"), "node3"}}, b.Borrowed, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("borrowed: %s", diff)
	}
	if b := of(attributes + `"affinity":"host:node2","allocations":[0,null,null,null],"unallocated":[1,2,3]`); b.Holder != "node2" || b.Value() != nil || len(b.Borrowed) != 1 {
		t.Errorf("another's: %+v", b)
	}
	if b := of(`"affinity":"virtual:load-balancer","allocations":[null,null,null,null]`); b.Holder != "" || !b.Virtual {
		t.Errorf("a load balancer's: %+v", b)
	}
}

// TestOtherValues: what is gone or cannot be read has no value, and one of another
// kind than its key's is not passed on.
func TestOtherValues(t *testing.T) {
	t.Parallel()
	key := store.ResourceKey(store.KindNode, "n")
	if ch := Decode("node1", store.Event{Key: key}); ch.Value != nil || !ch.Deleted() {
		t.Errorf("a deletion is %+v", ch)
	}
	if ch := Decode("node1", store.Event{Key: key, Err: store.ErrDecode}); ch.Value != nil || ch.Deleted() || ch.Err == nil {
		t.Errorf("what cannot be read is %+v", ch)
	}
	if ch := Decode("node1", store.Event{Key: key, Object: store.Object{Value: &store.Affinity{}}}); ch.Value != nil || ch.Err == nil {
		t.Errorf("another kind's is %+v", ch)
	}
	key = store.AffinityKey("node1", netip.MustParsePrefix("10.0.0.0/26"))
	if ch := Decode("node1", store.Event{Key: key, Object: store.Object{Value: &store.Affinity{}}}); ch.Value == nil || ch.Err != nil {
		t.Errorf("an affinity is %+v", ch)
	}
}

// TestEncapsDiffer: what nodes publish is kept once where it is the same, and is another
// where any of it differs. A host that saw an older state of its own for the one that is
// published would publish without end.
func TestEncapsDiffer(t *testing.T) {
	t.Parallel()
	d := newDecoder("node1")
	decoded := func(e store.NodeEncaps) *Encaps {
		n := &store.Node{}
		store.SetNodeEncaps(n, e)
		return d.encaps(n)
	}
	base := func() store.NodeEncaps {
		return store.NodeEncaps{
			Published: true, Accepts: []string{"direct"}, Uses: []string{"direct"}, Sends: map[string]string{"p": "Direct"},
			Refuses: map[string]string{"ipip": "no module"}, Stays: map[string]string{"p": "node2 stays"},
		}
	}
	first := decoded(base())
	if decoded(base()) != first {
		t.Error("the same is decoded twice")
	}
	fields := reflect.TypeFor[store.NodeEncaps]()
	for i := range fields.NumField() {
		e := base()
		reflect.ValueOf(&e).Elem().Field(i).SetZero()
		if got := decoded(e); got == first || i > 0 && !reflect.DeepEqual(got.NodeEncaps, e) {
			t.Errorf("without %s it is %+v", fields.Field(i).Name, got.NodeEncaps)
		}
	}
}
