package probe

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// TestSources: a host knows from where the packets of those behind translators come, also
// when a translator takes another address, and after a restart; of what nobody said that
// knows the key, and of what was sent again later, it learns nothing.
func TestSources(t *testing.T) {
	t.Parallel()
	s := newSim(t)
	s.realms["a"] = &realm{name: "a"}
	home := &realm{name: "p", pat: true, public: netip.MustParseAddr("198.51.100.1")}
	s.realms["p"] = home
	rack := s.host("rack1", "", "203.0.113.1", "")
	s.host("rack2", "", "203.0.113.2", "")
	s.host("a1", "a", "10.1.0.1", "198.51.100.9")
	s.host("p1", "p", "10.2.0.1", "")
	s.tell()
	s.run(20 * time.Second)
	check := func(when string, want map[string]string) {
		t.Helper()
		for node, addrs := range want {
			if got := fmt.Sprint(rack.eng.sources(node)); got != addrs {
				t.Errorf("%s: %s sends from %s, want %s", when, node, got, addrs)
			}
		}
	}
	check("at first", map[string]string{"rack2": "[]", "a1": "[198.51.100.9]", "p1": "[198.51.100.1]"})
	if !rack.eng.moved["a1"] || rack.eng.moved["rack2"] {
		t.Errorf("to be published: %v", rack.eng.moved)
	}

	home.public, home.mappings = netip.MustParseAddr("198.51.100.2"), nil
	s.run(time.Minute)
	check("by another address", map[string]string{"p1": "[198.51.100.1 198.51.100.2]"})
	s.run(2 * sourceFor)
	check("long after", map[string]string{"p1": "[198.51.100.2]"})

	forged := message{kind: kindRequest, from: "p1", to: "rack1", nonce: 1, time: s.now.Add(-time.Minute).UnixNano()}
	rack.eng.arrived(s.now, localEnd{rack.addr, rack.encap}, netip.MustParseAddrPort("192.0.2.66:4789"), forged)
	rack.eng.arrived(s.now, localEnd{rack.addr, rack.encap}, netip.MustParseAddrPort("192.0.2.66:4789"), message{kind: kindAnswer, from: "p1", to: "rack1", nonce: 1})
	check("after a replay", map[string]string{"p1": "[198.51.100.2]"})

	kept := rack.eng.known()
	rack.start(s)
	rack.eng.seed(s.now, kept)
	check("after a restart", map[string]string{"a1": "[198.51.100.9]", "p1": "[198.51.100.2]"})
	s.tell()
	check("after a restart, with its targets", map[string]string{"a1": "[198.51.100.9]", "p1": "[198.51.100.2]"})
	if got := rack.eng.sourcesOf(peerKey{"p1", dataplane.IPv6}); got != nil {
		t.Errorf("in the other family %v", got)
	}
}
