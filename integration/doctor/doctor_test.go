package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/clock"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/middlebox"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// breakage is one way to break a lab, and to mend it again.
type breakage struct {
	name string
	// host is whose doctor is asked; empty: node1.
	host        string
	all         bool // with --all
	broken, fix func(*testing.T, *lab.Lab)
	check       string   // that finds it; empty: no doctor does
	says        []string // of the first line
	// trace is the check that a trace ends at, from node1's pod or what is named to
	// node3's or what is named; empty: none is asked for.
	trace, from, to string
	probe           bool // the trace sends a packet
}

// sh breaks or mends by commands, each "WHERE: COMMAND".
func sh(commands ...string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		for _, c := range commands {
			where, command, ok := strings.Cut(c, ": ")
			if !ok {
				t.Fatalf("%q: want WHERE: COMMAND", c)
			}
			run(t, l, where, "sh", "-c", command)
		}
	}
}

// ctl breaks or mends by one call of routerctl, with a manifest if there is one.
func ctl(manifest string, args ...string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		c := exec.CommandContext(await.Context(t), filepath.Join(bring.BinDir(), "routerctl"), append([]string{"--socket", lab.Socket(l.Name(), "node1")}, args...)...)
		c.Stdin = strings.NewReader(manifest)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("routerctl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// steps does one after the other.
func steps(list ...func(*testing.T, *lab.Lab)) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		for _, f := range list {
			f(t, l)
		}
	}
}

// put writes an object that routerctl would refuse, as another program may.
func put(key store.Key, v any) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		s, err := l.Store(await.Context(t), "node1")
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := s.Txn(await.Context(t), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: v}}); err != nil {
			t.Fatal(err)
		}
	}
}

// addr is the IPv4 address of a host or pod.
func addr(t *testing.T, l *lab.Lab, where string) string {
	t.Helper()
	a, err := l.Addr(where)
	if err != nil {
		t.Fatal(err)
	}
	return a.String()
}

// answer is what routerctl doctor said.
type answer struct {
	first string // line, its columns one space apart
	all   string
	code  int // exit code
	err   error
}

// ask runs routerctl doctor on a host.
func ask(ctx context.Context, l *lab.Lab, host string, all bool) answer {
	c := exec.CommandContext(ctx, filepath.Join(bring.BinDir(), "routerctl"), "--socket", lab.Socket(l.Name(), host), "doctor", fmt.Sprintf("--all=%t", all))
	return answerOf(c)
}

func answerOf(c *exec.Cmd) answer {
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return answer{err: err}
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return answer{first: strings.Join(strings.Fields(first), " "), all: string(out), code: c.ProcessState.ExitCode()}
}

// traced runs routerctl trace on a host.
func traced(ctx context.Context, t *testing.T, l *lab.Lab, host, from, to string, probe bool) answer {
	t.Helper()
	c := exec.CommandContext(ctx, filepath.Join(bring.BinDir(), "routerctl"), "--socket", lab.Socket(l.Name(), host), "trace", "--from", addr(t, l, from), "--to", addr(t, l, to), fmt.Sprintf("--probe=%t", probe))
	return answerOf(c)
}

// tracedAs waits until a trace's first line begins with some words and has others, and returns how long it took.
func tracedAs(t *testing.T, l *lab.Lab, b breakage, host string) time.Duration {
	t.Helper()
	from, to := cmp.Or(b.from, "node1/pod1"), cmp.Or(b.to, "node3/pod1")
	start := time.Now()
	ctx := t.Context()
	await.Until(t, "trace to "+to, func() error {
		a := traced(ctx, t, l, host, from, to, b.probe)
		f := strings.Fields(a.first)
		if b.trace == "" {
			if a.err != nil || a.code != 0 || f[0] != "whole" || b.probe && !strings.Contains(a.all, "probe: it arrived, and its answer came back") {
				return fmt.Errorf("error %w, exit code %d, want a way that is whole:\n%s", a.err, a.code, a.all)
			}
			return nil
		}
		if a.err != nil || a.code != 1 || len(f) < 4 || f[0] != "broken" || f[2] != b.trace || !strings.Contains(a.first, "; cure: ") {
			return fmt.Errorf("error %w, exit code %d, want 1 and check %s:\n%s", a.err, a.code, b.trace, a.all)
		}
		return nil
	})
	took := time.Since(start)
	t.Logf("trace to %s: %q after %.1f s", to, b.trace, took.Seconds())
	return took
}

