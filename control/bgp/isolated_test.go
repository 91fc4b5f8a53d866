package bgp

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// TestIsolated: which nodes a change would leave without any session.
func TestIsolated(t *testing.T) {
	t.Parallel()
	three := []store.Event{bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), bgpNode(t, "node3", "10.1.0.13/24")}
	with := func(more ...store.Event) []store.Event { return append(append([]store.Event{}, three...), more...) }
	off := conf(t, "default", `{"nodeToNodeMeshEnabled":false}`)
	reflector := func(name, addr string) store.Event {
		return labelled(t, node(t, name, `{"bgp":{"ipv4Address":"`+addr+`","routeReflectorClusterID":"244.0.0.1"}}`), `"rr":""`, "")
	}
	toReflectors, between := peer(t, "to", `{"nodeSelector":"!has(rr)","peerSelector":"has(rr)"}`), peer(t, "between", `{"nodeSelector":"has(rr)","peerSelector":"has(rr)"}`)
	tor := peer(t, "tor", `{"node":"node2","peerIP":"10.1.0.1","asNumber":64999}`)
	// node1's only session is with a switch.
	alone := func(spec string, more ...store.Event) []store.Event {
		return append(with(off, peer(t, "tor", spec)), more...)
	}
	filtered := `{"node":"node1","peerIP":"10.1.0.1","asNumber":64999,"filters":["f"]}`
	reject, accept := `{"action":"Reject"}`, `{"action":"Accept"}`
	narrow := `{"action":"Reject","cidr":"10.0.0.0/8","matchOperator":"In"}`
	rules := func(in, out string) store.Event { return filter(t, "f", `{"importV4":[`+in+`],"exportV4":[`+out+`]}`) }
	recipe := with(reflector("node1", "10.1.0.11/24"), reflector("node2", "10.1.0.12/24"), toReflectors, between)
	for name, c := range map[string]struct {
		have, change []store.Event
		want         string
	}{
		"nothing":                             {with(), nil, ""},
		"mesh off":                            {with(), []store.Event{off}, "node1 node2 node3"},
		"mesh off, one has a switch":          {with(tor), []store.Event{off}, "node1 node3"},
		"mesh off and reflectors at once":     {with(), append(slices.Clip(recipe[3:]), off), ""},
		"the recipe's first step":             {with(), recipe[3:4], ""},
		"the recipe's second step":            {with(recipe[3:5]...), recipe[5:], ""},
		"the recipe's third step":             {recipe, []store.Event{off}, ""},
		"reflectors' peers go":                {append(slices.Clip(recipe), off), []store.Event{gone(toReflectors.Key)}, "node3"},
		"the switch goes with the mesh on":    {with(tor), []store.Event{gone(tor.Key)}, ""},
		"the switch goes with the mesh off":   {with(tor, off), []store.Event{gone(tor.Key)}, "node2"},
		"a node goes":                         {with(), []store.Event{gone(three[1].Key)}, ""},
		"all but one go":                      {with(), []store.Event{gone(three[1].Key), gone(three[2].Key)}, ""},
		"a node leaves BGP":                   {with(), []store.Event{node(t, "node1", `{}`)}, ""},
		"a filter goes":                       {alone(filtered, rules(accept, accept)), []store.Event{gone(rules("", "").Key)}, "node1"},
		"a filter that closes both ways":      {alone(filtered, rules(accept, accept)), []store.Event{rules(reject, reject)}, "node1"},
		"a filter that closes one way":        {alone(filtered, rules(accept, accept)), []store.Event{rules(reject, "")}, ""},
		"a filter with something before":      {alone(filtered, rules("", "")), []store.Event{rules(accept+","+reject, reject)}, ""},
		"a filter that rejects a part":        {alone(filtered, rules("", "")), []store.Event{rules(narrow, narrow)}, ""},
		"a filter of the other family":        {alone(filtered, rules("", "")), []store.Event{filter(t, "f", `{"importV6":[`+reject+`],"exportV6":[`+reject+`]}`)}, ""},
		"a filter that is not there is named": {alone(strings.Replace(filtered, `["f"]`, `[]`, 1)), []store.Event{peer(t, "tor", filtered)}, "node1"},
		"an explicit peer hides the mesh":     {with(gone(three[2].Key)), []store.Event{peer(t, "bad", `{"node":"node1","peerIP":"10.1.0.12","asNumber":64512,"filters":["none"]}`)}, "node1"},
		"a local AS on both sides":            {with(off, peer(t, "all", `{"peerSelector":"all()"}`)), []store.Event{peer(t, "all", `{"peerSelector":"all()","localASNumber":65001}`)}, "node1 node2 node3"},
		"a local AS on one side":              {append(slices.Clip(recipe[:6]), off), []store.Event{peer(t, "to", `{"nodeSelector":"!has(rr)","peerSelector":"has(rr)","localASNumber":65001}`)}, ""},
		"a peer that cannot run":              {with(tor, off), []store.Event{peer(t, "tor", `{"node":"node2","peerIP":"10.1.0.1"}`)}, "node2"},
	} {
		v := view(t, c.have...)
		got, err := v.Isolated(c.change)
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, %v; want %q", name, got, err, c.want)
		}
		if again, err := v.Isolated(nil); err != nil || len(again) != 0 {
			t.Errorf("%s: the question changed the view: %v, %v", name, again, err)
		}
	}
}

