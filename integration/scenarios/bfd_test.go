package scenarios

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// startWatchedBIRD runs BIRD as docs/guides/bgp.md has it, with BFD.
func (s *tor) startWatchedBIRD(asn int, id string) {
	s.t.Helper()
	s.file("bird.conf", fmt.Sprintf(`router id %[2]s;
log stderr all;
protocol device {}
protocol kernel { ipv4 { export all; }; persist; graceful restart on; }
protocol kernel { ipv6 { export all; }; persist; graceful restart on; }
protocol static { ipv4; route %[4]s/32 blackhole; route 203.0.113.0/24 blackhole; }
protocol bfd { interface "%[3]s" { interval 100 ms; multiplier 5; }; }
protocol bgp nodes {
  debug { states };
  local as %[1]d;
  interface "%[3]s";
  neighbor range fe80::/10 external;
  dynamic name "node";
  graceful restart on;
  bfd graceful;
  ipv4 { extended next hop on; import all; export where source = RTS_STATIC; };
  ipv6 { import all; export none; };
}
`, asn, id, s.port, s.behind))
	s.runBIRD()
}

// silence drops all that arrives at the switch, or no more, so that no link goes down.
func (s *tor) silence(on bool) {
	s.t.Helper()
	if on {
		s.nft("add table netdev silence { chain in { type filter hook ingress device " + s.port + " priority 0; policy drop; }; }")
	} else {
		s.nft("delete table netdev silence")
	}
}

func (s *tor) nft(command string) {
	s.t.Helper()
	out, err := exec.CommandContext(await.Context(s.t), "ip", "netns", "exec", s.space, "nft", command).CombinedOutput()
	if err != nil {
		s.t.Fatalf("nft %s: %v: %s", command, err, out)
	}
}

// TestBFD connects a host to two switches that are watched by BFD, 100 ms × 5. One falls silent, with its link up: traffic to
// what both announce goes through the other one after a fraction of a second, not after the hold time. A restart of the
// daemon, in order or by a kill, is no failure to the switches and loses nothing.
func TestBFD(t *testing.T) {
	beside(t)
	l := bringUp(t, "bfd", topology(1, 1, store.VXLANCrossSubnet))
	const host = "node1"
	one, two := newTor(t, l, host, "bfd1", "198.51.100.9"), newTor(t, l, host, "bfd2", "198.51.100.9")
	one.startWatchedBIRD(64998, "10.255.0.1")
	two.startWatchedBIRD(64997, "10.255.0.2")
	both := []*tor{one, two}
	for i, s := range both {
		routerctl(t, l, host, fmt.Sprintf(`apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: %s, annotations: {routerd.io/peerInterface: %s, routerd.io/bfd: 100ms x 5}}
spec: {node: %s, asNumber: %d}
`, s.name, s.up, host, 64998-i), "apply", "-f", "-")
	}
	watched := func(s *tor) {
		t.Helper()
		s.waitUp()
		s.waitPeer("watched", func(p *apiv1.BGPPeer) bool { return strings.HasPrefix(p.GetBfd(), "Up") })
	}
	watched(one)
	watched(two)
	waitRoutes(t, l, host, one.up, two.up)
	if out := routerctl(t, l, host, "", "bgp", "peers"); !strings.Contains(out, "BFD") || !strings.Contains(out, "Up (100ms, down after 500ms)") {
		t.Errorf("bgp peers says nothing of BFD:\n%s", out)
	}
	routerctl(t, l, host, `apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: default-ipv4-ippool}
spec: {cidr: 192.168.0.0/16, blockSize: 26, ipipMode: Never, vxlanMode: CrossSubnet, natOutgoing: false, nodeSelector: all()}
`, "apply", "-f", "-")
	one.answersPod()
	flow := one.flow()
	t.Cleanup(func() { flow.Stop() })
	waitFlows(t, []*traffic.Flow{flow}, 200*time.Millisecond)

	// Whichever the flow goes through, it is one of the two.
	for _, s := range both {
		from := time.Now()
		s.silence(true)
		other := both[0]
		if s == both[0] {
			other = both[1]
		}
		s.waitPeer("down", func(p *apiv1.BGPPeer) bool { return p.GetState() != "up" })
		waitRoutes(t, l, host, other.up)
		took := time.Since(from)
		t.Logf("%s silent: the route moved after %v", s.name, took)
		// The hold time is 90 s; a machine that is busy takes longer than 500 ms.
		if took > 10*time.Second {
			t.Errorf("%s silent: the route moved after %v", s.name, took)
		}
		waitFlows(t, []*traffic.Flow{flow}, 300*time.Millisecond)
		s.silence(false)
		watched(s)
		waitRoutes(t, l, host, one.up, two.up)
	}
	flow.Stop()

	flow = one.flow()
	for _, kill := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		waitFlows(t, []*traffic.Flow{flow}, 200*time.Millisecond)
		if err := l.Kill(await.Context(t), host, kill); err != nil {
			t.Fatal(err)
		}
		waitFlows(t, []*traffic.Flow{flow}, 500*time.Millisecond)
		if err := l.Restart(await.Context(t), host); err != nil {
			t.Fatal(err)
		}
		watched(one)
		watched(two)
		waitFlows(t, []*traffic.Flow{flow}, 300*time.Millisecond)
	}
	if r := flow.Stop(); r.Lost() != 0 {
		t.Errorf("the daemon's restarts lost packets: %s", r)
	} else {
		t.Log(r)
	}
}
