package scenarios

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/trace"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// mode is what an encapsulation promises.
type mode struct {
	encap      store.Encapsulation
	near, far  string // the tunnel within a rack and between racks: "", "ipip" or "vxlan"
	mtu        int    // of a pod
	ttlNear    int    // of an answer from a pod of another host in the rack
	ttlFar     int    // … in the other rack
	device     string // of the tunnel; empty: none
	viaOverBGP bool   // the other rack's blocks are known from the spine alone
}

func modeOf(e store.Encapsulation) mode {
	m := mode{encap: e, mtu: 1500, ttlNear: 62, ttlFar: 62}
	switch e {
	case store.Direct:
		m.ttlFar, m.viaOverBGP = 61, true // the spine takes one too
	case store.IPIP:
		m.near, m.far = "ipip", "ipip"
	case store.IPIPCrossSubnet:
		m.far = "ipip"
	case store.VXLAN:
		m.near, m.far = "vxlan", "vxlan"
	case store.VXLANCrossSubnet:
		m.far = "vxlan"
	}
	switch m.far {
	case "ipip":
		m.mtu, m.device = 1480, "tunl0"
	case "vxlan":
		m.mtu, m.device = 1450, "vxlan.calico"
	}
	return m
}

// TestModes runs what must hold in every encapsulation, in one lab for each:
// three hosts in two racks, two pods on each.
func TestModes(t *testing.T) {
	beside(t)
	s, err := newStage()
	if err != nil {
		t.Fatal(err)
	}
	if len(s.modes) == 0 {
		t.Fatal("no encapsulation to test")
	}
	for _, e := range s.modes {
		t.Run(string(e), func(t *testing.T) {
			beside(t)
			m := modeOf(e)
			l := bringUp(t, "mode-"+strings.ToLower(string(e)), topology(3, 2, e))
			// One after the other: they share the lab, and the later ones meddle
			// with its daemons.
			for _, sc := range []struct {
				name string
				run  func(*testing.T, *lab.Lab, mode)
			}{
				{"reachability", testReachability},
				{"full-size packets", testFullSize},
				{"TTL", testTTL},
				{"on the wire", testWire},
				{"kernel state", testKernelState},
				{"BGP sessions", testSessions},
				{"tunnels are measured", func(t *testing.T, l *lab.Lab, m mode) { testMeasured(t, l, m.far != "") }},
				{"nothing is wrong", testWell},
				{"killed and started again", testKillUnderTraffic},
				{"stopped and started again", testStopUnderTraffic},
				{"without the mesh", testMeshOff},
			} {
				ok := t.Run(sc.name, func(t *testing.T) { sc.run(t, l, m) })
				if !ok && sc.name == "reachability" {
					t.Fatal("nothing else can hold")
				}
			}
		})
	}
}

// reach waits until every pod and host reaches every other.
func reach(t *testing.T, l *lab.Lab, o traffic.Options) {
	t.Helper()
	m, err := l.ReachabilityMatrix(await.Context(t), o)
	if err != nil {
		t.Fatal(err)
	}
	asked, answered := m.Pairs()
	if asked == 0 || asked != answered {
		t.Fatalf("%d of %d pairs:\n%s", answered, asked, strings.Join(m.Failures(), "\n"))
	}
}

// testWell holds that doctor finds nothing on a host that is well, and that there is
// nothing that it cannot look at; and that the ways between pods are whole.
func testWell(t *testing.T, l *lab.Lab, m mode) {
	// What integration/doctor cannot break: its kernel may have no IPIP, and the size of the table is one setting of the whole machine.
	if m.near == "ipip" {
		testProtocolDropped(t, l)
		if emulated() {
			testTableFull(t, l)
		}
	}
	for _, h := range l.Hosts() {
		examine(t, l, h, func(r *apiv1.ExamineResponse) bool { return len(r.GetFindings())+len(r.GetUnknown()) == 0 })
	}
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	c, err := l.Client("node2")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	from := pods[0].Addrs[0].String() // of node1
	poll(t, "traces of node2", func() string {
		wrong := make([]string, len(pods))
		var all sync.WaitGroup
		for i, p := range pods[1:] {
			if p.Name != pods[1].Name {
				continue // one of each host, node1 included
			}
			all.Go(func() {
				r, err := apiv1.NewDoctorClient(c).Trace(await.Context(t), &apiv1.TraceRequest{From: from, To: p.Addrs[0].String()})
				if err != nil || r.GetVerdict() != trace.Whole {
					wrong[i] = fmt.Sprint(p, ": ", err, r)
				}
			})
		}
		all.Wait()
		return strings.Join(wrong, "")
	})
}