// well waits until no doctor of the lab finds anything, and node1's, which is asked for
// all hosts, nothing of any.
func well(t *testing.T, l *lab.Lab) {
	t.Helper()
	ctx := t.Context() // so that the last answer, not the end of the wait, is what is shown
	await.Until(t, "doctors", func() error {
		hosts := l.Hosts()
		errs := make([]error, len(hosts))
		var wg sync.WaitGroup
		for i, h := range hosts {
			wg.Go(func() {
				if a := ask(ctx, l, h, h == "node1"); a.err != nil || a.code != 0 || strings.Contains(a.all, "not examined") {
					errs[i] = fmt.Errorf("%s: error %w, exit code %d:\n%s", h, a.err, a.code, a.all)
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	})
}

// namedWithin is how long it may take, from the break on, until the first line names it.
const (
	namedWithin = 5 * time.Second
	attempts    = 3
)

// named waits until the doctor names what is broken, and a trace if there is to be one, and returns how long the slower of them took.
func named(t *testing.T, l *lab.Lab, b breakage, host string) time.Duration {
	t.Helper()
	if b.check == "" {
		return tracedAs(t, l, b, host)
	}
	start := time.Now()
	ctx := t.Context()
	await.Until(t, "doctor of "+host, func() error {
		a := ask(ctx, l, host, b.all)
		f := strings.Fields(a.first)
		if a.err != nil || a.code != 1 || len(f) < 4 || f[2] != b.check {
			return fmt.Errorf("error %w, exit code %d, want 1 and check %s:\n%s", a.err, a.code, b.check, a.all)
		}
		for _, s := range append(b.says, "; cure: ") {
			if !strings.Contains(a.first, s) {
				return fmt.Errorf("no %q in the first line:\n%s", s, a.all)
			}
		}
		return nil
	})
	took := time.Since(start)
	t.Logf("named after %.1f s", took.Seconds())
	if b.trace != "" {
		took = max(took, tracedAs(t, l, b, host))
	}
	return took
}

// breakAll breaks a lab in one way after the other. Between two it is well.
func breakAll(t *testing.T, l *lab.Lab, list []breakage) {
	t.Helper()
	well(t, l)
	for _, to := range []string{"node2/pod1", "node3/pod1", "node3"} {
		tracedAs(t, l, breakage{to: to}, "node2")
	}
	tracedAs(t, l, breakage{to: "node3/pod1", probe: true}, "node1")
	for _, b := range list {
		ok := t.Run(b.name, func(t *testing.T) {
			host := b.host
			if host == "" {
				host = "node1"
			}
			// On a busy machine one attempt may have had no time.
			for range attempts {
				b.broken(t, l)
				took := named(t, l, b, host)
				b.fix(t, l)
				if b.check != "" {
					well(t, l)
				}
				if took <= namedWithin {
					return
				}
			}
			t.Errorf("in none of %d attempts it was named within %s", attempts, namedWithin)
		})
		if !ok {
			t.FailNow() // the lab is broken
		}
	}
}

// topology is the default one with n hosts and a pod on each.
func topology(n int, e store.Encapsulation) lab.Topology {
	top := lab.DefaultTopology(n)
	pods := 1
	top.Pods, top.Pool.Encapsulation = &pods, e
	return top
}

// TestTunnels breaks what stands between hosts that reach each other through tunnels, or
// as neighbours.
func TestTunnels(t *testing.T) {
	t.Parallel()
	top := topology(3, store.VXLANCrossSubnet)
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{"reach": map[string]any{"interval": "1s"}} // what peers say of their clocks is as old at most
	}
	l := bringUp(t, "tunnels", top)
	var end func() // of what runs beside routerd
	fw := func(host string) string { return host + ": nft add table ip fw; nft add chain ip fw c " }
	breakAll(t, l, []breakage{
		{
			name: "a policy denies one direction, at the other end", trace: "policy",
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				ctl("{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: closed}, spec: {selector: all(), types: [Ingress], ingress: [{action: Deny, protocol: ICMP, source: {nets: ["+
					addr(t, l, "node1/pod1")+"/32]}}, {action: Allow}]}}", "apply", "-f", "-")(t, l)
				tracedAs(t, l, breakage{from: "node3/pod1", to: "node1/pod1"}, "node1")
			},
			fix: ctl("", "delete", "globalnetworkpolicy", "closed"),
		},
		{
			name: "a rule that nobody looks for drops one kind of packet", trace: "probe", probe: true,
			broken: sh(fw("node3") + "'{ type filter hook forward priority -300; }'; nft add rule ip fw c icmp type echo-request drop"),
			fix:    sh("node3: nft delete table ip fw"),
		},
		{
			name: "a route of another program drops the answer", host: "node2", trace: "foreign-route",
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				run(t, l, "node3", "ip", "route", "add", "blackhole", addr(t, l, "node1/pod1")+"/32", "proto", "3")
			},
			fix: sh("node3: ip route flush type blackhole proto 3"),
		},
		{
			name: "the pod there is down", host: "node2", trace: "workload",
			broken: sh("node3/pod1: ip link set eth0 down"),
			fix:    sh("node3/pod1: ip link set eth0 up; ip route replace 169.254.1.1 dev eth0 scope link; ip route replace default via 169.254.1.1 dev eth0"),
		},
		{
			name:  "a route of another program drops part of a block",
			trace: "foreign-route", to: "node2/pod1",
			check: "foreign-route", says: []string{"proto 3", "ip route del blackhole"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				run(t, l, "node1", "ip", "route", "add", "blackhole", addr(t, l, "node2/pod1")+"/32", "proto", "3")
			},
			fix: sh("node1: ip route flush type blackhole proto 3"),
		},
		{
			name:  "a rule leads pods' packets into another table",
			check: "foreign-rule", says: []string{"from 192.168.0.0/16 lookup 100", "ip rule del priority 1000 from 192.168.0.0/16 lookup 100"},
			broken: sh("node1: ip rule add priority 1000 from 192.168.0.0/16 lookup 100"),
			fix:    sh("node1: ip rule del priority 1000"),
		},
		{
			name:  "a firewall drops what is forwarded",
			trace: "forward-drop",
			check: "forward-drop", says: []string{"ip fw c", "nft insert rule ip fw c iifname \"cali*\" accept"},
			broken: sh(fw("node1") + "'{ type filter hook forward priority 0; policy drop; }'"),
			fix:    sh("node1: nft delete table ip fw"),
		},
		{
			name: "UDP 4789 is dropped on its way in", host: "node1",
			trace: "tunnel",
			check: "tunnel", says: []string{"no packet gets through", "node3 (10.2.0.11): it receives nothing from this host", "UDP port 4789", "udp dport 4789 accept # on node3"},
			broken: sh(fw("node3") + "'{ type filter hook prerouting priority 0; }'; nft add rule ip fw c udp dport 4789 drop"),
			fix:    sh("node3: nft delete table ip fw"),
		},
		{
			name: "UDP 4789 is dropped on its way out", host: "node1",
			check: "tunnel", says: []string{"packets get through", "node3 (10.2.0.11), but none come back", "UDP port 4789"},
			broken: sh(fw("node3") + "'{ type filter hook output priority 0; }'; nft add rule ip fw c udp dport 4789 drop"),
			fix:    sh("node3: nft delete table ip fw"),
		},
		{
			// Of node2, which answers by its first one: packets of its own rack and the datastore's do not come that way.
			name: "a second uplink is strict about sources", host: "node2",
			trace: "rp-filter", from: "node2/pod1",
			check: "rp-filter", says: []string{"packets of node3 (10.2.0.11) come in by eth1, which drops them: the way back is via 10.1.0.1 dev eth0", "cure: sysctl -w net.ipv4.conf.eth1.rp_filter=2"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				sh("spine: ip link add side type veth peer name eth1 netns "+l.Space("node2")+"; ip addr add 172.28.0.1/30 dev side; ip link set side up",
					"node2: ip addr add 172.28.0.2/30 dev eth1; ip link set eth1 up; sysctl -qw net.ipv4.conf.eth1.rp_filter=1",
					"spine: ip route add 10.1.0.12/32 via 172.28.0.2")(t, l)
			},
			fix: sh("spine: ip link del side"),
		},
		{
			name: "the clock of another host is ahead", all: true,
			check: "clock", says: []string{"the clock of node2 is 20s ahead of those of 2 of 3 hosts", "timedatectl set-ntp true # on node2"},
			broken: jump("node2", 20*time.Second),
			fix:    jump("node2", 0),
		},
		{
			name:  "the clock of another host is ahead, which its answers to probes show",
			check: "clock", says: []string{"the clock of node2 is 20s ahead of those of 2 of 3 hosts", "timedatectl set-ntp true # on node2"},
			broken: jump("node2", 20*time.Second),
			fix:    jump("node2", 0),
		},
		{
			name: "the clock of this host is behind", all: true,
			check: "clock", says: []string{"the clock of node1 is 20s behind those of 2 of 3 hosts"},
			broken: jump("node1", -20*time.Second),
			fix:    jump("node1", 0),
		},
		{
			name:  "another machine has this host's address",
			check: "duplicate-address", says: []string{"this host's address 10.1.0.11"},
			broken: sh("spine: ip addr add 10.1.0.11/32 dev rack1"),
			fix:    sh("spine: ip addr del 10.1.0.11/32 dev rack1"),
		},
		{
			name:  "another machine has a neighbour's address",
			check: "duplicate-address", says: []string{"10.1.0.12, the address of node2"},
			broken: sh("spine: ip addr add 10.1.0.12/32 dev rack1"),
			fix:    sh("spine: ip addr del 10.1.0.12/32 dev rack1"),
		},
		{
			name:  "a neighbour entry is fixed at another MAC address",
			trace: "fixed-neighbour", to: "node2/pod1",
			check: "fixed-neighbour", says: []string{"node2 (10.1.0.12)", "02:00:00:00:00:99", "ip neigh del 10.1.0.12 dev eth0"},
			broken: sh("node1: ip neigh replace 10.1.0.12 lladdr 02:00:00:00:00:99 nud permanent dev eth0"),
			fix:    sh("node1: ip neigh del 10.1.0.12 dev eth0"),
		},
		{
			name:  "a pod has no default route",
			trace: "workload",
			check: "workload", says: []string{"pod1", "route"},
			broken: sh("node1/pod1: ip route del default"),
			fix:    sh("node1/pod1: ip route add default via 169.254.1.1 dev eth0"),
		},
		{
			name:  "a pod has lost its address",
			trace: "workload",
			check: "workload", says: []string{"pod1", "address"},
			broken: sh("node1/pod1: ip -4 addr flush dev eth0"),
			fix: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				sh("node1/pod1: ip addr add "+addr(t, l, "node1/pod1")+"/32 dev eth0; ip route replace 169.254.1.1 dev eth0 scope link; ip route replace default via 169.254.1.1 dev eth0")(t, l)
			},
		},
		{
			name:  "a pod's device is down",
			check: "workload", says: []string{"pod1", "down"},
			broken: sh("node1/pod1: ip link set eth0 down"),
			fix:    sh("node1/pod1: ip link set eth0 up; ip route replace 169.254.1.1 dev eth0 scope link; ip route replace default via 169.254.1.1 dev eth0"),
		},
		{
			name:  "a rule leads what a pod sends into another table",
			trace: "way",
			check: "way", says: []string{"leave via 10.1.0.1 dev eth0 table 100 instead of "},
			broken: sh("node1: ip route add default via 10.1.0.1 table 100; ip rule add priority 1000 iif $(ip -o link | grep -o 'cali[0-9a-f]\\{11\\}' | head -1) lookup 100"),
			fix:    sh("node1: ip rule del priority 1000; ip route flush table 100"),
		},
		{
			name:  "a rule drops what is for pods",
			trace: "foreign-rule",
			check: "foreign-rule", says: []string{"to 192.168.0.0/16 prohibit"},
			broken: sh("node1: ip rule add priority 1000 to 192.168.0.0/16 prohibit"),
			fix:    sh("node1: ip rule del priority 1000"),
		},
		{
			name:  "a route of another program sends part of a block elsewhere",
			check: "foreign-route", says: []string{"via 10.1.0.1", "proto 4", "ip route del"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				run(t, l, "node1", "ip", "route", "add", addr(t, l, "node3/pod1")+"/32", "via", "10.1.0.1", "proto", "static")
			},
			fix: sh("node1: ip route flush proto static"),
		},
		{
			name:  "Felix left its table",
			check: "felix-rules", says: []string{"nftables table calico of IPv4", "routerd cleanup --calico"},
			broken: sh("node1: nft add table ip calico; nft add chain ip calico c"),
			fix:    sh("node1: nft delete table ip calico"),
		},
		{
			name:  "Felix runs beside routerd",
			check: "calico-runs", says: []string{"calico-node -f /dev/null (process ", "systemctl disable --now calico-felix"},
			broken: func(t *testing.T, l *lab.Lab) { t.Helper(); end = runs(t, l, "node1", "calico-node") },
			fix:    func(*testing.T, *lab.Lab) { end() },
		},
		{
			name:  "a link on the way loses large packets",
			trace: "tunnel-mtu",
			check: "tunnel-mtu", says: []string{"more than 1350 bytes", "node3 (10.2.0.11)"},
			broken: fault(middlebox.Faults{MTU: 1400}), fix: mended,
		},
		{
			name:  "packets are lost whose checksum is left to the hardware",
			trace: "tunnel-offload",
			check: "tunnel-offload", says: []string{"vxlan.calico to node3", "cure: routerctl node tunnels --retry node3"},
			broken: fault(middlebox.Faults{Checksum: true}), fix: mended,
		},
		{
			// On a host without the datastore: etcd ends when it does not find its directories,
			// which the mount hides and a full disk does not.
			name: "the disk of the daemon's state is full", host: "node2",
			check: "disk-full", says: []string{"is full", "state"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				if err := unix.Mount("tmpfs", stateDir(l, "node2"), "tmpfs", 0, "size=1m"); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = unix.Unmount(stateDir(l, "node2"), unix.MNT_DETACH) }) // where the test fails before it is mended
			},
			fix: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				if err := unix.Unmount(stateDir(l, "node2"), unix.MNT_DETACH); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "two nodes have one tunnel address", all: true,
			check: "shared-tunnel-address", says: []string{"ghost and node3", "routerctl delete node"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				ghost := &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: "10.1.0.77/24"}}}
				ghost.Name = "ghost"
				ghost.Spec.IPv4VXLANTunnelAddr = tunnelAddress(t, l, "node3")
				put(store.ResourceKey(store.KindNode, "ghost"), ghost)(t, l)
			},
			fix: ctl("", "delete", "node", "ghost"),
		},
		{
			name: "two nodes have one address", all: true,
			check: "shared-address", says: []string{"ghost and node2", "10.1.0.12"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				ghost := &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: "10.1.0.12/24"}}}
				ghost.Name = "ghost"
				put(store.ResourceKey(store.KindNode, "ghost"), ghost)(t, l)
			},
			fix: ctl("", "delete", "node", "ghost"),
		},
		{
			name:  "the datastore is locked",
			check: "condition-datastore", says: []string{"the datastore is locked", "cure: routerctl datastore unlock"},
			broken: ctl("", "datastore", "lock"), fix: ctl("", "datastore", "unlock"),
		},
		{
			name:  "a pool lies in a network of the host's",
			check: "pool", says: []string{"pool wrong", "overlaps address 172.29.0.5/24"},
			broken: steps(ctl(pool("wrong", "172.29.0.0/16", "vxlanMode: Always"), "apply", "-f", "-"), sh("node1: ip addr add 172.29.0.5/24 dev eth0")),
			fix:    steps(sh("node1: ip addr del 172.29.0.5/24 dev eth0"), ctl("", "delete", "ippool", "wrong")),
		},
		{
			name:  "a firewall between the racks drops UDP 4789",
			check: "tunnel", says: []string{"node3 (10.2.0.11)", "UDP port 4789"},
			broken: sh("spine: nft add table ip fw; nft add chain ip fw c '{ type filter hook forward priority 0; }'; nft add rule ip fw c udp dport 4789 drop"),
			fix:    sh("spine: nft delete table ip fw"),
		},
		{
			name:  "tunnels are to have a larger MTU than the uplink leaves",
			check: "condition-workloadmtu", says: []string{"vxlanMTU of FelixConfiguration is 8000", "cure: routerctl get felixconfigurations default"},
			broken: ctl("{apiVersion: projectcalico.org/v3, kind: FelixConfiguration, metadata: {name: default}, spec: {vxlanMTU: 8000}}", "apply", "-f", "-"),
			fix:    ctl("", "delete", "felixconfiguration", "default"),
		},
		{
			name:  "a policy cannot be used",
			check: "condition-policy", says: []string{"routerctl policy show"},
			broken: put(store.ResourceKey(store.KindGlobalNetworkPolicy, "default.odd"), oddPolicy()), fix: ctl("", "delete", "globalnetworkpolicy", "default.odd"),
		},
		{
			name: "the uplink is down", host: "node3",
			check: "uplink-down", says: []string{"eth0", "ip link set eth0 up"},
			broken: sh("node3: ip link set eth0 down"),
			fix:    sh("node3: ip link set eth0 up; ip route replace default via 10.2.0.1"),
		},
		{
			name: "the host has lost its address", host: "node3",
			trace: "address-missing",
			check: "address-missing", says: []string{"10.2.0.11", "ip addr add 10.2.0.11/24 dev eth0"},
			broken: sh("node3: ip addr del 10.2.0.11/24 dev eth0"),
			fix:    sh("node3: ip addr add 10.2.0.11/24 dev eth0; ip route replace default via 10.2.0.1"),
		},
		{
			name: "the datastore is gone", host: "node3",
			check: "condition-datastore", says: []string{"10.1.0.11:2379"},
			broken: func(t *testing.T, l *lab.Lab) { t.Helper(); kill(t, l, "node1") },
			fix:    wellAgain("node1"),
		},
		{
			name: "the daemon does not run", host: "node3",
			check: "daemon", says: []string{"routerd does not run", "cure: systemctl restart routerd"},
			broken: func(t *testing.T, l *lab.Lab) { t.Helper(); kill(t, l, "node3") },
			fix:    wellAgain("node3"),
		},
	})
}

