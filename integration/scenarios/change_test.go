package scenarios

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// tour returns a way through all modes that goes from each to each other
// exactly once: an Eulerian circuit of the complete directed graph, by
// Hierholzer's algorithm.
func tour(modes []store.Encapsulation) []store.Encapsulation {
	left := make(map[store.Encapsulation][]store.Encapsulation)
	for _, from := range modes {
		for _, to := range modes {
			if from != to {
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

func TestTour(t *testing.T) {
	t.Parallel()
	for n := 2; n <= len(store.Encapsulations()); n++ {
		modes := store.Encapsulations()[:n]
		way := tour(modes)
		seen := make(map[[2]store.Encapsulation]bool)
		for i := 1; i < len(way); i++ {
			seen[[2]store.Encapsulation{way[i-1], way[i]}] = way[i-1] != way[i]
		}
		delete(seen, [2]store.Encapsulation{})
		if want := n * (n - 1); len(way) != want+1 || len(seen) != want || slices.Contains(slices.Collect(maps.Values(seen)), false) {
			t.Errorf("%d modes: %v covers %d pairs in %d steps, want each of %d once", n, way, len(seen), len(way)-1, want)
		}
	}
}

// TestModeChanges changes the pool's encapsulation under traffic from each that
// this kernel has to each other, one change after the other in one lab.
func TestModeChanges(t *testing.T) {
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
	way := tour(modes)
	c := changeLab(t, "change", way[0])
	expectNoLoss(t, "before any change", c.load)
	for i := 1; i < len(way); i++ {
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

// TestKilledInChange kills daemons with -9 at each stage of a change.
func TestKilledInChange(t *testing.T) {
	modes := []store.Encapsulation{store.VXLAN, store.Direct}
	c := changeLab(t, "killed", modes[1])
	expectNoLoss(t, "before any change", c.load)
	for i, st := range []struct {
		name string
		host string // whose daemon is killed
		when func(store.Mode, map[string]store.NodeForms) bool
	}{
		{"the pool has changed", "node3", func(store.Mode, map[string]store.NodeForms) bool { return true }},
		{"a node accepts", "node2", func(m store.Mode, f map[string]store.NodeForms) bool { return has(m, f["node2"].Accepts) }},
		{"a node may send", "node3", func(m store.Mode, f map[string]store.NodeForms) bool { return has(m, f["node3"].Uses) }},
		{"a node has moved", "node2", func(m store.Mode, f map[string]store.NodeForms) bool {
			return f["node3"].Sends[defaultPool] == m.String()
		}},
		{"the store's host has moved", "node1", func(m store.Mode, f map[string]store.NodeForms) bool {
			return f["node1"].Sends[defaultPool] == m.String()
		}},
		{"the node that is killed has moved", "node3", func(m store.Mode, f map[string]store.NodeForms) bool {
			return f["node3"].Sends[defaultPool] == m.String()
		}},
	} {
		to := modes[i%2]
		what := fmt.Sprintf("to %s, %s killed when %s", to, st.host, st.name)
		m := modeNumbers(to)
		c.setMode(t, to)
		poll(t, 60*time.Second, what, func() string {
			if f := c.forms(t); !st.when(m, f) {
				return fmt.Sprintf("not seen: %+v", f)
			}
			return ""
		})
		if err := c.Kill(within(t, 20*time.Second), st.host, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := c.Restart(within(t, 2*time.Minute), st.host); err != nil {
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
	c := &changing{Lab: bring(t, name, top)}
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
	for _, f := range m.Forms() {
		if strings.HasPrefix(f, "ip6tnl") || strings.HasPrefix(f, "vxlan6") {
			continue
		}
		if !slices.Contains(forms, f) {
			return false
		}
	}
	return true
}

// setMode applies the pool's manifest as an operator does.
func (c *changing) setMode(t *testing.T, e store.Encapsulation) {
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
	routerctl(t, c.Lab, "node2", fmt.Sprintf(`apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: %s}
spec: {cidr: 192.168.0.0/16, blockSize: 26, ipipMode: %s, vxlanMode: %s, natOutgoing: false, nodeSelector: all()}
`, defaultPool, ipip, vxlan), "apply", "-f", "-")
}

// forms returns what each host published about the forms of packets. It is empty
// while the store is away.
func (c *changing) forms(t *testing.T) map[string]store.NodeForms {
	t.Helper()
	nodes, _, err := c.store.List(within(t, 20*time.Second), store.KindNode, "")
	if err != nil {
		t.Logf("list nodes: %v", err)
	}
	out := make(map[string]store.NodeForms)
	for _, o := range nodes {
		if n, ok := o.Value.(*store.Node); ok {
			out[n.Name] = store.FormsOf(n)
		}
	}
	return out
}

// waitMode waits until every host has moved to an encapsulation as a whole:
// they say so, the devices of others are gone, pods have its MTU, and
// routerctl node status finds nothing wrong.
func (c *changing) waitMode(t *testing.T, e store.Encapsulation) {
	t.Helper()
	m, want := modeOf(e), modeNumbers(e).String()
	poll(t, 90*time.Second, "change to "+want, func() string {
		forms := c.forms(t)
		for _, h := range c.Hosts() {
			if got := forms[h].Sends[defaultPool]; got != want {
				return fmt.Sprintf("%s has moved to %q: %+v", h, got, forms[h])
			}
		}
		return ""
	})
	for _, h := range c.Hosts() {
		poll(t, 60*time.Second, "devices of "+h, func() string {
			for _, d := range []string{"tunl0", "vxlan.calico"} {
				r, err := c.Exec(within(t, 20*time.Second), h, "ip", "-4", "-br", "addr", "show", "dev", d)
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