// testProtocolDropped: what drops the packets of IPIP is named.
func testProtocolDropped(t *testing.T, l *lab.Lab) {
	t.Helper()
	output(t, l, "node3", "nft", "add table ip fw { chain c { type filter hook prerouting priority 0; ip protocol 4 drop; }; }")
	examine(t, l, "node1", finds("tunnel", "no packet gets through tunl0 (protocol 4) to node3", "ip protocol 4 accept # on node3"))
	output(t, l, "node3", "nft", "delete", "table", "ip", "fw")
}

// testTableFull: a table of tracked connections without room is named.
func testTableFull(t *testing.T, l *lab.Lab) {
	t.Helper()
	const size = "/proc/sys/net/netfilter/nf_conntrack_max"
	was, err := os.ReadFile(size)
	if err != nil {
		t.Fatal(err)
	}
	count, err := strconv.Atoi(strings.TrimSpace(output(t, l, "node1", "cat", "/proc/sys/net/netfilter/nf_conntrack_count")))
	if err != nil || count < 2 {
		t.Fatalf("node1 tracks %d connections, %v", count, err)
	}
	t.Cleanup(func() { _ = os.WriteFile(size, was, 0) }) // where the test ends before it is mended
	if err := os.WriteFile(size, strconv.AppendInt(nil, int64(count/2), 10), 0); err != nil {
		t.Fatal(err)
	}
	examine(t, l, "node1", finds("table-full", "the kernel's table of tracked connections is full", "sysctl -w net.netfilter.nf_conntrack_max="))
	if err := os.WriteFile(size, was, 0); err != nil {
		t.Fatal(err)
	}
}

// finds is an answer whose first finding is of a check, and has some words in what it says and in its cure.
func finds(check, says, cure string) func(*apiv1.ExamineResponse) bool {
	return func(r *apiv1.ExamineResponse) bool {
		f := append(r.GetFindings(), nil)[0]
		return f.GetCheck() == check && strings.Contains(f.GetWhat(), says) && strings.Contains(f.GetCure(), cure)
	}
}

// examine waits until a host's doctor says what it should.
func examine(t *testing.T, l *lab.Lab, host string, well func(*apiv1.ExamineResponse) bool) {
	t.Helper()
	c, err := l.Client(host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	poll(t, "doctor of "+host, func() string {
		r, err := apiv1.NewDoctorClient(c).Examine(await.Context(t), &apiv1.ExamineRequest{})
		switch {
		case err != nil:
			return err.Error()
		case !well(r):
			return "it says " + r.String()
		}
		return ""
	})
	t.Logf("doctor of %s, after %.1f s: as it should", host, time.Since(start).Seconds())
}

func testReachability(t *testing.T, l *lab.Lab, _ mode) {
	start := time.Now()
	reach(t, l, traffic.Options{})
	t.Logf("every pair answered after %.2f s", time.Since(start).Seconds())
}

// A packet as large as the pod's device takes passes between all pods and hosts
// with DF set, and the device is as large as the encapsulation leaves.
func testFullSize(t *testing.T, l *lab.Lab, m mode) {
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		if p.MTU != m.mtu {
			t.Errorf("MTU of %s is %d, want %d", p, p.MTU, m.mtu)
		}
	}
	reach(t, l, traffic.Options{Size: m.mtu, DF: true})
}

func testTTL(t *testing.T, l *lab.Lab, m mode) {
	for to, want := range map[string]int{"node1/pod2": 63, "node2/pod1": m.ttlNear, "node3/pod1": m.ttlFar, "node1": 64} {
		r, err := l.Ping(await.Context(t), "node1/pod1", to, traffic.Options{})
		if err != nil || !r.OK || r.TTL != want {
			t.Errorf("node1/pod1 → %s: %+v, %v; want TTL %d", to, r, err, want)
		}
	}
}

