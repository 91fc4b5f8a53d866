package main

import (
	"fmt"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// TestAdviseReflectors: a mesh of more than a hundred nodes is one too many; sessions of two families are with one node.
func TestAdviseReflectors(t *testing.T) {
	t.Parallel()
	var peers []*apiv1.BGPPeer
	advice := func() string {
		var out strings.Builder
		adviseReflectors(&out, peers)
		return out.String()
	}
	for i := range meshLimit - 1 {
		for range 2 {
			peers = append(peers, &apiv1.BGPPeer{Name: fmt.Sprint("node", i), Type: "node-to-node mesh"})
		}
	}
	peers = append(peers, &apiv1.BGPPeer{Name: "tor", Type: "global"})
	if got := advice(); got != "" {
		t.Errorf("%d nodes: %s", meshLimit, got)
	}
	peers = append(peers, &apiv1.BGPPeer{Name: "one more", Type: "node-to-node mesh"})
	const want = "\nThe mesh has 101 nodes, and 5050 sessions; from 100 nodes on, use route reflectors: routerctl bgp reflectors auto --count 2\n"
	if got := advice(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
