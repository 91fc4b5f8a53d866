package lab

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

func TestDefaultTopology(t *testing.T) {
	t.Parallel()
	top, err := DefaultTopology(5).Complete()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range top.Nodes {
		got = append(got, n.Name+" "+n.Rack+" "+n.Address.String())
	}
	want := []string{
		"node1 rack1 10.1.0.11",
		"node2 rack1 10.1.0.12",
		"node3 rack2 10.2.0.11",
		"node4 rack1 10.1.0.13",
		"node5 rack2 10.2.0.12",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if got, want := top.Pool.CIDR.String(), "192.168.0.0/16"; got != want {
		t.Errorf("pool %s, want %s", got, want)
	}
	if gw := top.Racks[1].Gateway().String(); gw != "10.2.0.1" {
		t.Errorf("the spine's address in rack2 is %s, want 10.2.0.1", gw)
	}
	if *top.Spine.BGP {
		t.Error("the spine speaks BGP although the pool is encapsulated")
	}
}

func TestEmptyTopologyIsThreeNodes(t *testing.T) {
	t.Parallel()
	got, err := Topology{}.Complete()
	if err != nil {
		t.Fatal(err)
	}
	want, err := DefaultTopology(3).Complete()
	if err != nil {
		t.Fatal(err)
	}
	eq := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	eqAddr := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	if diff := cmp.Diff(want, got, eq, eqAddr); diff != "" {
		t.Errorf("empty topology (-want +got):\n%s", diff)
	}
}

func TestIPv6Topologies(t *testing.T) {
	t.Parallel()
	for u, want := range map[Underlay][]string{
		UnderlayIPv4: {"10.1.0.11", "10.1.0.12", "10.2.0.11"},
		UnderlayIPv6: {"fd00:1::11", "fd00:1::12", "fd00:2::11"},
		UnderlayDual: {"10.1.0.11 fd00:1::11", "10.1.0.12 fd00:1::12", "10.2.0.11 fd00:2::11"},
	} {
		top, err := Topology{Underlay: u, Pool6: &Pool{}}.Complete()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, n := range top.Nodes {
			var addrs []string
			for _, a := range n.Addrs() {
				addrs = append(addrs, a.String())
			}
			got = append(got, strings.Join(addrs, " "))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: addresses (-want +got):\n%s", u, diff)
		}
		if p := top.Pool6; p.CIDR.String() != "fd00:10:244::/48" || p.BlockSize != 122 || p.Encapsulation != top.Pool.Encapsulation {
			t.Errorf("%s: IPv6 pool %+v", u, p)
		}
	}
}

func TestDirectSpineSpeaksBGP(t *testing.T) {
	t.Parallel()
	top := Topology{Pool: Pool{Encapsulation: store.Direct}}
	got, err := top.Complete()
	if err != nil {
		t.Fatal(err)
	}
	if !*got.Spine.BGP || got.Spine.ASNumber != 64999 {
		t.Errorf("spine %+v, want BGP with AS 64999", got.Spine)
	}
}

func TestTopologyErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, yaml string
		want       []string
	}{
		{"unknown field", "nodez: []", []string{"nodez", "topology.yaml"}},
		{"not YAML", "a: [", []string{"topology.yaml"}},
		{"encapsulation", "pool: {encapsulation: GRE}", []string{"pool.encapsulation", "GRE", "VXLANCrossSubnet"}},
		{"host bits in pool", "pool: {cidr: 192.168.1.0/16}", []string{"pool.cidr", "192.168.1.0/16", "host bits"}},
		{"block size", "pool: {blockSize: 33}", []string{"pool.blockSize 33", "20 to 32"}},
		{"overlap of racks", "racks: [{name: a, cidr: 10.1.0.0/16}, {name: b, cidr: 10.1.2.0/24}]\nnodes: [{name: h, rack: a}]", []string{"racks[1]", "overlaps"}},
		{"rack in pool", "racks: [{name: a, cidr: 192.168.3.0/24}]\nnodes: [{name: h, rack: a}]", []string{"racks[0]", "overlaps pool.cidr"}},
		{"no such rack", "nodes: [{name: h, rack: west}]", []string{"nodes[0] (h).rack", "west", "rack1 rack2"}},
		{"address elsewhere", "nodes: [{name: h, rack: rack1, address: 10.9.0.1}]", []string{"nodes[0] (h).address 10.9.0.1", "10.1.0.0/24"}},
		{"the spine's address", "nodes: [{name: h, rack: rack1, address: 10.1.0.1}]", []string{"nodes[0] (h).address 10.1.0.1"}},
		{"the broadcast address", "nodes: [{name: h, rack: rack1, address: 10.1.0.255}]", []string{"nodes[0] (h).address 10.1.0.255"}},
		{"two with one address", "nodes: [{name: h, rack: rack1, address: 10.1.0.7}, {name: m, rack: rack1, address: 10.1.0.7}]", []string{"nodes[1] (m).address 10.1.0.7", "nodes[0]"}},
		{"two with one name", "nodes: [{name: h, rack: rack1}, {name: h, rack: rack1}]", []string{"nodes[1] (h)", "nodes[0] (h)"}},
		{"a pod's name in another's", "nodes: [{name: a, rack: rack1}, {name: a-pod1, rack: rack1}]", []string{"nodes[1] (a-pod1)", "a-pod1"}},
		{"long name", "nodes: [{name: a-very-long-name-indeed, rack: rack1}]", []string{"nodes[0].name", "at most 15"}},
		{"upper case", "nodes: [{name: Node1, rack: rack1}]", []string{"nodes[0].name", "lower case"}},
		{"spine as a name", "nodes: [{name: spine, rack: rack1}]", []string{"nodes[0] (spine).name"}},
		{"negative pods", "pods: -1", []string{"pods -1"}},
		{"mtu", "mtu: 100", []string{"mtu 100"}},
		{"underlay", "underlay: ipx", []string{"underlay", "ipx", "dual"}},
		{"IPv6 rack on an IPv4 underlay", "racks: [{name: a, cidr: 10.1.0.0/16, cidr6: 'fd00:1::/64'}]\nnodes: [{name: h, rack: a}]", []string{"cidr6 fd00:1::/64", "underlay: dual"}},
		{"IPv6 host on an IPv4 underlay", "nodes: [{name: h, rack: rack1, address6: 'fd00:1::7'}]", []string{"address6 fd00:1::7", "underlay: dual"}},
		{"host bits in an IPv6 rack", "underlay: dual\nracks: [{name: a, cidr: 10.1.0.0/16, cidr6: 'fd00:1::5/64'}]\nnodes: [{name: h, rack: a}]", []string{"cidr6 fd00:1::5/64", "host bits"}},
		{"overlap of IPv6 racks", "underlay: dual\nracks: [{name: a, cidr: 10.1.0.0/16, cidr6: 'fd00:1::/64'}, {name: b, cidr: 10.2.0.0/16, cidr6: 'fd00::/16'}]\nnodes: [{name: h, rack: a}]", []string{"racks[1]", "overlaps"}},
		{"IPv6 address elsewhere", "underlay: dual\nnodes: [{name: h, rack: rack1, address6: 'fd00:9::1'}]", []string{"address6 fd00:9::1", "fd00:1::/64"}},
		{"two with one IPv6 address", "underlay: dual\nnodes: [{name: h, rack: rack1, address6: 'fd00:1::7'}, {name: m, rack: rack1, address6: 'fd00:1::7'}]", []string{"nodes[1] (m).address6 fd00:1::7"}},
		{"IPv4 in the IPv6 pool", "pool6: {cidr: 10.9.0.0/16}", []string{"pool6.cidr", "10.9.0.0/16"}},
		{"IPv6 block size", "pool6: {blockSize: 64}", []string{"pool6.blockSize 64", "116 to 128"}},
		{"IPv6 rack in the pool", "underlay: dual\npool6: {cidr: 'fd00:1::/32'}", []string{"overlaps pool6.cidr"}},
		{"mtu of a rack", "racks: [{name: a, cidr: 10.1.0.0/16, mtu: 70000}]\nnodes: [{name: h, rack: a}]", []string{"racks[0] (a).mtu 70000"}},
		{"mtu of a host", "nodes: [{name: h, rack: rack1, mtu: 200}]", []string{"nodes[0] (h).mtu 200", "576"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "topology.yaml")
			if err := os.WriteFile(path, []byte(tt.yaml), 0o600); err != nil {
				t.Fatal(err)
			}
			top, err := LoadTopology(path)
			if err == nil {
				_, err = top.Complete()
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not say %q", err, w)
				}
			}
		})
	}
}

