package scenarios

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// stageModes are the encapsulations of this stage among those given.
func stageModes(t *testing.T, modes ...store.Encapsulation) []store.Encapsulation {
	t.Helper()
	s, err := newStage()
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(modes, func(e store.Encapsulation) bool { return !slices.Contains(s.modes, e) })
}

// TestMTUFollows changes the underlay's MTU under traffic: the pods follow,
// down and up, and what is as large as they then take passes. Nothing is lost
// of packets that every MTU takes; larger ones the underlay itself may drop
// until the pods have followed.
func TestMTUFollows(t *testing.T) {
	beside(t)
	for _, e := range stageModes(t, store.Direct, store.VXLAN, store.IPIP) {
		t.Run(string(e), func(t *testing.T) {
			beside(t)
			m := modeOf(e)
			overhead := 1500 - m.mtu
			l := bringUp(t, "mtu-"+strings.ToLower(string(e)), topology(3, 2, e))
			reach(t, l, traffic.Options{})
			load := startLoad(t, l, loadPairs()...)
			for _, mtu := range []int{1400, 9000, 1500} {
				setUnderlayMTU(t, l, mtu)
				waitPodMTU(t, l, mtu-overhead)
				expectNoLoss(t, fmt.Sprintf("MTU %d", mtu), load)
				reach(t, l, traffic.Options{Size: mtu - overhead, DF: true})
			}
		})
	}
}

// setUnderlayMTU changes every link of the underlay: to a smaller MTU from the
// edge inwards and to a larger one outwards, so that no link sends what the
// next does not take.
func setUnderlayMTU(t *testing.T, l *lab.Lab, mtu int) {
	t.Helper()
	places := l.Hosts()
	for _, r := range l.Topology().Racks {
		places = append(places, r.Name)
	}
	for _, p := range places {
		if err := l.SetMTU(p, mtu); err != nil {
			t.Fatal(err)
		}
	}
}

// waitPodMTU waits until both ends of every pod's wire have this MTU.
func waitPodMTU(t *testing.T, l *lab.Lab, want int) {
	t.Helper()
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		poll(t, "MTU of "+p.String(), func() string {
			in, out, err := l.PodMTU(p.String())
			if err != nil || in != want || out != want {
				return fmt.Sprintf("%d in the pod, %d on the host, %v; want %d", in, out, err, want)
			}
			return ""
		})
	}
}

// TestPathMTU puts a link of 1400 bytes between the racks, which none of the
// hosts sees on its own uplink. Packets that may not be fragmented are answered
// by whoever cannot pass them on, and TCP finds its way, both ways.
func TestPathMTU(t *testing.T) {
	beside(t)
	for _, e := range stageModes(t, store.Direct, store.VXLAN, store.IPIP) {
		t.Run(string(e), func(t *testing.T) {
			beside(t)
			l := bringUp(t, "path-"+strings.ToLower(string(e)), topology(3, 2, e))
			reach(t, l, traffic.Options{})
			for _, r := range l.Topology().Racks {
				if err := l.SetMTU(r.Name, 1400); err != nil {
					t.Fatal(err)
				}
			}
			for _, pair := range [][2]string{{"node1/pod1", "node3/pod1"}, {"node3/pod1", "node2/pod1"}} {
				testNarrowPath(t, l, e, pair[0], pair[1])
				tr, err := l.Send(await.Context(t), pair[0], pair[1], 4<<20)
				t.Logf("%s, %s → %s: %s", e, pair[0], pair[1], tr)
				if err != nil {
					t.Error(err)
				}
			}
			if e == store.Direct {
				return // nothing of ours is on the way that could know better
			}
			// A black hole, between pods that learned nothing before: nobody is told
			// by the network. VXLAN's outer packets may be fragmented; for IPIP the
			// hosts have measured the path.
			if err := l.FilterICMP(await.Context(t), true); err != nil {
				t.Fatal(err)
			}
			for _, pair := range [][2]string{{"node2/pod2", "node3/pod2"}, {"node3/pod2", "node1/pod2"}} {
				tr, err := l.Send(await.Context(t), pair[0], pair[1], 4<<20)
				t.Logf("%s with ICMP filtered, %s → %s: %s", e, pair[0], pair[1], tr)
				if err != nil {
					t.Errorf("with ICMP filtered: %v", err)
				}
			}
		})
	}
}

// testNarrowPath sends packets with DF set over a path of 1400 bytes.
func testNarrowPath(t *testing.T, l *lab.Lab, e store.Encapsulation, from, to string) {
	t.Helper()
	m := modeOf(e)
	overhead := 1500 - m.mtu
	passes := func(size int) {
		t.Helper()
		poll(t, fmt.Sprintf("%d bytes from %s to %s", size, from, to), func() string {
			r, err := l.Ping(await.Context(t), from, to, traffic.Options{Size: size, DF: true})
			if err != nil || !r.OK {
				return fmt.Sprintf("%s, %v", r, err)
			}
			return ""
		})
	}
	if e == store.VXLAN {
		// The inner packet stays whole; the outer one is fragmented on the way.
		passes(m.mtu)
		return
	}
	passes(1400 - overhead)
	// The first packet may only teach the host, by an answer to the outer one.
	poll(t, fmt.Sprintf("answer to %d bytes from %s to %s", m.mtu, from, to), func() string {
		r, err := l.Ping(await.Context(t), from, to, traffic.Options{Size: m.mtu, DF: true})
		if want := fmt.Sprintf("fragmentation needed, mtu %d ", 1400-overhead); err != nil || !strings.Contains(r.Err, want) {
			return fmt.Sprintf("%s, %v; want %s", r, err, want)
		}
		return ""
	})
}

// TestJumbo: hosts with jumbo frames in one rack, hosts without in another.
// Pods have what their own host takes, and all reach all.
func TestJumbo(t *testing.T) {
	beside(t)
	top := topology(3, 1, store.VXLANCrossSubnet)
	top.Racks = []lab.Rack{
		{Name: "rack1", CIDR: top.Racks[0].CIDR, MTU: 9000},
		{Name: "rack2", CIDR: top.Racks[1].CIDR, MTU: 1500},
	}
	l := bringUp(t, "jumbo", top)
	for pod, want := range map[string]int{"node1/pod1": 8950, "node2/pod1": 8950, "node3/pod1": 1450} {
		if in, out, err := l.PodMTU(pod); in != want || out != want || err != nil {
			t.Errorf("MTU of %s: %d inside, %d on the host, %v; want %d", pod, in, out, err, want)
		}
	}
	reach(t, l, traffic.Options{Size: 1450, DF: true})
	r, err := l.Ping(await.Context(t), "node1/pod1", "node2/pod1", traffic.Options{Size: 8950, DF: true})
	if err != nil || !r.OK {
		t.Errorf("jumbo packet between hosts that take it: %s, %v", r, err)
	}
	r, err = l.Ping(await.Context(t), "node1/pod1", "node3/pod1", traffic.Options{Size: 8950, DF: true})
	if want := "fragmentation needed, mtu 1450"; err != nil || !strings.Contains(r.Err, want) {
		t.Errorf("jumbo packet to a host that does not take it: %s, %v; want %q", r, err, want)
	}
	for _, pair := range [][2]string{{"node1/pod1", "node3/pod1"}, {"node3/pod1", "node1/pod1"}, {"node1/pod1", "node2/pod1"}} {
		tr, err := l.Send(await.Context(t), pair[0], pair[1], 8<<20)
		t.Logf("%s → %s: %s", pair[0], pair[1], tr)
		if err != nil {
			t.Error(err)
		}
	}
}
