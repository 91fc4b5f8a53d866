package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

// cutHost has two ways, a group of both, n routes to each next hop and n to the
// group.
func cutHost(t *testing.T, n int, options ...labOption) (l *lab, k *running, routes map[dataplane.NextHopID][]dataplane.Object, objs []dataplane.Object) {
	t.Helper()
	l, k, objs = twoWays(t, options...)
	routes = map[dataplane.NextHopID][]dataplane.Object{20: objs[3:]} // two
	for i, id := range []dataplane.NextHopID{11, 12, 20} {
		for j := len(routes[id]); j < n; j++ {
			routes[id] = append(routes[id], route(fmt.Sprintf("%d.%d.%d.0/24", 20+20*i+j>>16, j>>8&0xff, j&0xff), id))
		}
	}
	routes[20] = slices.Clip(routes[20])
	objs = slices.Concat(objs[:3], routes[11], routes[12], routes[20])
	k.put(objs...)
	return l, k, routes, objs
}

// blamesNobody fails the test if routes of ours were taken for changed by
// somebody else.
func (r *running) blamesNobody() {
	r.t.Helper()
	if d := r.drifted(dataplane.KindRoute); d != 0 {
		r.t.Errorf("%d routes of ours were taken for changed by somebody else", d)
	}
}

func keysOf(objs ...dataplane.Object) (out []dataplane.Key) {
	for _, o := range objs {
		out = append(out, o.Key())
	}
	return out
}

// count waits until the kernel has that many routes of ours.
func (l *lab) count(want int) {
	l.t.Helper()
	await.Until(l.t, fmt.Sprintf("%d routes", want), func() error {
		out, err := l.try("ip -o route show proto 77")
		if n := strings.Count(out, "\n"); err != nil || n != want {
			return fmt.Errorf("%d routes, %v", n, err)
		}
		return nil
	})
}

// TestCut: a group, or a next hop, goes with all that leads to it in one message,
// and the withdrawals of its routes write nothing.
func TestCut(t *testing.T) {
	t.Parallel()
	const n = 20_000
	l, k, routes, _ := cutHost(t, n)
	before := k.writer.writes.Load()
	k.wait(k.Flush(dataplane.SourceCore, keysOf(group(20, 11, 12))))
	l.count(2 * n)
	if d := k.writer.writes.Load() - before; d != 1 {
		t.Errorf("%d messages to cut a group", d)
	}
	k.wait(k.Flush(dataplane.SourceCore, keysOf(via(11, "10.0.0.2", "up0"))))
	l.count(n)
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(append(routes[20], routes[11]...)...)))
	if d := k.writer.writes.Load() - before; d != 2 {
		t.Errorf("%d messages to cut a group and a next hop, and to withdraw their routes", d)
	}
	k.settled()
	l.count(n)
	k.blamesNobody()
}

// TestCutInUse: what is wanted again, or still, after its next hop was cut is
// made anew, and so is what moves to another next hop.
func TestCutInUse(t *testing.T) {
	t.Parallel()
	const n = 100
	l, k, routes, objs := cutHost(t, n)
	k.wait(k.Flush(dataplane.SourceCore, keysOf(group(20, 11, 12))))
	l.count(2 * n)
	var moved []dataplane.Object
	for _, o := range routes[20][:10] {
		r := o.(dataplane.Route)
		r.NextHop = 12
		moved = append(moved, r)
	}
	k.wait(k.Update(dataplane.SourceCore, moved, nil))
	l.count(2*n + 10)
	k.put(objs[2]) // the group
	l.count(3 * n)
	k.settled()
	k.blamesNobody()
}

// TestCutMember: the other members of a group keep it, and a next hop that it
// has stays until it has not.
func TestCutMember(t *testing.T) {
	t.Parallel()
	const n = 10
	l, k, routes, _ := cutHost(t, n)
	k.Flush(dataplane.SourceCore, keysOf(via(11, "10.0.0.2", "up0")))
	k.put(group(20, 12))
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(routes[11]...)))
	l.count(2 * n)
	k.settled()
	l.shows("ip nexthop", "id 12 via 10.0.2.2 dev up2 scope link proto 77 onlink\nid 20 group 12 proto 77")
}

