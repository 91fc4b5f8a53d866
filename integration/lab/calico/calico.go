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

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/guides"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/ns"
)

// Network is the name of the CNI network.
const Network = "k8s-pod-network"

// The two pools of each family, the first of which is not encapsulated and the second in a tunnel.
const (
	PlainPool   = "192.168.0.0/17"
	TunnelPool  = "192.168.128.0/17"
	PlainPool6  = "fd00:10:244::/49"
	TunnelPool6 = "fd00:10:244:8000::/49"
)

// Cluster is hosts of Calico's. Each has a pod of either pool.
type Cluster struct {
	*lab.Lab
	Hosts []Host
	// UID returns a pod's in Kubernetes.
	UID func(Pod) string
	// IPIP has IPv4's tunnel be IPIP and not VXLAN.
	IPIP bool

	t     *testing.T
	birds map[string]*exec.Cmd
}

// Host is one of its hosts, number I.
type Host struct {
	I    int
	Name string
	Net       // of IPv4
	Six  *Net // of IPv6, where the network between the hosts has it
}

// Net is what a host has in one of IP's families.
type Net struct {
	Family        dataplane.Family
	Addr          netip.Addr
	Plain, Tunnel netip.Prefix // its blocks
	VTEP          netip.Addr   // of its tunnel's device
	MAC           string       // of vxlan.calico, or vxlan-v6.calico
}

// Nets are those of the families that a host has.
func (h Host) Nets() []Net {
	if h.Six == nil {
		return []Net{h.Net}
	}
	return []Net{h.Net, *h.Six}
}

// in is a host's of a family.
func (h Host) in(f dataplane.Family) Net {
	if f == dataplane.IPv6 {
		return *h.Six
	}
	return h.Net
}

// ip is ip(8) with a family.
func (n Net) ip(args string) []string {
	return append([]string{"ip", map[dataplane.Family]string{dataplane.IPv4: "-4", dataplane.IPv6: "-6"}[n.Family]}, strings.Fields(args)...)
}

// host is an address alone, with its length.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Pod is a pod of a host. The first one is of the pool that is not encapsulated.
type Pod struct {
	Host   Host
	N      int
	Name   string
	ID     string // of its container
	Addr   netip.Addr
	Addr6  netip.Addr // where the hosts have IPv6
	Device string
	MAC    string
}

// Addrs are the pod's addresses, IPv4's first.
func (p Pod) Addrs() []netip.Addr {
	if !p.Addr6.IsValid() {
		return []netip.Addr{p.Addr}
	}
	return []netip.Addr{p.Addr, p.Addr6}
}

