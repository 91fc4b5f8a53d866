package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/store"
)

// TestReflectorsLive: the sessions of nodes with those that become reflectors stay up throughout, those between other nodes end, routes are
// there all the time, each by both reflectors; and what is withdrawn is gone everywhere, though the two reflectors have all of each other's.
func TestReflectorsLive(t *testing.T) {
	t.Parallel()
	h := hosts(t, 4)
	name := func(i int) string { return fmt.Sprint("node", i+1) }
	block := func(i int) string { return fmt.Sprintf("192.168.%d.0/26", i+1) }
	var daemons []*daemon
	var events []store.Event
	events = append(events, conf(t, "default", `{"bindMode":"NodeIP"}`), ippool(t, "pool", `{"cidr":"192.168.0.0/16"}`))
	for i := range h {
		events = append(events, bgpNode(t, name(i), h[i].String()+"/32"), affinity(t, name(i), block(i), "confirmed"))
	}
	for i := range h {
		d := newDaemon(t, name(i))
		daemons = append(daemons, d)
		d.send(store.Batch{Synced: true, Events: events})
	}
	tell := func(events ...store.Event) {
		for _, d := range daemons {
			d.send(store.Batch{Events: events})
		}
	}
	sessions := func(i int) string {
		var out []string
		for _, p := range daemons[i].Status(t.Context()).Peers {
			out = append(out, fmt.Sprintf("%s %s %s", p.Name, p.Type, p.State))
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	waitSessions := func(i int, want string) {
		t.Helper()
		poll(t, func() string { return fmt.Sprintf("%s has %s, want %s", name(i), sessions(i), want) }, func() bool { return sessions(i) == want })
	}
	has := func(what string, of int, want bool) {
		t.Helper()
		for i, d := range daemons {
			if i != of {
				poll(t, func() string { return fmt.Sprintf("%s at %s: %t", what, name(i), want) }, func() bool { return d.has(what) == want })
			}
		}
	}
	for i := range h {
		has(block(i), i, true)
	}
	since := map[string]time.Time{}
	note := func(check bool) {
		t.Helper()
		for i, d := range daemons {
			for _, p := range d.Status(t.Context()).Peers {
				key := name(i) + " " + p.Name
				if was, known := since[key]; check && known && was != p.Since {
					t.Errorf("the session of %s was made anew", key)
				}
				since[key] = p.Since
			}
		}
	}
	note(false)
	marks := make([]*watcher, len(daemons))
	for i, d := range daemons {
		marks[i] = d.watchers.add()
	}

	says := func(i int, notes string) store.Event {
		return labelled(t, bgpNode(t, name(i), h[i].String()+"/32"), "", notes)
	}
	tell(labelled(t, conf(t, "default", `{"bindMode":"NodeIP"}`), "", `"routerd.io/reflectors":"2"`), says(0, `"routerd.io/reflects":"true"`), says(1, `"routerd.io/reflects":"true"`))
	waitSessions(2, "node1 reflector up, node2 reflector up, node4 node-to-node mesh up")
	paths := func(i int, prefix string) (by []string) {
		routes, err := daemons[i].Explain(t.Context(), netip.MustParsePrefix(prefix))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if r.State == RouteBest || r.State == RouteLost {
				by = append(by, r.Peer)
			}
		}
		slices.Sort(by)
		return by
	}
	// What the nodes then say of themselves is so: they have each other's routes by both.
	for i, want := range map[int]string{2: "[node1 node2 node4]", 3: "[node1 node2 node3]"} {
		poll(t, func() string { return fmt.Sprint(name(i), paths(i, block(5-i)), want) }, func() bool { return fmt.Sprint(paths(i, block(5-i))) == want })
	}
	tell(says(0, `"routerd.io/reflects":"true","routerd.io/reflectedBy":"node2"`), says(1, `"routerd.io/reflects":"true","routerd.io/reflectedBy":"node1"`),
		says(2, `"routerd.io/reflectedBy":"node1 node2"`), says(3, `"routerd.io/reflectedBy":"node1 node2"`))
	for i, want := range []string{
		"node2 reflector up, node3 reflector up, node4 reflector up", "node1 reflector up, node3 reflector up, node4 reflector up",
		"node1 reflector up, node2 reflector up", "node1 reflector up, node2 reflector up",
	} {
		waitSessions(i, want)
	}
	note(true)
	poll(t, func() string { return fmt.Sprint(paths(2, block(3))) }, func() bool { return fmt.Sprint(paths(2, block(3))) == "[node1 node2]" })
	// A reflector has those of the client and of the other reflector.
	poll(t, func() string { return fmt.Sprint(paths(0, block(3))) }, func() bool { return fmt.Sprint(paths(0, block(3))) == "[node2 node4]" })
	for i, m := range marks {
		news, _ := m.take()
		for _, n := range news {
			for _, p := range n.changes.Del {
				t.Errorf("%s lost %s for a while", name(i), p)
			}
		}
	}
	tell(gone(affinity(t, "node4", block(3), "confirmed").Key))
	has(block(3), 3, false)
	for i := range h[:3] {
		poll(t, func() string {
			return fmt.Sprintf("%s without a path to what was withdrawn: %v", name(i), paths(i, block(3)))
		}, func() bool { return len(paths(i, block(3))) == 0 })
	}
}
