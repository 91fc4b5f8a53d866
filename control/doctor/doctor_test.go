package doctor

import (
	"errors"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/dataplane/survey"
)

// healthy is a host of which nothing is wrong, with something of everything.
func healthy() Facts {
	return Facts{
		Node: &apiv1.NodeResponse{
			Name: "node1",
			Health: &apiv1.Health{
				Live: &apiv1.Check{Ok: true}, Ready: &apiv1.Check{Ok: true},
				Conditions: []*apiv1.Check{{Name: "Registered", Ok: true}, {Name: "ForeignRoutes", Ok: true}, {Name: "Pool/p", Ok: true}},
			},
			Peers: []*apiv1.BGPPeer{{Address: "10.1.0.1", Name: "tor", State: "up", Counted: true, MaxPrefixes: 100, Families: []*apiv1.BGPFamily{{Received: 89}}}},
			Pools: []*apiv1.PoolStatus{{Name: "p", Cidr: "192.168.0.0/16", Encapsulation: "VXLAN", Usable: true}},
		},
		Uplinks: []dataplane.UnderlayLink{{Name: "eth0", MTU: 1500, Up: true}},
		Host: survey.Host{
			Rules: []rule.Rule{
				{Family: dataplane.IPv4, From: netip.MustParsePrefix("10.9.0.0/16"), Action: "lookup", Table: 100},
				{Family: dataplane.IPv4, From: netip.MustParsePrefix("192.168.0.0/16"), Mark: 1, Action: "lookup", Table: 100},
			},
			Chains:     []survey.Chain{{Family: "ip", Table: "filter", Name: "FORWARD", Lets: true}},
			Conntrack:  survey.Fill{Count: 89, Max: 100},
			Fixed:      []survey.Neighbour{{Device: "vxlan.calico", Addr: netip.MustParseAddr("10.1.0.12")}, {Device: "eth0", Addr: netip.MustParseAddr("10.1.0.99")}},
			Neighbours: map[dataplane.Family]survey.Fill{dataplane.IPv4: {Count: 3, Max: 1024}},
		},
		Pools:  []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")},
		Nodes:  map[netip.Addr]string{netip.MustParseAddr("10.1.0.12"): "node2"},
		Ways:   []Way{{Packet: survey.Packet{To: netip.MustParseAddr("192.168.2.1")}, Node: "node2", Want: []string{"eth0"}, Hop: survey.Hop{Device: "eth0"}}},
		Paths:  []*apiv1.Path{{Node: "node2", Address: "10.1.0.12", Mtu: 1500, Answers: true}},
		Echoes: []Echo{{Node: "node2", Encap: "vxlan/4096/4789", Device: "vxlan.calico", Answered: true, Full: 1450, Size: 1450}},
		Disks:  []Disk{{Dir: "/var/lib/routerd", Free: 1 << 30, Size: 2 << 30, Files: 1000, Inodes: 2000}, {Dir: "/run/routerd"}},
	}
}

