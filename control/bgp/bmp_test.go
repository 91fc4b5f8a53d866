package bgp

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/packet/bmp"

	"github.com/routerd/routerd/store"
)

// station is a BMP collector, on GoBGP's codec.
type station struct {
	at netip.AddrPort

	mu          sync.Mutex
	t           testing.TB
	connections int
	conn        net.Conn
	said        []string          // but for routes
	tables      map[string]string // "post 10.0.0.1 192.168.1.0/26" → path attributes
	ends        map[string]bool   // "pre 10.0.0.1 ipv4-unicast": its End-of-RIB came
}

func newStation(t testing.TB, addr netip.Addr) *station {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	s := &station{t: t, at: l.Addr().(*net.TCPAddr).AddrPort()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.connections++
			s.conn, s.said, s.tables, s.ends = c, nil, map[string]string{}, map[string]bool{}
			s.mu.Unlock()
			s.read(c)
		}
	})
	t.Cleanup(func() {
		l.Close()
		s.hangUp()
		wg.Wait()
	})
	return s
}

func (s *station) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		s.conn.Close()
	}
}

func (s *station) read(c net.Conn) {
	defer c.Close()
	in := bufio.NewScanner(c)
	in.Buffer(nil, 1<<17)
	in.Split(bmp.SplitBMP)
	for in.Scan() {
		m, err := bmp.ParseBMPMessage(in.Bytes())
		s.mu.Lock()
		if err != nil {
			s.t.Errorf("bmp: %v", err)
		} else {
			s.take(m)
		}
		s.mu.Unlock()
	}
}

func (s *station) take(m *bmp.BMPMessage) {
	view := "pre " + m.PeerHeader.PeerAddress.String()
	switch {
	case m.PeerHeader.PeerType == bmp.BMP_PEER_TYPE_LOCAL_RIB:
		view = "loc"
	case m.PeerHeader.IsPostPolicy():
		view = "post " + m.PeerHeader.PeerAddress.String()
	}
	peer := fmt.Sprintf("%s AS %d id %s", view, m.PeerHeader.PeerAS, m.PeerHeader.PeerBGPID)
	switch b := m.Body.(type) {
	case *bmp.BMPInitiation:
		s.said = append(s.said, fmt.Sprintf("begin %s %s", b.Info[0].(*bmp.BMPInfoTLVString).Value, b.Info[1].(*bmp.BMPInfoTLVString).Value))
	case *bmp.BMPTermination:
		s.said = append(s.said, fmt.Sprintf("end %s %d", b.Info[0].(*bmp.BMPTermTLVString).Value, b.Info[1].(*bmp.BMPTermTLV16).Value))
	case *bmp.BMPPeerUpNotification:
		open := func(m *packet.BGPMessage) string {
			o := m.Body.(*packet.BGPOpen)
			return fmt.Sprintf("%d/%s/%d", o.MyAS, o.ID, len(o.OptParams[0].(*packet.OptionParameterCapability).Capability))
		}
		s.said = append(s.said, fmt.Sprintf("up %s at %s ports %t, sent %s", peer, b.LocalAddress, b.LocalPort != 0 && b.RemotePort != 0, open(b.SentOpenMsg)), "received "+open(b.ReceivedOpenMsg))
	case *bmp.BMPPeerDownNotification:
		text := fmt.Sprintf("down %s for %d", peer, b.Reason)
		if b.BGPNotification != nil {
			n := b.BGPNotification.Body.(*packet.BGPNotification)
			text += fmt.Sprintf(" (%d/%d)", n.ErrorCode, n.ErrorSubcode)
		}
		s.said = append(s.said, text)
		maps.DeleteFunc(s.tables, func(k, _ string) bool {
			return strings.HasPrefix(k, view+" ") || strings.HasPrefix(k, "post"+strings.TrimPrefix(view, "pre")+" ")
		})
	case *bmp.BMPStatisticsReport:
		text := "stats " + view
		for _, st := range b.Stats {
			switch st := st.(type) {
			case *bmp.BMPStatsTLV64:
				text += fmt.Sprintf(" %d=%d", st.Type, st.Value)
			case *bmp.BMPStatsTLVPerAfiSafi64:
				text += fmt.Sprintf(" %d/%d=%d", st.Type, st.AFI, st.Value)
			}
		}
		s.said = append(s.said, text)
	case *bmp.BMPRouteMonitoring:
		u := b.BGPUpdate.Body.(*packet.BGPUpdate)
		if end, family := u.IsEndOfRib(); end {
			s.ends[view+" "+family.String()] = true
		}
		for _, p := range u.WithdrawnRoutes {
			delete(s.tables, view+" "+p.NLRI.String())
		}
		for _, p := range u.NLRI {
			var list []string
			for _, a := range u.PathAttributes {
				list = append(list, a.String())
			}
			s.tables[view+" "+p.NLRI.String()] = strings.Join(list, "")
		}
	}
}

