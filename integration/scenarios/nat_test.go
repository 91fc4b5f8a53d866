package scenarios

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// clouds is a plain rack with the store, and two clouds whose hosts have public
// addresses that are not on their interfaces.
func clouds(e store.Encapsulation) lab.Topology {
	pods := 1
	return lab.Topology{
		Racks: []lab.Rack{
			{Name: "rack1", CIDR: netip.MustParsePrefix("10.1.0.0/24")},
			{Name: "clouda", CIDR: netip.MustParsePrefix("10.2.0.0/24"), NAT: &lab.NAT{Kind: lab.NATBasic}},
			{Name: "cloudb", CIDR: netip.MustParsePrefix("10.3.0.0/24"), NAT: &lab.NAT{Kind: lab.NATBasic}},
		},
		Nodes: []lab.Node{
			{Name: "node1", Rack: "rack1"}, {Name: "a1", Rack: "clouda"}, {Name: "a2", Rack: "clouda"}, {Name: "b1", Rack: "cloudb"},
		},
		Pods: &pods,
		Pool: lab.Pool{Encapsulation: e},
	}
}

// podsReach waits until every pod reaches every other with packets of a size.
func podsReach(t *testing.T, l *lab.Lab, size int) {
	t.Helper()
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	var places []string
	for _, p := range pods {
		places = append(places, p.String())
	}
	start := time.Now()
	m, err := l.Reachability(await.Context(t), places, traffic.Options{Size: size, DF: size > 0})
	if err != nil {
		t.Fatal(err)
	}
	if asked, answered := m.Pairs(); asked == 0 || asked != answered {
		for _, h := range l.Hosts() {
			t.Logf("paths of %s:\n%s", h, paths(t, l, h))
		}
		t.Fatalf("%d of %d pairs:\n%s", answered, asked, strings.Join(m.Failures(), "\n"))
	}
	t.Logf("every pod reached every other with %d bytes after %.2f s", size, time.Since(start).Seconds())
}

// paths is what routerctl shows of a host.
func paths(t *testing.T, l *lab.Lab, host string) string {
	t.Helper()
	out, err := l.Output(await.Context(t), host, binDir(t)+"/routerctl", "--socket", lab.Socket(l.Name(), host), "node", "paths")
	if err != nil {
		return err.Error()
	}
	return out
}

// outerEnds pings from one pod to another and returns where the tunnelled
// packets went from and to, as seen on a device.
func outerEnds(t *testing.T, l *lab.Lab, where, dev, from, to string) (there, back lab.Packet) {
	t.Helper()
	src, dst := addr(t, l, from), addr(t, l, to)
	c, err := l.Capture(where, dev, func(p lab.Packet) bool {
		in := p.Payload()
		return p.Tunnelled() && in.Proto == lab.ProtoICMP && (in.Src == src && in.Dst == dst || in.Src == dst && in.Dst == src)
	})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := l.Ping(await.Context(t), from, to, traffic.Options{}); err != nil || !r.OK {
		t.Errorf("%s → %s: %+v, %v", from, to, r, err)
	}
	packets, err := c.WaitFor(await.Context(t), 2)
	c.Stop()
	if err != nil {
		t.Fatalf("%s → %s on %s of %s: %v: %v", from, to, dev, where, err, packets)
	}
	i := slices.IndexFunc(packets, func(p lab.Packet) bool { return p.Payload().Src == src })
	j := slices.IndexFunc(packets, func(p lab.Packet) bool { return p.Payload().Src == dst })
	if i < 0 || j < 0 {
		t.Fatalf("%s → %s on %s of %s: %v", from, to, dev, where, packets)
	}
	return packets[i], packets[j]
}

