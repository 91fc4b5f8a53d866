package scenarios

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
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
			"cni":       map[string]any{"networkName": calicoNetwork},
		}
	}
	l := bring.UpWith(t, 2*time.Minute, labPrefix, "calico", lab.Options{Topology: top, BinDir: binDir(t), NoDaemons: true})
	c := newCalico(t, l)
	for _, h := range c.hosts {
		for _, o := range c.others(h) {
			poll(t, "BIRD's route on "+h.name, func() string {
				if out := output(t, l, h.name, "ip", "route", "show", o.plain.String(), "proto", "bird"); !strings.Contains(out, "via "+o.addr.String()) {
					return "not there: " + out
				}
				return ""
			})
		}
	}
	pairs := [][2]string{{"node1/pod1", "node2/pod1"}, {"node1/pod2", "node2/pod2"}, {"node1/pod1", "node2/pod2"}}
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
	for _, h := range c.hosts {
		c.takeOver(h)
		noLoss("takeover of " + h.name)
	}
	for _, h := range c.hosts {
		if out := routerctl(t, l, h.name, "", "node", "status"); !strings.Contains(out, "FelixRules") {
			t.Errorf("node status of %s says nothing of Felix's rules:\n%s", h.name, out)
		}
		c.cleanUp(h)
		noLoss("cleanup of " + h.name)
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
	back := c.hosts[1]
	c.goBack(back)
	noLoss("the way back of " + back.name)
	c.takeOver(back)
	noLoss("another takeover of " + back.name)
	c.cleanUp(back)
	check()
	noLoss("what follows")
	packets.Stop()
	// The runtime ends a pod that Calico's plugin began.
	p := c.hosts[0].pods()[0]
	if err := l.DetachPod(await.Context(t), "node1/pod1"); err != nil {
		t.Fatal(err)
	}
	poll(t, "the pod's end", func() string {
		for _, key := range []string{"/calico/ipam/v2/handle/" + calicoNetwork + "." + p.id, "/calico/resources/v3/projectcalico.org/workloadendpoints/default/node1-k8s-pod1-eth0"} {
			if out := output(t, l, "spine", "etcdctl", "--endpoints", calicoEtcd, "get", key); out != "" {
				return out
			}
		}
		if out := output(t, l, "node1", "ip", "-o", "link"); strings.Contains(out, p.device) {
			return out
		}
		return output(t, l, "node1", "ip", "route", "show", p.addr.String())
	})
	// And begins one that is routerd's from the start.
	if _, err := l.AttachKubePod(await.Context(t), "node1/pod3", "default", "uid-3"); err != nil {
		t.Fatal(err)
	}
	if r, err := l.Ping(await.Context(t), "node1/pod3", "node2/pod2", traffic.Options{}); err != nil || !r.OK {
		t.Errorf("node1/pod3 → node2/pod2: %s, %v", r, err)
	}
	check()
}

// takeOver ends Calico on a host and starts routerd in its place.
func (c *calico) takeOver(h calicoHost) {
	c.t.Helper()
	before := c.devices(h)
	monitors := map[string]*monitor{}
	for _, o := range c.hosts {
		monitors[o.name] = watchRoutes(c.t, c.Lab, o.name)
	}
	c.stop(h)
	if err := c.Restart(await.Context(c.t), h.name); err != nil {
		c.t.Fatal(err)
	}
	want := []string{"blackhole " + h.plain.String(), "blackhole " + h.tunnel.String()}
	for _, p := range h.pods() {
		want = append(want, p.addr.String()+" dev "+p.device)
	}
	for _, o := range c.others(h) {
		want = append(want, o.plain.String()+" nhid", o.tunnel.String()+" nhid")
	}
	poll(c.t, "routes of "+h.name, func() string {
		out := output(c.t, c.Lab, h.name, "ip", "route", "show", "proto", "77")
		for _, w := range want {
			if !strings.Contains(out, w) {
				return fmt.Sprintf("%s is not routerd's:\n%s", w, output(c.t, c.Lab, h.name, "ip", "route"))
			}
		}
		return ""
	})
	if after := c.devices(h); after != before {
		c.t.Errorf("devices of %s were made anew:\n%s\nbefore:\n%s", h.name, after, before)
	}
	poll(c.t, "sessions of "+h.name, func() string {
		r, err := c.Node(await.Context(c.t), h.name)
		if err != nil {
			return err.Error()
		}
		for _, p := range r.GetPeers() {
			if p.GetState() != "up" {
				return fmt.Sprint(p)
			}
		}
		if len(r.GetPeers()) != len(c.hosts)-1 {
			return fmt.Sprint(r.GetPeers())
		}
		return ""
	})
	for host, m := range monitors {
		for _, line := range m.stop(c.t) {
			if strings.HasPrefix(line, "Deleted") && strings.Contains(line, "192.168.") && !strings.Contains(line, "nexthop") {
				c.t.Errorf("while %s was taken over, a route was deleted on %s: %s", h.name, host, line)
			}
		}
	}
}

// guide runs a block of commands of docs/guides/from-calico.md on a host, as it stands there. Nobody confirms what routerd
// cleanup asks, and there is no systemd: what it does there the test has done.
func (c *calico) guide(h calicoHost, begin string) {
	c.t.Helper()
	bin, err := filepath.Abs(binDir(c.t))
	if err != nil {
		c.t.Fatal(err)
	}
	config := filepath.Join(filepath.Dir(lab.Socket(c.Name(), h.name)), "routerd.yaml")
	output(c.t, c.Lab, h.name, "env", "XTABLES_LOCKFILE=/dev/null", "bash", "-ec", `
routerd() { "`+bin+`/routerd" "$@" --yes --config "`+config+`"; }
systemctl() { :; }
`+guideBlock(c.t, "guides/from-calico.md", begin))
}

// cleanUp removes what Calico left on a host and routerd did not take over.
func (c *calico) cleanUp(h calicoHost) {
	c.t.Helper()
	c.guide(h, "routerd cleanup --calico")
	if out := output(c.t, c.Lab, h.name, "ip", "route"); strings.Contains(out, "proto 80") || strings.Contains(out, "proto bird") || strings.Contains(out, "1024") {
		c.t.Errorf("routes of Calico's are left on %s:\n%s", h.name, out)
	}
}

// goBack has Calico serve a host again.
func (c *calico) goBack(h calicoHost) {
	c.t.Helper()
	if err := c.Kill(await.Context(c.t), h.name, unix.SIGTERM); err != nil {
		c.t.Fatal(err)
	}
	c.guide(h, "ip route show proto 77")
	c.routes(h)
	for _, p := range h.pods() {
		c.batch(h.name, p.route())
	}
	c.startBIRD(h)
	for _, o := range c.others(h) {
		poll(c.t, "BIRD's route on "+h.name, func() string {
			if out := output(c.t, c.Lab, h.name, "ip", "route", "show", o.plain.String(), "proto", "bird"); !strings.Contains(out, "via "+o.addr.String()) {
				return "not there: " + out
			}
			return ""
		})
	}
	c.guide(h, "systemctl enable --now calico-felix")
}

// devices are the names and numbers of a host's devices.
func (c *calico) devices(h calicoHost) string {
	c.t.Helper()
	var out []string
	for line := range strings.Lines(output(c.t, c.Lab, h.name, "ip", "-o", "link")) {
		if f := strings.Fields(line); len(f) > 1 {
			out = append(out, f[0]+" "+f[1])
		}
	}
	return strings.Join(out, "\n")
}
