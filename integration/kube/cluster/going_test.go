package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
)

// TestNodeGoes: the daemon on a node that was cordoned asks the switch to prefer other ways
// when its pod ends, and withdraws what the node announces before it has ended; the next one
// announces it again.
func TestNodeGoes(t *testing.T) {
	c := switched(t)
	n := c.Nodes[len(c.Nodes)-1]
	// Every node has a block: its tunnel's address is of it.
	out, err := n.Output(t.Context(), "ip", "-4", "route", "show", "type", "blackhole", "proto", "77")
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(out)
	if len(f) < 2 {
		t.Fatalf("blocks of %s: %q", n.Name, out)
	}
	block := f[1]
	announced := func(want bool) func() error {
		return func() error {
			nodes, err := c.Announcers(t.Context(), block)
			if err == nil && slices.Contains(nodes, n.Name) != want {
				err = fmt.Errorf("%s is announced by %q", block, nodes)
			}
			return err
		}
	}
	await.Until(t, "its block is announced", announced(true))
	daemon := daemonOn(t, n, 0)
	kubectl(t, c, "cordon", n.Name)
	t.Cleanup(func() { kubectl(t, c, "uncordon", n.Name) })
	kubectl(t, c, "-n", "kube-system", "delete", "pod", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName="+n.Name, "--wait=false")
	await.Until(t, "the switch is asked to prefer other ways", func() error {
		out, err := c.Bird(t.Context(), "show", "route", block, "all", "protocol", n.Name+"_ipv4")
		if err == nil && !strings.Contains(out, "(65535,0)") {
			err = fmt.Errorf("of %s it has\n%s", block, out)
		}
		return err
	})
	if err := unix.Kill(daemon, 0); err != nil {
		t.Fatalf("the daemon has ended while it drains: %v", err)
	}
	// Over a restart the switch would keep it.
	await.Until(t, "its block is withdrawn", announced(false))
	await.Until(t, "the daemon ends", func() error {
		if err := unix.Kill(daemon, 0); !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("it is there: %v", err) //nolint:errorlint // nil: it is
		}
		return nil
	})
	daemonOn(t, n, daemon)
	await.Until(t, "its block is announced again", announced(true))
}
