package hostile

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestIPIP attacks hosts whose tunnels are the kernel's ipip and ip6_tunnel devices, as
// somebody on the underlay, as a pod, and by records.
func TestIPIP(t *testing.T) {
	top := topology(2, 2, store.IPIP)
	top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: store.IPIP}
	l := bringUp(t, "ipip", top)
	s, err := l.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	reachable(t, l)
	t.Run("outside", func(t *testing.T) { tunnelsFromOutside(t, l, ipTunnels()) })
	t.Run("pod", func(t *testing.T) { tunnelsFromPods(t, l, ipTunnels()) })
	t.Run("port", func(t *testing.T) { attackPorts(t, l, s) })
	t.Run("address", func(t *testing.T) { attackIPIP(t, l, s) })
}

// ipTunnels are those that the devices of a cluster of both families in IPIP take in, and
// one that its packets do not use: ip6_tunnel takes IPv4 as it takes IPv6.
func ipTunnels() []tunnel {
	send := func(network string, outer dataplane.Family) func(*testing.T, *lab.Lab, string, string, netip.Addr, netip.Addr) {
		return func(t *testing.T, l *lab.Lab, from, host string, src, dst netip.Addr) {
			t.Helper()
			var c net.Conn
			if err := ns.Do(l.Space(from), func() (err error) {
				c, err = net.DialTimeout(network, addrOf(t, l, host, outer).String(), time.Second)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Write(inside(src, dst)[2:]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return []tunnel{
		{dataplane.IPv4, dataplane.IPv4, send("ip4:4", dataplane.IPv4), true},
		{dataplane.IPv6, dataplane.IPv6, send("ip6:41", dataplane.IPv6), true},
		{dataplane.IPv4, dataplane.IPv6, send("ip6:4", dataplane.IPv6), false},
	}
}

// tunnelsFromPods sends a pod packets in tunnels as another pod, from a pod: to the own
// host, which would take them from itself, and to another one, which would have them from
// a host of the cluster.
func tunnelsFromPods(t *testing.T, l *lab.Lab, tunnels []tunnel) {
	t.Helper()
	const attacker = "node1/pod1"
	for _, w := range tunnels {
		for host, victim := range map[string]string{"node1": "node1/pod2", "node2": "node2/pod1"} {
			src, dst := addrOf(t, l, "node2/pod2", w.inner), addrOf(t, l, victim, w.inner)
			heard, err := l.Capture(victim, "eth0", func(p lab.Packet) bool { return p.Outer.Src == src && p.Outer.Proto == experimental })
			if err != nil {
				t.Fatal(err)
			}
			for range 5 {
				w.send(t, l, attacker, host, src, dst)
			}
			output(t, l, attacker, "ping", "-c", "2", "-i", "0.2", dst.String())
			if got := heard.Stop(); len(got) > 0 {
				t.Errorf("%s: %d packets that %s tunnelled by way of %s reached %s as from node2/pod2", w, len(got), attacker, host, victim)
			}
		}
	}
}

// attackIPIP has a node of nobody's, before all others by name, claim node2's addresses in
// tunnels, and another one an address inside node2's block: packets to node2's pods go on
// in tunnels, and to node2.
func attackIPIP(t *testing.T, l *lab.Lab, s store.Store) {
	o, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node2"))
	if err != nil {
		t.Fatal(err)
	}
	victim, ok := o.Value.(*store.Node)
	if !ok {
		t.Fatalf("%s holds a %T", o.Key, o.Value)
	}
	pod4, pod6 := addrOf(t, l, "node2/pod1", dataplane.IPv4), addrOf(t, l, "node2/pod1", dataplane.IPv6)
	thief := func(name, addr, addr6 string) *store.Node {
		n := &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: addr, IPv6Address: addr6, IPv4IPIPTunnelAddr: victim.Spec.BGP.IPv4IPIPTunnelAddr}}}
		n.Name = name
		n.Annotations = map[string]string{store.AnnotationIPv6IPIPTunnelAddr: victim.Annotations[store.AnnotationIPv6IPIPTunnelAddr]}
		return n
	}
	plain, err := l.Capture("node1", "eth0", func(p lab.Packet) bool {
		return !p.Tunnelled() && (p.Outer.Dst == pod4 || p.Outer.Dst == pod6)
	})
	if err != nil {
		t.Fatal(err)
	}
	thieves := []*store.Node{thief("aab", pod4.String()+"/32", pod6.String()+"/128"), thief("aaa", "10.1.0.99/24", "fd00:1::99/64")}
	for _, n := range thieves {
		if _, err := store.Create(t.Context(), s, n); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range l.Hosts() {
		poll(t, h+" has read what the nodes claim", func() string {
			if rules := output(t, l, h, "nft", "list", "table", "inet", "routerd"); !strings.Contains(rules, "10.1.0.99") {
				return rules
			}
			return ""
		})
	}
	for _, f := range dataplane.Families() {
		for _, from := range []string{"node1", "node1/pod1"} {
			output(t, l, from, "ping", fmt.Sprintf("-%d", f), "-c", "3", "-i", "0.2", addrOf(t, l, "node2/pod1", f).String())
		}
	}
	if got := plain.Stop(); len(got) > 0 {
		t.Errorf("%d packets to node2's pod outside the tunnel, the first %s", len(got), got[0])
	}
	for _, n := range thieves {
		if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, n.Name), 0); err != nil {
			t.Fatal(err)
		}
	}
}
