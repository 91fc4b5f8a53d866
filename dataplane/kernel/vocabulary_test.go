package kernel

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/integration/await"
)

const offload = "tx-checksum-ip-generic"

// dual is what a dual-stack node has whose VXLAN goes over IPv6, with what a
// plain IPv4 node does not need: a port of a peer, an offload, a path MTU.
func dual() []dataplane.Object {
	m := mac("66:07:02:c1:cc:61")
	return []dataplane.Object{
		dataplane.Link{Name: "vxlan-v6.calico", Type: dataplane.LinkVXLAN, MTU: 1430, MAC: mac("66:07:02:c1:cc:60"), VNI: 4096, Port: 4789, Local: addr("fd00::1"), Parent: "up0"},
		dataplane.Address{Link: "vxlan-v6.calico", Prefix: pfx("fd10::1/128")},
		dataplane.Address{Link: "vxlan-v6.calico", Prefix: pfx("192.168.0.1/32")},
		dataplane.Sysctl{Name: "net/ipv6/conf/up0/forwarding", Value: "1"},
		dataplane.Feature{Link: "vxlan-v6.calico", Name: offload, On: false},
		dataplane.Neighbour{Link: "vxlan-v6.calico", Addr: addr("fd10::2"), MAC: m},
		dataplane.FDBEntry{Link: "vxlan-v6.calico", MAC: m, Dst: addr("fd00::2"), Port: 14789},
		via(7, "fd10::2", "vxlan-v6.calico"),
		via(8, "fd00::2", "up0"),
		dataplane.Route{Prefix: pfx("fd20:1::/122"), Table: dataplane.MainTable, NextHop: 7, MTU: 1300},
		route("fd20:2::/122", 8),
		dataplane.Route{Prefix: pfx("192.168.1.0/26"), Table: dataplane.MainTable, NextHop: 7, MTU: 1300},
		dataplane.Route{Prefix: pfx("fd20::/122"), Table: dataplane.MainTable, Type: dataplane.Blackhole},
		dataplane.Route{Prefix: pfx("fd20::2/128"), Table: dataplane.MainTable, Link: "up0"},
	}
}

const (
	dualRoutes6 = `
unicast fd20::2 dev up0 scope global metric 1024 pref medium
blackhole fd20::/122 dev lo scope global metric 1024 pref medium
unicast fd20:1::/122 nhid 7 via fd10::2 dev vxlan-v6.calico scope global metric 1024 onlink mtu 1300 pref medium
nh_info id 7 via fd10::2 dev vxlan-v6.calico scope link proto 77 onlink
unicast fd20:2::/122 nhid 8 via fd00::2 dev up0 scope global metric 1024 onlink pref medium
nh_info id 8 via fd00::2 dev up0 scope link proto 77 onlink`
	dualRoutes4 = `
unicast 192.168.1.0/26 nhid 7 via inet6 fd10::2 dev vxlan-v6.calico scope global onlink mtu 1300
nh_info id 7 via fd10::2 dev vxlan-v6.calico scope link proto 77 onlink`
	dualFDB = `66:07:02:c1:cc:61 dst fd00::2 port 14789 self permanent`
)

// dualHost is a lab with both families on up0.
func dualHost(t testing.TB, options ...labOption) (*lab, *running) {
	t.Helper()
	l, k := newHost(t, options...)
	l.run("ip addr add fd00::1/64 dev up0 nodad")
	return l, k
}

// ethtool calls fn with a connection and the index of a device.
func (l *lab) ethtool(link string, fn func(e *ethtool, index int) error) (err error) {
	l.do(func() {
		var c *nl.Conn
		if c, err = dialConn(); err != nil {
			return
		}
		defer c.Close()
		var index int
		if index, err = findLink(c, link); err == nil && index == 0 {
			err = fmt.Errorf("no device %s", link)
		}
		if err != nil {
			return
		}
		var e *ethtool
		if e, err = dialEthtool(); err == nil && e == nil {
			err = errors.New("no ethtool netlink")
		}
		if err == nil {
			defer e.Close()
			err = fn(e, index)
		}
	})
	return err
}

