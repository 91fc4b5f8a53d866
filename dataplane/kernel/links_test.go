package kernel

import (
	"errors"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/integration/await"
)

// TestVXLANChanges says which settings change in place and which need a new
// device, by the device's index.
func TestVXLANChanges(t *testing.T) {
	t.Parallel()
	base := host()[0].(dataplane.Link)
	tests := []struct {
		name   string
		change func(*dataplane.Link)
		want   string // in ip -d link
		anew   bool
	}{
		{"mtu", func(l *dataplane.Link) { l.MTU = 1400 }, "mtu 1400", false},
		{"mac", func(l *dataplane.Link) { l.MAC = mac("66:00:00:00:00:07") }, "66:00:00:00:00:07", false},
		{"vni", func(l *dataplane.Link) { l.VNI = 4097 }, "vxlan id 4097", true},
		{"port", func(l *dataplane.Link) { l.Port = 8472 }, "dstport 8472", true},
		{"local", func(l *dataplane.Link) { l.Local = addr("10.0.0.3") }, "local 10.0.0.3", false},
		{"parent", func(l *dataplane.Link) { l.Parent = "up1" }, "dev up1", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l, k := newHost(t)
			k.put(host()...)
			index := strings.Fields(l.run("ip -o link show vxlan.calico"))[0]
			changed := base
			tt.change(&changed)
			k.put(changed)
			k.settled()
			out := l.run("ip -d link show vxlan.calico")
			if !strings.Contains(out, tt.want) || !strings.Contains(out, "nolearning") {
				t.Errorf("no %q in %s", tt.want, out)
			}
			if anew := strings.Fields(out)[0] != index; anew != tt.anew {
				t.Errorf("made anew: %v; want %v", anew, tt.anew)
			}
			// Whatever was on the device is there again.
			l.shows("ip -d route", hostRoutes)
			l.shows("ip nexthop", hostNextHops)
			l.shows("bridge fdb show dev vxlan.calico", `66:07:02:c1:cc:61 dst 10.0.0.2 self permanent`)
			l.shows("ip neigh show dev vxlan.calico nud permanent", `192.168.1.1 lladdr 66:07:02:c1:cc:61 PERMANENT`)
			if n := k.drifted(dataplane.KindRoute) + k.drifted(dataplane.KindLink); n != 0 {
				t.Errorf("our own doing counts as drift: %d\n%s", n, k.log)
			}
		})
	}
}

func TestVXLANWaitsForItsParentAndTellsClashes(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	k := l.start()
	vx := host()[0].(dataplane.Link)
	k.Update(dataplane.SourceCore, []dataplane.Object{vx}, nil)
	await.Until(t, "waiting", func() error {
		if s, _ := k.Status(vx.Key()); s.State != dataplane.Pending || s.Err == nil || s.Err.Error() != "waiting for link up0" {
			return errors.New(s.State.String())
		}
		return nil
	})
	l.run("ip link add other type vxlan id 4096 dstport 4789 local 10.0.0.1")
	l.wire("up0", "up1", "10.0.0.1/24")
	if err := k.failed(vx); !strings.Contains(err.Error(), "another VXLAN device here has the VNI 4096 on UDP port 4789") {
		// Kernels differ in what they take for a clash; one that takes it has both.
		t.Errorf("error %v", err)
	}
	l.run("ip link del other")
	k.settled()
	l.run("ip link show vxlan.calico")
}

