package nft

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// offloadWorld is a host that forwards between a workload and a neighbour, whose
// programs have sockets of their own.
//
//	workload ══ cali1 host up0 ══ neighbour
//	                       up1 ══ neighbour
type offloadWorld struct {
	host, workload, neighbour *netnstest.Netns
	offload                   *Offload
	connections               *conntrack.Table
}

// The addresses of the workload and of the neighbour, by family.
var (
	offloadFrom = []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd01::1")}  //nolint:gochecknoglobals // a constant
	offloadTo   = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd02::1")} //nolint:gochecknoglobals // a constant
)

func newOffloadWorld(t *testing.T) *offloadWorld {
	t.Helper()
	w := &offloadWorld{host: netnstest.New(t), workload: netnstest.New(t), neighbour: netnstest.New(t)}
	setting := func(n *netnstest.Netns, files ...string) {
		t.Helper()
		for _, f := range files {
			name, value, _ := strings.Cut(f, "=")
			if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644) }); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, n := range []*netnstest.Netns{w.host, w.workload, w.neighbour} {
		setting(n, "ipv4/conf/all/rp_filter=0", "ipv4/conf/default/rp_filter=0", "ipv6/conf/default/accept_dad=0")
	}
	setting(w.host, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1")
	ip(t, w.host,
		"link add cali1 type veth peer name eth0 netns "+w.workload.Path,
		"link add up0 type veth peer name eth0 netns "+w.neighbour.Path,
		"link add up1 type veth peer name eth1 netns "+w.neighbour.Path,
		"link set cali1 up", "link set up0 up", "link set up1 up",
		"addr add 10.1.255.1/32 dev lo", "addr add fe80::1/64 dev cali1 nodad", "addr add fe80::1/64 dev up0 nodad")
	ip(t, w.workload, "link set lo up", "link set eth0 up", "addr add 10.1.0.1/32 dev eth0", "addr add fd01::1/128 dev eth0 nodad",
		"route add 10.1.255.1 dev eth0", "route add default via 10.1.255.1", "route add default via fe80::1 dev eth0")
	ip(t, w.neighbour, "link set lo up", "link set eth0 up", "link set eth1 up", "addr add 192.0.2.1/32 dev lo",
		"addr add fd02::1/128 dev eth0 nodad", "addr add fd02::1/128 dev eth1 nodad",
		"route add 10.1.255.1 dev eth0", "route add 10.1.0.1 via 10.1.255.1", "route add fd01::1 via fe80::1 dev eth0")
	w.route(t, "up0")
	ip(t, w.host, "route add 10.1.0.1 dev cali1", "route add fd01::1 dev cali1")
	err := w.host.Do(func() (err error) {
		if w.offload, err = OpenOffload(); err != nil {
			return err
		}
		w.connections, err = conntrack.Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(w.offload.Close(), w.connections.Close()) })
	return w
}

// route has the neighbour reached by a device.
func (w *offloadWorld) route(t *testing.T, dev string) {
	t.Helper()
	ip(t, w.host, "route replace 192.0.2.1 dev "+dev, "route replace fd02::1 dev "+dev)
}

