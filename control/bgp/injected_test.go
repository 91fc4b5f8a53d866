package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/inject"
	"github.com/routerd/routerd/store"
)

// TestRefusesInjection: what belongs to somebody in the cluster is refused unless an entry that is as narrow names it.
func TestRefusesInjection(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ prefix, allow, says string }{
		{"203.0.113.7/32", "", ""},
		{"10.1.0.50/32", "", ""}, // in the nodes' subnet, as keepalived has it
		{"10.0.0.0/8", "", ""},
		{"10.1.0.12/32", "", "the address of node node2"},
		{"10.1.0.12/32", "10.1.0.12/32", "the address of node node2"},
		{"192.168.7.0/24", "", "inside the pool 192.168.0.0/16, whose addresses IPAM assigns: it is accepted only if bgp.inject.allow lists a part of the pool"},
		{"192.168.0.0/16", "", "inside the pool 192.168.0.0/16"},
		{"192.168.7.0/24", "192.0.0.0/8", "inside the pool 192.168.0.0/16"},
		{"192.168.7.0/24", "192.168.7.0/24", ""},
		{"192.168.8.0/24", "192.168.7.0/24", "outside bgp.inject.allow"},
		{"0.0.0.0/0", "", "the default route: it is accepted only if bgp.inject.allow lists exactly it"},
		{"0.0.0.0/0", "0.0.0.0/0", ""},
		{"127.0.0.1/32", "0.0.0.0/0", "loopback"},
		{"fe80::/64", "", "link-local"},
		{"2001:db8::/32", "", ""},
	} {
		v := view(t, bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), ippool(t, "pool", `{"cidr":"192.168.0.0/16"}`))
		if c.allow != "" {
			v.injection.allow = prefixes(c.allow)
		}
		v.injection.routes = []inject.Entry{{Owner: "lb", Route: inject.Route{Prefix: netip.MustParsePrefix(c.prefix), Communities: []string{"65000:1"}}}}
		cfg, err := Desired(v, "node1")
		if err != nil {
			t.Fatal(err)
		}
		p := netip.MustParsePrefix(c.prefix)
		got := cfg.refusesInjection(p)
		if (got == "") != (c.says == "") || !strings.Contains(got, c.says) {
			t.Errorf("%s with %q: %q, want %q", c.prefix, c.allow, got, c.says)
		}
		if announced := strings.Contains(cfg.text(), "announce "+c.prefix+" communities 65000:1\n"); announced != (c.says == "") {
			t.Errorf("%s with %q: announced: %t", c.prefix, c.allow, announced)
		}
	}
	none := view(t, bgpNode(t, "node1", "10.1.0.11/24"), peer(t, "local", `{"peerIP":"127.0.0.2","asNumber":64600}`))
	if cfg, err := Desired(none, "node1"); err != nil || !strings.Contains(cfg.text(), "down: spec.peerIP 127.0.0.2: programs on this host may not inject routes (bgp.inject.maxRoutes is 0)") {
		t.Errorf("where nobody may inject: %v\n%s", err, cfg.text())
	}
}

// TestInjected: what a program on the host injects, a switch hears, with the host's attributes, until the program is gone; a
// restart of the daemon withdraws nothing.
func TestInjected(t *testing.T) {
	eachOther(t, func(t *testing.T, begin func(remote) other) {
		h := hosts(t, 2)
		o := begin(remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512})
		options := Options{Node: "node1", SecretDir: t.TempDir(), Inject: InjectOptions{MaxRoutes: 2, File: filepath.Join(t.TempDir(), "injected")}}
		events := store.Batch{Synced: true, Events: []store.Event{
			conf(t, "default", `{"bindMode":"NodeIP"}`), ippool(t, "pool", `{"cidr":"192.168.0.0/16"}`), bgpNode(t, "node1", h[0].String()+"/32"),
			peer(t, "tor", fmt.Sprintf(`{"peerIP":%q,"asNumber":64999}`, h[1])),
		}}
		d := newDaemonOf(t, options)
		d.send(events)
		d.waitErr("")
		routes := func(list ...string) (out []inject.Route) {
			for _, p := range prefixes(list...) {
				out = append(out, inject.Route{Prefix: p, Communities: []string{"65000:7"}})
			}
			return out
		}
		for prefix, want := range map[string]error{"192.168.1.0/24": ErrRefused, h[0].String() + "/32": ErrRefused} {
			if err := d.Inject("lb", inject.Lease{TTL: time.Minute}, routes(prefix), false); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", prefix, err, want)
			}
		}
		if err := d.Inject("lb", inject.Lease{TTL: time.Minute}, []inject.Route{{Prefix: prefixes("203.0.113.0/24")[0], NextHop: netip.MustParseAddr("fd00::1")}}, false); !errors.Is(err, inject.ErrInvalid) {
			t.Errorf("a next hop of the other family: %v", err)
		}
		if err := d.Inject("lb", inject.Lease{TTL: time.Minute}, []inject.Route{{Prefix: prefixes("203.0.113.0/24")[0], Communities: []string{"x"}}}, false); !errors.Is(err, inject.ErrInvalid) {
			t.Errorf("a community that is none: %v", err)
		}
		s, err := d.OpenInjection("lb", 0)
		if err == nil {
			err = s.Put(routes("203.0.113.7/32", "203.0.113.8/32"), false)
		}
		if err != nil {
			t.Fatal(err)
		}
		o.waitRoute("203.0.113.7/32", "64512", h[0].String(), communityText(o, "65000:7"))
		explained, err := d.Explain(t.Context(), netip.MustParsePrefix("203.0.113.7/32"))
		// A peer may have sent it back by now, as FRR does.
		explained = slices.DeleteFunc(explained, func(r Route) bool { return r.State == RouteFiltered })
		if err != nil || len(explained) != 2 || explained[0].Owner != "lb" || explained[0].State != RouteBest || explained[1].State != RouteAdvertised {
			t.Errorf("explained as %+v, %v", explained, err)
		}
		owners := map[string]string{}
		err = d.Query(t.Context(), Query{Table: TableAdvertised, Peer: h[1]}, func(r Route) bool { owners[r.Prefix.String()] = r.Owner; return true })
		if err != nil || owners["203.0.113.7/32"] != "lb" || owners["203.0.113.8/32"] != "lb" {
			t.Errorf("advertised for %v, %v", owners, err)
		}

		d.stop()
		s.Close() // as the end of the daemon does
		d = newDaemonOf(t, options)
		d.send(events)
		if list := d.Injected(); len(list) != 2 || list[0].TTL == 0 || list[0].Stream {
			t.Errorf("after a restart: %+v", list)
		}
		s, err = d.OpenInjection("lb", 0)
		if err == nil {
			err = s.Put(routes("203.0.113.7/32"), true)
		}
		if err != nil {
			t.Fatal(err)
		}
		o.waitNoRoute("203.0.113.8/32")
		o.waitRoute("203.0.113.7/32", "64512")
		s.Close()
		o.waitNoRoute("203.0.113.7/32")
		if list := d.Injected(); len(list) != 0 {
			t.Errorf("of whom is gone: %+v", list)
		}
	})
}

