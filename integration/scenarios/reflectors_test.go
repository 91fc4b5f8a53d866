package scenarios

import (
	"fmt"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// TestReflectors goes from the mesh to two route reflectors among the nodes and
// back, by the well-known recipe, under traffic between all hosts.
func TestReflectors(t *testing.T) {
	beside(t)
	l := bringUp(t, "reflect", topology(5, 1, store.VXLANCrossSubnet))
	hosts := l.Hosts()
	mesh := func(*apiv1.BGPPeer) bool { return true }
	waitPeers(t, l, hosts, len(hosts)-1, mesh)
	var pairs [][2]string
	for i, h := range hosts {
		pairs = append(pairs, [2]string{h + "/pod1", hosts[(i+1)%len(hosts)] + "/pod1"}, [2]string{h + "/pod1", hosts[(i+2)%len(hosts)] + "/pod1"})
	}
	_, stop := startFlows(t, l, pairs...)

	reflectors, clients := hosts[:2], hosts[2:]
	for _, h := range reflectors {
		setReflector(t, l, h, true)
	}
	routerctl(t, l, hosts[0], `apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: to-reflectors}
spec: {nodeSelector: "!has(reflector)", peerSelector: has(reflector)}
---
apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: between-reflectors}
spec: {nodeSelector: has(reflector), peerSelector: has(reflector)}
`, "apply", "-f", "-")
	setMesh(t, l, false)
	explicit := func(p *apiv1.BGPPeer) bool { return !strings.Contains(p.GetType(), "mesh") }
	waitPeers(t, l, reflectors, len(hosts)-1, explicit)
	waitPeers(t, l, clients, len(reflectors), explicit)
	// A client hears of the other clients' blocks by reflection alone.
	for _, h := range clients {
		poll(t, "routes reflected to "+h, func() string {
			out, err := tryRouterctl(t, l, h, "", "bgp", "routes")
			if err != nil {
				return err.Error()
			}
			for _, other := range clients {
				if other != h && !strings.Contains(out, addr(t, l, other).String()+" ") {
					return "nothing from " + other + ":\n" + out
				}
			}
			return ""
		})
	}

	setMesh(t, l, true)
	routerctl(t, l, hosts[0], "", "delete", "bgppeer", "to-reflectors", "between-reflectors")
	for _, h := range reflectors {
		setReflector(t, l, h, false)
	}
	waitPeers(t, l, hosts, len(hosts)-1, func(p *apiv1.BGPPeer) bool { return strings.Contains(p.GetType(), "mesh") })
	stop()
}

// setReflector gives a node the label and the cluster id of a reflector, or
// takes them away.
func setReflector(t *testing.T, l *lab.Lab, host string, on bool) {
	t.Helper()
	_, err := store.Modify(await.Context(t), openStore(t, l), store.ResourceKey(store.KindNode, host), func(cur store.Object) (any, error) {
		n, ok := store.Clone(cur.Value).(*store.Node)
		if !ok {
			return nil, fmt.Errorf("unexpected %T", cur.Value)
		}
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels["reflector"], n.Spec.BGP.RouteReflectorClusterID = "true", "244.0.0.1"
		if !on {
			delete(n.Labels, "reflector")
			n.Spec.BGP.RouteReflectorClusterID = ""
		}
		return n, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// waitPeers waits until each host has so many sessions, all up and as they
// should be.
func waitPeers(t *testing.T, l *lab.Lab, hosts []string, want int, as func(*apiv1.BGPPeer) bool) {
	t.Helper()
	for _, h := range hosts {
		poll(t, "BGP sessions of "+h, func() string {
			r, err := l.Node(await.Context(t), h)
			if err != nil {
				return err.Error()
			}
			good := 0
			for _, p := range r.GetPeers() {
				if p.GetState() == "up" && as(p) {
					good++
				}
			}
			if good != want || len(r.GetPeers()) != want {
				return fmt.Sprintf("%d of %d are right, want %d: %v", good, len(r.GetPeers()), want, r.GetPeers())
			}
			return ""
		})
	}
}
