package scenarios

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/guides"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/calico"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// otherPods is a cluster whose pods flannel or kube-router wired, in what these leave in
// the kernels of its hosts and on their disks: pods behind a bridge, by the reference plugins
// bridge and host-local themselves, and routes to the other hosts' pod CIDRs. Its Nodes are in
// etcd as Kubernetes' are: with pod CIDRs, and without an address until routerd registers.
type otherPods struct {
	*inEtcd // its etcd, and the means to make things on hosts
	kind    string
	bridge  string
	name    string // of the network, which host-local has its directory by
	hosts   []otherHost
	loads   []*traffic.Load
	moved   []otherHost
}

type otherHost struct {
	name string
	addr netip.Addr
	pods netip.Prefix // its pod CIDR
	mac  string       // of flannel.1
	dir  string       // host-local's
}

const (
	flannelVXLAN = "flannel VXLAN"
	flannelHost  = "flannel host-gw"
	kubeRouter   = "kube-router"
)

// TestMoveFromOtherNetworks: hosts on which flannel or kube-router wired pods are moved to
// routerd in pod CIDR mode, one after the other, while these pods send each other numbered
// packets, and no packet is lost. New pods get addresses that no old one has, and reach all
// others; rules judge them. Old pods end, and with the last the bridge.
func TestMoveFromOtherNetworks(t *testing.T) {
	for suffix, kind := range map[string]string{"fv": flannelVXLAN, "fh": flannelHost, "kr": kubeRouter} {
		t.Run(kind, func(t *testing.T) {
			beside(t)
			o := newOtherPods(t, suffix, kind)
			o.load(o.pairs("old1", "old1"))
			o.load([][2]string{{o.hosts[0].name + "/old1", o.hosts[0].name + "/old2"}})
			for _, h := range o.hosts {
				o.move(h)
			}
			o.policy()
			for _, h := range o.hosts {
				o.leave(h)
			}
			o.noLoss("what the other network left is gone")
			for _, l := range o.loads {
				l.Stop()
			}
			o.loads = nil
			for _, h := range o.hosts {
				o.endOld(h)
			}
			for _, p := range o.pairs("new1", "new2") {
				o.reaches(p[0], p[1])
			}
		})
	}
}

func newOtherPods(t *testing.T, suffix, kind string) *otherPods {
	t.Helper()
	e := store.Direct
	if kind == flannelVXLAN {
		e = store.VXLANCrossSubnet
	}
	top := topology(3, 0, e)
	top.Spine.BGP = new(bool) // the hosts have a mesh
	dir := t.TempDir()
	for i := range top.Nodes {
		n := &top.Nodes[i]
		if kind != flannelVXLAN {
			n.Rack = top.Racks[0].Name // their routes have a gateway on the link
		}
		n.Config = map[string]any{
			"datastore":   map[string]any{"embedded": nil, "endpoints": []any{calicoEtcd}, "caFile": nil, "certFile": nil, "keyFile": nil},
			"ipam":        map[string]any{"usePodCIDR": true, "hostLocalDir": filepath.Join(dir, n.Name)},
			"bgp":         map[string]any{"enabled": kind != kubeRouter}, // whose own speaker has the port
			"defaultPool": map[string]any{"cidr": "10.244.0.0/16", "encapsulation": string(e), "blockSize": 29},
		}
	}
	l := bring.UpWith(t, 2*time.Minute, labPrefix, suffix, lab.Options{Topology: top, BinDir: binDir(t), NoDaemons: true})
	o := &otherPods{inEtcd: &inEtcd{calico.New(t, l), t}, kind: kind, bridge: "cni0", name: "cbr0"}
	if kind == kubeRouter {
		o.bridge, o.name = "kube-bridge", "mynet"
	}
	for i, name := range l.Hosts() {
		o.hosts = append(o.hosts, otherHost{
			name: name, addr: addr(t, l, name), pods: netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/28", i+1)), mac: fmt.Sprintf("7e:00:00:00:00:%02x", i+1), dir: filepath.Join(dir, name),
		})
	}
	o.startEtcd()
	// The network's own profile lets in nothing from elsewhere.
	output(t, l, "spine", "etcdctl", "--endpoints", calicoEtcd, "put", "/calico/resources/v3/projectcalico.org/globalnetworkpolicies/default.open",
		`{"kind":"GlobalNetworkPolicy","apiVersion":"projectcalico.org/v3","metadata":{"name":"default.open","uid":"ba499037-3f06-45d3-aa1b-fde5b999f36d","creationTimestamp":"2026-11-21T17:20:26Z"},"spec":{"tier":"default","order":2000,"selector":"all()","types":["Ingress","Egress"],"ingress":[{"action":"Allow"}],"egress":[{"action":"Allow"}]}}`)
	for _, h := range o.hosts {
		node := fmt.Sprintf(`{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":%q,"uid":"ba499037-3f06-45d3-aa1b-fde5b999f36c","creationTimestamp":"2026-11-21T17:20:26Z"},"spec":{"orchRefs":[{"nodeName":%[1]q,"orchestrator":"k8s"}],"addresses":[{"address":%q,"type":"InternalIP"}]},"status":{"podCIDRs":[%q]}}`,
			h.name, h.addr, h.pods)
		output(t, l, "spine", "etcdctl", "--endpoints", calicoEtcd, "put", "/calico/resources/v3/projectcalico.org/nodes/"+h.name, node)
		o.wireHost(h)
		a := h.pods.Addr().Next() // the bridge's
		for _, pod := range []string{"old1", "old2"} {
			a = a.Next()
			o.attachOld(h, pod, a)
		}
	}
	for _, p := range o.pairs("old1", "old2") {
		o.reaches(p[0], p[1])
	}
	return o
}

