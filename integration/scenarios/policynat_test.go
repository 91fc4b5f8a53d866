package scenarios

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// sourceSeen sends a datagram and returns where it comes from for the other
// side.
func sourceSeen(t *testing.T, l *lab.Lab, from, to string, f dataplane.Family) (netip.AddrPort, error) {
	t.Helper()
	network := fmt.Sprintf("udp%d", f)
	var server *net.UDPConn
	err := ns.Do(l.Space(to), func() (err error) {
		server, err = net.ListenUDP(network, &net.UDPAddr{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	dst := netip.AddrPortFrom(addrOf(t, l, to, f), server.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	err = ns.Do(l.Space(from), func() error {
		c, err := net.Dial(network, dst.String()) //nolint:noctx // it does not wait
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("x"))
		return err
	})
	if err != nil {
		return netip.AddrPort{}, err
	}
	if err := server.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, src, err := server.ReadFromUDPAddrPort(make([]byte, 64))
	return src, err
}

// seenAs polls until the source is as it should be.
func seenAs(t *testing.T, l *lab.Lab, from, to string, what string, ok func(netip.AddrPort) bool) {
	t.Helper()
	seenOver(t, l, dataplane.IPv4, from, to, what, ok)
	seenOver(t, l, dataplane.IPv6, from, to, what, ok)
}

func seenOver(t *testing.T, l *lab.Lab, f dataplane.Family, from, to string, what string, ok func(netip.AddrPort) bool) {
	t.Helper()
	poll(t, fmt.Sprintf("%s at %s over %s is %s", from, to, f, what), func() string {
		src, err := sourceSeen(t, l, from, to, f)
		if err != nil {
			return err.Error()
		}
		if !ok(src) {
			return "it is " + src.String()
		}
		return ""
	})
}

// testNATOutgoing looks at what workloads look like: as their host where the
// pool says so and they leave the pools, as themselves between pods, with and
// without a tunnel.
func testNATOutgoing(t *testing.T, l *lab.Lab, s store.Store) {
	is := func(where string) func(netip.AddrPort) bool {
		a, b := addrOf(t, l, where, dataplane.IPv4), addrOf(t, l, where, dataplane.IPv6)
		return func(src netip.AddrPort) bool { return src.Addr().Unmap() == a || src.Addr() == b }
	}
	nat := func(on bool) {
		for _, pool := range []string{defaultPool, defaultPool6} {
			_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindIPPool, pool), func(cur store.Object) (any, error) {
				p := store.Clone(cur.Value).(*v3.IPPool)
				p.Spec.NATOutgoing = on
				return p, nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	felix := func(change func(*v3.FelixConfigurationSpec)) { changeFelix(t, s, store.DefaultName, change) }
	nat(true)
	seenAs(t, l, "node1/pod1", "node2", "its host", is("node1"))
	seenAs(t, l, "node1/pod1", "node3", "its host", is("node1"))
	for _, to := range []string{"node1/pod2", "node2/pod1", "node3/pod1"} {
		seenAs(t, l, "node1/pod1", to, "itself", is("node1/pod1"))
	}
	felix(func(f *v3.FelixConfigurationSpec) { f.NATPortRange = &numorstring.Port{MinPort: 41000, MaxPort: 41009} })
	seenAs(t, l, "node1/pod1", "node2", "its host from one of ten ports", func(src netip.AddrPort) bool {
		return is("node1")(src) && src.Port() >= 41000 && src.Port() <= 41009
	})
	for f, address := range map[dataplane.Family]string{dataplane.IPv4: "10.1.0.77", dataplane.IPv6: "fd00:1::77"} {
		felix(func(f *v3.FelixConfigurationSpec) { f.NATOutgoingAddress = address })
		seenOver(t, l, f, "node1/pod1", "node2", address+" from one of ten ports", func(src netip.AddrPort) bool {
			return src.Addr() == netip.MustParseAddr(address) && src.Port() >= 41000 && src.Port() <= 41009
		})
	}
	felix(func(f *v3.FelixConfigurationSpec) { f.NATOutgoingAddress = "" })
	excluded := v3.NATOutgoingExclusionsIPPoolsAndHostIPs
	felix(func(f *v3.FelixConfigurationSpec) { f.NATPortRange, f.NATOutgoingExclusions = nil, &excluded })
	seenAs(t, l, "node1/pod1", "node2", "itself towards an excluded host", is("node1/pod1"))
	felix(func(f *v3.FelixConfigurationSpec) { f.NATOutgoingExclusions = nil })
	seenAs(t, l, "node1/pod1", "node2", "its host again", is("node1"))
	nat(false)
	seenAs(t, l, "node1/pod1", "node2", "itself without natOutgoing", is("node1/pod1"))
	nat(true)
}

// manyPods is how many pods connect as soon as they are there. The 300 that are
// promised are run by ROUTERD_PODS=300: in a run of everything they would be a
// tenth of all.
func manyPods(t *testing.T) int {
	t.Helper()
	text := os.Getenv("ROUTERD_PODS")
	if text == "" {
		return 60
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("ROUTERD_PODS: %v", err)
	}
	return n
}

// testFirstMillisecond attaches pods that connect as soon as their ADD has
// answered, to what they may and to what they must not reach on their host.
func testFirstMillisecond(t *testing.T, l *lab.Lab, _ store.Store) {
	through := countDatagrams(t, l, "node1/pod1", deniedPort)
	serve(t, l, "node1/pod1", unix.IPPROTO_TCP, allowedPort)
	routerctl(t, l, "node1", denyManifest(), "apply", "-f", "-")
	settled(t, l)
	target := addr(t, l, "node1/pod1")
	n := manyPods(t)
	var mu sync.Mutex
	var wg sync.WaitGroup
	var bad []string
	room := make(chan struct{}, 8)
	ctx := within(t, 3*time.Minute)
	start := time.Now()
	for i := range n {
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			where := fmt.Sprintf("node1/early%d", i)
			if _, err := l.AttachPod(ctx, where); err != nil {
				t.Error(err)
				return
			}
			allowed := &attempt{from: where, to: target, protocol: unix.IPPROTO_TCP, port: allowedPort}
			denied := &attempt{from: where, to: target, protocol: unix.IPPROTO_UDP, port: deniedPort}
			err := ns.Do(l.Space(where), func() error { denied.open(); allowed.open(); return errors.Join(denied.err, allowed.err) })
			if err != nil {
				t.Error(err)
				return
			}
			defer unix.Close(denied.fd)
			defer unix.Close(allowed.fd)
			begun := time.Now()
			// The first SYN has to pass: a second one would be sent after a second.
			waitAll(t, []*attempt{allowed}, 20*time.Second)
			mu.Lock()
			defer mu.Unlock()
			if again := synsSent(allowed.fd); !allowed.passed || again > 0 {
				bad = append(bad, fmt.Sprintf("%s: allowed passed %t after %s, %d SYNs sent again (%v)", where, allowed.passed, time.Since(begun), again, allowed.err))
			}
		})
	}
	wg.Wait()
	t.Logf("%d pods attached and connected in %.1f s", n, time.Since(start).Seconds())
	for _, b := range bad {
		t.Error(b)
	}
	if got := through(); got > 0 {
		t.Errorf("%d denied packets passed", got)
	}
}

// synsSent returns how often a connection's segments were sent again.
func synsSent(fd int) int {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return 0
	}
	return int(info.Total_retrans)
}

// countDatagrams counts what arrives at a port until the test ends.
func countDatagrams(t *testing.T, l *lab.Lab, where string, port uint16) func() int64 {
	t.Helper()
	var server net.PacketConn
	err := ns.Do(l.Space(where), func() (err error) {
		server, err = net.ListenPacket("udp", fmt.Sprintf(":%d", port)) //nolint:noctx // closed below
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var n atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 64)
		for {
			if _, _, err := server.ReadFrom(b); err != nil {
				return
			}
			n.Add(1)
		}
	})
	t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	return n.Load
}
