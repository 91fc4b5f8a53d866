package scenarios

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// familyMode is what an encapsulation promises to pods of both families on an
// underlay.
type familyMode struct {
	underlay lab.Underlay
	encap    store.Encapsulation
	mtu      int // of a pod
}

// outer is the family of the underlay's packets that carry a pod's.
func (m familyMode) outer(inner dataplane.Family) dataplane.Family {
	switch m.underlay {
	case lab.UnderlayIPv4:
		return dataplane.IPv4
	case lab.UnderlayIPv6:
		return dataplane.IPv6
	case lab.UnderlayDual:
	}
	return inner
}

func (m familyMode) name() string { return fmt.Sprintf("%s over %s", m.encap, m.underlay) }

// familyModes are dual-stack pods over every underlay that can carry them.
func familyModes() []familyMode {
	return []familyMode{
		{lab.UnderlayDual, store.Direct, 1500},
		{lab.UnderlayDual, store.VXLAN, 1430},
		{lab.UnderlayDual, store.VXLANCrossSubnet, 1430},
		{lab.UnderlayDual, store.IPIP, 1460},
		{lab.UnderlayDual, store.IPIPCrossSubnet, 1460},
		{lab.UnderlayIPv4, store.VXLAN, 1450},
		{lab.UnderlayIPv6, store.VXLAN, 1430},
		{lab.UnderlayIPv6, store.IPIP, 1460},
	}
}

// TestFamilies runs what must hold for dual-stack pods: over an underlay of
// both families, IPv6 pods over IPv4 alone and IPv4 pods over IPv6 alone.
func TestFamilies(t *testing.T) {
	beside(t)
	s, err := newStage()
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	for _, m := range familyModes() {
		if !slices.Contains(s.modes, m.encap) {
			continue // left to the other stage, as main_test.go prints
		}
		ran++
		t.Run(m.name(), func(t *testing.T) {
			beside(t)
			top := topology(3, 2, m.encap)
			top.Underlay, top.Pool6 = m.underlay, &lab.Pool{}
			l := bringUp(t, fmt.Sprintf("%s-%s", strings.ToLower(string(m.encap)), m.underlay), top)
			for _, sc := range []struct {
				name string
				run  func(*testing.T, *lab.Lab, familyMode)
			}{
				{"reachability", testFamilyReachability},
				{"full-size packets", testFamilyFullSize},
				{"on the wire", testFamilyWire},
				{"first packet of a new pod", testFirstPacket},
				{"killed and started again", testFamilyKill},
				{"what operators see", testFamilyStatus},
				{"policy of SCTP", testSCTP},
				{"tunnels are measured", func(t *testing.T, l *lab.Lab, m familyMode) { testMeasured(t, l, modeOf(m.encap).far != "") }},
			} {
				if sc.name == "killed and started again" && emulated() {
					continue // not a matter of the kernel's devices: the stage without a virtual machine has it
				}
				if sc.name == "policy of SCTP" && !speaks(unix.IPPROTO_SCTP) {
					continue // the virtual machine's kernel does
				}
				ok := t.Run(sc.name, func(t *testing.T) { sc.run(t, l, m) })
				if !ok && sc.name == "reachability" {
					t.Fatal("nothing else can hold")
				}
			}
		})
	}
	if ran == 0 {
		t.Fatal("no encapsulation to test")
	}
}

func testFamilyReachability(t *testing.T, l *lab.Lab, _ familyMode) {
	for _, f := range dataplane.Families() {
		start := time.Now()
		reach(t, l, traffic.Options{IPv6: f == dataplane.IPv6})
		t.Logf("%s: every pair answered after %.2f s", f, time.Since(start).Seconds())
	}
}

func testFamilyFullSize(t *testing.T, l *lab.Lab, m familyMode) {
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		if p.MTU != m.mtu {
			t.Errorf("MTU of %s is %d, want %d", p, p.MTU, m.mtu)
		}
	}
	for _, f := range dataplane.Families() {
		reach(t, l, traffic.Options{Size: m.mtu, DF: true, IPv6: f == dataplane.IPv6})
	}
}

