package ui

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/dataplane/netdev"
	"github.com/routerd/routerd/store"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func block(cidr, holder string, used, size int) *cluster.Block {
	return &cluster.Block{CIDR: prefix(cidr), Holder: holder, Used: used, Size: size}
}

// TestMapPools: blocks are in the cells of their addresses.
func TestMapPools(t *testing.T) {
	t.Parallel()
	got := mapPools([]*cluster.Pool{
		{Name: "six", CIDR: prefix("fd00::/48"), BlockBits: 122, Off: "it is disabled"},
		{Name: "large", CIDR: prefix("10.0.0.0/12"), BlockBits: 26},
		{Name: "broken", Err: errors.New("it cannot be read")},
		{Name: "one", CIDR: prefix("10.99.0.0/26"), BlockBits: 26},
	}, []*cluster.Block{
		block("10.99.0.0/26", "a", 3, 64), block("10.0.0.64/26", "b", 2, 64), block("10.0.0.0/26", "a", 1, 64),
		block("10.15.255.192/26", "", 0, 64), block("172.16.0.0/26", "c", 5, 64), block("fd00:0:0:8000::/122", "a", 1, 64),
	})
	want := Pools{
		Pools: []Pool{
			{Name: "broken", Problem: "it cannot be read", Cells: []Cell{}, Blocks: []Block{}},
			{
				Name: "large", CIDR: "10.0.0.0/12", Size: 1 << 20, Used: 3, Columns: 64, Rows: 16, CellSize: 1024,
				Cells: []Cell{
					{At: 0, CIDR: "10.0.0.0/22", Used: 3, Claimed: 128, Holders: []string{"a", "b"}},
					{At: 1023, CIDR: "10.15.252.0/22", Claimed: 64},
				},
				Blocks: []Block{{CIDR: "10.0.0.0/26", Holder: "a", Used: 1, Size: 64}, {CIDR: "10.0.0.64/26", Holder: "b", Used: 2, Size: 64}, {CIDR: "10.15.255.192/26", Size: 64}},
			},
			{
				Name: "one", CIDR: "10.99.0.0/26", Size: 64, Used: 3, Columns: 1, Rows: 1, CellSize: 64,
				Cells:  []Cell{{CIDR: "10.99.0.0/26", Used: 3, Claimed: 64, Holders: []string{"a"}}},
				Blocks: []Block{{CIDR: "10.99.0.0/26", Holder: "a", Used: 3, Size: 64}},
			},
			{
				Name: "six", CIDR: "fd00::/48", Problem: "it is disabled", Size: 1 << 80, Used: 1, Columns: 64, Rows: 16, CellSize: 1 << 70,
				Cells:  []Cell{{At: 512, CIDR: "fd00:0:0:8000::/58", Used: 1, Claimed: 64, Holders: []string{"a"}}},
				Blocks: []Block{{CIDR: "fd00:0:0:8000::/122", Holder: "a", Used: 1, Size: 64}},
			},
		},
		Stray: []Block{{CIDR: "172.16.0.0/26", Holder: "c", Used: 5, Size: 64}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestMapHasAll: every block of a pool is in a cell of its grid, whatever the sizes.
func TestMapHasAll(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.IntRange(8, 26).Draw(t, "pool")
		blockBits := rapid.IntRange(bits, 32).Draw(t, "block")
		p := &cluster.Pool{Name: "p", CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10}), bits), BlockBits: blockBits}
		var blocks []*cluster.Block
		used := 0
		for n := range rapid.IntRange(0, 20).Draw(t, "blocks") {
			at := uint64(rapid.Uint32().Draw(t, fmt.Sprint("at", n))) % (1 << (blockBits - bits)) << (32 - blockBits)
			a := 10<<24 | at
			b := &cluster.Block{CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)}), blockBits), Used: n, Size: 1 << (32 - blockBits)}
			blocks = append(blocks, b)
			used += n
		}
		got := mapPools([]*cluster.Pool{p}, blocks)
		q := got.Pools[0]
		inCells := 0
		for _, c := range q.Cells {
			inCells += c.Used
			if c.At < 0 || c.At >= q.Columns*q.Rows {
				t.Errorf("cell %d of %d × %d", c.At, q.Columns, q.Rows)
			}
		}
		if inCells != used || q.Used != used || len(q.Blocks) != len(blocks) || len(got.Stray) != 0 {
			t.Errorf("%d used in cells, %d in the pool, want %d; %d blocks, want %d; stray %v", inCells, q.Used, used, len(q.Blocks), len(blocks), got.Stray)
		}
		if want := q.CellSize * float64(q.Columns*q.Rows); want != q.Size {
			t.Errorf("%d × %d cells of %g addresses are not a pool of %g", q.Columns, q.Rows, q.CellSize, q.Size)
		}
	})
}

