package hostile

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestRecords attacks hosts by what somebody wrote into the datastore past
// validation: a tool of another version, or who holds another host's
// credentials.
func TestRecords(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(3, 1, mode)
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: mode}
			l := bringUp(t, "records-"+strings.ToLower(string(mode)), top)
			s, err := l.Store(t.Context(), "node1")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
			reachable(t, l)
			t.Run("interface", func(t *testing.T) { attackInterfaces(t, l, s) })
			t.Run("text", func(t *testing.T) { attackTexts(t, l, s) })
			t.Run("port", func(t *testing.T) { attackPorts(t, l, s) })
			t.Run("address", func(t *testing.T) { freeAddresses(t, l, s) })
			if mode == store.VXLAN { // the others have no VTEPs
				t.Run("vtep", func(t *testing.T) { attackTunnels(t, l, s) })
			}
		})
	}
}

// reachable waits until all hosts and pods answer each other over both families.
func reachable(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, o := range []traffic.Options{{}, {IPv6: true}} {
		poll(t, "hosts and pods reach each other", func() string {
			m, err := l.ReachabilityMatrix(within(t, 20*time.Second), o)
			if err != nil || !m.OK() {
				return fmt.Sprint(err, m.Failures())
			}
			return ""
		})
	}
}

// routerctl runs routerctl against a host's daemon.
func routerctl(t *testing.T, l *lab.Lab, host string, args ...string) (string, error) {
	t.Helper()
	dir, err := filepath.Abs(bring.BinDir())
	if err != nil {
		t.Fatal(err)
	}
	return l.Output(await.Context(t), host, append([]string{filepath.Join(dir, "routerctl"), "--socket", lab.Socket(l.Name(), host)}, args...)...)
}

// says waits until what routerctl prints on a host contains all of texts: that
// daemon has heard of a record that comes over the network, and refuses it.
func says(t *testing.T, l *lab.Lab, host string, args []string, texts ...string) {
	t.Helper()
	poll(t, host+" says "+strings.Join(texts, ", "), func() string {
		out, err := routerctl(t, l, host, args...)
		for _, text := range texts {
			if err == nil && !strings.Contains(out, text) {
				err = errors.New("no " + text)
			}
		}
		if err != nil {
			return fmt.Sprint(err, "\n", out)
		}
		return ""
	})
}

// attackInterfaces writes workload endpoints on interfaces of node2 itself and on one that
// the kernel would cut to that of a pod, and a prefix that makes its uplink a workload's.
// node2's datastore is on node1: a rule that cut it off could not be taken back.
func attackInterfaces(t *testing.T, l *lab.Lab, s store.Store) {
	var keys []store.Key
	longer := deviceOf(t, l, "node2", "node2/pod1") + "x"
	for i, name := range []string{"eth0", "lo", "*", "vxlan.calico", "vxlan-v6.calico", longer} {
		w := &store.WorkloadEndpoint{}
		w.Namespace = "default"
		w.Spec = store.WorkloadEndpointSpec{
			Orchestrator: "k8s", Node: "node2", Pod: fmt.Sprint("bad", i), Endpoint: "eth0", ContainerID: fmt.Sprint("bad", i),
			InterfaceName: name, IPNetworks: []string{"203.0.113.1/32"},
		}
		var err error
		if w.Name, err = store.WorkloadEndpointName(&w.Spec); err != nil {
			t.Fatal(err)
		}
		o, err := store.Create(t.Context(), s, w)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, o.Key)
		why := "interface " + name + " is the host's own"
		if name == longer {
			why = fmt.Sprintf("no interface is called %q", name)
		}
		says(t, l, "node2", []string{"policy", "show"}, o.Key.String(), why)
	}
	reachable(t, l)
	configure(t, s, func(f *v3.FelixConfigurationSpec) { f.InterfacePrefix = "cali,eth,vxlan,l" })
	says(t, l, "node2", []string{"policy", "show"}, "interfacePrefix eth is not used", "interfacePrefix vxlan is not used", "interfacePrefix l is not used")
	if err := l.Restart(await.Context(t), "node2"); err != nil {
		t.Fatal(err)
	}
	if err := l.WaitReady(await.Context(t), "node2"); err != nil {
		t.Fatal(err)
	}
	reachable(t, l)
	configure(t, s, func(f *v3.FelixConfigurationSpec) { f.InterfacePrefix = "" })
	for _, k := range keys {
		if err := store.Delete(t.Context(), s, k, 0); err != nil {
			t.Fatal(err)
		}
	}
	poll(t, "node2 has read that they are gone", func() string {
		out, err := routerctl(t, l, "node2", "policy", "show")
		if err != nil || slices.ContainsFunc(keys, func(k store.Key) bool { return strings.Contains(out, k.String()) }) {
			return fmt.Sprint(err, "\n", out)
		}
		return ""
	})
	reachable(t, l)
}

