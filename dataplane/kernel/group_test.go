package kernel

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

// twoWays is a host with two wires, a next hop on each, and a group of both.
func twoWays(t testing.TB, options ...labOption) (*lab, *running, []dataplane.Object) {
	t.Helper()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.wire("up2", "up3", "10.0.2.1/24")
	k := l.start(options...)
	k.synced()
	return l, k, []dataplane.Object{
		via(11, "10.0.0.2", "up0"), via(12, "10.0.2.2", "up2"), group(20, 11, 12), route("192.168.2.0/26", 20), route("192.168.3.0/26", 20),
	}
}

const (
	bothHops = "id 11 via 10.0.0.2 dev up0 scope link proto 77 onlink\nid 12 via 10.0.2.2 dev up2 scope link proto 77 onlink\n"
	bothWays = bothHops + "id 20 group 11/12 proto 77"
)

func TestGroup(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	k.put(objs...)
	l.shows("ip nexthop", bothWays)
	l.shows("ip route show proto 77", `
192.168.2.0/26 nhid 20
nexthop via 10.0.0.2 dev up0 weight 1 onlink
nexthop via 10.0.2.2 dev up2 weight 1 onlink
192.168.3.0/26 nhid 20
nexthop via 10.0.0.2 dev up0 weight 1 onlink
nexthop via 10.0.2.2 dev up2 weight 1 onlink`)
	weighted := dataplane.NextHopGroup{ID: 20, Members: dataplane.GroupOf(dataplane.GroupMember{ID: 12, Weight: dataplane.MaxGroupWeight}, dataplane.GroupMember{ID: 11, Weight: 3})}
	k.put(weighted)
	l.shows("ip nexthop show group", "id 20 group 11,3/12,255 proto 77")
	// One member less is one message, though its next hop goes too.
	n := k.writer.writes.Load()
	k.wait(k.Update(dataplane.SourceCore, []dataplane.Object{group(20, 12)}, []dataplane.Key{dataplane.NextHopKey{ID: 11}}))
	l.shows("ip nexthop", "id 12 via 10.0.2.2 dev up2 scope link proto 77 onlink\nid 20 group 12 proto 77")
	if d := k.writer.writes.Load() - n; d != 2 {
		t.Errorf("%d messages, want one for the group and one for the next hop", d)
	}
	// A wish without the next hop that the group still uses is held back.
	k.Update(dataplane.SourceCore, nil, []dataplane.Key{dataplane.NextHopKey{ID: 12}, dataplane.NextHopGroupKey{ID: 20}})
	await.Until(t, "held", func() error {
		if log := k.log.String(); !strings.Contains(log, "1 routes or groups use it") || !strings.Contains(log, "2 routes or groups use it") {
			return errors.New("not held")
		}
		return nil
	})
	l.shows("ip nexthop", "id 12 via 10.0.2.2 dev up2 scope link proto 77 onlink\nid 20 group 12 proto 77")
	// With the routes all goes: the group with them, then its member.
	k.del(objs[3], objs[4])
	l.shows("ip nexthop", "")
	l.shows("ip route show proto 77", "")
}

// TestGroupOfWhatThereIs: a member that cannot be had keeps no traffic from
// the others, and comes in when it can.
func TestGroupOfWhatThereIs(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	l.run("ip link set up3 down")
	await.Until(t, "no carrier", func() error {
		if out := l.run("ip -o link show up2"); strings.Contains(out, "LOWER_UP") {
			return errors.New(out)
		}
		return nil
	})
	k.Update(dataplane.SourceCore, objs, nil)
	l.shows("ip nexthop", "id 11 via 10.0.0.2 dev up0 scope link proto 77 onlink\nid 20 group 11 proto 77")
	l.shows("ip route show proto 77", "192.168.2.0/26 nhid 20 via 10.0.0.2 dev up0 onlink\n192.168.3.0/26 nhid 20 via 10.0.0.2 dev up0 onlink")
	if s, _ := k.Status(objs[2].Key()); s.State != dataplane.Pending || s.Err == nil || s.Err.Error() != "waiting for next hop 12" {
		t.Errorf("the group is %v: %v", s.State, s.Err)
	}
	l.run("ip link set up3 up")
	l.shows("ip nexthop", bothWays)
	k.settled()
}

