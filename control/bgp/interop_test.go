package bgp

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// remote says how BIRD, FRR and GoBGP are to be: one session with this host.
type remote struct {
	self, peer   netip.Addr
	asn, peerASN uint32
	password     string
	hops         int    // of TTL security; 0: off
	opens        bool   // the session; else it waits for us to do so
	client       bool   // this host is a client of the other's reflection
	extended     bool   // IPv4 over IPv6
	longLived    bool   // long-lived graceful restart, after a restart time of 1 s
	communities  string // "65000:1 65000:2:3", of all that is announced
	routes       []string
}

// other is BIRD, FRR or GoBGP as the other end of a session.
type other interface {
	waitRoute(prefix string, says ...string) // learned from us, its text saying all of that
	waitRouteWithOneOf(prefix string, says ...string)
	waitNoRoute(prefix string)
	kill()                       // as a crash does
	announce(prefixes ...string) // instead of what was announced so far
	uptime() string              // since when the session is up; changes with each session
}

// eachOther runs a test with BIRD, with FRR and with GoBGP's server.
func eachOther(t *testing.T, test func(t *testing.T, begin func(remote) other)) {
	t.Helper()
	t.Parallel()
	t.Run("BIRD", func(t *testing.T) {
		t.Parallel()
		test(t, func(r remote) other { return startBIRDAs(t, r) })
	})
	t.Run("FRR", func(t *testing.T) {
		t.Parallel()
		test(t, func(r remote) other { return startFRRAs(t, r) })
	})
	t.Run("GoBGP", func(t *testing.T) {
		t.Parallel()
		test(t, func(r remote) other { return startGoBGPAs(t, r) })
	})
}

type birdOther struct {
	*bird
	remote
}

func startBIRDAs(t *testing.T, r remote) other {
	b := birdOther{remote: r}
	b.bird = startBIRD(t, b.text())
	return b
}

func (b birdOther) text() string {
	var extra strings.Builder
	if b.password != "" {
		fmt.Fprintf(&extra, "password %q; ", b.password)
	}
	if b.opens {
		extra.WriteString("passive off; ")
	}
	if b.client {
		extra.WriteString("rr client; ")
	}
	conf := birdConf(b.self, b.asn, b.peer, b.peerASN, extra.String(), b.routes...)
	conf = strings.Replace(conf, "router id "+b.self.String(), "router id "+routerIDOf(b.self).String(), 1)
	if b.hops > 0 {
		conf = strings.Replace(conf, "multihop;", fmt.Sprintf("multihop %d; ttl security on;", b.hops), 1)
	}
	if b.longLived {
		conf = strings.Replace(conf, "graceful restart on;", "graceful restart on; graceful restart time 1; long lived graceful restart on; long lived stale time 300;", 1)
	}
	if b.extended {
		conf = strings.Replace(conf, "  ipv4 { import", "  ipv4 { extended next hop on; import", 1)
	} else if b.self.Is6() {
		conf = strings.NewReplacer("static { ipv4;", "static { ipv6;", "  ipv4 { import", "  ipv6 { import").Replace(conf)
	}
	var add strings.Builder
	for c := range strings.FieldsSeq(b.communities) {
		attr := "bgp_community"
		if isLarge(c) {
			attr = "bgp_large_community"
		}
		fmt.Fprintf(&add, "%s.add((%s)); ", attr, strings.ReplaceAll(c, ":", ","))
	}
	return strings.Replace(conf, "export where source = RTS_STATIC;", "export filter { if source != RTS_STATIC && source != RTS_BGP then reject; "+add.String()+"accept; };", 1)
}

func (b birdOther) waitRoute(prefix string, says ...string) {
	b.t.Helper()
	out := ""
	poll(b.t, func() string {
		return fmt.Sprintf("BIRD's route to %s saying %q; it says\n%s\n%s", prefix, says, out, b.log)
	}, func() bool {
		out, _ = b.command("show", "route", "all", prefix) // fails while there is none
		for _, s := range append([]string{prefix}, says...) {
			if !strings.Contains(out, s) {
				return false
			}
		}
		return true
	})
}

func (b birdOther) waitRouteWithOneOf(prefix string, says ...string) {
	b.t.Helper()
	out := ""
	poll(b.t, func() string {
		return fmt.Sprintf("BIRD's route to %s saying one of %q; it says\n%s\n%s", prefix, says, out, b.log)
	}, func() bool { out, _ = b.command("show", "route", "all", prefix); return containsOne(out, says) })
}