// testFamilyWire captures on the uplink what pods of other hosts are sent, of
// each family.
func testFamilyWire(t *testing.T, l *lab.Lab, m familyMode) {
	base := modeOf(m.encap)
	for to, tunnel := range map[string]string{"node2/pod1": base.near, "node3/pod1": base.far} {
		for _, f := range dataplane.Families() {
			host, _, _ := strings.Cut(to, "/")
			src, dst := addrOf(t, l, "node1/pod1", f), addrOf(t, l, to, f)
			ours := func(p lab.Packet) bool {
				in := p.Payload()
				return (in.Proto == lab.ProtoICMP || in.Proto == lab.ProtoICMPv6) && (in.Src == src && in.Dst == dst || in.Src == dst && in.Dst == src)
			}
			c, err := l.Capture("node1", "eth0", ours)
			if err != nil {
				t.Fatal(err)
			}
			r, err := l.Ping(await.Context(t), "node1/pod1", to, traffic.Options{Size: m.mtu, DF: true, IPv6: f == dataplane.IPv6})
			if err != nil || !r.OK {
				t.Errorf("%s: node1/pod1 → %s: %+v, %v", f, to, r, err)
			}
			if _, err := c.WaitFor(await.Context(t), 2); err != nil {
				t.Error(err)
			}
			for _, p := range c.Stop() {
				if err := checkFamilyPacket(p, tunnel, f, m.outer(f)); err != nil {
					t.Errorf("%s to %s: %v: %s", f, to, err, p)
				}
				if tunnel == "" {
					continue
				}
				a, b := addrOf(t, l, "node1", m.outer(f)), addrOf(t, l, host, m.outer(f))
				if o := p.Outer; (o.Src != a || o.Dst != b) && (o.Src != b || o.Dst != a) {
					t.Errorf("%s to %s: the outer addresses are not those of the hosts: %s", f, to, p)
				}
			}
		}
	}
}

// checkFamilyPacket says what is wrong with a packet of a family that should be
// in this tunnel over the other.
func checkFamilyPacket(p lab.Packet, tunnel string, inner, outer dataplane.Family) error {
	if tunnel != "ipip" {
		if err := checkPacket(p, tunnel); err != nil {
			return err
		}
	} else if want := map[dataplane.Family]int{dataplane.IPv4: lab.ProtoIPIP, dataplane.IPv6: lab.ProtoIPv6}[inner]; !p.Tunnelled() || p.Outer.Proto != want {
		return fmt.Errorf("not %s in IP (protocol %d)", inner, want)
	}
	if p.Tunnelled() && dataplane.FamilyOf(p.Outer.Src) != outer {
		return fmt.Errorf("carried over %s, want %s", dataplane.FamilyOf(p.Outer.Src), outer)
	}
	return nil
}

