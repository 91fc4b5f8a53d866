package kernel

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := k.Wait(ctx, k.Update(dataplane.SourceCore, objs, nil)); err != nil {
		t.Fatal(err)
	}
	return l, k, routes, objs
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
	eventually(l.t, fmt.Sprintf("%d routes", want), func() error {
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
	before := k.writes.Load()
	k.wait(k.Cut(dataplane.SourceCore, keysOf(group(20, 11, 12))))
	l.count(2 * n)
	if d := k.writes.Load() - before; d != 1 {
		t.Errorf("%d messages to cut a group", d)
	}
	k.wait(k.Cut(dataplane.SourceCore, keysOf(via(11, "10.0.0.2", "up0"))))
	l.count(n)
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(append(routes[20], routes[11]...)...)))
	if d := k.writes.Load() - before; d != 2 {
		t.Errorf("%d messages to cut a group and a next hop, and to withdraw their routes", d)
	}
	k.settled()
	l.count(n)
	if d := k.drifted(dataplane.KindRoute); d != 0 {
		t.Errorf("%d routes of ours were taken for changed by somebody else", d)
	}
}

// TestCutInUse: what is wanted again, or still, after its next hop was cut is
// made anew, and so is what moves to another next hop.
func TestCutInUse(t *testing.T) {
	t.Parallel()
	const n = 100
	l, k, routes, objs := cutHost(t, n)
	k.wait(k.Cut(dataplane.SourceCore, keysOf(group(20, 11, 12))))
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
	if d := k.drifted(dataplane.KindRoute); d != 0 {
		t.Errorf("%d routes of ours were taken for changed by somebody else", d)
	}
}

// TestCutMember: the other members of a group keep it, and a next hop that it
// has stays until it has not.
func TestCutMember(t *testing.T) {
	t.Parallel()
	const n = 10
	l, k, routes, _ := cutHost(t, n)
	k.Cut(dataplane.SourceCore, keysOf(via(11, "10.0.0.2", "up0")))
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
	k.wait(k.Cut(dataplane.SourceCore, keysOf(group(20, 11, 12))))
	l.count(2 * n)
	listings := func() int { return strings.Count(k.log.String(), "tables listed") }
	before := listings()
	eventually(t, "complete listings", func() error {
		if n := listings() - before; n < 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	k.wait(k.Update(dataplane.SourceCore, nil, keysOf(routes[20]...)))
	k.settled()
	l.count(2 * n)
	if d := k.drifted(dataplane.KindRoute); d != 0 {
		t.Errorf("%d routes of ours were taken for changed by somebody else", d)
	}
}
