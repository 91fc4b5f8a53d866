package sourceport

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

func run(t *testing.T, n *netnstest.Netns, command string) string {
	t.Helper()
	var out []byte
	err := n.Do(func() (err error) {
		f := strings.Fields(command)
		out, err = exec.Command(f[0], f[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

// logs collects what is logged.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func open(t *testing.T, n *netnstest.Netns, l *logs) *Table {
	t.Helper()
	var table *Table
	err := n.Do(func() (err error) {
		table, err = Open(slog.New(slog.NewTextHandler(l, nil)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func peers(s ...string) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range s {
		out = append(out, netip.MustParseAddrPort(a))
	}
	return out
}

// ports sends pings through a VXLAN device of a and returns the source ports
// with which they arrive on b.
func ports(t *testing.T, a, b *netnstest.Netns, network, local, to string) map[uint16]bool {
	t.Helper()
	var c net.PacketConn
	if err := b.Do(func() (err error) { c, err = net.ListenPacket(network, local); return err }); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// The hash is of the packet inside: other ports, other source ports.
	err := a.Do(func() error {
		for i := range 20 {
			s, err := net.Dial("udp", net.JoinHostPort(to, strconv.Itoa(20000+i)))
			if err != nil {
				return err
			}
			_, err = s.Write([]byte("x"))
			s.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
		t.Fatal(err)
	}
	seen := map[uint16]bool{}
	buf := make([]byte, 2000)
	for n := 0; n < 20; {
		size, _, err := c.ReadFrom(buf)
		if err != nil {
			t.Fatalf("%d packets arrived: %v", n, err)
		}
		if size > 50 && binary.BigEndian.Uint16(buf[2:]) == 4789 && buf[8+8+12] == 8 && buf[8+8+13] == 0 { // VXLAN with IPv4 inside
			seen[binary.BigEndian.Uint16(buf)] = true
			n++
		}
	}
	return seen
}

func TestSet(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, network, a, b, bits, pin, other string }{
		{"IPv4", "ip4:udp", "10.9.0.1", "10.9.0.2", "/24", "10.9.0.2:4789", "10.9.0.3:4789"},
		{"IPv6", "ip6:udp", "fd00:9::1", "fd00:9::2", "/64", "[fd00:9::2]:4789", "[fd00:9::3]:4789"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a, b := netnstest.New(t), netnstest.New(t)
			run(t, a, "ip link add eth0 type veth peer name eth0 netns "+b.Path)
			for i, n := range []*netnstest.Netns{a, b} {
				me, other := []string{tt.a, tt.b}[i], []string{tt.b, tt.a}[i]
				run(t, n, "ip link set lo up")
				run(t, n, "ip link set eth0 up")
				run(t, n, "ip addr add "+me+tt.bits+" dev eth0 nodad")
				run(t, n, fmt.Sprintf("ip link add vx type vxlan id 4096 dstport 4789 dev eth0 local %s remote %s", me, other))
				run(t, n, "ip link set vx up")
				run(t, n, fmt.Sprintf("ip addr add 10.20.0.%d/24 dev vx", i+1))
			}
			run(t, a, "ping -q -c 1 -W 5 10.20.0.2")
			l := new(logs)
			table := open(t, a, l)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- table.Run(ctx) }()
			defer func() { cancel(); <-ended }()
			check := func(when string, fixed bool) {
				t.Helper()
				got := ports(t, a, b, tt.network, tt.b, "10.20.0.2")
				if fixed != (len(got) == 1 && got[4789]) || !fixed && len(got) < 3 {
					t.Errorf("%s: source ports %v, want fixed: %t", when, got, fixed)
				}
			}
			set := func(s ...string) {
				t.Helper()
				if err := table.Set(4789, peers(s...)); err != nil {
					t.Fatal(err)
				}
			}
			check("before", false)
			set(tt.other)
			check("with another peer", false)
			set(tt.other, tt.pin)
			check("with the peer", true)
			// Packets go both ways and their checksums are right.
			run(t, a, "ping -q -c 1 -W 5 10.20.0.2")
			run(t, a, "nft flush ruleset")
			await.True(t, "the table is put back", func() bool { return strings.Contains(l.String(), "put back") })
			check("after somebody flushed the ruleset", true)
			set()
			check("after", false)
			if out := run(t, a, "nft list ruleset"); out != "" {
				t.Errorf("left behind:\n%s", out)
			}
		})
	}
}

// An administrator sees what it does and for whom; thousands of peers go in one
// transaction, and tables of others stay.
func TestRuleset(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	run(t, n, "nft add table inet theirs")
	table := open(t, n, new(logs))
	defer table.Close()
	var many []netip.AddrPort
	for i := range 3000 {
		many = append(many, netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), uint16(1024+i)))
	}
	if err := table.Set(4790, many); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(run(t, n, "nft list set inet routerd-sourceport peers4"), "198.51."); got != len(many) {
		t.Errorf("%d peers in the kernel, want %d", got, len(many))
	}
	if err := table.Set(4790, peers("198.51.100.1:20001", "[2001:db8::1]:20002")); err != nil {
		t.Fatal(err)
	}
	got := run(t, n, "nft -n list ruleset")
	for _, want := range []string{
		"table inet theirs", "198.51.100.1 . 20001", "2001:db8::1 . 20002", "type filter hook output priority -350; policy accept;",
		"@th,64,8 0x8 ip daddr . udp dport @peers4 udp sport set 4790", "@th,64,8 0x8 ip6 daddr . udp dport @peers6 udp sport set 4790",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("not in the ruleset: %s\n%s", want, got)
		}
	}
}

// After the kernel said no the table is as it was, and the next call works.
func TestRefused(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table := open(t, n, new(logs))
	defer table.Close()
	if err := table.Set(4789, peers("198.51.100.1:1")); err != nil {
		t.Fatal(err)
	}
	before := run(t, n, "nft list ruleset")
	b := replace(4789, peers("198.51.100.2:1"))
	// A rule for a set that is not there.
	b.addRule(2, 16, 4, "nosuchset", 9, 4789)
	refused, err := table.conn.Transaction(unix.NFNL_SUBSYS_NFTABLES, &b.Batch)
	if err != nil {
		t.Fatal(err)
	}
	if after := run(t, n, "nft list ruleset"); len(refused) != 1 || !errors.Is(refused[b.Len()-1], unix.ENOENT) || after != before {
		t.Errorf("refused %v, and the ruleset is\n%s", refused, after)
	}
	if err := table.Set(4789, peers("198.51.100.9:1")); err != nil {
		t.Errorf("Set after a refusal: %v", err)
	}
	if got := run(t, n, "nft list ruleset"); !strings.Contains(got, "198.51.100.9 . 1") {
		t.Errorf("the ruleset is\n%s", got)
	}
}
