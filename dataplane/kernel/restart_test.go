package kernel

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/integration/await"
)

func TestRestartOnAProgrammedKernelWritesNothing(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	k.put(host()...)
	// Of IPv6 the kernel itself changes addresses in the first seconds.
	look := func() string {
		return l.run("ip -4 -d route show table all", "ip -d nexthop", "bridge fdb show dev vxlan.calico", "ip neigh show nud permanent", "ip -4 -d addr")
	}
	before := look()
	k.stop()
	if after := look(); after != before {
		t.Errorf("stopping changed the kernel, before:\n%s\nafter:\n%s", before, after)
	}

	k = l.start()
	k.wait(k.Replace(dataplane.SourceCore, host()))
	k.synced()
	k.ready()
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes to a kernel that was as wanted\n%s", n, k.log)
	}
	for _, s := range k.Statuses() {
		if s.State != dataplane.Done {
			t.Errorf("%v is %v: %v", s.Object, s.State, s.Err)
		}
	}
	if len(k.Statuses()) != len(host()) {
		t.Errorf("%d statuses of %d objects", len(k.Statuses()), len(host()))
	}
}

func TestIdleKernelWritesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	checks := 0
	k := l.start(everyCheck(1e6), func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.Hooks.Listed = func(time.Duration) { checks++ }
	})
	k.synced()
	k.put(host()...)
	k.ready()
	n := k.writer.writes.Load()
	await.Until(t, "twenty checks", func() error {
		k.Alive() // the loop turns by itself
		if c := strings.Count(k.log.String(), "tables listed"); c < 20 {
			return fmt.Errorf("%d checks", c)
		}
		return nil
	})
	if now := k.writer.writes.Load(); now != n {
		t.Errorf("%d writes while nothing changed", now-n)
	}
	k.stop()
	if checks < 20 {
		t.Errorf("the hook saw %d listings", checks)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.drift) != 0 {
		t.Errorf("drift %v where nothing changed", k.drift)
	}
}

func TestLeftoversAreSweptOnlyAfterSync(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start()
	k.put(host()...)
	k.stop()
	all := l.run("ip -d route", "ip nexthop")
	l.run("ip route add 172.16.0.0/16 via 10.0.0.9 proto static", "ip nexthop add id 99 via 10.0.0.9 dev up0 proto zebra",
		"ip route add 172.17.0.0/16 nhid 99 proto zebra")
	strangers := l.run("ip route show 172.16.0.0/16", "ip route show 172.17.0.0/16", "ip nexthop show id 99")

	// A killed daemon's successor wants a part of it: one peer has gone.
	var rest []dataplane.Object
	for _, o := range host() {
		if linkName(o) != nameVXLAN && nextHopOf(o) != 7 {
			rest = append(rest, o)
		}
	}
	k = l.start()
	k.wait(k.Replace(dataplane.SourceCore, rest))
	k.Synced(dataplane.SourceCore)
	await.Until(t, "a listing", func() error {
		if ok, why := k.Ready(); ok || why != "source workload has not said yet what it wants" {
			return fmt.Errorf("ready: %v %q", ok, why)
		}
		return nil
	})
	if now := l.run("ip -d route", "ip nexthop"); !strings.Contains(now, "nhid 7") || len(now) < len(all) {
		t.Errorf("something was swept before all were synced:\n%s", now)
	}
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes before all were synced", n)
	}
	k.Synced(dataplane.SourceWorkload)
	k.ready()
	l.shows("ip nexthop", `id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink
id 99 via 10.0.0.9 dev up0 scope link proto zebra`)
	l.shows("ip -o link show type vxlan", "")
	if now := l.run("ip route show 172.16.0.0/16", "ip route show 172.17.0.0/16", "ip nexthop show id 99"); now != strangers {
		t.Errorf("strangers' routes changed:\n%s\nwere:\n%s", now, strangers)
	}
}

