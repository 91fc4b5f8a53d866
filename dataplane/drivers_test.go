package dataplane_test

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/crosssubnet"
	"github.com/routerd/routerd/dataplane/direct"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func host() dataplane.Host {
	return dataplane.Host{
		Name: "node1", Addr: netip.MustParsePrefix("10.1.0.11/24"), Uplink: "eth0", UplinkMTU: 1500,
		IPIPAddr: netip.MustParseAddr("192.168.0.1"), VXLANAddr: netip.MustParseAddr("192.168.0.2"),
		VXLANMAC: vxlan.MAC("node1"), VXLANVNI: vxlan.DefaultVNI, VXLANPort: vxlan.DefaultPort,
	}
}

func near() dataplane.Peer {
	return dataplane.Peer{
		Name: "node2", NextHop: 2, Addr: netip.MustParseAddr("10.1.0.12"),
		VXLANAddr: netip.MustParseAddr("192.168.1.2"), VXLANMAC: vxlan.MAC("node2"),
	}
}

func far() dataplane.Peer {
	return dataplane.Peer{
		Name: "node3", NextHop: 3, Addr: netip.MustParseAddr("10.2.0.11"),
		VXLANAddr: netip.MustParseAddr("192.168.2.2"), VXLANMAC: vxlan.MAC("node3"),
	}
}

func resolved() dataplane.Peer {
	p := far()
	p.Name, p.NextHop = "node3 through the underlay", 4
	p.Gateway, p.Link = netip.MustParseAddr("10.1.0.1"), "eth0"
	return p
}

// translated is a peer behind NAT.
func translated() dataplane.Peer {
	p := far()
	p.Name, p.NextHop = "node3 behind NAT", 5
	p.TunnelAddr, p.TunnelPort = netip.MustParseAddr("203.0.113.3"), 40001
	return p
}

// scene is a host and its peers on one kind of underlay, with workloads of one
// family.
type scene struct {
	name  string
	host  dataplane.Host
	peers []dataplane.Peer
}

func scenes() []scene {
	v4 := scene{"IPv4 over IPv4", host(), []dataplane.Peer{near(), far(), resolved(), translated()}}
	v6 := scene{name: "IPv6 over IPv6", host: host()}
	v6.host.Addr, v6.host.VXLANMAC = netip.MustParsePrefix("fd01::11/64"), vxlan.MAC("node1-v6")
	v6.host.IPIPAddr, v6.host.VXLANAddr = netip.MustParseAddr("fd10::1"), netip.MustParseAddr("fd10::2")
	for _, p := range v4.peers {
		p.VXLANMAC = vxlan.MAC(p.Name[:5] + "-v6")
		p.Addr = netip.MustParseAddr(map[string]string{"10.1.0.12": "fd01::12", "10.2.0.11": "fd02::11"}[p.Addr.String()])
		p.VXLANAddr = netip.MustParseAddr(map[string]string{"192.168.1.2": "fd10:1::2", "192.168.2.2": "fd10:2::2"}[p.VXLANAddr.String()])
		if p.Gateway.IsValid() {
			p.Gateway = netip.MustParseAddr("fd01::1")
		}
		if p.TunnelAddr.IsValid() {
			p.TunnelAddr = netip.MustParseAddr("2001:db8::3")
		}
		v6.peers = append(v6.peers, p)
	}
	// What is of the workloads' family changes places, the rest stays.
	mixed := func(name string, outer, inner scene) scene {
		m := scene{name: name, host: outer.host}
		m.host.Family = inner.host.Outer()
		m.host.IPIPAddr, m.host.VXLANAddr = inner.host.IPIPAddr, inner.host.VXLANAddr
		for i, p := range outer.peers[:2] {
			p.VXLANAddr = inner.peers[i].VXLANAddr
			m.peers = append(m.peers, p)
		}
		return m
	}
	return []scene{v4, v6, mixed("IPv6 over IPv4", v4, v6), mixed("IPv4 over IPv6", v6, v4)}
}

func drivers() []dataplane.Driver {
	return []dataplane.Driver{
		direct.Driver{},
		ipip.Driver{},
		vxlan.Driver{},
		crosssubnet.Driver{Near: direct.Driver{}, Far: ipip.Driver{}},
		crosssubnet.Driver{Near: direct.Driver{}, Far: vxlan.Driver{}},
	}
}

// TestDriversGolden shows every object of every driver in the operator's
// syntax.
func TestDriversGolden(t *testing.T) {
	for _, d := range drivers() {
		t.Run(d.Name(), func(t *testing.T) {
			var b strings.Builder
			for _, s := range scenes() {
				fmt.Fprintf(&b, "# %s\n", s.name)
				describe(&b, d, s)
			}
			golden := filepath.Join("testdata", d.Name()+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), b.String()); diff != "" {
				t.Errorf("objects differ from %s (-want +got):\n%s", golden, diff)
			}
		})
	}
}

func describe(b *strings.Builder, d dataplane.Driver, s scene) {
	show := func(objs []dataplane.Object, err error) {
		if err != nil {
			fmt.Fprintf(b, "\terror: %v\n", err)
		}
		for _, o := range objs {
			fmt.Fprintf(b, "\t%-9s %s\n", o.Key().Kind(), o)
		}
	}
	fmt.Fprintf(b, "overhead %d\n", d.Overhead(s.host.Outer()))
	for _, r := range d.Requires(s.host.Outer()) {
		fmt.Fprintf(b, "requires %s (module %s)\n", r.Link, r.Module)
	}
	for _, f := range d.Encaps(s.host) {
		fmt.Fprintf(b, "takes in %s\n", f)
	}
	objs, err := d.Host(s.host)
	b.WriteString("host:\n")
	show(objs, err)
	for _, p := range s.peers {
		encap, err := d.Encap(s.host, p)
		fmt.Fprintf(b, "peer %s: %s\n", p.Name, encap)
		if err == nil {
			show(d.Peer(s.host, p))
		} else {
			show(nil, err)
		}
	}
}

