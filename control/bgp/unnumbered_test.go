package bgp

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

func lls(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr("fe80::"+s))
	}
	return out
}

// TestOnLinks goes through what may be on a link.
func TestOnLinks(t *testing.T) {
	t.Parallel()
	own := lls("a")[0]
	one := func(l Link) map[string]Link { l.Addr = own; return map[string]Link{"eth1": l} }
	router, host := found{lls("1")[0], true}, found{lls("1")[0], false}
	for _, c := range []struct {
		name    string
		links   map[string]Link
		last    found
		peerIP  string
		addr    string
		waiting string
	}{
		{"no device", nil, found{}, "", "", "there is no device eth1 on this host"},
		{"down", one(Link{Routers: lls("1")}), found{}, "", "fe80::1", "device eth1 is down or without carrier"},
		{"no own address", map[string]Link{"eth1": {Up: true, Routers: lls("1")}}, found{}, "", "fe80::1", "device eth1 has no IPv6 link-local address; net.ipv6.conf.eth1.disable_ipv6"},
		{"nobody", one(Link{Up: true}), found{}, "", "", "no neighbour has been heard on eth1 yet: does the other side send router advertisements, or have this node as its neighbour there?"},
		{"a router", one(Link{Up: true, Routers: lls("1")}), found{}, "", "fe80::1", ""},
		{"a router among hosts", one(Link{Up: true, Routers: lls("1"), Hosts: lls("2", "3")}), found{}, "", "fe80::1", ""},
		{"a host", one(Link{Up: true, Hosts: lls("1")}), found{}, "", "fe80::1", ""},
		{"two hosts", one(Link{Up: true, Hosts: lls("1", "2")}), found{}, "", "", "has 2 neighbours, fe80::1 and fe80::2: give the right one in spec.peerIP"},
		{"two hosts, one known", one(Link{Up: true, Hosts: lls("1", "2")}), host, "", "fe80::1", ""},
		{"two routers", one(Link{Up: true, Routers: lls("1", "2")}), found{}, "", "", "has 2 neighbours"},
		{"two routers, one known", one(Link{Up: true, Routers: lls("1", "2")}), router, "", "fe80::1", ""},
		{"another router", one(Link{Up: true, Routers: lls("2")}), router, "", "fe80::2", ""},
		{"the router is silent", one(Link{Up: true}), router, "", "fe80::1", ""},
		{"the router is silent and a host is there", one(Link{Up: true, Hosts: lls("2")}), router, "", "fe80::1", ""},
		{"the host is silent", one(Link{Up: true}), host, "", "fe80::1", ""},
		{"another host", one(Link{Up: true, Hosts: lls("2")}), host, "", "fe80::2", ""},
		{"a host turns router", one(Link{Up: true, Routers: lls("2"), Hosts: lls("1")}), host, "", "fe80::2", ""},
		{"given", one(Link{Up: true, Routers: lls("1", "2")}), found{}, "fe80::9%eth1", "fe80::9", ""},
		{"given, down", one(Link{}), found{}, "fe80::9%eth1", "fe80::9", "device eth1 is down or without carrier"},
	} {
		p := Peer{Name: "tor", Interface: "eth1"}
		if c.peerIP != "" {
			p.Addr = netip.MustParseAddr(c.peerIP)
		}
		cfg, _ := onLinks(Config{Peers: []Peer{p}}, c.links, map[string]found{"eth1": c.last})
		got := cfg.Peers[0]
		var want netip.Addr
		if c.addr != "" {
			want = netip.MustParseAddr(c.addr).WithZone("eth1")
		}
		if got.Addr != want || c.waiting == "" && got.Waiting != "" || !strings.Contains(got.Waiting, c.waiting) {
			t.Errorf("%s: address %s, waiting %q; want %s and %q", c.name, got.Addr, got.Waiting, want, c.waiting)
		}
		if runs := c.waiting == ""; got.runs() != runs || runs && got.Source != own.WithZone("eth1") {
			t.Errorf("%s: runs %t from %s", c.name, got.runs(), got.Source)
		}
	}
}

