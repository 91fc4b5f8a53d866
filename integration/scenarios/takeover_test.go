package scenarios

import (
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/calico"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestTakeoverFromCalico: hosts on which Calico runs, with pods that send each other
// numbered packets, are taken over in place, one after the other, and no packet is lost:
// devices, routes, sessions and addresses go on, and the pods are routerd's afterwards.
func TestTakeoverFromCalico(t *testing.T) {
	beside(t)
	top := topology(2, 0, store.Direct)
	top.Spine.BGP = new(bool) // the hosts have a mesh
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{
			"datastore": map[string]any{"embedded": nil, "endpoints": []any{calicoEtcd}, "caFile": nil, "certFile": nil, "keyFile": nil},
			"cni":       map[string]any{"networkName": calico.Network},
		}
	}
	l := bring.UpWith(t, 2*time.Minute, labPrefix, "calico", lab.Options{Topology: top, BinDir: binDir(t), NoDaemons: true})
	c := newCalico(t, l)
	pairs := c.Pairs()
	for _, p := range pairs {
		if r, err := l.Ping(await.Context(t), p[0], p[1], traffic.Options{}); err != nil || !r.OK {
			t.Fatalf("Calico's own network, %v: %s, %v", p, r, err)
		}
	}
	packets := startPackets(t, l, traffic.LoadOptions{Rate: loadRate()}, pairs...)
	noLoss := func(what string) {
		t.Helper()
		r := packets.Interval()
		t.Logf("%s: %s", what, r.Sum())
		for _, f := range append(r.Bad(), r.Silent()...) {
			t.Errorf("%s: %s", what, f)
		}
	}
	for _, h := range c.Hosts {
		c.takeOver(h)
		noLoss("takeover of " + h.Name)
	}
	for _, h := range c.Hosts {
		if out := routerctl(t, l, h.Name, "", "node", "status"); !strings.Contains(out, "FelixRules") {
			t.Errorf("node status of %s says nothing of Felix's rules:\n%s", h.Name, out)
		}
		c.CleanUp(h)
		noLoss("cleanup of " + h.Name)
	}
	check := func() {
		t.Helper()
		poll(t, "routerctl ipam check", func() string {
			out, err := tryRouterctl(t, l, "node1", "", "ipam", "check")
			if err != nil {
				return err.Error() + out
			}
			return ""
		})
	}
	// Not for good: one host goes back, and comes again.
	back := c.Hosts[1]
	c.GoBack(back)
	noLoss("the way back of " + back.Name)
	c.takeOver(back)
	noLoss("another takeover of " + back.Name)
	c.CleanUp(back)
	check()
	noLoss("what follows")
	packets.Stop()
	// The runtime ends a pod that Calico's plugin began.
	p := c.Hosts[0].Pods()[0]
	if err := l.DetachPod(await.Context(t), "node1/pod1"); err != nil {
		t.Fatal(err)
	}
	poll(t, "the pod's end", func() string {
		for _, key := range []string{"/calico/ipam/v2/handle/" + calico.Network + "." + p.ID, "/calico/resources/v3/projectcalico.org/workloadendpoints/default/node1-k8s-pod1-eth0"} {
			if out := output(t, l, "spine", "etcdctl", "--endpoints", calicoEtcd, "get", key); out != "" {
				return out
			}
		}
		if out := output(t, l, "node1", "ip", "-o", "link"); strings.Contains(out, p.Device) {
			return out
		}
		return output(t, l, "node1", "ip", "route", "show", p.Addr.String())
	})
	// And begins one that is routerd's from the start.
	if _, err := l.AttachKubePod(await.Context(t), "node1/pod3", "default", "uid-3"); err != nil {
		t.Fatal(err)
	}
	if r, err := l.Ping(await.Context(t), "node1/pod3", pairs[1][1], traffic.Options{}); err != nil || !r.OK {
		t.Errorf("node1/pod3 → %s: %s, %v", pairs[1][1], r, err)
	}
	check()
}

// takeOver moves a host to routerd, over which no route to a block or a pod is deleted on any.
func (c *inEtcd) takeOver(h calico.Host) {
	c.t.Helper()
	monitors := map[string]*monitor{}
	for _, o := range c.Hosts {
		monitors[o.Name] = watchRoutes(c.t, c.Lab, o.Name)
	}
	c.TakeOver(h)
	for host, m := range monitors {
		for _, line := range m.stop(c.t) {
			if strings.HasPrefix(line, "Deleted") && strings.Contains(line, "192.168.") && !strings.Contains(line, "nexthop") {
				c.t.Errorf("while %s was taken over, a route was deleted on %s: %s", h.Name, host, line)
			}
		}
	}
}
