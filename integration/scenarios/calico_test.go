package scenarios

import (
	"context"
	"crypto/sha1" //nolint:gosec // names must match those that Calico gives, not keep a secret
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

// calico is a cluster of Calico's, made by hand: what its CNI plugin, Felix and BIRD
// leave in the kernels of its hosts and in etcd, with its names, protocol numbers and
// bytes, and a BIRD on each host with the sessions and the kernel routes that Calico
// configures. It has a pool that is not encapsulated and one in VXLAN, and each host a
// pod of each.
type calico struct {
	*lab.Lab
	t     *testing.T
	hosts []calicoHost
	birds map[string]*exec.Cmd
}

// calicoHost is one of its hosts, number i.
type calicoHost struct {
	i             int
	name          string
	addr          netip.Addr
	plain, tunnel netip.Prefix // its blocks
	vtep          netip.Addr
	mac           string // of vxlan.calico
}

// calicoPod is a pod of Calico's. The first of a host is of the pool that is not
// encapsulated.
type calicoPod struct {
	calicoHost
	n           int
	name, id    string
	addr        netip.Addr
	device, mac string
	host        string
}

const (
	calicoNetwork = "k8s-pod-network"
	calicoEtcd    = "http://10.1.0.1:2379" // on the spine
)

func newCalico(t *testing.T, l *lab.Lab) *calico {
	t.Helper()
	c := &calico{Lab: l, t: t, birds: map[string]*exec.Cmd{}}
	for i, name := range l.Hosts() {
		// As Felix derives it: 66, and the first bytes of the name's SHA-1.
		sum := sha1.Sum([]byte(name)) //nolint:gosec // see the import
		mac := "66"
		for _, b := range sum[:5] {
			mac += fmt.Sprintf(":%02x", b)
		}
		h := calicoHost{i: i, name: name, addr: addr(t, l, name), mac: mac}
		h.plain = netip.MustParsePrefix(fmt.Sprintf("192.168.%d.0/26", i+1))
		h.tunnel = netip.MustParsePrefix(fmt.Sprintf("192.168.%d.0/26", i+129))
		h.vtep = h.tunnel.Addr()
		c.hosts = append(c.hosts, h)
	}
	c.startEtcd()
	c.fill()
	for _, h := range c.hosts {
		c.wire(h)
		c.startBIRD(h)
	}
	return c
}

func (h calicoHost) pods() []calicoPod {
	var out []calicoPod
	for n, block := range []netip.Prefix{h.plain, h.tunnel} {
		p := calicoPod{calicoHost: h, n: n, name: fmt.Sprintf("pod%d", n+1), host: h.name, addr: block.Addr().Next()}
		sum := sha1.Sum([]byte("default." + p.name)) //nolint:gosec // see the import
		p.device = "cali" + hex.EncodeToString(sum[:])[:11]
		p.id = fmt.Sprintf("%062x%d%d", 0xca11c0, h.i, n)
		p.mac = fmt.Sprintf("fe:00:00:00:%02x:%02x", h.i+1, n+1)
		out = append(out, p)
	}
	return out
}

func (c *calico) others(h calicoHost) (out []calicoHost) {
	for _, o := range c.hosts {
		if o.name != h.name {
			out = append(out, o)
		}
	}
	return out
}

// batch runs ip(8) on a place, a command a line.
func (c *calico) batch(where, commands string) {
	c.t.Helper()
	var errs strings.Builder
	code, err := c.Run(await.Context(c.t), where, lab.Streams{In: strings.NewReader(commands), Err: &errs}, "ip", "-batch", "-")
	if err != nil || code != 0 {
		c.t.Fatalf("ip on %s: exit code %d, %v: %s", where, code, err, errs.String())
	}
}

// wire makes what Felix and the CNI plugin make in a host's kernel, and its pods.
func (c *calico) wire(h calicoHost) {
	c.t.Helper()
	c.sysctl(h.name, map[string]string{"net/ipv4/ip_forward": "1"})
	var b strings.Builder
	fmt.Fprintf(&b, `link add vxlan.calico address %s mtu 1450 type vxlan id 4096 dstport 4789 nolearning local %s dev eth0
addr add %s/32 dev vxlan.calico
link set vxlan.calico up
`, h.mac, h.addr, h.vtep)
	for _, o := range c.others(h) {
		fmt.Fprintf(&b, "neigh add %s lladdr %s dev vxlan.calico nud permanent\n", o.vtep, o.mac)
	}
	c.batch(h.name, b.String())
	c.routes(h)
	for _, o := range c.others(h) {
		output(c.t, c.Lab, h.name, "bridge", "fdb", "add", o.mac, "dev", "vxlan.calico", "dst", o.addr.String(), "self", "permanent")
	}
	// What Felix leaves in the packet filter goes on judging packets.
	rules := "*filter\n:cali-FORWARD - [0:0]\n-A FORWARD -m comment --comment \"cali:wUHhoiAYhphO9Mso\" -j cali-FORWARD\n-A cali-FORWARD -j ACCEPT\nCOMMIT\n"
	if _, err := c.Run(await.Context(c.t), h.name, lab.Streams{In: strings.NewReader(rules)}, "env", "XTABLES_LOCKFILE=/dev/null", "iptables-restore", "--noflush"); err != nil {
		c.t.Fatal(err)
	}
	for _, p := range h.pods() {
		c.attach(p)
	}
}

// routes makes Felix's routes to blocks.
func (c *calico) routes(h calicoHost) {
	c.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "route add blackhole %s proto 80\n", h.tunnel)
	for _, o := range c.others(h) {
		fmt.Fprintf(&b, "route add %s via %s dev vxlan.calico onlink\n", o.tunnel, o.vtep)
	}
	c.batch(h.name, b.String())
}