// oddPolicy is a policy whose selector nobody can read.
func oddPolicy() *v3.GlobalNetworkPolicy {
	p := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{Tier: "default", Selector: "has("}}
	p.Name = "default.odd"
	return p
}

// leftBlock is an empty block of a node that is not there.
func leftBlock() *store.Block {
	holder := "host:gone"
	b := &store.Block{CIDR: "192.168.250.0/26", Affinity: &holder, Allocations: make([]*int, 64), Attributes: []store.Attribute{}, SequenceNumberForAllocation: map[string]uint64{}}
	for i := range b.Allocations {
		b.Unallocated = append(b.Unallocated, i)
	}
	return b
}

// stateDir is where a host's daemon keeps its state.
func stateDir(l *lab.Lab, host string) string {
	return filepath.Join(lab.Root, l.Name(), host, "state")
}

// fault has what goes between the second rack and the first pass a network that spoils
// tunnels; mended takes it away.
func fault(f middlebox.Faults) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		if err := l.Break("rack2", f); err != nil {
			t.Fatal(err)
		}
	}
}

func mended(t *testing.T, l *lab.Lab) {
	t.Helper()
	if err := l.Mend("rack2"); err != nil {
		t.Fatal(err)
	}
}

// jump lets the wall clock of a host's daemon be so much off.
func jump(host string, by time.Duration) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		p, err := l.Daemon(host)
		if err != nil {
			t.Fatal(err)
		}
		if err := clock.Set(await.Context(t), p.PID, by); err != nil {
			t.Fatal(err)
		}
	}
}

