package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
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
	h.statusAnswered()
}

// statusAnswered makes a CalicoNodeStatus that names the host, and waits until its daemon has said there what it knows of the
// dead peer and of the route to its block.
func (h *host) statusAnswered() {
	h.t.Helper()
	s, period := h.store(""), uint32(1)
	asked := &v3.CalicoNodeStatus{
		ObjectMeta: metav1.ObjectMeta{Name: "asked"},
		Spec:       v3.CalicoNodeStatusSpec{Node: "node1", Classes: []v3.NodeStatusClassType{v3.NodeStatusClassTypeAgent, v3.NodeStatusClassTypeBGP, v3.NodeStatusClassTypeRoutes}, UpdatePeriodSeconds: &period},
	}
	if _, err := store.Create(await.Context(h.t), s, asked); err != nil {
		h.t.Fatal(err)
	}
	await.Until(h.t, "the answer to a CalicoNodeStatus", func() error {
		o, err := s.Get(await.Context(h.t), store.ResourceKey(store.KindCalicoNodeStatus, "asked"))
		if err != nil {
			return err
		}
		is, _ := o.Value.(*v3.CalicoNodeStatus)
		peers, routes := is.Status.BGP.PeersV4, is.Status.Routes.RoutesV4
		switch {
		case is.Status.Agent.BIRDV4.State != v3.BGPDaemonStateReady:
			return fmt.Errorf("agent %+v", is.Status.Agent)
		case is.Status.BGP.NumberNotEstablishedV4 != 1 || len(peers) != 1 || peers[0].PeerIP != "10.1.0.12" || peers[0].Type != v3.BGPPeerTypeNodeMesh:
			return fmt.Errorf("BGP %+v", is.Status.BGP)
		case !slices.ContainsFunc(routes, func(r v3.CalicoNodeRoute) bool {
			return r.Type == v3.RouteTypeFIB && r.Destination == "192.168.200.0/26"
		}):
			return fmt.Errorf("routes %+v", routes)
		}
		return nil
	})
}
