package scenarios

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/middlebox"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// tunnelTo returns what a host's probes found of its VXLAN tunnel to a node.
func tunnelTo(t *testing.T, l *lab.Lab, host, node string) (*apiv1.Tunnel, string) {
	t.Helper()
	c, err := l.Client(host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := apiv1.NewOperatorClient(c).Tunnels(await.Context(t), &apiv1.TunnelsRequest{})
	if err != nil {
		return nil, err.Error()
	}
	for _, tun := range r.GetTunnels() {
		if tun.GetNode() == node && strings.HasPrefix(tun.GetForm(), "vxlan/") {
			return tun, ""
		}
	}
	return nil, fmt.Sprintf("no tunnel to %s among %v %s", node, r.GetTunnels(), r.GetState())
}

// waitTunnel waits until what was found of a tunnel is right.
func waitTunnel(t *testing.T, l *lab.Lab, host, node string, wrong func(*apiv1.Tunnel) string) *apiv1.Tunnel {
	t.Helper()
	var tun *apiv1.Tunnel
	poll(t, "tunnel from "+host+" to "+node, func() string {
		var why string
		if tun, why = tunnelTo(t, l, host, node); why != "" {
			return why
		}
		if why = wrong(tun); why != "" {
			return why + ": " + tun.String()
		}
		return ""
	})
	return tun
}

func delivers(tun *apiv1.Tunnel) string {
	if tun.GetDelivers() != "yes" {
		return "does not deliver"
	}
	return ""
}

// retryTunnels has all tunnels of a host measured anew.
func retryTunnels(t *testing.T, l *lab.Lab, host string) {
	t.Helper()
	c, err := l.Client(host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := apiv1.NewOperatorClient(c).Tunnels(await.Context(t), &apiv1.TunnelsRequest{RetryAll: true}); err != nil {
		t.Fatal(err)
	}
}

// throughput sends over TCP from one pod to another for a moment and returns
// how fast it got there, in Mbit/s. A connection that stalls is not an error.
func throughput(t *testing.T, l *lab.Lab, from, to string, d time.Duration) float64 {
	t.Helper()
	var lis net.Listener
	if err := ns.Do(l.Space(to), func() (err error) {
		lis, err = net.Listen("tcp4", net.JoinHostPort(addr(t, l, to).String(), "0"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	got := make(chan int64, 1)
	end := time.Now().Add(d)
	go func() {
		c, err := lis.Accept()
		if err != nil {
			got <- 0
			return
		}
		defer c.Close()
		_ = c.SetReadDeadline(end)
		n, _ := io.Copy(io.Discard, c) // until the deadline
		got <- n
	}()
	var c net.Conn
	err := ns.Do(l.Space(from), func() (err error) {
		c, err = (&net.Dialer{Deadline: end}).DialContext(t.Context(), "tcp4", lis.Addr().String())
		return err
	})
	if err != nil {
		lis.Close()
		return 0
	}
	defer c.Close()
	_ = c.SetWriteDeadline(end)
	b := make([]byte, 1<<20)
	for {
		if _, err := c.Write(b); err != nil {
			break
		}
	}
	return float64(<-got) * 8 / d.Seconds() / 1e6
}

// testMeasured waits until every tunnel of every host is known to deliver, for
// both families, and outside of the virtual machine with all offloads on and at
// its full size: an emulated processor loses bursts by itself.
func testMeasured(t *testing.T, l *lab.Lab, some bool) {
	t.Helper()
	for _, h := range l.Hosts() {
		poll(t, "tunnels of "+h, func() string {
			tunnels, err := tunnelsOf(t, l, h)
			if err != nil {
				return err.Error()
			}
			if (len(tunnels) > 0) != some {
				return fmt.Sprintf("%d tunnels", len(tunnels))
			}
			for _, tun := range tunnels {
				if !tun.GetInUse() || emulated() && tun.GetDelivers() == "yes" {
					continue
				}
				if tun.GetDelivers() != "yes" || tun.GetReason() != "" || tun.GetDeviceOff() != "" || tun.GetBytesPerSecond() == 0 {
					return tun.String()
				}
			}
			return ""
		})
	}
}

func tunnelsOf(t *testing.T, l *lab.Lab, host string) ([]*apiv1.Tunnel, error) {
	t.Helper()
	c, err := l.Client(host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := apiv1.NewOperatorClient(c).Tunnels(await.Context(t), &apiv1.TunnelsRequest{})
	if err == nil && r.GetState() != "" {
		err = errors.New(r.GetState())
	}
	return r.GetTunnels(), err
}

// A change from plain packets to tunnels: in both families each is measured
// before anything is sent that way, and pods notice nothing.
func TestProbedBeforeUse(t *testing.T) {
	beside(t)
	top := topology(3, 1, store.Direct)
	top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{}
	l := bringUp(t, "before-use", top)
	reach(t, l, traffic.Options{})
	reach(t, l, traffic.Options{IPv6: true})
	flows, stop := startFlows(t, l, [2]string{"node1/pod1", "node2/pod1"}, [2]string{"node3/pod1", "node1/pod1"})
	s := openStore(t, l)
	pools, _, err := s.List(await.Context(t), store.KindIPPool, "")
	if err != nil || len(pools) != 2 {
		t.Fatalf("pools: %v, %v", pools, err)
	}
	// Who has not moved to anything yet has nothing to stay on meanwhile.
	for _, h := range l.Hosts() {
		poll(t, h+" has moved to the pools' mode", func() string {
			o, err := s.Get(await.Context(t), store.ResourceKey(store.KindNode, h))
			if err != nil {
				return err.Error()
			}
			if n, ok := o.Value.(*store.Node); !ok || len(store.NodeEncapsOf(n).Sends) != len(pools) {
				return fmt.Sprintf("%+v", o.Value)
			}
			return ""
		})
	}
	for _, p := range pools {
		_, err := store.Modify(await.Context(t), s, p.Key, func(cur store.Object) (any, error) {
			pool, ok := store.Clone(cur.Value).(*v3.IPPool)
			if !ok {
				return nil, fmt.Errorf("unexpected %T", cur.Value)
			}
			store.SetEncapsulation(pool, store.VXLAN)
			return pool, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range l.Hosts() {
		poll(t, "tunnels of "+h, func() string {
			tunnels, err := tunnelsOf(t, l, h)
			if err != nil {
				return err.Error()
			}
			used := 0
			for _, tun := range tunnels {
				if tun.GetInUse() && tun.GetDelivers() == "yes" {
					used++
				}
			}
			if used != 4 { // two peers, two families
				return fmt.Sprint(tunnels)
			}
			return ""
		})
		for _, inner := range []string{"IPv4", "IPv6"} {
			expectLine(t, l.LogTail(h, 500), `a tunnel was probed.* inner=`+inner+` .*in_use=false result=yes`)
		}
		if out := output(t, l, h, "ip", "-6", "route", "show", "metric", "1073741824"); out != "" {
			t.Errorf("routes of probes are left on %s:\n%s", h, out)
		}
	}
	reach(t, l, traffic.Options{})
	reach(t, l, traffic.Options{IPv6: true})
	waitFlows(t, flows, time.Second)
	stop()
	testMeasured(t, l, true)
}

// What a network card with a broken offload does to tunnels is found, the
// offload is switched off on the tunnel's device, and TCP between pods works
// again; the other hosts' devices and the tunnels within the rack stay as they
// are.
func TestBrokenOffload(t *testing.T) {
	beside(t)
	for _, tt := range []struct {
		name   string
		faults middlebox.Faults
		needs  string
	}{
		{"checksum", middlebox.Faults{Checksum: true}, "checksum off"},
		{"segmentation", middlebox.Faults{Segmentation: true}, "TCP segmentation off, UDP segmentation off"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := bringUp(t, "offload-"+tt.name, topology(3, 1, store.VXLAN))
			pairs := [][2]string{{"node1", "node2"}, {"node1", "node3"}, {"node3", "node1"}, {"node2", "node3"}}
			for _, p := range pairs {
				waitTunnel(t, l, p[0], p[1], delivers)
			}
			near, far := [2]string{"node1/pod1", "node2/pod1"}, [2]string{"node1/pod1", "node3/pod1"}
			healthy := throughput(t, l, far[0], far[1], 2*time.Second)

			if err := l.Break("rack2", tt.faults); err != nil {
				t.Fatal(err)
			}
			broken := throughput(t, l, far[0], far[1], 2*time.Second)
			if broken > healthy/10 {
				t.Errorf("%.1f Mbit/s across the fault, %.1f without: the fault is none", broken, healthy)
			}
			for _, h := range l.Hosts() {
				retryTunnels(t, l, h)
			}
			needs := func(tun *apiv1.Tunnel) string {
				if tun.GetNeedsOff() != tt.needs {
					return "want that it needs " + tt.needs
				}
				return delivers(tun)
			}
			for _, p := range [][2]string{{"node1", "node3"}, {"node3", "node1"}, {"node2", "node3"}} {
				waitTunnel(t, l, p[0], p[1], needs)
			}
			waitTunnel(t, l, "node1", "node2", func(tun *apiv1.Tunnel) string {
				if tun.GetNeedsOff() != "" || tun.GetDeviceOff() != tt.needs {
					return "want that only the device has the offload off"
				}
				return delivers(tun)
			})
			cured := throughput(t, l, far[0], far[1], 2*time.Second)
			t.Logf("TCP between pods across the racks: %.1f Mbit/s before the fault, %.3f with it, %.1f with %s; within the rack then %.1f",
				healthy, broken, cured, tt.needs, throughput(t, l, near[0], near[1], 2*time.Second))
			if cured < 10*broken || cured < healthy/50 {
				t.Errorf("%.1f Mbit/s with the cure", cured)
			}
			expectLine(t, l.LogTail("node1", 500), `offloads of a tunnel spoil packets.*node=node3.*cure="ethtool -K vxlan\.calico tx-`)
			reach(t, l, traffic.Options{})

			testMemory(t, l, needs)
			testMended(t, l, healthy)
		})
	}
}

// A daemon that is started again begins with what worked.
func testMemory(t *testing.T, l *lab.Lab, needs func(*apiv1.Tunnel) string) {
	t.Helper()
	flows, stop := startFlows(t, l, [2]string{"node1/pod1", "node3/pod1"}, [2]string{"node3/pod1", "node1/pod1"})
	if err := l.Restart(await.Context(t), "node1"); err != nil {
		t.Fatal(err)
	}
	waitTunnel(t, l, "node1", "node3", needs)
	waitFlows(t, flows, 500*time.Millisecond)
	stop()
}

// Once the fault is gone and the operator asks, everything is on again.
func testMended(t *testing.T, l *lab.Lab, healthy float64) {
	t.Helper()
	if err := l.Mend("rack2"); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		retryTunnels(t, l, h)
	}
	for _, p := range [][2]string{{"node1", "node3"}, {"node3", "node1"}} {
		waitTunnel(t, l, p[0], p[1], func(tun *apiv1.Tunnel) string {
			if tun.GetNeedsOff() != "" || tun.GetDeviceOff() != "" {
				return "want everything on"
			}
			return delivers(tun)
		})
	}
	mended := throughput(t, l, "node1/pod1", "node3/pod1", 2*time.Second)
	t.Logf("%.1f Mbit/s after the fault is gone", mended)
	if mended < healthy/10 {
		t.Errorf("%.1f Mbit/s after the fault is gone, %.1f before it", mended, healthy)
	}
}

// A path that drops large packets in tunnels and tells nobody: the size that
// gets through is found, and TCP between pods uses it.
func TestBlackhole(t *testing.T) {
	beside(t)
	const path, overhead = 1400, 50
	l := bringUp(t, "blackhole", topology(3, 1, store.VXLAN))
	waitTunnel(t, l, "node1", "node3", delivers)
	healthy := throughput(t, l, "node1/pod1", "node3/pod1", 2*time.Second)
	if err := l.Break("rack2", middlebox.Faults{MTU: path}); err != nil {
		t.Fatal(err)
	}
	stalled := throughput(t, l, "node1/pod1", "node3/pod1", 2*time.Second)
	for _, h := range l.Hosts() {
		retryTunnels(t, l, h)
	}
	for _, p := range [][2]string{{"node1", "node3"}, {"node3", "node1"}} {
		waitTunnel(t, l, p[0], p[1], func(tun *apiv1.Tunnel) string {
			if tun.GetMtu() != path-overhead {
				return fmt.Sprintf("want MTU %d", path-overhead)
			}
			return delivers(tun)
		})
	}
	waitTunnel(t, l, "node1", "node2", func(tun *apiv1.Tunnel) string {
		if tun.GetMtu() != 1450 {
			return "want the whole MTU within the rack"
		}
		return delivers(tun)
	})
	poll(t, "TCP across the path", func() string {
		cured := throughput(t, l, "node1/pod1", "node3/pod1", 2*time.Second)
		if cured < healthy/10 || cured < 5*stalled {
			return fmt.Sprintf("%.1f Mbit/s, %.1f before, %.3f while nothing was known", cured, healthy, stalled)
		}
		t.Logf("TCP between pods across the racks: %.1f Mbit/s before, %.3f with large packets lost, %.1f with the MTU found", healthy, stalled, cured)
		return ""
	})
}
