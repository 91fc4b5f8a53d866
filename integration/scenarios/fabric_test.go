package scenarios

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// tor is a top-of-rack switch, FRR or BIRD in a namespace: a link of its own
// leads to a host, and neither end of it has any address but the link-local
// ones. Behind it is one address.
type tor struct {
	t     *testing.T
	l     *lab.Lab
	name  string // of the BGPPeer too
	host  string
	port  string // the switch's device
	up    string // the host's device
	space string
	dir   string

	behind string // the address behind it
	procs  map[string]*exec.Cmd
}

// newTor makes a switch that has an address and plugs it into a host's device
// NAME-up.
func newTor(t *testing.T, l *lab.Lab, host, name, behind string) *tor {
	t.Helper()
	s := &tor{t: t, l: l, name: name, host: host, behind: behind, port: name + "-port", up: name + "-up", space: l.Space(name), dir: t.TempDir(), procs: map[string]*exec.Cmd{}}
	if err := ns.Create(s.space); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.remove)
	s.sysctl(s.space, "net/ipv4/ip_forward", "1")
	s.ip(s.space, "link set lo up")
	s.ip(s.space, "addr add "+behind+"/32 dev lo")
	s.plug()
	return s
}

// plug makes the link between the switch and its host.
func (s *tor) plug() {
	s.t.Helper()
	host := s.l.Space(s.host)
	s.ip(s.space, "link add "+s.port+" type veth peer name "+s.up+" netns "+host)
	for space, dev := range map[string]string{s.space: s.port, host: s.up} {
		s.sysctl(space, "net/ipv6/conf/"+dev+"/disable_ipv6", "0")
		s.sysctl(space, "net/ipv6/conf/"+dev+"/accept_dad", "0")
		s.sysctl(space, "net/ipv4/conf/"+dev+"/rp_filter", "0")
	}
	s.ip(s.space, "link set "+s.port+" up")
	s.ip(host, "link set "+s.up+" up")
}

func (s *tor) remove() {
	for name := range s.procs {
		s.kill(name)
	}
	if s.t.Failed() {
		for _, log := range []string{"bgpd", "zebra", "bird"} {
			if b, err := os.ReadFile(filepath.Join(s.dir, log+".out")); err == nil {
				s.t.Logf("%s's %s says:\n%s", s.name, log, b)
			}
		}
	}
	if err := ns.Delete(s.space); err != nil {
		s.t.Error(err)
	}
}

func (s *tor) ip(space, args string) string {
	s.t.Helper()
	out, err := exec.CommandContext(await.Context(s.t), "ip", append([]string{"-n", space}, strings.Fields(args)...)...).CombinedOutput()
	if err != nil {
		s.t.Fatalf("ip -n %s %s: %v: %s", space, args, err, out)
	}
	return string(out)
}

func (s *tor) sysctl(space, key, value string) {
	s.t.Helper()
	if err := ns.Do(space, func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) }); err != nil {
		s.t.Fatal(err)
	}
}

