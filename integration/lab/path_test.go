package lab

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/traffic"
)

// What the underlay takes is given by rack and by host, changes while the lab
// runs, and the answers of the narrow place can be filtered.
func TestPathMTU(t *testing.T) {
	t.Parallel()
	top := DefaultTopology(4)
	top.Pods = new(0)
	top.Racks[0].MTU = 9000
	top.Nodes[1].MTU = 4000
	l := up(t, "path", top)

	expect := func(what, from, to string, size int, want string) {
		t.Helper()
		ctx := await.Context(t)
		if want == traffic.NoAnswer { // is known when the time is over
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
		}
		r, err := l.Ping(ctx, from, to, traffic.Options{Size: size, DF: true})
		switch {
		case err != nil:
			t.Errorf("%s: ping of %d bytes from %s to %s: %v", what, size, from, to, err)
		case want == "" && !r.OK || want != "" && !strings.Contains(r.Err, want):
			t.Errorf("%s: ping of %d bytes from %s to %s: %s; want %q", what, size, from, to, r, want)
		}
	}
	expect("jumbo within a rack", "node1", "node4", 9000, "")
	expect("jumbo to a smaller rack", "node1", "node3", 1501, "fragmentation needed, mtu 1500 (from 10.1.0.1)")
	expect("full size to a smaller rack", "node1", "node3", 1500, "")
	if pod := linkMTUOf(t, l, "node2"); pod != 4000 {
		t.Errorf("uplink of node2 takes %d, want 4000", pod)
	}

	set := func(where string, mtu int) {
		t.Helper()
		if err := l.SetMTU(where, mtu); err != nil {
			t.Fatal(err)
		}
	}
	set("rack2", 1400)
	expect("narrow link", "node1", "node3", 1401, "fragmentation needed, mtu 1400")
	expect("narrow link", "node1", "node3", 1400, "")
	for range 2 {
		if err := l.FilterICMP(t.Context(), true); err != nil {
			t.Fatal(err)
		}
	}
	expect("black hole", "node1", "node3", 1401, traffic.NoAnswer)
	expect("small past the black hole", "node1", "node3", 1400, "")
	for range 2 {
		if err := l.FilterICMP(t.Context(), false); err != nil {
			t.Fatal(err)
		}
	}
	expect("no filter any more", "node1", "node3", 1401, "fragmentation needed, mtu 1400")
	set("node3", 3000)
	set("rack2", 3000)
	expect("wide again", "node1", "node3", 3000, "")
	expect("wide again", "node1", "node3", 3001, "mtu 3000")

	if err := l.SetMTU("rack9", 1500); err == nil || !strings.Contains(err.Error(), "rack9") {
		t.Errorf("no such rack: %v", err)
	}
	if err := l.SetMTU("rack1", 60); err == nil || !strings.Contains(err.Error(), "576 to 65535") {
		t.Errorf("MTU 60: %v", err)
	}
}

func linkMTUOf(t *testing.T, l *Lab, host string) int {
	t.Helper()
	mtu, err := linkMTU(l.Space(host), uplink)
	if err != nil {
		t.Fatal(err)
	}
	return mtu
}