// BenchmarkIsolated asks about a cluster of 1,000 nodes.
func BenchmarkIsolated(b *testing.B) {
	var nodes []store.Event
	for i := range 1000 {
		n := bgpNode(b, fmt.Sprintf("node%04d", i), fmt.Sprintf("10.1.%d.%d/16", i/200, 1+i%200))
		if i%300 == 299 {
			n = labelled(b, n, `"rr":""`, "")
		}
		nodes = append(nodes, n)
	}
	off := conf(b, "default", `{"nodeToNodeMeshEnabled":false}`)
	to, between := peer(b, "to", `{"nodeSelector":"!has(rr)","peerSelector":"has(rr)"}`), peer(b, "between", `{"nodeSelector":"has(rr)","peerSelector":"has(rr)"}`)
	with := func(more ...store.Event) []store.Event { return append(slices.Clip(nodes), more...) }
	for _, c := range []struct {
		name         string
		have, change []store.Event
		isolated     int
	}{
		{"mesh", nodes, nodes[:1], 0},
		{"mesh off", nodes, []store.Event{off}, 1000},
		{"reflectors", with(off, to, between), nodes[:1], 0},
		{"reflectors go", with(off, to, between), []store.Event{gone(to.Key)}, 997},
		{"all nodes at once", nodes, nodes, 0},
	} {
		b.Run(c.name, func(b *testing.B) {
			v := view(b, c.have...)
			for b.Loop() {
				got, err := v.Isolated(c.change)
				if err != nil || len(got) != c.isolated {
					b.Fatalf("%d nodes, %v; want %d", len(got), err, c.isolated)
				}
			}
		})
	}
}

// BenchmarkDesired takes in a block of this node's, in a mesh of 1,000 nodes
// with a reflector's peers.
func BenchmarkDesired(b *testing.B) {
	var events []store.Event
	for i := range 1000 {
		events = append(events, bgpNode(b, fmt.Sprintf("node%04d", i), fmt.Sprintf("10.1.%d.%d/16", i/200, 1+i%200)))
	}
	for i := range 64 {
		events = append(events, affinity(b, "node0000", fmt.Sprintf("192.168.%d.0/26", i), "confirmed"))
	}
	claim := []store.Event{affinity(b, "node0000", "192.168.99.0/26", "confirmed"), affinity(b, "node0000", "192.168.99.0/26", "pending")}
	v := view(b, events...)
	var m memo
	for b.Loop() {
		for _, e := range claim {
			if changed, err := v.Apply(clustertest.Step("", store.Batch{Events: []store.Event{e}})); err != nil || !changed {
				b.Fatal(changed, err)
			}
			if _, err := m.desired(v, "node0000"); err != nil {
				b.Fatal(err)
			}
		}
	}
}
