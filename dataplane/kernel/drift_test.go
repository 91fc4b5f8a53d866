package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

func TestDriftIsRepaired(t *testing.T) {
	t.Parallel()
	vx := dataplane.KindLink
	tests := []struct {
		name    string
		command string
		kind    dataplane.Kind // whose drift is counted
	}{
		{"route deleted", "ip route del 192.168.2.0/26", dataplane.KindRoute},
		{"route replaced by ours of another shape", "ip route replace 192.168.2.0/26 via 10.0.0.9 proto 77", dataplane.KindRoute},
		{"blackhole deleted", "ip route del blackhole 192.168.0.0/26", dataplane.KindRoute},
		{"route in another table deleted", "ip route del 192.168.3.0/26 table 1000", dataplane.KindRoute},
		{"next hop deleted and its routes with it", "ip nexthop del id 8", dataplane.KindRoute},
		{"next hop changed", "ip nexthop replace id 8 via 10.0.0.9 dev up0 onlink proto 77", dataplane.KindNextHop},
		{"address removed", "ip addr del 192.168.0.1/32 dev vxlan.calico", dataplane.KindAddress},
		{"neighbour removed", "ip neigh del 192.168.1.1 dev vxlan.calico", dataplane.KindNeighbour},
		{"neighbour changed", "ip neigh replace 192.168.1.1 lladdr 66:00:00:00:00:99 dev vxlan.calico nud permanent", dataplane.KindNeighbour},
		{"fdb entry removed", "bridge fdb del 66:07:02:c1:cc:61 dev vxlan.calico dst 10.0.0.2 self", dataplane.KindFDB},
		{"fdb entry changed", "bridge fdb replace 66:07:02:c1:cc:61 dev vxlan.calico dst 10.0.0.9 self permanent", dataplane.KindFDB},
		{"mtu changed", "ip link set vxlan.calico mtu 1300", vx},
		{"mac changed", "ip link set vxlan.calico address 66:00:00:00:00:88", vx},
		{"mark changed", "ip link set vxlan.calico alias theirs", vx},
		{"device set down", "ip link set vxlan.calico down", dataplane.KindNextHop},
		{"device deleted", "ip link del vxlan.calico", vx},
		{"device renamed", "ip -batch testdata/rename.ip", vx},
		{"learning switched on", "ip link set vxlan.calico type vxlan learning", vx},
		{"outer TTL changed", "ip link set vxlan.calico type vxlan ttl 1", vx},
		{"outer TOS changed", "ip link set vxlan.calico type vxlan tos 0x10", vx},
		{"outer DF changed", "ip link set vxlan.calico type vxlan df set", vx},
		{"ageing changed", "ip link set vxlan.calico type vxlan ageing 5", vx},
		{"device made a bridge's port", "ip -batch testdata/master.ip", vx},
		{"device's neighbours not used", "ip link set vxlan.calico arp off", vx},
		{"device held down", "ip link set vxlan.calico protodown on", vx},
		{"uplink set down and up", "ip -batch testdata/flap.ip", dataplane.KindRoute},
		{"uplink's last address gone and back", "ip -batch testdata/readdress.ip", dataplane.KindRoute},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l, k := newHost(t)
			k.put(host()...)
			k.ready()
			before := k.drifted(tt.kind)
			start := time.Now()
			await.Until(t, tt.command, func() error {
				// What takes several steps may lose a race against the repair.
				out, err := l.try(tt.command)
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			})
			await.Until(t, "drift noticed", func() error {
				if k.drifted(tt.kind) == before {
					return errors.New("nothing was counted")
				}
				return nil
			})
			l.try("ip link del stolen")
			// No listing is due for an hour, so this is noticed or not seen.
			l.shows("ip -d route", hostRoutes)
			l.shows("ip nexthop", hostNextHops)
			l.shows("ip -d route show table 1000", `
unicast 192.168.3.0/26 nhid 8 via 10.0.0.2 dev up0 proto 77 scope global metric 512 onlink
nh_info id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink`)
			l.shows("bridge fdb show dev vxlan.calico", `66:07:02:c1:cc:61 dst 10.0.0.2 self permanent`)
			l.shows("ip neigh show dev vxlan.calico nud permanent", `192.168.1.1 lladdr 66:07:02:c1:cc:61 PERMANENT`)
			await.Until(t, "the device", func() error {
				out, err := l.try("ip -d link show vxlan.calico")
				for _, noncanonical := range []string{"master", "NOARP", "protodown", "tos", "df set"} {
					if strings.Contains(out, noncanonical) {
						err = errors.Join(err, fmt.Errorf("%q in %s", noncanonical, out))
					}
				}
				for _, want := range []string{"ttl auto", "ageing 300", "mtu 1450", "66:07:02:c1:cc:60", "id 4096 local 10.0.0.1 dev up0 srcport 0 0 dstport 4789 nolearning", "UP"} {
					if !strings.Contains(out, want) {
						err = errors.Join(err, fmt.Errorf("no %q in %s", want, out))
					}
				}
				return err
			})
			k.settled()
			t.Logf("repaired within %v", time.Since(start))
			if !strings.Contains(k.log.String(), "putting it back") {
				t.Error("nothing was logged")
			}
		})
	}
}

