package kernel

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// TestCalicosRoutesAreTakenOver: what Calico left on a host becomes ours in one step
// each, and the routes of others stay theirs.
func TestCalicosRoutesAreTakenOver(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.run("ip addr add fd00:1::1/64 dev up0 nodad",
		"ip link add vxlan.calico address 66:07:02:c1:cc:60 mtu 1450 type vxlan id 4096 dstport 4789 nolearning local 10.0.0.1 dev up0",
		"ip addr add 192.168.0.1/32 dev vxlan.calico",
		"ip link set vxlan.calico up",
		"ip neigh add 192.168.1.1 lladdr 66:07:02:c1:cc:61 dev vxlan.calico nud permanent",
		"bridge fdb add 66:07:02:c1:cc:61 dev vxlan.calico dst 10.0.0.2 self permanent",
		"ip link add vxlan-v6.calico address 66:d4:d5:51:3d:42 mtu 1430 type vxlan id 4096 dstport 4789 nolearning local fd00:1::1 dev up0",
		"ip link set vxlan-v6.calico up",
		"ip neigh add fd00:3::100 lladdr 66:d4:d5:51:3d:43 dev vxlan-v6.calico nud permanent",
		"ip neigh add fd00:3::200 lladdr 66:d4:d5:51:3d:44 dev vxlan-v6.calico nud permanent",
		// Felix, and BIRD, whose metric was zero before Calico v3.34.
		"ip route add blackhole 192.168.0.0/26 proto 80",
		"ip route add 192.168.0.2 dev up0 scope link",
		"ip route add 192.168.1.0/26 via 192.168.1.1 dev vxlan.calico onlink mtu 1450",
		"ip route add 192.168.2.0/26 via 10.0.0.2 proto bird",
		"ip route add fd00:2::/122 via fd00:1::2 dev up0 proto bird metric 1024",
		"ip route add fd00:3::100/122 via fd00:3::100 dev vxlan-v6.calico onlink", // the peer's address, where ours has that of its MAC
		"ip route add fd00:3::200/122 via fd00:3::200 dev vxlan-v6.calico onlink",
		"ip route add 192.168.4.0/26 via 10.0.0.9 dev up0 proto 80 onlink", // elsewhere than ours
		// Not Calico's, or not like ours.
		"ip route add 192.168.5.0/26 via 10.0.0.9 proto bird",
		"ip route add 192.168.6.0/26 via 10.0.0.2 proto static",
	)
	index, _, _ := strings.Cut(l.run("ip -o link show dev vxlan.calico"), ":")
	deleted := l.deletions()
	k := l.start()
	want := append(host(), via(9, "fd00:1::2", "up0"), route("192.168.4.0/26", 8), route("192.168.5.0/26", 8), route("192.168.6.0/26", 8),
		dataplane.Route{Prefix: pfx("fd00:2::/122"), Table: dataplane.MainTable, Metric: 1024, NextHop: 9},
		dataplane.Link{Name: "vxlan-v6.calico", Type: dataplane.LinkVXLAN, MTU: 1430, MAC: mac("66:d4:d5:51:3d:42"), VNI: 4096, Port: 4789, Local: addr("fd00:1::1"), Parent: "up0"},
		dataplane.Neighbour{Link: "vxlan-v6.calico", Addr: addr("fe80::64d4:d5ff:fe51:3d43"), MAC: mac("66:d4:d5:51:3d:43")},
		via(10, "fe80::64d4:d5ff:fe51:3d43", "vxlan-v6.calico"),
		dataplane.Route{Prefix: pfx("fd00:3::100/122"), Table: dataplane.MainTable, Metric: 1024, NextHop: 10},
		dataplane.Route{Prefix: pfx("fd00:3::200/122"), Table: dataplane.MainTable, Metric: 1024, NextHop: 10})
	rev := k.Replace(dataplane.SourceCore, want)
	k.synced()
	err := k.Wait(t.Context(), rev)
	for _, p := range []string{"192.168.5.0/26 belongs to protocol bird (12)", "192.168.6.0/26 belongs to protocol static (4)", "fd00:3::200/122 metric 1024 belongs to protocol boot (3)"} {
		if err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("%v: want that %s", err, p)
		}
	}
	l.shows("ip -d route", hostRoutes+`
unicast 192.168.4.0/26 nhid 8 via 10.0.0.2 dev up0 proto 77 scope global onlink
nh_info id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink
unicast 192.168.5.0/26 via 10.0.0.9 dev up0 proto bird scope global
unicast 192.168.6.0/26 via 10.0.0.2 dev up0 proto static scope global`)
	l.shows("ip -6 route show fd00:2::/122", "fd00:2::/122 nhid 9 via fd00:1::2 dev up0 proto 77 metric 1024 onlink pref medium")
	l.shows("ip -6 route show root fd00:3::/64", `
fd00:3::100/122 nhid 10 via fe80::64d4:d5ff:fe51:3d43 dev vxlan-v6.calico proto 77 metric 1024 onlink pref medium
fd00:3::200/122 via fd00:3::200 dev vxlan-v6.calico metric 1024 onlink pref medium`)
	if now, _, _ := strings.Cut(l.run("ip -o link show dev vxlan.calico"), ":"); now != index {
		t.Errorf("vxlan.calico was number %s, and is %s: it was made anew", index, now)
	}
	if gone := deleted(); len(gone) > 0 {
		t.Errorf("routes were deleted on the way: %v", gone)
	}
	// They are ours like any other from here on.
	k.del(route("192.168.4.0/26", 8))
	l.shows("ip route show 192.168.4.0/26", "")
}

