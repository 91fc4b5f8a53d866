package main

import (
	"testing"

	"github.com/routerd/routerd/control/cluster"
)

// TestNobodyFollowsWithoutBGP: a follower that nobody reads keeps every object that
// the datastore names.
func TestNobodyFollowsWithoutBGP(t *testing.T) {
	t.Parallel()
	if f := follow(cluster.New(cluster.Config{Node: "node1"}), false, false, false, false); f.bgp != nil {
		t.Error("BGP does not run, and follows the cluster")
	}
	if f := follow(cluster.New(cluster.Config{Node: "node1"}), true, false, false, false); f.bgp == nil {
		t.Error("BGP runs, and does not follow the cluster")
	}
	if f := follow(cluster.New(cluster.Config{Node: "node1"}), true, false, false, false); f.page != nil {
		t.Error("there is no page, and it follows the cluster")
	}
}