func TestSysctlDriftIsFoundByTheFullCheck(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start(everyCheck(50 * time.Millisecond))
	const name = "net/ipv4/conf/up0/forwarding"
	k.put(dataplane.Sysctl{Name: name, Value: "1"})
	l.run("sysctl -qw net.ipv4.conf.up0.forwarding=0")
	await.Until(t, name, func() error {
		if v := l.sysctl(name); v != "1" {
			return errors.New(v)
		}
		return nil
	})
	if k.drifted(dataplane.KindSysctl) != 1 {
		t.Errorf("drift counted %d times", k.drifted(dataplane.KindSysctl))
	}
}

func TestForeignAdditionsAreSwept(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	k.put(host()...)
	k.ready()
	l.run("ip addr add 1.2.3.4/32 dev vxlan.calico", "ip route add 172.16.0.0/16 via 10.0.0.9 proto 77",
		"ip neigh add 192.168.1.9 lladdr 66:07:02:c1:cc:99 dev vxlan.calico nud permanent",
		"bridge fdb add 66:07:02:c1:cc:99 dev vxlan.calico dst 10.0.0.9 self permanent",
		"ip nexthop add id 1000 via 10.0.0.9 dev up0 proto 77",
		// What is not on our devices or of our protocol stays.
		"ip neigh add 10.0.0.77 lladdr 66:07:02:c1:cc:77 dev up0 nud permanent", "ip addr add 1.2.3.5/32 dev up0",
		"ip route add 172.18.0.0/16 via 10.0.0.9")
	l.shows("ip -4 -br addr show dev vxlan.calico", "vxlan.calico UNKNOWN 192.168.0.1/32")
	l.shows("ip nexthop", hostNextHops)
	l.shows("ip neigh show dev vxlan.calico nud permanent", `192.168.1.1 lladdr 66:07:02:c1:cc:61 PERMANENT`)
	l.shows("bridge fdb show dev vxlan.calico", `66:07:02:c1:cc:61 dst 10.0.0.2 self permanent`)
	l.shows("ip route show proto 77 type unicast 172.16.0.0/16", "")
	l.shows("ip neigh show dev up0 nud permanent", "10.0.0.77 lladdr 66:07:02:c1:cc:77 PERMANENT")
	l.shows("ip route show 172.18.0.0/16", "172.18.0.0/16 via 10.0.0.9 dev up0")
	if out := l.run("ip addr show dev up0"); !strings.Contains(out, "1.2.3.5/32") {
		t.Errorf("a stranger's address is gone:\n%s", out)
	}
}