// route is the command that makes a pod's route: its metric is zero up to Calico v3.33,
// 1024 since.
func (p calicoPod) route() string {
	metric := ""
	if p.n == 1 {
		metric = "metric 1024"
	}
	return fmt.Sprintf("route replace %s dev %s scope link %s\n", p.addr, p.device, metric)
}

// attach makes a pod as Calico's CNI plugin does, and Felix after it.
func (c *calico) attach(p calicoPod) {
	c.t.Helper()
	where := p.host + "/" + p.name
	if err := c.AddPod(lab.Pod{Host: p.host, Name: p.name, Namespace: "default", UID: "uid-" + p.id[50:], ContainerID: p.id, Addrs: []netip.Addr{p.addr}, MTU: 1450}); err != nil {
		c.t.Fatal(err)
	}
	if err := ns.Create(c.Space(where)); err != nil {
		c.t.Fatal(err)
	}
	c.batch(p.host, fmt.Sprintf("link add %s mtu 1450 address ee:ee:ee:ee:ee:ee type veth peer name eth0 mtu 1450 address %s netns %s\n", p.device, p.mac, c.Space(where)))
	c.batch(where, fmt.Sprintf(`link set lo up
link set eth0 up
addr add %s/32 dev eth0
route add 169.254.1.1 dev eth0 scope link
route add default via 169.254.1.1
`, p.addr))
	c.sysctl(p.host, map[string]string{
		"net/ipv4/conf/" + p.device + "/proxy_arp": "1", "net/ipv4/conf/" + p.device + "/forwarding": "1", "net/ipv4/conf/" + p.device + "/route_localnet": "1",
		"net/ipv4/neigh/" + p.device + "/proxy_delay": "0",
	})
	c.batch(p.host, fmt.Sprintf("link set %[1]s up\n%[4]sneigh add %[2]s lladdr %[3]s dev %[1]s nud permanent\n", p.device, p.addr, p.mac, p.route()))
}

func (c *calico) sysctl(host string, values map[string]string) {
	c.t.Helper()
	for key, value := range values {
		if err := ns.Do(c.Space(host), func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) }); err != nil {
			c.t.Fatal(err)
		}
	}
}

// start starts a program on a place until the test ends.
func (c *calico) start(where, log string, args ...string) *exec.Cmd {
	c.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	out, err := os.Create(log)
	if err != nil {
		c.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if err := ns.Start(c.Space(where), cmd); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = out.Close()
		if c.t.Failed() {
			b, _ := os.ReadFile(log)
			c.t.Logf("%s on %s says:\n%s", filepath.Base(args[0]), where, b)
		}
	})
	return cmd
}