// TestGroupFollowsDevices: the kernel takes a member out when its device loses
// the carrier, and tells nobody; nothing is written about the group until the
// device is back, and no route is touched at all.
func TestGroupFollowsDevices(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	k.put(objs...)
	k.ready()
	n := k.writer.writes.Load()
	l.run("ip link set up3 down")
	l.shows("ip nexthop", "id 11 via 10.0.0.2 dev up0 scope link proto 77 onlink\nid 20 group 11 proto 77")
	await.Until(t, "noticed", func() error {
		if s, _ := k.Status(objs[2].Key()); s.State != dataplane.Pending {
			return fmt.Errorf("%v", s)
		}
		return nil
	})
	if d := k.writer.writes.Load() - n; d != 0 {
		t.Errorf("%d messages while the device is away", d)
	}
	l.run("ip link set up3 up")
	l.shows("ip nexthop", bothWays)
	k.settled()
	if d := k.writer.writes.Load() - n; d != 2 {
		t.Errorf("%d messages, want the next hop and the group", d)
	}
	// With the last member the group goes, and the routes with it.
	l.run("ip link set up3 down", "ip link set up1 down")
	l.shows("ip nexthop", "")
	l.run("ip link set up3 up", "ip link set up1 up")
	l.shows("ip nexthop", bothWays)
	k.settled()
	if out := l.run("ip route show proto 77"); strings.Count(out, "nhid 20") != 2 {
		t.Errorf("routes are not back:\n%s", out)
	}
}

func TestGroupDriftIsRepaired(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		command string
		kind    dataplane.Kind
	}{
		{"ip nexthop del id 11", dataplane.KindNextHopGroup},
		{"ip nexthop del id 20", dataplane.KindRoute},
		{"ip nexthop replace id 20 group 11 proto 77", dataplane.KindNextHopGroup},
		{"ip nexthop replace id 20 group 11,9/12 proto 77", dataplane.KindNextHopGroup},
		{"ip nexthop replace id 11 via 10.0.0.9 dev up0 onlink proto 77", dataplane.KindNextHop},
		{"ip route del 192.168.3.0/26", dataplane.KindRoute},
	} {
		t.Run(tt.command, func(t *testing.T) {
			t.Parallel()
			l, k, objs := twoWays(t)
			k.put(objs...)
			k.ready()
			for range 2 {
				before := k.drifted(tt.kind)
				l.run(tt.command)
				await.Until(t, "drift noticed", func() error {
					if k.drifted(tt.kind) == before {
						return errors.New("nothing was counted")
					}
					return nil
				})
				l.shows("ip nexthop", bothWays)
				k.settled()
			}
			if out := l.run("ip route show proto 77"); strings.Count(out, "nhid 20") != 2 {
				t.Errorf("routes are not back:\n%s", out)
			}
		})
	}
}

func TestGroupClash(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	l.run("ip nexthop add id 30 via 10.0.0.7 dev up0 proto 12", "ip nexthop add id 20 group 30 proto 12")
	k.Update(dataplane.SourceCore, objs, nil)
	err := k.failed(objs[2])
	var clash *ClashError
	if !errors.As(err, &clash) || clash.Theirs != 12 {
		t.Errorf("%v", err)
	}
	l.run("ip nexthop del id 20", "ip nexthop del id 30")
	l.shows("ip nexthop", bothWays)
}

// TestGroupSurvivesRestart: a second life finds its groups, writes nothing, and
// sweeps those that nobody wants any more.
func TestGroupSurvivesRestart(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	k.put(append(objs, group(21, 11), route("192.168.4.0/26", 21))...)
	k.settled()
	k.stop()
	next := l.start()
	next.wait(next.Replace(dataplane.SourceWorkload, nil))
	next.wait(next.Replace(dataplane.SourceCore, objs))
	next.ready()
	if n := next.writer.writes.Load(); n != 0 {
		t.Errorf("%d messages", n)
	}
	next.synced()
	l.shows("ip nexthop", bothWays)
}

// TestGroupRefused: what the kernel refuses of one member leaves the others.
func TestGroupRefused(t *testing.T) {
	t.Parallel()
	f := &faulty{}
	l, k, objs := twoWays(t, through(func(inner transport) transport { f.transport = inner; return f }))
	f.refuse(1, unix.EPERM)
	k.Update(dataplane.SourceCore, objs, nil)
	l.shows("ip nexthop", bothWays)
	k.settled()
}

// TestGroupMovesManyRoutes: with a hundred thousand routes behind it the group
// is still one message.
func TestGroupMovesManyRoutes(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	const n = 100_000
	for i := range n {
		objs = append(objs, route(fmt.Sprintf("%d.%d.%d.0/24", 20+i>>16, i>>8&0xff, i&0xff), 20))
	}
	k.put(objs...)
	before, start := k.writer.writes.Load(), time.Now()
	k.put(group(20, 12))
	t.Logf("%d routes moved in %v", n, time.Since(start))
	if d := k.writer.writes.Load() - before; d != 1 {
		t.Errorf("%d messages", d)
	}
	if out := l.run("ip route get 20.0.5.1"); !strings.Contains(out, "dev up2") {
		t.Error(out)
	}
	before = k.writer.writes.Load()
	k.wait(k.Replace(dataplane.SourceCore, objs[:2]))
	k.settled()
	if d := k.writer.writes.Load() - before; d != 1 {
		t.Errorf("%d messages to remove the group with its routes", d)
	}
	l.shows("ip route show proto 77", "")
}