func TestStrangersAreLeftAloneAndNamed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.run("ip route add 192.168.2.0/26 via 10.0.0.9 proto bird", "ip nexthop add id 9 via 10.0.0.9 dev up0 proto zebra",
		"ip link add clash type bridge")
	k := l.start()
	k.synced()
	k.put(via(8, "10.0.0.2", "up0"))
	r, n := route("192.168.2.0/26", 8), via(9, "10.0.0.2", "up0")
	b := dataplane.Link{Name: "clash", Type: dataplane.LinkVXLAN, MTU: 1450, VNI: 7, Port: 4789, Local: addr("10.0.0.1"), Parent: "up0"}
	rev := k.Update(dataplane.SourceCore, []dataplane.Object{r, n, b, route("192.168.3.0/26", 8)}, nil)
	err := k.Wait(t.Context(), rev)
	for o, want := range map[dataplane.Object]string{
		r: "route 192.168.2.0/26 belongs to protocol bird (12) and is left alone; we are protocol routerd (77): remove it there, or stop wanting it here",
		n: "nexthop id 9 belongs to protocol zebra (11) and is left alone; we are protocol routerd (77): remove it there, or stop wanting it here",
		b: "there is a device clash of kind bridge, which is not ours: rename or delete it, or have another name for ours",
	} {
		if got := k.failed(o); got.Error() != want {
			t.Errorf("%v: %v\nwant: %s", o, got, want)
		}
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("wait does not tell: %v", err)
		}
	}
	var clash *ClashError
	if !errors.As(err, &clash) || clash.Ours != 77 {
		t.Errorf("wait: %v holds no clash", err)
	}
	l.shows("ip route show proto 77", "192.168.3.0/26 nhid 8 via 10.0.0.2 dev up0 onlink")
	l.shows("ip route show proto bird", "192.168.2.0/26 via 10.0.0.9 dev up0")
	l.shows("ip nexthop", `id 8 via 10.0.0.2 dev up0 scope link proto 77 onlink
id 9 via 10.0.0.9 dev up0 scope link proto zebra`)
	// As soon as they go, ours come.
	l.run("ip route del 192.168.2.0/26 proto bird", "ip nexthop del id 9")
	l.shows("ip route show proto 77", `192.168.2.0/26 nhid 8 via 10.0.0.2 dev up0 onlink
192.168.3.0/26 nhid 8 via 10.0.0.2 dev up0 onlink`)
	l.shows("ip nexthop show id 9", "id 9 via 10.0.0.2 dev up0 scope link proto 77 onlink")
	k.del(b)
	l.run("ip link show clash")
}

func TestStrangerThatComesWhileWeWrite(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start(through(func(t transport) transport {
		return &faulty{transport: t, before: func(b *nl.Batch) {
			// Between our look and our write.
			if nl.Value(b.Message(0)[4:]).Uint16() == 24 {
				l.try("ip route add 192.168.2.0/26 via 10.0.0.9 proto static")
			}
		}}
	}))
	r := route("192.168.2.0/26", 8)
	k.Update(dataplane.SourceCore, []dataplane.Object{via(8, "10.0.0.2", "up0"), r}, nil)
	if err := k.failed(r); !strings.Contains(err.Error(), "protocol static (4)") {
		t.Errorf("error %v", err)
	}
	l.shows("ip route show 192.168.2.0/26", "192.168.2.0/26 via 10.0.0.9 dev up0 proto static")
}

func TestLeftoversOfAKilledWriterAreTakenOver(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	// A predecessor died in the middle: half of the objects, some wrong, some
	// that no wish looks like.
	l.run("ip nexthop add id 8 via 10.0.0.9 dev up0 proto 77",
		"ip route add 192.168.2.0/26 via 10.0.0.9 proto 77",
		"ip route add 192.168.9.0/26 tos 0x10 via 10.0.0.9 proto 77",
		"ip route add 192.168.8.0/26 nhid 8 proto 77",
		"ip link add vxlan.calico type vxlan id 4095 dstport 4789 learning local 10.0.0.1 dev up0",
		"ip addr add 192.168.77.7/24 dev vxlan.calico",
		"ip link set vxlan.calico up",
		"ip neigh add 192.168.1.9 lladdr 66:07:02:c1:cc:99 dev vxlan.calico nud permanent",
		"bridge fdb add 66:07:02:c1:cc:99 dev vxlan.calico dst 10.0.0.9 self permanent")
	k := l.start()
	k.wait(k.Replace(dataplane.SourceCore, host()))
	k.synced()
	k.ready()
	l.shows("ip -d route", hostRoutes)
	l.shows("ip nexthop", hostNextHops)
	l.shows("ip neigh show dev vxlan.calico nud permanent", `192.168.1.1 lladdr 66:07:02:c1:cc:61 PERMANENT`)
	l.shows("bridge fdb show dev vxlan.calico", `66:07:02:c1:cc:61 dst 10.0.0.2 self permanent`)
}