func containsOne(text string, says []string) bool {
	return slices.ContainsFunc(says, func(s string) bool { return strings.Contains(text, s) })
}

func (b birdOther) waitNoRoute(prefix string) {
	b.t.Helper()
	poll(b.t, func() string { return "BIRD without " + prefix + ":\n" + b.birdc("show", "route", "all") },
		func() bool { return !strings.Contains(b.birdc("show", "route"), prefix) })
}

func (b birdOther) announce(prefixes ...string) {
	b.t.Helper()
	b.routes = prefixes
	if err := os.WriteFile(b.conf, []byte(b.text()), 0o644); err != nil {
		b.t.Fatal(err)
	}
	b.birdctl("configure")
}

// uptime is the session's connection: BIRD reckons since when it is up at every question, and is a
// millisecond off now and then.
func (b birdOther) uptime() string {
	b.t.Helper()
	return connection(b.t, b.remote)
}

// connection is the ends of a session's connection.
func connection(t testing.TB, r remote) string {
	t.Helper()
	out, err := exec.Command("ss", "-Htn", "state", "established", "src", r.self.String(), "dst", r.peer.String()).Output()
	if err != nil || len(out) == 0 {
		t.Fatalf("connections of %s: %q, %v", r.self, out, err)
	}
	return strings.Join(strings.Fields(string(out))[2:], " ")
}

// birdctl runs a command that changes something.
func (b birdOther) birdctl(args ...string) {
	b.t.Helper()
	out, err := b.command(args...)
	if err != nil {
		b.t.Fatalf("birdc %v: %v: %s", args, err, out)
	}
}

type frrOther struct {
	*frr
	remote
	family string
}

func startFRRAs(t *testing.T, r remote) other {
	var extra []string
	if r.password != "" {
		extra = append(extra, "neighbor PEER password "+r.password)
	}
	if r.hops > 0 {
		extra = append(extra, fmt.Sprintf("neighbor PEER ttl-security hops %d", r.hops))
	}
	family := "ipv4"
	if r.peer.Is6() {
		family = "ipv6"
	}
	conf := frrConf(r.self, r.asn, r.peer, r.peerASN, extra, r.routes...)
	if r.hops > 0 {
		conf = strings.Replace(conf, fmt.Sprintf(" neighbor %s ebgp-multihop\n", r.peer), "", 1)
	}
	activate := fmt.Sprintf("  neighbor %s activate\n", r.peer)
	if r.client {
		conf = strings.Replace(conf, activate, activate+fmt.Sprintf("  neighbor %s route-reflector-client\n", r.peer), 1)
	}
	if r.extended {
		family = "ipv4"
		conf = strings.Replace(conf, "address-family ipv6 unicast", "address-family ipv4 unicast", 1)
		conf = strings.Replace(conf, " address-family", fmt.Sprintf(" neighbor %s capability extended-nexthop\n address-family", r.peer), 1)
	}
	if r.longLived {
		conf = strings.Replace(conf, " bgp graceful-restart\n", " bgp graceful-restart\n bgp graceful-restart preserve-fw-state\n bgp graceful-restart restart-time 1\n bgp long-lived-graceful-restart stale-time 300\n", 1)
	}
	if r.communities != "" {
		conf = strings.Replace(conf, activate, activate+fmt.Sprintf("  neighbor %s route-map tag out\n", r.peer), 1)
		conf += "route-map tag permit 10\n"
		for c := range strings.FieldsSeq(r.communities) {
			if isLarge(c) {
				conf += " set large-community " + c + "\n"
			} else {
				conf += " set community " + c + "\n"
			}
		}
	}
	return frrOther{frr: startFRR(t, r.self, conf), remote: r, family: family}
}

func (f frrOther) waitRoute(prefix string, says ...string) {
	f.t.Helper()
	cmd := fmt.Sprintf("show bgp %s unicast %s", f.family, prefix)
	f.waitFor("routing table entry for "+prefix, cmd)
	for _, s := range says {
		f.waitFor(s, cmd)
	}
}

