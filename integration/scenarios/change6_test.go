package scenarios

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// defaultPool6 is what the first node calls the pool of IPv6.
const defaultPool6 = "default-ipv6-ippool"

// TestModeChangesIPv6 is TestModeChanges for pods of both families, with IPv6
// between them, whose pools change together.
func TestModeChangesIPv6(t *testing.T) {
	beside(t)
	way := changesOfStage(t)
	top := topology(3, 2, way[0])
	top.Underlay, top.Pool6, top.Spine.BGP = lab.UnderlayDual, &lab.Pool{}, new(true)
	c := &changing{Lab: bringUp(t, "change6", top)}
	c.store = openStore(t, c.Lab)
	reach(t, c.Lab, traffic.Options{IPv6: true})
	c.waitMode6(t, way[0])
	c.load = startLoad6(t, c.Lab)
	expectNoLoss(t, "before any change", c.load)
	for i := 1; i < len(way); i++ {
		change := fmt.Sprintf("IPv6, %s to %s", way[i-1], way[i])
		start := time.Now()
		c.setMode(t, way[i])
		c.waitMode6(t, way[i])
		t.Logf("%s took %.2f s", change, time.Since(start).Seconds())
		expectNoLoss(t, change, c.load)
		if t.Failed() {
			t.Fatalf("stopped after %s", change)
		}
	}
	for _, six := range []bool{false, true} {
		reach(t, c.Lab, traffic.Options{Size: mtu6(way[len(way)-1]), DF: true, IPv6: six})
	}
}

func place6(t *testing.T, l *lab.Lab, where string) traffic.Place {
	t.Helper()
	return traffic.Place{Name: where, Space: l.Space(where), Addr: addrOf(t, l, where, dataplane.IPv6)}
}

// startLoad6 is startLoad over IPv6.
func startLoad6(t *testing.T, l *lab.Lab) *load {
	t.Helper()
	stream := func(pair [2]traffic.Place) *traffic.Stream {
		s, err := traffic.StartStream(await.Context(t), streamOptions(), pair[0], pair[1])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Stop() })
		return s
	}
	oneProcessor(t, l)
	var out load
	var pairs [][2]traffic.Place
	for _, p := range loadPairs() {
		pair := [2]traffic.Place{place6(t, l, p[0]), place6(t, l, p[1])}
		pairs = append(pairs, pair)
		out.streams = append(out.streams, stream(pair))
	}
	out.beside = stream([2]traffic.Place{place6(t, l, "node1"), place6(t, l, "node3")})
	packets, err := traffic.StartLoad(loadOptions(traffic.LoadOptions{Rate: loadRate()}), pairs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { packets.Stop() })
	out.packets = packets
	return &out
}

// mtu6 is what pods of both families have on an underlay of both.
func mtu6(e store.Encapsulation) int {
	for _, m := range familyModes() {
		if m.underlay == lab.UnderlayDual && m.encap == e {
			return m.mtu
		}
	}
	return 0
}

// waitMode6 is waitMode for both families: every host sends both pools in the
// mode, the tunnels of others are gone and pods have the MTU.
func (c *changing) waitMode6(t *testing.T, e store.Encapsulation) {
	t.Helper()
	want := modeNumbers(e).String()
	pollFor(t, changeWithin(), "change to "+want, func() string {
		forms := c.forms(t)
		for _, h := range c.Hosts() {
			for _, pool := range []string{defaultPool, defaultPool6} {
				if got := forms[h].Sends[pool]; got != want {
					return fmt.Sprintf("%s has moved %s to %q: %+v", h, pool, got, forms[h])
				}
			}
		}
		return ""
	})
	devices := map[string]string{"vxlan-v6.calico": "vxlan", "tunl6.calico": "ipip"}
	for _, h := range c.Hosts() {
		poll(t, "devices of "+h, func() string {
			for d, tunnel := range devices {
				r, err := c.Exec(await.Context(t), h, "ip", "-6", "-br", "addr", "show", "dev", d)
				if err != nil {
					return err.Error()
				}
				if used := strings.Contains(r.Stdout, "/128"); used != (tunnel == modeOf(e).far) {
					return fmt.Sprintf("%s: %q", d, r.Stdout)
				}
			}
			return ""
		})
	}
	waitPodMTU(t, c.Lab, mtu6(e))
}

// TestPathMTU6 puts a link of 1400 bytes between the racks, under pods of both
// families: IPv6 over TCP finds its way, both ways, although routers cut no
// IPv6 packet, neither a pod's nor a tunnel's.
func TestPathMTU6(t *testing.T) {
	beside(t)
	for _, e := range stageModes(t, store.Direct, store.VXLAN, store.IPIP) {
		t.Run(string(e), func(t *testing.T) {
			beside(t)
			top := topology(3, 2, e)
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{}
			l := bringUp(t, "path6-"+strings.ToLower(string(e)), top)
			reach(t, l, traffic.Options{IPv6: true})
			for _, r := range l.Topology().Racks {
				if err := l.SetMTU(r.Name, 1400); err != nil {
					t.Fatal(err)
				}
			}
			for _, pair := range [][2]string{{"node1/pod1", "node3/pod1"}, {"node3/pod1", "node2/pod1"}} {
				tr, err := traffic.Send(await.Context(t), place6(t, l, pair[0]), place6(t, l, pair[1]), 4<<20)
				t.Logf("%s, %s → %s: %s", e, pair[0], pair[1], tr)
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
}