// TestOtherNetworksRoutesAreTakenOver: what flannel and kube-router left on a host becomes ours
// in one step each; what only looks like it stays.
func TestOtherNetworksRoutesAreTakenOver(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	for _, dev := range []string{"flannel.1 type vxlan id 1", "other.1 type vxlan id 2"} {
		name, _, _ := strings.Cut(dev, " ")
		l.run("ip link add "+dev+" dstport 8472 nolearning local 10.0.0.1 dev up0", "ip link set "+name+" up")
	}
	l.run("ip route add 192.168.1.0/24 via 192.168.1.0 dev flannel.1 onlink",
		"ip route add 192.168.2.0/24 via 10.0.0.2 dev up0",          // host-gw
		"ip route add 192.168.3.0/24 via 10.0.0.2 dev up0 proto 17", // kube-router
		"ip route add 192.168.4.0/24 via 192.168.4.0 dev flannel.1 onlink proto static",
		"ip route add 192.168.5.0/24 via 192.168.5.0 dev other.1 onlink",
		"ip route add 192.168.6.0/24 via 10.0.0.9 dev up0 proto 17",
		"ip route add 192.168.7.0/24 dev flannel.1")
	deleted := l.deletions()
	k := l.start()
	want := host()
	for _, p := range []string{"1", "2", "3", "4", "5", "6", "7"} {
		want = append(want, route("192.168."+p+".0/24", 8))
	}
	rev := k.Replace(dataplane.SourceCore, want)
	k.synced()
	err := k.Wait(t.Context(), rev)
	for _, p := range []string{"4", "5", "6", "7"} {
		if err == nil || !strings.Contains(err.Error(), "192.168."+p+".0/24 belongs to protocol") {
			t.Errorf("%v: want that 192.168.%s.0/24 belongs to another", err, p)
		}
	}
	for _, p := range []string{"1", "2", "3"} {
		l.shows("ip route show 192.168."+p+".0/24", "192.168."+p+".0/24 nhid 8 via 10.0.0.2 dev up0 proto 77 onlink")
	}
	if gone := deleted(); len(gone) > 0 {
		t.Errorf("routes were deleted on the way: %v", gone)
	}
	// flanneld starts again, and makes its route anew.
	l.run("ip route replace 192.168.1.0/24 via 192.168.1.0 dev flannel.1 onlink")
	l.shows("ip route show 192.168.1.0/24", "192.168.1.0/24 nhid 8 via 10.0.0.2 dev up0 proto 77 onlink")
}

// deletions follows the kernel's notices of routes from here on; the result returns which
// were deleted until it is called.
func (l *lab) deletions() func() []string {
	l.t.Helper()
	notices, done := make(chan netlink.RouteUpdate, 1000), make(chan struct{})
	l.t.Cleanup(func() { close(done) })
	var err error
	l.do(func() { err = netlink.RouteSubscribe(notices, done) })
	if err != nil {
		l.t.Fatal(err)
	}
	const marker = "203.0.113.77/32" // of a range for documentation (RFC 5737)
	return func() (gone []string) {
		l.run("ip route add blackhole " + marker)
		for n := range notices {
			switch {
			case n.Dst.String() == marker:
				return gone
			case n.Type == unix.RTM_DELROUTE && n.Table == unix.RT_TABLE_MAIN && !n.Dst.IP.IsLinkLocalUnicast():
				gone = append(gone, n.Dst.String())
			}
		}
		return gone
	}
}