// TestExamine: each thing that is wrong is found by its check, first, with what it is
// about and what mends it; what is well gives nothing.
func TestExamine(t *testing.T) {
	t.Parallel()
	unmet := func(name, reason string) func(*Facts) {
		return func(f *Facts) {
			f.Node.Health.Conditions = append(f.Node.Health.Conditions, &apiv1.Check{Name: name, Reason: reason})
		}
	}
	session := func(info string) func(*Facts) {
		return func(f *Facts) {
			p := f.Node.Peers[0]
			p.State, p.Info = "start", info
		}
	}
	way := func(w Way) func(*Facts) {
		return func(f *Facts) {
			w.Node, w.Want = "node2", []string{"cali1"}
			w.Packet = survey.Packet{From: netip.MustParseAddr("192.168.2.1"), To: netip.MustParseAddr("192.168.1.1"), In: "eth0"}
			f.Ways = append(f.Ways, w)
		}
	}
	echo := func(e Echo) func(*Facts) {
		return func(f *Facts) {
			e.Node, e.Addr, e.Full = "node3", netip.MustParseAddr("10.2.0.11"), 1450
			f.Echoes = append(f.Echoes, e)
		}
	}
	barredBy := func(by string) func(*Facts) {
		return func(f *Facts) {
			back := survey.Hop{Device: "eth0", Gateway: netip.MustParseAddr("10.1.0.1"), Table: dataplane.MainTable}
			f.Barred = []Barred{{"node3", netip.MustParseAddr("10.2.0.11"), "eth1", by, back}, {"node4", netip.MustParseAddr("10.2.0.12"), "eth1", by, back}}
			echo(Echo{Encap: "vxlan/4096/4789", Device: "vxlan.calico", Heard: Yes})(f)
			session("connecting")(f)
		}
	}
	mac := dataplane.MAC{2, 0, 0, 0, 0, 9}
	for name, tt := range map[string]struct {
		wrong    func(*Facts)
		severity Severity
		check    string
		says     string // what and cure
	}{
		"nothing":             {func(*Facts) {}, "", "", ""},
		"hangs":               {func(f *Facts) { f.Node.Health.Live = &apiv1.Check{Reason: "the core"} }, Critical, "live", "the core; systemctl restart routerd"},
		"registered":          {unmet("Registered", "node a cannot register with address 10.1.0.1: node b is registered with it"), Critical, "condition-registered", "routerctl delete node NAME"},
		"locked":              {unmet("Datastore", "the datastore is locked"), Critical, "condition-datastore", "; routerctl datastore unlock"},
		"MTU":                 {unmet("WorkloadMTU", "vxlanMTU of FelixConfiguration is 8000, and eth0 takes 1500"), Critical, "condition-workloadmtu", "; routerctl get felixconfigurations default"},
		"certificate":         {unmet("Certificates", "client.crt ends on Monday"), Warning, "condition-certificates", "client.crt ends on Monday"},
		"a new condition":     {unmet("Weather", "rain"), Warning, "condition-weather", "Weather is not met: rain; routerctl node status"},
		"little room":         {func(f *Facts) { f.Disks[0].Free = 20 << 20 }, Warning, "disk-full", "nearly full: 20 MiB of 2048 are free; du -xsh /var/lib/routerd/*"},
		"no room":             {func(f *Facts) { f.Disks[0].Free = 4096 }, Critical, "disk-full", "full: 4 KiB are free"},
		"no inodes":           {func(f *Facts) { f.Disks[0].Files = 0 }, Critical, "disk-full", "no room for more files; df -i"},
		"own address claimed": {func(f *Facts) { f.Claims = []Claim{{"eth0", netip.MustParseAddr("10.1.0.11"), []dataplane.MAC{mac}}} }, Critical, "duplicate-address", "this host's address 10.1.0.11 too: 02:00:00:00:00:09; ip addr del 10.1.0.11/32"},
		"a peer's address claimed": {
			func(f *Facts) {
				f.Claims = []Claim{{"eth0", netip.MustParseAddr("10.1.0.12"), []dataplane.MAC{mac, {2}}}}
			},
			Critical, "duplicate-address", "10.1.0.12, the address of node2",
		},
		"workload":     {func(f *Facts) { f.Pods = []Pod{{"shop/web", "cali1", errors.New("no route")}} }, Critical, "workload", "no route; kubectl delete pod -n shop web"},
		"route":        {func(f *Facts) { f.Foreign = []Foreign{{"fd00::/64 proto 3", "route fd00::/48"}} }, Critical, "foreign-route", "; ip -6 route del fd00::/64 proto 3"},
		"rule":         {func(f *Facts) { f.Host.Rules[1].Mark = 0 }, Warning, "foreign-rule", "; ip rule del priority 0 from 192.168.0.0/16 lookup 100"},
		"rule it uses": {func(f *Facts) { f.Host.Rules[1].Mark = 0; f.Ways[0].Hop.Device = "eth1" }, Critical, "foreign-rule", "lookup 100"},
		"neighbour":    {func(f *Facts) { f.Host.Fixed[0].Device = "eth0" }, Critical, "fixed-neighbour", "; ip neigh del 10.1.0.12 dev eth0"},
		"firewall":     {func(f *Facts) { f.Host.Chains[0].Lets = false }, Critical, "forward-drop", "nft insert rule ip filter FORWARD iifname \"cali*\" accept"},
		"conntrack":    {func(f *Facts) { f.Host.Conntrack.Count = 100 }, Critical, "table-full", "full: 100 of 100; sysctl -w net.netfilter.nf_conntrack_max=400"},
		"neighbours": {
			func(f *Facts) { f.Host.Neighbours[dataplane.IPv4] = survey.Fill{Count: 950, Max: 1024} },
			Warning, "table-full", "IPv4 neighbours is nearly full: 950 of 1024; sysctl -w net.ipv4.neigh.default.gc_thresh3=4096",
		},
		"path":          {func(f *Facts) { f.Paths[0].Mtu = 1400 }, Warning, "path-mtu", "is 1400, and that of eth0 is 1500; ip link set eth0 mtu 1400"},
		"VXLAN":         {echo(Echo{Encap: "vxlan/4096/4789", Device: "vxlan.calico"}), Critical, "tunnel", "vxlan.calico (UDP port 4789) to node3 (10.2.0.11) and back; nft insert rule inet filter input udp dport 4789 accept"},
		"IPIP":          {echo(Echo{Encap: "ipip", Device: "tunl0"}), Critical, "tunnel", "tunl0 (protocol 4) to node3 (10.2.0.11) and back; nft insert rule inet filter input ip protocol 4 accept"},
		"one way":       {echo(Echo{Encap: "ipip", Device: "tunl0", Heard: Yes}), Critical, "tunnel", "packets get through tunl0 (protocol 4) to node3 (10.2.0.11), but none come back; nft insert rule inet filter input ip protocol 4 accept # on this host, node3"},
		"the other way": {echo(Echo{Encap: "ipip", Device: "tunl0", Heard: No}), Critical, "tunnel", "no packet gets through tunl0 (protocol 4) to node3 (10.2.0.11): it receives nothing from this host; nft insert rule inet filter input ip protocol 4 accept # on node3"},
		"clock": {func(f *Facts) {
			f.Clocks = []Clock{{"node2", 7 * time.Second, 8 * time.Second}, {"node3", -time.Second, time.Second}}
		}, Warning, "clock", "the clock of node2 is 7s ahead of those of 2 of 3 hosts; timedatectl set-ntp true # on node2"},
		"large packets": {echo(Echo{Encap: "vxlan/4096/4789", Device: "vxlan.calico", Answered: true, Size: 1350}), Warning, "tunnel-mtu", "more than 1350 bytes are lost"},
		"offload":       {echo(Echo{Encap: "vxlan/4096/4789", Device: "vxlan.calico", Answered: true, Offload: true, Size: 1450}), Critical, "tunnel-offload", "; routerctl node tunnels --retry node3"},
		"uplink":        {func(f *Facts) { f.Uplinks[0].Up = false }, Critical, "uplink-down", "ip link set eth0 up"},
		"address": {func(f *Facts) {
			f.Missing = []netip.Prefix{netip.MustParsePrefix("10.1.0.11/24")}
			f.Node.Uplink = "eth0"
		}, Critical, "address-missing", "; ip addr add 10.1.0.11/24 dev eth0"},
		"Calico": {
			func(f *Facts) { f.Felix, f.Calico = []string{"table x"}, []string{"calico-node -felix (process 7)"} },
			Critical, "calico-runs", "beside routerd: calico-node -felix (process 7); systemctl disable --now calico-felix",
		},
		"Felix": {func(f *Facts) { f.Felix = []string{"table x"} }, Critical, "felix-rules", "table x; routerd cleanup --calico"},
		"hidden blocks": {func(f *Facts) {
			to := netip.MustParseAddr("10.1.0.1")
			f.Hidden = []Hidden{{netip.MustParsePrefix("192.168.1.0/26"), "tor", to, "mute", "BGPFilter mute: rule 1 rejects it"}, {netip.MustParsePrefix("192.168.1.64/26"), "tor", to, "mute", "BGPFilter mute: rule 1 rejects it"}}
		}, Warning, "hidden-block", "tor (10.1.0.1) does not receive this host's block 192.168.1.0/26: BGPFilter mute: rule 1 rejects it, nor of 192.168.1.64/26; routerctl get bgpfilters mute -o yaml"},
		"a node is gone": {func(f *Facts) { f.Lost = []Lost{{netip.MustParsePrefix("192.168.2.0/26"), "node2", "far", nil, true}} }, Warning, "no-route", "192.168.2.0/26 is a block of node node2, which does not exist; routerctl ipam check --fix"},
		"no route":       {func(f *Facts) { f.Lost = []Lost{{netip.MustParsePrefix("192.168.2.0/26"), "node2", "far", nil, false}} }, Critical, "no-route", "192.168.2.0/26 of node2: far; routerctl routes 192.168.2.0/26"},
		"filter": {func(f *Facts) {
			f.Lost = []Lost{{netip.MustParsePrefix("192.168.2.0/26"), "node2", "far", []string{"tor announces it, and BGPFilter no: importV4[0] rejects it"}, false}}
		}, Critical, "no-route", "; routerctl get bgpfilters no -o yaml"},
		"refused": {func(f *Facts) {
			f.Lost = []Lost{{netip.MustParsePrefix("192.168.2.0/26"), "node2", "far", []string{"tor announces it, and AS loop"}, false}}
		}, Critical, "no-route", "; routerctl bgp explain 192.168.2.0/26"},
		"other gateway": {way(Way{Via: netip.MustParseAddr("10.1.0.2"), Hop: survey.Hop{Device: "cali1", Gateway: netip.MustParseAddr("10.1.0.1"), Table: 254}}), Critical, "way", "leave via 10.1.0.1 dev cali1 instead of cali1 via 10.1.0.2"},
		"source check":  {way(Way{Err: survey.ErrSource}), Critical, "way", "sysctl -w net.ipv4.conf.eth0.rp_filter=2"},
		"strict device": {barredBy("eth1"), Critical, "rp-filter", "node3 (10.2.0.11), node4 (10.2.0.12) come in by eth1, which drops them: the way back is via 10.1.0.1 dev eth0, and rp_filter of eth1 is strict; sysctl -w net.ipv4.conf.eth1.rp_filter=2 # or have the routers send to eth0"},
		"all strict":    {barredBy("all"), Critical, "rp-filter", "; sysctl -w net.ipv4.conf.eth1.rp_filter=2"},
		"not forwarded": {way(Way{Err: survey.ErrNotForwarded}), Critical, "way", "sysctl -w net.ipv4.conf.eth0.forwarding=1"},
		"elsewhere":     {way(Way{Hop: survey.Hop{Device: "eth1", Table: 100}}), Critical, "way", "leave dev eth1 table 100 instead of cali1; ip route get 192.168.1.1 from 192.168.2.1 iif eth0"},
		"nowhere":       {way(Way{Err: survey.ErrForbidden}), Critical, "way", "are not forwarded"},
		"kernel":        {func(f *Facts) { f.Failed = []*apiv1.ObjectStatus{{Kind: "route", Object: "r", Reason: "no"}} }, Critical, "kernel-refuses", "the route r; routerctl routes --all"},
		"pool": {func(f *Facts) {
			f.Node.Pools[0].Usable, f.Node.Pools[0].Reason = false, "device tunl0: this kernel cannot make ipip devices"
		}, Critical, "pool", "; modprobe ipip"},
		"change":    {func(f *Facts) { f.Node.Pools[0].Reason = "not yet using VXLAN" }, Warning, "pool-change", "; routerctl pool status p"},
		"wrong AS":  {session("wrong AS: 10.1.0.1 has AS 1, but AS 2 is configured for it"), Critical, "bgp-session", "; routerctl get bgppeers tor -o yaml # correct spec.asNumber"},
		"keys":      {session("connecting; TCP-AO suspected: 3 segments came without a signature"), Critical, "bgp-session", "the same keys"},
		"password":  {session("connecting; MD5 suspected: 3 segments came without a signature"), Critical, "bgp-session", "the same spec.password"},
		"filtered":  {session("no answer from 10.1.0.1:179: it is down, or filtered on the way"), Critical, "bgp-session", "; tcpdump -ni any 'tcp port 179 and host 10.1.0.1'"},
		"listening": {func(f *Facts) { f.Node.Peers[0].State = "listening" }, "", "", ""},
		"not up yet": {func(f *Facts) {
			session("connecting")(f)
			f.Node.Peers[0].Due, f.Now = timestamppb.New(time.Unix(100, 0)), time.Unix(99, 0)
		}, "", "", ""},
		"nobody has its address": {func(f *Facts) {
			session("connecting")(f)
			f.Node.Peers[0].Due, f.Now = timestamppb.New(time.Unix(100, 0)), time.Unix(99, 0)
			f.Silent = map[netip.Addr]string{netip.MustParseAddr("10.1.0.1"): "eth0"}
		}, Critical, "bgp-session", "no host on eth0 has that address: no answer to ARP; routerctl get bgppeers tor -o yaml"},
		"overdue": {func(f *Facts) {
			session("connecting")(f)
			f.Node.Peers[0].Due, f.Now = timestamppb.New(time.Unix(100, 0)), time.Unix(100, 0)
		}, Critical, "bgp-session", "connecting"},
		"another reason": {session("nobody knows"), Critical, "bgp-session", "; routerctl events bgp"},
		"limit":          {func(f *Facts) { f.Node.Peers[0].Families[0].Received = 90 }, Warning, "bgp-limit", "; routerctl bgp routes 10.1.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := healthy()
			tt.wrong(&f)
			got := Examine(f)
			if tt.check == "" {
				if diff := cmp.Diff([]Finding(nil), got); diff != "" {
					t.Error(diff)
				}
				return
			}
			if len(got) == 0 || got[0].Severity != tt.severity || got[0].Check != tt.check || got[0].Node == "" || got[0].Cause == "" {
				t.Fatalf("got %+v, want first %s of %s", got, tt.severity, tt.check)
			}
			if s := got[0].What + "; " + got[0].Cure; !strings.Contains(s, tt.says) {
				t.Errorf("%q does not hold %q", s, tt.says)
			}
		})
	}
}

