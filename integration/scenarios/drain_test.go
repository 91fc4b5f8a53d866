package scenarios

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// also plugs a switch into another host, to which it is a BGPPeer of another name.
func (s *tor) also(host string) *tor {
	s.t.Helper()
	other := *s
	other.host, other.name = host, s.name+"-"+host
	other.port, other.up = s.name+"-port2", s.name+"-up2"
	other.plug()
	return &other
}

// startDrainBIRD runs BIRD between two hosts as docs/guides/bgp.md has it for drain. Of ways that are as good as another
// it takes that of the lower router id, which is the first host's.
func (s *tor) startDrainBIRD(asn int, id string, ports ...string) {
	s.t.Helper()
	var sessions strings.Builder
	for i, p := range ports {
		fmt.Fprintf(&sessions, `protocol bgp nodes%d {
  local as %d;
  interface "%s";
  neighbor range fe80::/10 external;
  dynamic name "node%d_";
  graceful restart on;
  ipv4 { extended next hop on; import filter leaving; export where source = RTS_STATIC; };
}
`, i, asn, p, i)
	}
	s.file("bird.conf", fmt.Sprintf(`router id %s;
log stderr all;
protocol device {}
protocol kernel { ipv4 { export all; }; persist; graceful restart on; }
protocol static { ipv4; route %s/32 blackhole; }
filter leaving {
  if (65535, 0) ~ bgp_community then bgp_local_pref = 0;
  accept;
}
%s`, id, s.behind, sessions.String()))
	s.runBIRD()
}

// startDrainFRR runs FRR likewise, which knows GRACEFUL_SHUTDOWN by itself.
func (s *tor) startDrainFRR(asn int, id string, ports ...string) {
	s.t.Helper()
	var sessions strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&sessions, " neighbor %[1]s interface v6only remote-as external\n neighbor %[1]s timers connect 1\n", p)
	}
	s.startFRRWith(fmt.Sprintf(`frr defaults datacenter
router bgp %d
 bgp router-id %s
 no bgp ebgp-requires-policy
 no bgp network import-check
 bgp graceful-restart
 bgp graceful-restart preserve-fw-state
 bgp bestpath compare-routerid
%s address-family ipv4 unicast
  maximum-paths 1
  network %s/32
 exit-address-family
exit
`, asn, id, sessions.String(), s.behind))
}

// systemdBin returns a directory of the programs in which routerd runs as in its systemd unit, and systemctl says that the unit
// has a job of the type that say was last called with.
func systemdBin(t *testing.T) (dir string, say func(job string)) {
	t.Helper()
	dir = t.TempDir()
	bin, err := filepath.Abs(binDir(t))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"routerd-cni", "routerctl"} {
		if err := os.Symlink(filepath.Join(bin, p), filepath.Join(dir, p)); err != nil {
			t.Fatal(err)
		}
	}
	write("routerd", fmt.Sprintf("#!/bin/sh\nPATH=%s:$PATH ROUTERD_UNIT=routerd.service exec %s/routerd \"$@\"\n", dir, bin))
	write("systemctl", fmt.Sprintf("#!/bin/sh\ncat %s/jobs\n", dir))
	return dir, func(job string) { write("jobs", "17 routerd.service "+job+" running\n") }
}

