package bgp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// told renders plans, a line for each thing that changes.
func told(t *testing.T, v *View, changes ...store.Event) string {
	t.Helper()
	var lines []string
	err := v.Plan(t.Context(), changes, func(p Plan) error {
		for _, s := range p.Settings {
			lines = append(lines, p.Node+": "+s)
		}
		for _, s := range p.Sessions {
			lines = append(lines, strings.TrimSuffix(fmt.Sprintf("%s: %s %s %s: %s", p.Node, s.Peer.Name, s.Peer.Addr, s.Fate, strings.Join(s.Why, ", ")), ": "))
		}
		for _, a := range p.Announce {
			lines = append(lines, p.Node+": announces "+a.String())
		}
		for _, a := range p.Withdraw {
			lines = append(lines, p.Node+": withdraws "+a.String())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// TestPlan: what changes do to each node's part in BGP.
func TestPlan(t *testing.T) {
	t.Parallel()
	two := []store.Event{bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24")}
	with := func(more ...store.Event) []store.Event { return append(append([]store.Event{}, two...), more...) }
	tor := func(more string) store.Event {
		return peer(t, "tor", `{"node":"node2","peerIP":"10.1.0.1","asNumber":64999`+more+`}`)
	}
	filtered := tor(`,"filters":["f"]`)
	for name, c := range map[string]struct {
		have, change []store.Event
		want         string
	}{
		"nothing":      {with(tor("")), []store.Event{tor("")}, ""},
		"a peer comes": {with(), []store.Event{tor("")}, "node2: tor 10.1.0.1 comes"},
		"a peer goes":  {with(tor("")), []store.Event{gone(tor("").Key)}, "node2: tor 10.1.0.1 ends"},
		"mesh off": {
			with(),
			[]store.Event{conf(t, "default", `{"nodeToNodeMeshEnabled":false}`)},
			"node1: node2 10.1.0.12 ends\nnode2: node1 10.1.0.11 ends",
		},
		"an AS that the session must know of": {
			with(tor("")),
			[]store.Event{peer(t, "tor", `{"node":"node2","peerIP":"10.1.0.1","asNumber":65000}`)},
			"node2: tor 10.1.0.1 starts anew: ASN 64999 → 65000",
		},
		"a setting that it need not": {
			with(tor("")), []store.Event{tor(`,"nextHopMode":"Self"`)}, "node2: tor 10.1.0.1 changes: NextHopMode Auto → Self",
		},
		"rules of a filter": {
			with(filtered, filter(t, "f", `{"importV4":[{"action":"Accept"}]}`)),
			[]store.Event{filter(t, "f", `{"importV4":[{"action":"Reject"}]}`)},
			"node2: tor 10.1.0.1 changes: import rules of f",
		},
		"a filter that is missing": {
			with(tor("")), []store.Event{filtered}, "node2: tor 10.1.0.1 cannot run: ",
		},
		"the AS of all": {
			with(),
			[]store.Event{conf(t, "default", `{"asNumber":65001}`)},
			"node1: ASN 64512 → 65001\nnode1: node2 10.1.0.12 starts anew: ASN 64512 → 65001\nnode2: ASN 64512 → 65001\nnode2: node1 10.1.0.11 starts anew: ASN 64512 → 65001",
		},
		"a node's port": {
			with(),
			[]store.Event{conf(t, "node.node1", `{"listenPort":1790}`)},
			"node1: ListenPort 179 → 1790\nnode1: node2 10.1.0.12 starts anew\nnode2: node1 10.1.0.11 starts anew: Port 179 → 1790",
		},
		"a pool that is not announced any more": {
			with(ippool(t, "p", `{"cidr":"10.2.0.0/16"}`), affinity(t, "node1", "10.2.1.0/26", "confirmed"), ipamBlock(t, "10.2.1.0/26", "host:node1", nil)),
			[]store.Event{ippool(t, "p", `{"cidr":"10.2.0.0/16","disableBGPExport":true}`)},
			"node1: withdraws 10.2.1.0/26",
		},
		"a session of the mesh becomes a BGPPeer's": {
			with(),
			[]store.Event{peer(t, "pair", `{"node":"node1","peerIP":"10.1.0.12","asNumber":64512}`)},
			"node1: pair 10.1.0.12 changes: Name node2 → pair, Type node-to-node mesh → node specific, MaxPrefixes 10000 → none",
		},
		"and back": {
			with(peer(t, "pair", `{"node":"node1","peerIP":"10.1.0.12","asNumber":64512}`)),
			[]store.Event{gone(peer(t, "pair", `{}`).Key)},
			"node1: node2 10.1.0.12 starts anew: Name pair → node2, Type node specific → node-to-node mesh, MaxPrefixes none → 10000",
		},
		"a node leaves": {with(), []store.Event{node(t, "node2", `{}`)}, "node1: node2 10.1.0.12 ends\nnode2: node1 10.1.0.11 ends"},
	} {
		v := view(t, c.have...)
		before := told(t, v)
		got := told(t, v, c.change...)
		if got != c.want && (!strings.HasSuffix(c.want, ": ") || !strings.HasPrefix(got, c.want)) {
			t.Errorf("%s:\n%s", name, cmp.Diff(c.want, got))
		}
		if again := told(t, v); before != "" || again != "" {
			t.Errorf("%s: the question changed the view: %q, %q", name, before, again)
		}
		// What was planned is what is there when the change is made.
		if _, err := v.Apply(clustertest.Step("", store.Batch{Events: c.change})); err != nil {
			t.Fatal(err)
		}
		if left := told(t, v, c.change...); left != "" {
			t.Errorf("%s: made, and still to come: %s", name, left)
		}
	}
}