// wireHost makes what the other network's daemon makes on a host.
func (o *otherPods) wireHost(h otherHost) {
	o.t.Helper()
	o.Sysctl(h.name, map[string]string{"net/ipv4/ip_forward": "1"})
	var b strings.Builder
	if o.kind == flannelVXLAN {
		fmt.Fprintf(&b, `link add flannel.1 address %s mtu 1450 type vxlan id 1 dstport 8472 nolearning local %s dev eth0
addr add %s/32 dev flannel.1
link set flannel.1 up
`, h.mac, h.addr, h.pods.Addr())
	}
	for _, p := range o.hosts {
		switch {
		case p.name == h.name:
		case o.kind == flannelVXLAN:
			fmt.Fprintf(&b, "neigh add %s lladdr %s dev flannel.1 nud permanent\nroute add %s via %[1]s dev flannel.1 onlink\n", p.pods.Addr(), p.mac, p.pods)
		case o.kind == flannelHost:
			fmt.Fprintf(&b, "route add %s via %s dev eth0\n", p.pods, p.addr)
		default:
			fmt.Fprintf(&b, "route add %s via %s proto 17\n", p.pods, p.addr)
		}
	}
	o.Batch(h.name, b.String())
	if o.kind != flannelVXLAN {
		return
	}
	for _, p := range o.hosts {
		if p.name != h.name {
			output(o.t, o.Lab, h.name, "bridge", "fdb", "add", p.mac, "dev", "flannel.1", "dst", p.addr.String(), "self", "permanent")
		}
	}
	// What flanneld has in the packet filter (--ip-masq, and its rules for FORWARD).
	rules := `*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE
COMMIT
*filter
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
`
	if code, err := o.Run(await.Context(o.t), h.name, lab.Streams{In: strings.NewReader(rules)}, "env", "XTABLES_LOCKFILE=/dev/null", "iptables-restore", "--noflush"); err != nil || code != 0 {
		o.t.Fatalf("iptables-restore on %s: exit code %d, %v", h.name, code, err)
	}
	// As strict as some distributions have every device.
	o.Sysctl(h.name, map[string]string{"net/ipv4/conf/flannel.1/rp_filter": "1", "net/ipv4/conf/eth0/rp_filter": "1"})
}

