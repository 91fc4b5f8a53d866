// Package calico makes by hand what Calico's CNI plugin, Felix and BIRD leave in the kernels of a lab's
// hosts, with its names, protocol numbers and bytes, and runs a BIRD on each host with the sessions and the
// kernel routes that Calico configures. It moves such hosts to routerd and back as the guide says. What
// Calico has in its datastore a test writes itself.
package calico

import (
	"context"
	"crypto/sha1" //nolint:gosec // names must match those that Calico gives, not keep a secret
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/guides"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/ns"
)

// Network is the name of the CNI network.
const Network = "k8s-pod-network"

// The two pools, the first of which is not encapsulated and the second in VXLAN.
const (
	PlainPool  = "192.168.0.0/17"
	TunnelPool = "192.168.128.0/17"
)

// Cluster is hosts of Calico's. Each has a pod of either pool.
type Cluster struct {
	*lab.Lab
	Hosts []Host
	// UID returns a pod's in Kubernetes.
	UID func(Pod) string

	t     *testing.T
	birds map[string]*exec.Cmd
}

// Host is one of its hosts, number I.
type Host struct {
	I             int
	Name          string
	Addr          netip.Addr
	Plain, Tunnel netip.Prefix // its blocks
	VTEP          netip.Addr
	MAC           string // of vxlan.calico
}

// Pod is a pod of a host. The first one is of the pool that is not encapsulated.
type Pod struct {
	Host   Host
	N      int
	Name   string
	ID     string // of its container
	Addr   netip.Addr
	Device string
	MAC    string
}

// New returns the hosts of a lab, on which [Cluster.Up] makes what Calico makes. They have a mesh of BGP and
// no daemon.
func New(t *testing.T, l *lab.Lab) *Cluster {
	t.Helper()
	c := &Cluster{Lab: l, t: t, birds: map[string]*exec.Cmd{}, UID: func(p Pod) string { return "uid-" + p.ID[50:] }}
	for i, name := range l.Hosts() {
		// As Felix derives it: 66, and the first bytes of the name's SHA-1.
		sum := sha1.Sum([]byte(name)) //nolint:gosec // see the import
		addr, err := l.Addr(name)
		if err != nil {
			t.Fatal(err)
		}
		h := Host{I: i, Name: name, Addr: addr, MAC: net.HardwareAddr(append([]byte{0x66}, sum[:5]...)).String()}
		h.Plain = netip.MustParsePrefix(fmt.Sprintf("192.168.%d.0/26", i+1))
		h.Tunnel = netip.MustParsePrefix(fmt.Sprintf("192.168.%d.0/26", i+129))
		h.VTEP = h.Tunnel.Addr()
		c.Hosts = append(c.Hosts, h)
	}
	return c
}

// Up makes all that Calico makes on the hosts, and returns when they know of each other.
func (c *Cluster) Up() {
	c.t.Helper()
	for _, h := range c.Hosts {
		c.wire(h)
		c.startBIRD(h)
	}
	for _, h := range c.Hosts {
		c.birdRoutes(h)
	}
}

// birdRoutes waits for the routes that a host's BIRD learns.
func (c *Cluster) birdRoutes(h Host) {
	c.t.Helper()
	for _, o := range c.others(h) {
		await.Until(c.t, "BIRD's route on "+h.Name, func() error {
			if out := c.output(h.Name, "ip", "route", "show", o.Plain.String(), "proto", "bird"); !strings.Contains(out, "via "+o.Addr.String()) {
				return fmt.Errorf("not there: %s", out)
			}
			return nil
		})
	}
}

// Pods are those of a host.
func (h Host) Pods() []Pod {
	var out []Pod
	for n, block := range []netip.Prefix{h.Plain, h.Tunnel} {
		// Of a namespace each name is one pod's: those of all hosts are in one.
		p := Pod{Host: h, N: n, Name: fmt.Sprintf("pod%d", n+1), Addr: block.Addr().Next()}
		if h.I > 0 {
			p.Name = fmt.Sprintf("pod%d-%d", n+1, h.I+1)
		}
		sum := sha1.Sum([]byte("default." + p.Name)) //nolint:gosec // see the import
		p.Device = "cali" + hex.EncodeToString(sum[:])[:11]
		p.ID = fmt.Sprintf("%062x%d%d", 0xca11c0, h.I, n)
		p.MAC = fmt.Sprintf("fe:00:00:00:%02x:%02x", h.I+1, n+1)
		out = append(out, p)
	}
	return out
}

