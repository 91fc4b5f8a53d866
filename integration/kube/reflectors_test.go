package kube_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

// kubelet writes into a Node's status whether its kubelet is heard from, as the kubelet and the node controller do.
func (c *cluster) kubelet(node, ready string) {
	c.t.Helper()
	if _, err := server.Do(c.t.Context(), http.MethodPatch, "/api/v1/nodes/"+node+"/status", "application/strategic-merge-patch+json",
		fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","status":%q,"reason":"Test"}]}}`, ready)); err != nil {
		c.t.Fatal(err)
	}
}

// reflectors waits until a host names these reflectors, and so many sessions of the mesh.
func (c *cluster) reflectors(what, host string, mesh uint32, want ...string) {
	c.t.Helper()
	await.Until(c.t, what, func() error {
		conn, err := c.Client(host)
		if err != nil {
			return err
		}
		defer conn.Close()
		r, err := apiv1.NewBGPClient(conn).Reflectors(c.t.Context(), &apiv1.BGPReflectorsRequest{})
		if err != nil {
			return err
		}
		var got []string
		for _, g := range r.GetGroups() {
			got = append(got, g.GetReflectors()...)
		}
		if !slices.Equal(got, want) || r.GetMesh() != mesh || len(r.GetWaiting()) > 0 || r.GetProblem() != "" {
			return fmt.Errorf("%s says %v, want %v and %d sessions of the mesh", host, r, want, mesh)
		}
		return nil
	})
}

// TestReflectors: hosts whose datastore is the API choose reflectors by what their Nodes say. One that has died is replaced when
// Kubernetes has not heard from its kubelet for a while, without which nothing changes, and hosts go back to the mesh. What they write
// the rights of the manifests allow.
func TestReflectors(t *testing.T) {
	top := lab.DefaultTopology(4)
	top.Pods, top.Spine.BGP = new(int), new(false)
	c := bringUp(t, "rr", top)
	for _, h := range c.Hosts() {
		c.kubelet(h, "True")
	}
	const all = 6 // sessions of the mesh
	c.reflectors("the mesh", "node4", all)
	if out := routerctl(t, asAdmin(t), "bgp", "reflectors", "auto", "--count", "2"); !strings.Contains(out, "The nodes choose 2 reflectors") {
		t.Error(out)
	}
	c.reflectors("the first two reflect", "node4", 0, "node1", "node2")

	if err := c.Kill(t.Context(), "node1", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.kubelet("node1", "Unknown")
	await.Until(t, "another one reflects", func() error {
		if got := kubectl(t, "get", "node", "node3", "-o", "jsonpath={.metadata.annotations.projectcalico\\.org/annotations}"); !strings.Contains(got, `"routerd.io/reflects":"true"`) {
			return fmt.Errorf("the Node says %s", got)
		}
		return nil
	})
	if err := c.Restart(t.Context(), "node1"); err != nil {
		t.Fatal(err)
	}
	c.reflectors("the one that came back gives its place away", "node4", 0, "node2", "node3")
	c.kubelet("node1", "True")
	c.reflectors("it is there again", "node4", 0, "node2", "node3")

	routerctl(t, asAdmin(t), "bgp", "reflectors", "off")
	c.reflectors("the mesh again", "node4", all)
	forbidden(t)
}
