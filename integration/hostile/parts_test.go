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

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestPartsOfBlocks: a switch, and then a node, announce an address of node2's pod and
// both halves of its block to node1. More specific routes win, so what node1's pods
// send to node2's would be theirs.
func TestPartsOfBlocks(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(3, 1, mode)
			top.Spine.BGP = new(true)
			l := bringUp(t, "parts-"+strings.ToLower(string(mode)), top)
			victim, err := l.Addr("node2/pod1")
			if err != nil {
				t.Fatal(err)
			}
			answers := func() string {
				_, err := l.Output(await.Context(t), "node1/pod1", "ping", "-c", "1", "-W", "1", victim.String())
				if err != nil {
					return err.Error()
				}
				return ""
			}
			poll(t, "node2's pod answers node1's", answers)
			block, parts := partsOf(t, l, victim)

			if err := l.SpineDrops(await.Context(t), parts...); err != nil {
				t.Fatal(err)
			}
			refused(t, l, block, parts)
			if why := answers(); why != "" {
				t.Errorf("while a switch announces parts of the block: %s", why)
			}
			acceptByName(t, l, parts[0])
			poll(t, "what a BGPFilter of the switch accepts by name is taken from it", func() string {
				if routes := routesOf(t, l, "node1"); !slices.Contains(routes, parts[0].Addr().String()) || slices.Contains(routes, parts[1].String()) {
					return fmt.Sprint(routes)
				}
				return ""
			})
			acceptByName(t, l)
			refused(t, l, block, parts)
			if err := l.SpineDrops(await.Context(t)); err != nil {
				t.Fatal(err)
			}
			poll(t, "the switch withdraws them", func() string {
				out, err := routerctl(t, l, "node1", "routes", parts[0].String())
				if err != nil || strings.Contains(out, parts[0].String()) {
					return fmt.Sprint(out, err)
				}
				return ""
			})

			lyingNode(t, l, "node3", "node1", parts)
			refused(t, l, block, parts)
			if why := answers(); why != "" {
				t.Errorf("while node3 announces parts of node2's block: %s", why)
			}
		})
	}
}

// partsOf returns the block of an address of node2's, and the address and the block's
// halves.
func partsOf(t *testing.T, l *lab.Lab, a netip.Addr) (block netip.Prefix, parts []netip.Prefix) {
	t.Helper()
	block, err := a.Prefix(26)
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
	return block, []netip.Prefix{netip.PrefixFrom(a, 32), netip.PrefixFrom(block.Addr(), 27), netip.PrefixFrom(second, 27)}
}

// refused waits until node1 has been told of all parts and says why it does not use
// them, and has no route to any.
func refused(t *testing.T, l *lab.Lab, block netip.Prefix, parts []netip.Prefix) {
	t.Helper()
	poll(t, "node1 refuses the parts", func() string {
		for _, p := range parts {
			out, err := routerctl(t, l, "node1", "routes", p.String())
			if err != nil || !strings.Contains(out, fmt.Sprintf("it is a part of block %s, which node node2 holds", block)) {
				return fmt.Sprint(p, ": ", err, "\n", out)
			}
		}
		routes := routesOf(t, l, "node1")
		for _, p := range parts {
			if slices.Contains(routes, p.String()) || slices.Contains(routes, p.Addr().String()) && p.IsSingleIP() {
				return fmt.Sprint("it has a route to ", p, ": ", routes)
			}
		}
		return ""
	})
}

// routesOf are the destinations of a host's routes.
func routesOf(t *testing.T, l *lab.Lab, host string) (list []string) {
	t.Helper()
	for line := range strings.Lines(output(t, l, host, "ip", "route", "show")) {
		list = append(list, strings.Fields(line)[0])
	}
	return list
}

// acceptByName gives node1's session with the spine a BGPFilter that accepts prefixes;
// without any it takes the filter away.
func acceptByName(t *testing.T, l *lab.Lab, prefixes ...netip.Prefix) {
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
	f := &v3.BGPFilter{ObjectMeta: metav1.ObjectMeta{Name: "by-name"}}
	var names []string
	for _, p := range prefixes {
		f.Spec.ImportV4 = append(f.Spec.ImportV4, v3.BGPFilterRuleV4{CIDR: p.String(), MatchOperator: v3.Equal, Action: v3.Accept})
		names = []string{f.Name}
	}
	if len(names) > 0 {
		if _, err := store.Create(t.Context(), s, f); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindBGPPeer, "spine-node1"), func(o store.Object) (any, error) {
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

// lyingNode kills a node's daemon and has BIRD say in its place, with the cluster's key over
// its session of the mesh with another one, that the prefixes are here.
func lyingNode(t *testing.T, l *lab.Lab, liar, host string, prefixes []netip.Prefix) {
	t.Helper()
	if err := l.Kill(await.Context(t), liar, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	var routes strings.Builder
	for _, p := range prefixes {
		fmt.Fprintf(&routes, "route %s blackhole; ", p)
	}
	runBIRD(t, l, liar, host, routes.String(), fmt.Sprintf("password %q;", hex.EncodeToString(clusterKey(t, l).Key)))
}

// runBIRD runs BIRD on a node without a daemon, with a session of the mesh with another one,
// until the test or stop ends it.
func runBIRD(t *testing.T, l *lab.Lab, node, host, routes, password string) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	conf := filepath.Join(dir, "bird.conf")
	text := strings.NewReplacer("NODE", address(t, l, node), "HOST", address(t, l, host), "PASSWORD", password, "ROUTES", routes).Replace(`
router id NODE;
protocol device {}
protocol static { ipv4; ROUTES }
protocol bgp { local NODE as 64512; neighbor HOST as 64512; multihop; PASSWORD connect delay time 1; ipv4 { import none; export where source = RTS_STATIC; next hop self; }; }
`)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
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
