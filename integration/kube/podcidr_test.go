package kube_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

// TestPodCIDRs: pods have addresses of what Kubernetes gave their Nodes and reach each
// other; the pod CIDR of a Node that another program serves is routed to it, and one that
// overlaps another is said to.
func TestPodCIDRs(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(2)
	top.Pods = &pods
	c := bringUp(t, "p", top, "192.168.7.0/24", "192.168.9.0/25")
	for where, cidr := range map[string]string{"node1/a": "192.168.7.0/24", "node2/b": "192.168.9.0/25"} {
		p := c.run(where)
		if !netip.MustParsePrefix(cidr).Contains(p.Addrs[0]) {
			t.Errorf("%s has %s, which is not in %s", where, p.Addrs[0], cidr)
		}
	}
	c.reach("pods reach each other", "node1/a", "node2/b", false)
	c.reach("and back", "node2/b", "node1/a", false)

	// A host that Calico serves with host-local has a pod CIDR and no blocks.
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"other","annotations":{"projectcalico.org/IPv4Address":"10.1.0.99/24"}},"spec":{"podCIDR":"192.168.11.0/24","podCIDRs":["192.168.11.0/24"]}}`)
	await.Until(t, "its pod CIDR is routed to it", func() error {
		out, err := c.Output(t.Context(), "node1", "ip", "route", "show", "192.168.11.0/24")
		if err == nil && !strings.Contains(out, "via 10.1.0.99") {
			err = errors.New(out)
		}
		return err
	})
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"wrong"},"spec":{"podCIDR":"192.168.7.128/25","podCIDRs":["192.168.7.128/25"]}}`)
	await.Until(t, "the overlap is a condition of the host", func() error {
		n, err := c.Node(t.Context(), "node1")
		if err != nil {
			return err
		}
		for _, cond := range n.GetHealth().GetConditions() {
			if cond.GetName() == "PodCIDRs" && strings.Contains(cond.GetReason(), "192.168.7.128/25 of node wrong overlaps 192.168.7.0/24 of node node1") {
				return nil
			}
		}
		return fmt.Errorf("conditions: %v", n.GetHealth().GetConditions())
	})
	forbidden(t)
}

// TestPodCIDRManifest: what configs/kubernetes/pod-cidr changes of new-cluster is what
// it says.
func TestPodCIDRManifest(t *testing.T) {
	out := kubectl(t, "kustomize", "../../configs/kubernetes/pod-cidr")
	base, err := os.ReadFile("../../configs/kubernetes/base/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(base)) {
		if s := strings.TrimSpace(line); !strings.HasPrefix(s, "#") && !strings.Contains(s, "cidr:") && !strings.Contains(out, s) {
			t.Errorf("it lacks the line %q of configs/kubernetes/base/config.yaml", s)
		}
	}
	if !strings.Contains(out, "usePodCIDR: true") {
		t.Error("ipam.usePodCIDR is not set")
	}
}
