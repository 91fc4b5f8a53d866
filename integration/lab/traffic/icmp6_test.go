package traffic

import (
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/integration/await"
)

// wire6 is wire with IPv6 addresses: a is fd00:1::2, b is fd00:2::2, and the
// second wire takes 1400 bytes only.
func wire6(t *testing.T, name string) (a, r, b string) {
	t.Helper()
	a, r, b = wire(t, name)
	run(t, strings.NewReplacer("A", a, "R", r, "B", b).Replace(`
ip -n B link set eth0 mtu 1400; ip -n R link set right mtu 1400
ip netns exec R sysctl -qw net.ipv6.conf.all.forwarding=1
ip -n A addr add fd00:1::2/64 dev eth0 nodad
ip -n B addr add fd00:2::2/64 dev eth0 nodad
ip -n R addr add fd00:1::1/64 dev left nodad
ip -n R addr add fd00:2::1/64 dev right nodad
ip -n A route add default via fd00:1::1
ip -n B route add default via fd00:2::1`))
	return a, r, b
}

func TestPing6(t *testing.T) {
	t.Parallel()
	a, _, _ := wire6(t, "ping6")
	far, near := netip.MustParseAddr("fd00:2::2"), netip.MustParseAddr("fd00:1::1")
	// Until the kernel has taken up the addresses nothing is to be learnt.
	warm, err := Probe(await.Context(t), a, []netip.Addr{far, near}, Options{IPv6: true})
	if err != nil || !warm[far].OK || !warm[near].OK {
		t.Fatalf("%v, %v", warm, err)
	}
	for _, tt := range []struct {
		name    string
		dst     netip.Addr
		o       Options
		wantTTL int // 0: no answer
		wantErr string
	}{
		{"neighbour", near, Options{}, 64, ""},
		{"through the router", far, Options{}, 63, ""},
		{"as large as the path takes", far, Options{Size: 1400, DF: true}, 63, ""},
		{"too large for the path", far, Options{Size: 1401, DF: true}, 0, "packet too big, mtu 1400 (from fd00:1::1)"},
		{"hop limit used up", far, Options{TTL: 1}, 0, "time to live exceeded (from fd00:1::1)"},
		{"no such host", netip.MustParseAddr("fd00:9::9"), Options{}, 0, "network unreachable (from fd00:1::1)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, err := Ping(await.Context(t), a, tt.dst, tt.o)
			if err != nil {
				t.Fatal(err)
			}
			if r.OK != (tt.wantTTL != 0) || r.OK && r.TTL != tt.wantTTL || r.Err != tt.wantErr {
				t.Errorf("%+v, want TTL %d, error %q", r, tt.wantTTL, tt.wantErr)
			}
			if want := max(tt.o.Size, MinSize6); r.OK && r.Size != want {
				t.Errorf("the answer has %d bytes, want %d", r.Size, want)
			}
		})
	}
}

// A flow over IPv6 counts what a broken wire loses.
func TestFlow6(t *testing.T) {
	t.Parallel()
	a, r, _ := wire6(t, "flow6")
	f, err := StartFlow(t.Context(), a, netip.MustParseAddr("fd00:2::2"), 200, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.WaitReceived(await.Context(t), 20); err != nil {
		t.Fatal(err)
	}
	run(t, "ip -n "+r+" link set right down")
	sent := f.Report().Sent
	await.True(t, "more requests", func() bool { return f.Report().Sent >= sent+20 })
	if rep := f.Stop(); rep.Lost() == 0 {
		t.Errorf("a broken wire lost nothing: %s", rep)
	}
}

// Whatever a packet says, reading it does not fail.
func TestParse6Garbage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, "packet")
		oob := rapid.SliceOfN(rapid.Byte(), 0, 64).Draw(t, "control")
		c := &conn{v6: true}
		if m, ok := c.parse6(b, oob, nil); ok {
			t.Fatalf("without a sender: %+v", m)
		}
		_ = hopLimit(oob)
	})
}