// testWire captures on the uplinks what pods of other hosts are sent.
func testWire(t *testing.T, l *lab.Lab, m mode) {
	for to, tunnel := range map[string]string{"node2/pod1": m.near, "node3/pod1": m.far} {
		host, _, _ := strings.Cut(to, "/")
		src, dst := addr(t, l, "node1/pod1"), addr(t, l, to)
		ours := func(p lab.Packet) bool {
			in := p.Payload()
			return in.Proto == lab.ProtoICMP && (in.Src == src && in.Dst == dst || in.Src == dst && in.Dst == src)
		}
		c, err := l.Capture("node1", "eth0", ours)
		if err != nil {
			t.Fatal(err)
		}
		r, err := l.Ping(await.Context(t), "node1/pod1", to, traffic.Options{Size: m.mtu, DF: true})
		if err != nil || !r.OK {
			t.Errorf("node1/pod1 → %s: %+v, %v", to, r, err)
		}
		if _, err := c.WaitFor(await.Context(t), 2); err != nil {
			t.Error(err)
		}
		packets := c.Stop()
		if len(packets) != 2 {
			t.Errorf("to %s: %d packets on the wire, want the request and its answer: %v", to, len(packets), packets)
		}
		for _, p := range packets {
			if err := checkPacket(p, tunnel); err != nil {
				t.Errorf("to %s: %v: %s", to, err, p)
			}
			a, b := addr(t, l, "node1"), addr(t, l, host)
			if o := p.Outer; tunnel != "" && (o.Src != a || o.Dst != b) && (o.Src != b || o.Dst != a) {
				t.Errorf("to %s: the outer addresses are not those of the hosts: %s", to, p)
			}
		}
	}
}

// checkPacket says what is wrong with a packet that should be in this tunnel.
func checkPacket(p lab.Packet, tunnel string) error {
	switch tunnel {
	case "":
		if p.Tunnelled() {
			return fmt.Errorf("encapsulated")
		}
	case "ipip":
		if !p.Tunnelled() || p.Outer.Proto != lab.ProtoIPIP {
			return fmt.Errorf("not IP in IP (protocol 4)")
		}
	case "vxlan":
		if !p.Tunnelled() || p.Outer.Proto != lab.ProtoUDP || p.DstPort != lab.VXLANPort || p.VNI != 4096 {
			return fmt.Errorf("not VXLAN with VNI 4096 on UDP port 4789")
		}
	}
	return nil
}

// testKernelState reads the kernel as an operator does.
func testKernelState(t *testing.T, l *lab.Lab, m mode) {
	own, remote := blocksOf(t, l)
	routes := output(t, l, "node1", "ip", "route")
	for host, block := range remote {
		tunnel := m.near
		if host == "node3" {
			tunnel = m.far
		}
		expectLine(t, routes, "^"+regexp.QuoteMeta(block)+` nhid \d+ via `+hop(t, l, host, tunnel, m)+` proto routerd onlink ?$`)
	}
	for _, b := range own {
		expectLine(t, routes, "^blackhole "+regexp.QuoteMeta(b)+" proto routerd ?$")
	}
	for _, p := range []string{"node1/pod1", "node1/pod2"} {
		a := regexp.QuoteMeta(addr(t, l, p).String())
		expectLine(t, routes, "^"+a+` dev cali\S+ proto routerd scope link ?$`)
	}
	if m.far == "vxlan" {
		node := regexp.QuoteMeta(addr(t, l, "node3").String())
		fdb := output(t, l, "node1", "bridge", "fdb", "show", "dev", "vxlan.calico")
		expectLine(t, fdb, `^(66:\S+) dst `+node+` (via eth0 )?self permanent ?$`)
		mac := regexp.MustCompile(`(66:\S+) dst ` + node).FindStringSubmatch(fdb)
		neigh := output(t, l, "node1", "ip", "neigh", "show", "dev", "vxlan.calico")
		if len(mac) == 2 {
			expectLine(t, neigh, `^192\.168\.\S+ lladdr `+mac[1]+` PERMANENT ?$`)
		}
		link := output(t, l, "node1", "ip", "-d", "link", "show", "vxlan.calico")
		if !strings.Contains(link, "vxlan id 4096 ") || !strings.Contains(link, "dstport 4789 ") || !strings.Contains(link, "nolearning") {
			t.Errorf("vxlan.calico:\n%s", link)
		}
	}
	var devices []string
	for f := range strings.FieldsSeq(output(t, l, "node1", "ls", "/sys/class/net")) {
		if f == "tunl0" || f == "vxlan.calico" {
			devices = append(devices, f)
		}
	}
	// tunl0 is in every namespace of a kernel that has the module: what counts
	// is that the one of another mode has no address.
	if m.device != "" && !slices.Contains(devices, m.device) {
		t.Errorf("device %s is missing: %v", m.device, devices)
	}
	for _, d := range devices {
		if a := output(t, l, "node1", "ip", "-4", "-br", "addr", "show", "dev", d); (d == m.device) != strings.Contains(a, "/32") {
			t.Errorf("addresses of %s: %q", d, a)
		}
	}
}