// New returns the hosts of a lab, on which [Cluster.Up] makes what Calico makes. They have a mesh of BGP and
// no daemon.
func New(t *testing.T, l *lab.Lab) *Cluster {
	t.Helper()
	c := &Cluster{Lab: l, t: t, birds: map[string]*exec.Cmd{}, UID: func(p Pod) string { return "uid-" + p.ID[50:] }}
	for i, name := range l.Hosts() {
		addrs, err := l.Addrs(name)
		if err != nil {
			t.Fatal(err)
		}
		h := Host{I: i, Name: name}
		for _, a := range addrs {
			n := Net{Family: dataplane.FamilyOf(a), Addr: a}
			// As Felix derives it: 66, and the first bytes of the name's SHA-1.
			named := name
			block := func(pool string) netip.Prefix {
				first := netip.MustParsePrefix(pool).Addr().AsSlice()
				first[len(first)-2] += byte(i + 1)
				addr, _ := netip.AddrFromSlice(first)
				return netip.PrefixFrom(addr, addr.BitLen()-6)
			}
			if n.Family == dataplane.IPv6 {
				named += "-v6"
				n.Plain, n.Tunnel = block(PlainPool6), block(TunnelPool6)
			} else {
				n.Plain, n.Tunnel = block(PlainPool), block(TunnelPool)
			}
			sum := sha1.Sum([]byte(named)) //nolint:gosec // see the import
			n.MAC, n.VTEP = net.HardwareAddr(append([]byte{0x66}, sum[:5]...)).String(), n.Tunnel.Addr()
			if n.Family == dataplane.IPv6 {
				h.Six = &n
			} else {
				h.Net = n
			}
		}
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
	for _, other := range c.others(h) {
		for _, o := range other.Nets() {
			await.Until(c.t, "BIRD's route on "+h.Name, func() error {
				if out := c.output(h.Name, o.ip("route show "+o.Plain.String()+" proto bird")...); !strings.Contains(out, "via "+o.Addr.String()) {
					return fmt.Errorf("not there: %s", out)
				}
				return nil
			})
		}
	}
}

// Pods are those of a host.
func (h Host) Pods() []Pod {
	var out []Pod
	for n, block := range []netip.Prefix{h.Plain, h.Tunnel} {
		// Of a namespace each name is one pod's: those of all hosts are in one.
		p := Pod{Host: h, N: n, Name: fmt.Sprintf("pod%d", n+1), Addr: block.Addr().Next()}
		if h.Six != nil {
			p.Addr6 = p.Block(*h.Six).Addr().Next()
		}
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

// in is the pod's address of a family.
func (p Pod) in(f dataplane.Family) netip.Addr {
	if f == dataplane.IPv6 {
		return p.Addr6
	}
	return p.Addr
}

// Where is the pod's place in the lab.
func (p Pod) Where() string { return p.Host.Name + "/" + p.Name }

// Block is what the pod's address of a family is of, by what its host has in that.
func (p Pod) Block(of Net) netip.Prefix { return []netip.Prefix{of.Plain, of.Tunnel}[p.N] }

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
	for _, n := range h.Nets() {
		device := c.device(n)
		if c.ipip(n) {
			c.Batch(h.Name, fmt.Sprintf("link set tunl0 mtu 1480 up\naddr add %s dev tunl0\n", host(n.VTEP)))
			continue
		}
		var b strings.Builder
		if n.Family == dataplane.IPv6 {
			c.Sysctl(h.Name, map[string]string{"net/ipv6/conf/all/forwarding": "1"})
		}
		fmt.Fprintf(&b, "link add %s address %s mtu %d type vxlan id 4096 dstport 4789 nolearning local %s dev eth0\naddr add %s dev %[1]s\nlink set %[1]s up\n", device, n.MAC, mtu(n), n.Addr, host(n.VTEP))
		c.Batch(h.Name, b.String())
		for _, other := range c.others(h) {
			o := other.in(n.Family)
			c.output(h.Name, "bridge", "fdb", "add", o.MAC, "dev", device, "dst", o.Addr.String(), "self", "permanent")
		}
	}
	c.routes(h)
	// What Felix leaves in the packet filter goes on judging packets.
	rules := "*filter\n:cali-FORWARD - [0:0]\n-A FORWARD -m comment --comment \"cali:wUHhoiAYhphO9Mso\" -j cali-FORWARD\n-A cali-FORWARD -j ACCEPT\nCOMMIT\n"
	for _, n := range h.Nets() {
		restore := map[dataplane.Family]string{dataplane.IPv4: "iptables-restore", dataplane.IPv6: "ip6tables-restore"}[n.Family]
		if _, err := c.Run(await.Context(c.t), h.Name, lab.Streams{In: strings.NewReader(rules)}, "env", "XTABLES_LOCKFILE=/dev/null", restore, "--noflush"); err != nil {
			c.t.Fatal(err)
		}
	}
	for _, p := range h.Pods() {
		c.attach(p)
	}
}

// ipip reports whether a family's tunnel is IPIP.
func (c *Cluster) ipip(n Net) bool { return c.IPIP && n.Family == dataplane.IPv4 }

// device is that of a family's tunnel.
func (c *Cluster) device(n Net) string {
	switch {
	case c.ipip(n):
		return "tunl0"
	case n.Family == dataplane.IPv6:
		return "vxlan-v6.calico"
	}
	return "vxlan.calico"
}

// mtu is the lowest of the devices that carry what the pod sends.
func (p Pod) mtu() int {
	nets := p.Host.Nets()
	return mtu(nets[len(nets)-1])
}

// mtu is that of a family's VXLAN device.
func mtu(n Net) int {
	if n.Family == dataplane.IPv6 {
		return 1430
	}
	return 1450
}

// routes makes Felix's routes to blocks, and the neighbours that those of VXLAN lead to.
func (c *Cluster) routes(h Host) {
	c.t.Helper()
	for _, n := range h.Nets() {
		var b strings.Builder
		fmt.Fprintf(&b, "route add blackhole %s proto 80\n", n.Tunnel)
		for _, other := range c.others(h) {
			o := other.in(n.Family)
			if c.ipip(n) {
				fmt.Fprintf(&b, "route add %s via %s dev tunl0 proto 80 onlink\n", o.Tunnel, o.Addr)
				continue
			}
			fmt.Fprintf(&b, "neigh replace %s lladdr %s dev %s nud permanent\nroute add %s via %[1]s dev %[3]s onlink\n", o.VTEP, o.MAC, c.device(n), o.Tunnel)
		}
		c.Batch(h.Name, b.String())
	}
}

// routes are the commands that make a pod's routes: the metric of IPv4's is zero up to Calico v3.33,
// 1024 since; that of IPv6's is 1024 in any case, which is the kernel's default.
func (p Pod) routes() string {
	metric := ""
	if p.N == 1 {
		metric = "metric 1024"
	}
	commands := fmt.Sprintf("route replace %s dev %s scope link %s\n", p.Addr, p.Device, metric)
	if p.Addr6.IsValid() {
		commands += fmt.Sprintf("route replace %s dev %s\n", p.Addr6, p.Device)
	}
	return commands
}

// attach makes a pod as Calico's CNI plugin does, and Felix after it.
func (c *Cluster) attach(p Pod) {
	c.t.Helper()
	if err := c.AddPod(lab.Pod{Host: p.Host.Name, Name: p.Name, Namespace: "default", UID: c.UID(p), ContainerID: p.ID, Addrs: p.Addrs(), MTU: p.mtu()}); err != nil {
		c.t.Fatal(err)
	}
	if err := ns.Create(c.Space(p.Where())); err != nil {
		c.t.Fatal(err)
	}
	c.Batch(p.Host.Name, fmt.Sprintf("link add %s mtu %d address ee:ee:ee:ee:ee:ee type veth peer name eth0 mtu %[2]d address %s netns %s\n", p.Device, p.mtu(), p.MAC, c.Space(p.Where())))
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
	if p.Addr6.IsValid() {
		// The gateway is what the host's end has by its address of Ethernet.
		c.Batch(p.Where(), fmt.Sprintf("addr add %s/128 dev eth0 nodad\nroute add fe80::ecee:eeff:feee:eeee dev eth0\nroute add default via fe80::ecee:eeff:feee:eeee dev eth0\n", p.Addr6))
		c.Sysctl(p.Host.Name, map[string]string{"net/ipv6/conf/" + p.Device + "/proxy_ndp": "1", "net/ipv6/conf/" + p.Device + "/forwarding": "1"})
	}
	c.Batch(p.Host.Name, fmt.Sprintf("link set %[1]s up\n%[4]sneigh add %[2]s lladdr %[3]s dev %[1]s nud permanent\n", p.Device, p.Addr, p.MAC, p.routes()))
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
	fmt.Fprintf(&b, `router id %s;
log stderr all;
debug protocols { states };
protocol device { scan time 2; }
protocol direct { ipv4; ipv6; interface -"cali*", "*"; }
`, h.Addr)
	for _, n := range h.Nets() {
		pool, tunnels := "192.168.0.0/16", TunnelPool
		if n.Family == dataplane.IPv6 {
			pool, tunnels = "fd00:10:244::/48", TunnelPool6
		}
		family := strings.ToLower(n.Family.String())
		fmt.Fprintf(&b, `
filter calico_export_to_bgp_peers_%[5]s {
	if defined(ifname) && ifname ~ "*.calico" then reject;
	if net = %[2]s || net = %[3]s then accept;
	if net ~ %[2]s || net ~ %[3]s then reject;
	if net ~ %[6]s then accept;
	reject;
}
filter calico_kernel_programming_%[5]s {
	if net ~ %[4]s then reject; # the routes of a pool in a tunnel are Felix's
	accept;
}
protocol static { %[5]s; route %[2]s blackhole; route %[3]s blackhole; }
protocol kernel { learn; persist; scan time 2; metric %[7]d; graceful restart; %[5]s { import all; export filter calico_kernel_programming_%[5]s; }; }
template bgp bgp_template_%[5]s {
	local as 64512;
	multihop;
	source address %[1]s;
	connect delay time 1;
	connect retry time 1;
	error wait time 1,2;
	graceful restart;
	%[5]s { gateway recursive; import all; export filter calico_export_to_bgp_peers_%[5]s; add paths on; };
}
`, n.Addr, n.Plain, n.Tunnel, tunnels, family, pool, map[dataplane.Family]int{dataplane.IPv6: 1024}[n.Family])
		for _, other := range c.others(h) {
			o, passive := other.in(n.Family), ""
			if o.Addr.String() > n.Addr.String() {
				passive = " passive on;"
			}
			fmt.Fprintf(&b, "protocol bgp Mesh_%s from bgp_template_%s { neighbor %s as 64512;%s }\n", strings.NewReplacer(".", "_", ":", "_").Replace(o.Addr.String()), family, o.Addr, passive)
		}
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
	for _, n := range h.Nets() {
		want := []string{"blackhole " + n.Plain.String(), "blackhole " + n.Tunnel.String()}
		for _, p := range h.Pods() {
			want = append(want, p.in(n.Family).String()+" dev "+p.Device)
		}
		for _, other := range c.others(h) {
			o := other.in(n.Family)
			want = append(want, o.Plain.String()+" nhid", o.Tunnel.String()+" nhid")
		}
		await.Until(c.t, fmt.Sprintf("%s routes of %s", n.Family, h.Name), func() error {
			out := c.output(h.Name, n.ip("route show proto 77")...)
			for _, w := range want {
				if !strings.Contains(out, w) {
					return fmt.Errorf("%s is not routerd's:\n%s", w, c.output(h.Name, n.ip("route")...))
				}
			}
			return nil
		})
	}
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
		if len(r.GetPeers()) != (len(c.Hosts)-1)*len(h.Nets()) {
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
	for _, n := range h.Nets() {
		if out := c.output(h.Name, n.ip("route")...); strings.Contains(out, "proto 80") || strings.Contains(out, "proto bird") || n.Family == dataplane.IPv4 && strings.Contains(out, "1024") {
			c.t.Errorf("routes of Calico's are left on %s:\n%s", h.Name, out)
		}
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
		c.Batch(h.Name, p.routes())
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