// feature reads an offload of a device.
func (l *lab) feature(link, name string) string {
	var on bool
	err := l.ethtool(link, func(e *ethtool, index int) error {
		f, err := e.get(index)
		on = f.on[name]
		return err
	})
	return fmt.Sprint(on, err)
}

// switchFeature switches an offload behind our back.
func (l *lab) switchFeature(link, name string, on bool) error {
	return l.ethtool(link, func(e *ethtool, index int) error { return e.set(index, name, on) })
}

func (l *lab) isDual() {
	l.t.Helper()
	l.shows("ip -6 -d route show proto 77", dualRoutes6)
	l.shows("ip -4 -d route show proto 77", dualRoutes4)
	l.shows("bridge fdb show dev vxlan-v6.calico", dualFDB)
	l.shows("ip -6 neigh show dev vxlan-v6.calico nud permanent", `fd10::2 lladdr 66:07:02:c1:cc:61 PERMANENT`)
	l.shows("ip -br addr show dev vxlan-v6.calico", "vxlan-v6.calico UNKNOWN 192.168.0.1/32 fd10::1/128")
	await.Until(l.t, offload, func() error {
		if f := l.feature("vxlan-v6.calico", offload); f != "false <nil>" {
			return errors.New(f)
		}
		return nil
	})
}

func TestDualStackIsMadeKeptAndRemoved(t *testing.T) {
	t.Parallel()
	l, k := dualHost(t)
	k.put(dual()...)
	l.isDual()
	out := l.run("ip -d addr show vxlan-v6.calico")
	for _, want := range []string{"mtu 1430", "local fd00::1 dev up0", "nodad"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	if out := l.run("ip -d link show vxlan-v6.calico"); !strings.Contains(out, "addrgenmode none") {
		t.Errorf("the device makes addresses by itself: %s", out)
	}
	// What there is is recognised, by a listing too.
	k.stop()
	k = l.start(everyCheck(time.Hour))
	k.wait(k.Replace(dataplane.SourceCore, dual()))
	k.synced()
	k.ready()
	// Of offloads and sysctls the values are read, not written.
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes to a kernel that was as wanted\n%s", n, k.log)
	}
	k.del(dual()...)
	l.shows("ip -d route show proto 77", "")
	l.shows("ip -6 -d route show proto 77", "")
	l.shows("ip nexthop", "")
	l.shows("ip -o link show type vxlan", "")
}

func TestDualStackDriftIsRepaired(t *testing.T) {
	t.Parallel()
	l, k := dualHost(t)
	k.put(dual()...)
	k.ready()
	for _, tt := range []struct {
		command string
		kind    dataplane.Kind
	}{
		{"ip -6 route del fd20:1::/122", dataplane.KindRoute},
		{"ip -6 route replace fd20:1::/122 nhid 7 proto 77 mtu 1400", dataplane.KindRoute},
		{"ip -6 route replace fd20:1::/122 nhid 7 proto 77", dataplane.KindRoute},
		{"ip -4 route replace 192.168.1.0/26 nhid 7 proto 77 mtu lock 1300", dataplane.KindRoute},
		{"ip -6 route del blackhole fd20::/122", dataplane.KindRoute},
		{"ip nexthop del id 7", dataplane.KindRoute},
		{"ip -6 addr del fd10::1/128 dev vxlan-v6.calico", dataplane.KindAddress},
		{"ip -6 neigh del fd10::2 dev vxlan-v6.calico", dataplane.KindNeighbour},
		{"bridge fdb replace 66:07:02:c1:cc:61 dev vxlan-v6.calico dst fd00::2 port 999 self permanent", dataplane.KindFDB},
		{"bridge fdb replace 66:07:02:c1:cc:61 dev vxlan-v6.calico dst fd00::2 self permanent", dataplane.KindFDB},
		{"ip link set vxlan-v6.calico down", dataplane.KindLink},
		{"ip link set vxlan-v6.calico addrgenmode eui64", dataplane.KindLink},
		{"ip link del vxlan-v6.calico", dataplane.KindLink},
		{"sysctl -qw net.ipv6.conf.up0.forwarding=0", dataplane.KindSysctl},
	} {
		n := k.drifted(tt.kind)
		l.run(tt.command)
		await.Until(t, tt.command+" noticed", func() error {
			if k.drifted(tt.kind) == n {
				return errors.New("nothing was counted")
			}
			return nil
		})
		k.settled()
		l.isDual()
	}
	n := k.drifted(dataplane.KindFeature)
	if err := l.switchFeature("vxlan-v6.calico", offload, true); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "offload noticed", func() error {
		if k.drifted(dataplane.KindFeature) == n {
			return errors.New("nothing was counted")
		}
		return nil
	})
	l.isDual()
}