func (f frrOther) waitRouteWithOneOf(prefix string, says ...string) {
	f.t.Helper()
	out := ""
	poll(f.t, func() string {
		return fmt.Sprintf("FRR's route to %s saying one of %q; it says\n%s", prefix, says, out)
	},
		func() bool {
			out = f.vtysh(fmt.Sprintf("show bgp %s unicast %s", f.family, prefix))
			return containsOne(out, says)
		})
}

func (f frrOther) waitNoRoute(prefix string) {
	f.t.Helper()
	f.without(prefix, fmt.Sprintf("show bgp %s unicast", f.family))
}

func (f frrOther) announce(prefixes ...string) {
	f.t.Helper()
	cmds := []string{fmt.Sprintf("router bgp %d", f.asn), fmt.Sprintf("address-family %s unicast", f.family)}
	for line := range strings.Lines(f.vtysh("show running-config")) {
		if n, ok := strings.CutPrefix(strings.TrimSpace(line), "network "); ok {
			cmds = append(cmds, "no network "+n)
		}
	}
	for _, p := range prefixes {
		cmds = append(cmds, "network "+p)
	}
	f.configure(cmds...)
}

func (f frrOther) uptime() string {
	f.t.Helper()
	var counts []string // its clock of the session moves by a second now and then
	for line := range strings.Lines(f.vtysh(fmt.Sprintf("show bgp neighbors %s json", f.peer))) {
		if strings.Contains(line, `"connectionsEstablished"`) || strings.Contains(line, `"connectionsDropped"`) {
			counts = append(counts, strings.TrimSpace(line))
		}
	}
	if len(counts) != 2 {
		f.t.Fatalf("FRR counts %q", counts)
	}
	return strings.Join(counts, " ")
}

// communityText is how BIRD and FRR write a community.
func communityText(o other, c string) string {
	if _, ok := o.(birdOther); ok {
		sep := ","
		if isLarge(c) {
			sep = ", "
		}
		return "(" + strings.ReplaceAll(c, ":", sep) + ")"
	}
	return c
}

// TestPassword: the right password brings the session up, the wrong one does
// not, and the session says what is suspected.
func TestPassword(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 2)
		begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, password: "right", routes: []string{"203.0.113.0/24"}})
		r := newRun(t, SpeakerOptions{})
		p := tor(h[0], h[1], 64999)
		p.Password = Password{"wrong"}
		r.apply(testConfig(h[0], 64512, nil, p))
		st := r.waitInfo(h[1], "MD5")
		if st.State != StateStart || strings.Contains(st.Info, "right") || strings.Contains(st.Info, "wrong password:") {
			t.Errorf("with the wrong password: %+v", st)
		}
		p.Password = Password{"right"}
		r.apply(testConfig(h[0], 64512, nil, p))
		r.waitUp(h[1])
		r.waitPath("203.0.113.0/24")
	})
}

// TestTTLSecurity: both sides ask for it, and packets that come from further
// away than said do not count.
func TestTTLSecurity(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 2)
		begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, hops: 1, routes: []string{"203.0.113.0/24"}})
		r := newRun(t, SpeakerOptions{})
		p := tor(h[0], h[1], 64999)
		p.TTLSecurity = 1
		r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, p))
		r.waitUp(h[1])
		r.waitPath("203.0.113.0/24")
	})
}

// TestInteropIPv6 carries IPv6 unicast over IPv6.
func TestInteropIPv6(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		four, six := hosts6(t, 2)
		o := begin(remote{self: six[1], asn: 64999, peer: six[0], peerASN: 64512, routes: []string{"2001:db8:1::/48"}})
		r := newRun(t, SpeakerOptions{})
		c := testConfig(six[0], 64512, nil, tor(six[0], six[1], 64999))
		c.RouterID, c.NextHop, c.NextHop6 = four[0], netip.Addr{}, six[0]
		c.Announce = []netip.Prefix{netip.MustParsePrefix("fd00:10::40/122")}
		r.apply(c)
		if p := r.waitPath("2001:db8:1::/48"); p.NextHop != six[1] {
			t.Errorf("path %+v", p)
		}
		o.waitRoute("fd00:10::40/122", six[0].String())
	})
}