func node(name, addr string) *cluster.Node {
	return &cluster.Node{Name: name, Addr: cluster.Families[netip.Prefix]{IPv4: prefix(addr)}, Encaps: &cluster.Encaps{}}
}

func well() *apiv1.Check { return &apiv1.Check{Name: "Ready", Ok: true} }

// facts are those of three hosts and a switch, all well, as node1 has them.
func facts() Facts {
	member := func(n string) doctor.Member { return doctor.Member{Name: n, Conditions: []*apiv1.Check{well()}} }
	return Facts{
		Self: &apiv1.NodeResponse{
			Name: "node1", Health: &apiv1.Health{Live: well(), Ready: well()},
			Peers: []*apiv1.BGPPeer{
				{Name: "node2", Address: "10.1.0.12", State: "up", Type: "node-to-node mesh"},
				{Name: "node3", Address: "10.2.0.11", State: "up", Type: "node-to-node mesh"},
				{Name: "tor", Address: "10.1.0.1", State: "up", Type: "global", AsNumber: 65000},
			},
		},
		Nodes:   []*cluster.Node{node("node1", "10.1.0.11/24"), node("node2", "10.1.0.12/24"), node("node3", "10.2.0.11/24")},
		Members: map[string]doctor.Member{"node2": member("node2"), "node3": member("node3")},
		Present: map[string]bool{"node1": true, "node2": true, "node3": true},
		Blocks:  []*cluster.Block{block("192.168.0.0/26", "node2", 7, 64)},
		Wanted: []Session{
			{Node: "node1", Peer: "node2", Type: "node-to-node mesh"},
			{Node: "node2", Peer: "node1", Type: "node-to-node mesh"},
			{Node: "node2", Peer: "node3", Type: "node-to-node mesh"},
			{Node: "node3", Peer: "node2", Type: "node-to-node mesh"},
			{Node: "node2", Peer: "tor", Addr: "10.1.0.1", Type: "global", ASN: 65000},
		},
		Paths:   &apiv1.PathsResponse{Paths: []*apiv1.Path{{Node: "node3", Address: "10.2.0.11", Answers: true, Mtu: 1500}}},
		Tunnels: &apiv1.TunnelsResponse{Tunnels: []*apiv1.Tunnel{{Node: "node3", Form: "vxlan", Inner: "IPv4", Device: "vxlan.calico", InUse: true, Delivers: "yes"}, {Node: "node2", Form: "ipip"}}},
	}
}

