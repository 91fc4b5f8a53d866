package kernel

import (
	"testing"

	"github.com/routerd/routerd/dataplane"
)

// host is what a node of a VXLAN pool has: one object of every kind.
func host() []dataplane.Object {
	m := mac("66:07:02:c1:cc:61")
	return []dataplane.Object{
		dataplane.Link{Name: "vxlan.calico", Type: dataplane.LinkVXLAN, MTU: 1450, MAC: mac("66:07:02:c1:cc:60"), VNI: 4096, Port: 4789, Local: addr("10.0.0.1"), Parent: "up0"},
		dataplane.Address{Link: "vxlan.calico", Prefix: pfx("192.168.0.1/32")},
		dataplane.Sysctl{Name: "net/ipv4/conf/up0/forwarding", Value: "1"},
		dataplane.Neighbour{Link: "vxlan.calico", Addr: addr("192.168.1.1"), MAC: m},
		dataplane.FDBEntry{Link: "vxlan.calico", MAC: m, Dst: addr("10.0.0.2")},
		via(7, "192.168.1.1", "vxlan.calico"),
		via(8, "10.0.0.2", "up0"),
		route("192.168.1.0/26", 7),
		route("192.168.2.0/26", 8),
		dataplane.Route{Prefix: pfx("192.168.0.0/26"), Table: dataplane.MainTable, Type: dataplane.Blackhole},
		dataplane.Route{Prefix: pfx("192.168.0.2/32"), Table: dataplane.MainTable, Link: "up0"},
		dataplane.Route{Prefix: pfx("192.168.3.0/26"), Table: 1000, Metric: 512, NextHop: 8},
	}
}

const hostRoutes = `
unicast 10.0.0.0/24 dev up0 proto kernel scope link src 10.0.0.1
blackhole 192.168.0.0/26 proto 77 scope global
unicast 192.168.0.2 dev up0 proto 77 scope link
unicast 192.168.1.0/26 nhid 7 via 192.168.1.1 dev vxlan.calico proto 77 scope global onlink
nh_info id 7 via 192.168.1.1 dev vxlan.calico scope link proto 77 onlink
unicast 192.168.2.0/26 nhid 8 via 10.0.0.2 dev up0 proto 77 scope global onlink
nh_info id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink`

const hostNextHops = `
id 7 via 192.168.1.1 dev vxlan.calico scope link proto 77 onlink
id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink`

func TestEveryKindIsMadeAndRemoved(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start()
	k.put(host()...)
	l.shows("ip -d route", hostRoutes)
	l.shows("ip nexthop", hostNextHops)
	l.shows("ip -d route show table 1000", `
unicast 192.168.3.0/26 nhid 8 via 10.0.0.2 dev up0 proto 77 scope global metric 512 onlink
nh_info id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink`)
	l.shows("bridge fdb show dev vxlan.calico", `66:07:02:c1:cc:61 dst 10.0.0.2 self permanent`)
	l.shows("ip neigh show dev vxlan.calico nud permanent", `192.168.1.1 lladdr 66:07:02:c1:cc:61 PERMANENT`)
	l.shows("ip -4 -br addr show dev vxlan.calico", "vxlan.calico UNKNOWN 192.168.0.1/32")
	if got := l.sysctl("net/ipv4/conf/up0/forwarding"); got != "1" {
		t.Errorf("forwarding is %s", got)
	}
	k.del(host()...)
	l.shows("ip -d route", `unicast 10.0.0.0/24 dev up0 proto kernel scope link src 10.0.0.1`)
	l.shows("ip nexthop", ``)
	l.shows("ip -o link show type vxlan", ``)
	if got := l.sysctl("net/ipv4/conf/up0/forwarding"); got != "1" {
		t.Errorf("a withdrawn sysctl was changed to %s", got)
	}
}
