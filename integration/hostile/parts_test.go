package hostile

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestPartsOfBlocks: a switch, then a node, and then that node by way of a reflector
// announce an address of node2's pod and both halves of its block to node1. More specific routes win, so what node1's pods
// send to node2's would be theirs.
func TestPartsOfBlocks(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(4, 1, mode)
			top.Spine.BGP = new(true)
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: mode}
			l := bringUp(t, "parts-"+strings.ToLower(string(mode)), top)
			reachable(t, l)
			var all []netip.Prefix
			for _, f := range dataplane.Families() {
				all = append(all, switchLies(t, l, f)...)
			}
			const liar, reflector = "node3", "node4"
			refusedBoth := func(when string) {
				t.Helper()
				for _, f := range dataplane.Families() {
					block, parts := partsOf(t, l, f)
					refused(t, l, f, block, parts)
					answersStill(t, l, f, when)
				}
			}
			if err := l.Kill(await.Context(t), liar, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			stop := lies(t, l, liar, "node1", all)
			refusedBoth("while node3 announces parts of node2's block")
			stop()
			withdrawn(t, l, all)
			reflectBy(t, l, reflector)
			lies(t, l, liar, reflector, all)
			refusedBoth("while node4 reflects parts of node2's block")
		})
	}
}

// answersStill asks node2's pod as node1's.
func answersStill(t *testing.T, l *lab.Lab, f dataplane.Family, when string) {
	t.Helper()
	if _, err := l.Output(await.Context(t), "node1/pod1", "ping", "-c", "1", "-W", "1", addrOf(t, l, "node2/pod1", f).String()); err != nil {
		t.Errorf("%s: %s: %v", f, when, err)
	}
}

// switchLies has the spine announce the parts of node2's block of a family, and returns them.
func switchLies(t *testing.T, l *lab.Lab, f dataplane.Family) []netip.Prefix {
	t.Helper()
	block, parts := partsOf(t, l, f)
	if err := l.SpineDrops(await.Context(t), parts...); err != nil {
		t.Fatal(err)
	}
	refused(t, l, f, block, parts)
	answersStill(t, l, f, "while a switch announces parts of the block")
	acceptByName(t, l, f, parts[0])
	poll(t, "what a BGPFilter of the switch accepts by name is taken from it", func() string {
		if routes := routesOf(t, l, "node1", f); !slices.Contains(routes, parts[0].Addr().String()) || slices.Contains(routes, parts[1].String()) {
			return fmt.Sprint(routes)
		}
		return ""
	})
	acceptByName(t, l, f)
	refused(t, l, f, block, parts)
	if err := l.SpineDrops(await.Context(t)); err != nil {
		t.Fatal(err)
	}
	withdrawn(t, l, parts)
	return parts
}

// withdrawn waits until nobody announces any part to node1.
func withdrawn(t *testing.T, l *lab.Lab, parts []netip.Prefix) {
	t.Helper()
	poll(t, "they are withdrawn", func() string {
		for _, p := range parts {
			if out, err := routerctl(t, l, "node1", "routes", p.String()); err != nil || strings.Contains(out, p.String()) {
				return fmt.Sprint(out, err)
			}
		}
		return ""
	})
}

// reflectBy has a node reflect for all others, which have no sessions with each other any more.
func reflectBy(t *testing.T, l *lab.Lab, host string) {
	t.Helper()
	s, err := l.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindNode, host), func(o store.Object) (any, error) {
		n, ok := store.Clone(o.Value).(*store.Node)
		if !ok {
			return nil, store.ErrNotFound
		}
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels["reflector"], n.Spec.BGP.RouteReflectorClusterID = "true", "244.0.0.1"
		return n, nil
	}); err != nil {
		t.Fatal(err)
	}
	peer := &v3.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "to-reflector"}, Spec: v3.BGPPeerSpec{NodeSelector: "!has(reflector)", PeerSelector: "has(reflector)"}}
	if _, err := store.Create(t.Context(), s, peer); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindBGPConfiguration, store.DefaultName), func(o store.Object) (any, error) {
		c, ok := o.Value.(*v3.BGPConfiguration)
		if !ok {
			c = v3.NewBGPConfiguration()
			c.Name = store.DefaultName
		}
		c.Spec.NodeToNodeMeshEnabled = new(false)
		return c, nil
	}); err != nil {
		t.Fatal(err)
	}
}

// partsOf returns the block of node2's pod, and the pod's address and the block's halves.
func partsOf(t *testing.T, l *lab.Lab, f dataplane.Family) (block netip.Prefix, parts []netip.Prefix) {
	t.Helper()
	a := addrOf(t, l, "node2/pod1", f)
	block, err := a.Prefix(a.BitLen() - 6)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := routerctl(t, l, "node1", "routes", block.String()); err != nil || !strings.Contains(out, "block of node node2") {
		t.Fatalf("%s is no block of node2's: %v\n%s", block, err, out)
	}
	second, ok := store.AddrAt(block, 32)
	if !ok {
		t.Fatalf("no second half of %s", block)
	}
	half := block.Bits() + 1
	return block, []netip.Prefix{netip.PrefixFrom(a, a.BitLen()), netip.PrefixFrom(block.Addr(), half), netip.PrefixFrom(second, half)}
}

