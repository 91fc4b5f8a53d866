package survey

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/rule"
)

// ours marks rules of routerd's in these tests.
const ours = 77

// enter moves the test into a network namespace of its own with a pair of devices: a0,
// which has 10.1.0.1/24, and b0, which has another MAC. The thread is never unlocked, so
// the namespace ends with the test.
func enter(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace (these tests need root): %v", err)
	}
	run(t, "ip link set lo up", "ip link add a0 type veth peer name b0", "ip link set a0 up", "ip link set b0 up", "ip addr add 10.1.0.1/24 dev a0")
}

func run(t *testing.T, commands ...string) {
	t.Helper()
	for _, c := range commands {
		if out, err := exec.Command("sh", "-c", c).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", c, err, out)
		}
	}
}

func look(t *testing.T) Host {
	t.Helper()
	h, err := Look(ours, "/proc/thread-self/root/proc/sys")
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestLook: what other programs have is seen, and neither the kernel's nor our own.
func TestLook(t *testing.T) {
	enter(t)
	if h := look(t); len(h.Rules)+len(h.Chains)+len(h.Fixed) > 0 {
		t.Errorf("of a new namespace: %+v", h)
	}
	run(t,
		"ip rule add priority 10 from 192.168.0.0/16 lookup 100", "ip -6 rule add priority 11 not to fd00::/16 iif a0 fwmark 0x5 blackhole",
		"ip rule add priority 12 oif a0 lookup 7747 proto 77", "ip rule add priority 13 to 10.0.0.0/8 dport 80 prohibit",
		"nft add table ip fw", "nft add chain ip fw FORWARD '{ type filter hook forward priority 0; policy drop; }'",
		"nft add chain ip fw INPUT '{ type filter hook input priority 0; policy drop; }'", "nft add chain ip fw mine",
		"nft add table inet known", "nft add chain inet known f '{ type filter hook forward priority 1; policy drop; }'", "nft add chain inet known sub",
		"nft add rule inet known sub iifname 'cali*' accept", "nft add table ip open", "nft add chain ip open f '{ type filter hook forward priority 2; policy accept; }'",
		"ip neigh add 10.1.0.9 lladdr 02:00:00:00:00:09 nud permanent dev a0", "ip neigh add 10.1.0.8 lladdr 02:00:00:00:00:08 nud stale dev a0",
	)
	h := look(t)
	want := Host{
		Rules: []rule.Rule{
			{Family: dataplane.IPv4, Priority: 10, From: netip.MustParsePrefix("192.168.0.0/16"), Action: "lookup", Table: 100},
			{Family: dataplane.IPv4, Priority: 13, To: netip.MustParsePrefix("10.0.0.0/8"), Narrow: true, Action: "prohibit"},
			{Family: dataplane.IPv6, Priority: 11, Not: true, To: netip.MustParsePrefix("fd00::/16"), In: "a0", Mark: 5, Action: "blackhole"},
		},
		Chains: []Chain{{Family: "inet", Table: "known", Name: "f", Lets: true}, {Family: "ip", Table: "fw", Name: "FORWARD"}},
		Fixed:  []Neighbour{{"a0", netip.MustParseAddr("10.1.0.9"), dataplane.MAC{2, 0, 0, 0, 0, 9}}},
	}
	slices.SortFunc(h.Chains, func(a, b Chain) int { return strings.Compare(a.String(), b.String()) })
	if diff := cmp.Diff(want, h, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}), cmpopts.IgnoreFields(Host{}, "Conntrack", "Neighbours")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := h.Neighbours[dataplane.IPv4]; n.Count < 1 {
		t.Errorf("%d neighbours, want that which ages", n.Count)
	}
	// What String gives, ip(8) takes.
	for _, r := range h.Rules {
		if r.Narrow {
			continue
		}
		family := ""
		if r.Family == dataplane.IPv6 {
			family = "-6 "
		}
		run(t, "ip "+family+"rule del "+r.String(), "ip "+family+"rule add "+r.String())
	}
}