func TestLabNames(t *testing.T) {
	t.Parallel()
	for name, ok := range map[string]bool{
		"lab": true, "lab-2": true, "a": true, "": false, "Lab": false, "-a": false, "a-": false, "a/b": false,
		"..": false, "1a": false, strings.Repeat("a", 30): true, strings.Repeat("a", 31): false,
	} {
		if err := CheckLabName(name); (err == nil) != ok {
			t.Errorf("CheckLabName(%q) = %v, want ok %v", name, err, ok)
		}
	}
}

// The longest names that are allowed must leave room for the sockets: the
// kernel limits their paths to 107 bytes (unix(7)).
func TestSocketPathsFit(t *testing.T) {
	t.Parallel()
	p := Socket(strings.Repeat("a", maxLabName), strings.Repeat("b", maxName))
	if len(p) > 107 {
		t.Errorf("%s has %d bytes, want at most 107", p, len(p))
	}
}

func TestAddressesAreUnique(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		top := DefaultTopology(rapid.IntRange(1, 60).Draw(t, "nodes"))
		for i := range top.Nodes {
			if rapid.Bool().Draw(t, "fixed") {
				rack, _ := top.rack(top.Nodes[i].Rack)
				b := rack.CIDR.Addr().As4()
				b[3] = byte(100 + i)
				top.Nodes[i].Address = netip.AddrFrom4(b)
			}
		}
		got, err := top.Complete()
		if err != nil {
			t.Fatal(err)
		}
		seen := make(map[netip.Addr]string)
		for _, n := range got.Nodes {
			if o := seen[n.Address]; o != "" {
				t.Fatalf("%s and %s have the address %s", o, n.Name, n.Address)
			}
			seen[n.Address] = n.Name
		}
	})
}

func TestDaemonConfigOverlay(t *testing.T) {
	t.Parallel()
	top, err := Topology{Nodes: []Node{
		{Name: "a", Rack: "rack1"},
		{Name: "b", Rack: "rack2", Config: map[string]any{"logLevel": "debug", "defaultPool": nil, "bgp": map[string]any{"enabled": false}}},
	}}.Complete()
	if err != nil {
		t.Fatal(err)
	}
	got, err := daemonConfig("x", "/opt/bin", top, top.Nodes[1])
	if err != nil {
		t.Fatal(err)
	}
	want := `address:
  ipv4: interface=eth0
  ipv6: none
bgp:
  enabled: false
cni:
  binDir: /opt/bin
  confDir: /run/routerd-lab/x/b/cni/net.d
  networkName: routerd-lab
datastore:
  caFile: /run/routerd-lab/x/a/state/etcd/pki/ca.crt
  certFile: /run/routerd-lab/x/a/state/etcd/pki/client.crt
  endpoints:
  - https://10.1.0.11:2379
  keyFile: /run/routerd-lab/x/a/state/etcd/pki/client.key
logLevel: debug
nodeName: b
runDir: /run/routerd-lab/x/b
stateDir: /run/routerd-lab/x/b/state
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}