func TestPortOfTheDeviceIsNoPort(t *testing.T) {
	t.Parallel()
	l, k := newHost(t, everyCheck(20*time.Millisecond))
	objs := host()
	e := objs[4].(dataplane.FDBEntry)
	e.Port = 4789
	objs[4] = e
	k.put(objs...)
	k.ready()
	n, checks := k.writer.writes.Load(), strings.Count(k.log.String(), "tables listed")
	await.Until(t, "five checks", func() error {
		if c := strings.Count(k.log.String(), "tables listed"); c < checks+5 {
			return fmt.Errorf("%d checks", c-checks)
		}
		return nil
	})
	if now := k.writer.writes.Load(); now != n {
		t.Errorf("%d writes while nothing changed", now-n)
	}
	// From and to another port, in place.
	for _, port := range []uint16{5000, 0, 6000, 4789} {
		e.Port = port
		k.put(e)
		k.settled()
		want := "66:07:02:c1:cc:61 dst 10.0.0.2 self permanent"
		if port != 0 && port != 4789 {
			want = fmt.Sprintf("66:07:02:c1:cc:61 dst 10.0.0.2 port %d self permanent", port)
		}
		l.shows("bridge fdb show dev vxlan.calico", want)
	}
}

func TestFeatures(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	off := dataplane.Feature{Link: "up0", Name: "tx-generic-segmentation", On: false}
	k.put(off)
	if got := l.feature("up0", off.Name); got != "false <nil>" {
		t.Errorf("it is %s", got)
	}
	on := off
	on.On = true
	k.put(on)
	if got := l.feature("up0", off.Name); got != "true <nil>" {
		t.Errorf("it is %s", got)
	}
	k.del(on)
	if got := l.feature("up0", off.Name); got != "true <nil>" {
		t.Errorf("a withdrawn wish changed it to %s", got)
	}
	for f, want := range map[dataplane.Feature]string{
		{Link: "up0", Name: "warp-drive", On: true}: "this kernel knows no offload named warp-drive: ethtool -k up0 lists those that there are",
		{Link: "lo", Name: "loopback", On: false}:   "the device's driver leaves it as it is: it is fixed, or depends on another offload",
		{Link: "up0"}: "name: give the kernel's name of an offload, such as tx-checksum-ip-generic",
		{Name: "x"}:   "link: name the device",
	} {
		k.Update(dataplane.SourceCore, []dataplane.Object{f}, nil)
		if diff := cmp.Diff(want, k.failed(f).Error()); diff != "" {
			t.Errorf("%v: (-want +got)\n%s", f, diff)
		}
	}
	k.Update(dataplane.SourceCore, []dataplane.Object{dataplane.Feature{Link: "nowhere", Name: off.Name}}, nil)
	await.Until(t, "waiting", func() error {
		s, _ := k.Status(dataplane.FeatureKey{Link: "nowhere", Name: off.Name})
		if s.Err == nil || s.Err.Error() != "waiting for link nowhere" {
			return fmt.Errorf("%v", s.Err)
		}
		return nil
	})
}

