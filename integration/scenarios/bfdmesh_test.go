package scenarios

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// TestBFDBetweenHosts: hosts watch each other by BFD, 100 ms × 5, one hop away and several, first as the mesh has it (the
// annotation on BGPConfiguration), then as a BGPPeer without the mesh. Cables are pulled, at the other ends of the links: the first
// host ends the sessions, and drops the routes that only BGP knows, by BFD and not by the hold time, and has them again with the cables.
func TestBFDBetweenHosts(t *testing.T) {
	t.Parallel()
	top := topology(3, 0, store.VXLANCrossSubnet)
	for i := range top.Nodes { // nodes take prefixes of pools from each other, and the datastore knows nothing of these
		top.Nodes[i].Config = map[string]any{"bgp": map[string]any{"inject": map[string]any{"allow": []string{"192.168.200.0/24"}}}}
	}
	l := bringUp(t, "bfdmesh", top)
	hosts := l.Hosts()
	host, near, far := hosts[0], hosts[1], hosts[2] // far is in another rack
	watched := func(p *apiv1.BGPPeer) bool { return strings.HasPrefix(p.GetBfd(), "Up (100ms, down after 500ms)") }
	announced := map[string]string{near: "192.168.200.2/32", far: "192.168.200.3/32"}
	for h, prefix := range announced {
		routerctl(t, l, h, "", "bgp", "inject", "add", prefix, "--owner", "test", "--ttl", "1h")
	}

	routerctl(t, l, host, `apiVersion: projectcalico.org/v3
kind: BGPConfiguration
metadata: {name: default, annotations: {routerd.io/bfd: 100ms x 5}}
spec: {}
`, "apply", "-f", "-")
	waitPeers(t, l, hosts, len(hosts)-1, func(p *apiv1.BGPPeer) bool { return watched(p) && strings.Contains(p.GetType(), "mesh") })
	unplug(t, l, host, announced)
	for h, prefix := range announced {
		output(t, l, "spine", "ip", "link", "set", h, "up")
		waitRouteTo(t, l, host, prefix, true)
	}

	routerctl(t, l, host, `apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: all, annotations: {routerd.io/bfd: 100ms x 5}}
spec: {nodeSelector: all(), peerSelector: all()}
`, "apply", "-f", "-")
	setMesh(t, l, false)
	waitPeers(t, l, hosts, len(hosts)-1, func(p *apiv1.BGPPeer) bool { return watched(p) && !strings.Contains(p.GetType(), "mesh") })
	unplug(t, l, host, map[string]string{far: announced[far]})
}

// unplug pulls the cables of hosts out of their switches until another host, which has routes to what they announce, has no
// session with them and no route.
func unplug(t *testing.T, l *lab.Lab, host string, announced map[string]string) {
	t.Helper()
	for _, prefix := range announced {
		waitRouteTo(t, l, host, prefix, true)
	}
	from := time.Now()
	for other := range announced {
		output(t, l, "spine", "ip", "link", "set", other, "down")
	}
	for _, prefix := range announced {
		waitRouteTo(t, l, host, prefix, false)
	}
	took := time.Since(from)
	for other := range announced {
		poll(t, fmt.Sprintf("the session of %s with %s ended by BFD", host, other), func() string {
			r, err := l.Node(await.Context(t), host)
			if err != nil {
				return err.Error()
			}
			for _, p := range r.GetPeers() {
				if p.GetAddress() == addr(t, l, other).String() && p.GetState() != "up" && strings.HasPrefix(p.GetBfd(), "Down") {
					return ""
				}
			}
			return fmt.Sprint(r.GetPeers())
		})
	}
	t.Logf("%v unplugged: the routes went after %v", slices.Sorted(maps.Keys(announced)), took)
	// The hold time is 90 s; a machine that is busy takes longer than 500 ms.
	if took > 10*time.Second {
		t.Errorf("%v unplugged: the routes went after %v", announced, took)
	}
}

func waitRouteTo(t *testing.T, l *lab.Lab, host, prefix string, want bool) {
	t.Helper()
	poll(t, fmt.Sprintf("a route to %s on %s: %t", prefix, host, want), func() string {
		if out := output(t, l, host, "ip", "route", "show", prefix); (out != "") != want {
			return fmt.Sprintf("%q", out)
		}
		return ""
	})
}
