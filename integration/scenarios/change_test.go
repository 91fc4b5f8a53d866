package scenarios

import (
	"fmt"
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

// tour returns a way through modes that goes exactly once from each to each
// other with which it makes a wanted pair, whichever of the two comes first: an
// Eulerian circuit of the directed graph, by Hierholzer's algorithm.
func tour(modes []store.Encapsulation, wanted func(a, b store.Encapsulation) bool) []store.Encapsulation {
	left := make(map[store.Encapsulation][]store.Encapsulation)
	for _, from := range modes {
		for _, to := range modes {
			if from != to && wanted(from, to) {
				left[from] = append(left[from], to)
			}
		}
	}
	var out []store.Encapsulation
	var visit func(store.Encapsulation)
	visit = func(at store.Encapsulation) {
		for len(left[at]) > 0 {
			next := left[at][0]
			left[at] = left[at][1:]
			visit(next)
		}
		out = append(out, at)
	}
	visit(modes[0])
	slices.Reverse(out)
	return out
}

func anyPair(_, _ store.Encapsulation) bool { return true }

// withIPIP: other pairs need no kernel with ipip.
func withIPIP(a, b store.Encapsulation) bool {
	return modeOf(a).far == "ipip" || modeOf(b).far == "ipip"
}

func TestTour(t *testing.T) {
	beside(t)
	all := store.Encapsulations()
	for _, tt := range []struct {
		modes  []store.Encapsulation
		wanted func(a, b store.Encapsulation) bool
		pairs  int
	}{
		{all[:2], anyPair, 2}, {all[:3], anyPair, 6}, {all[:4], anyPair, 12}, {all, anyPair, 20}, {all, withIPIP, 14},
	} {
		way := tour(tt.modes, tt.wanted)
		seen := make(map[[2]store.Encapsulation]bool)
		for i := 1; i < len(way); i++ {
			from, to := way[i-1], way[i]
			if from == to || !tt.wanted(from, to) {
				t.Errorf("%v: goes from %s to %s", way, from, to)
			}
			seen[[2]store.Encapsulation{from, to}] = true
		}
		if len(way) != tt.pairs+1 || len(seen) != tt.pairs {
			t.Errorf("%d modes: %v covers %d pairs in %d steps, want each of %d once", len(tt.modes), way, len(seen), len(way)-1, tt.pairs)
		}
	}
}

// TestModeChanges changes the pool's encapsulation under traffic from each that
// this kernel has to each other, one change after the other in one lab; in the
// virtual machine only where one of the two is IPIP. The contract is that no
// packet is lost and no TCP connection ends, within a rack and across racks.
func TestModeChanges(t *testing.T) {
	beside(t)
	way := changesOfStage(t)
	c := changeLab(t, "change", way[0])
	c.change(t, way, func() {})
}

// change changes the pool's encapsulation from each of a way to the next, and calls before
// ahead of each change. No packet may be lost.
func (c *changing) change(t *testing.T, way []store.Encapsulation, before func()) {
	t.Helper()
	expectNoLoss(t, "before any change", c.load)
	for i := 1; i < len(way); i++ {
		before()
		change := fmt.Sprintf("%s to %s", way[i-1], way[i])
		start := time.Now()
		c.setMode(t, way[i])
		c.waitMode(t, way[i])
		t.Logf("%s took %.2f s", change, time.Since(start).Seconds())
		expectNoLoss(t, change, c.load)
		if t.Failed() {
			t.Fatalf("stopped after %s", change)
		}
	}
	reach(t, c.Lab, traffic.Options{Size: modeOf(way[len(way)-1]).mtu, DF: true})
}

// TestModeChangesOffloaded changes the encapsulation with policy.offload on all hosts, under
// traffic of connections that are established, which a flowtable takes. In the virtual machine
// all of them are in one before each change. Where the kernel has no flowtables the daemon
// says so, and packets take the way of rules.
func TestModeChangesOffloaded(t *testing.T) {
	beside(t)
	way := changesOfStage(t)[:offloadedChanges+1]
	top := topology(3, 2, way[0])
	top.Spine.BGP = new(true)
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{"policy": map[string]any{"offload": true}}
	}
	c := &changing{Lab: bringUp(t, "offload", top)}
	c.store = openStore(t, c.Lab)
	reach(t, c.Lab, traffic.Options{})
	c.waitMode(t, way[0])
	c.load = startLoadOf(t, c.Lab, traffic.LoadOptions{Rate: loadRate(), Established: true}, loadPairs()...)
	c.change(t, way, func() {
		for _, h := range c.Hosts() {
			poll(t, "flows of "+h+" are offloaded", func() string { return c.offloads(t, h) })
		}
	})
}