// TestCutIsListed: a complete listing between a cut and what follows it finds
// nothing that somebody else did.
func TestCutIsListed(t *testing.T) {
	t.Parallel()
	const n = 100
	l, k, routes, _ := cutHost(t, n, everyCheck(50*time.Millisecond))
	k.wait(k.Flush(dataplane.SourceCore, keysOf(group(20, 11, 12))))
	l.count(2 * n)
	listings := func() int { return strings.Count(k.log.String(), "tables listed") }
	before := listings()
	await.Until(t, "complete listings", func() error {
		if n := listings() - before; n < 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(routes[20]...)))
	k.settled()
	l.count(2 * n)
	k.blamesNobody()
}

// TestCutUnanswered: when the connection breaks over a cut, a listing tells
// whether the kernel did it, and nobody is blamed.
func TestCutUnanswered(t *testing.T) {
	t.Parallel()
	for _, done := range []bool{false, true} {
		t.Run(fmt.Sprintf("done %t", done), func(t *testing.T) {
			t.Parallel()
			const n = 100
			f := &faulty{}
			l, k, routes, objs := cutHost(t, n, through(func(inner transport) transport { f.transport = inner; return f }))
			f.mu.Lock()
			f.broken, f.done = errors.New("socket died"), done
			f.mu.Unlock()
			k.Flush(dataplane.SourceCore, keysOf(group(20, 11, 12)))
			await.Until(t, "another connection", func() error {
				if !strings.Contains(k.log.String(), "opening another") {
					return errors.New("not yet")
				}
				return nil
			})
			k.wait(k.Update(dataplane.SourceCore, nil, keysOf(routes[20]...)))
			l.count(2 * n)
			k.settled()
			k.put(objs...)
			l.count(3 * n)
			k.settled()
			k.blamesNobody()
		})
	}
}

// TestCutIPv6: of IPv6 routes the kernel tells one by one that they are gone.
func TestCutIPv6(t *testing.T) {
	t.Parallel()
	l, k, _ := twoWays(t)
	six := dataplane.NextHop{ID: 13, Link: "up2", Gateway: addr("fe80::1"), OnLink: true}
	objs := []dataplane.Object{six}
	for i := range 1000 {
		objs = append(objs, route(fmt.Sprintf("fd20:0:0:%x::/64", i), 13))
	}
	k.put(objs...)
	k.wait(k.Flush(dataplane.SourceCore, keysOf(six)))
	l.shows("ip -6 route show proto 77", "")
	before := k.writer.writes.Load()
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(objs[1:]...)))
	if d := k.writer.writes.Load() - before; d != 0 {
		t.Errorf("%d messages to withdraw what is gone", d)
	}
	k.put(objs...)
	k.settled()
	if out := l.run("ip -6 route show proto 77"); strings.Count(out, "nhid 13") != 1000 {
		t.Errorf("not all are back: %d", strings.Count(out, "nhid 13"))
	}
	k.blamesNobody()
}

// TestCutFew: for a next hop with few of all routes the kernel's walk costs more
// than their own withdrawals.
func TestCutFew(t *testing.T) {
	t.Parallel()
	const n = 1000
	l, k, _, _ := cutHost(t, n)
	few := via(14, "10.0.2.9", "up2")
	k.put(few, route("192.168.9.0/26", 14), route("192.168.9.64/26", 14))
	before := k.writer.writes.Load()
	k.Flush(dataplane.SourceCore, keysOf(few))
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(route("192.168.9.0/26", 14), route("192.168.9.64/26", 14))))
	k.settled()
	l.count(3 * n)
	await.Until(t, "three messages", func() error {
		if d := k.writer.writes.Load() - before; d != 3 {
			return fmt.Errorf("%d messages, want one for each route and one for the next hop", d)
		}
		return nil
	})
}

// TestCutSpares: a next hop that is wanted again before the loop looks is not
// cut, also if it is withdrawn in good order after that.
func TestCutSpares(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	k := l.idle()
	a, b := via(11, "10.0.0.2", "up0"), group(20, 11)
	k.Update(dataplane.SourceCore, []dataplane.Object{a, b}, nil)
	k.Flush(dataplane.SourceCore, keysOf(a, b))
	k.Update(dataplane.SourceCore, []dataplane.Object{a}, nil)
	k.Update(dataplane.SourceCore, nil, keysOf(a))
	if diff := cmp.Diff(keysOf(b), k.writer.toFlush.keys); diff != "" {
		t.Errorf("to be cut (-want +got):\n%s", diff)
	}
	k.Replace(dataplane.SourceCore, []dataplane.Object{b})
	if len(k.writer.toFlush.keys) != 0 {
		t.Errorf("%v is to be cut, and is wanted", k.writer.toFlush.keys)
	}
}
