package bgp

import (
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/store"
)

// TestBereft: which nodes a change would leave without any session.
func TestBereft(t *testing.T) {
	t.Parallel()
	three := []store.Event{bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), bgpNode(t, "node3", "10.1.0.13/24")}
	with := func(more ...store.Event) []store.Event { return append(append([]store.Event{}, three...), more...) }
	off := conf(t, "default", `{"nodeToNodeMeshEnabled":false}`)
	reflector := func(name, addr string) store.Event {
		return labelled(t, node(t, name, `{"bgp":{"ipv4Address":"`+addr+`","routeReflectorClusterID":"244.0.0.1"}}`), `"rr":""`, "")
	}
	toReflectors, between := peer(t, "to", `{"nodeSelector":"!has(rr)","peerSelector":"has(rr)"}`), peer(t, "between", `{"nodeSelector":"has(rr)","peerSelector":"has(rr)"}`)
	tor := peer(t, "tor", `{"node":"node2","peerIP":"10.1.0.1","asNumber":64999}`)
	recipe := with(reflector("node1", "10.1.0.11/24"), reflector("node2", "10.1.0.12/24"), toReflectors, between)
	for name, c := range map[string]struct {
		have, change []store.Event
		want         string
	}{
		"nothing":                           {with(), nil, ""},
		"mesh off":                          {with(), []store.Event{off}, "node1 node2 node3"},
		"mesh off, one has a switch":        {with(tor), []store.Event{off}, "node1 node3"},
		"mesh off and reflectors at once":   {with(), append(slices.Clip(recipe[3:]), off), ""},
		"the recipe's first step":           {with(), recipe[3:4], ""},
		"the recipe's second step":          {with(recipe[3:5]...), recipe[5:], ""},
		"the recipe's third step":           {recipe, []store.Event{off}, ""},
		"reflectors' peers go":              {append(slices.Clip(recipe), off), []store.Event{gone(toReflectors.Key)}, "node3"},
		"the switch goes with the mesh on":  {with(tor), []store.Event{gone(tor.Key)}, ""},
		"the switch goes with the mesh off": {with(tor, off), []store.Event{gone(tor.Key)}, "node2"},
		"a node goes":                       {with(), []store.Event{gone(three[1].Key)}, ""},
		"all but one go":                    {with(), []store.Event{gone(three[1].Key), gone(three[2].Key)}, ""},
		"a node leaves BGP":                 {with(), []store.Event{node(t, "node1", `{}`)}, ""},
		"a peer that cannot run":            {with(tor, off), []store.Event{peer(t, "tor", `{"node":"node2","peerIP":"10.1.0.1"}`)}, "node2"},
	} {
		v := view(t, c.have...)
		got, err := v.Bereft(c.change)
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, %v; want %q", name, got, err, c.want)
		}
		if again, err := v.Bereft(nil); err != nil || len(again) != 0 {
			t.Errorf("%s: the question changed the view: %v, %v", name, again, err)
		}
	}
}