// TestDrain has two hosts serve one address, as load balancers do, behind two switches, BIRD and FRR, at 1,000 packets a second. All of it goes to the
// host that is then drained and stopped; back in service, restarted, which the switches do not notice; and stopped for good, which is a drain
// too. No packet is lost.
func TestDrain(t *testing.T) {
	beside(t)
	bin, job := systemdBin(t)
	l := bringFrom(t, "drain", topology(2, 1, store.VXLANCrossSubnet), bin)
	const served = "203.0.113.7"
	hosts := l.Hosts()
	leaves, stays := hosts[0], hosts[1]
	bird, frr := newTor(t, l, leaves, "drb", "198.51.100.1"), newTor(t, l, leaves, "drf", "198.51.100.2")
	bird2, frr2 := bird.also(stays), frr.also(stays)
	bird.startDrainBIRD(64998, "10.255.0.1", bird.port, bird2.port)
	frr.startDrainFRR(64997, "10.255.0.2", frr.port, frr2.port)
	for s, asn := range map[*tor]int{bird: 64998, bird2: 64998, frr: 64997, frr2: 64997} {
		s.peer(asn)
		s.waitUp()
	}
	for _, h := range hosts {
		output(t, l, h, "nft", fmt.Sprintf("add table ip balancer { chain in { type nat hook prerouting priority dstnat; ip daddr %s dnat to %s; }; }", served, addr(t, l, h+"/pod1")))
	}
	serve := func(host string) {
		t.Helper()
		routerctl(t, l, host, "", "bgp", "inject", "add", served+"/32", "--owner", "lb", "--ttl", "1h")
	}
	serve(leaves)
	serve(stays)
	goesTo := func(ways ...*tor) {
		t.Helper()
		for _, s := range ways {
			poll(t, "the way of "+s.name+" by "+s.port, func() string {
				if out := s.ip(s.space, "-4 route show "+served); !strings.Contains(out, "dev "+s.port+" ") || strings.Count(out, "dev ") != 1 {
					return out
				}
				return ""
			})
		}
	}
	goesTo(bird, frr)
	var flows []*traffic.Flow
	for _, s := range []*tor{bird, frr} {
		poll(t, "an answer behind "+s.name, func() string {
			if r, err := traffic.Ping(within(t, 2*time.Second), s.space, netip.MustParseAddr(served), traffic.Options{}); err != nil || !r.OK {
				return fmt.Sprint(r, err)
			}
			return ""
		})
		f, err := traffic.StartFlow(t.Context(), s.space, netip.MustParseAddr(served), pingRate(), traffic.Options{})
		if err != nil {
			t.Fatal(err)
		}
		flows = append(flows, f)
	}
	stop := stopFlows(t, flows)
	waitFlows(t, flows, 200*time.Millisecond)

	if out := routerctl(t, l, leaves, "", "--timeout", "2m", "node", "drain", "--wait", "--quiet", "2s"); !strings.Contains(out, "advertises no routes") {
		t.Errorf("drain says\n%s", out)
	}
	goesTo(bird2, frr2)
	end := func(as string) (took time.Duration) {
		t.Helper()
		job(as)
		from := time.Now()
		if err := l.Kill(within(t, 2*time.Minute), leaves, unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		return time.Since(from)
	}
	again := func() {
		t.Helper()
		if err := l.Restart(await.Context(t), leaves); err != nil {
			t.Fatal(err)
		}
		bird.waitUp()
		frr.waitUp()
		waitFlows(t, flows, 200*time.Millisecond)
	}
	end("stop")
	waitFlows(t, flows, 200*time.Millisecond)
	again()
	goesTo(bird2, frr2)
	routerctl(t, l, leaves, "", "node", "undrain")
	goesTo(bird, frr)
	waitFlows(t, flows, 200*time.Millisecond)

	watches := []*recorder{watchTor(t, bird), watchTor(t, frr)}
	end("restart")
	again()
	for i, w := range watches {
		if moved := w.stop(t, served); len(moved) > 0 {
			t.Errorf("a restart moved the way of switch %d: %s", i, moved)
		}
	}
	goesTo(bird, frr)

	took := end("stop")
	goesTo(bird2, frr2)
	waitFlows(t, flows, 200*time.Millisecond)
	if log := daemonLog(t, l, leaves); !strings.Contains(log, "stopped for good: peers are asked to prefer other ways") || strings.Contains(log, "workloads are still sent packets") {
		t.Errorf("the stop for good took %s and the log says\n%s", took, log)
	}
	// What a drain by the stop has done ends with the next start.
	again()
	goesTo(bird, frr)
	stop()
}

// daemonLog returns what a host's daemon has logged.
func daemonLog(t *testing.T, l *lab.Lab, host string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(filepath.Dir(lab.Socket(l.Name(), host)), "routerd.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
