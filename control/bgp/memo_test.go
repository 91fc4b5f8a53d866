package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// TestMemo: whatever changes, and in whichever steps, what is kept of a configuration and
// brought to what is there now is what is made anew.
func TestMemo(t *testing.T) {
	t.Parallel()
	followed := 0
	rapid.Check(t, func(rt *rapid.T) {
		one := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(rt, what) }
		v, m := view(t, bgpNode(t, "node1", "10.1.0.1/24"), bgpNode(t, "node2", "10.1.0.2/24"), bgpNode(t, "node4", "10.1.0.4/24")), &memo{}
		v.keys = ringOf("ab")
		// Most histories have nothing that joins the sessions of different nodes.
		odd := rapid.IntRange(0, 2).Draw(rt, "odd") == 0
		event := func() store.Event {
			kind := 0
			if rapid.IntRange(0, 9).Draw(rt, "other") == 0 {
				kind = rapid.IntRange(1, 2).Draw(rt, "kind")
			}
			switch kind {
			case 1:
				specs := []string{"", `{"peerIP":"10.9.0.1","asNumber":64999}`, `{"node":"node1","peerIP":"10.9.0.1:1790","asNumber":64998,"filters":["none"]}`}
				if odd {
					specs = append(specs, `{"peerIP":"10.1.0.2","asNumber":64512}`, `{"node":"node3","peerIP":"10.1.0.4"}`, `{"nodeSelector":"!has(rr)","peerSelector":"has(rr)"}`)
				}
				name, spec := one("peer", "p", "q"), one("spec", specs...)
				if spec == "" {
					return gone(store.ResourceKey(store.KindBGPPeer, name))
				}
				return peer(t, name, spec)
			case 2:
				notes := []string{"", `"routerd.io/maxPrefixes":"7"`}
				if odd {
					notes = append(notes, `"routerd.io/reflectors":"1"`)
				}
				name := one("conf", "default", "node.node2")
				return labelled(t, conf(t, name, one("confSpec", `{}`, `{"asNumber":64999}`, `{"listenPort":1790}`, `{"nodeToNodeMeshEnabled":false}`)), "", one("confNotes", notes...))
			}
			i := rapid.IntRange(1, 6).Draw(rt, "node")
			name, at := fmt.Sprintf("node%d", i), fmt.Sprint(i)
			if i > 1 && one("there", "is", "is", "is not") == "is not" {
				return gone(store.ResourceKey(store.KindNode, name))
			}
			if odd {
				at = one("address", at, at, "2")
			}
			spec := `"ipv4Address":"10.1.0.` + at + `/24"`
			spec += one("six", "", `,"ipv6Address":"fd00::`+at+`/64"`) + one("as", "", "", `,"asNumber":64600`)
			notes := `"routerd.io/bgpKeys":"` + published(one("keys", "", "a", "ab")) + `","routerd.io/accepts":"direct"`
			if odd {
				spec += one("cluster", "", "", `,"routeReflectorClusterID":"244.0.0.1"`)
				notes += one("reflects", "", "", `,"routerd.io/reflects":"true"`)
			}
			return labelled(t, node(t, name, `{"bgp":{`+spec+`}}`), one("labels", "", `"rr":""`), notes)
		}
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			var b store.Batch
			for range rapid.IntRange(1, 3).Draw(rt, "changes") {
				b.Events = append(b.Events, event())
			}
			if _, err := v.Apply(clustertest.Step("", b)); err != nil {
				rt.Fatal(err)
			}
			if len(v.moved) > 0 && m.follows(v, "node1") {
				followed++
			}
			got, err := m.desired(v, "node1")
			fresh := v.clone()
			fresh.idx, fresh.keys = nil, v.keys
			want, wantErr := Desired(fresh, "node1")
			if !errors.Is(err, wantErr) {
				rt.Fatalf("error %v, want %v", err, wantErr)
			}
			if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
				cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmpopts.EquateComparable(Peer{}, store.BMP{}), cmpopts.EquateEmpty()); d != "" {
				rt.Fatalf("(-made anew +kept):\n%s", d)
			}
		}
	})
	if followed == 0 {
		t.Error("the sessions were made anew each time")
	}
}

// BenchmarkNodeChanges has a Node come to a full mesh of 1,000, and go.
func BenchmarkNodeChanges(b *testing.B) {
	var events []store.Event
	for i := range 1000 {
		events = append(events, bgpNode(b, fmt.Sprintf("node%04d", i), fmt.Sprintf("10.1.%d.%d/16", i/200, 1+i%200)))
	}
	v, last := view(b, events...), events[999]
	var m memo
	for b.Loop() {
		for i, e := range []store.Event{gone(last.Key), last} {
			if changed, err := v.Apply(clustertest.Step("", store.Batch{Events: []store.Event{e}})); err != nil || !changed {
				b.Fatal(changed, err)
			}
			if c, err := m.desired(v, "node0000"); err != nil || len(c.Peers) != 998+i {
				b.Fatal(len(c.Peers), err)
			}
		}
	}
}
