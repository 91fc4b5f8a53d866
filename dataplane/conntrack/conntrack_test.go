package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// world is a namespace in which connections are tracked.
type world struct {
	t  *testing.T
	ns *netnstest.Netns
	tb *Table
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, ns: netnstest.New(t)}
	w.run("ip", "link", "set", "lo", "up")
	// A rule that asks for the state of connections makes the kernel keep it.
	w.run("nft", "add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule inet t c ct state new counter")
	err := w.ns.Do(func() (err error) { w.tb, err = Open(); return err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.tb.Close() })
	return w
}

func (w *world) run(args ...string) {
	w.t.Helper()
	err := w.ns.Do(func() error {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// udp sends a packet to a port nobody needs to listen on, and returns the ends.
func (w *world) udp(to string) Flow {
	w.t.Helper()
	var f Flow
	err := w.ns.Do(func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		src, dst := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())
		there := Tuple{src.Addr(), dst.Addr(), src.Port(), dst.Port()}
		f = Flow{Protocol: 17, Orig: there, Reply: Tuple{there.Dst, there.Src, there.DstPort, there.SrcPort}}
		_, err = c.Write([]byte("x"))
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return f
}

func addrs() cmp.Option { return cmp.Comparer(func(a, b netip.Addr) bool { return a == b }) }

// listed returns the UDP connections by the port they go to.
func (w *world) listed() map[uint16]Flow {
	w.t.Helper()
	list, err := w.tb.List()
	if err != nil {
		w.t.Fatal(err)
	}
	flows := map[uint16]Flow{}
	for _, f := range list {
		if f.Protocol == 17 {
			flows[f.Orig.DstPort] = f
		}
	}
	return flows
}

// ends lists the addresses of these tests' connections.
func ends() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("::1")}
}

// Only the connections that are to be cut are, of either family; and only those
// that were cut are renewed. Other bits of the mark stay.
func TestJudge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run("nft", "add rule inet t c udp dport 7002 ct mark set 0x5")
	flows := map[uint16]Flow{}
	for _, to := range []string{"127.0.0.1:7001", "127.0.0.2:7002", "[::1]:7003", "[::1]:7004"} {
		f := w.udp(to)
		if f.Orig.DstPort == 7002 {
			f.Mark = 5
		}
		flows[f.Orig.DstPort] = f
	}
	if d := cmp.Diff(flows, w.listed(), addrs()); d != "" {
		t.Fatalf("connections (-sent +listed):\n%s", d)
	}
	even := func(f Flow) Verdict {
		if f.Protocol == 17 && f.Orig.DstPort%2 == 0 {
			return Cut
		}
		return Keep
	}
	for _, want := range []int{2, 0} {
		if cut, renewed, err := w.tb.Judge(t.Context(), ends(), even); cut != want || renewed != 0 || err != nil {
			t.Errorf("cut %d, renewed %d, %v; want %d cut", cut, renewed, err, want)
		}
	}
	for _, port := range []uint16{7002, 7004} {
		f := flows[port]
		f.Mark |= filter.CutMark
		flows[port] = f
	}
	if d := cmp.Diff(flows, w.listed(), addrs()); d != "" {
		t.Errorf("connections after the cut (-want +listed):\n%s", d)
	}
	if cut, renewed, err := w.tb.Judge(t.Context(), ends(), func(Flow) Verdict { return Renew }); cut != 0 || renewed != 2 || err != nil {
		t.Errorf("cut %d, renewed %d, %v; want 2 renewed", cut, renewed, err)
	}
	delete(flows, 7002)
	delete(flows, 7004)
	if d := cmp.Diff(flows, w.listed(), addrs()); d != "" {
		t.Errorf("connections after the renewal (-want +listed):\n%s", d)
	}
}