// TestIP6TNL runs its first half where the kernel lacks ip6_tunnel and its
// second where not, as TestIPIP does.
func TestIP6TNL(t *testing.T) {
	t.Parallel()
	l, k := dualHost(t)
	tun := dataplane.Link{Name: nameIP6TNL, Type: dataplane.LinkIP6TNL, MTU: 1400, Local: addr("fd00::1"), Parent: "up0"}
	objs := []dataplane.Object{
		tun,
		dataplane.Address{Link: nameIP6TNL, Prefix: pfx("fd10::1/128")},
		via(5, "fd00::2", nameIP6TNL), route("fd20:5::/122", 5), route("192.168.5.0/26", 5),
	}
	if err := k.Supports(t.Context(), dataplane.Requirement{Link: dataplane.LinkIP6TNL, Module: "ip6_tunnel"}); err != nil {
		var unsupported *UnsupportedError
		if !errors.As(err, &unsupported) || !strings.Contains(err.Error(), `run "modprobe ip6_tunnel"`) {
			t.Errorf("error %v", err)
		}
		k.Update(dataplane.SourceCore, objs, nil)
		if got := k.failed(tun); got.Error() != err.Error() {
			t.Errorf("the device's error %v\nwant %v", got, err)
		}
		return
	}
	k.put(objs...)
	k.settled()
	shown := func(want ...string) string {
		t.Helper()
		out := l.run("ip -d addr show " + nameIP6TNL)
		for _, w := range append(want, "UP", "alias routerd", "ip6tnl external", "encaplimit none", "hoplimit 64", "fd10::1/128") {
			if !strings.Contains(out, w) {
				t.Errorf("no %q in %s", w, out)
			}
		}
		if strings.Contains(out, "fe80::") {
			t.Errorf("a link-local address: %s", out)
		}
		return strings.Fields(out)[0]
	}
	routes := func(src string) {
		t.Helper()
		encap := "encap ip6 id 0 src " + src + " dst fd00::2 hoplimit 64 tc 0 dev tunl6.calico"
		l.shows("ip -6 route show proto 77", "fd20:5::/122 nhid 5 "+encap+" metric 1024 pref medium")
		l.shows("ip -4 route show proto 77", "192.168.5.0/26 nhid 5 "+encap)
	}
	index := shown("mtu 1400", "local fd00::1 dev up0")
	routes("fd00::1")
	// A change is in place, and takes the next hops along.
	tun.Local, tun.MTU = addr("fd00::9"), 1380
	k.put(tun)
	k.settled()
	routes("fd00::9")
	if now := shown("mtu 1380", "local fd00::9 dev up0"); now != index {
		t.Errorf("made anew: %s, was %s", now, index)
	}
	for _, tt := range []struct {
		command string
		kind    dataplane.Kind
	}{
		{"ip link set tunl6.calico down", dataplane.KindLink},
		{"ip link del tunl6.calico", dataplane.KindLink},
		{"ip link set tunl6.calico mtu 1290", dataplane.KindLink},
		{"ip -6 tunnel change tunl6.calico mode ip6ip6 local fd00::7 remote fd00::8", dataplane.KindLink},
		{"ip link set tunl6.calico alias theirs", dataplane.KindLink},
		{"ip link set tunl6.calico addrgenmode eui64", dataplane.KindLink},
		{"ip -6 nexthop replace id 5 encap ip6 dst fd00::3 src fd00::9 hoplimit 64 dev tunl6.calico proto 77", dataplane.KindNextHop},
		{"ip -6 nexthop replace id 5 encap ip6 dst fd00::2 dev tunl6.calico proto 77", dataplane.KindNextHop},
	} {
		n := k.drifted(tt.kind)
		l.run(tt.command)
		await.Until(t, tt.command+" noticed", func() error {
			if k.drifted(tt.kind) == n {
				return errors.New("nothing was counted")
			}
			return nil
		})
		k.settled()
		shown("mtu 1380", "local fd00::9 dev up0")
		routes("fd00::9")
	}
	bad := via(6, "10.0.0.2", nameIP6TNL)
	k.Update(dataplane.SourceCore, []dataplane.Object{bad}, nil)
	if err := k.failed(bad); err.Error() != "gateway: a tunnel over IPv6 leads to an IPv6 address" {
		t.Errorf("error %v", err)
	}
	k.del(bad)
	k.stop()
	// The next life finds all of it as wanted.
	k = l.start()
	k.wait(k.Replace(dataplane.SourceCore, append([]dataplane.Object{tun}, objs[1:]...)))
	k.synced()
	k.ready()
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes to a kernel that was as wanted\n%s", n, k.log)
	}
	k.stop()
	// The next life wants none of it, and knows the device by its mark.
	k = l.start()
	k.synced()
	k.ready()
	if out, err := l.try("ip link show tunl6.calico"); err == nil {
		t.Errorf("it is still there: %s", out)
	}
}