// TestNamesOfDevices: what the driver calls its devices, and only that, is
// known as a name of ours.
func TestNamesOfDevices(t *testing.T) {
	t.Parallel()
	for _, f := range dataplane.Families() {
		for slot := range vxlan.MaxDevices + 1 {
			name, want := vxlan.DeviceName(f, slot), "vxlan"
			if slot == vxlan.MaxDevices {
				want = ""
			}
			if got := kindOf(name); got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
	}
	for _, name := range []string{"vxlan.calicolab", "vxlan.calico-", "vxlan.calico-1", "vxlan.calico6", "vxlan-v6.calico-2", "tunl1", "eth0"} {
		if got := kindOf(name); got != "" {
			t.Errorf("%s is %q", name, got)
		}
	}
}

// TestUnmarkedDeviceIsAStrangers: a device of our name that we never had stays
// until it is wanted; it is taken as it is then, and goes when nobody wants it.
func TestUnmarkedDeviceIsAStrangers(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	l.run("ip link add vxlan.calico type vxlan id 4096 dstport 4789 local 10.0.0.1 dev up0 nolearning", "ip addr add 192.168.0.1/32 dev vxlan.calico",
		"ip link set vxlan.calico up", "ip link add vxlan.calicolab type vxlan id 77 dstport 4790", "ip link set vxlan.calicolab alias routerd")
	devices := []string{"ip -o link", "ip -4 -o addr"} // of IPv6 addresses the kernel still finds out whether they are taken
	before := l.run(devices...)
	index := strings.Fields(l.run("ip -o link show vxlan.calico"))[0]
	k.stop()
	if left, err := l.idle().Leftovers(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("leftovers %v, %v", left, err)
	}
	next := func() {
		k = l.start()
		k.synced()
		k.ready()
	}
	next()
	if now := l.run(devices...); now != before {
		t.Errorf("now %s\nwas %s", now, before)
	}
	k.put(host()...)
	k.settled()
	if now := l.run("ip -o link show vxlan.calico"); !strings.Contains(now, "alias routerd") || strings.Fields(now)[0] != index {
		t.Errorf("not taken as it was (%s): %s", index, now)
	}
	k.stop()
	next()
	if out := l.run("ip -o link show type vxlan"); strings.Contains(out, "vxlan.calico:") || !strings.Contains(out, "vxlan.calicolab:") {
		t.Errorf("after a life that wants none: %s", out)
	}
}

// TestDeviceIsNeverWithoutItsMark: whoever is killed while it makes a device
// leaves one that its successor knows.
func TestDeviceIsNeverWithoutItsMark(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	looks := 0
	k := l.start(through(func(inner transport) transport {
		return &faulty{transport: inner, before: func(*nl.Batch) {
			out, err := l.try("ip link show vxlan.calico")
			if err == nil && !strings.Contains(out, "alias routerd") {
				t.Errorf("without the mark: %s", out)
			} else if err == nil {
				looks++
			}
		}}
	}))
	k.synced()
	k.put(host()...)
	k.settled()
	k.stop()
	if looks == 0 {
		t.Error("never looked at")
	}
}

// TestIPIP runs its first half where the kernel has the ipip module and its
// second where not.
func TestIPIP(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	tun := dataplane.Link{Name: "tunl0", Type: dataplane.LinkIPIP, MTU: 1480}
	objs := []dataplane.Object{
		tun,
		dataplane.Address{Link: "tunl0", Prefix: pfx("192.168.0.1/32")},
		via(5, "10.0.0.2", "tunl0"), route("192.168.5.0/26", 5),
	}
	err := k.Supports(t.Context(), dataplane.Requirement{Link: dataplane.LinkIPIP, Module: "ipip"})
	if err != nil {
		const want = `this kernel cannot make ipip devices: module ipip is not loaded and cannot be loaded by itself: ` +
			`run "modprobe ipip"; if there is no such module, install the distribution's extra kernel modules ` +
			`(linux-modules-extra on Ubuntu, kernel-modules-extra on Fedora and RHEL, a kernel that is not cut down for ` +
			`virtual machines on Debian); or choose VXLAN for the pool`
		var unsupported *UnsupportedError
		if err.Error() != want || !errors.As(err, &unsupported) || unsupported.Requirement.Module != "ipip" {
			t.Errorf("error %v\nwant %s", err, want)
		}
		k.Update(dataplane.SourceCore, objs, nil)
		if err := k.failed(tun); err.Error() != want {
			t.Errorf("the device's error %v", err)
		}
		if s, _ := k.Status(objs[3].Key()); s.State != dataplane.Pending {
			t.Errorf("the route is %v: %v", s.State, s.Err)
		}
		return
	}
	l.run("ip addr add 1.2.3.4/32 dev tunl0")
	k.put(objs...)
	k.settled()
	l.shows("ip route show proto 77", "192.168.5.0/26 nhid 5 via 10.0.0.2 dev tunl0 onlink")
	out := l.run("ip -d addr show tunl0")
	for _, want := range []string{"mtu 1480", "alias routerd", "UP", "192.168.0.1/32"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	if strings.Contains(out, "1.2.3.4") {
		t.Errorf("another address stays: %s", out)
	}
	k.stop()
	// The next life wants none of it, and knows tunl0 by its mark.
	k = l.start()
	k.synced()
	k.ready()
	out = l.run("ip -d addr show tunl0")
	if strings.Contains(out, "alias") || strings.Contains(out, "UP") || strings.Contains(out, "192.168.0.1") {
		t.Errorf("tunl0 is not let go: %s", out)
	}
	k.stop()
	// One without the mark is a stranger's.
	l.run("ip addr add 1.2.3.4/32 dev tunl0", "ip link set tunl0 up")
	k = l.start()
	k.synced()
	k.ready()
	if out = l.run("ip addr show tunl0"); !strings.Contains(out, "1.2.3.4") || !strings.Contains(out, "UP") || k.writer.writes.Load() != 0 {
		t.Errorf("a stranger's tunl0 was touched with %d writes: %s", k.writer.writes.Load(), out)
	}
}

func TestSupportsLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	k := l.start()
	before := l.run("ip -o link")
	for range 3 {
		if err := k.Supports(t.Context(), dataplane.Requirement{Link: dataplane.LinkVXLAN, Module: "vxlan"}); err != nil {
			t.Error(err)
		}
	}
	if err := k.Supports(t.Context(), dataplane.Requirement{}); err != nil {
		t.Errorf("nothing is required: %v", err)
	}
	err := k.Supports(t.Context(), dataplane.Requirement{Link: "nonsense", Module: "nonsense"})
	var unsupported *UnsupportedError
	if !errors.As(err, &unsupported) {
		t.Errorf("a kind that no kernel has: %v", err)
	}
	if after := l.run("ip -o link"); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
	}
}

// TestTwoNamespacesAtOnce runs two kernels with the same wishes, in one
// process.
func TestTwoNamespacesAtOnce(t *testing.T) {
	t.Parallel()
	const name = "net/ipv4/ip_forward"
	a, b := newLab(t), newLab(t)
	for i, l := range []*lab{a, b} {
		l.wire("up0", "up1", "10.0.0.1/24")
		k := l.start()
		k.put(host()...)
		k.put(dataplane.Sysctl{Name: name, Value: []string{"1", "0"}[i]})
	}
	for i, l := range []*lab{a, b} {
		l.shows("ip -d route", hostRoutes)
		if v, want := l.sysctl(name), []string{"1", "0"}[i]; v != want {
			t.Errorf("forwarding is %s in namespace %d; want %s", v, i, want)
		}
	}
}