// rules puts rules beside that let everything pass but what is cut, and count what
// comes by: of flows that are offloaded no packet does.
func (w *offloadWorld) rules(t *testing.T) *Table {
	t.Helper()
	table := openTable(t, w.host, Config{})
	t.Cleanup(func() { _ = table.Close() })
	err := table.Apply(filter.Delta{
		Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}},
		PutEndpoints: []filter.Endpoint{{
			Interface: "cali1", Sources: prefixes("10.1.0.1/32", "fd01::1/128"),
			Ingress: filter.Path{Default: filter.Allow}, Egress: filter.Path{Default: filter.Allow},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	run(t, w.host, "nft", "add table inet spy; add chain inet spy c { type filter hook prerouting priority -400; }; add counter inet spy seen; add rule inet spy c meta l4proto { tcp, udp } counter name seen")
	return table
}

// seen returns how many packets met the rules.
func (w *offloadWorld) seen(t *testing.T) (packets int) {
	t.Helper()
	out := run(t, w.host, "nft", "list", "counter", "inet", "spy", "seen")
	at := strings.Index(out, "packets ")
	if _, err := fmt.Sscanf(out[max(at, 0):], "packets %d", &packets); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	return packets
}

// devices lists the devices of the world, as they are.
func (w *offloadWorld) devices(t *testing.T, names ...string) []filter.Device {
	t.Helper()
	var list []filter.Device
	err := w.host.Do(func() error {
		for _, name := range names {
			i, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			list = append(list, filter.Device{Name: name, Index: i.Index, Workload: strings.HasPrefix(name, "cali")})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// set offloads the flows of devices. Where the kernel has no flowtable, the test ends,
// but in the stage that is there for it.
func (w *offloadWorld) set(t *testing.T, names ...string) {
	t.Helper()
	err := w.offload.Set(w.devices(t, names...))
	if errors.Is(err, errors.ErrUnsupported) && os.Getenv("ROUTERD_STAGE") != "vm" {
		if out := run(t, w.host, "nft", "list", "tables"); strings.Contains(out, OffloadTable) {
			t.Errorf("a kernel without flowtables was left with\n%s", out)
		}
		t.Skipf("the stage of the virtual machine has it: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// echoed is a flow of numbered packets that are sent back.
type echoed struct {
	from net.Conn
	next byte
}

// echo has the neighbour send back what comes to a port, of which it returns the socket.
func (w *offloadWorld) echo(t *testing.T, to netip.Addr) (l *net.UDPConn) {
	t.Helper()
	err := w.neighbour.Do(func() (err error) {
		l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 7000)))
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			b := make([]byte, 16)
			for {
				n, from, err := l.ReadFromUDPAddrPort(b)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					_, _ = l.WriteToUDPAddrPort(b[:n], from)
				}
			}
		}()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// flow opens a flow from the workload to the neighbour.
func (w *offloadWorld) flow(t *testing.T, from, to netip.Addr) *echoed {
	t.Helper()
	f := new(echoed)
	err := w.workload.Do(func() (err error) {
		f.from, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 7000)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.from.Close() })
	return f
}

// back sends a packet and reports whether it came back within a time.
func (f *echoed) back(t *testing.T, within time.Duration) bool {
	t.Helper()
	f.next++
	if _, err := f.from.Write([]byte{f.next}); err != nil {
		return false
	}
	if err := f.from.SetReadDeadline(time.Now().Add(within)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 16)
	for {
		n, err := f.from.Read(b)
		if err != nil {
			return false
		}
		if n == 1 && b[0] == f.next {
			return true
		}
	}
}

// patience is how long a packet is waited for that is to arrive, and brief how long
// one that is not: it arrives within a millisecond, if it does.
const (
	patience = 30 * time.Second
	brief    = 200 * time.Millisecond
)

// offloaded waits until packets of a flow meet no rule.
func (w *offloadWorld) offloaded(t *testing.T, f *echoed) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		before := w.seen(t)
		if !f.back(t, patience) {
			t.Fatal("a packet of an allowed flow did not come back")
		}
		if w.seen(t) == before {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the flow is not offloaded:\n%s", run(t, w.host, "nft", "list", "table", "inet", OffloadTable))
		}
	}
}

// A flow that is offloaded meets no rules. When the connection is cut and the flowtable
// forgets, its very next packet is dropped; another device, or another route, and
// packets take it.
func TestOffload(t *testing.T) {
	t.Parallel()
	for i, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newOffloadWorld(t)
			w.rules(t)
			w.set(t, "cali1", "up0")
			w.echo(t, offloadTo[i])
			f := w.flow(t, offloadFrom[i], offloadTo[i])
			w.offloaded(t, f)
			// Another device is added and taken out under it.
			w.set(t, "cali1", "up0", "up1")
			if d := cmp.Diff([]string{"cali1", "up0", "up1"}, w.kernelDevices(t)); d != "" {
				t.Errorf("devices of the flowtable (-want +got):\n%s", d)
			}
			w.set(t, "cali1", "up0")
			if d := cmp.Diff([]string{"cali1", "up0"}, w.kernelDevices(t)); d != "" {
				t.Errorf("devices of the flowtable (-want +got):\n%s", d)
			}
			w.offloaded(t, f)
			// It goes where the route leads, from the next packet on.
			run(t, w.neighbour, "nft", "add table netdev gone; add chain netdev gone c { type filter hook ingress device eth0 priority 0; policy drop; }")
			w.route(t, "up1")
			for range 5 {
				if !f.back(t, patience) {
					t.Fatal("a packet went where the route led before")
				}
			}
			run(t, w.neighbour, "nft", "delete table netdev gone")
			w.route(t, "up0")
			w.offloaded(t, f)
			// The mark of a cut does not stop a flow that is offloaded. (The kernel may have
			// taken it out in this very moment, so another flow is tried then.)
			goesOn := false
			for range 5 {
				cut, _, err := w.connections.Judge(t.Context(), []netip.Addr{offloadFrom[i]}, func(conntrack.Flow) conntrack.Verdict { return conntrack.Cut })
				if err != nil || cut == 0 {
					t.Fatalf("cut %d connections, %v", cut, err)
				}
				if goesOn = f.back(t, patience/10); goesOn {
					break
				}
				f = w.flow(t, offloadFrom[i], offloadTo[i])
				w.offloaded(t, f)
			}
			if !goesOn {
				t.Error("the mark alone stops a flow: then nothing shows that the flowtable forgets")
			}
			if err := w.offload.Forget(); err != nil {
				t.Fatal(err)
			}
			for range 5 {
				if f.back(t, brief) {
					t.Fatal("a packet of a connection that is cut came back after the flowtable forgot")
				}
			}
			// Nor is it offloaded again, and of no devices nothing is left.
			if err := w.offload.Set(nil); err != nil {
				t.Fatal(err)
			}
			if out := run(t, w.host, "nft", "list", "tables"); strings.Contains(out, OffloadTable) {
				t.Errorf("what offloads nothing leaves\n%s", out)
			}
		})
	}
}

// Where packets of a connection come by another device than its answers leave by, the
// kernel would offload the answers into the one that they came by, where nobody has them.
// Such a connection takes the way of rules, until both go one way.
func TestOffloadAsymmetric(t *testing.T) {
	t.Parallel()
	for i, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newOffloadWorld(t)
			w.rules(t)
			w.set(t, "cali1", "up0", "up1")
			far := w.echo(t, offloadTo[i])
			f := w.flow(t, offloadFrom[i], offloadTo[i])
			w.offloaded(t, f)
			// As in the middle of a change of encapsulation: this host sends in another way, the
			// neighbour does not yet, and takes nothing in the old one any more. Its packet is the
			// first after the change.
			run(t, w.neighbour, "nft", "add table netdev gone; add chain netdev gone c { type filter hook ingress device eth0 priority 0; policy drop; }")
			w.route(t, "up1")
			near, ok := f.from.LocalAddr().(*net.UDPAddr)
			if !ok {
				t.Fatalf("%T", f.from.LocalAddr())
			}
			for range 3 {
				if _, err := far.WriteToUDP([]byte{0}, near); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 {
				if !f.back(t, patience/10) {
					t.Fatalf("a packet was lost:\n%s", run(t, w.host, "cat", "/proc/net/nf_conntrack"))
				}
			}
			run(t, w.neighbour, "nft", "delete table netdev gone")
			w.route(t, "up0")
			w.offloaded(t, f)
		})
	}
}

