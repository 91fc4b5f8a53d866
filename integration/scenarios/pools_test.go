package scenarios

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// routerctl runs the operator's tool with a host's daemon. The command must
// succeed.
func routerctl(t *testing.T, l *lab.Lab, host, stdin string, args ...string) string {
	t.Helper()
	out, err := tryRouterctl(t, l, host, stdin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryRouterctl(t *testing.T, l *lab.Lab, host, stdin string, args ...string) (string, error) {
	t.Helper()
	dir, err := filepath.Abs(binDir(t))
	if err != nil {
		t.Fatal(err)
	}
	var out, stderr strings.Builder
	code, err := l.Run(await.Context(t), host, lab.Streams{In: strings.NewReader(stdin), Out: &out, Err: &stderr},
		append([]string{filepath.Join(dir, "routerctl"), "--socket", lab.Socket(l.Name(), host)}, args...)...)
	if err == nil && code != 0 {
		err = fmt.Errorf("routerctl %s on %s: exit code %d: %s", strings.Join(args, " "), host, code, stderr.String())
	}
	return out.String(), err
}

func poolManifest(name, cidr, modes string) string {
	return "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: " + name + "}\nspec: {cidr: " + cidr + ", " + modes + ", natOutgoing: true}\n"
}

const defaultPool = "default-ipv4-ippool"

// TestMoveCIDR carries out docs/runbooks/move-cidr.md: all pods and tunnels of
// a cluster move to another range, and what does not move at the moment loses
// nothing.
func TestMoveCIDR(t *testing.T) {
	beside(t)
	l := bringUp(t, "movecidr", topology(3, 2, lab.DefaultEncapsulation))
	reach(t, l, traffic.Options{})
	from, to := netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("10.66.0.0/16")

	_, stop := startFlows(t, l, [2]string{"node1/pod1", "node3/pod1"}, [2]string{"node2/pod1", "node1/pod1"}, [2]string{"node3/pod1", "node2/pod1"})
	// A range that is in use is refused, with both named.
	if _, err := tryRouterctl(t, l, "node1", poolManifest("wrong", "10.1.0.0/20", "vxlanMode: CrossSubnet"), "apply", "-f", "-"); err == nil ||
		!strings.Contains(err.Error(), "IPPool(wrong) overlaps address 10.1.0.11/24 of device eth0 of this host, node1") {
		t.Errorf("a pool over the hosts' network: %v", err)
	}
	routerctl(t, l, "node1", poolManifest("pods-2", to.String(), "vxlanMode: CrossSubnet"), "apply", "-f", "-")
	if _, err := tryRouterctl(t, l, "node1", "", "delete", "ippool", defaultPool); err == nil || !strings.Contains(err.Error(), "workloads have 6 of its addresses") {
		t.Errorf("deletion of a pool in use: %v", err)
	}
	t.Log(routerctl(t, l, "node1", "", "pool", "drain", defaultPool))

	// The tunnels move by themselves, under the traffic of pods that did not.
	expectTunnels(t, l, to)
	for _, h := range l.Hosts() {
		recreate(t, l, to, h+"/pod2")
	}
	stop()
	_, stop = startFlows(t, l, [2]string{"node1/pod2", "node3/pod2"}, [2]string{"node2/pod2", "node1/pod2"}, [2]string{"node3/pod2", "node2/pod2"})
	for _, h := range l.Hosts() {
		recreate(t, l, to, h+"/pod1")
	}
	out := routerctl(t, l, "node1", "", "pool", "drain", defaultPool, "--wait", "--timeout", "60s")
	if !strings.Contains(out, "IPPool("+defaultPool+") is drained") {
		t.Errorf("drain: %s", out)
	}
	t.Log(routerctl(t, l, "node1", "", "delete", "ippool", defaultPool))
	nothingOf(t, l, from)
	stop()
	reach(t, l, traffic.Options{})
}

// recreate makes a pod anew, as a rolling restart does, and checks where its
// address comes from.
func recreate(t *testing.T, l *lab.Lab, in netip.Prefix, where string) {
	t.Helper()
	ctx := await.Context(t)
	if err := l.DetachPod(ctx, where); err != nil {
		t.Fatal(err)
	}
	p, err := l.AttachPod(ctx, where)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Addrs) != 1 || !in.Contains(p.Addrs[0]) {
		t.Errorf("%s got %v, want an address of %s", where, p.Addrs, in)
	}
}

// expectTunnels waits until every host's VXLAN device has one address, and that
// in a range.
func expectTunnels(t *testing.T, l *lab.Lab, in netip.Prefix) {
	t.Helper()
	for _, h := range l.Hosts() {
		poll(t, "tunnel address of "+h, func() string {
			out := output(t, l, h, "ip", "-4", "-br", "addr", "show", "dev", "vxlan.calico")
			f := strings.Fields(out)
			if len(f) == 3 {
				if p, err := netip.ParsePrefix(f[2]); err == nil && in.Contains(p.Addr()) {
					return ""
				}
			}
			return out
		})
	}
}

// nothingOf waits until neither the store nor any kernel knows an address of a
// range.
func nothingOf(t *testing.T, l *lab.Lab, old netip.Prefix) {
	t.Helper()
	prefix := "192.168."
	if old.String() != "192.168.0.0/16" {
		t.Fatalf("%s is not the range that is looked for", old)
	}
	for _, h := range l.Hosts() {
		poll(t, "leftovers on "+h, func() string {
			var left []string
			for _, args := range [][]string{{"ip", "route"}, {"ip", "addr"}, {"ip", "neigh"}, {"ip", "nexthop"}} {
				for line := range strings.SplitSeq(output(t, l, h, args...), "\n") {
					if strings.Contains(line, prefix) {
						left = append(left, line)
					}
				}
			}
			return strings.Join(left, "\n")
		})
	}
	s := openStore(t, l)
	ctx := await.Context(t)
	poll(t, "leftovers in the store", func() string {
		for _, k := range []store.Kind{
			store.KindIPPool, store.KindNode, store.KindWorkloadEndpoint, store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle,
		} {
			all, _, err := s.List(ctx, k, "")
			if err != nil {
				return err.Error()
			}
			for _, o := range all {
				if strings.Contains(o.Key.String(), prefix) || strings.Contains(string(o.Raw), prefix) {
					return fmt.Sprintf("%s: %s", o.Key, o.Raw)
				}
			}
		}
		return ""
	})
}

// TestLastPoolDisabled: a disabled pool gives no addresses, and what has one
// keeps its packets, though the tunnels have no other pool to go to.
func TestLastPoolDisabled(t *testing.T) {
	beside(t)
	l := bringUp(t, "lastpool", topology(3, 1, store.VXLAN))
	reach(t, l, traffic.Options{})
	flows, stop := startFlows(t, l, [2]string{"node1/pod1", "node3/pod1"}, [2]string{"node2/pod1", "node1/pod1"})
	routerctl(t, l, "node1", "", "pool", "drain", defaultPool, "--force")
	waitFlows(t, flows, 2*time.Second)
	if _, err := l.AttachPod(await.Context(t), "node2/new"); err == nil || !strings.Contains(err.Error(), "it is disabled") {
		t.Errorf("ADD with the only pool disabled: %v", err)
	}
	routerctl(t, l, "node1", "", "pool", "enable", defaultPool)
	poll(t, "ADD with the pool enabled again", func() string {
		if _, err := l.AttachPod(await.Context(t), "node2/new"); err != nil {
			return err.Error()
		}
		return ""
	})
	waitFlows(t, flows, time.Second)
	stop()
}

// TestTwoPools: pools of two encapsulations serve one cluster at once.
func TestTwoPools(t *testing.T) {
	beside(t)
	l := bringUp(t, "twopools", topology(3, 1, store.VXLAN))
	routerctl(t, l, "node1", poolManifest("direct", "10.67.0.0/16", "nodeSelector: all()"), "apply", "-f", "-")
	routerctl(t, l, "node1", "", "pool", "drain", defaultPool)
	for _, h := range []string{"node1", "node2"} {
		p, err := l.AttachPod(await.Context(t), h+"/plain")
		if err != nil {
			t.Fatal(err)
		}
		if !netip.MustParsePrefix("10.67.0.0/16").Contains(p.Addrs[0]) {
			t.Errorf("%s has %s, want an address of the plain pool", p, p.Addrs[0])
		}
	}
	// Unencapsulated packets do not cross racks without a router that knows;
	// within the rack all reach all, each by the way of its own pool.
	places := []string{"node1/pod1", "node2/pod1", "node1/plain", "node2/plain"}
	m, err := l.Reachability(await.Context(t), places, traffic.Options{})
	if err != nil || !m.OK() {
		t.Errorf("%v: %v", err, m.Failures())
	}
	for target, dev := range map[string]string{"node2/pod1": "dev vxlan.calico", "node2/plain": "dev eth0"} {
		if out := output(t, l, "node1", "ip", "route", "get", addr(t, l, target).String()); !strings.Contains(out, dev) {
			t.Errorf("to %s: %s, want %s", target, out, dev)
		}
	}
}

// TestNodeAddressChange carries out docs/runbooks/change-node-address.md on a
// host in the rack and on one across racks, and once with the daemon killed in
// the middle.
func TestNodeAddressChange(t *testing.T) {
	beside(t)
	l := bringUp(t, "nodeaddr", topology(3, 2, lab.DefaultEncapsulation))
	reach(t, l, traffic.Options{})
	for _, tt := range []struct {
		name, host, from, to string
		kill                 bool
	}{
		{"in the rack", "node2", "10.1.0.12", "10.1.0.112", false},
		{"back in the rack", "node2", "10.1.0.112", "10.1.0.12", false},
		{"across racks", "node3", "10.2.0.11", "10.2.0.111", false},
		{"back, killed in the middle", "node3", "10.2.0.111", "10.2.0.11", true},
	} {
		ok := t.Run(tt.name, func(t *testing.T) {
			flows, stop := startFlows(t, l, [2]string{"node1/pod1", "node3/pod1"}, [2]string{"node2/pod1", "node1/pod2"}, [2]string{"node3/pod2", "node2/pod2"})
			// Without this the kernel takes the addresses of a subnet away with
			// the first of them.
			output(t, l, tt.host, "sysctl", "-qw", "net.ipv4.conf.eth0.promote_secondaries=1")
			output(t, l, tt.host, "ip", "addr", "add", tt.to+"/24", "dev", "eth0")
			output(t, l, tt.host, "ip", "addr", "change", tt.from+"/24", "dev", "eth0", "preferred_lft", "0")
			if tt.kill {
				if err := l.Kill(await.Context(t), tt.host, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
				if err := l.Restart(await.Context(t), tt.host); err != nil {
					t.Fatal(err)
				}
			}
			followed(t, l, tt.host, tt.from, tt.to)
			output(t, l, tt.host, "ip", "addr", "del", tt.from+"/24", "dev", "eth0")
			waitFlows(t, flows, 2*time.Second)
			stop()
			sessionsTo(t, l, tt.host, tt.to)
		})
		if !ok {
			t.FailNow()
		}
	}
	reach(t, l, traffic.Options{})
	refusedAddress(t, l)
}

// followed waits until the resource and all peers' kernels name a host by its
// new address only, and its tunnel sends from there: it hears of the move as the
// others do, and from an address that is gone nothing leaves.
func followed(t *testing.T, l *lab.Lab, host, from, to string) {
	t.Helper()
	s := openStore(t, l)
	poll(t, "Node "+host, func() string {
		o, err := s.Get(await.Context(t), store.ResourceKey(store.KindNode, host))
		if err != nil {
			return err.Error()
		}
		if n, ok := o.Value.(*store.Node); !ok || n.Spec.BGP == nil || n.Spec.BGP.IPv4Address != to+"/24" {
			return string(o.Raw)
		}
		return ""
	})
	for _, h := range l.Hosts() {
		if h == host {
			poll(t, h+" sends from its new address", func() string {
				if link := output(t, l, h, "ip", "-d", "link", "show", "type", "vxlan"); link != "" && !strings.Contains(link, " local "+to+" ") {
					return link
				}
				return ""
			})
			continue
		}
		poll(t, h+" follows "+host, func() string {
			hops := output(t, l, h, "ip", "nexthop")
			if links := output(t, l, h, "ip", "-br", "link"); strings.Contains(links, "vxlan.calico") {
				hops += output(t, l, h, "bridge", "fdb", "show", "dev", "vxlan.calico")
			}
			if strings.Contains(hops, from+" ") || !strings.Contains(hops, to+" ") {
				return hops
			}
			return ""
		})
	}
}

// sessionsTo waits until every other host has its BGP session with the new
// address.
func sessionsTo(t *testing.T, l *lab.Lab, host, to string) {
	t.Helper()
	for _, h := range l.Hosts() {
		if h == host {
			continue
		}
		poll(t, "the session of "+h+" with "+host, func() string {
			r, err := l.Node(await.Context(t), h)
			if err != nil {
				return err.Error()
			}
			for _, p := range r.GetPeers() {
				if p.GetAddress() == to && p.GetState() == "up" {
					return ""
				}
			}
			return fmt.Sprint(r.GetPeers())
		})
	}
}

// refusedAddress gives a host the address of another: it stays with its own and
// says why.
func refusedAddress(t *testing.T, l *lab.Lab) {
	t.Helper()
	s := openStore(t, l)
	_, err := store.Modify(await.Context(t), s, store.ResourceKey(store.KindNode, "ghost"), func(cur store.Object) (any, error) {
		if cur.Value != nil {
			return nil, errors.New("it exists")
		}
		n := &store.Node{}
		n.Name = "ghost"
		n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: "10.2.0.77/24"}
		return n, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	output(t, l, "node3", "ip", "addr", "add", "10.2.0.77/24", "dev", "eth0")
	output(t, l, "node3", "ip", "addr", "change", "10.2.0.11/24", "dev", "eth0", "preferred_lft", "0")
	poll(t, "the refusal", func() string {
		r, err := l.Node(await.Context(t), "node3")
		if err != nil {
			return err.Error()
		}
		for _, c := range r.GetHealth().GetConditions() {
			if c.GetName() == "Address" && strings.Contains(c.GetReason(), "node ghost is registered with it") {
				if !r.GetHealth().GetReady().GetOk() {
					return "not ready: " + r.GetHealth().GetReady().GetReason()
				}
				return ""
			}
		}
		return fmt.Sprint(r.GetHealth())
	})
	reach(t, l, traffic.Options{})
}