// attachOld attaches a pod as the runtime does with the other network's configuration: what
// flannel's plugin hands to the bridge plugin.
func (o *otherPods) attachOld(h otherHost, name string, a netip.Addr) {
	o.t.Helper()
	where, id := h.name+"/"+name, name+"-"+h.name
	if err := o.AddPod(lab.Pod{Host: h.name, Name: name, ContainerID: id, Addrs: []netip.Addr{a}, MTU: 1450}); err != nil {
		o.t.Fatal(err)
	}
	if err := ns.Create(o.Space(where)); err != nil {
		o.t.Fatal(err)
	}
	conf := fmt.Sprintf(`{"cniVersion":"0.3.1","name":%q,"type":"bridge","bridge":%q,"isGateway":true,"isDefaultGateway":true,"ipMasq":false,"hairpinMode":true,"mtu":1450,`+
		`"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]],"routes":[{"dst":"10.244.0.0/16"}]}}`, o.name, o.bridge, h.dir, h.pods)
	var out, errs strings.Builder
	code, err := o.Run(await.Context(o.t), h.name, lab.Streams{In: strings.NewReader(conf), Out: &out, Err: &errs}, "env", "CNI_COMMAND=ADD", "CNI_CONTAINERID="+id,
		"CNI_NETNS="+ns.Path(o.Space(where)), "CNI_IFNAME=eth0", "CNI_PATH=/usr/lib/cni", "/usr/lib/cni/bridge")
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err == nil && code == 0 {
		err = json.Unmarshal([]byte(out.String()), &result)
	}
	if err != nil || code != 0 || len(result.IPs) != 1 || result.IPs[0].Address.Addr() != a {
		o.t.Fatalf("bridge for %s: exit code %d, %v: %s%s", where, code, err, out.String(), errs.String())
	}
	o.Batch(where, "link set lo up\n")
}

// pairs are a pod of each host with one of each host that comes later.
func (o *otherPods) pairs(from, to string) (out [][2]string) {
	for i, a := range o.hosts {
		for _, b := range o.hosts[i+1:] {
			out = append(out, [2]string{a.name + "/" + from, b.name + "/" + to})
		}
	}
	return out
}

func (o *otherPods) load(pairs [][2]string) {
	o.t.Helper()
	o.loads = append(o.loads, startPackets(o.t, o.Lab, traffic.LoadOptions{Rate: loadRate() / 5}, pairs...))
}

func (o *otherPods) noLoss(what string) {
	o.t.Helper()
	for _, l := range o.loads {
		r := l.Interval()
		o.t.Logf("%s: %s", what, r.Sum())
		for _, f := range append(r.Bad(), r.Silent()...) {
			o.t.Errorf("%s: %s", what, f)
		}
	}
}

func (o *otherPods) reaches(from, to string) {
	o.t.Helper()
	if r, err := o.Ping(await.Context(o.t), from, to, traffic.Options{}); err != nil || !r.OK {
		o.t.Errorf("%s does not reach %s: %s, %v", from, to, r, err)
	}
}

// move has routerd serve a host.
func (o *otherPods) move(h otherHost) {
	o.t.Helper()
	if err := o.Restart(await.Context(o.t), h.name); err != nil {
		o.t.Fatal(err)
	}
	for _, m := range o.moved {
		o.routed(h, m)
		o.routed(m, h)
	}
	o.moved = append(o.moved, h)
	o.noLoss("the move of " + h.name)

	used, err := os.ReadDir(filepath.Join(h.dir, o.name))
	if err != nil {
		o.t.Fatal(err)
	}
	taken := map[netip.Addr]bool{}
	for _, f := range used {
		if a, err := netip.ParseAddr(f.Name()); err == nil {
			taken[a] = true
		}
	}
	if len(taken) != 2 {
		o.t.Errorf("host-local has %v of two old pods", taken)
	}
	// More than one block has, so that the old pods' block is among them.
	for i := range 7 {
		p, err := o.AttachPod(await.Context(o.t), fmt.Sprintf("%s/new%d", h.name, i+1))
		if err != nil {
			o.t.Fatal(err)
		}
		a := p.Addrs[0]
		if first, last := h.pods.Addr(), netip.AddrFrom4([4]byte{10, 244, h.pods.Addr().As4()[2], 15}); taken[a] || a == first || a == first.Next() || a == last || !h.pods.Contains(a) {
			o.t.Errorf("%s was given %s of %s, and in use are %v, the bridge's, the first and the last", p, a, h.pods, taken)
		}
		taken[a] = true
	}
	var pairs [][2]string
	for _, other := range o.hosts {
		pairs = append(pairs, [2]string{h.name + "/new1", other.name + "/old1"})
		if other.name != h.name && slices.Contains(o.moved, other) {
			pairs = append(pairs, [2]string{h.name + "/new1", other.name + "/new1"})
		}
	}
	for _, p := range append(pairs, [2]string{h.name + "/old2", h.name + "/new2"}) {
		o.reaches(p[0], p[1])
	}
	o.load(pairs)
	o.noLoss("new pods of " + h.name)
}