// TestSameNeighbourTwice: two links may have neighbours of the same address, as
// long as they are judged alike.
func TestSameNeighbourTwice(t *testing.T) {
	t.Parallel()
	links := map[string]Link{}
	for _, d := range []string{"eth1", "eth2", "eth3", "eth4", "eth5", "eth6"} {
		links[d] = Link{Up: true, Addr: lls("a")[0], Routers: lls("1")}
	}
	cfg, next := onLinks(Config{ASN: 64512, Peers: []Peer{
		{Name: "one", Interface: "eth1", ASN: 64998},
		{Name: "two", Interface: "eth2", ASN: 64998},
		{Name: "three", Interface: "eth3", ASN: 64998, Filters: "f"},
		{Name: "other-as", Interface: "eth4", ASN: 64997},
		{Name: "inside", Interface: "eth5", ASN: 64512},
		{Name: "secret", Interface: "eth6", ASN: 64998, Secret: SecretRef{"s", "k"}},
	}}, links, nil)
	var got []string
	for _, p := range cfg.Peers {
		got = append(got, p.Addr.String()+" "+p.Problem)
	}
	want := []string{
		"fe80::1%eth1 ", "fe80::1%eth2 ",
		"fe80::1%eth3 ", "fe80::1%eth4 ", "fe80::1%eth5 ",
		"fe80::1%eth6 neighbour fe80::1 of device eth6 has the address of the one of BGPPeer inside, and one has a spec.password or keys for TCP-AO: give the two neighbours different addresses, or remove the passwords and keys",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("peers (-want +got):\n%s", diff)
	}
	if len(next) != 6 {
		t.Errorf("remembered %v", next)
	}
}

// TestNextHopOnLink: which next hop is used, and on which device.
func TestNextHopOnLink(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		hop, peer string
		ibgp      bool
		want      string
	}{
		{"fd00::1", "fd00::2", false, "fd00::1"},
		{"10.0.0.1", "10.0.0.2", true, "10.0.0.1"},
		{"fe80::1", "fe80::1%eth1", false, "fe80::1%eth1"},
		{"::", "fe80::1%eth1", false, "fe80::1%eth1"},
		{"fd00::1", "fe80::1%eth1", false, "fe80::1%eth1"},
		{"fd00::1", "fe80::1%eth1", true, "fd00::1"},
		{"fe80::9", "fe80::1%eth1", true, "fe80::9%eth1"},
		{"::", "fe80::1%eth1", true, "fe80::1%eth1"},
	} {
		if got := onLink(netip.MustParseAddr(c.hop), netip.MustParseAddr(c.peer), c.ibgp); got.String() != c.want {
			t.Errorf("next hop %s of %s: use %s, want %s", c.hop, c.peer, got, c.want)
		}
	}
}

// TestEndOfRIBOfAllFamilies: a session has told all when each family that both
// sides carry has.
func TestEndOfRIBOfAllFamilies(t *testing.T) {
	t.Parallel()
	four, six := wire.IPv4, wire.IPv6
	for _, c := range []struct {
		name         string
		theirs, eors []wire.Family
		want         bool
	}{
		{"none", []wire.Family{four, six}, nil, false},
		{"one of two", []wire.Family{four, six}, []wire.Family{six}, false},
		{"both", []wire.Family{four, six}, []wire.Family{four, six}, true},
		{"the only one", []wire.Family{four}, []wire.Family{four}, true},
		{"without capabilities", nil, []wire.Family{four}, true},
	} {
		s := &session{peer: Peer{Interface: "eth1"}}
		s.due = s.peer.agreed(c.theirs)
		for _, f := range c.eors {
			s.endOfRIB([]wire.Family{f})
		}
		if s.eor != c.want {
			t.Errorf("%s: told all: %t", c.name, s.eor)
		}
	}
}

// TestExtendedNextHop carries IPv4 over a session between IPv6 addresses, both
// ways, with IPv6 next hops (RFC 8950).
func TestExtendedNextHop(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		four, six := hosts6(t, 2)
		o := begin(remote{self: six[1], asn: 64999, peer: six[0], peerASN: 64512, extended: true, routes: []string{"203.0.113.0/24"}})
		r := newRun(t, SpeakerOptions{})
		p := tor(six[0], six[1], 64999)
		p.ExtendedNextHop = true
		r.apply(testConfig6(four[0], six[0], 64512, []string{"192.168.1.0/26"}, p))
		if got := r.waitPath("203.0.113.0/24"); got.NextHop != six[1] {
			t.Errorf("path %s", got)
		}
		o.waitRoute("192.168.1.0/26", six[0].String())
		poll(t, r.dump, func() bool { return r.status(six[1]).Advertised == 1 })
	})
}

// agreed returns the families that both sides carry. Who announces none means
// IPv4 (RFC 4760 section 8).
func (p Peer) agreed(theirs []wire.Family) []wire.Family {
	if len(theirs) == 0 {
		theirs = []wire.Family{wire.IPv4}
	}
	return slices.DeleteFunc(p.carries(), func(f wire.Family) bool { return !slices.Contains(theirs, f) })
}