// Asked for few addresses the kernel hands over what they began and what really
// goes to them, each connection once; of nobody nothing is looked at.
func TestJudgeOf(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run("nft", "add chain inet t d { type nat hook output priority -100; }; add rule inet t d udp dport 7000 dnat ip to 127.0.0.9:7009")
	for _, to := range []string{"127.0.0.2:7001", "127.0.0.3:7002", "127.0.0.1:7003", "[::1]:7004", "127.0.0.1:7000"} {
		w.udp(to)
	}
	for _, tt := range []struct {
		name string
		of   []string
		want []uint16
	}{
		{"nobody", nil, nil},
		{"no party", []string{"127.0.0.7"}, nil},
		{"where it goes", []string{"127.0.0.2"}, []uint16{7001}},
		{"where it really goes", []string{"127.0.0.9"}, []uint16{7000}},
		{"both ends, and where it comes from", []string{"127.0.0.1"}, []uint16{7000, 7001, 7002, 7003}},
		{"two and another family", []string{"127.0.0.2", "127.0.0.3", "::1"}, []uint16{7001, 7002, 7004}},
		{"IPv6", []string{"::2", "::1"}, []uint16{7004}},
		{"many", []string{"127.0.0.2", "127.1.0.1", "127.1.0.2", "127.1.0.3", "127.1.0.4", "127.1.0.5", "127.1.0.6", "127.1.0.7", "127.0.0.3"}, []uint16{7001, 7002}},
	} {
		var of []netip.Addr
		for _, a := range tt.of {
			of = append(of, netip.MustParseAddr(a))
		}
		var got []uint16
		_, _, err := w.tb.Judge(t.Context(), of, func(f Flow) Verdict {
			if f.Protocol == 17 {
				got = append(got, f.Orig.DstPort)
			}
			return Keep
		})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		slices.Sort(got)
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s: ports (-want +got):\n%s", tt.name, d)
		}
	}
	if list, err := w.tb.ListOf(netip.MustParseAddr("127.0.0.3")); err != nil || len(list) != 1 || list[0].Orig.DstPort != 7002 {
		t.Errorf("of 127.0.0.3: %v, %v", list, err)
	}
}

// What a translation changed is known from the reply.
func TestTranslated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run("nft", "add chain inet t d { type nat hook output priority -100; }; add rule inet t d udp dport 7000 dnat ip to 127.0.0.9:7009")
	w.udp("127.0.0.1:7000")
	list, err := w.tb.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		if f.Orig.DstPort == 7000 {
			if got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort).String(); got != "127.0.0.9:7009" {
				t.Errorf("the connection goes to %s, want 127.0.0.9:7009", got)
			}
			return
		}
	}
	t.Errorf("the connection is not listed: %v", list)
}

// The type of an echo request is known.
func TestICMP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run("ping", "-c1", "-W1", "127.0.0.1")
	w.run("ping", "-c1", "-W1", "::1")
	list, err := w.tb.List()
	if err != nil {
		t.Fatal(err)
	}
	types := map[uint8]uint8{}
	for _, f := range list {
		types[f.Protocol] = f.ICMPType
	}
	if types[1] != 8 || types[58] != 128 {
		t.Errorf("types of echo requests by protocol: %v, want 8 of ICMP and 128 of ICMPv6", types)
	}
}

// A caller that gives up is obeyed before the next connection.
func TestJudgeEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.udp("127.0.0.1:7001")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, _, err := w.tb.Judge(ctx, ends(), func(Flow) Verdict { return Cut }); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("cut %d, %v; want none and the context's error", n, err)
	}
}

// What is no tuple is an error, not a connection without addresses.
func TestDecodeRubbish(t *testing.T) {
	t.Parallel()
	for _, b := range [][]byte{{1}, {8, 0, 1, 0x80, 1, 2}, {12, 0, 1, 0x80, 9, 0, 1, 0x80, 1, 0, 0, 0}} {
		if e, err := decode(b); err == nil {
			t.Errorf("decode % x = %v, want an error", b, e.Flow)
		}
	}
}

// List returns all connections.
func (t *Table) List() ([]Flow, error) {
	four, err := t.list(unix.AF_INET, nil, nil)
	if err != nil {
		return nil, err
	}
	six, err := t.list(unix.AF_INET6, nil, nil)
	return flows(append(four, six...)), err
}