// routed waits until a host's route to another's pod CIDR is routerd's.
func (o *otherPods) routed(from, to otherHost) {
	o.t.Helper()
	poll(o.t, fmt.Sprintf("routerd's route on %s to %s", from.name, to.name), func() string {
		all := output(o.t, o.Lab, from.name, "ip", "route", "show", "exact", to.pods.String())
		if own := output(o.t, o.Lab, from.name, "ip", "route", "show", "exact", to.pods.String(), "proto", "77"); own == "" || strings.Count(all, "\n") != 1 {
			return all
		}
		return ""
	})
}

// policy: rules judge what a new pod receives, also from an old one on its host, and
// not what old pods send each other.
func (o *otherPods) policy() {
	o.t.Helper()
	first, second := o.hosts[0].name, o.hosts[1].name
	old, err := o.Pod(first, "old1")
	if err != nil {
		o.t.Fatal(err)
	}
	const name = "no-old"
	routerctl(o.t, o.Lab, first, fmt.Sprintf(`{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: %s}, spec: {order: 1, selector: all(), types: [Ingress], ingress: [{action: Deny, protocol: ICMP, source: {nets: [%s/32]}}, {action: Allow}]}}`, name, old.Addrs[0]), "apply", "-f", "-")
	for _, h := range []string{first, second} {
		to, err := o.Pod(h, "new3")
		if err != nil {
			o.t.Fatal(err)
		}
		// Nothing was sent there before: what is tracked is not judged anew.
		poll(o.t, "the policy is in force on "+h, func() string {
			out := routerctl(o.t, o.Lab, h, "", "policy", "explain", "--from", old.Addrs[0].String(), "--to", to.Addrs[0].String(), "--protocol", "icmp")
			if !strings.Contains(out, "GlobalNetworkPolicy("+name+")") {
				return out
			}
			return ""
		})
		if r, err := o.Ping(await.Context(o.t), first+"/old1", h+"/new3", traffic.Options{}); err != nil || r.OK {
			o.t.Errorf("%s/old1 reaches %s/new3, which a policy keeps it out of: %s, %v", first, h, r, err)
		}
	}
	o.reaches(first+"/old2", first+"/new3")
	o.reaches(first+"/old1", first+"/old2")
	o.reaches(first+"/old1", second+"/old1")
	routerctl(o.t, o.Lab, first, "", "delete", "globalnetworkpolicy", name)
	o.noLoss("rules for new pods")
}

// guide runs a block of commands of docs/guides/from-flannel.md on a host, as it stands there
// but for the bridge's name.
func (o *otherPods) guide(h otherHost, begin string) {
	o.t.Helper()
	commands := strings.ReplaceAll(guides.Commands(o.t, "guides/from-flannel.md", begin), "cni0", o.bridge)
	output(o.t, o.Lab, h.name, "env", "XTABLES_LOCKFILE=/dev/null", "bash", "-ec", commands)
}

// leave removes the other network's tunnel, whose daemon has ended on all hosts.
func (o *otherPods) leave(h otherHost) {
	o.t.Helper()
	if o.kind == flannelVXLAN {
		o.guide(h, "ip link delete flannel.1")
		if out := output(o.t, o.Lab, h.name, "env", "XTABLES_LOCKFILE=/dev/null", "iptables-save"); strings.Contains(out, "FLANNEL") {
			o.t.Errorf("flannel's rules are left on %s:\n%s", h.name, out)
		}
	}
	if out := output(o.t, o.Lab, h.name, "ip", "route"); strings.Contains(out, "flannel") || strings.Contains(out, "proto 17") {
		o.t.Errorf("routes of the other network are left on %s:\n%s", h.name, out)
	}
}

// endOld ends the old pods of a host: their addresses are free, and with the bridge's
// end what no workload has is dropped again.
func (o *otherPods) endOld(h otherHost) {
	o.t.Helper()
	for _, pod := range []string{"old1", "old2"} {
		if err := o.DetachPod(await.Context(o.t), h.name+"/"+pod); err != nil {
			o.t.Fatal(err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(h.dir, o.name, "10.244.*")); err != nil || len(left) > 0 {
		o.t.Errorf("host-local has %v of pods that ended, %v", left, err)
	}
	o.guide(h, "ip link delete cni0")
	poll(o.t, "the pod CIDR's own route on "+h.name, func() string {
		if out := output(o.t, o.Lab, h.name, "ip", "route"); !strings.Contains(out, "blackhole "+h.pods.String()) {
			return out
		}
		return ""
	})
	if out := routerctl(o.t, o.Lab, h.name, "", "node", "status"); strings.Contains(out, o.bridge) {
		o.t.Errorf("node status speaks of %s:\n%s", o.bridge, out)
	}
}