// TestAsk: the kernel says where packets go, and why they do not.
func TestAsk(t *testing.T) {
	enter(t)
	run(t, "ip addr add fd00:1::1/64 dev a0 nodad", "ip addr add fd00:2::1/64 dev b0 nodad", "ip route add fd00:9:1::/64 via fd00:2::2", "ip route add blackhole fd00:9:2::/64",
		"ip route add fd00:9:3::/64 dev b0 table 100", "ip -6 rule add from fd00:1::7 lookup 100", "sysctl -qw net.ipv6.conf.all.forwarding=1",
		"ip addr add 10.2.0.1/24 dev b0", "ip route add 192.168.1.0/24 via 10.2.0.2", "ip route add blackhole 192.168.2.0/24",
		"ip route add 192.168.3.0/24 dev b0 table 100", "ip rule add from 10.1.0.7 lookup 100",
		"sysctl -qw net.ipv4.conf.a0.forwarding=1 net.ipv4.conf.b0.forwarding=0 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.a0.rp_filter=1 net.ipv4.conf.b0.rp_filter=0")
	a, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for name, tt := range map[string]struct {
		from, to, in string
		want         Hop
		err          error
	}{
		"sent":              {"", "192.168.1.5", "", Hop{Device: "b0", Gateway: netip.MustParseAddr("10.2.0.2"), Table: dataplane.MainTable}, nil},
		"forwarded":         {"10.1.0.5", "192.168.1.5", "a0", Hop{Device: "b0", Gateway: netip.MustParseAddr("10.2.0.2"), Table: dataplane.MainTable}, nil},
		"by a rule":         {"10.1.0.7", "192.168.3.5", "a0", Hop{Device: "b0", Table: 100}, nil},
		"on the link":       {"10.1.0.5", "10.2.0.9", "a0", Hop{Device: "b0", Table: dataplane.MainTable}, nil},
		"dropped":           {"10.1.0.5", "192.168.2.5", "a0", Hop{}, ErrForbidden},
		"strict":            {"10.2.0.5", "192.168.1.5", "a0", Hop{}, ErrSource},
		"not forwarding":    {"10.2.0.5", "10.1.0.5", "b0", Hop{}, ErrNotForwarded},
		"no route":          {"", "172.16.0.1", "", Hop{}, ErrNoRoute},
		"no route from far": {"10.1.0.5", "172.16.0.1", "a0", Hop{}, ErrNoRoute},

		"IPv6, sent":      {"", "fd00:9:1::5", "", Hop{Device: "b0", Gateway: netip.MustParseAddr("fd00:2::2"), Table: dataplane.MainTable}, nil},
		"IPv6, forwarded": {"fd00:1::5", "fd00:9:1::5", "a0", Hop{Device: "b0", Gateway: netip.MustParseAddr("fd00:2::2"), Table: dataplane.MainTable}, nil},
		"IPv6, by a rule": {"fd00:1::7", "fd00:9:3::5", "a0", Hop{Device: "b0", Table: 100}, nil},
		"IPv6, dropped":   {"fd00:1::5", "fd00:9:2::5", "a0", Hop{}, ErrForbidden},
		"IPv6, no route":  {"fd00:1::5", "fd00:8::1", "a0", Hop{}, ErrNoRoute},
	} {
		p := Packet{To: netip.MustParseAddr(tt.to), In: tt.in}
		if tt.from != "" {
			p.From = netip.MustParseAddr(tt.from)
		}
		got, err := a.Ask(p)
		if diff := cmp.Diff(tt.want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" || !errors.Is(err, tt.err) {
			t.Errorf("%s: error %v, want %v; (-want +got):\n%s", name, err, tt.err, diff)
		}
	}
	if _, err := a.Ask(Packet{To: netip.MustParseAddr("10.1.0.1"), In: "none0"}); err == nil {
		t.Error("a device that is not there was asked about")
	}
}

