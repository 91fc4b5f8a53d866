package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// settings of the kernel that a stop or a restart must not touch.
func (h *host) kernel() string {
	h.t.Helper()
	var b strings.Builder
	for _, args := range []string{
		"ip -d route show table all", "ip -d nexthop", "ip -d addr show scope global", "ip neigh show nud permanent", "bridge fdb show dev vxlan.calico",
	} {
		out, err := h.exec(strings.Fields(args)...)
		if err != nil {
			h.t.Fatal(err)
		}
		fmt.Fprintf(&b, "# %s\n%s", args, out)
	}
	return b.String()
}

// monitor is ip(8) listening to everything that changes in a namespace.
type monitor struct {
	h    *host
	mu   sync.Mutex
	seen []string
}

// quietIPv6 keeps the kernel's own IPv6 chatter out of a namespace.
func (h *host) quietIPv6() {
	h.t.Helper()
	err := h.ns.Do(func() error {
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0),
		)
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) monitor() *monitor {
	h.t.Helper()
	m := &monitor{h: h}
	cmd := exec.Command("ip", "monitor", "link", "address", "route", "neigh", "nexthop")
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := h.ns.Do(cmd.Start); err != nil {
		h.t.Fatal(err)
	}
	var reader sync.WaitGroup
	reader.Go(func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			m.mu.Lock()
			m.seen = append(m.seen, strings.TrimSpace(lines.Text()))
			m.mu.Unlock()
		}
	})
	h.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		reader.Wait()
		_ = cmd.Wait()
	})
	m.mark("127.0.0.101")
	return m
}

// mark makes a change of its own and waits until it is seen, so that all that
// went before has been.
func (m *monitor) mark(addr string) {
	m.h.t.Helper()
	await.Until(m.h.t, "the monitor sees "+addr, func() error {
		m.h.ip("addr add " + addr + "/32 dev lo")
		m.h.ip("addr del " + addr + "/32 dev lo")
		m.mu.Lock()
		defer m.mu.Unlock()
		if !slices.ContainsFunc(m.seen, func(s string) bool { return strings.Contains(s, addr) }) {
			return errors.New("not yet")
		}
		return nil
	})
}

// changes returns what changed since the start, without marks and without what
// the kernel does by itself as it looks for neighbours on the wire.
func (m *monitor) changes() []string {
	m.h.t.Helper()
	m.mark("127.0.0.102")
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(m.seen), func(s string) bool {
		return strings.Contains(s, "127.0.0.10") || strings.Contains(s, "valid_lft") || strings.Contains(s, "dev lo") && strings.Contains(s, "NOARP") ||
			strings.Contains(s, "dev eth0") && !strings.Contains(s, "via") && !strings.Contains(s, "PERMANENT") && !strings.Contains(s, "proto")
	})
}

// program gives a host peers of every sort and a workload, and waits until the
// kernel has it all.
func (r *running) program() {
	r.t.Helper()
	r.programFrom(r.store(""))
}

// programFrom is program for a host of that datastore.
func (r *running) programFrom(s store.Store) {
	r.t.Helper()
	r.addNode(s, "node2", "10.1.0.12/24", "192.168.200.1", "192.168.200.0/26")
	r.addNode(s, "node3", "10.2.0.11/24", "192.168.201.1", "192.168.201.0/26")
	if _, err := r.attach("pod"); err != nil {
		r.t.Fatal(err)
	}
	await.Until(r.t, "routes to the peers", func() error {
		return errors.Join(
			r.lists("route", "192.168.200.0/26 nhid"), r.lists("route", "via 10.1.0.12 dev eth0"),
			r.lists("route", "192.168.201.0/26 nhid"), r.lists("route", "via 192.168.201.1 dev vxlan.calico"),
			r.lists("route", "dev cali"), r.lists("neigh show nud permanent", "192.168.201.1 dev vxlan.calico"),
		)
	})
}

// TestStopLeavesTheKernel: SIGTERM ends the daemon and nothing else.
func TestStopLeavesTheKernel(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	r := h.start()
	r.ready()
	r.program()
	before := h.kernel()
	if st := r.kill(syscall.SIGTERM); st.ExitCode() != 0 {
		t.Errorf("ended with %s", st)
	}
	if after := h.kernel(); after != before {
		t.Errorf("before the stop:\n%s\nafter:\n%s", before, after)
	}
}