// refused waits until node1 has been told of all parts and says why it does not use
// them, and has no route to any.
func refused(t *testing.T, l *lab.Lab, f dataplane.Family, block netip.Prefix, parts []netip.Prefix) {
	t.Helper()
	poll(t, "node1 refuses the parts", func() string {
		for _, p := range parts {
			out, err := routerctl(t, l, "node1", "routes", p.String())
			if err != nil || !strings.Contains(out, fmt.Sprintf("it is a part of block %s, which node node2 holds", block)) {
				return fmt.Sprint(p, ": ", err, "\n", out)
			}
		}
		routes := routesOf(t, l, "node1", f)
		for _, p := range parts {
			if slices.Contains(routes, p.String()) || slices.Contains(routes, p.Addr().String()) && p.IsSingleIP() {
				return fmt.Sprint("it has a route to ", p, ": ", routes)
			}
		}
		return ""
	})
}

// routesOf are the destinations of a host's routes.
func routesOf(t *testing.T, l *lab.Lab, host string, f dataplane.Family) (list []string) {
	t.Helper()
	for line := range strings.Lines(output(t, l, host, "ip", fmt.Sprintf("-%d", f), "route", "show")) {
		list = append(list, strings.Fields(line)[0])
	}
	return list
}

// acceptByName gives node1's session with the spine a BGPFilter that accepts prefixes;
// without any it takes the filter away.
func acceptByName(t *testing.T, l *lab.Lab, f dataplane.Family, prefixes ...netip.Prefix) {
	t.Helper()
	s, err := l.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	filter := &v3.BGPFilter{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("by-name-", int(f))}}
	var names []string
	for _, p := range prefixes {
		if f == dataplane.IPv6 {
			filter.Spec.ImportV6 = append(filter.Spec.ImportV6, v3.BGPFilterRuleV6{CIDR: p.String(), MatchOperator: v3.Equal, Action: v3.Accept})
		} else {
			filter.Spec.ImportV4 = append(filter.Spec.ImportV4, v3.BGPFilterRuleV4{CIDR: p.String(), MatchOperator: v3.Equal, Action: v3.Accept})
		}
		names = []string{filter.Name}
	}
	if len(names) > 0 {
		if _, err := store.Create(t.Context(), s, filter); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindBGPPeer, map[dataplane.Family]string{dataplane.IPv4: "spine-node1", dataplane.IPv6: "spine-node1-v6"}[f]), func(o store.Object) (any, error) {
		p, ok := o.Value.(*v3.BGPPeer)
		if !ok {
			return nil, store.ErrNotFound
		}
		p.Spec.Filters = names
		return p, nil
	}); err != nil {
		t.Fatal(err)
	}
}

// lies has BIRD say in the place of a node's daemon, with the cluster's key over its session
// with another one, that the prefixes are there.
func lies(t *testing.T, l *lab.Lab, liar, host string, prefixes []netip.Prefix) (stop func()) {
	t.Helper()
	return runBIRD(t, l, liar, host, prefixes, fmt.Sprintf("password %q;", hex.EncodeToString(clusterKey(t, l).Key)))
}

// runBIRD runs BIRD on a node without a daemon, with a session of the mesh with another one,
// until the test or stop ends it.
func runBIRD(t *testing.T, l *lab.Lab, node, host string, prefixes []netip.Prefix, password string) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	conf := filepath.Join(dir, "bird.conf")
	var text strings.Builder
	fmt.Fprintf(&text, "router id %s;\nprotocol device {}\n", address(t, l, node))
	for _, f := range dataplane.Families() {
		own, err := l.AddrOf(node, f)
		if err != nil {
			continue // the lab has none of that family
		}
		fmt.Fprintf(&text, "protocol static { ipv%d;\n", f)
		for _, p := range prefixes {
			if dataplane.FamilyOf(p.Addr()) == f {
				fmt.Fprintf(&text, "\troute %s blackhole;\n", p)
			}
		}
		fmt.Fprintf(&text, `}
protocol bgp { local %s as 64512; neighbor %s as 64512; multihop; %s connect delay time 1; ipv%d { import none; export where source = RTS_STATIC; next hop self; }; }
`, own, addrOf(t, l, host, f), password, f)
	}
	if err := os.WriteFile(conf, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bird", "-f", "-c", conf, "-s", filepath.Join(dir, "bird.ctl"), "-P", filepath.Join(dir, "bird.pid"))
	cmd.Stderr = t.Output()
	if err := ns.Start(l.Space(node), cmd); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		_ = cmd.Wait()
	})
	t.Cleanup(stop)
	return stop
}