// startEtcd starts Debian's etcd, whose version is one that Calico is used with.
func (c *calico) startEtcd() {
	c.t.Helper()
	dir := c.t.TempDir()
	c.start("spine", filepath.Join(dir, "log"), "etcd", "--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", calicoEtcd, "--advertise-client-urls", calicoEtcd,
		"--listen-peer-urls", "http://127.0.0.1:2380", "--log-level", "warn")
	poll(c.t, "etcd answers", func() string {
		if out, err := c.Output(await.Context(c.t), "spine", "etcdctl", "--endpoints", calicoEtcd, "endpoint", "health"); err != nil {
			return fmt.Sprint(err, out)
		}
		return ""
	})
}

// fill writes what Calico has in etcd, in its own bytes.
func (c *calico) fill() {
	c.t.Helper()
	const meta = `"uid":"ba499037-3f06-45d3-aa1b-fde5b999f36c","creationTimestamp":"2026-11-21T17:20:26Z"`
	objects := map[string]string{
		"clusterinformations/default":  `"spec":{"clusterGUID":"08f7c4da8ec04385b189b65bc714604b","clusterType":"k8s,bgp","calicoVersion":"v3.31.2","datastoreReady":true}`,
		"felixconfigurations/default":  `"spec":{"logSeverityScreen":"Info","reportingInterval":"0s"}`,
		"bgpconfigurations/default":    `"spec":{"logSeverityScreen":"Info","nodeToNodeMeshEnabled":true,"asNumber":64512}`,
		"ippools/plain":                `"spec":{"cidr":"192.168.0.0/17","vxlanMode":"Never","ipipMode":"Never","natOutgoing":true,"blockSize":26,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`,
		"ippools/tunnel":               `"spec":{"cidr":"192.168.128.0/17","vxlanMode":"Always","ipipMode":"Never","natOutgoing":true,"blockSize":26,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`,
		"profiles/kns.default":         `"spec":{"ingress":[{"action":"Allow"}],"egress":[{"action":"Allow"}],"labelsToApply":{"pcns.projectcalico.org/name":"default"}}`,
		"profiles/ksa.default.default": `"spec":{"labelsToApply":{"pcsa.projectcalico.org/name":"default"}}`,
	}
	raw := map[string]string{"/calico/ipam/v2/config": `{"strict_affinity":false,"auto_allocate_blocks":true}`}
	for _, h := range c.hosts {
		objects["nodes/"+h.name] = fmt.Sprintf(`"spec":{"bgp":{"ipv4Address":"%s/24"},"ipv4VXLANTunnelAddr":"%s","orchRefs":[{"nodeName":"%s","orchestrator":"k8s"}],"addresses":[{"address":"%[1]s/24","type":"CalicoNodeIP"},{"address":"%[1]s","type":"InternalIP"}]},"status":{}`, h.addr, h.vtep, h.name)
		tunnel := "vxlan-tunnel-addr-" + h.name
		raw["/calico/ipam/v2/handle/"+tunnel] = handleBytes(h.tunnel)
		attributes := []string{`{"handle_id":"` + tunnel + `","secondary":{"node":"` + h.name + `","type":"vxlanTunnelAddress"}}`}
		for _, p := range h.pods() {
			name := strings.ReplaceAll(h.name, "-", "--") + "-k8s-" + p.name + "-eth0"
			objects["workloadendpoints/default/"+name] = fmt.Sprintf(`"spec":{"orchestrator":"k8s","node":"%s","containerID":"%s","pod":"%s","endpoint":"eth0","serviceAccountName":"default","ipNetworks":["%s/32"],"profiles":["kns.default","ksa.default.default"],"interfaceName":"%s","mac":"%s"}`,
				h.name, p.id, p.name, p.addr, p.device, p.mac)
			handle := calicoNetwork + "." + p.id
			attribute := `{"handle_id":"` + handle + `","secondary":{"namespace":"default","node":"` + h.name + `","pod":"` + p.name + `","timestamp":"2026-11-21 17:31:36.8948024 +0000 UTC"}}`
			if p.n == 0 {
				raw["/calico/ipam/v2/handle/"+handle] = handleBytes(h.plain)
				raw[blockKey(h.plain)] = blockBytes(h.name, h.plain, "", attribute)
			} else {
				raw["/calico/ipam/v2/handle/"+handle] = handleBytes(h.tunnel)
				raw[blockKey(h.tunnel)] = blockBytes(h.name, h.tunnel, attributes[0], attribute)
			}
		}
		for _, b := range []netip.Prefix{h.plain, h.tunnel} {
			raw["/calico/ipam/v2/host/"+h.name+"/ipv4/block/"+dashed(b)] = `{"state":"confirmed","deleted":false}`
		}
	}
	for path, rest := range objects {
		parts := strings.Split(path, "/")
		namespace := ""
		if len(parts) == 3 {
			namespace = `"namespace":"` + parts[1] + `","labels":{"projectcalico.org/namespace":"default","projectcalico.org/orchestrator":"k8s","projectcalico.org/serviceaccount":"default"},`
		}
		raw["/calico/resources/v3/projectcalico.org/"+path] = fmt.Sprintf(`{"kind":"%s","apiVersion":"projectcalico.org/v3","metadata":{"name":"%s",%s%s},%s}`,
			calicoKinds()[parts[0]], parts[len(parts)-1], namespace, meta, rest)
	}
	var puts strings.Builder // etcdctl's transactions are text: compares, then, else
	puts.WriteString("\n")
	for key, value := range raw {
		fmt.Fprintf(&puts, "put %s %q\n", key, value)
	}
	puts.WriteString("\n\n")
	var out strings.Builder
	code, err := c.Run(await.Context(c.t), "spine", lab.Streams{In: strings.NewReader(puts.String()), Out: &out, Err: &out}, "etcdctl", "--endpoints", calicoEtcd, "txn")
	if err != nil || code != 0 || !strings.Contains(out.String(), "SUCCESS") {
		c.t.Fatalf("etcdctl: exit code %d, %v: %s", code, err, out.String())
	}
}