// TestCommunities sends and filters communities of both sorts.
func TestCommunities(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 2)
		o := begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, communities: "65000:7 65000:7:8", routes: []string{"203.0.113.0/24", "198.51.100.0/24"}})
		r := newRun(t, SpeakerOptions{})
		p := tor(h[0], h[1], 64999)
		p.Filters = "f"
		c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, p)
		c.Tags = map[netip.Prefix]string{c.Announce[0]: "65000:100 65000:200:3"}
		c.Filters = map[string]Filter{"f": parse(t, `{"importV4":[
			{"cidr":"203.0.113.0/24","matchOperator":"Equal","communities":{"values":["65000:7"]},"action":"Accept"},
			{"communities":{"values":["65000:7:8"]},"action":"Reject"}],
			"exportV4":[{"action":"Accept","operations":[{"addCommunity":{"value":"65000:9"}},{"addCommunity":{"value":"65000:9:9"}},{"prependASPath":{"prefix":[65010,64512]}}]}]}`)}
		r.apply(c)
		r.waitPath("203.0.113.0/24")
		poll(t, r.dump, func() bool { return r.status(h[1]).Accepted == 1 })
		o.waitRoute("192.168.1.0/26", "64512 65010 64512", communityText(o, "65000:100"), communityText(o, "65000:200:3"), communityText(o, "65000:9"), communityText(o, "65000:9:9"))
	})
}

