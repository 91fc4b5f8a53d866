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
			fmt.Fprintf(&b, "overhead %d\n", d.Overhead(dataplane.IPv4))
			for _, r := range d.Requires() {
				fmt.Fprintf(&b, "requires %s (module %s)\n", r.Link, r.Module)
			}
			show := func(title string, objs []dataplane.Object, err error) {
				fmt.Fprintf(&b, "%s:\n", title)
				if err != nil {
					fmt.Fprintf(&b, "\terror: %v\n", err)
				}
				for _, o := range objs {
					fmt.Fprintf(&b, "\t%-9s %s\n", o.Key().Kind(), o)
				}
			}
			objs, err := d.Host(host())
			show("host", objs, err)
			for _, p := range []dataplane.Peer{near(), far(), resolved()} {
				objs, err := d.Peer(host(), p)
				show("peer "+p.Name, objs, err)
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
	tests := []struct {
		name   string
		driver dataplane.Driver
		host   dataplane.Host
		peer   dataplane.Peer
		want   error
	}{
		{"direct to another subnet", direct.Driver{}, host(), far(), dataplane.ErrNoPath},
		{"direct from a bare address", direct.Driver{}, bare, near(), dataplane.ErrNoPath},
		{"vxlan to a peer without a VTEP", vxlan.Driver{}, host(), noVTEP, dataplane.ErrIncomplete},
		{"ipip to an IPv6 underlay", ipip.Driver{}, host(), v6, dataplane.ErrNoPath},
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
		for _, p := range []dataplane.Peer{near(), resolved()} {
			objs, err := d.Peer(host(), p)
			if err != nil {
				t.Fatal(err)
			}
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