// TestLocalPeer: what a program on the host announces over the loopback, by eBGP or iBGP, peers of both kinds hear as this host's
// own; the kernel is told nothing of it, and what may not be injected is filtered.
func TestLocalPeer(t *testing.T) {
	t.Parallel()
	for i, asn := range []uint32{64600, 64512} {
		t.Run(fmt.Sprint("AS ", asn), func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 3)
			self, program := netip.AddrFrom4([4]byte{127, 0, 78, 1}), netip.AddrFrom4([4]byte{127, 0, 78, byte(2 + i)})
			if i == 1 {
				self = netip.AddrFrom4([4]byte{127, 0, 79, 1})
			}
			startBIRDAs(t, remote{
				self: program, asn: asn, peer: self, peerASN: 64512, opens: true, communities: "65000:7",
				routes: []string{"203.0.113.7/32", "192.168.9.0/24", "10.9.0.0/16"},
			})
			sw := startBIRDAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512})
			mate := newRun(t, SpeakerOptions{})
			p := tor(h[2], h[0], 64512)
			mate.apply(testConfig(h[2], 64512, nil, p))

			r := newRun(t, SpeakerOptions{})
			local := tor(self, program, asn)
			local.Local, local.Passive, local.Source, local.Filters, local.MaxPrefixes = true, true, netip.Addr{}, "f", 10
			if asn == 64512 {
				local.ClusterID = h[0]
			}
			c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, local, tor(h[0], h[1], 64999), waiting(tor(h[0], h[2], 64512)))
			c.ListenAddrs = append(c.ListenAddrs, self)
			c.Filters = map[string]Filter{"f": parse(t, `{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"Equal","action":"Reject"}]}`)}
			r.apply(c)

			path := "64512 64600"
			if asn == 64512 {
				path = "64512"
			}
			sw.waitRoute("203.0.113.7/32", "BGP.as_path: "+path, "BGP.next_hop: "+h[0].String(), "(65000,7)")
			mate.waitPath("203.0.113.7/32")
			if got, _ := mate.path("203.0.113.7/32"); got.NextHop != h[0] || got.LocalPref != LocalPref {
				t.Errorf("the other node has %+v", got)
			}
			poll(t, r.dump, func() bool { return r.status(program).Received == 3 })
			got := map[string]string{}
			err := r.Query(t.Context(), Query{Table: TableReceived, Peer: program}, func(x Route) bool {
				got[x.Prefix.String()] = x.State + " " + x.Reason
				return true
			})
			want := map[string]string{
				"203.0.113.7/32": "accepted ", "10.9.0.0/16": "filtered BGPFilter f: importV4[0] rejects it",
				"192.168.9.0/24": "filtered inside the pool 192.168.0.0/16, whose addresses IPAM assigns: it is accepted only if bgp.inject.allow lists a part of the pool; it may not be injected",
			}
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("received %v, %v\nwant %v", got, err, want)
			}
			routes, err := r.Routes(t.Context())
			if _, ok := r.path("203.0.113.7/32"); ok || err != nil || len(routes) != 0 {
				t.Errorf("the kernel is told of what a program on this host has: %v, %v", routes, err)
			}
		})
	}
}