func public(t *testing.T, l *lab.Lab, host string) netip.Addr {
	t.Helper()
	a, err := l.PublicAddress(host)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestNAT: two clouds behind 1:1 NAT and a plain rack. Nobody is told any
// public address; within a cloud private addresses are used, between clouds
// public ones, at once.
func TestNAT(t *testing.T) {
	beside(t)
	s, err := newStage()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []store.Encapsulation{store.VXLAN, store.VXLANCrossSubnet, store.IPIP} {
		if !slices.Contains(s.modes, e) {
			continue
		}
		t.Run(string(e), func(t *testing.T) {
			beside(t)
			l := bringUp(t, "nat-"+strings.ToLower(string(e)), clouds(e))
			podsReach(t, l, 0)
			podsReach(t, l, modeOf(e).mtu)
			// Within a cloud nothing leaves it.
			if modeOf(e).near != "" {
				there, back := outerEnds(t, l, "a1", "eth0", "a1/pod1", "a2/pod1")
				if there.Outer.Dst != addr(t, l, "a2") || back.Outer.Src != addr(t, l, "a2") {
					t.Errorf("a1 → a2 did not use the private addresses: %s, %s", there, back)
				}
			}
			// Between clouds it goes to the public address, from the private one
			// on the host, from the public one beyond the translator.
			there, back := outerEnds(t, l, "a1", "eth0", "a1/pod1", "b1/pod1")
			if there.Outer.Src != addr(t, l, "a1") || there.Outer.Dst != public(t, l, "b1") || back.Outer.Src != public(t, l, "b1") || back.Outer.Dst != addr(t, l, "a1") {
				t.Errorf("a1 → b1 at a1: %s, %s", there, back)
			}
			there, back = outerEnds(t, l, "spine", "cloudb", "a1/pod1", "b1/pod1")
			if there.Outer.Src != public(t, l, "a1") || there.Outer.Dst != public(t, l, "b1") || back.Outer.Dst != public(t, l, "a1") {
				t.Errorf("a1 → b1 on the spine: %s, %s", there, back)
			}
			there, back = outerEnds(t, l, "node1", "eth0", "node1/pod1", "a2/pod1")
			if there.Outer.Dst != public(t, l, "a2") || back.Outer.Src != public(t, l, "a2") {
				t.Errorf("node1 → a2 at node1: %s, %s", there, back)
			}
			testMovedAddress(t, l)
		})
	}
}

// TestNATPortChange changes VXLAN's port between clouds, there and back: the
// address behind the translator is that of the new port too, and nothing is
// lost.
func TestNATPortChange(t *testing.T) {
	beside(t)
	c := &changing{Lab: bringUp(t, "nat-port", clouds(store.VXLAN))}
	c.store = openStore(t, c.Lab)
	// Across NAT there are no sessions, and no sender counts as moved before BGP
	// had its time.
	routerctl(t, c.Lab, "node1", `apiVersion: projectcalico.org/v3
kind: BGPConfiguration
metadata: {name: default}
spec: {nodeToNodeMeshEnabled: false}
`, "apply", "--force", "-f", "-")
	podsReach(t, c.Lab, 0)
	c.waitMode(t, store.VXLAN)
	flows, stop := startFlows(t, c.Lab, [2]string{"a1/pod1", "b1/pod1"}, [2]string{"b1/pod1", "a2/pod1"}, [2]string{"node1/pod1", "a1/pod1"},
		[2]string{"b1/pod1", "node1/pod1"}, [2]string{"a1/pod1", "a2/pod1"})
	for _, port := range []uint16{4790, store.DefaultVXLANPort} {
		start := time.Now()
		applySettings(t, c.Lab, fmt.Sprintf("vxlanPort: %d", port))
		c.waitNumbers(t, fmt.Sprintf("port %d", port), store.NewMode(store.VXLAN, store.DefaultVXLANVNI, port))
		t.Logf("the change to port %d took %.2f s", port, time.Since(start).Seconds())
		waitFlows(t, flows, 3*time.Second) // the addresses are asked again meanwhile
	}
	stop()
}

// testMovedAddress gives a host another public address: all follow.
func testMovedAddress(t *testing.T, l *lab.Lab) {
	to := netip.MustParseAddr("198.18.2.200")
	if err := l.MovePublicAddress(await.Context(t), "b1", to); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	poll(t, "the way to b1's new public address", func() string {
		for _, from := range []string{"node1/pod1", "a1/pod1", "a2/pod1"} {
			r, err := l.Ping(await.Context(t), from, "b1/pod1", traffic.Options{})
			if err != nil || !r.OK {
				return fmt.Sprintf("%s → b1/pod1: %+v, %v", from, r, err)
			}
		}
		return ""
	})
	t.Logf("b1's new public address was found after %.1f s", time.Since(start).Seconds())
	poll(t, "b1's annotation", func() string {
		obj, err := openStore(t, l).Get(await.Context(t), store.ResourceKey(store.KindNode, "b1"))
		if err != nil {
			return err.Error()
		}
		if got := obj.Value.(*store.Node).Annotations[store.AnnotationTunnelAddress]; got != to.String() {
			return "it is " + got
		}
		return ""
	})
}

// TestPortTranslation: hosts that share one public address. Their probes open
// a mapping, and peers send to it, from the one port that is let in.
func TestPortTranslation(t *testing.T) {
	beside(t)
	pods := 1
	l := bringUp(t, "pat", lab.Topology{
		Racks: []lab.Rack{
			{Name: "rack1", CIDR: netip.MustParsePrefix("10.1.0.0/24")},
			{Name: "home", CIDR: netip.MustParsePrefix("10.2.0.0/24"), NAT: &lab.NAT{Kind: lab.NATPort}},
		},
		Nodes: []lab.Node{
			{Name: "node1", Rack: "rack1"}, {Name: "node2", Rack: "rack1"}, {Name: "home1", Rack: "home"}, {Name: "home2", Rack: "home"},
		},
		Pods: &pods,
		Pool: lab.Pool{Encapsulation: store.VXLAN},
	})
	podsReach(t, l, 0)
	podsReach(t, l, modeOf(store.VXLAN).mtu)
	shared := public(t, l, "home1")
	there, _ := outerEnds(t, l, "node1", "eth0", "node1/pod1", "home1/pod1")
	if there.Outer.Dst != shared || there.DstPort < 20000 || there.SrcPort != lab.VXLANPort {
		t.Errorf("node1 → home1: %s from port %d; want to the mapping at %s, from VXLAN's own port", there, there.SrcPort, shared)
	}
	before := there.DstPort
	within1, _ := outerEnds(t, l, "home1", "eth0", "home1/pod1", "home2/pod1")
	if within1.Outer.Dst != addr(t, l, "home2") || within1.DstPort != lab.VXLANPort {
		t.Errorf("home1 → home2 did not use the private address: %s", within1)
	}

	t.Run("killed and started again", func(t *testing.T) {
		flows, stop := startFlows(t, l, [2]string{"node1/pod1", "home1/pod1"}, [2]string{"home2/pod1", "node2/pod1"})
		for _, host := range []string{"node1", "home1"} {
			if err := l.Kill(await.Context(t), host, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			waitFlows(t, flows, time.Second)
			if err := l.Restart(await.Context(t), host); err != nil {
				t.Fatal(err)
			}
			waitFlows(t, flows, 3*time.Second)
		}
		stop()
	})

	t.Run("the translator forgets", func(t *testing.T) {
		if err := l.ResetNAT("home"); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		// From outside: what the hosts behind the translator send opens no way
		// back by itself.
		poll(t, "the way in after the reset", func() string {
			for _, to := range []string{"home1/pod1", "home2/pod1"} {
				r, err := l.Ping(await.Context(t), "node1/pod1", to, traffic.Options{})
				if err != nil || !r.OK {
					return fmt.Sprintf("node1/pod1 → %s: %+v, %v", to, r, err)
				}
			}
			return ""
		})
		t.Logf("found the new mappings after %.1f s", time.Since(start).Seconds())
		there, _ := outerEnds(t, l, "node1", "eth0", "node1/pod1", "home1/pod1")
		if there.DstPort == before {
			t.Errorf("the mapping is the same, %d: nothing was tested", before)
		}
		podsReach(t, l, 0)
	})
}

// Behind a firewall that lets in only whom its host has sent to, packets go from VXLAN's
// own port, and all get there: those too whose checksum pods' kernels leave to the
// hardware, from the first on.
func TestStatefulFirewall(t *testing.T) {
	beside(t)
	l := bringUp(t, "firewall", topology(3, 1, store.VXLAN))
	from, to := "node1/pod1", "node3/pod1" // in another rack: a router is between them
	podsReach(t, l, 0)
	for _, c := range []string{
		"add table inet firewall", "add chain inet firewall in { type filter hook input priority 10; }",
		fmt.Sprintf("add rule inet firewall in udp dport %d ct state new drop", lab.VXLANPort),
	} {
		output(t, l, "node3", "nft", c)
	}
	// One that starts asks at once.
	if err := l.Restart(await.Context(t), "node1"); err != nil {
		t.Fatal(err)
	}
	poll(t, "the source port of node1", func() string {
		if tables := output(t, l, "node1", "nft", "list", "tables"); !strings.Contains(tables, "routerd-sourceport") {
			return tables
		}
		return ""
	})
	packets := startPackets(t, l, traffic.LoadOptions{Rate: loadRate()}, [2]string{from, to})
	flows, stop := startFlows(t, l, [2]string{from, to})
	waitFlows(t, flows, time.Second)
	stop()
	r := packets.Interval()
	t.Log(r.Sum())
	for _, f := range append(r.Bad(), r.Silent()...) {
		t.Error(f)
	}
	// Nor had a measurement to find out that they were lost.
	if log := l.LogTail("node1", 500); strings.Contains(log, "offloads of a tunnel spoil packets") {
		t.Errorf("packets were lost until a probe found it:\n%s", log)
	}
}