func calicoKinds() map[string]string {
	return map[string]string{
		"clusterinformations": "ClusterInformation", "felixconfigurations": "FelixConfiguration", "bgpconfigurations": "BGPConfiguration",
		"ippools": "IPPool", "profiles": "Profile", "nodes": "Node", "workloadendpoints": "WorkloadEndpoint",
	}
}

func dashed(p netip.Prefix) string { return strings.ReplaceAll(p.String(), "/", "-") }

func blockKey(p netip.Prefix) string { return "/calico/ipam/v2/assignment/ipv4/block/" + dashed(p) }

func handleBytes(p netip.Prefix) string { return fmt.Sprintf(`{"block":{"%s":1},"deleted":false}`, p) }

// blockBytes is a block whose first addresses have attributes; empty: the first is free.
func blockBytes(node string, p netip.Prefix, first, second string) string {
	allocations, free, attributes, sequence := "0,1", "", first+","+second, `"0":1795282296903635737,"1":1795282296903635738`
	if first == "" {
		allocations, free, attributes, sequence = "null,0", "0,", second, `"1":1795282296903635738`
	}
	var rest []string
	for n := 2; n < 64; n++ {
		allocations += ",null"
		rest = append(rest, fmt.Sprint(n))
	}
	return fmt.Sprintf(`{"cidr":"%s","affinity":"host:%s","affinity_claim_time":"2026-11-21T17:31:37Z","allocations":[%s],"unallocated":[%s%s],"attributes":[%s],"sequenceNumber":1795282296903635739,"sequenceNumberForAllocation":{%s},"deleted":false}`,
		p, node, allocations, free, strings.Join(rest, ","), attributes, sequence)
}

// startBIRD starts a host's BIRD with what Calico's confd renders for a mesh, but for the
// waits between attempts, which are shorter. The kernel's metric is BIRD 1.6's.
func (c *calico) startBIRD(h calicoHost) {
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
	if net ~ 192.168.128.0/17 then reject; # a VXLAN pool is Felix's
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
`, h.addr, h.plain, h.tunnel)
	for _, o := range c.others(h) {
		passive := ""
		if o.addr.String() > h.addr.String() {
			passive = " passive on;"
		}
		fmt.Fprintf(&b, "protocol bgp Mesh_%s from bgp_template { neighbor %s as 64512;%s }\n", strings.ReplaceAll(o.addr.String(), ".", "_"), o.addr, passive)
	}
	conf := filepath.Join(dir, "bird.cfg")
	if err := os.WriteFile(conf, []byte(b.String()), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.birds[h.name] = c.start(h.name, filepath.Join(dir, "log"), "bird", "-R", "-f", "-c", conf, "-s", filepath.Join(dir, "bird.ctl"))
}

// stop ends what of Calico runs on a host as the end of its container does: at once.
func (c *calico) stop(h calicoHost) {
	c.t.Helper()
	bird := c.birds[h.name]
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