func (s *station) dump() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("the collector has %q %v %v (connection %d)", s.said, s.tables, s.ends, s.connections)
}

// heard reports whether the collector has been told a line.
func (s *station) heard(line string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.said, line)
}

// table reports whether exactly these prefixes of a view are there; * stands for any attributes.
func (s *station) table(view string, prefixes ...string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for k := range s.tables {
		if rest, ok := strings.CutPrefix(k, view+" "); ok && !strings.Contains(rest, " ") {
			n++
		}
	}
	for _, p := range prefixes {
		if _, ok := s.tables[view+" "+p]; !ok {
			return false
		}
	}
	return n == len(prefixes)
}

// TestCollectors: collectors are told of sessions and tables as they are and change, each what it
// is to be told, and again all of it after the connection was lost.
func TestCollectors(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	all, chosen := newStation(t, h[0]), newStation(t, h[0])
	us, sw, mate := newRun(t, SpeakerOptions{collectorRetry: 50 * time.Millisecond}), newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	peer := waiting(tor(h[0], h[1], 64999))
	peer.Filters = "f"
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, peer, to(h[0], h[2], 64512))
	c.Filters = map[string]Filter{"f": parse(t, `{"importV4":[{"cidr":"203.0.113.0/24","matchOperator":"Equal","action":"Reject"},
		{"cidr":"198.51.100.0/24","matchOperator":"Equal","action":"Accept","operations":[{"addCommunity":{"value":"64512:9"}}]}]}`)}
	c.Collectors = []store.BMP{
		{Collector: all.at, PrePolicy: true, PostPolicy: true, LocRIB: true, Statistics: time.Second},
		{Collector: chosen.at, LocRIB: true},
	}
	said := testConfig(h[1], 64999, []string{"203.0.113.0/24", "198.51.100.0/24"}, tor(h[1], h[0], 64512))
	us.apply(c)
	sw.apply(said)
	us.waitPath("198.51.100.0/24")
	pre, post, us0 := "pre "+h[1].String(), "post "+h[1].String(), h[0].String()
	expect := func(s *station, what string, cond func() bool) {
		t.Helper()
		poll(t, func() string { return what + ": " + s.dump() }, cond)
	}
	expect(all, "all tables", func() bool {
		return all.table(pre, "203.0.113.0/24", "198.51.100.0/24") && all.table(post, "198.51.100.0/24") && all.table("loc", "198.51.100.0/24", "192.168.1.0/26") &&
			all.heard("begin routerd node-"+us0) && all.heard(fmt.Sprintf("up loc AS 64512 id %s at 0.0.0.0 ports false, sent 64512/%s/3", us0, us0))
	})
	expect(all, "attributes", func() bool {
		all.mu.Lock()
		defer all.mu.Unlock()
		before, after := all.tables[pre+" 198.51.100.0/24"], all.tables[post+" 198.51.100.0/24"]
		return !strings.Contains(before, "64512:9") && strings.Contains(after, "64512:9") && strings.Contains(before, "64999") && strings.Contains(before, h[1].String())
	})
	expect(all, "the session", func() bool {
		all.mu.Lock()
		defer all.mu.Unlock()
		return slices.ContainsFunc(all.said, func(l string) bool {
			return strings.HasPrefix(l, fmt.Sprintf("up %s AS 64999 id %s at %s ports true, sent 64512/%s/", pre, h[1], h[0], h[0]))
		}) && slices.ContainsFunc(all.said, func(l string) bool { return strings.HasPrefix(l, fmt.Sprintf("received 64999/%s/", h[1])) })
	})
	expect(all, "statistics", func() bool {
		return all.heard(fmt.Sprintf("stats %s 7=2 15=1 9/1=2 17/1=1", pre)) && all.heard("stats loc 8=2 10/1=2 10/2=0")
	})
	expect(chosen, "the choice alone", func() bool {
		return chosen.table("loc", "198.51.100.0/24", "192.168.1.0/26") && chosen.table(pre) && chosen.table(post)
	})

	// What changes, is told.
	said.Announce = prefixes("203.0.113.0/24", "192.0.2.0/24")
	sw.apply(said)
	mate.apply(testConfig(h[2], 64512, []string{"192.168.3.0/26"}, to(h[2], h[0], 64512)))
	expect(all, "changes", func() bool {
		return all.table(pre, "203.0.113.0/24", "192.0.2.0/24") && all.table(post, "192.0.2.0/24") && all.table("pre "+h[2].String(), "192.168.3.0/26") &&
			all.table("loc", "192.0.2.0/24", "192.168.1.0/26", "192.168.3.0/26")
	})
	c.Filters = map[string]Filter{"f": parse(t, `{"importV4":[{"cidr":"192.0.2.0/24","matchOperator":"Equal","action":"Reject"}]}`)}
	us.apply(c)
	expect(all, "another filter", func() bool {
		return all.table(post, "203.0.113.0/24") && all.table(pre, "203.0.113.0/24", "192.0.2.0/24")
	})

	// A collector that comes back is told all again; the other one keeps its connection.
	all.hangUp()
	expect(all, "all again", func() bool {
		all.mu.Lock()
		again := all.connections == 2 && all.ends[pre+" ipv4-unicast"] && all.ends[post+" ipv4-unicast"] && all.ends["loc ipv4-unicast"] && all.ends["loc ipv6-unicast"]
		all.mu.Unlock()
		return again && all.table(pre, "203.0.113.0/24", "192.0.2.0/24") && all.table(post, "203.0.113.0/24") && all.table("loc", "203.0.113.0/24", "192.168.1.0/26", "192.168.3.0/26")
	})

	// A session that ends takes its tables with it, for the reason that is told.
	if err := sw.Stop(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	expect(all, "the end of a session", func() bool {
		return all.heard(fmt.Sprintf("down %s AS 64999 id %s for 3 (6/9)", pre, h[1])) && all.table(pre) && all.table(post)
	})
	c.Peers = c.Peers[:1]
	us.apply(c)
	expect(all, "a peer taken away", func() bool { return all.heard(fmt.Sprintf("down pre %s AS 64512 id %s for 5", h[2], h[2])) })

	var status []CollectorStatus
	poll(t, func() string { return fmt.Sprintf("status %+v", status) }, func() bool {
		status = us.Collectors()
		return len(status) == 2 && !slices.ContainsFunc(status, func(s CollectorStatus) bool { return s.State != StateUp || s.Sent == 0 })
	})
	c.Collectors = c.Collectors[:1]
	us.apply(c)
	expect(chosen, "its end", func() bool { return chosen.heard("end the collector is no longer configured 0") })
	chosen.mu.Lock()
	connections := chosen.connections
	chosen.mu.Unlock()
	if connections != 1 {
		t.Errorf("%d connections to a collector that stayed", connections)
	}
	if err := us.Stop(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	expect(all, "the speaker's end", func() bool { return all.heard("end the speaker stops 0") })
}

// TestCollectorAway says why a collector is not connected.
func TestCollectorAway(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)
	us := newRun(t, SpeakerOptions{})
	c := testConfig(h[0], 64512, nil)
	c.Collectors = []store.BMP{{Collector: netip.AddrPortFrom(h[0], 1), LocRIB: true}}
	us.apply(c)
	var status []CollectorStatus
	poll(t, func() string { return fmt.Sprintf("status %+v", status) }, func() bool {
		status = us.Collectors()
		return len(status) == 1 && status[0].State == StateStart && strings.Contains(status[0].Info, "connection refused")
	})
}
