package main

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
)

// TestBGPPortTaken: another program on BGP's port is named, and keeps nothing
// else from working.
func TestBGPPortTaken(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.listen("0.0.0.0:179")
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	r := h.start()
	r.ready()
	r.when("bgp_error names the program", func(n *apiv1.NodeResponse) error {
		return errors.Join(
			mentions(n.GetBgpError(), "port 179", strings.TrimSpace(string(comm)), "pid", "listenPort"),
			mentions(conditionOf(n, "BGP").GetReason(), "port 179"),
		)
	})
	r.ready()
	if _, err := r.attach("pod"); err != nil {
		t.Errorf("ADD: %v", err)
	}
}

// TestDeadPeer: a peer that never answers neither delays readiness, not even
// after a restart, when its routes are waited for, nor ends it.
func TestDeadPeer(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	r := h.start()
	r.ready()
	h.addNode(h.store(""), "node2", "10.1.0.12/24", "192.168.200.1", "192.168.200.0/26")
	dead := func(n *apiv1.NodeResponse) error {
		if len(n.GetPeers()) != 1 || n.GetPeers()[0].GetState() == "up" || n.GetPeers()[0].GetAddress() != "10.1.0.12" {
			return errors.New("want one peer that is not up")
		}
		if c := n.GetHealth().GetReady(); !c.GetOk() {
			return errors.New("not ready: " + c.GetReason())
		}
		return nil
	}
	r.when("ready with a dead peer", dead)
	r.kill(syscall.SIGKILL)
	r = h.start()
	r.when("ready with a dead peer after a restart", dead)
	if l := r.log.lines("the wish is complete"); len(l) > 0 {
		t.Errorf("the peer's routes were not waited for before the sweep: %s", l)
	}
	// What the store knows does not wait for the peer.
	await.Until(t, "the peer's block", func() error { return h.lists("route", "192.168.200.0/26") })
}