// offloadedChanges is how many changes are tried with flowtables: each pair of IPIP, plain
// packets and IPIP across racks, one way or the other.
const offloadedChanges = 4

// offloads says what is missing until the kernel has the connections of the load that pass a
// host in its flowtable, or its daemon says that the kernel has none.
func (c *changing) offloads(t *testing.T, host string) string {
	t.Helper()
	if !emulated() && strings.Contains(c.LogTail(host, 1000), "established flows are not offloaded") {
		return ""
	}
	tracked := output(t, c.Lab, host, "cat", "/proc/net/nf_conntrack")
	for _, p := range loadPairs() {
		if !strings.HasPrefix(p[0], host+"/") && !strings.HasPrefix(p[1], host+"/") {
			continue
		}
		from, to := "src="+addr(t, c.Lab, p[0]).String()+" ", "dst="+addr(t, c.Lab, p[1]).String()+" "
		for _, protocol := range []string{" udp ", " tcp "} {
			offloaded := false
			for line := range strings.Lines(tracked) {
				offloaded = offloaded || strings.Contains(line, protocol) && strings.Contains(line, from) && strings.Contains(line, to) && strings.Contains(line, "[OFFLOAD]")
			}
			if !offloaded {
				return fmt.Sprintf("no%sflow from %s to %s is:\n%s", protocol, p[0], p[1], tracked)
			}
		}
	}
	return ""
}

// changesOfStage is a way through the modes of this kernel.
func changesOfStage(t *testing.T) []store.Encapsulation {
	t.Helper()
	var modes []store.Encapsulation
	for _, e := range store.Encapsulations() {
		ok, err := lab.Supported(e)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			modes = append(modes, e)
		}
	}
	if emulated() {
		return tour(modes, withIPIP)
	}
	return tour(modes, anyPair)
}