// Where is the pod's place in the lab.
func (p Pod) Where() string { return p.Host.Name + "/" + p.Name }

// Block is what the pod's address is of.
func (p Pod) Block() netip.Prefix { return []netip.Prefix{p.Host.Plain, p.Host.Tunnel}[p.N] }

// Endpoint is the name of the pod's endpoint.
func (p Pod) Endpoint() string {
	escaped := func(s string) string { return strings.ReplaceAll(s, "-", "--") }
	return escaped(p.Host.Name) + "-k8s-" + escaped(p.Name) + "-eth0"
}

// Pairs are pods of two hosts that are to reach each other.
func (c *Cluster) Pairs() [][2]string {
	a, b := c.Hosts[0].Pods(), c.Hosts[1].Pods()
	return [][2]string{{a[0].Where(), b[0].Where()}, {a[1].Where(), b[1].Where()}, {a[0].Where(), b[1].Where()}}
}

func (c *Cluster) others(h Host) (out []Host) {
	for _, o := range c.Hosts {
		if o.Name != h.Name {
			out = append(out, o)
		}
	}
	return out
}

func (c *Cluster) output(where string, args ...string) string {
	c.t.Helper()
	out, err := c.Output(await.Context(c.t), where, args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// Batch runs ip(8) on a place, a command a line.
func (c *Cluster) Batch(where, commands string) {
	c.t.Helper()
	var errs strings.Builder
	code, err := c.Run(await.Context(c.t), where, lab.Streams{In: strings.NewReader(commands), Err: &errs}, "ip", "-batch", "-")
	if err != nil || code != 0 {
		c.t.Fatalf("ip on %s: exit code %d, %v: %s", where, code, err, errs.String())
	}
}

// wire makes what Felix and the CNI plugin make in a host's kernel, and its pods.
func (c *Cluster) wire(h Host) {
	c.t.Helper()
	c.Sysctl(h.Name, map[string]string{"net/ipv4/ip_forward": "1"})
	var b strings.Builder
	fmt.Fprintf(&b, `link add vxlan.calico address %s mtu 1450 type vxlan id 4096 dstport 4789 nolearning local %s dev eth0
addr add %s/32 dev vxlan.calico
link set vxlan.calico up
`, h.MAC, h.Addr, h.VTEP)
	for _, o := range c.others(h) {
		fmt.Fprintf(&b, "neigh add %s lladdr %s dev vxlan.calico nud permanent\n", o.VTEP, o.MAC)
	}
	c.Batch(h.Name, b.String())
	c.routes(h)
	for _, o := range c.others(h) {
		c.output(h.Name, "bridge", "fdb", "add", o.MAC, "dev", "vxlan.calico", "dst", o.Addr.String(), "self", "permanent")
	}
	// What Felix leaves in the packet filter goes on judging packets.
	rules := "*filter\n:cali-FORWARD - [0:0]\n-A FORWARD -m comment --comment \"cali:wUHhoiAYhphO9Mso\" -j cali-FORWARD\n-A cali-FORWARD -j ACCEPT\nCOMMIT\n"
	if _, err := c.Run(await.Context(c.t), h.Name, lab.Streams{In: strings.NewReader(rules)}, "env", "XTABLES_LOCKFILE=/dev/null", "iptables-restore", "--noflush"); err != nil {
		c.t.Fatal(err)
	}
	for _, p := range h.Pods() {
		c.attach(p)
	}
}

// routes makes Felix's routes to blocks.
func (c *Cluster) routes(h Host) {
	c.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "route add blackhole %s proto 80\n", h.Tunnel)
	for _, o := range c.others(h) {
		fmt.Fprintf(&b, "route add %s via %s dev vxlan.calico onlink\n", o.Tunnel, o.VTEP)
	}
	c.Batch(h.Name, b.String())
}

// route is the command that makes a pod's route: its metric is zero up to Calico v3.33,
// 1024 since.
func (p Pod) route() string {
	metric := ""
	if p.N == 1 {
		metric = "metric 1024"
	}
	return fmt.Sprintf("route replace %s dev %s scope link %s\n", p.Addr, p.Device, metric)
}

// attach makes a pod as Calico's CNI plugin does, and Felix after it.
func (c *Cluster) attach(p Pod) {
	c.t.Helper()
	if err := c.AddPod(lab.Pod{Host: p.Host.Name, Name: p.Name, Namespace: "default", UID: c.UID(p), ContainerID: p.ID, Addrs: []netip.Addr{p.Addr}, MTU: 1450}); err != nil {
		c.t.Fatal(err)
	}
	if err := ns.Create(c.Space(p.Where())); err != nil {
		c.t.Fatal(err)
	}
	c.Batch(p.Host.Name, fmt.Sprintf("link add %s mtu 1450 address ee:ee:ee:ee:ee:ee type veth peer name eth0 mtu 1450 address %s netns %s\n", p.Device, p.MAC, c.Space(p.Where())))
	c.Batch(p.Where(), fmt.Sprintf(`link set lo up
link set eth0 up
addr add %s/32 dev eth0
route add 169.254.1.1 dev eth0 scope link
route add default via 169.254.1.1
`, p.Addr))
	c.Sysctl(p.Host.Name, map[string]string{
		"net/ipv4/conf/" + p.Device + "/proxy_arp": "1", "net/ipv4/conf/" + p.Device + "/forwarding": "1", "net/ipv4/conf/" + p.Device + "/route_localnet": "1",
		"net/ipv4/neigh/" + p.Device + "/proxy_delay": "0",
	})
	c.Batch(p.Host.Name, fmt.Sprintf("link set %[1]s up\n%[4]sneigh add %[2]s lladdr %[3]s dev %[1]s nud permanent\n", p.Device, p.Addr, p.MAC, p.route()))
}

// Sysctl sets values on a host.
func (c *Cluster) Sysctl(host string, values map[string]string) {
	c.t.Helper()
	for key, value := range values {
		if err := ns.Do(c.Space(host), func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) }); err != nil {
			c.t.Fatal(err)
		}
	}
}