func (w *offloadWorld) kernelDevices(t *testing.T) []string {
	t.Helper()
	names, err := w.offload.devices()
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

// A TCP connection goes on while the flowtable forgets it, again and again, and while
// devices go and come; what was sent arrives.
func TestOffloadForgets(t *testing.T) {
	t.Parallel()
	w := newOffloadWorld(t)
	table := w.rules(t)
	w.set(t, "cali1", "up0", "up1")
	var l net.Listener
	err := w.neighbour.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(t.Context(), "tcp", netip.AddrPortFrom(offloadTo[0], 7000).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var out net.Conn
	err = w.workload.Do(func() (err error) {
		out, err = (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", l.Addr().String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	ctx, cancel := context.WithCancel(t.Context())
	got, sent := make(chan int64, 1), make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, in)
		got <- n
	}()
	go func() {
		var n int64
		b := make([]byte, 64<<10)
		for ctx.Err() == nil {
			m, err := out.Write(b)
			n += int64(m)
			if err != nil {
				break
			}
		}
		out.Close()
		sent <- n
	}()
	for i := range 4 {
		if err := w.offload.Forget(); err != nil {
			t.Fatal(err)
		}
		if i == 2 { // the kernel takes a device out by itself that is gone
			ip(t, w.host, "link del up1", "link add up1 type dummy")
			w.set(t, "cali1", "up0", "up1")
		}
	}
	cancel()
	if s, g := <-sent, <-got; s != g || s == 0 {
		t.Errorf("%d bytes arrived of %d", g, s)
	}
	// Of nothing was said that connection tracking does not know it.
	counters, err := table.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range counters {
		if c.Reason == ByInvalid && c.Packets > 0 {
			t.Errorf("%d packets were invalid to connection tracking", c.Packets)
		}
	}
}

// What the kernel refuses leaves nothing offloaded, and the next call finds its way.
func TestOffloadRefused(t *testing.T) {
	t.Parallel()
	w := newOffloadWorld(t)
	w.set(t, "cali1", "up0")
	list := append(w.devices(t, "cali1", "up0"), filter.Device{Name: "cali9", Index: 99, Workload: true})
	if err := w.offload.Set(list); err == nil {
		t.Error("a device that is not there was taken")
	}
	w.set(t, "cali1", "up0")
	if d := cmp.Diff([]string{"cali1", "up0"}, w.kernelDevices(t)); d != "" {
		t.Errorf("devices of the flowtable (-want +got):\n%s", d)
	}
	// Somebody takes the table away.
	run(t, w.host, "nft", "delete", "table", "inet", OffloadTable)
	w.set(t, "cali1")
	if d := cmp.Diff([]string{"cali1"}, w.kernelDevices(t)); d != "" {
		t.Errorf("devices of the flowtable (-want +got):\n%s", d)
	}
}
