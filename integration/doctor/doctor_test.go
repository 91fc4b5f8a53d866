package doctor

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// breakage is one way to break a lab, and to mend it again.
type breakage struct {
	name string
	// host is whose doctor is asked; empty: node1.
	host        string
	broken, fix func(*testing.T, *lab.Lab)
	check       string   // that finds it
	says        []string // of the first line
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
func ask(ctx context.Context, l *lab.Lab, host string) answer {
	c := exec.CommandContext(ctx, filepath.Join(binDir(), "routerctl"), "--socket", lab.Socket(l.Name(), host), "doctor")
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return answer{err: err}
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return answer{first: strings.Join(strings.Fields(first), " "), all: string(out), code: c.ProcessState.ExitCode()}
}

// well waits until no doctor of the lab finds anything.
func well(t *testing.T, l *lab.Lab) {
	t.Helper()
	ctx := await.Context(t)
	await.Until(t, "doctors", func() error {
		hosts := l.Hosts()
		errs := make([]error, len(hosts))
		var wg sync.WaitGroup
		for i, h := range hosts {
			wg.Go(func() {
				if a := ask(ctx, l, h); a.err != nil || a.code != 0 || strings.Contains(a.all, "not examined") {
					errs[i] = fmt.Errorf("%s: error %w, exit code %d:\n%s", h, a.err, a.code, a.all)
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	})
}

// breakAll breaks a lab in one way after the other. Between two it is well.
func breakAll(t *testing.T, l *lab.Lab, list []breakage) {
	t.Helper()
	well(t, l)
	for _, b := range list {
		ok := t.Run(b.name, func(t *testing.T) {
			host := b.host
			if host == "" {
				host = "node1"
			}
			b.broken(t, l)
			start := time.Now()
			ctx := await.Context(t)
			await.Until(t, "doctor of "+host, func() error {
				a := ask(ctx, l, host)
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
			t.Logf("named after %.1f s", time.Since(start).Seconds())
			b.fix(t, l)
			well(t, l)
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
	l := bringUp(t, "tunnels", topology(3, store.VXLANCrossSubnet))
	fw := func(host string) string { return host + ": nft add table ip fw; nft add chain ip fw c " }
	breakAll(t, l, []breakage{
		{
			name:  "a route of another program drops part of a block",
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
			check: "forward-drop", says: []string{"ip fw c", "nft insert rule ip fw c iifname \"cali*\" accept"},
			broken: sh(fw("node1") + "'{ type filter hook forward priority 0; policy drop; }'"),
			fix:    sh("node1: nft delete table ip fw"),
		},
		{
			name: "UDP 4789 is dropped on its way in", host: "node1",
			check: "tunnel", says: []string{"node3 (10.2.0.11)", "UDP port 4789", "udp dport 4789 accept"},
			broken: sh(fw("node3") + "'{ type filter hook prerouting priority 0; }'; nft add rule ip fw c udp dport 4789 drop"),
			fix:    sh("node3: nft delete table ip fw"),
		},
		{
			name: "UDP 4789 is dropped on its way out", host: "node1",
			check: "tunnel", says: []string{"node3 (10.2.0.11)", "UDP port 4789"},
			broken: sh(fw("node3") + "'{ type filter hook output priority 0; }'; nft add rule ip fw c udp dport 4789 drop"),
			fix:    sh("node3: nft delete table ip fw"),
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
			check: "fixed-neighbour", says: []string{"node2 (10.1.0.12)", "02:00:00:00:00:99", "ip neigh del 10.1.0.12 dev eth0"},
			broken: sh("node1: ip neigh replace 10.1.0.12 lladdr 02:00:00:00:00:99 nud permanent dev eth0"),
			fix:    sh("node1: ip neigh del 10.1.0.12 dev eth0"),
		},
		{
			name:  "a pod has no default route",
			check: "workload", says: []string{"pod1", "route"},
			broken: sh("node1/pod1: ip route del default"),
			fix:    sh("node1/pod1: ip route add default via 169.254.1.1 dev eth0"),
		},
		{
			name:  "a pod has lost its address",
			check: "workload", says: []string{"pod1", "address"},
			broken: sh("node1/pod1: ip -4 addr flush dev eth0"),
			fix: func(t *testing.T, l *lab.Lab) {
				t.Helper()
				sh("node1/pod1: ip addr add "+addr(t, l, "node1/pod1")+"/32 dev eth0; ip route replace 169.254.1.1 dev eth0 scope link; ip route replace default via 169.254.1.1 dev eth0")(t, l)
			},
		},
	})
}
