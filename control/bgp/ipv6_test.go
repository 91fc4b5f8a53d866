package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

// testConfig6 is testConfig with an IPv6 address and the pool fd00:10::/48. The
// sessions are those of peers.
func testConfig6(four, six netip.Addr, asn uint32, announce []string, peers ...Peer) Config {
	c := testConfig(four, asn, announce, peers...)
	c.NextHop6 = six
	c.ListenAddrs = append(c.ListenAddrs, six)
	c.Pools = append(c.Pools, netip.MustParsePrefix("fd00:10::/48"))
	return c
}

// birdConf6 is BIRD with a session over IPv6.
func birdConf6(id, self netip.Addr, asn uint32, peer netip.Addr, peerASN uint32, routes ...string) string {
	var static strings.Builder
	for _, r := range routes {
		fmt.Fprintf(&static, "  route %s blackhole;\n", r)
	}
	return fmt.Sprintf(`router id %[1]s;
log stderr all;
protocol device {}
protocol static { ipv6; %[6]s}
protocol bgp host {
  local %[2]s port 179 as %[3]d;
  neighbor %[4]s port 179 as %[5]d;
  strict bind yes;
  multihop;
  graceful restart on;
  passive on;
  connect delay time 1; connect retry time 2; error wait time 1, 2; startup hold time 20;
  ipv6 { import all; export where source = RTS_STATIC; };
}
`, id, self, asn, peer, peerASN, static.String())
}

// TestBIRDSwitchIPv6 peers by eBGP over IPv6 with BIRD as a top-of-rack switch:
// the session carries IPv6 routes with the node's IPv6 address as next hop, and
// only these.
func TestBIRDSwitchIPv6(t *testing.T) {
	t.Parallel()
	four, six := hosts6(t, 2)
	b := startBIRD(t, birdConf6(four[1], six[1], 64999, six[0], 64512, "2001:db8:7::/48", "::/0", "2001:db8::7/128", "fd00:10::40/122"))
	r := newRun(t, SpeakerOptions{})
	announce := []string{"192.168.1.0/26", "fd00:10::40/122", "fd00:10::99/128"}
	r.apply(testConfig6(four[0], six[0], 64512, announce, tor(six[0], six[1], 64999)))
	r.waitUp(six[1])
	if p := r.waitPath("2001:db8:7::/48"); p.ASPath != "64999" || p.IBGP || p.NextHop != six[1] || p.Peer != "tor-"+six[1].String() {
		t.Errorf("path %+v", p)
	}
	r.waitPath("2001:db8::7/128")
	poll(t, r.dump, func() bool {
		st := r.status(six[1])
		return st.Received == 4 && st.Accepted == 2 && st.Advertised == 2
	})
	b.waitFor("fd00:10::99/128", "show", "route")
	out := b.birdc("show", "route", "fd00:10::99/128", "all")
	for _, says := range []string{"BGP.as_path: 64512\n", "BGP.next_hop: " + six[0].String() + "\n", "BGP.origin: IGP"} {
		if !strings.Contains(out, says) {
			t.Errorf("BIRD has no %q in\n%s", says, out)
		}
	}
	if out := b.birdc("show", "route"); strings.Contains(out, "192.168.1.0") {
		t.Errorf("IPv4 routes came over IPv6:\n%s", out)
	}
	// What is not long is not the default route.
	p := tor(six[0], six[1], 64999)
	p.Filters = "short"
	c := testConfig6(four[0], six[0], 64512, announce, p)
	c.Filters = map[string]Filter{"short": parse(t, `{"importV6":[{"cidr":"::/0","matchOperator":"NotIn","prefixLength":{"min":49},"action":"Accept"},{"action":"Reject"}]}`)}
	r.apply(c)
	r.waitNoPath("2001:db8::7/128")
	poll(t, r.dump, func() bool { return r.status(six[1]).Accepted == 1 })
	if _, ok := r.path("::/0"); ok {
		t.Errorf("the default route was let in%s", r.dump())
	}
	// A withdrawal, and another next hop, without a new session.
	up := r.status(six[1]).Since
	c = testConfig6(four[0], six[0], 64512, announce[:2], tor(six[0], six[1], 64999))
	r.apply(c)
	poll(t, func() string { return b.birdc("show", "route") },
		func() bool { return !strings.Contains(b.birdc("show", "route"), "fd00:10::99/128") })
	c.NextHop6 = netip.MustParseAddr("fd77::99")
	r.apply(c)
	b.waitFor("BGP.next_hop: fd77::99\n", "show", "route", "fd00:10::40/122", "all")
	if now := r.status(six[1]).Since; !now.Equal(up) {
		t.Errorf("the session is up since %s, was since %s", now, up)
	}
}

// TestMeshIPv6 joins two speakers over both families: each session carries its
// own, import from a node stays inside the pools, and everything is in sync
// when both have told all.
func TestMeshIPv6(t *testing.T) {
	t.Parallel()
	four, six := hosts6(t, 2)
	var runs []*run
	for i := range 2 {
		r := newRun(t, SpeakerOptions{})
		o := 1 - i
		announce := []string{fmt.Sprintf("192.168.%d.0/26", i+1), fmt.Sprintf("fd00:10:0:%d::/122", i+1), fmt.Sprintf("2001:db8:%d::/48", i+1)}
		c := testConfig6(four[i], six[i], 64512, announce, to(four[i], four[o], 64512), to(six[i], six[o], 64512))
		c.LocalPref6 = localPref(500)
		r.apply(c)
		runs = append(runs, r)
	}
	for i, r := range runs {
		o := 1 - i
		if p := r.waitPath(fmt.Sprintf("fd00:10:0:%d::/122", o+1)); p.NextHop != six[o] || !p.IBGP || p.LocalPref != localPref(500) || p.PeerAddr != six[o] {
			t.Errorf("IPv6 path %+v", p)
		}
		if p := r.waitPath(fmt.Sprintf("192.168.%d.0/26", o+1)); p.NextHop != four[o] || p.LocalPref != LocalPref || p.PeerAddr != four[o] {
			t.Errorf("IPv4 path %+v", p)
		}
		if _, ok := r.path(fmt.Sprintf("2001:db8:%d::/48", o+1)); ok {
			t.Error("a prefix outside the pools was accepted from a node")
		}
	}
}

// TestRouterIDWithoutIPv4: a node of IPv6 alone speaks with a router id that is
// hashed from its name, and never with one that BGP refuses.
func TestRouterIDWithoutIPv4(t *testing.T) {
	t.Parallel()
	six := nodeFacts{addr6: netip.MustParsePrefix("fd00:1::11/64")}
	seen := map[netip.Addr]string{}
	for i := range 1000 {
		name := fmt.Sprint("node", i)
		id := routerID(name, six)
		if !id.Is4() || id.IsUnspecified() || id.IsMulticast() || id.As4()[0] > 223 {
			t.Errorf("%s: router id %s", name, id)
		}
		if id != routerID(name, six) {
			t.Errorf("%s: not the same twice", name)
		}
		if other, dup := seen[id]; dup {
			t.Errorf("%s and %s have the same router id %s", name, other, id)
		}
		seen[id] = name
	}
	h := six
	h.addr = netip.MustParsePrefix("10.1.0.11/24")
	if got := routerID("node1", h).String(); got != "10.1.0.11" {
		t.Errorf("with an IPv4 address: %s", got)
	}
}
