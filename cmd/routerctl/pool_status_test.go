package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

func liveNode(t *testing.T, s store.Store, name, ipv4 string, f store.NodeEncaps) {
	t.Helper()
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: ipv4}
	store.SetNodeEncaps(n, f)
	if _, err := store.Create(t.Context(), s, n); err != nil {
		t.Fatal(err)
	}
}

// TestPoolStatus: in the middle of a change each node says how far it is, and
// the one that stops it says why.
func TestPoolStatus(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	docs := documents(t, poolText("moving", "10.0.0.0/24", ", ipipMode: Always")+poolText("settled", "10.1.0.0/24", ", vxlanMode: Always"))
	if err := write(t.Context(), s, &strings.Builder{}, apply, docs, writing{}); err != nil {
		t.Fatal(err)
	}
	const vxlan = "VXLAN/4096/4789"
	liveNode(t, s, "node1", "192.0.2.1/24", store.NodeEncaps{
		Published: true, Accepts: []string{"ipip", "vxlan/4096/4789"}, Sends: map[string]string{"moving": vxlan, "settled": vxlan},
	})
	liveNode(t, s, "node2", "192.0.2.2/24", store.NodeEncaps{
		Published: true, Accepts: []string{"vxlan/4096/4789"}, Sends: map[string]string{"moving": vxlan, "settled": vxlan},
		Refuses: map[string]string{"ipip": "no such module"},
	})
	liveNode(t, s, "node3", "192.0.2.3/24", store.NodeEncaps{
		Published: true, Accepts: []string{"vxlan/4096/4789"}, Sends: map[string]string{"settled": vxlan},
	})
	liveNode(t, s, "node5", "192.0.2.5/24", store.NodeEncaps{
		Published: true, Accepts: []string{"ipip", "vxlan/4096/4789"}, Sends: map[string]string{"moving": vxlan, "settled": vxlan},
		Stays: map[string]string{"moving": "node1 stays in vxlan/4096/4789: lost"},
	})
	liveNode(t, s, "node4", "192.0.2.4/24", store.NodeEncaps{})
	c, err := readPoolFacts(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := c.print(&out, nil); err != nil {
		t.Fatal(err)
	}
	want := `IPPool(moving) 10.0.0.0/24: IPIP; 0 of 4 nodes have moved to it
NODE    TAKES IN   SENDS             NOTE
node1   yes        VXLAN/4096/4789   waits for node2, node3
node2   no         VXLAN/4096/4789   ipip: no such module
node3   no         -                 has not published yet that it accepts ipip
node4   -          -                 publishes no encapsulation, like nodes without routerd; it is assumed to follow the pool at once
node5   yes        VXLAN/4096/4789   node1 stays in vxlan/4096/4789: lost

IPPool(settled) 10.1.0.0/24: VXLAN/4096/4789; 4 of 4 nodes have moved to it
NODE    TAKES IN   SENDS             NOTE
node1   yes        VXLAN/4096/4789   -
node2   yes        VXLAN/4096/4789   -
node3   yes        VXLAN/4096/4789   -
node4   -          -                 publishes no encapsulation, like nodes without routerd; it is assumed to follow the pool at once
node5   yes        VXLAN/4096/4789   -
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	out.Reset()
	if err := c.print(&out, []string{"settled"}); err != nil || strings.Contains(out.String(), "moving") {
		t.Errorf("one pool: %v\n%s", err, out.String())
	}
	c.pool("settled").Annotations = map[string]string{store.AnnotationForce: string(store.VXLAN)}
	out.Reset()
	const forced = "IPPool(settled) 10.1.0.0/24: VXLAN/4096/4789; 4 of 4 nodes have moved to it, by --force: packets to a peer that it does not reach are lost\n"
	if err := c.print(&out, []string{"settled"}); err != nil || !strings.HasPrefix(out.String(), forced) {
		t.Errorf("forced: %v\n%s", err, out.String())
	}
	if err := c.print(&out, []string{"none"}); err == nil {
		t.Error("a pool that does not exist is shown")
	}
}

// TestRefusedMode: a mode that a node cannot accept is refused, naming node
// and reason; what is so already, and other modes, are not.
func TestRefusedMode(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	liveNode(t, s, "node2", "192.0.2.2/24", store.NodeEncaps{Published: true, Refuses: map[string]string{"ipip": "no such module"}})
	if err := write(t.Context(), s, &strings.Builder{}, apply, documents(t, poolText("old", "10.0.0.0/24", ", ipipMode: Always")), writing{}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, text string
		refused    bool
	}{
		{"new and impossible", poolText("new", "10.1.0.0/24", ", ipipMode: CrossSubnet"), true},
		{"changed and impossible", poolText("old", "10.0.0.0/24", ", ipipMode: CrossSubnet"), true},
		{"impossible already", poolText("old", "10.0.0.0/24", ", ipipMode: Always, natOutgoing: true"), false},
		{"possible", poolText("old", "10.0.0.0/24", ", vxlanMode: Always"), false},
	} {
		err := checkRefused(t.Context(), s, documents(t, tt.text))
		if (err != nil) != tt.refused {
			t.Errorf("%s: %v", tt.name, err)
		}
		if err != nil && (!strings.Contains(err.Error(), "node2") || !strings.Contains(err.Error(), "no such module") || !strings.Contains(err.Error(), "--force")) {
			t.Errorf("%s: %v: node, reason or cure is missing", tt.name, err)
		}
	}
}

// TestFollow: a write of a pool's mode says which nodes keep peers as they were, and why;
// with force it has them move.
func TestFollow(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	if err := write(t.Context(), s, &strings.Builder{}, apply, documents(t, poolText("pool", "10.0.0.0/24", ", vxlanMode: Always")), writing{}); err != nil {
		t.Fatal(err)
	}
	liveNode(t, s, "node1", "192.0.2.1/24", store.NodeEncaps{
		Published: true, Accepts: []string{"direct", "vxlan/4096/4789"}, Sends: map[string]string{"pool": "VXLAN/4096/4789"},
		Stays: map[string]string{"pool": "node2 stays in vxlan/4096/4789: no answer"},
	})
	liveNode(t, s, "node2", "192.0.2.2/24", store.NodeEncaps{Published: true, Accepts: []string{"direct"}, Sends: map[string]string{"pool": "Direct"}})
	var out strings.Builder
	docs := documents(t, poolText("pool", "10.0.0.0/24", ""))
	if err := writeAndFollow(t.Context(), s, &out, apply, docs, writing{}); err != nil {
		t.Fatal(err)
	}
	const want = `IPPool(pool) configured
Successfully applied 1 'IPPool' resource(s)
IPPool(pool) on node node1: node2 stays in vxlan/4096/4789: no answer
Packets to and from them keep their present encapsulation, and none are lost. They move when probes succeed, or with --force.
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	forced := func() bool {
		o, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "pool"))
		if err != nil {
			t.Fatal(err)
		}
		return store.Forced(o.Value.(*v3.IPPool))
	}
	if forced() {
		t.Error("forced before somebody asked")
	}
	forcePools(docs)
	if err := writeAndFollow(t.Context(), s, &out, apply, docs, writing{}); err != nil || !forced() {
		t.Errorf("not forced: %v", err)
	}
	// The next change is not.
	docs = documents(t, poolText("pool", "10.0.0.0/24", ", vxlanMode: CrossSubnet"))
	if err := write(t.Context(), s, &out, apply, docs, writing{}); err != nil || forced() {
		t.Errorf("forced still: %v", err)
	}
}