// TestStrict: the setting that makes a device strict is named, whether its own or that of all.
func TestStrict(t *testing.T) {
	for _, tt := range []struct{ all, own, want string }{
		{"0", "0", ""},
		{"0", "1", "a0.7"},
		{"1", "1", "a0.7"},
		{"1", "0", "all"},
		{"1", "2", ""},
		{"2", "1", ""},
	} {
		enter(t)
		run(t, "ip link set b0 name a0.7", "sysctl -qw net/ipv4/conf/all/rp_filter="+tt.all+" net/ipv4/conf/a0.7/rp_filter="+tt.own)
		if got := Strict("/proc/thread-self/root/proc/sys", "a0.7"); got != tt.want {
			t.Errorf("all %s, own %s: %q, want %q", tt.all, tt.own, got, tt.want)
		}
	}
	if got := Strict("/proc/thread-self/root/proc/sys", "none0"); got != "" {
		t.Errorf("a device that is not there is strict: %q", got)
	}
}

// TestClaims: whoever answers for an address is found, and the one who asks leaves no
// trace.
func TestClaims(t *testing.T) {
	enter(t)
	// Both ends of the pair are in one namespace, so the far end answers for what it has.
	run(t, "ip addr add 10.1.0.7/32 dev b0", "sysctl -qw net.ipv4.conf.all.arp_ignore=1")
	a0, err := net.InterfaceByName("a0")
	if err != nil {
		t.Fatal(err)
	}
	b0, err := net.InterfaceByName("b0")
	if err != nil {
		t.Fatal(err)
	}
	link := dataplane.UnderlayLink{Index: a0.Index, Name: "a0", MAC: dataplane.MAC(a0.HardwareAddr)}
	seven, eight := netip.MustParseAddr("10.1.0.7"), netip.MustParseAddr("10.1.0.8")
	got, err := Claims(t.Context(), link, []netip.Addr{seven, eight}, 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[netip.Addr][]dataplane.MAC{seven: {dataplane.MAC(b0.HardwareAddr)}}, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Claims(ctx, link, []netip.Addr{seven}, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("after it was cancelled: %v", err)
	}
}

// TestEntries: the entry of one neighbour, and of one MAC address on a VXLAN device, is
// what ip(8) and bridge(8) show of it.
func TestEntries(t *testing.T) {
	enter(t)
	run(t, "ip link add v0 type vxlan id 7 dstport 4789 local 10.1.0.1 nolearning", "ip link set v0 up",
		"ip neigh add 10.1.0.9 lladdr 02:00:00:00:00:09 nud permanent dev a0", "ip neigh add 10.1.0.8 nud failed dev a0",
		"ip neigh add fd00::9 lladdr 02:00:00:00:00:08 nud stale dev a0", "bridge fdb add 02:00:00:00:00:07 dev v0 dst 10.1.0.7 self permanent")
	a, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	neighbour := func(addr string) func() (Entry, error) {
		return func() (Entry, error) { return a.Neighbour("a0", netip.MustParseAddr(addr)) }
	}
	for name, tt := range map[string]struct {
		ask      func() (Entry, error)
		want     string
		resolved bool
	}{
		"permanent":    {neighbour("10.1.0.9"), "lladdr 02:00:00:00:00:09 PERMANENT", true},
		"failed":       {neighbour("10.1.0.8"), "FAILED", false},
		"IPv6":         {neighbour("fd00::9"), "lladdr 02:00:00:00:00:08 STALE", true},
		"none":         {neighbour("10.1.0.7"), "none", false},
		"VTEP":         {func() (Entry, error) { return a.Forwarding("v0", dataplane.MAC{2, 0, 0, 0, 0, 7}) }, "dst 10.1.0.7 lladdr 02:00:00:00:00:07 PERMANENT", true},
		"unknown VTEP": {func() (Entry, error) { return a.Forwarding("v0", dataplane.MAC{2, 0, 0, 0, 0, 6}) }, "none", false},
	} {
		got, err := tt.ask()
		if err != nil || got.String() != tt.want || got.Resolved() != tt.resolved {
			t.Errorf("%s: %q, resolved %t, error %v; want %q, %t", name, got, got.Resolved(), err, tt.want, tt.resolved)
		}
	}
	if _, err := a.Neighbour("none0", netip.MustParseAddr("10.1.0.9")); err == nil {
		t.Error("a device that is not there was asked about")
	}
}