func addrOf(t *testing.T, l *lab.Lab, where string, f dataplane.Family) netip.Addr {
	t.Helper()
	a, err := l.AddrOf(where, f)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// testFirstPacket: one packet, sent as soon as the CNI plugin has returned,
// arrives, of each family, in the pod's own rack and beyond.
func testFirstPacket(t *testing.T, l *lab.Lab, _ familyMode) {
	for i := range 5 {
		pod := fmt.Sprintf("node1/first%d", i)
		if _, err := l.AttachPod(await.Context(t), pod); err != nil {
			t.Fatal(err)
		}
		for _, f := range dataplane.Families() {
			for _, to := range []string{"node1/pod1", "node2/pod1", "node3/pod1"} {
				r, err := l.Ping(await.Context(t), pod, to, traffic.Options{IPv6: f == dataplane.IPv6})
				if err != nil || !r.OK {
					t.Errorf("%s: the first packet of %s to %s: %+v, %v", f, pod, to, r, err)
				}
			}
		}
		if err := l.DetachPod(await.Context(t), pod); err != nil {
			t.Error(err)
		}
	}
}

// testFamilyKill kills a daemon with -9 and starts it again while pods ping over
// both families: nothing is lost.
func testFamilyKill(t *testing.T, l *lab.Lab, m familyMode) {
	var flows []*traffic.Flow
	for _, f := range dataplane.Families() {
		for _, p := range pairsOf("node1") {
			flow, err := l.Flow(t.Context(), p[0], p[1], pingRate()/2, traffic.Options{IPv6: f == dataplane.IPv6})
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, flow)
		}
	}
	for _, f := range flows {
		if err := f.WaitReceived(await.Context(t), 50); err != nil {
			t.Error(err)
		}
	}
	routes := func() string {
		text := output(t, l, "node1", "ip", "-4", "route") + output(t, l, "node1", "ip", "-6", "route")
		if m.encap == store.Direct {
			// The node and the spine announce the same prefix, and both are
			// reached through one gateway: either may be the best after a restart.
			text = regexp.MustCompile(`nhid \d+ `).ReplaceAllString(text, "")
		}
		return text
	}
	before := routes()
	if err := l.Kill(await.Context(t), "node1", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitMore(t, flows, 100)
	if err := l.Restart(await.Context(t), "node1"); err != nil {
		t.Fatal(err)
	}
	waitMore(t, flows, 200)
	if m.encap == store.Direct {
		waitSessions(t, l)
	}
	for _, f := range flows {
		r := f.Stop()
		if r.Lost() != 0 || r.Duplicates != 0 || r.Complaints != 0 {
			t.Errorf("packets were lost: %s", r)
		}
	}
	if after := routes(); after != before {
		t.Errorf("routes of node1 changed\nbefore:\n%s\nafter:\n%s", before, after)
	}
}

func waitMore(t *testing.T, flows []*traffic.Flow, n int) {
	t.Helper()
	for _, f := range flows {
		if err := f.WaitReceived(await.Context(t), f.Report().Received+n); err != nil {
			t.Error(err)
		}
	}
}

// waitSessions waits until every BGP session of node1 is up again.
func waitSessions(t *testing.T, l *lab.Lab) {
	t.Helper()
	poll(t, "BGP sessions of node1", func() string {
		r, err := l.Node(await.Context(t), "node1")
		if err != nil {
			return err.Error()
		}
		for _, p := range r.GetPeers() {
			if p.GetState() != "up" {
				return p.String()
			}
		}
		return ""
	})
}

// testFamilyStatus reads what routerctl shows of both families.
func testFamilyStatus(t *testing.T, l *lab.Lab, m familyMode) {
	r, err := l.Node(await.Context(t), "node1")
	if err != nil {
		t.Fatal(err)
	}
	if has := r.GetIpv4Address() != ""; has != (m.underlay != lab.UnderlayIPv6) {
		t.Errorf("IPv4 address %q", r.GetIpv4Address())
	}
	if has := r.GetIpv6Address() != ""; has != (m.underlay != lab.UnderlayIPv4) {
		t.Errorf("IPv6 address %q", r.GetIpv6Address())
	}
	switch base := modeOf(m.encap); base.far {
	case "vxlan":
		if r.GetVxlanTunnelAddress() == "" || r.GetVxlanTunnelAddressV6() == "" {
			t.Errorf("VXLAN tunnel addresses %q and %q", r.GetVxlanTunnelAddress(), r.GetVxlanTunnelAddressV6())
		}
	case "ipip":
		if r.GetIpipTunnelAddress() == "" || r.GetIpipTunnelAddressV6() == "" {
			t.Errorf("IPIP tunnel addresses %q and %q", r.GetIpipTunnelAddress(), r.GetIpipTunnelAddressV6())
		}
	}
	families := map[bool]int{}
	for _, b := range r.GetBlocks() {
		families[strings.Contains(b.GetCidr(), ":")]++
	}
	if families[false] == 0 || families[true] == 0 {
		t.Errorf("blocks %v; want some of each family", r.GetBlocks())
	}
	for _, p := range r.GetPools() {
		if !p.GetUsable() {
			t.Errorf("pool %s is not served: %s", p.GetName(), p.GetReason())
		}
	}
	for _, host := range l.Hosts() {
		await.Until(t, "the doctor of "+host+" finds that the kernel sends all packets where they are to go", func() error {
			out, err := tryRouterctl(t, l, host, "", "doctor") // its exit code is of what it finds
			for line := range strings.Lines(out) {
				if strings.Contains(line, " way ") {
					return errors.New(out)
				}
			}
			if out == "" {
				return err
			}
			return nil
		})
	}
}
