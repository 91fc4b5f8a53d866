package trace

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/dataplane/survey"
)

var update = flag.Bool("update", false, "write the golden files")

var (
	client, web     = netip.MustParseAddr("192.168.1.5"), netip.MustParseAddr("192.168.3.5")
	clientMAC, vtep = dataplane.MAC{2, 0, 0, 0, 1, 1}, dataplane.MAC{2, 0, 0, 0, 1, 3}
)

// host is what one of two hosts knows of a packet from a pod on node1 to one on node3,
// through VXLAN, of which nothing is wrong.
func host(answers bool) Facts {
	f := Facts{
		Node: "node1", Peer: "node3", Remote: web, Answers: answers,
		Local:     End{Name: "shop/client", Device: "cali1", Addr: client, MTU: 1450},
		Verdict:   &Verdict{Allowed: true, By: "Profile(kns.shop) rule 0: everything"},
		Want:      &Want{Prefix: netip.MustParsePrefix("192.168.3.0/26"), Source: "the datastore", Peer: "node3", Encap: "VXLAN 4096", Links: "via 192.168.3.0 dev vxlan.calico"},
		Device:    &Device{Name: "vxlan.calico", Up: true, MTU: 1450},
		Outer:     netip.MustParseAddr("10.2.0.11"),
		NextHop:   &NextHop{Addr: netip.MustParseAddr("10.1.0.1"), Device: "eth0", Entry: survey.Entry{MAC: dataplane.MAC{2}, State: 2}},
		Takes:     &Verdict{Allowed: true, By: "vxlan/4096/4789 packets of node3 (10.2.0.11)"},
		Tunnel:    &apiv1.LookResponse_Tunnel{Device: "vxlan.calico", Encapsulation: "vxlan/4096/4789", LocalMac: clientMAC.String(), RemoteMac: vtep.String()},
		Neighbour: &Pair{Of: "192.168.3.0", Device: "vxlan.calico", Wanted: true, Want: survey.Permanent(vtep, netip.Addr{}), Have: survey.Permanent(vtep, netip.Addr{}), Add: "ip neigh replace …"},
	}
	gateway := "192.168.3.0"
	if answers {
		f.Node, f.Peer, f.Remote = "node3", "node1", client
		f.Local = End{Name: "shop/web", Device: "cali3", Addr: web, MTU: 1450}
		f.Want.Prefix, f.Want.Peer, f.Want.Links = netip.MustParsePrefix("192.168.1.0/26"), "node1", "via 192.168.1.0 dev vxlan.calico"
		f.Outer, f.NextHop.Addr, gateway = netip.MustParseAddr("10.1.0.11"), netip.MustParseAddr("10.2.0.1"), "192.168.1.0"
		f.Takes.By = "vxlan/4096/4789 packets of node1 (10.1.0.11)"
		f.Tunnel.LocalMac, f.Tunnel.RemoteMac = f.Tunnel.GetRemoteMac(), f.Tunnel.GetLocalMac()
		f.Neighbour.Of, f.Neighbour.Want.MAC, f.Neighbour.Have.MAC = gateway, clientMAC, clientMAC
	}
	there := survey.Permanent(f.Neighbour.Want.MAC, f.Outer)
	f.Forwarding = &Pair{Of: there.MAC.String(), Device: "vxlan.calico", Wanted: true, Want: there, Have: there, Add: "bridge fdb replace …"}
	table := func() doctor.Facts {
		return doctor.Facts{
			Node:    &apiv1.NodeResponse{Name: f.Node, Uplink: "eth0", Peers: []*apiv1.BGPPeer{{Name: "tor", State: "idle"}}}, // which is no part of the way
			Uplinks: []dataplane.UnderlayLink{{Name: "eth0", MTU: 1500, Up: true}},
			Pools:   []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")},
			Nodes:   map[netip.Addr]string{f.Outer: f.Peer},
			Paths:   []*apiv1.Path{{Node: f.Peer, Address: f.Outer.String(), Mtu: 1500, Answers: true}},
			Echoes:  []doctor.Echo{{Node: f.Peer, Encap: "vxlan/4096/4789", Device: "vxlan.calico", Addr: f.Outer, Answered: true, Full: 1450, Size: 1450}},
		}
	}
	f.Out, f.In = table(), table()
	f.Out.Ways = []doctor.Way{{
		Packet: survey.Packet{From: f.Local.Addr, To: f.Remote, In: f.Local.Device}, Node: f.Peer, Want: []string{"vxlan.calico"},
		Hop: survey.Hop{Device: "vxlan.calico", Gateway: netip.MustParseAddr(gateway), Table: dataplane.MainTable},
	}}
	f.In.Ways = []doctor.Way{{
		Packet: survey.Packet{From: f.Remote, To: f.Local.Addr, In: "vxlan.calico"}, Node: f.Peer, Want: []string{f.Local.Device},
		Hop: survey.Hop{Device: f.Local.Device, Table: dataplane.MainTable},
	}}
	return f
}