// TestKilledInChange kills daemons with -9 at each stage of a change.
func TestKilledInChange(t *testing.T) {
	beside(t)
	modes := []store.Encapsulation{store.VXLAN, store.Direct}
	c := changeLab(t, "killed", modes[1])
	expectNoLoss(t, "before any change", c.load)
	for i, st := range []struct {
		name string
		host string // whose daemon is killed
		when func(store.Mode, map[string]store.NodeEncaps) bool
	}{
		{"the pool has changed", "node3", func(store.Mode, map[string]store.NodeEncaps) bool { return true }},
		{"a node accepts", "node2", func(m store.Mode, f map[string]store.NodeEncaps) bool { return has(m, f["node2"].Accepts) }},
		{"a node may send", "node3", func(m store.Mode, f map[string]store.NodeEncaps) bool { return has(m, f["node3"].Uses) }},
		{"a node has moved", "node2", func(m store.Mode, f map[string]store.NodeEncaps) bool {
			return f["node3"].Sends[defaultPool] == m.String()
		}},
		{"the store's host has moved", "node1", func(m store.Mode, f map[string]store.NodeEncaps) bool {
			return f["node1"].Sends[defaultPool] == m.String()
		}},
		{"the node that is killed has moved", "node3", func(m store.Mode, f map[string]store.NodeEncaps) bool {
			return f["node3"].Sends[defaultPool] == m.String()
		}},
	} {
		to := modes[i%2]
		what := fmt.Sprintf("to %s, %s killed when %s", to, st.host, st.name)
		m := modeNumbers(to)
		c.setMode(t, to)
		poll(t, what, func() string {
			if f := c.forms(t); !st.when(m, f) {
				return fmt.Sprintf("not seen: %+v", f)
			}
			return ""
		})
		if err := c.Kill(await.Context(t), st.host, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := c.Restart(await.Context(t), st.host); err != nil {
			t.Fatal(err)
		}
		c.waitMode(t, to)
		expectNoLoss(t, what, c.load)
		if t.Failed() {
			t.Fatalf("stopped after %s", what)
		}
	}
}

// changing is a lab in which something changes under traffic.
type changing struct {
	*lab.Lab
	store store.Store
	load  *load
}

// changeLab brings up three hosts in two racks with traffic between their pods.
// The spine speaks BGP in every mode: Direct needs it between racks.
func changeLab(t *testing.T, name string, e store.Encapsulation) *changing {
	t.Helper()
	top := topology(3, 2, e)
	top.Spine.BGP = new(true)
	c := &changing{Lab: bringUp(t, name, top)}
	c.store = openStore(t, c.Lab)
	reach(t, c.Lab, traffic.Options{})
	c.waitMode(t, e)
	c.load = startLoad(t, c.Lab, loadPairs()...)
	// Some are as large as the underlay takes, and so larger than a tunnel: pods
	// must have become smaller before one carries them.
	c.load.large = startPackets(t, c.Lab, traffic.LoadOptions{Rate: loadRate() / 20, Size: 1500}, loadPairs()...)
	return c
}

func modeNumbers(e store.Encapsulation) store.Mode {
	return store.NewMode(e, store.DefaultVXLANVNI, store.DefaultVXLANPort)
}

// has reports whether a list of forms names all of a mode that concern IPv4
// over IPv4.
func has(m store.Mode, forms []string) bool {
	for _, f := range m.Encaps() {
		if strings.HasPrefix(f, "ip6tnl") || strings.HasPrefix(f, "vxlan6") {
			continue
		}
		if !slices.Contains(forms, f) {
			return false
		}
	}
	return true
}

// setMode applies the pool's manifest as an operator does, and returns what that says.
func (c *changing) setMode(t *testing.T, e store.Encapsulation, flags ...string) string {
	t.Helper()
	ipip, vxlan := "Never", "Never"
	switch e {
	case store.IPIP:
		ipip = "Always"
	case store.IPIPCrossSubnet:
		ipip = "CrossSubnet"
	case store.VXLAN:
		vxlan = "Always"
	case store.VXLANCrossSubnet:
		vxlan = "CrossSubnet"
	case store.Direct:
	}
	manifest := fmt.Sprintf(`apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: %s}
spec: {cidr: 192.168.0.0/16, blockSize: 26, ipipMode: %s, vxlanMode: %s, natOutgoing: false, nodeSelector: all()}
`, defaultPool, ipip, vxlan)
	if p := c.Topology().Pool6; p != nil {
		manifest += fmt.Sprintf(`---
apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: %s}
spec: {cidr: "%s", blockSize: %d, ipipMode: %s, vxlanMode: %s, natOutgoing: false, nodeSelector: all()}
`, defaultPool6, p.CIDR, p.BlockSize, ipip, vxlan)
	}
	return routerctl(t, c.Lab, "node2", manifest, append([]string{"apply", "-f", "-"}, flags...)...)
}

// forms returns what each host published about the forms of packets. It is empty
// while the store is away.
func (c *changing) forms(t *testing.T) map[string]store.NodeEncaps {
	t.Helper()
	nodes, _, err := c.store.List(await.Context(t), store.KindNode, "")
	if err != nil {
		t.Logf("list nodes: %v", err)
	}
	out := make(map[string]store.NodeEncaps)
	for _, o := range nodes {
		if n, ok := o.Value.(*store.Node); ok {
			out[n.Name] = store.NodeEncapsOf(n)
		}
	}
	return out
}

// changeWithin is how long a change may take. Most of it is the measuring of
// tunnels, which is minutes of an emulated CPU's time if others want it too.
func changeWithin() time.Duration {
	if emulated() {
		return 4 * time.Minute
	}
	return 90 * time.Second
}

// waitMode waits until every host has moved to an encapsulation as a whole:
// they say so, the devices of others are gone, pods have its MTU, and
// routerctl node status finds nothing wrong.
func (c *changing) waitMode(t *testing.T, e store.Encapsulation) {
	t.Helper()
	m, want := modeOf(e), modeNumbers(e).String()
	pollFor(t, changeWithin(), "change to "+want, func() string {
		forms := c.forms(t)
		for _, h := range c.Hosts() {
			if got := forms[h].Sends[defaultPool]; got != want {
				return fmt.Sprintf("%s has moved to %q: %+v", h, got, forms[h])
			}
		}
		return ""
	})
	for _, h := range c.Hosts() {
		poll(t, "devices of "+h, func() string {
			for _, d := range []string{"tunl0", "vxlan.calico"} {
				r, err := c.Exec(await.Context(t), h, "ip", "-4", "-br", "addr", "show", "dev", d)
				if err != nil {
					return err.Error()
				}
				if used := strings.Contains(r.Stdout, "/32"); used != (d == m.device) {
					return fmt.Sprintf("%s: %q", d, r.Stdout)
				}
			}
			return ""
		})
	}
	waitPodMTU(t, c.Lab, m.mtu)
}