func TestVTEPMAC(t *testing.T) {
	// The value that Calico derives for this name.
	if got, want := vxlan.MAC("node-a").String(), "66:07:02:c1:cc:60"; got != want {
		t.Errorf("MAC of node-a = %s, want %s", got, want)
	}
}

func TestPeerErrors(t *testing.T) {
	noVTEP := far()
	noVTEP.VXLANAddr = netip.Addr{}
	v6 := far()
	v6.Addr = netip.MustParseAddr("fd00::3")
	bare := host()
	bare.Addr = netip.MustParsePrefix("10.1.0.11/32")
	silent := near()
	silent.Near = dataplane.No
	tests := []struct {
		name   string
		driver dataplane.Driver
		host   dataplane.Host
		peer   dataplane.Peer
		want   error
	}{
		{"direct to another subnet", direct.Driver{}, host(), far(), dataplane.ErrNoPath},
		{"direct from a bare address", direct.Driver{}, bare, near(), dataplane.ErrNoPath},
		{"direct to a neighbour that does not answer", direct.Driver{}, host(), silent, dataplane.ErrNoPath},
		{"vxlan to a peer without a VTEP", vxlan.Driver{}, host(), noVTEP, dataplane.ErrIncomplete},
		{"ipip to an IPv6 underlay", ipip.Driver{}, host(), v6, dataplane.ErrNoPath},
		{"vxlan to an IPv6 underlay", vxlan.Driver{}, host(), v6, dataplane.ErrNoPath},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			objs, err := tt.driver.Peer(tt.host, tt.peer)
			if !errors.Is(err, tt.want) || objs != nil {
				t.Errorf("Peer = %v, %v; want no objects and %v", objs, err, tt.want)
			}
		})
	}
}

// TestNear: what was measured is believed before the length of a prefix.
func TestNear(t *testing.T) {
	bare := host()
	bare.Addr = netip.MustParsePrefix("10.1.0.11/32")
	d := crosssubnet.Driver{Near: direct.Driver{}, Far: vxlan.Driver{}}
	for _, tt := range []struct {
		name string
		host dataplane.Host
		peer dataplane.Peer
		near dataplane.Answer
		want string
	}{
		{"in the subnet", host(), near(), dataplane.Unknown, "direct"},
		{"elsewhere", host(), far(), dataplane.Unknown, "vxlan/4096/4789"},
		{"in the subnet and silent", host(), near(), dataplane.No, "vxlan/4096/4789"},
		{"elsewhere and answering", host(), far(), dataplane.Yes, "direct"},
		{"a bare address", bare, near(), dataplane.Unknown, "vxlan/4096/4789"},
		{"a bare address whose neighbour answers", bare, near(), dataplane.Yes, "direct"},
	} {
		tt.peer.Near = tt.near
		if got, err := d.Encap(tt.host, tt.peer); err != nil || got.String() != tt.want {
			t.Errorf("%s: %s, %v; want %s", tt.name, got, err, tt.want)
		}
	}
}

// TestDeviceNames: the kernel takes names of up to 15 characters.
func TestDeviceNames(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range dataplane.Families() {
		for slot := range vxlan.MaxDevices {
			name := vxlan.DeviceName(f, slot)
			if len(name) > 15 || seen[name] {
				t.Errorf("slot %d of %s: name %q is too long or there twice", slot, f, name)
			}
			seen[name] = true
		}
	}
}

func TestMTUOverride(t *testing.T) {
	h := host()
	h.IPIPMTU, h.VXLANMTU = 1400, 1300
	for _, tt := range []struct {
		driver dataplane.Driver
		want   int
	}{{ipip.Driver{}, 1400}, {vxlan.Driver{}, 1300}} {
		objs, err := tt.driver.Host(h)
		if err != nil {
			t.Fatal(err)
		}
		if got := objs[0].(dataplane.Link).MTU; got != tt.want {
			t.Errorf("%s: MTU = %d, want %d", tt.driver.Name(), got, tt.want)
		}
	}
}

// TestKindsOrder holds that a reference comes after what it refers to.
func TestKindsOrder(t *testing.T) {
	for _, d := range drivers() {
		onHost, err := d.Host(host())
		if err != nil {
			t.Fatal(err)
		}
		lists := [][]dataplane.Object{onHost}
		for _, p := range []dataplane.Peer{near(), resolved()} {
			objs, err := d.Peer(host(), p)
			if err != nil {
				t.Fatal(err)
			}
			lists = append(lists, objs)
		}
		for _, objs := range lists {
			for i := 1; i < len(objs); i++ {
				if objs[i].Key().Kind() < objs[i-1].Key().Kind() {
					t.Errorf("%s: %s comes after %s", d.Name(), objs[i], objs[i-1])
				}
			}
		}
	}
}

func TestParseMAC(t *testing.T) {
	for _, s := range []string{"", "66:07:02", "66:07:02:c1:cc:6", "66:07:02:c1:cc:zz", "66:07:02:c1:cc:60:00"} {
		if m, err := dataplane.ParseMAC(s); err == nil {
			t.Errorf("ParseMAC(%q) = %s, want an error", s, m)
		}
	}
	m, err := dataplane.ParseMAC("EE:ee:ee:ee:ee:0f")
	if err != nil || m.String() != "ee:ee:ee:ee:ee:0f" {
		t.Errorf("ParseMAC = %s, %v", m, err)
	}
}