func answer(f Facts) Host {
	a := &apiv1.LookResponse{Node: f.Node, Tunnel: f.Tunnel}
	a.Out, a.In = Look(f)
	return Host{Node: f.Node, Answer: a}
}

// TestJoin: each thing that is wrong on the way is what the trace names, and what is well
// or of no matter to the packet is not.
func TestJoin(t *testing.T) {
	t.Parallel()
	foreign := doctor.Foreign{Theirs: "blackhole 192.168.3.0/27 proto 3", Ours: "route 192.168.3.0/26"}
	for name, tt := range map[string]struct {
		wrong func(src, dst *Facts)
		node  string
		check string // empty: the way is whole
		says  string
	}{
		"nothing": {func(*Facts, *Facts) {}, "", "", ""},
		"workload": {func(src, _ *Facts) {
			src.Out.Pods = []doctor.Pod{{Name: "shop/client", Device: "cali1", Err: errors.New("no route")}}
		}, "node1", "workload", "no route"},
		"of the other host": {func(_, dst *Facts) {
			dst.In.Pods = []doctor.Pod{{Name: "shop/web", Device: "cali3", Err: errors.New("eth0 is down")}}
		}, "node3", "workload", "kubectl delete pod -n shop web"},
		"lost address": {func(src, _ *Facts) { src.Local.Lost = "another workload has it" }, "node1", "workload-lost", "routerctl ipam show --ip=192.168.1.5"},
		"denied there": {func(_, dst *Facts) {
			dst.Verdict = &Verdict{By: "NetworkPolicy(shop/closed) rule 0", Cure: "routerctl get networkpolicy"}
		}, "node3", "policy", "NetworkPolicy(shop/closed) rule 0; routerctl get networkpolicy"},
		"denied on both": {func(src, dst *Facts) { src.Verdict.Allowed, dst.Verdict.Allowed = false, false }, "node1", "policy", ""},
		"firewall":       {func(_, dst *Facts) { dst.In.Host.Chains = []survey.Chain{{Family: "ip", Table: "fw", Name: "c"}} }, "node3", "forward-drop", "nft insert rule ip fw c"},
		"no route": {func(src, _ *Facts) {
			src.Want = nil
			src.Out.Lost = []doctor.Lost{{Prefix: netip.MustParsePrefix("192.168.3.0/26"), Node: "node3", Reason: "no path"}}
		}, "node1", "no-route", "no path"},
		"no way back": {func(_, dst *Facts) { dst.Out.Ways[0].Err = survey.ErrNoRoute }, "node3", "way", "are not forwarded"},
		"strict":      {func(_, dst *Facts) { dst.In.Ways[0].Err = survey.ErrSource }, "node3", "way", "rp_filter"},
		"strict device": {func(_, dst *Facts) {
			dst.In.Barred = []doctor.Barred{{Node: "node1", Addr: netip.MustParseAddr("10.1.0.11"), Device: "eth1", By: "eth1", Back: survey.Hop{Device: "eth0", Table: dataplane.MainTable}}}
		}, "node3", "rp-filter", "sysctl -w net.ipv4.conf.eth1.rp_filter=2"},
		"a rule is why": {func(src, _ *Facts) {
			src.Out.Host.Rules = []rule.Rule{{Family: dataplane.IPv4, To: netip.MustParsePrefix("192.168.0.0/16"), Action: "prohibit"}}
			src.Out.Ways[0].Err = survey.ErrForbidden
			src.Out.Pods = []doctor.Pod{{Name: "shop/client", Err: errors.New("no route of the host's")}}
		}, "node1", "foreign-rule", "ip rule del"},
		"a route is why": {func(_, dst *Facts) {
			dst.Out.Foreign = []doctor.Foreign{foreign}
			dst.In.Ways[0].Err = survey.ErrForbidden
		}, "node3", "foreign-route", "ip route del blackhole"},
		"a rule nobody meets": {func(src, _ *Facts) {
			src.Out.Host.Rules = []rule.Rule{{Family: dataplane.IPv4, To: netip.MustParsePrefix("192.168.0.0/16"), Action: "lookup", Table: 100}}
		}, "", "", ""},
		"device down":                     {func(src, _ *Facts) { src.Device.Up = false }, "node1", "device", "ip link set vxlan.calico up"},
		"device gone":                     {func(src, _ *Facts) { src.Device.Err = errors.New("no such network interface") }, "node1", "device", "systemctl restart routerd"},
		"too large":                       {func(src, _ *Facts) { src.Size = 1500 }, "node1", "mtu", "a packet of 1500 bytes does not fit vxlan.calico, which takes 1450"},
		"no neighbour":                    {func(src, _ *Facts) { src.Neighbour.Have = survey.Entry{} }, "node1", "tunnel-neighbour", "is none, and should be lladdr 02:00:00:00:01:03"},
		"another neighbour":               {func(src, _ *Facts) { src.Neighbour.Have.MAC = dataplane.MAC{9} }, "node1", "tunnel-neighbour", "; ip neigh replace"},
		"no forwarding entry":             {func(_, dst *Facts) { dst.Forwarding.Have = survey.Entry{} }, "node3", "tunnel-forwarding", "; bridge fdb replace"},
		"another VTEP":                    {func(src, _ *Facts) { src.Forwarding.Have.Dst = netip.MustParseAddr("10.2.0.99") }, "node1", "tunnel-forwarding", "dst 10.2.0.99"},
		"MAC address there":               {func(_, dst *Facts) { dst.Tunnel.LocalMac = "02:00:00:00:00:99" }, "node1", "tunnel-mac", "ip link set vxlan.calico address 02:00:00:00:01:03 # on node3"},
		"underlay":                        {func(src, _ *Facts) { src.OuterErr = survey.ErrNoRoute }, "node1", "underlay", "does not reach node3 (10.2.0.11)"},
		"uplink":                          {func(_, dst *Facts) { dst.Out.Uplinks[0].Up = false; dst.Out.Echoes[0].Answered = false }, "node3", "uplink-down", "ip link set eth0 up"},
		"the cause, not what comes of it": {func(src, dst *Facts) { src.Out.Echoes[0].Answered = false; dst.Out.Uplinks[0].Up = false }, "node3", "uplink-down", ""},
		"next hop":                        {func(src, _ *Facts) { src.NextHop.Entry = survey.Entry{State: 0x20} }, "node1", "next-hop", "nobody answers for 10.1.0.1 on eth0"},
		"fixed next hop":                  {func(src, _ *Facts) { src.Out.Host.Fixed = []survey.Neighbour{{Device: "eth0", Addr: src.Outer}} }, "node1", "fixed-neighbour", "ip neigh del"},
		"UDP is dropped":                  {func(src, _ *Facts) { src.Out.Echoes[0].Answered = false }, "node1", "tunnel", "no packet gets through vxlan.calico (UDP port 4789)"},
		"large ones are lost":             {func(src, _ *Facts) { src.Out.Echoes[0].Size = 1350 }, "node1", "tunnel-mtu", "more than 1350 bytes"},
		"small ones are not":              {func(src, _ *Facts) { src.Out.Echoes[0].Size = 1350; src.Size = 1350 }, "", "", ""},
		"checksums":                       {func(src, _ *Facts) { src.Out.Echoes[0].Offload = true }, "node1", "tunnel-offload", "routerctl node tunnels --retry node3"},
		"path":                            {func(src, _ *Facts) { src.Out.Paths[0].Mtu = 1490 }, "node1", "path-mtu", "is 1490, and that of eth0"},
		"path is large enough":            {func(src, _ *Facts) { src.Out.Paths[0].Mtu = 1490; src.Size = 1440 }, "", "", ""},
		"not taken in":                    {func(_, dst *Facts) { dst.Takes.Allowed = false }, "node3", "tunnel-source", "tunnel packets of node1 are not accepted"},
		"a change is under way":           {func(_, dst *Facts) { dst.Tunnel.Encapsulation, dst.Tunnel.LocalMac = "ipip", "" }, "", "", ""},
	} {
		src, dst := host(false), host(true)
		tt.wrong(&src, &dst)
		r := Join("a packet", answer(src), answer(dst))
		f := r.GetFault()
		verdict := Whole
		if tt.check != "" {
			verdict = Broken
		}
		if r.GetVerdict() != verdict || f.GetCheck() != tt.check || f.GetNode() != tt.node || !strings.Contains(f.GetWhat()+"; "+f.GetCure(), tt.says) {
			t.Errorf("%s: %s, %s of %q: %s; %s; want %s, %s of %q: %s", name, r.GetVerdict(), f.GetCheck(), f.GetNode(), f.GetWhat(), f.GetCure(), verdict, tt.check, tt.node, tt.says)
		}
		if f != nil && (f.GetCure() == "" && tt.check != "policy" && tt.check != "tunnel-source") {
			t.Errorf("%s: no cure", name)
		}
	}
}

