package main

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// newBridge returns what connects hosts: a switch that knows no routes.
func newBridge(t *testing.T) *host {
	t.Helper()
	s := &host{t: t, ns: netnstest.New(t)}
	s.ip("link add br0 type bridge")
	s.ip("link set br0 up")
	return s
}

// joins plugs a host's wire into the bridge, by a port of that name.
func (h *host) joins(bridge *host, port string) {
	h.t.Helper()
	h.ip("link set veth-wire netns " + bridge.ns.Path + " name " + port)
	bridge.ip("link set " + port + " master br0 up")
}

// TestRebootVXLAN: one of two hosts whose pool is in VXLAN boots while the datastore is
// away, for both. The other's workloads reach its own: by the tunnel address of the other,
// which is on its disk, and by the block, of which BGP tells.
func TestRebootVXLAN(t *testing.T) {
	t.Parallel()
	h, other := newHost(t, "10.1.0.11/24"), newHost(t, "10.1.0.12/24")
	wire := newBridge(t)
	h.joins(wire, "port1")
	other.joins(wire, "port2")
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	s := startStore(t, dir, socket)
	for _, x := range []*host{h, other} {
		x.usesStore(socket)
		x.config["defaultPool"] = map[string]any{"cidr": "none"}
	}
	other.config["nodeName"] = "node2"
	pool := store.New(store.KindIPPool).(*v3.IPPool)
	pool.Name, pool.Spec.CIDR, pool.Spec.VXLANMode = "pods", "192.168.0.0/16", v3.VXLANModeAlways
	if _, err := store.Create(t.Context(), h.store(socket), pool); err != nil {
		t.Fatal(err)
	}
	r, r2 := h.start(), other.start()
	r.ready()
	r2.ready()
	attach := func(r *running, id string) (pod *host, addr netip.Addr) {
		t.Helper()
		await.Until(t, "ADD", func() (err error) {
			pod, addr, err = r.attachIn(id)
			return err
		})
		return pod, addr
	}
	far, farAddr := attach(r2, "far")
	pings := func(from *host, to netip.Addr) {
		t.Helper()
		await.Until(t, "a workload reaches another", func() error {
			_, err := from.exec("ping", "-c1", "-W1", to.String())
			return err
		})
	}
	pod, addr := attach(r, "before")
	pings(pod, farAddr)
	pings(far, addr)
	mac := func() string { return h.ip("-br link show vxlan.calico") }
	was := mac()
	await.Until(t, "what the daemon knows is on its disk", func() error {
		copied, err := os.ReadFile(filepath.Join(h.dir, "state", "cluster.journal"))
		if err != nil {
			return err
		}
		return mentions(string(copied), "ippools/pods", "nodes/node1", "nodes/node2", `"ipv4VXLANTunnelAddr":"192.168.`, "/calico/ipam/v2/host/node1/")
	})
	await.Until(t, "its reserve is on its disk", func() error {
		if n := remembered(t, filepath.Join(h.dir, "state", "workloads", "journal")); n == 0 {
			return errors.New("no address")
		}
		return nil
	})

	// The power goes, and the datastore's too.
	r.kill(syscall.SIGKILL)
	s.Close()
	h.ns.End()
	if out, err := wire.exec("ip", "link", "del", "port1"); err != nil && !strings.Contains(out, "Cannot find device") {
		t.Fatal(err)
	}
	if err := os.RemoveAll(h.runDir()); err != nil {
		t.Fatal(err)
	}
	h.ns = newHost(t, "10.1.0.11/24").ns
	h.joins(wire, "port1")
	r = h.start()
	away := func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), socket)
	}
	r.when("the datastore's absence is said", away)
	// The profile lets only workloads in of which the datastore has told: on this host the
	// other's, on the other not yet this one.
	pod, addr = attach(r, "after")
	pings(far, addr)
	if err := errors.Join(away(mustNode(r)), away(mustNode(r2))); err != nil {
		t.Errorf("the datastore was there: %v", err)
	}
	if err := errors.Join(h.lists("route get "+farAddr.String(), "dev vxlan.calico"), h.lists("neigh show dev vxlan.calico", "PERMANENT")); err != nil {
		t.Error(err)
	}
	if now := mac(); now != was {
		t.Errorf("the tunnel's device was %s and is %s", was, now)
	}

	startStore(t, dir, socket)
	r.ready()
	pings(pod, farAddr)
}