// runs has a program of that name wait on a host, and returns what ends it.
func runs(t *testing.T, l *lab.Lab, host, name string) (end func()) {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	if err := os.Symlink("/usr/bin/tail", program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-f", "/dev/null")
	if err := ns.Start(l.Space(host), cmd); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	t.Cleanup(end)
	return end
}

func kill(t *testing.T, l *lab.Lab, host string) {
	t.Helper()
	if err := l.Kill(await.Context(t), host, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

func restart(host string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		if err := l.Restart(await.Context(t), host); err != nil {
			t.Fatal(err)
		}
	}
}

// wellAgain starts a daemon anew on a host of which nothing is wrong any more. Sessions that are not up yet
// have their time, and no doctor calls them down.
func wellAgain(host string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		restart(host)(t, l)
		await.Until(t, "sessions of "+host, func() error {
			a := ask(t.Context(), l, host, false)
			if strings.Contains(a.all, " bgp-session ") {
				t.Fatalf("right after a start sessions are called down:\n%s", a.all)
			}
			if a.err != nil || a.code != 0 || strings.Contains(a.all, "not examined") {
				return fmt.Errorf("error %w, exit code %d:\n%s", a.err, a.code, a.all)
			}
			return nil
		})
	}
}

func tunnelAddress(t *testing.T, l *lab.Lab, host string) string {
	t.Helper()
	n, err := l.Node(await.Context(t), host)
	if err != nil {
		t.Fatal(err)
	}
	return n.GetVxlanTunnelAddress()
}

// pool is a manifest.
func pool(name, cidr, mode string) string {
	return fmt.Sprintf("{apiVersion: projectcalico.org/v3, kind: IPPool, metadata: {name: %s}, spec: {cidr: %s, %s}}", name, cidr, mode)
}

// TestFabric breaks what stands between hosts that a switch joins by BGP, without tunnels
// and without a mesh.
func TestFabric(t *testing.T) {
	t.Parallel()
	secrets := t.TempDir()
	top := topology(3, store.Direct)
	top.Nodes[0].Config = map[string]any{"bgp": map[string]any{"secretDir": secrets}}
	if err := errors.Join(os.Mkdir(filepath.Join(secrets, "bgp"), 0o700), os.WriteFile(filepath.Join(secrets, "bgp", "tor"), []byte("guess"), 0o600)); err != nil {
		t.Fatal(err)
	}
	l := bringUp(t, "fabric", top)
	ctl("{apiVersion: projectcalico.org/v3, kind: BGPConfiguration, metadata: {name: default}, spec: {nodeToNodeMeshEnabled: false}}", "apply", "-f", "-")(t, l)
	ctl("{apiVersion: projectcalico.org/v3, kind: BGPFilter, metadata: {name: none}, spec: {importV4: [{action: Reject}]}}", "apply", "-f", "-")(t, l)
	ctl("{apiVersion: projectcalico.org/v3, kind: BGPFilter, metadata: {name: mute}, spec: {exportV4: [{action: Reject}]}}", "apply", "-f", "-")(t, l)
	peer := func(spec string) func(*testing.T, *lab.Lab) {
		return ctl("", "patch", "bgppeer", "spine-node1", "--force", "-p", `{"spec":`+spec+`}`)
	}
	var taken net.Listener
	bird := func(verb string) func(*testing.T, *lab.Lab) {
		return sh("spine: birdc -s $(find " + filepath.Join(lab.Root, l.Name()) + " -name bird.ctl) " + verb + " all")
	}
	breakAll(t, l, []breakage{
		{
			name:  "a BGPPeer has another AS than the switch",
			check: "bgp-session", says: []string{"wrong AS: 10.1.0.1 has AS 64999, but AS 64998", "routerctl get bgppeers spine-node1"},
			broken: peer(`{"asNumber":64998}`), fix: peer(`{"asNumber":64999}`),
		},
		{
			name:  "a BGPPeer has an address at which nobody is",
			check: "bgp-session", says: []string{"10.1.0.99", "no "},
			broken: peer(`{"peerIP":"10.1.0.99"}`), fix: peer(`{"peerIP":"10.1.0.1"}`),
		},
		{
			name:  "a filter lets nothing in",
			check: "no-route", says: []string{"of node3", "BGPFilter none", "routerctl get bgpfilters none"},
			broken: peer(`{"filters":["none"]}`), fix: peer(`{"filters":null}`),
		},
		{
			name:  "a filter hides this host's block from the switch",
			check: "hidden-block", says: []string{"BGP peer spine-node1 (10.1.0.1) does not receive this host's block", "routerctl get bgpfilters mute"},
			broken: peer(`{"filters":["mute"]}`), fix: peer(`{"filters":null}`),
		},
		{
			name:  "the switch has closed the session",
			check: "bgp-session", says: []string{"spine-node1", "10.1.0.1"},
			broken: bird("disable"), fix: bird("enable"),
		},
		{
			name:  "a pool asks for devices that the kernel has no module for",
			check: "pool", says: []string{"pool tunnels", "cure: modprobe ipip"},
			broken: ctl(pool("tunnels", "172.30.0.0/16", "ipipMode: Always"), "apply", "--force", "-f", "-"), fix: ctl("", "delete", "ippool", "tunnels"),
		},
		{
			name:  "another overlay has VXLAN's number and port",
			check: "pool", says: []string{"pool overlay", "another VXLAN device"},
			broken: steps(sh("node1: ip link add flannel.1 type vxlan id 4096 dstport 4789 dev eth0; ip link set flannel.1 up"),
				ctl(pool("overlay", "172.31.0.0/16", "vxlanMode: Always"), "apply", "--force", "-f", "-")),
			fix: steps(ctl("", "delete", "ippool", "overlay"), sh("node1: ip link del flannel.1")),
		},
		{
			name:  "a BGPPeer has a password and the switch has none",
			check: "bgp-session", says: []string{"spine-node1", "the same spec.password"},
			broken: peer(`{"password":{"secretKeyRef":{"name":"bgp","key":"tor"}}}`), fix: peer(`{"password":null}`),
		},
		{
			name:  "a firewall refuses BGP at the switch",
			check: "bgp-session", says: []string{"spine-node1", "10.1.0.1"},
			broken: steps(sh("spine: nft add table ip fw; nft add chain ip fw i '{ type filter hook input priority 0; }'; nft add chain ip fw o '{ type filter hook output priority 0; }'; "+
				"nft add rule ip fw i tcp dport 179 reject with tcp reset; nft add rule ip fw o tcp dport 179 drop"), bird("restart")),
			fix: sh("spine: nft delete table ip fw"),
		},
		{
			name: "a route of another program is on another host", host: "node1", all: true,
			check: "condition-foreignroutes", says: []string{"node3", "blackhole", "# on node3"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				run(t, l, "node3", "ip", "route", "add", "blackhole", addr(t, l, "node1/pod1")+"/32", "proto", "3")
			},
			fix: sh("node3: ip route flush type blackhole proto 3"),
		},
		{
			name: "another program has BGP's port", host: "node2",
			check: "condition-bgp", says: []string{"port 179", "is taken by", "ss -ltnp sport = :179"},
			broken: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				kill(t, l, "node2")
				err := ns.Do(l.Space("node2"), func() (err error) {
					taken, err = net.Listen("tcp4", "10.1.0.12:179")
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				restart("node2")(t, l)
			},
			fix: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				taken.Close()
				wellAgain("node2")(t, l)
			},
		},
		{
			name: "IPAM has a record of nobody", all: true,
			check: "ipam-records", says: []string{"empty handle: handle left", "routerctl ipam check --show-problem-ips"},
			broken: put(store.HandleKey("left"), &store.Handle{Block: map[string]int{"192.168.0.0/26": 1}}), fix: ctl("", "ipam", "check", "--fix"),
		},
		{
			name:  "a node that is gone has left a block",
			check: "no-route", says: []string{"192.168.250.0/26 is a block of node gone, which does not exist", "cure: routerctl ipam check --fix"},
			broken: put(store.BlockKey(netip.MustParsePrefix("192.168.250.0/26")), leftBlock()), fix: ctl("", "ipam", "check", "--fix"),
		},
	})
}