func TestObjectsWaitForTheirDevice(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	k := l.start()
	k.synced()
	objs := []dataplane.Object{
		dataplane.Sysctl{Name: "net/ipv4/conf/cali1/proxy_arp", Value: "1"},
		dataplane.Neighbour{Link: "cali1", Addr: addr("192.168.0.5"), MAC: mac("66:07:02:c1:cc:05")},
		dataplane.Route{Prefix: pfx("192.168.0.5/32"), Table: 254, Link: "cali1"},
		via(3, "192.168.0.6", "cali1"),
		route("192.168.7.0/24", 3),
	}
	k.Update(dataplane.SourceWorkload, objs, nil)
	waits := func(want ...string) {
		t.Helper()
		for i, w := range want {
			await.Until(t, w, func() error {
				s, ok := k.Status(objs[i].Key())
				if !ok || s.State != dataplane.Pending || s.Err == nil || s.Err.Error() != w {
					return fmt.Errorf("%v: %v %v", objs[i], s.State, s.Err)
				}
				return nil
			})
		}
	}
	waits("waiting for link cali1", "waiting for link cali1", "waiting for link cali1", "waiting for link cali1", "waiting for next hop 3")
	if k.writer.writes.Load() != 0 || strings.Contains(k.log.String(), "WARN") {
		t.Errorf("%d writes; a device that is to come is no fault:\n%s", k.writer.writes.Load(), k.log)
	}
	programmed := func() {
		t.Helper()
		k.settled()
		l.shows("ip route", `192.168.0.5 dev cali1 proto 77 scope link
192.168.7.0/24 nhid 3 via 192.168.0.6 dev cali1 proto 77 onlink`)
		l.shows("ip neigh show dev cali1 nud permanent", "192.168.0.5 lladdr 66:07:02:c1:cc:05 PERMANENT")
		if v := l.sysctl("net/ipv4/conf/cali1/proxy_arp"); v != "1" {
			t.Errorf("proxy_arp is %s", v)
		}
	}
	l.wire("cali1", "eth0", "")
	programmed()
	// The device goes and another of that name comes.
	l.run("ip link del cali1")
	waits("waiting for link cali1", "waiting for link cali1", "waiting for link cali1", "waiting for link cali1", "waiting for next hop 3")
	l.wire("cali1", "eth0", "")
	programmed()
	// Without a carrier there is no next hop, but a way to the device.
	l.run("ip link set eth0 down")
	await.Until(t, "next hop waits", func() error {
		s, _ := k.Status(objs[3].Key())
		if s.State != dataplane.Pending || s.Err == nil || s.Err.Error() != "waiting for link cali1, which is down or has no carrier" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	l.run("ip link set eth0 up")
	programmed()
	// The workload's own entries go with the wish; a stranger's stay.
	l.run("ip neigh add 192.168.0.9 lladdr 66:07:02:c1:cc:99 dev cali1 nud permanent")
	k.wait(k.Replace(dataplane.SourceWorkload, nil))
	l.shows("ip neigh show dev cali1 nud permanent", "192.168.0.9 lladdr 66:07:02:c1:cc:99 PERMANENT")
	l.shows("ip route", "")
	l.run("ip link show cali1")
}

func TestOverrunOfNotificationsIsMadeGood(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start(listenBuffer(2304)) // the least that the kernel gives
	k.synced()
	k.put(via(8, "10.0.0.2", "up0"))
	var objs []dataplane.Object
	for i := range 200 {
		objs = append(objs, route(fmt.Sprintf("172.16.%d.0/24", i), 8))
	}
	k.put(objs...)
	k.ready()
	// One command removes them all, faster than they can be read.
	var batch strings.Builder
	for _, o := range objs {
		fmt.Fprintln(&batch, "route del", o.Key().(dataplane.RouteKey).Prefix)
	}
	file := filepath.Join(t.TempDir(), "batch")
	if err := os.WriteFile(file, []byte(batch.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "overrun", func() error {
		l.try("ip -force -batch " + file)
		if !strings.Contains(k.log.String(), "overran") {
			return errors.New("no overrun yet")
		}
		return nil
	})
	await.Until(t, "all routes back", func() error {
		if n := strings.Count(l.run("ip route show proto 77"), "nhid 8"); n != len(objs) {
			return fmt.Errorf("%d routes", n)
		}
		return nil
	})
}

func TestQuarrelWithAnotherDaemonIsDamped(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	k.put(via(8, "10.0.0.2", "up0"), route("192.168.2.0/26", 8))
	k.ready()
	n := k.writer.writes.Load()
	deadline := time.Now().Add(1500 * time.Millisecond)
	removed := int64(0)
	for time.Now().Before(deadline) {
		if _, err := l.try("ip route del 192.168.2.0/26"); err == nil {
			removed++
		}
	}
	if wrote := k.writer.writes.Load() - n; wrote > 12 || wrote < 3 {
		t.Errorf("%d writes against a daemon that removed it %d times in 1.5 s", wrote, removed)
	}
	l.shows("ip route show 192.168.2.0/26", "192.168.2.0/26 nhid 8 via 10.0.0.2 dev up0 proto 77 onlink")
}

// TestSysctlsElsewhere: a container may be given the settings in another place than
// /proc/sys, which is read-only there.
func TestSysctlsElsewhere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	dir := t.TempDir()
	if err := os.Symlink("/proc/sys/net", filepath.Join(dir, "net")); err != nil {
		t.Fatal(err)
	}
	k := l.start(sysctlsIn(dir))
	const name = "net/ipv4/conf/up0/forwarding"
	k.put(dataplane.Sysctl{Name: name, Value: "1"})
	await.Until(t, name, func() error {
		if v := l.sysctl(name); v != "1" {
			return errors.New(v)
		}
		return nil
	})
}