// configure changes node2's own settings.
func configure(t *testing.T, s store.Store, change func(*v3.FelixConfigurationSpec)) {
	t.Helper()
	key := store.ResourceKey(store.KindFelixConfiguration, "node.node2")
	if _, err := store.Modify(t.Context(), s, key, func(o store.Object) (any, error) {
		f, ok := o.Value.(*v3.FelixConfiguration)
		if !ok {
			return nil, store.ErrNotFound
		}
		change(&f.Spec)
		return f, nil
	}); err != nil {
		t.Fatal(err)
	}
}

// attackTexts gives node2 settings that are longer than the kernel takes, and a policy
// that writes one of them into its rules: rules go on changing, and pods come.
func attackTexts(t *testing.T, l *lab.Lab, s store.Store) {
	long := strings.Repeat("x", 65)
	configure(t, s, func(f *v3.FelixConfigurationSpec) {
		f.InterfacePrefix, f.IptablesNATOutgoingInterfaceFilter, f.LogPrefix = "cali,"+long, long, strings.Repeat("x", 200)
	})
	says(t, l, "node2", []string{"policy", "show"}, `interfacePrefix "xxxxxxxxxxxxxxxxxxxx"… is longer than`, "iptablesNATOutgoingInterfaceFilter is not used")
	p := &v3.GlobalNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "logs"}, Spec: v3.GlobalNetworkPolicySpec{
		Selector: "all()", Ingress: []v3.Rule{{Action: v3.Log}, {Action: v3.Allow}}, Egress: []v3.Rule{{Action: v3.Allow}},
	}}
	o, err := store.Create(t.Context(), s, p)
	if err != nil {
		t.Fatal(err)
	}
	poll(t, "node2's rules log with what the kernel takes of the prefix", func() string {
		if rules := output(t, l, "node2", "nft", "list", "table", "inet", "routerd"); !strings.Contains(rules, "log prefix \""+strings.Repeat("x", 100)) {
			return rules
		}
		return ""
	})
	if _, err := l.AttachPod(await.Context(t), "node2/pod9"); err != nil {
		t.Fatal(err)
	}
	reachable(t, l)
	if err := l.DetachPod(await.Context(t), "node2/pod9"); err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), s, o.Key, 0); err != nil {
		t.Fatal(err)
	}
	configure(t, s, func(f *v3.FelixConfigurationSpec) {
		f.InterfacePrefix, f.IptablesNATOutgoingInterfaceFilter, f.LogPrefix = "", "", ""
	})
}

// attackPorts has a node publish that it takes and sends VXLAN at DNS's port and at one
// that no pool asks for: pods go on asking there, and no host opens a device.
func attackPorts(t *testing.T, l *lab.Lab, s store.Store) {
	n := &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: "10.1.0.99/24"}}}
	n.Name = "aaa"
	store.SetNodeEncaps(n, store.NodeEncaps{
		Published: true, Accepts: []string{"vxlan/77/53", "vxlan/78/53"}, Uses: []string{"vxlan/77/53", "vxlan/79/4999"},
		Sends: map[string]string{"default-ipv4-ippool": "VXLAN/78/53"},
	})
	if _, err := store.Create(t.Context(), s, n); err != nil {
		t.Fatal(err)
	}
	rules := ""
	poll(t, "node1 has read what the node publishes", func() string {
		if rules = output(t, l, "node1", "nft", "list", "ruleset"); !strings.Contains(rules, "10.1.0.99") {
			return "no address of the node in the rules"
		}
		return ""
	})
	if rules = strings.ReplaceAll(rules, "domain", "53"); strings.Contains(rules, "dport 53 ") || strings.Contains(rules, "4999") {
		t.Errorf("node1 has a rule for a port that the node made up:\n%s", rules)
	}
	for _, port := range []int{53, 4999} {
		poll(t, "a pod's question to that port of another host arrives", func() string { return asks(t, l, "node1/pod1", "node2", port) })
	}
	if links := output(t, l, "node1", "ip", "-d", "link", "show", "type", "vxlan"); strings.Contains(links, "dstport 53 ") || strings.Contains(links, "dstport 4999") {
		t.Errorf("node1 takes VXLAN at a port that the node made up:\n%s", links)
	}
	if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, n.Name), 0); err != nil {
		t.Fatal(err)
	}
}