// Run starts a program on a place until the test ends, which shows its log if it fails.
func Run(t *testing.T, l *lab.Lab, where, log string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	out, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if err := ns.Start(l.Space(where), cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = out.Close()
		if t.Failed() {
			b, _ := os.ReadFile(log)
			t.Logf("%s on %s says:\n%s", filepath.Base(args[0]), where, b)
		}
	})
	return cmd
}

// startBIRD starts a host's BIRD with what Calico's confd renders for a mesh, but for the
// waits between attempts, which are shorter. The kernel's metric is BIRD 1.6's.
func (c *Cluster) startBIRD(h Host) {
	c.t.Helper()
	dir := c.t.TempDir()
	var b strings.Builder
	fmt.Fprintf(&b, `router id %[1]s;
log stderr all;
debug protocols { states };
filter calico_export_to_bgp_peers {
	if defined(ifname) && ifname ~ "*.calico" then reject;
	if net = %[2]s || net = %[3]s then accept;
	if net ~ %[2]s || net ~ %[3]s then reject;
	if net ~ 192.168.0.0/16 then accept;
	reject;
}
filter calico_kernel_programming {
	if net ~ %[4]s then reject; # a VXLAN pool is Felix's
	accept;
}
protocol static { ipv4; route %[2]s blackhole; route %[3]s blackhole; }
protocol direct { ipv4; interface -"cali*", "*"; }
protocol kernel { learn; persist; scan time 2; metric 0; graceful restart; ipv4 { import all; export filter calico_kernel_programming; }; }
protocol device { scan time 2; }
template bgp bgp_template {
	local as 64512;
	multihop;
	source address %[1]s;
	connect delay time 1;
	connect retry time 1;
	error wait time 1,2;
	graceful restart;
	ipv4 { gateway recursive; import all; export filter calico_export_to_bgp_peers; add paths on; };
}
`, h.Addr, h.Plain, h.Tunnel, TunnelPool)
	for _, o := range c.others(h) {
		passive := ""
		if o.Addr.String() > h.Addr.String() {
			passive = " passive on;"
		}
		fmt.Fprintf(&b, "protocol bgp Mesh_%s from bgp_template { neighbor %s as 64512;%s }\n", strings.ReplaceAll(o.Addr.String(), ".", "_"), o.Addr, passive)
	}
	conf := filepath.Join(dir, "bird.cfg")
	if err := os.WriteFile(conf, []byte(b.String()), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.birds[h.Name] = Run(c.t, c.Lab, h.Name, filepath.Join(dir, "log"), "bird", "-R", "-f", "-c", conf, "-s", filepath.Join(dir, "bird.ctl"))
}

// stop ends what of Calico runs on a host as the end of its container does: at once.
func (c *Cluster) stop(h Host) {
	c.t.Helper()
	bird := c.birds[h.Name]
	if err := bird.Process.Kill(); err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	done := make(chan struct{})
	go func() { defer close(done); _ = bird.Wait() }()
	select {
	case <-done:
	case <-ctx.Done():
		c.t.Fatal("BIRD does not end")
	}
}

// TakeOver ends Calico on a host and starts routerd in its place, and returns when its routes are routerd's
// and its sessions are up. Devices are to be the same.
func (c *Cluster) TakeOver(h Host) {
	c.t.Helper()
	before := c.devices(h)
	c.stop(h)
	if err := c.Restart(await.Context(c.t), h.Name); err != nil {
		c.t.Fatal(err)
	}
	want := []string{"blackhole " + h.Plain.String(), "blackhole " + h.Tunnel.String()}
	for _, p := range h.Pods() {
		want = append(want, p.Addr.String()+" dev "+p.Device)
	}
	for _, o := range c.others(h) {
		want = append(want, o.Plain.String()+" nhid", o.Tunnel.String()+" nhid")
	}
	await.Until(c.t, "routes of "+h.Name, func() error {
		out := c.output(h.Name, "ip", "route", "show", "proto", "77")
		for _, w := range want {
			if !strings.Contains(out, w) {
				return fmt.Errorf("%s is not routerd's:\n%s", w, c.output(h.Name, "ip", "route"))
			}
		}
		return nil
	})
	if after := c.devices(h); after != before {
		c.t.Errorf("devices of %s were made anew:\n%s\nbefore:\n%s", h.Name, after, before)
	}
	await.Until(c.t, "sessions of "+h.Name, func() error {
		r, err := c.Node(await.Context(c.t), h.Name)
		if err != nil {
			return err
		}
		for _, p := range r.GetPeers() {
			if p.GetState() != "up" {
				return fmt.Errorf("%v", p)
			}
		}
		if len(r.GetPeers()) != len(c.Hosts)-1 {
			return fmt.Errorf("%v", r.GetPeers())
		}
		return nil
	})
}

// guide runs a block of commands of docs/guides/from-calico.md on a host, as it stands there. Nobody confirms what routerd
// cleanup asks, and there is no systemd: what it does there the test has done.
func (c *Cluster) guide(h Host, begin string) {
	c.t.Helper()
	bin, err := filepath.Abs(bring.BinDir())
	if err != nil {
		c.t.Fatal(err)
	}
	config := filepath.Join(filepath.Dir(lab.Socket(c.Name(), h.Name)), "routerd.yaml")
	c.output(h.Name, "env", "XTABLES_LOCKFILE=/dev/null", "bash", "-ec", `
routerd() { "`+bin+`/routerd" "$@" --yes --config "`+config+`"; }
systemctl() { :; }
`+guides.Commands(c.t, "guides/from-calico.md", begin))
}

// CleanUp removes by the guide what Calico left on a host and routerd did not take over.
func (c *Cluster) CleanUp(h Host) {
	c.t.Helper()
	c.guide(h, "routerd cleanup --calico")
	if out := c.output(h.Name, "ip", "route"); strings.Contains(out, "proto 80") || strings.Contains(out, "proto bird") || strings.Contains(out, "1024") {
		c.t.Errorf("routes of Calico's are left on %s:\n%s", h.Name, out)
	}
}

// GoBack has Calico serve a host again, by the guide.
func (c *Cluster) GoBack(h Host) {
	c.t.Helper()
	if err := c.Kill(await.Context(c.t), h.Name, unix.SIGTERM); err != nil {
		c.t.Fatal(err)
	}
	c.guide(h, "ip route show proto 77")
	c.routes(h)
	for _, p := range h.Pods() {
		c.Batch(h.Name, p.route())
	}
	c.startBIRD(h)
	c.birdRoutes(h)
	c.guide(h, "systemctl enable --now calico-felix")
}

// devices are the names and numbers of a host's devices.
func (c *Cluster) devices(h Host) string {
	c.t.Helper()
	var out []string
	for line := range strings.Lines(c.output(h.Name, "ip", "-o", "link")) {
		if f := strings.Fields(line); len(f) > 1 {
			out = append(out, f[0]+" "+f[1])
		}
	}
	return strings.Join(out, "\n")
}