// TestKilled: a daemon that was killed and started again writes nothing but
// what is missing, sweeps what its earlier life left and nobody wants, once
// all sources are in sync, and leaves strangers' routes alone.
func TestKilled(t *testing.T) {
	t.Parallel()
	for name, bgp := range map[string]bool{"with a dead peer": true, "without bgp": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, "10.1.0.11/24")
			h.quietIPv6()
			h.config["bgp"] = map[string]any{"enabled": bgp}
			r := h.start()
			r.ready()
			r.program()
			r.kill(syscall.SIGKILL)
			h.ip("route add blackhole 203.0.113.0/24 proto 77")
			h.ip("nexthop add id 4711 via 10.1.0.99 dev eth0 proto 77 onlink")
			h.ip("route add blackhole 198.51.100.0/24 proto static")
			h.ip("nexthop add id 4712 via 10.1.0.99 dev eth0 proto zebra onlink")
			m := h.monitor()
			before := h.kernel()

			r = h.start()
			r.ready()
			if bgp {
				// The peer is still waited for: nothing is swept.
				if got := m.changes(); len(got) > 0 {
					t.Errorf("a restart changed:\n%s", strings.Join(got, "\n"))
				}
				if after := h.kernel(); after != before {
					t.Errorf("before:\n%s\nafter:\n%s", before, after)
				}
				return
			}
			await.Until(t, "the sweep", func() error {
				routes, hops := h.ip("route"), h.ip("nexthop")
				if strings.Contains(routes, "203.0.113.0/24") || strings.Contains(hops, "id 4711 ") {
					return errors.New("what an earlier life left is still there")
				}
				return nil
			})
			if err := errors.Join(h.lists("route", "198.51.100.0/24"), h.lists("nexthop", "id 4712 ")); err != nil {
				t.Errorf("a stranger's: %v", err)
			}
			// These two and nothing else.
			got := m.changes()
			slices.Sort(got)
			if len(got) != 2 || mentions(got[0], "Deleted", "203.0.113.0/24") != nil || mentions(got[1], "Deleted", "id 4711 ") != nil {
				t.Errorf("a restart changed:\n%s", strings.Join(got, "\n"))
			}
		})
	}
}

// TestPoolThatCannotBeServed: what the kernel lacks for one pool is told
// wherever somebody may look, and the other pools are served.
func TestPoolThatCannotBeServed(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	if _, err := newHost(t, "10.1.0.11/24").exec("ip", "link", "add", "t0", "type", "ipip", "local", "10.1.0.11"); err == nil {
		// This kernel has ipip. Something else must stand in the way.
		h.ip("link add tunl0 type veth peer name veth-t")
	}
	h.config["defaultPool"] = map[string]any{"encapsulation": "IPIP"}
	r := h.start()
	r.ready()
	s := h.store("")
	p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "vx"}}
	p.Spec.CIDR = "10.244.0.0/16"
	store.SetEncapsulation(p, store.VXLAN)
	store.SetDefaults(p)
	if _, err := store.Create(t.Context(), s, p); err != nil {
		t.Fatal(err)
	}
	h.addNode(s, "node2", "10.1.0.12/24", "10.244.7.1", "10.244.7.0/26")
	h.addBlock(s, "node2", "192.168.7.0/26")

	await.Until(t, "the VXLAN pool's route", func() error { return h.lists("route", "10.244.7.0/26 nhid") })
	words := []string{"tunl0", "ipip"}
	r.when("node status tells what is missing", func(n *apiv1.NodeResponse) error {
		for _, p := range n.GetPools() {
			switch p.GetName() {
			case "default-ipv4-ippool":
				if p.GetUsable() {
					return errors.New("the IPIP pool is usable")
				}
				if err := mentions(p.GetReason(), words...); err != nil {
					return err
				}
			case "vx":
				if !p.GetUsable() {
					return errors.New(p.GetReason())
				}
			}
		}
		if len(n.GetPools()) != 2 {
			return fmt.Errorf("%d pools", len(n.GetPools()))
		}
		if c := n.GetHealth().GetReady(); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		return mentions(conditionOf(n, "Pool/default-ipv4-ippool").GetReason(), words...)
	})
	await.Until(t, "the log tells what is missing", func() error {
		if len(r.log.lines("level=ERROR", "tunl0"))+len(r.log.lines("level=WARN", "tunl0")) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	await.Until(t, "the Node resource tells it", func() error {
		obj, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
		if err != nil {
			return err
		}
		got := map[string]metav1.Condition{}
		for _, c := range obj.Value.(*store.Node).Status.Conditions {
			got[c.Type] = c
		}
		if c := got["routerd.io/Pool-vx"]; c.Status != metav1.ConditionTrue {
			return fmt.Errorf("condition of the VXLAN pool: %+v", c)
		}
		c := got["routerd.io/Pool-default-ipv4-ippool"]
		if c.Status != metav1.ConditionFalse {
			return fmt.Errorf("condition of the IPIP pool: %+v", c)
		}
		return mentions(c.Message, words...)
	})
}