// start runs a program of the switch until it is killed.
func (s *tor) start(name, path string, args ...string) {
	s.t.Helper()
	out, err := os.OpenFile(filepath.Join(s.dir, name+".out"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, out, &syscall.SysProcAttr{Setsid: true}
	if err := ns.Start(s.space, cmd); err != nil {
		s.t.Fatalf("start %s (run `make deps`, which installs Debian's frr and bird2): %v", path, err)
	}
	s.procs[name] = cmd
}

// kill ends a program as a crash does.
func (s *tor) kill(name string) {
	_ = s.procs[name].Process.Kill()
	_ = s.procs[name].Wait() // it was killed
	delete(s.procs, name)
}

func (s *tor) file(name, text string) string {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// ownedBy gives the switch's directory to a user.
func (s *tor) ownedBy(name string) {
	s.t.Helper()
	u, err := user.Lookup(name)
	if err != nil {
		s.t.Fatal("FRR is needed: run `make deps`, which installs Debian's frr:", err)
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		s.t.Fatal(err)
	}
	// testing makes the directory above for root alone.
	if err := errors.Join(os.Chown(s.dir, uid, -1), os.Chmod(filepath.Dir(s.dir), 0o755)); err != nil {
		s.t.Fatal(err)
	}
}

// startFRR runs FRR as docs/guides/bgp.md has it.
func (s *tor) startFRR(asn int, id string) {
	s.t.Helper()
	s.startFRRWith(fmt.Sprintf(`frr defaults datacenter
router bgp %[1]d
 bgp router-id %[2]s
 no bgp ebgp-requires-policy
 no bgp network import-check
 bgp graceful-restart
 bgp graceful-restart preserve-fw-state
 neighbor %[3]s interface v6only remote-as external
 neighbor %[3]s timers connect 1
 address-family ipv4 unicast
  network %[4]s/32
  network 203.0.113.0/24
 exit-address-family
 address-family ipv6 unicast
  neighbor %[3]s activate
 exit-address-family
exit
`, asn, id, s.port, s.behind))
}

// startFRRWith runs FRR with a configuration of bgpd.
func (s *tor) startFRRWith(bgpd string) {
	s.t.Helper()
	s.file("bgpd.conf", bgpd)
	s.ownedBy("frr") // as whom zebra runs
	s.start("zebra", "/usr/lib/frr/zebra", "-f", s.file("zebra.conf", ""), "-i", filepath.Join(s.dir, "zebra.pid"),
		"-z", filepath.Join(s.dir, "zserv"), "--vty_socket", s.dir, "-P", "0", "--log", "stdout")
	poll(s.t, "zebra's socket", func() string {
		if _, err := os.Stat(filepath.Join(s.dir, "zserv")); err != nil {
			return err.Error()
		}
		return ""
	})
	s.startBGPd()
}

func (s *tor) startBGPd() {
	s.t.Helper()
	s.start("bgpd", "/usr/lib/frr/bgpd", "-f", filepath.Join(s.dir, "bgpd.conf"), "-i", filepath.Join(s.dir, "bgpd.pid"),
		"-z", filepath.Join(s.dir, "zserv"), "--vty_socket", s.dir, "-S", "-P", "0", "--log", "stdout")
}

// startBIRD runs BIRD as docs/guides/bgp.md has it.
func (s *tor) startBIRD(asn int, id string) {
	s.t.Helper()
	s.file("bird.conf", fmt.Sprintf(`router id %[2]s;
log stderr all;
protocol device {}
protocol kernel { ipv4 { export all; }; persist; graceful restart on; }
protocol kernel { ipv6 { export all; }; persist; graceful restart on; }
protocol static { ipv4; route %[4]s/32 blackhole; route 203.0.113.0/24 blackhole; }
protocol bgp nodes {
  debug { states };
  local as %[1]d;
  interface "%[3]s";
  neighbor range fe80::/10 external;
  dynamic name "node";
  graceful restart on;
  ipv4 { extended next hop on; import all; export where source = RTS_STATIC; };
  ipv6 { import all; export none; };
}
`, asn, id, s.port, s.behind))
	s.runBIRD()
}

// runBIRD starts BIRD; flags are further ones.
func (s *tor) runBIRD(flags ...string) {
	s.t.Helper()
	s.start("bird", "bird", append([]string{"-f", "-c", filepath.Join(s.dir, "bird.conf"), "-s", filepath.Join(s.dir, "bird.ctl"), "-P", filepath.Join(s.dir, "bird.pid")}, flags...)...)
}

// peer makes the host peer with whoever is on the link.
func (s *tor) peer(asn int) {
	s.t.Helper()
	routerctl(s.t, s.l, s.host, fmt.Sprintf(`apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: %s, annotations: {routerd.io/peerInterface: %s}}
spec: {node: %s, asNumber: %d}
`, s.name, s.up, s.host, asn), "apply", "-f", "-")
}

// waitPeer waits until the session with the switch is as it should be.
func (s *tor) waitPeer(what string, as func(*apiv1.BGPPeer) bool) {
	s.t.Helper()
	poll(s.t, s.name+" "+what, func() string {
		r, err := s.l.Node(await.Context(s.t), s.host)
		if err != nil {
			return err.Error()
		}
		for _, p := range r.GetPeers() {
			if p.GetName() == s.name && as(p) {
				return ""
			}
		}
		return fmt.Sprint(r.GetPeers())
	})
}

func (s *tor) waitUp() {
	s.t.Helper()
	s.waitPeer("up", func(p *apiv1.BGPPeer) bool { return p.GetState() == "up" })
}

// hostAddr returns the host's link-local address on the link.
func (s *tor) hostAddr() string {
	s.t.Helper()
	f := strings.Fields(s.ip(s.l.Space(s.host), "-6 -o addr show dev "+s.up+" scope link"))
	if len(f) < 4 {
		s.t.Fatalf("no address on %s: %q", s.up, f)
	}
	return strings.Split(f[3], "/")[0]
}

// answersPod waits until what is behind the switch answers the host's pod. A flow that
// begins while the pod's address is still translated stays translated, and the switch
// knows no way back to the host.
func (s *tor) answersPod() {
	s.t.Helper()
	poll(s.t, "the pod behind "+s.name, func() string {
		if r, err := traffic.Ping(within(s.t, 2*time.Second), s.l.Space(s.host+"/pod1"), netip.MustParseAddr(s.behind), traffic.Options{}); err != nil || !r.OK {
			return fmt.Sprint(r, err)
		}
		return ""
	})
}

// flow starts pings of a pod to what is behind the switch.
func (s *tor) flow() *traffic.Flow {
	s.t.Helper()
	f, err := traffic.StartFlow(s.t.Context(), s.l.Space(s.host+"/pod1"), netip.MustParseAddr(s.behind), pingRate(), traffic.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	return f
}

// waitDown waits until the host has seen the switch's speaker go.
func (s *tor) waitDown() {
	s.t.Helper()
	s.waitPeer("down", func(p *apiv1.BGPPeer) bool { return p.GetState() != "up" })
}

// waitRoutes waits until the host has a way to what both switches announce, by
// the devices named.
func waitRoutes(t *testing.T, l *lab.Lab, host string, devices ...string) {
	t.Helper()
	poll(t, fmt.Sprintf("a route by %v", devices), func() string {
		out := output(t, l, host, "ip", "route", "show", "203.0.113.0/24")
		if strings.Count(out, "via inet6 fe80::") != len(devices) {
			return out
		}
		for _, dev := range devices {
			if !strings.Contains(out, "dev "+dev) {
				return out
			}
		}
		return ""
	})
}

// TestFabric connects a host to two switches by links without addresses, as
// fabrics do: one runs FRR, the other BIRD, which says nothing until it is spoken
// to. IPv4 goes over both by one group of IPv6 next hops. Then, under traffic
// through each, routerd, bgpd and bird are killed and come back without any
// packet lost (RFC 4724). At last a link goes and comes.
func TestFabric(t *testing.T) {
	beside(t)
	l := bringUp(t, "fabric", topology(1, 1, store.VXLANCrossSubnet))
	const host = "node1"
	frr, bird := newTor(t, l, host, "frr", "198.51.100.1"), newTor(t, l, host, "bird", "198.51.100.2")
	frr.startFRR(64998, "10.255.0.1")
	bird.startBIRD(64997, "10.255.0.2")
	both := []*tor{frr, bird}
	frr.peer(64998)
	bird.peer(64997)
	frr.waitUp()
	bird.waitUp()
	status := routerctl(t, l, host, "", "node", "status")
	for _, s := range both {
		if !strings.Contains(status, "%"+s.up) || !strings.Contains(status, "fe80::") {
			t.Errorf("node status does not name the neighbour on %s:\n%s", s.up, status)
		}
	}
	waitRoutes(t, l, host, frr.up, bird.up)

	// The switches are to see the pod's own address, which BGP has told them of.
	routerctl(t, l, host, `apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: default-ipv4-ippool}
spec: {cidr: 192.168.0.0/16, blockSize: 26, ipipMode: Never, vxlanMode: CrossSubnet, natOutgoing: false, nodeSelector: all()}
`, "apply", "-f", "-")
	for _, s := range both {
		s.answersPod()
	}
	// FRR 8.4's zebra takes its routes away for some 50 ms at the end of bgpd's
	// restart, whatever the neighbour does. With a worse route beside them what is
	// counted is what the host forwards.
	frr.ip(frr.space, "route add 192.168.0.0/16 via inet6 "+frr.hostAddr()+" dev "+frr.port+" metric 4000")
	flows := []*traffic.Flow{frr.flow(), bird.flow()}
	stop := stopFlows(t, flows)
	waitFlows(t, flows, 200*time.Millisecond)
	var end []string
	for _, c := range []struct {
		who  string
		away func()
		back func()
	}{
		{"routerd", func() {
			if err := l.Kill(await.Context(t), host, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}, func() {
			if err := l.Restart(await.Context(t), host); err != nil {
				t.Fatal(err)
			}
		}},
		{"bgpd", func() { frr.kill("bgpd"); frr.waitDown() }, frr.startBGPd},
		{"bird", func() { bird.kill("bird"); bird.waitDown() }, func() { bird.runBIRD("-R") }},
	} {
		c.away()
		waitFlows(t, flows, 300*time.Millisecond)
		c.back()
		frr.waitUp()
		bird.waitUp()
		waitRoutes(t, l, host, frr.up, bird.up)
		waitFlows(t, flows, 500*time.Millisecond)
		for i, f := range flows {
			end = append(end, fmt.Sprintf("after %s, through %s: %s", c.who, both[i].name, f.Report()))
		}
	}
	stop()
	t.Log(strings.Join(end, "\n"))

	frr.ip(frr.space, "link set "+frr.port+" down")
	frr.waitPeer("without a link", func(p *apiv1.BGPPeer) bool { return strings.Contains(p.GetInfo(), "down or without carrier") })
	waitRoutes(t, l, host, bird.up)
	frr.ip(frr.space, "link set "+frr.port+" up")
	frr.waitUp()
	waitRoutes(t, l, host, frr.up, bird.up)
}