// TestIP6TNLCarriesBothFamilies sends through the tunnels of two hosts. Where
// the kernel has no such devices it holds that they are refused.
func TestIP6TNLCarriesBothFamilies(t *testing.T) {
	t.Parallel()
	a, b := newLab(t), newLab(t)
	var tid int
	b.do(func() { tid = unix.Gettid() })
	a.run("ip link add up0 type veth peer name up1", fmt.Sprintf("ip link set up1 netns %d name up0", tid), "ip link set up0 up")
	b.run("ip link set up0 up")
	var kernels []*running
	for i, l := range []*lab{a, b} {
		me, peer := i+1, 2-i
		l.run(fmt.Sprintf("ip addr add fd00::%d/64 dev up0 nodad", me))
		await.Until(t, "carrier", func() error {
			if out := l.run("ip -o link show up0"); !strings.Contains(out, "LOWER_UP") {
				return errors.New(out)
			}
			return nil
		})
		k := l.start()
		k.synced()
		kernels = append(kernels, k)
		tun := dataplane.Link{Name: nameIP6TNL, Type: dataplane.LinkIP6TNL, MTU: 1440, Local: addr(fmt.Sprintf("fd00::%d", me)), Parent: "up0"}
		objs := []dataplane.Object{
			tun,
			dataplane.Address{Link: nameIP6TNL, Prefix: pfx(fmt.Sprintf("fd20:%d::1/128", me))},
			dataplane.Address{Link: nameIP6TNL, Prefix: pfx(fmt.Sprintf("192.168.%d.1/32", me))},
			via(5, fmt.Sprintf("fd00::%d", peer), nameIP6TNL),
			route(fmt.Sprintf("fd20:%d::/122", peer), 5), route(fmt.Sprintf("192.168.%d.0/26", peer), 5),
		}
		if err := k.Supports(t.Context(), dataplane.Requirement{Link: dataplane.LinkIP6TNL, Module: "ip6_tunnel"}); err != nil {
			k.Update(dataplane.SourceCore, objs, nil)
			if got := k.failed(tun); got.Error() != err.Error() {
				t.Errorf("the device's error %v\nwant %v", got, err)
			}
			return
		}
		k.put(objs...)
		k.settled()
	}
	for _, ends := range [][2]string{{"fd20:1::1", "fd20:2::1"}, {"192.168.1.1", "192.168.2.1"}} {
		s := newStream(t, a, b, ends[0], ends[1])
		if undone := s.stop(t); undone != 0 {
			t.Errorf("%v: %d lost\n%s", ends, undone, kernels[0].log)
		}
	}
}
