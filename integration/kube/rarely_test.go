package kube_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/routerd/routerd/integration/await"
)

// halfDone leaves what a daemon of node1 that is stopped has to do when it starts: no Lease, a block
// in no pool, and one whose claim is not finished. Its answer waits until that is done.
func (c *cluster) halfDone() (done func()) {
	t := c.t
	t.Helper()
	kubectl(t, "-n", "kube-system", "delete", "--ignore-not-found", "lease/routerd-ipam-collector")
	record := func(cidr, state string) (affinity string) {
		p := netip.MustParsePrefix(cidr)
		size := 1 << (32 - p.Bits())
		free := "0"
		for i := 1; i < size; i++ {
			free += fmt.Sprintf(", %d", i)
		}
		name := strings.NewReplacer(".", "-", "/", "-").Replace(cidr)
		kubectlWith(t, fmt.Sprintf(`
apiVersion: projectcalico.org/v3
kind: IPAMBlock
metadata: {name: %s}
spec: {cidr: %s, affinity: "host:node1", allocations: [%s], unallocated: [%s], attributes: []}
---
apiVersion: projectcalico.org/v3
kind: BlockAffinity
metadata: {name: node1-%[1]s}
spec: {cidr: %[2]s, node: node1, state: %[5]s, deleted: false, type: host}
`, name, cidr, strings.TrimSuffix(strings.Repeat("null, ", size), ", "), free, state), "apply", "-f", "-")
		return "blockaffinities.projectcalico.org/node1-" + name
	}
	foreign, begun := record("10.78.0.0/26", "confirmed"), record("192.168.255.192/26", "pending")
	return func() {
		t.Helper()
		await.Until(t, "the Lease is there", func() error {
			if kubectl(t, "-n", "kube-system", "get", "--ignore-not-found", "lease/routerd-ipam-collector", "-o", "name") == "" {
				return errors.New("it is not")
			}
			return nil
		})
		await.Until(t, "the block in no pool is given up", func() error {
			if left := kubectl(t, "get", "--ignore-not-found", foreign, strings.Replace(foreign, "blockaffinities.projectcalico.org/node1-", "ipamblocks.projectcalico.org/", 1), "-o", "name"); left != "" {
				return errors.New(left)
			}
			return nil
		})
		await.Until(t, "the claim is finished", func() error {
			if state := kubectl(t, "get", begun, "-o", "jsonpath={.spec.state}"); state != "confirmed" {
				return fmt.Errorf("the affinity is %q", state)
			}
			return nil
		})
	}
}

// asksHost asks the host node1 how it is.
func (c *cluster) asksHost() {
	t := c.t
	t.Helper()
	kubectlWith(t, "{apiVersion: projectcalico.org/v3, kind: CalicoNodeStatus, metadata: {name: asked}, spec: {node: node1, classes: [Agent], updatePeriodSeconds: 1}}", "apply", "-f", "-")
	t.Cleanup(func() { kubectl(t, "delete", "--ignore-not-found", "caliconodestatuses.projectcalico.org/asked") })
	await.Until(t, "the host says how it is", func() error {
		if kubectl(t, "get", "caliconodestatuses.projectcalico.org/asked", "-o", "jsonpath={.status.lastUpdated}") == "" {
			return errors.New("it does not")
		}
		return nil
	})
}