// asks says why a datagram from a place does not arrive at a port of a host; empty: it does.
func asks(t *testing.T, l *lab.Lab, from, host string, port int) string {
	t.Helper()
	at := net.JoinHostPort(address(t, l, host), strconv.Itoa(port))
	var client net.Conn
	var packets net.PacketConn
	err := ns.Do(l.Space(host), func() (err error) { packets, err = net.ListenPacket("udp", at); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	if err := ns.Do(l.Space(from), func() (err error) { client, err = net.Dial("udp", at); return err }); err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Write([]byte("?")); err != nil {
		return err.Error()
	}
	if err := packets.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := packets.ReadFrom(make([]byte, 16)); err != nil {
		return err.Error()
	}
	return ""
}

// attackTunnels has a node of nobody's, before all others by name, claim the VTEP of
// node3, with blocks of its own to which others have routes by it, and another one an
// address inside node3's block besides, and a third one the MACs of node3.
func attackTunnels(t *testing.T, l *lab.Lab, s store.Store) {
	o, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node3"))
	if err != nil {
		t.Fatal(err)
	}
	victim, ok := o.Value.(*store.Node)
	if !ok {
		t.Fatalf("%s holds a %T", o.Key, o.Value)
	}
	pod, pod6 := addrOf(t, l, "node3/pod1", dataplane.IPv4), addrOf(t, l, "node3/pod1", dataplane.IPv6)
	thief := func(name, addr, addr6 string) *store.Node {
		n := &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: addr, IPv6Address: addr6}}}
		n.Name = name
		n.Spec.IPv4VXLANTunnelAddr, n.Spec.IPv6VXLANTunnelAddr = victim.Spec.IPv4VXLANTunnelAddr, victim.Spec.IPv6VXLANTunnelAddr
		n.Spec.VXLANTunnelMACAddr = "02:00:00:00:00:01" // smaller than any derived one
		return n
	}
	ofMACs := thief("aac", "10.1.0.98/24", "fd00:1::98/64")
	ofMACs.Spec.IPv4VXLANTunnelAddr, ofMACs.Spec.IPv6VXLANTunnelAddr = "203.0.113.1", "2001:db8::1"
	mac, mac6 := vtepMAC(t, l, "node3", dataplane.IPv4).String(), vtepMAC(t, l, "node3", dataplane.IPv6).String()
	ofMACs.Spec.VXLANTunnelMACAddr, ofMACs.Spec.VXLANTunnelMACAddrV6 = mac, mac6
	addrTaken := fmt.Sprintf(" claims the VXLAN tunnel address %s, which IPAM assigned to node node3", victim.Spec.IPv4VXLANTunnelAddr)
	thieves := []struct {
		*store.Node
		refused []string
	}{
		{thief("aaa", "10.1.0.99/24", "fd00:1::99/64"), []string{"node aaa" + addrTaken}},
		{thief("aab", pod.String()+"/32", pod6.String()+"/128"), []string{"node aab" + addrTaken}},
		{ofMACs, []string{
			"both claim the VXLAN MAC " + mac + ": it counts as that of node3",
			"both claim the VXLAN MAC " + mac6 + ": it counts as that of node3",
		}},
	}
	// What node1 asks the thief at the pod's address the pod refuses: that answer is for
	// a host, and goes without a tunnel.
	pool, pool6 := l.Topology().Pool.CIDR, l.Topology().Pool6.CIDR
	plain, err := l.Capture("node1", "eth0", func(p lab.Packet) bool {
		from, to := p.Outer.Src, p.Outer.Dst
		return !p.Tunnelled() && (to == pod || to == pod6 || from == pod && pool.Contains(to) || from == pod6 && pool6.Contains(to))
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range thieves {
		if _, err := store.Create(t.Context(), s, n.Node); err != nil {
			t.Fatal(err)
		}
		for _, p := range []netip.Prefix{pool, pool6} {
			takeBlock(t, s, n.Name, p)
		}
		for _, host := range []string{"node1", "node2"} {
			says(t, l, host, []string{"node", "status"}, n.refused...)
		}
		reachable(t, l)
		// One at a time: a condition has no room for what all of them claim.
		if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, n.Name), 0); err != nil {
			t.Fatal(err)
		}
	}
	if got := plain.Stop(); len(got) > 0 {
		t.Errorf("%d packets of node3's pod outside the tunnel, the first %s", len(got), got[0])
	}
}

// takeBlock gives a node a block of a pool that nobody has, with a confirmed affinity,
// until the test ends.
func takeBlock(t *testing.T, s store.Store, node string, pool netip.Prefix) {
	t.Helper()
	const size = 64
	for first := 0; ; first += size {
		a, ok := store.AddrAt(pool, first)
		if !ok {
			t.Fatalf("%s has no block to spare", pool)
		}
		cidr := netip.PrefixFrom(a, a.BitLen()-6)
		b := &store.Block{CIDR: cidr.String(), Affinity: new("host:" + node), Allocations: make([]*int, size), Attributes: []store.Attribute{}, SequenceNumberForAllocation: map[string]uint64{}}
		for i := range size {
			b.Unallocated = append(b.Unallocated, i)
		}
		block, affinity := store.BlockKey(cidr), store.AffinityKey(node, cidr)
		_, err := s.Txn(t.Context(),
			store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: block, Value: b}},
			store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: affinity, Value: &store.Affinity{State: store.AffinityConfirmed}}},
		)
		if errors.Is(err, store.ErrConflict) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			for _, k := range []store.Key{affinity, block} {
				if err := store.Delete(context.WithoutCancel(t.Context()), s, k, 0); err != nil && !errors.Is(err, store.ErrNotFound) { // nobody's are collected
					t.Error(err)
				}
			}
		})
		return
	}
}