// TestTopology: what the picture says of hosts and links.
func TestTopology(t *testing.T) {
	t.Parallel()
	type states = map[string]State
	for _, c := range []struct {
		name     string
		change   func(*Facts)
		hosts    states
		sessions states
		tunnels  states
	}{
		{
			name: "all is well", change: func(*Facts) {},
			hosts:    states{"node1": Up, "node2": Up, "node3": Up, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Unknown, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "a host's daemon is gone", change: func(f *Facts) { delete(f.Present, "node3"); f.Self.Peers[1].State = "start" },
			hosts:    states{"node1": Trouble, "node2": Up, "node3": Down, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Down, "node1 peer 10.1.0.1": Up, "node2 node3": Down, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "who is there is not known", change: func(f *Facts) { f.Present = nil },
			hosts:    states{"node1": Up, "node2": Unknown, "node3": Unknown, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Unknown, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "conditions, a tunnel and a peer outside", change: func(f *Facts) {
				f.Members["node2"].Conditions[0].Ok = false
				f.Members["node3"] = doctor.Member{Conditions: []*apiv1.Check{well(), {Name: "Policy"}}}
				f.Tunnels.Tunnels[0].Delivers = "no"
				f.Self.Peers[2].State = "idle"
			},
			hosts:    states{"node1": Trouble, "node2": Down, "node3": Trouble, "peer 10.1.0.1": Down},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Down, "node2 node3": Unknown, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Down},
		},
		{
			name: "this host is not ready, another is none of routerd's", change: func(f *Facts) {
				f.Self.Health.Ready.Ok = false
				delete(f.Members, "node2")
			},
			hosts:    states{"node1": Down, "node2": Unknown, "node3": Up, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Unknown, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "a session that cannot run", change: func(f *Facts) { f.Wanted[2].Problem = "it has no address" },
			hosts:    states{"node1": Up, "node2": Up, "node3": Up, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Down, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "what others say of their sessions", change: func(f *Facts) {
				f.Loads = map[string]*apiv1.HostLoad{
					"node2": {Node: "node2", Sessions: 3, SessionsUp: 2, Down: []*apiv1.BGPPeer{{Name: "tor", Address: "10.1.0.1", State: "idle"}}},
					"node3": {Node: "node3", Error: "no answer"},
				}
			},
			hosts:    states{"node1": Up, "node2": Up, "node3": Up, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Up, "node2 peer 10.1.0.1": Down},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "one end says that it is down", change: func(f *Facts) {
				f.Loads = map[string]*apiv1.HostLoad{
					"node2": {Node: "node2", Sessions: 3, SessionsUp: 3},
					"node3": {Node: "node3", Sessions: 2, SessionsUp: 1, Down: []*apiv1.BGPPeer{{Name: "node2", Address: "10.1.0.12", State: "start"}}},
				}
			},
			hosts:    states{"node1": Up, "node2": Up, "node3": Up, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Down, "node2 peer 10.1.0.1": Up},
			tunnels:  states{"node1 node3": Up},
		},
		{
			name: "more are down than are named", change: func(f *Facts) {
				f.Loads = map[string]*apiv1.HostLoad{"node2": {Node: "node2", Sessions: 30}, "node3": {Node: "node3", Sessions: 30}}
			},
			hosts:    states{"node1": Up, "node2": Up, "node3": Up, "peer 10.1.0.1": Up},
			sessions: states{"node1 node2": Up, "node1 node3": Up, "node1 peer 10.1.0.1": Up, "node2 node3": Unknown, "node2 peer 10.1.0.1": Unknown},
			tunnels:  states{"node1 node3": Up},
		},
	} {
		f := facts()
		c.change(&f)
		got := draw(f)
		hosts, sessions, tunnels := states{}, states{}, states{}
		for _, h := range got.Hosts {
			hosts[h.ID] = h.State
			if (h.State == Down || h.State == Trouble) && len(h.Reasons) == 0 && !h.Outside {
				t.Errorf("%s: %s is %s without a reason", c.name, h.ID, h.State)
			}
		}
		for _, l := range got.Links {
			sessions[l.From+" "+l.To] = l.Session
			if l.Tunnel != "" {
				tunnels[l.From+" "+l.To] = l.Tunnel
			}
			if l.Path == "" || len(l.Says) == 0 {
				t.Errorf("%s: link %+v has no way or says nothing", c.name, l)
			}
		}
		if d := cmp.Diff([]states{c.hosts, c.sessions, c.tunnels}, []states{hosts, sessions, tunnels}); d != "" {
			t.Errorf("%s: (-want +got)\n%s", c.name, d)
		}
	}
}

// TestRacks: nodes are together by their labels, else by their subnets.
func TestRacks(t *testing.T) {
	t.Parallel()
	f := facts()
	f.Nodes[1].Labels = map[string]string{store.LabelRack: "r7", store.LabelZone: "z"}
	f.Nodes[2].Labels = map[string]string{store.LabelZone: "z"}
	f.Nodes = append(f.Nodes, &cluster.Node{Name: "node4", Encaps: &cluster.Encaps{}})
	got := map[string]string{}
	for _, r := range draw(f).Racks {
		got[r.Name] = r.By
	}
	want := map[string]string{"10.1.0.0/24": "subnet", "r7": "label " + store.LabelRack, "z": "label " + store.LabelZone, "no address": "its Node has none"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestLayout: whatever the cluster, no two boxes overlap, hosts are in their racks, and all is inside the picture.
func TestLayout(t *testing.T) {
	t.Parallel()
	overlap := func(a, b Box) bool { return a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H }
	inside := func(a, b Box) bool { return a.X >= b.X && a.Y >= b.Y && a.X+a.W <= b.X+b.W && a.Y+a.H <= b.Y+b.H }
	rapid.Check(t, func(t *rapid.T) {
		top := Topology{}
		for i := range rapid.IntRange(0, 120).Draw(t, "hosts") {
			h := Host{ID: fmt.Sprint(i), Name: fmt.Sprintf("node%d", i), Rack: fmt.Sprint("r", rapid.IntRange(0, 8).Draw(t, "rack"))}
			h.Outside = rapid.IntRange(0, 9).Draw(t, "outside") == 0
			top.Hosts = append(top.Hosts, h)
			if i > 0 {
				top.Links = append(top.Links, Link{From: "0", To: h.ID})
			}
		}
		layOut(&top, map[string]string{})
		racks := map[string]Box{}
		for i, r := range top.Racks {
			racks[r.Name] = r.Box
			for _, o := range top.Racks[:i] {
				if overlap(r.Box, o.Box) {
					t.Errorf("racks %+v and %+v overlap", r, o)
				}
			}
		}
		picture := Box{W: top.Width, H: top.Height}
		for i, h := range top.Hosts {
			if !inside(h.Box, picture) || !h.Outside && !inside(h.Box, racks[h.Rack]) {
				t.Errorf("host %+v is not in its rack %+v and the picture %+v", h, racks[h.Rack], picture)
			}
			for _, o := range top.Hosts[:i] {
				if overlap(h.Box, o.Box) {
					t.Errorf("hosts %+v and %+v overlap", h, o)
				}
			}
			for _, r := range top.Racks {
				if h.Outside && overlap(h.Box, r.Box) {
					t.Errorf("peer %+v and rack %+v overlap", h, r)
				}
			}
		}
		for _, l := range top.Links {
			if l.Path == "" {
				t.Errorf("link %+v has no way", l)
			}
		}
	})
}

func TestCompareNatural(t *testing.T) {
	t.Parallel()
	list := []string{"node10", "node2", "", "node1", "a", "node2b", "10", "9", "node02"}
	slices.SortFunc(list, compareNatural)
	if d := cmp.Diff([]string{"", "9", "10", "a", "node1", "node2", "node2b", "node02", "node10"}, list); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestRates(t *testing.T) {
	t.Parallel()
	is := shown(map[string]netdev.Counters{"lo": {ReceivedBytes: 1}, "cali123": {ReceivedBytes: 1}, "vxlan.calico": {ReceivedBytes: 1000, SentBytes: 2000, Dropped: 5}})
	if len(is) != 1 {
		t.Fatalf("shown: %v", is)
	}
	is["anew"] = netdev.Counters{ReceivedBytes: 1, SentBytes: 1}
	is["new"] = netdev.Counters{ReceivedBytes: 1, SentBytes: 1}
	was := map[string]netdev.Counters{
		"vxlan.calico": {ReceivedBytes: 500, Dropped: 4}, "anew": {ReceivedBytes: 2, SentBytes: 1}, "gone": {ReceivedBytes: 1, SentBytes: 1, Dropped: 1},
	}
	want := []Rates{{Device: "vxlan.calico", Received: 2000, Sent: 8000, Dropped: 0.5}}
	if d := cmp.Diff(want, rates(was, is, 2*time.Second)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	if got := rates(was, is, 0); len(got) != 0 {
		t.Errorf("in no time: %v", got)
	}
}

// TestLoads: what hosts say of their sessions counts for a while, and a change is told.
func TestLoads(t *testing.T) {
	t.Parallel()
	w, now := NewWatch(), time.Unix(1_700_000_000, 0)
	load := func(up uint32) []*apiv1.HostLoad {
		return []*apiv1.HostLoad{{Node: "node2", Sessions: 2, SessionsUp: up, Memory: uint64(up)}}
	}
	if !w.setLoads(load(2), now) || w.setLoads(load(2), now) || !w.setLoads(load(1), now) {
		t.Error("a change is told once, and what is as it was is not")
	}
	if f := w.facts(now.Add(othersCount)); f.Loads["node2"] == nil {
		t.Error("it does not count any more")
	}
	if f := w.facts(now.Add(othersCount + 1)); f.Loads != nil {
		t.Error("it counts for ever")
	}
}
