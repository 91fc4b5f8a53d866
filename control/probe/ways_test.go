package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/integration/await"
)

func inner6(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00::%d", i+1)) }

// vtep is the gateway that stands for a peer's end of VXLAN.
func vtep(i int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fe80::6400:ff:fe00:%d", i+1)) }

// into is a tunnel for IPv6 to a node, which is not in use.
func into(node string, i int) Target {
	return target(node).with(func(t *dataplane.ProbeTarget) {
		t.Peer, t.Gateway, t.Tunnel.Inner, t.Tunnel.Local = inner6(i), vtep(i), dataplane.IPv6, inner6(0)
	})
}

func inUse(t Target) Target { return t.with(func(t *dataplane.ProbeTarget) { t.Tunnel.InUse = true }) }

// ways lists the routes of the probes, and how many want each rule.
func (n *simulated) ways() map[string]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[string]string{}
	for link, users := range n.rules {
		out["rule of "+link] = fmt.Sprint(users)
	}
	for _, o := range n.routes {
		if r, ok := o.(dataplane.Route); ok {
			hop, _ := n.routes[dataplane.NextHop{ID: r.NextHop}.Key()].(dataplane.NextHop)
			out[r.Prefix.Addr().String()] = fmt.Sprint(hop.Gateway, " ", hop.Link)
		}
	}
	if len(n.routes) != 2*(len(out)-len(n.rules)) {
		out["next hops without a route"] = fmt.Sprint(n.routes)
	}
	return out
}

// TestWays: for as long as a tunnel that takes a route is a target and not in use there is
// one, whether or not this host measures; that of plain packets is there only meanwhile.
func TestWays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p, stop := start(t, n, "")
		expect := func(when string, want map[string]string) {
			t.Helper()
			if d := cmp.Diff(want, n.ways()); d != "" {
				t.Errorf("%s (-want +got):\n%s", when, d)
			}
		}
		show := func(tunnels ...Target) {
			t.Helper()
			p.show(t, tunnelView{key: testKey, tunnels: tunnels})
			pass(10 * time.Second)
		}
		a, b := into("a", 1), into("b", 2)
		to := func(i int, link string) string { return vtep(i).String() + " " + link }
		show(a, b, target("c"))
		expect("all is measured", map[string]string{"fd00::2": to(1, device), "fd00::3": to(2, device), "rule of " + device: "2"})
		show(a, inUse(b), target("c"))
		expect("one is in use", map[string]string{"fd00::2": to(1, device), "rule of " + device: "1"})
		moved := a.with(func(t *dataplane.ProbeTarget) { t.Gateway, t.Tunnel.Link = vtep(3), "vxlan6-2" })
		show(moved, b)
		expect("another gateway and device, and not in use any more", map[string]string{
			"fd00::2": to(3, "vxlan6-2"), "rule of vxlan6-2": "1", "fd00::3": to(2, device), "rule of " + device: "1",
		})

		// Plain packets to the same address are measured beside the tunnel.
		n.set(func() { n.delay = time.Minute })
		plain := a.with(func(t *dataplane.ProbeTarget) {
			t.Encap, t.Gateway, t.Tunnel.Link = dataplane.Encap{Driver: dataplane.DriverDirect}, netip.MustParseAddr("fe80::1"), "eth0"
		})
		show(a, plain)
		n.set(func() {
			if len(n.routes) != 4 || n.rules["eth0"] != 1 || n.rules[device] != 1 {
				t.Errorf("plain packets are measured: %v, rules %v", n.routes, n.rules)
			}
		})
		pass(2 * time.Minute)
		expect("plain packets have been measured", map[string]string{"fd00::2": to(1, device), "rule of " + device: "1"})

		show(inUse(a))
		expect("all are in use", map[string]string{})
		n.set(func() { n.unruled, n.delay = errors.New("no memory"), time.Millisecond })
		show(a)
		expect("a rule that was refused", map[string]string{"fd00::2": to(1, device)})
		if _, err := p.Tunnels(t.Context(), []string{"a"}, false); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		expect("it is asked for again by the next measurement", map[string]string{"fd00::2": to(1, device), "rule of " + device: "1"})
		stop()
		expect("stopped", map[string]string{})
	})
}

// never measures nothing.
type never struct{}

func (never) Measure(context.Context, Target, []byte) (Finding, error) {
	return Finding{}, errors.New("it is the other host that measures")
}

// TestAnswerWithoutRoute: a host answers through a tunnel for IPv6 that neither host uses,
// though it does not measure it at the time.
func TestAnswerWithoutRoute(t *testing.T) {
	t.Parallel()
	via := overVXLAN()
	via.at = inner6
	p := newPair(t, via)
	hosts := make([]*tunnels, 2)
	for i, space := range []string{p.a, p.b} {
		c := TunnelConfig{Enabled: true, Sink: newKernelIn(t, space), Measure: never{}, Port: testPort}
		p.do(space, func() error {
			r, err := rule.Open(77)
			if err != nil {
				return err
			}
			t.Cleanup(func() {
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			})
			c.Rules = r
			l, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			return errors.Join(
				netlink.AddrAdd(l, &netlink.Addr{IPNet: netlink.NewIPNet(inner6(i).AsSlice()), Flags: unix.IFA_F_NODAD}),
				netlink.NeighSet(&netlink.Neigh{
					LinkIndex: l.Attrs().Index, IP: net.IP(vtep(1 - i).AsSlice()), HardwareAddr: mac(1 - i), State: netlink.NUD_PERMANENT,
				}))
		})
		if i == 0 {
			c.Measure = Sockets{Port: testPort}
		}
		hosts[i] = newTunnels(c, slog.New(slog.DiscardHandler), newAsking(), nil)
		hosts[i].set(tunnelView{key: testKey, tunnels: []Target{into(fmt.Sprintf("node%d", 2-i), 1-i).with(func(t *dataplane.ProbeTarget) {
			t.Tunnel.Local = inner6(i)
		})}}, time.Now())
	}
	p.answer(inner6(0))
	measured := func() *attempt {
		var out *attempt
		p.do(p.a, func() error {
			out = hosts[0].measure(t.Context(), into("node2", 1), testKey)
			return nil
		})
		return out
	}
	await.Until(t, "an answer", func() error {
		if a := measured(); !a.finding.Answered || a.err != nil {
			return fmt.Errorf("found %+v, judged %+v, %w", a.finding, a.verdict, a.err)
		}
		return nil
	})
	// Once the answering host knows of no such tunnel it has no route, and no rule.
	hosts[1].set(tunnelView{key: testKey}, time.Now())
	await.Until(t, "no answer", func() error {
		if a := measured(); a.finding.Answered {
			return fmt.Errorf("found %+v", a.finding)
		}
		return nil
	})
	p.do(p.b, func() error {
		if n, err := rule.Sweep(77, true); err != nil || n != 0 {
			t.Errorf("%d rules are left, %v", n, err)
		}
		return nil
	})
}