// hop is what the route to a block of this host should say after "via".
func hop(t *testing.T, l *lab.Lab, host, tunnel string, m mode) string {
	t.Helper()
	node := regexp.QuoteMeta(addr(t, l, host).String())
	switch {
	case tunnel == "ipip":
		return node + " dev tunl0"
	case tunnel == "vxlan":
		return `192\.168\.\S+ dev vxlan\.calico`
	case m.viaOverBGP && host == "node3":
		return `10\.1\.0\.1 dev eth0`
	}
	return node + " dev eth0"
}

// blocksOf returns node1's own blocks and one block of each other host.
func blocksOf(t *testing.T, l *lab.Lab) (own []string, remote map[string]string) {
	t.Helper()
	remote = make(map[string]string)
	for _, h := range l.Hosts() {
		r, err := l.Node(await.Context(t), h)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.GetBlocks()) == 0 {
			t.Fatalf("%s has no block", h)
		}
		for _, b := range r.GetBlocks() {
			if h == "node1" {
				own = append(own, b.GetCidr())
			} else {
				remote[h] = b.GetCidr()
			}
		}
	}
	return own, remote
}

func expectLine(t *testing.T, text, pattern string) {
	t.Helper()
	if !regexp.MustCompile("(?m)" + pattern).MatchString(text) {
		t.Errorf("no line matches %s in:\n%s", pattern, text)
	}
}

// Every host has a session with every other, and with the spine where that
// speaks BGP, and all come up.
func testSessions(t *testing.T, l *lab.Lab, m mode) {
	want := len(l.Hosts()) - 1
	if m.encap == store.Direct {
		want++
	}
	for _, h := range l.Hosts() {
		poll(t, "BGP sessions of "+h, func() string {
			r, err := l.Node(await.Context(t), h)
			if err != nil {
				return err.Error()
			}
			up := 0
			for _, p := range r.GetPeers() {
				if p.GetState() == "up" {
					up++
				}
			}
			if up != want || len(r.GetPeers()) != want {
				return fmt.Sprintf("%d up, want %d: %v", up, want, r.GetPeers())
			}
			return ""
		})
	}
}

// testMeshOff switches the mesh off: the store knows every block, and where
// that does not help, the spine does.
func testMeshOff(t *testing.T, l *lab.Lab, _ mode) {
	setMesh(t, l, false)
	for _, h := range l.Hosts() {
		poll(t, "sessions of the mesh on "+h, func() string {
			r, err := l.Node(await.Context(t), h)
			if err != nil {
				return err.Error()
			}
			for _, p := range r.GetPeers() {
				if strings.Contains(p.GetType(), "mesh") {
					return "still there: " + p.String()
				}
			}
			return ""
		})
	}
	if _, err := l.AttachPods(await.Context(t), "node3/late", "node2/late"); err != nil {
		t.Fatal(err)
	}
	reach(t, l, traffic.Options{})
}

func setMesh(t *testing.T, l *lab.Lab, on bool) {
	t.Helper()
	ctx := await.Context(t)
	s := openStore(t, l)
	key := store.ResourceKey(store.KindBGPConfiguration, "default")
	_, err := s.Get(ctx, key)
	if err != nil {
		_, err = store.Create(ctx, s, &v3.BGPConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "default"},
			Spec:       v3.BGPConfigurationSpec{NodeToNodeMeshEnabled: &on},
		})
	} else {
		_, err = store.Modify(ctx, s, key, func(cur store.Object) (any, error) {
			c, ok := store.Clone(cur.Value).(*v3.BGPConfiguration)
			if !ok {
				return nil, fmt.Errorf("unexpected %T", cur.Value)
			}
			c.Spec.NodeToNodeMeshEnabled = &on
			return c, nil
		})
	}
	if err != nil {
		t.Fatal(err)
	}
}