// TestUnknown: where a host does not answer nothing is said to be well, and what the other
// one finds is named all the same.
func TestUnknown(t *testing.T) {
	t.Parallel()
	silent := Host{Node: "node3", Err: errors.New("no answer")}
	if r := Join("", answer(host(false)), silent); r.GetVerdict() != Unknown || !cmp.Equal(r.GetUnknown(), []string{"node3: no answer"}) {
		t.Errorf("%v", r)
	}
	src := host(false)
	src.Device.Up = false
	if r := Join("", answer(src), silent); r.GetVerdict() != Broken || r.GetFault().GetCheck() != "device" {
		t.Errorf("%v", r)
	}
}

// TestSteps holds the steps of whole ways, there and back.
func TestSteps(t *testing.T) {
	t.Parallel()
	outside := host(false)
	outside.Peer, outside.Remote, outside.Want, outside.Outer = "", netip.MustParseAddr("198.51.100.7"), nil, netip.Addr{}
	outside.Neighbour, outside.Forwarding, outside.Takes, outside.Tunnel = nil, nil, nil, nil
	outside.Device = &Device{Name: "eth0", Up: true, MTU: 1500}
	outside.Out.Ways[0].Want, outside.Out.Ways[0].Hop = []string{"eth0"}, survey.Hop{Device: "eth0", Gateway: outside.NextHop.Addr, Table: dataplane.MainTable}
	neighbours := func(answers bool) Facts {
		f := host(answers)
		f.Node, f.Peer = "node1", "node1"
		f.Want = &Want{Prefix: netip.PrefixFrom(f.Remote, 32), Source: "this host's workloads", Links: "dev cali3"}
		if answers {
			f.Verdict, f.Want.Links = nil, "dev cali1"
		}
		device := strings.TrimPrefix(f.Want.Links, "dev ")
		f.Device = &Device{Name: device, Up: true, MTU: 1450}
		f.Out.Ways[0].Want, f.Out.Ways[0].Hop = []string{device}, survey.Hop{Device: device, Table: dataplane.MainTable}
		f.Neighbour, f.Forwarding, f.Outer, f.NextHop, f.Takes, f.Tunnel = nil, nil, netip.Addr{}, nil, nil, nil
		return f
	}
	own := host(true)
	own.Local = End{Name: "node3", Addr: netip.MustParseAddr("10.2.0.11")}
	own.In.Ways = nil
	for name, r := range map[string]*apiv1.TraceResponse{
		"vxlan":    Join("icmp", answer(host(false)), answer(host(true))),
		"outside":  Join("icmp", answer(outside), Host{}),
		"one-host": Join("icmp", answer(neighbours(false)), answer(neighbours(true))),
		"to-host":  Join("icmp", answer(host(false)), answer(own)),
	} {
		var b strings.Builder
		fmt.Fprintln(&b, r.GetVerdict())
		for _, h := range r.GetHops() {
			way := "there"
			if h.GetBack() {
				way = "back"
			}
			fmt.Fprintf(&b, "%s %s: %s: %s\n", way, h.GetNode(), h.GetStep().GetName(), h.GetStep().GetWhat())
		}
		path := filepath.Join("testdata", name+".txt")
		if *update {
			if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), b.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestToService: of the ways to a Service's endpoints one that is broken is named, and a
// host that was not asked is judged by its rules.
func TestToService(t *testing.T) {
	t.Parallel()
	judged := func(allowed bool) *apiv1.TraceResponse {
		a := Judged("node3", false, Verdict{Allowed: allowed, By: "NetworkPolicy(shop/closed) rule 0", Cure: "routerctl get networkpolicy"})
		return Join("a packet", answer(host(false)), Host{Node: "node3", Answer: a, Err: errors.New("it cannot be asked")})
	}
	for _, tt := range []struct {
		name    string
		ways    []*apiv1.TraceResponse
		verdict string
		check   string
	}{
		{"one", []*apiv1.TraceResponse{Join("a packet", answer(host(false)), answer(host(true)))}, Whole, ""},
		{"not asked", []*apiv1.TraceResponse{judged(true)}, Unknown, ""},
		{"denied by what the datastore says", []*apiv1.TraceResponse{judged(false)}, Broken, "policy"},
		{"each", []*apiv1.TraceResponse{judged(true), judged(false), judged(true)}, Broken, "policy"},
		{"no way", nil, Whole, ""},
	} {
		r := &apiv1.TraceResponse{Verdict: Whole}
		ToService(r, tt.ways)
		if r.GetVerdict() != tt.verdict || r.GetFault().GetCheck() != tt.check {
			t.Errorf("%s: %s, %s; want %s, %s", tt.name, r.GetVerdict(), r.GetFault().GetCheck(), tt.verdict, tt.check)
		}
		if len(r.GetWays()) != len(tt.ways) {
			t.Errorf("%s: %d ways", tt.name, len(r.GetWays()))
		}
	}
}
