package main

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/journal"
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
// which is on its disk, and by the block, of which BGP tells. So they do where the disk is a
// moment older than that the other expects signed sessions, for the copy is written once a
// second; and without BGP, by the block that is on the disk.
func TestRebootVXLAN(t *testing.T) {
	t.Parallel()
	t.Run("what is on disk", func(t *testing.T) { t.Parallel(); rebootVXLAN(t, rebootCase{}) })
	t.Run("its own key is not published on disk", func(t *testing.T) { t.Parallel(); rebootVXLAN(t, rebootCase{behind: true}) })
	t.Run("without BGP", func(t *testing.T) { t.Parallel(); rebootVXLAN(t, rebootCase{noBGP: true}) })
}

// rebootCase says what is particular about two hosts of [TestRebootVXLAN].
type rebootCase struct {
	behind bool // the disk is behind by what the host has published of its key
	noBGP  bool
}

// unpublish has the copy of the cluster on a host's disk say of a node that it has published no
// keys of BGP yet.
func (h *host) unpublish(name string) {
	h.t.Helper()
	j, err := journal.Open(filepath.Join(h.dir, "state", "cluster.journal"), slog.New(slog.DiscardHandler))
	if err != nil {
		h.t.Fatal(err)
	}
	defer j.Close()
	key := store.ResourceKey(store.KindNode, name)
	raw, err := j.Get(key.Path())
	if err != nil {
		h.t.Fatal(err)
	}
	n, err := store.Decode(key, raw)
	if err != nil {
		h.t.Fatal(err)
	}
	store.SetBGPKeys(n.(*store.Node), nil)
	if raw, err = store.Encode(key, n, nil); err != nil {
		h.t.Fatal(err)
	}
	if err := errors.Join(j.Put(key.Path(), json.RawMessage(raw)), j.Sync()); err != nil {
		h.t.Fatal(err)
	}
}

// publishedKeys returns an error unless the copy of the cluster on a host's disk has keys of
// BGP of each node.
func (h *host) publishedKeys(nodes ...string) error {
	b, err := os.ReadFile(filepath.Join(h.dir, "state", "cluster.journal"))
	if err != nil {
		return err
	}
	for _, name := range nodes {
		last := ""
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, store.ResourceKey(store.KindNode, name).Path()+`"`) {
				last = line
			}
		}
		if err := mentions(last, store.AnnotationBGPKeys); err != nil {
			return err
		}
	}
	return nil
}

// rebootVXLAN is [TestRebootVXLAN].
func rebootVXLAN(t *testing.T, of rebootCase) {
	h, other := newHost(t, "10.1.0.11/24"), newHost(t, "10.1.0.12/24")
	wire := newBridge(t)
	h.joins(wire, "port1")
	other.joins(wire, "port2")
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	s := startStore(t, dir, socket)
	for _, x := range []*host{h, other} {
		x.usesStore(socket)
		x.config["defaultPool"] = map[string]any{"cidr": "none"}
		if of.noBGP {
			x.config["bgp"] = map[string]any{"enabled": false}
		}
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
		far := store.BlockKey(netip.PrefixFrom(farAddr, 26).Masked())
		return mentions(string(copied), "ippools/pods", "nodes/node1", "nodes/node2", `"ipv4VXLANTunnelAddr":"192.168.`, "/calico/ipam/v2/host/node1/", farAddr.String()+"/32", far.Path())
	})
	await.Until(t, "its reserve is on its disk", func() error {
		if n := remembered(t, filepath.Join(h.dir, "state", "workloads", "journal")); n == 0 {
			return errors.New("no address")
		}
		return nil
	})

	if !of.noBGP {
		await.Until(t, "the other host knows both keys", func() error { return other.publishedKeys("node1", "node2") })
	}

	// The power goes, and the datastore's too.
	r.kill(syscall.SIGKILL)
	s.Close()
	h.ns.End()
	wire.lose("port1")
	if err := os.RemoveAll(h.runDir()); err != nil {
		t.Fatal(err)
	}
	if of.behind {
		h.unpublish("node1")
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
