package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/integration/lab/ns"
)

// plainPair is two hosts whose packets travel through VXLAN, with routes that say so,
// and what probes of plain packets take.
func plainPair(t *testing.T) (*pair, Target) {
	t.Helper()
	p := newPair(t, overVXLAN())
	for i, s := range []string{p.a, p.b} {
		p.do(s, func() error {
			l, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			to := inner(1 - i)
			return errors.Join(
				netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: netlink.NewIPNet(to.AsSlice()), Gw: to.AsSlice(), Flags: int(netlink.FLAG_ONLINK)}),
				os.WriteFile("/proc/sys/net/ipv4/conf/eth0/rp_filter", []byte("2"), 0))
		})
	}
	p.do(p.a, func() error {
		r, err := rule.Open(77)
		if err != nil {
			return err
		}
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(r.Add(dataplane.IPv4, "eth0"), r.Close(), netlink.RouteAdd(&netlink.Route{
			LinkIndex: l.Attrs().Index, Dst: netlink.NewIPNet(inner(1).AsSlice()), Gw: outer(1).AsSlice(), Table: rule.Table, Flags: int(netlink.FLAG_ONLINK),
		}))
	})
	return p, Target{
		ProbeTarget: &dataplane.ProbeTarget{
			Node: "node2", Registered: outer(1), Peer: inner(1), Gateway: outer(1), ProbePath: &dataplane.ProbePath{
				Family: dataplane.IPv4, Encap: dataplane.Encap{Driver: dataplane.DriverDirect},
				Tunnel: dataplane.ProbeTunnel{Inner: dataplane.IPv4, Link: "eth0", MTU: 1500, Local: inner(0)},
			},
		},
		Accepts: true,
	}
}

// answerPlain has the second host answer plain packets.
func (p *pair) answerPlain(devices ...string) {
	p.t.Helper()
	links := map[int]bool{}
	p.do(p.b, func() error {
		for _, d := range devices {
			l, err := net.InterfaceByName(d)
			if err != nil {
				return err
			}
			links[l.Index] = true
		}
		return nil
	})
	allow := newAsking()
	allow.setKey(testKey)
	allow.replace(nil, []netip.Addr{inner(0)})
	r := &plainResponder{at: netip.AddrPortFrom(inner(1), testPort), log: slog.New(slog.DiscardHandler), allow: allow, outside: &outside{links: links}}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := ns.Do(p.b, func() error { return r.run(ctx) }); !errors.Is(err, context.Canceled) {
			p.t.Error(err)
		}
	})
	p.t.Cleanup(func() { cancel(); wg.Wait() })
}

// found waits until plain packets are judged as wanted.
func (p *pair) found(t Target, want dataplane.Answer, reason string) {
	p.t.Helper()
	p.settled(t, func(_ Finding, v verdict) string {
		if v.result != want || !strings.Contains(v.reason, reason) {
			return fmt.Sprintf("want %v with %q", want, reason)
		}
		return ""
	})
}

// TestPlainSockets: plain packets are known to get to a peer while all routes lead
// through the tunnel, beside a responder inside of it.
func TestPlainSockets(t *testing.T) {
	t.Parallel()
	p, target := plainPair(t)
	p.found(target, dataplane.Unknown, "nobody answers probes") // the peer's kernel says so
	p.answer(inner(0))
	p.answerPlain("eth0")
	p.found(target, dataplane.Yes, "")
	p.eventually() // the one inside the tunnel answers too

	// A strict host drops what comes plainly and is answered through the tunnel.
	p.do(p.b, func() error { return os.WriteFile("/proc/sys/net/ipv4/conf/eth0/rp_filter", []byte("1"), 0) })
	p.found(target, dataplane.No, "do the routers between know the route")
	target.Accepts = false
	p.found(target, dataplane.Unknown, "says of no prober")
}

// TestPlainThroughTunnel: what came by a tunnel is no plain packet.
func TestPlainThroughTunnel(t *testing.T) {
	t.Parallel()
	p, target := plainPair(t)
	p.answerPlain("eth0")
	p.found(target, dataplane.Yes, "")
	target = target.with(func(t *dataplane.ProbeTarget) { t.Tunnel.Link = device })
	p.found(target, dataplane.No, "no answer")
}