// TestAwaited: a session that may come up yet is not known to be well, and is named as such.
func TestAwaited(t *testing.T) {
	t.Parallel()
	f := healthy()
	f.Now = time.Unix(70, 0)
	p := f.Node.Peers[0]
	p.Due = timestamppb.New(time.Unix(100, 0))
	if got := Awaited(f); got != nil {
		t.Errorf("of a session that is up: %q", got)
	}
	p.State, p.Info = "start", "connecting"
	if diff := cmp.Diff([]string{"BGP session with tor (10.1.0.1): it is not up yet; by the timers of both sides it may take 30s more: connecting"}, Awaited(f)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestClocks: of hosts whose clocks differ those are named that most do not agree with, and none that may agree.
func TestClocks(t *testing.T) {
	t.Parallel()
	const s = time.Second
	for name, tt := range map[string]struct {
		clocks []Clock
		want   []string // NODE SEVERITY TEXT
	}{
		"nobody answers":        {nil, nil},
		"all alike":             {[]Clock{{"b", -s, s}, {"c", 3 * s, 4 * s}}, nil},
		"a slow answer":         {[]Clock{{"b", -9 * s, 4 * s}}, nil},
		"ahead":                 {[]Clock{{"b", 0, s}, {"c", 65 * s, 66 * s}}, []string{"c warning the clock of c is 1m5s ahead of those of 2 of 3 hosts"}},
		"behind, by an hour":    {[]Clock{{"b", 0, s}, {"c", -3602 * s, -3600 * s}}, []string{"c critical the clock of c is 1h0m0s behind those of 2 of 3 hosts"}},
		"this host":             {[]Clock{{"b", -40 * s, -39 * s}, {"c", -41 * s, -39 * s}}, []string{"a warning the clock of a is 40s ahead of those of 2 of 3 hosts"}},
		"this host and another": {[]Clock{{"b", 60 * s, 60 * s}, {"c", 60 * s, 60 * s}, {"d", 60 * s, 60 * s}, {"e", -60 * s, -60 * s}}, []string{"a warning the clock of a is 1m0s behind those of 3 of 5 hosts", "e warning the clock of e is 2m0s behind those of 3 of 5 hosts"}},
		"one against one":       {[]Clock{{"b", 20 * s, 21 * s}}, []string{"b warning the clock of b is 20s ahead of that of a, and no more than half of the hosts agree: find out which is right"}},
	} {
		f := healthy()
		f.Node.Name, f.Clocks = "a", tt.clocks
		var got []string
		for _, d := range Examine(f) {
			got = append(got, d.Node+" "+string(d.Severity)+" "+d.What)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// TestExamineCluster: what the datastore shows to be wrong is found, and where.
func TestExamineCluster(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddr
	ok := func(name string) []*apiv1.Check { return []*apiv1.Check{{Name: name, Ok: true}} }
	base := func() Cluster {
		return Cluster{Self: "a", Present: map[string]bool{"a": true, "b": true}, Members: []Member{
			{Name: "a", Addrs: []netip.Addr{addr("10.1.0.1")}, Tunnels: []netip.Addr{addr("192.168.1.0")}, Conditions: []*apiv1.Check{{Name: "Policy", Reason: "its own doctor says it"}}},
			{Name: "b", Addrs: []netip.Addr{addr("10.1.0.2")}, Tunnels: []netip.Addr{addr("192.168.2.0")}, Conditions: ok("Policy")},
			{Name: "calico", Addrs: []netip.Addr{addr("10.1.0.3")}},
		}}
	}
	for name, tt := range map[string]struct {
		wrong    func(*Cluster)
		severity Severity
		check    string
		node     string
		says     string
	}{
		"nothing":        {func(*Cluster) {}, "", "", "", ""},
		"not known":      {func(c *Cluster) { c.Present = nil }, "", "", "", ""},
		"absent":         {func(c *Cluster) { delete(c.Present, "b"); c.Members[1].Conditions[0].Ok = false }, Critical, "host-absent", "b", "the daemon of b is absent; systemctl restart routerd # on b"},
		"address":        {func(c *Cluster) { c.Members[2].Addrs = c.Members[0].Addrs }, Critical, "shared-address", "a", "a and calico have one address, 10.1.0.1; routerctl delete node calico"},
		"tunnel address": {func(c *Cluster) { c.Members[1].Tunnels = c.Members[0].Tunnels }, Critical, "shared-tunnel-address", "a", "a and b have one tunnel address, 192.168.1.0"},
		"condition":      {func(c *Cluster) { c.Members[1].Conditions = []*apiv1.Check{{Name: "Pool-p", Reason: "no"}} }, Critical, "condition-pool-p", "b", "a pool cannot be served: no; routerctl get ippools p -o yaml # on b"},
		"records":        {func(c *Cluster) { c.Records = []Record{{"leaked", "x", "y", "z"}, {"leaked", "x2", "y", "z"}} }, Warning, "ipam-records", "", "leaked: x: y (and 1 more); routerctl ipam check"},
		"used twice":     {func(c *Cluster) { c.Records = []Record{{"used twice", "x", "y", "z"}} }, Critical, "ipam-records", "", "used twice: x"},
	} {
		c := base()
		tt.wrong(&c)
		got := ExamineCluster(c)
		if tt.check == "" && len(got) == 0 {
			continue
		}
		if len(got) != 1 || got[0].Check != tt.check || got[0].Severity != tt.severity || got[0].Node != tt.node || !strings.Contains(got[0].What+"; "+got[0].Cure, tt.says) {
			t.Errorf("%s: got %+v, want one %s of %s on %q that says %q", name, got, tt.severity, tt.check, tt.node, tt.says)
		}
	}
}

// TestSort: the worst comes first, and otherwise nothing moves.
func TestSort(t *testing.T) {
	t.Parallel()
	list := []Finding{{Severity: Warning, What: "1"}, {Severity: Critical, What: "2"}, {Severity: Warning, What: "3"}, {Severity: Critical, What: "4"}}
	Sort(list)
	var got string
	for _, f := range list {
		got += f.What
	}
	if got != "2413" {
		t.Errorf("order %s, want 2413", got)
	}
}

// TestDocumented: docs/operations/doctor.md has a line for each check.
func TestDocumented(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/operations/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`Check:? ?=? "([a-z-]+)"`)
	n := 0
	for _, e := range files {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		src, err := os.ReadFile(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllStringSubmatch(string(src), -1) {
			n++
			if !strings.Contains(string(doc), "| `"+strings.TrimSuffix(m[1], "-")) {
				t.Errorf("%s: check %q is not in docs/operations/doctor.md", e.Name(), m[1])
			}
		}
	}
	if n < 10 {
		t.Errorf("found %d checks in the source, want more", n)
	}
}
