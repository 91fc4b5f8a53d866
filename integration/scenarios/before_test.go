//go:build before

package scenarios

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestUpgradeFromBefore puts this build in the place of an earlier one, whose programs are in the directory that ROUTERD_BEFORE
// names (make test-upgrade: the last with GoBGP's server), on one host after the other. Hosts, spine and two switches, FRR and BIRD,
// are joined by BGP alone. Pods send each other numbered packets and the switches are pinged; nothing is lost.
func TestUpgradeFromBefore(t *testing.T) {
	before := os.Getenv("ROUTERD_BEFORE")
	dir, next := t.TempDir(), t.TempDir()
	for _, p := range []string{"routerd", "routerd-cni", "routerctl"} {
		copyProgram(t, filepath.Join(before, p), filepath.Join(dir, p))
		copyProgram(t, filepath.Join(binDir(t), p), filepath.Join(next, p))
	}
	l := bringFrom(t, "before", topology(3, 2, store.Direct), dir)
	hosts := l.Hosts()
	frr, bird := newTor(t, l, hosts[0], "frr", "198.51.100.1"), newTor(t, l, hosts[0], "bird", "198.51.100.2")
	frr.startFRR(64998, "10.255.0.1")
	bird.startBIRD(64997, "10.255.0.2")
	frr.peer(64998)
	bird.peer(64997)
	up := func() {
		t.Helper()
		frr.waitUp()
		bird.waitUp()
		waitRoutes(t, l, hosts[0], frr.up, bird.up)
	}
	up()
	reach(t, l, traffic.Options{})
	// The switches are to see the pod's own address, which BGP has told them of.
	routerctl(t, l, hosts[0], `apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: default-ipv4-ippool}
spec: {cidr: 192.168.0.0/16, blockSize: 26, ipipMode: Never, vxlanMode: Never, natOutgoing: false, nodeSelector: all()}
`, "apply", "-f", "-")
	for _, s := range []*tor{frr, bird} {
		s.answersPod()
	}
	version := func(h string) string { return strings.TrimSpace(routerctl(t, l, h, "", "version")) }
	was := version(hosts[0])
	flows := []*traffic.Flow{frr.flow(), bird.flow()}
	stop := stopFlows(t, flows)
	load := startLoad(t, l, loadPairs()...)
	for _, p := range []string{"routerd", "routerd-cni", "routerctl"} {
		if err := os.Rename(filepath.Join(next, p), filepath.Join(dir, p)); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range hosts {
		if v := version(h); v != was {
			t.Fatalf("%s has the other build already: %s", h, v)
		}
		if err := l.Restart(await.Context(t), h); err != nil {
			t.Fatal(err)
		}
		if v := version(h); v == was {
			t.Fatalf("%s has not the other build: %s", h, v)
		}
		up()
		waitFlows(t, flows, time.Second)
		expectNoLoss(t, "upgrade of "+h, load)
	}
	stop()
	reach(t, l, traffic.Options{})
}