// TestPlainFlows: one of several routers on the way does not know the route.
func TestPlainFlows(t *testing.T) {
	t.Parallel()
	p, target := plainPair(t)
	p.answerPlain("eth0")
	p.found(target, dataplane.Yes, "")
	p.do(p.b, func() error {
		out, err := exec.Command("nft", "add table ip lossy; add chain ip lossy in { type filter hook prerouting priority 0; }; add rule ip lossy in udp sport & 1 == 1 drop").CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	p.found(target, dataplane.No, "of 4 flows")
}

// plainTarget is [target] of plain packets.
func plainTarget(node string) Target {
	return target(node).with(func(t *dataplane.ProbeTarget) {
		t.Encap = dataplane.Encap{Driver: dataplane.DriverDirect}
		t.Tunnel.Link, t.Gateway, t.Tunnel.InUse = "eth0", netip.MustParseAddr("10.0.0.1"), true
	})
}

// TestPlainIsForgotten: what was found holds for the change under way, over a restart
// too, and for no later one. The uplink's offloads are left alone.
func TestPlainIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "probes.json")
		n := newNetwork()
		w := tunnelView{key: testKey, tunnels: []Target{plainTarget("a")}}
		begin := func() (p *Prober, stop func()) {
			p, stop = start(t, n, file)
			p.show(t, w)
			pass(time.Second)
			return p, stop
		}
		measured := 0
		expect := func(p *Prober, delivers string, anew bool) {
			t.Helper()
			// What is not answered is asked again by chance within the second.
			if s, now := p.status(t), n.count("a"); s.GetDelivers() != delivers || now > measured != anew {
				t.Errorf("measured %d times, %d before: %v; want %q, and anew: %t", now, measured, s, delivers, anew)
			}
			measured = n.count("a")
		}
		p, stop := begin()
		expect(p, "yes", true)
		stop()
		p, stop = start(t, n, file)
		p.show(t, w)
		expect(p, "yes", false) // from disk, before there is time to ask
		p.show(t, tunnelView{key: testKey})
		n.set(func() { n.silent["a"] = true })
		p.show(t, w)
		pass(time.Second)
		expect(p, "no", true)
		stop()
		n.set(func() { n.silent["a"] = false })
		p, stop = begin()
		expect(p, "yes", true)
		stop()
		pass(2 * plainHolds)
		n.set(func() { n.silent["a"] = true })
		p, stop = begin()
		expect(p, "no", true)
		stop()
		if len(n.on) > 0 {
			t.Errorf("offloads of the uplink were set: %v", n.on)
		}
	})
}

// TestJudgePlain is what findings about plain packets mean.
func TestJudgePlain(t *testing.T) {
	t.Parallel()
	all := Count{Sent: plainFlows}
	for _, tt := range []struct {
		name    string
		finding Finding
		err     error
		mute    bool // the peer says of no prober
		want    dataplane.Answer
		reason  string
	}{
		{"all get there", Finding{Answered: true, Flows: Count{4, 4}}, nil, false, dataplane.Yes, ""},
		{"some get there", Finding{Answered: true, Flows: Count{4, 3}}, nil, false, dataplane.No, "only 3 got there"},
		{"none gets there", Finding{Flows: all}, nil, false, dataplane.No, "no answer"},
		{"a node of Calico's", Finding{Flows: all}, nil, true, dataplane.Unknown, "no prober"},
		{"nobody listens", Finding{Flows: all, Refused: true}, nil, false, dataplane.Unknown, "nobody answers probes"},
		{"not measured", Finding{Flows: all}, unix.EADDRNOTAVAIL, false, dataplane.No, "cannot assign"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tg := plainTarget("a")
			tg.Accepts = !tt.mute
			v := judge(tg, tt.finding, tt.err)
			if v.result != tt.want || !strings.Contains(v.reason, tt.reason) || v.need != 0 {
				t.Errorf("%+v; want %v with %q", v, tt.want, tt.reason)
			}
		})
	}
}
