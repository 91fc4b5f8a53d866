package engine

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// TestExtendedMessages: attributes that need more than 4,096 bytes go in one message to peers that
// accept it, an engine and BIRD, and come from them; where a peer does not, what it had of the prefix
// is withdrawn, and the session and all other prefixes stay (RFC 8654 section 4).
func TestExtendedMessages(t *testing.T) {
	t.Parallel()
	const many = 2000 // communities, of four bytes
	n, far := newNode(t, "127.0.72.1", 65000, nil), newNode(t, "127.0.72.2", 65001, nil)
	of := func(i int, extra, export string) (*program, Peer) {
		theirs := fmt.Sprintf("127.0.72.%d", i)
		b := bird(t, fmt.Sprintf(`router id 10.0.0.%[1]d;
protocol device { }
protocol static { ipv4; route 10.%[1]d.0.0/16 unreachable; }
protocol bgp peer {
	local %[2]s port 17900 as %[3]d; neighbor %[4]s port %[5]d as 65000;
	strict bind yes; multihop; connect delay time 1; connect retry time 1; error wait time 1, 2; %[6]s
	ipv4 { next hop address 192.0.72.%[1]d; import all; export filter { if source != RTS_STATIC then reject; %[7]s accept; }; };
}
`, i, theirs, 65000+i, n.addr, n.at.Port(), extra, export))
		return b, Peer{
			Addr: netip.MustParseAddr(theirs), Port: 17900, AS: uint32(65000 + i), Source: n.addr, HoldTime: 9 * time.Second, ConnectRetry: time.Second,
			Families: [wire.Families]Family{{Enabled: true}},
		}
	}
	var add, sorted strings.Builder
	var list []uint32
	for i := range many {
		fmt.Fprintf(&add, "bgp_community.add((65003,%d)); ", i)
		fmt.Fprintf(&sorted, " 65003:%d", i)
		list = append(list, 65000<<16|uint32(i))
	}
	wide, p3 := of(3, "enable extended messages on;", add.String())
	narrow, p4 := of(4, "", "")
	set(t, n, n.peerOf(far, nil), p3, p4)
	set(t, far, far.peerOf(n, nil))

	announce := func(communities int) {
		n.Announce([]Origin{
			n.origin("10.0.0.0/26", nil),
			n.origin("10.1.0.0/26", func(o *Origin) { o.Communities = list[:communities] }),
			n.origin("2001:db8::/64", func(o *Origin) { o.NextHop, o.Communities = netip.MustParseAddr("2001:db8::1"), list[:communities] }),
		})
	}
	farHas := func(communities int) {
		t.Helper()
		text := strings.ReplaceAll(strings.Join(strings.Fields(sorted.String())[:communities], " "), "65003:", "65000:")
		far.has(t, map[string]string{
			"10.0.0.0/26": "127.0.72.1 via 192.0.72.1 [65000] 0", "10.1.0.0/26": "127.0.72.1 via 192.0.72.1 [65000] 0 " + text,
			"2001:db8::/64": "127.0.72.1 via 2001:db8::1 [65000] 0 " + text,
			"10.3.0.0/16":   "127.0.72.1 via 127.0.72.1 [65000 65003] 0" + sorted.String(), "10.4.0.0/16": "127.0.72.1 via 127.0.72.1 [65000 65004] 0",
		})
	}
	announce(1)
	farHas(1)
	narrow.says(t, "show route protocol peer all", "10.0.0.0/26", "10.1.0.0/26", "(65000,0)", "!10.3.0.0/16")
	wide.says(t, "show route protocol peer all", "10.1.0.0/26", "(65000,0)", "10.4.0.0/16")
	announce(many)
	farHas(many)
	wide.says(t, "show route all 10.1.0.0/26", "(65000,0) (65000,1) (65000,2)")
	narrow.says(t, "show route protocol peer", "10.0.0.0/26", "!10.1.0.0/26")
	announce(1)
	narrow.says(t, "show route protocol peer", "10.0.0.0/26", "10.1.0.0/26")
	farHas(1)

	for _, addr := range []netip.Addr{far.addr, p3.Addr, p4.Addr} {
		if s, _ := n.Peer(addr); s.State != fsm.Established {
			t.Errorf("the session with %s is %s", addr, s.State)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.events {
		if strings.Contains(e, "down") {
			t.Errorf("a session was lost: %q", n.events)
			break
		}
	}
}