// parse reads a BGPFilter's spec.
func parse(t testing.TB, spec string) Filter {
	t.Helper()
	f, err := parseFilter([]byte(`{"spec":` + spec + `}`))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestFilters changes a peer's filters live: what is accepted and announced
// follows, and the session, and another one beside it, stay.
func TestFilters(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 3)
		routes := []string{"0.0.0.0/0", "10.9.0.0/16", "10.9.1.0/24", "10.9.2.0/25", "172.20.0.0/16"}
		o := begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, routes: routes})
		beside := begin(remote{self: h[2], asn: 64998, peer: h[0], peerASN: 64512, routes: []string{"198.51.100.0/24"}})
		r := newRun(t, SpeakerOptions{})
		config := func(spec string) Config {
			p := tor(h[0], h[1], 64999)
			if spec != "" {
				p.Filters = "f"
			}
			c := testConfig(h[0], 64512, []string{"192.168.1.0/26", "192.168.2.0/26", "192.168.9.5/32"}, p, tor(h[0], h[2], 64998))
			c.Links = map[string][]netip.Prefix{"eth0": {netip.PrefixFrom(h[1], 24).Masked()}, "eth1": {netip.MustParsePrefix("10.99.0.0/24")}}
			if spec != "" {
				c.Filters = map[string]Filter{"f": parse(t, spec)}
			}
			return c
		}
		r.apply(config(""))
		r.waitUp(h[1])
		r.waitUp(h[2])
		r.waitPath("198.51.100.0/24")
		o.waitRoute("192.168.9.5/32")
		beside.waitRoute("192.168.9.5/32")
		up, besideUp := o.uptime(), beside.uptime()
		for _, c := range []struct{ name, spec, in, out string }{
			{"none", "", "10.9.0.0/16 10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32"},
			{
				"equal", `{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"Equal","action":"Reject"}],"exportV4":[{"cidr":"192.168.1.0/26","matchOperator":"Equal","action":"Reject"}]}`,
				"10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.2.0/26 192.168.9.5/32",
			},
			{
				"not equal", `{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"NotEqual","action":"Reject"}],"exportV4":[{"cidr":"192.168.1.0/26","matchOperator":"NotEqual","action":"Reject"}]}`,
				"10.9.0.0/16", "192.168.1.0/26",
			},
			{
				"in", `{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"In","action":"Accept"},{"action":"Reject"}],"exportV4":[{"cidr":"192.168.0.0/22","matchOperator":"In","action":"Accept"},{"action":"Reject"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25", "192.168.1.0/26 192.168.2.0/26",
			},
			{
				"not in", `{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"NotIn","action":"Reject"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"lengths", `{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"In","prefixLength":{"min":17,"max":24},"action":"Reject"}],"exportV4":[{"cidr":"192.168.0.0/16","matchOperator":"In","prefixLength":{"min":32},"action":"Reject"}]}`,
				"10.9.0.0/16 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26",
			},
			{
				"default route", `{"importV4":[{"cidr":"0.0.0.0/0","matchOperator":"Equal","action":"Accept"}]}`,
				"0.0.0.0/0 10.9.0.0/16 10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"everything is not the default route", `{"importV4":[{"cidr":"0.0.0.0/0","matchOperator":"In","action":"Accept"},{"action":"Accept"},{"cidr":"10.0.0.0/8","matchOperator":"NotIn","action":"Accept"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"what is not long is not the default route", `{"importV4":[{"cidr":"0.0.0.0/0","matchOperator":"NotIn","prefixLength":{"min":25},"action":"Accept"},{"action":"Reject"}]}`,
				"10.9.0.0/16 10.9.1.0/24 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"what is not short is not the default route", `{"importV4":[{"cidr":"0.0.0.0/0","matchOperator":"NotIn","prefixLength":{"max":16},"action":"Accept"},{"action":"Reject"}]}`,
				"10.9.1.0/24 10.9.2.0/25", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"not equal to the default route", `{"importV4":[{"cidr":"0.0.0.0/0","matchOperator":"NotEqual","action":"Accept"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"interface", `{"importV4":[{"interface":"eth0","cidr":"10.9.0.0/16","matchOperator":"Equal","action":"Reject"},{"interface":"eth1","action":"Reject"}]}`,
				"10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"source", `{"exportV4":[{"source":"RemotePeers","action":"Accept"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32 198.51.100.0/24",
			},
			{
				"peer type", `{"importV4":[{"peerType":"iBGP","action":"Reject"},{"peerType":"eBGP","cidr":"172.20.0.0/16","matchOperator":"In","action":"Reject"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"path", `{"importV4":[{"asPathPrefix":[64999],"cidr":"10.9.0.0/16","matchOperator":"In","action":"Reject"},{"asPathPrefix":[64998],"action":"Reject"}]}`,
				"172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26 192.168.9.5/32",
			},
			{
				"priority", `{"exportV4":[{"priority":1024,"cidr":"192.168.9.5/32","matchOperator":"Equal","action":"Reject"},{"priority":512,"action":"Reject"}]}`,
				"10.9.0.0/16 10.9.1.0/24 10.9.2.0/25 172.20.0.0/16", "192.168.1.0/26 192.168.2.0/26",
			},
		} {
			r.apply(config(c.spec))
			for _, p := range append(strings.Fields("192.168.1.0/26 192.168.2.0/26 192.168.9.5/32"), "198.51.100.0/24") {
				if strings.Contains(c.out, p) {
					o.waitRoute(p)
				} else {
					o.waitNoRoute(p)
				}
			}
			poll(t, func() string { return c.name + ": want " + c.in + r.dump() }, func() bool {
				for _, p := range routes {
					if _, ok := r.path(p); ok != strings.Contains(" "+c.in+" ", " "+p+" ") {
						return false
					}
				}
				return true
			})
			checkJudgement(t, r, h[1], c.name)
		}
		if now := o.uptime(); now != up {
			t.Errorf("the session was up since %q, and is since %q", up, now)
		}
		if now := beside.uptime(); now != besideUp {
			t.Errorf("the session beside was up since %q, and is since %q", besideUp, now)
		}
		beside.waitRoute("192.168.1.0/26")
	})
}

// checkJudgement holds what is said of each route that a peer sent against what
// the engine did with it, and likewise of each route that it could be told.
func checkJudgement(t *testing.T, r *run, peer netip.Addr, name string) {
	t.Helper()
	n, used := 0, map[netip.Prefix]bool{}
	err := r.Query(t.Context(), Query{Table: TableBest}, func(route Route) bool {
		used[route.Prefix] = used[route.Prefix] || route.PeerAddr == peer
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	err = r.Query(t.Context(), Query{Table: TableReceived, Peer: peer}, func(route Route) bool {
		n++
		if in := used[route.Prefix]; in != (route.State == RouteAccepted) {
			t.Errorf("%s: %s from %s is said to be %s (%s), and in the table: %t", name, route.Prefix, peer, route.State, route.Reason, in)
		}
		return true
	})
	if err != nil || n < 5 {
		t.Errorf("%s: %d routes received, error %v", name, n, err)
	}
	told := map[netip.Prefix]bool{}
	err = r.Query(t.Context(), Query{Table: TableAdvertised, Peer: peer}, func(route Route) bool { told[route.Prefix] = true; return true })
	if err != nil {
		t.Fatal(err)
	}
	poll(t, func() string { return fmt.Sprintf("%s: %d counted as told%s", name, len(told), r.dump()) },
		func() bool { return r.status(peer).Advertised == len(told) })
	err = r.Query(t.Context(), Query{Table: TableBest}, func(route Route) bool {
		if _, policy, peers := r.snapshot(); route.PeerAddr != peer {
			if want, why := policy.judgeExport(peers[peer], route.judged()); want != told[route.Prefix] {
				t.Errorf("%s: %s is said to be told to %s: %t (%s), and is: %t", name, route.Prefix, peer, want, why, told[route.Prefix])
			}
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestExplain: the winner, the loser, what was refused, and who is told.
func TestExplain(t *testing.T) {
	t.Parallel()
	h := hosts(t, 4)
	startBIRDAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, routes: []string{"10.9.0.0/16", "192.168.1.0/26"}})
	startFRRAs(t, remote{self: h[2], asn: 64998, peer: h[0], peerASN: 64512, routes: []string{"10.9.0.0/16"}})
	r := newRun(t, SpeakerOptions{})
	first := tor(h[0], h[1], 64999)
	first.Filters = "dear"
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, first, tor(h[0], h[2], 64998), tor(h[0], h[3], 64997))
	c.Filters = map[string]Filter{"dear": parse(t, `{"importV4":[{"action":"Accept","operations":[{"setPriority":{"value":512}}]}]}`)}
	c.Announce, c.NextHop6 = append(c.Announce, netip.MustParsePrefix("fd00:10::40/122")), netip.MustParseAddr("fd77::99")
	r.apply(c)
	r.waitUp(h[1])
	r.waitUp(h[2])
	poll(t, r.dump, func() bool { return r.status(h[1]).Accepted == 1 && r.status(h[2]).Accepted == 1 })
	for prefix, want := range map[string][]string{
		"10.9.0.0/16": {
			"best tor-" + h[1].String() + ": \n",
			fmt.Sprintf("lost tor-%s: local preference 100 is less than %d\n", h[2], localPref(512)),
			"withheld tor-" + h[1].String() + ": the best path came from this peer\n",
			"withheld tor-" + h[2].String() + ": learned routes are not passed on\n",
		},
		"192.168.1.0/26": {
			"best : \n",
			"filtered tor-" + h[1].String() + ": inside this node's own subnet, blocks or borrowed addresses, or a range of services\n",
			"advertised tor-" + h[1].String() + ": \n",
			"withheld tor-" + h[3].String() + ": the session is not up\n",
		},
		"fd00:10::40/122": {"best : \n", "withheld tor-" + h[1].String() + ": the session does not carry ipv6\n"},
	} {
		got := r.explain(prefix)
		for _, says := range want {
			if !strings.Contains(got, says) {
				t.Errorf("%s: no %q in\n%s", prefix, says, got)
			}
		}
	}
}

// explain is what is said of a prefix, a line for each path and peer.
func (r *run) explain(prefix string) string {
	r.t.Helper()
	l, err := r.Explain(r.t.Context(), netip.MustParsePrefix(prefix))
	if err != nil {
		r.t.Fatal(err)
	}
	var b strings.Builder
	for _, e := range l {
		fmt.Fprintf(&b, "%s %s: %s\n", e.State, e.Peer, e.Reason)
	}
	return b.String()
}

// TestPrefixLimit: a peer that announces too much is cut off with the reason,
// and comes back when the limit is raised.
func TestPrefixLimit(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 2)
		o := begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, routes: []string{"203.0.113.0/25", "198.51.100.0/24"}})
		r := newRun(t, SpeakerOptions{})
		p := tor(h[0], h[1], 64999)
		p.MaxPrefixes = 2
		r.apply(testConfig(h[0], 64512, nil, p))
		r.waitPath("203.0.113.0/25")
		r.waitPath("198.51.100.0/24")
		if st := r.status(h[1]); !st.Counted || st.Received != 2 || st.MaxPrefixes != 2 {
			t.Errorf("at the limit: %+v", st)
		}
		o.announce("203.0.113.0/25", "198.51.100.0/24", "192.0.2.0/25", "192.0.2.128/25")
		st := r.waitInfo(h[1], "the peer announced more than 2 prefixes: have it announce fewer, or raise the BGPPeer's annotation routerd.io/maxPrefixes; tried again after 5m0s")
		if st.State == StateUp {
			t.Errorf("state %+v", st)
		}
		r.waitNoPath("203.0.113.0/25")
		p.MaxPrefixes = 10
		r.apply(testConfig(h[0], 64512, nil, p))
		r.waitUp(h[1])
		r.waitPath("192.0.2.128/25")
	})
}

// TestMeshLimit: the same of a node of the mesh, whose limit is the cluster's setting.
func TestMeshLimit(t *testing.T) {
	h := hosts(t, 2)
	o := startBIRDAs(t, remote{self: h[1], asn: 64512, peer: h[0], peerASN: 64512, routes: []string{"192.168.101.0/26"}})
	r := newRun(t, SpeakerOptions{})
	p := tor(h[0], h[1], 64512)
	p.Type, p.MaxPrefixes = PeerMesh, 1
	r.apply(testConfig(h[0], 64512, nil, p))
	r.waitPath("192.168.101.0/26")
	o.announce("192.168.101.0/26", "192.168.102.0/26")
	r.waitInfo(h[1], "the peer announced more than 1 prefixes: have it announce fewer, or raise the default BGPConfiguration's annotation routerd.io/maxPrefixes; tried again after 5m0s")
	r.waitNoPath("192.168.101.0/26")
}

// TestReflectorOfOthers: BIRD and FRR are clients of this host's reflection.
func TestReflectorOfOthers(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 3)
		// We reflect between the two.
		a := begin(remote{self: h[1], asn: 64512, peer: h[0], peerASN: 64512, routes: []string{"192.168.101.0/26", "203.0.113.0/24"}})
		b := begin(remote{self: h[2], asn: 64512, peer: h[0], peerASN: 64512, routes: []string{"192.168.102.0/26"}})
		r := newRun(t, SpeakerOptions{})
		client := func(addr netip.Addr) Peer {
			p := tor(h[0], addr, 64512)
			p.ClusterID, p.Reflect = netip.MustParseAddr("244.0.0.1"), true
			return p
		}
		r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, client(h[1]), client(h[2])))
		a.waitRoute("192.168.102.0/26", h[2].String(), "244.0.0.1")
		b.waitRoute("192.168.101.0/26", h[1].String(), "244.0.0.1")
		b.waitRoute("192.168.1.0/26", h[0].String())
		r.waitPath("203.0.113.0/24")
		b.waitNoRoute("203.0.113.0/24") // outside the pools
		a.announce()
		b.waitNoRoute("192.168.101.0/26")
	})
}

// TestExternalReflector: this host is a client of BIRD's or FRR's reflection,
// beside another client of ours.
func TestExternalReflector(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	conf := birdConf(h[0], 64512, h[1], 64512, "rr client;", "192.168.100.0/26")
	conf = strings.Replace(conf, "export where source = RTS_STATIC", "export all", 1)
	second := conf[strings.Index(conf, "protocol bgp host"):]
	second = strings.NewReplacer("bgp host", "bgp second", h[1].String(), h[2].String()).Replace(second)
	startBIRD(t, conf+second)
	a, b := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	a.apply(testConfig(h[1], 64512, []string{"192.168.1.0/26"}, tor(h[1], h[0], 64512)))
	b.apply(testConfig(h[2], 64512, []string{"192.168.2.0/26"}, tor(h[2], h[0], 64512)))
	if p := a.waitPath("192.168.2.0/26"); p.NextHop != h[2] || !p.IBGP {
		t.Errorf("path %+v", p)
	}
	if p := b.waitPath("192.168.1.0/26"); p.NextHop != h[1] || p.PeerAddr != h[0] {
		t.Errorf("path %+v", p)
	}
}

// TestLocalAS shows another AS to a peer than the node's own.
func TestLocalAS(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 2)
		o := begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 4200000007, routes: []string{"203.0.113.0/24"}})
		r := newRun(t, SpeakerOptions{})
		p := tor(h[0], h[1], 64999)
		p.LocalASN = 4200000007
		r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, p))
		r.waitPath("203.0.113.0/24")
		o.waitRoute("192.168.1.0/26", "4200000007")
	})
}

// TestReachableBy: the way to a peer is a route of its own, which nobody's
// announcement changes, and goes with the setting.
func TestReachableBy(t *testing.T) {
	t.Parallel()
	h := hosts(t, 4)
	gateway := startBIRDAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, routes: []string{h[2].String() + "/32", "203.0.113.0/24"}})
	r := newRun(t, SpeakerOptions{})
	config := func(by netip.Addr) Config {
		far := tor(h[0], h[2], 64998)
		far.ReachableBy = by
		c := testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999), far)
		c.Own = append(c.Own, hostRoute(h[2]))
		return c
	}
	r.apply(config(h[3]))
	r.waitPath("203.0.113.0/24")
	if p := r.waitPath(h[2].String() + "/32"); p.NextHop != h[3] || len(p.More) != 0 {
		t.Errorf("path %+v", p)
	}
	r.apply(config(h[1]))
	poll(t, r.dump, func() bool {
		p, ok := r.path(h[2].String() + "/32")
		return ok && p.NextHop == h[1] && len(p.More) == 0
	})
	// The gateway goes on forwarding when it speaks no BGP any more.
	from := r.mark()
	if out, err := gateway.(birdOther).command("disable", "host"); err != nil {
		t.Fatal(out, err)
	}
	r.waitNoPath("203.0.113.0/24")
	if r.happened(from, "lost "+h[1].String())+r.happened(from, "del "+h[2].String()+"/32") != 0 {
		t.Error("the way by the gateway went with its session", r.dump())
	}
	r.apply(config(netip.Addr{}))
	r.waitNoPath(h[2].String() + "/32")
}

// TestRestartOfFRR: FRR is killed and comes back within its restart time; what
// it announced stays throughout, and what it announces no more goes then. A
// session beside it never notices.
func TestRestartOfFRR(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	conf := func(networks ...string) string {
		return frrConf(h[1], 64999, h[0], 64512, []string{"bgp graceful-restart preserve-fw-state"}, networks...)
	}
	f := startFRR(t, h[1], conf("203.0.113.0/24", "198.51.100.0/24"))
	beside := startBIRDAs(t, remote{self: h[2], asn: 64998, peer: h[0], peerASN: 64512})
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, tor(h[0], h[1], 64999), tor(h[0], h[2], 64998)))
	r.waitPath("203.0.113.0/24")
	r.waitPath("198.51.100.0/24")
	beside.waitRoute("192.168.1.0/26")
	since, from := beside.uptime(), r.mark()
	f.kill()
	r.waitInfo(h[1], "the peer's routes are kept while it restarts")
	f = startFRR(t, h[1], conf("203.0.113.0/24"))
	r.waitUp(h[1])
	r.waitNoPath("198.51.100.0/24")
	if _, ok := r.path("203.0.113.0/24"); !ok || r.happened(from, "del 203.0.113.0/24") != 0 {
		t.Errorf("the route went:%s", r.dump())
	}
	f.waitFor("192.168.1.0/26", "show bgp ipv4 unicast")
	if now := beside.uptime(); now != since {
		t.Errorf("the session beside was up since %q, and is since %q", since, now)
	}
}

// TestFlappingPeer resets a session again and again: the other one stays, and in the
// end all is as it was.
func TestFlappingPeer(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	f := startFRR(t, h[1], frrConf(h[1], 64999, h[0], 64512, nil, "203.0.113.0/24"))
	beside := startBIRDAs(t, remote{self: h[2], asn: 64998, peer: h[0], peerASN: 64512, routes: []string{"198.51.100.0/24"}})
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, tor(h[0], h[1], 64999), tor(h[0], h[2], 64998)))
	r.waitPath("198.51.100.0/24")
	beside.waitRoute("192.168.1.0/26")
	since, from := beside.uptime(), r.mark()
	for range 3 {
		up := r.waitUp(h[1]).Since
		f.vtysh("clear bgp *")
		poll(t, r.dump, func() bool { st := r.status(h[1]); return st.State != StateUp || st.Since.After(up) })
	}
	r.waitUp(h[1])
	r.waitPath("203.0.113.0/24")
	f.waitFor("192.168.1.0/26", "show bgp ipv4 unicast")
	if now := beside.uptime(); now != since || r.happened(from, "del 198.51.100.0/24") != 0 {
		t.Errorf("the session beside was up since %q, and is since %q%s", since, now, r.dump())
	}
}
