package lab

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

func natTopology(kind NATKind) Topology {
	return Topology{
		Racks: []Rack{
			{Name: "rack1", CIDR: netip.MustParsePrefix("10.1.0.0/24")},
			{Name: "cloud", CIDR: netip.MustParsePrefix("10.2.0.0/24"), NAT: &NAT{Kind: kind}},
		},
		Nodes: []Node{{Name: "node1", Rack: "rack1"}, {Name: "c1", Rack: "cloud"}, {Name: "c2", Rack: "cloud"}},
		Pods:  new(0),
	}
}

func TestNATTopology(t *testing.T) {
	t.Parallel()
	top, err := natTopology(NATBasic).Complete()
	if err != nil {
		t.Fatal(err)
	}
	r, n := top.Racks[1], top.Nodes[2]
	if got := r.publicAddress(n).String(); got != "198.18.1.12" {
		t.Errorf("public address of %s is %s, want 198.18.1.12", n.Name, got)
	}
	r.NAT.Kind = NATPort
	if got := r.publicAddress(n).String(); got != "198.18.1.1" {
		t.Errorf("shared public address is %s, want 198.18.1.1", got)
	}
	for want, change := range map[string]func(*Topology){
		"nat.kind \"half\": want basic or port":             func(t *Topology) { t.Racks[1].NAT.Kind = "half" },
		"as large as the rack's, 10.2.0.0/24":               func(t *Topology) { t.Racks[1].NAT.Public = netip.MustParsePrefix("198.51.100.0/28") },
		"overlaps a prefix of racks[0] (rack1)":             func(t *Topology) { t.Racks[1].NAT.Public = netip.MustParsePrefix("10.1.0.0/24") },
		"nodes[0] (c1) runs the store":                      func(t *Topology) { t.Nodes = t.Nodes[1:] },
		"only IPv4 is translated":                           func(t *Topology) { t.Underlay = UnderlayDual },
		"the spine cannot be a BGP peer":                    func(t *Topology) { t.Pool.Encapsulation = store.Direct },
		"needs the namespace name -cloud, which rack cloud": func(t *Topology) { t.Nodes = append(t.Nodes, Node{Name: "cloud", Rack: "rack1"}) },
	} {
		top := natTopology(NATBasic)
		change(&top)
		if _, err := top.Complete(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one that says %q", err, want)
		}
	}
}

// What comes from behind NAT has a public address, and gets in again only as
// the kind of NAT allows.
func TestNAT(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		kind    NATKind
		natted  string
		getsIn  bool
		labName string
	}{{NATBasic, "198.18.1.11", true, "natbasic"}, {NATPort, "198.18.1.1", false, "natport"}} {
		t.Run(string(tt.kind), func(t *testing.T) {
			t.Parallel()
			l := up(t, tt.labName, natTopology(tt.kind))
			c, err := l.Capture("node1", "eth0", func(p Packet) bool { return p.Outer.Proto == ProtoICMP })
			if err != nil {
				t.Fatal(err)
			}
			if r, err := l.Ping(await.Context(t), "c1", "node1", traffic.Options{}); err != nil || !r.OK {
				t.Errorf("c1 → node1: %+v, %v", r, err)
			}
			packets, err := c.WaitFor(await.Context(t), 2)
			c.Stop()
			if err != nil || packets[0].Outer.Src.String() != tt.natted {
				t.Errorf("node1 saw %v, %v; want %s", packets, err, tt.natted)
			}
			if got, err := l.PublicAddress("c1"); err != nil || got.String() != tt.natted {
				t.Errorf("PublicAddress: %s, %v", got, err)
			}
			if r, err := l.Ping(await.Context(t), "node1", "c1", traffic.Options{}); err != nil || r.OK {
				t.Errorf("the private address was reached from outside: %+v, %v", r, err)
			}
			if r, err := l.Ping(await.Context(t), "c1", "c2", traffic.Options{}); err != nil || !r.OK {
				t.Errorf("c1 → c2: %+v, %v", r, err)
			}
			in, err := l.Exec(await.Context(t), "node1", "ping", "-c1", "-W2", tt.natted)
			if err != nil || (in.Code == 0) != tt.getsIn {
				t.Errorf("ping of %s from outside: %+v, %v; want an answer: %t", tt.natted, in, err, tt.getsIn)
			}
			if err := l.ResetNAT("cloud"); err != nil {
				t.Error(err)
			}
			if err := l.ResetNAT("rack1"); err == nil {
				t.Error("a rack without NAT was reset")
			}
			to := netip.MustParseAddr("198.18.1.77")
			if err := l.MovePublicAddress(await.Context(t), "c1", to); (err == nil) != (tt.kind == NATBasic) {
				t.Errorf("MovePublicAddress: %v", err)
			}
			if tt.kind == NATBasic {
				in, err := l.Exec(await.Context(t), "node1", "ping", "-c1", "-W5", to.String())
				if err != nil || in.Code != 0 {
					t.Errorf("ping of the new address: %+v, %v", in, err)
				}
			}
		})
	}
}
