package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// detach takes a workload's interface away.
func (r *running) detach(id string) error {
	r.t.Helper()
	_, err := r.cni.Del(await.Context(r.t), &apiv1.DelRequest{
		Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: id, Ifname: "eth0"},
		Workload:   &apiv1.Workload{Orchestrator: "cni", Namespace: "default"},
	}, grpc.WaitForReady(true))
	return err
}

// holders returns, of a datastore, who holds which address, but for tunnels and
// the reserve, and the addresses of the endpoints.
func holders(t *testing.T, s store.Store) (held map[string]string, endpoints map[string]bool, err error) {
	t.Helper()
	held, endpoints = map[string]string{}, map[string]bool{}
	blocks, _, err := s.List(t.Context(), store.KindIPAMBlock, "")
	if err != nil {
		return nil, nil, err
	}
	for _, o := range blocks {
		b := o.Value.(*store.Block)
		addr := o.Key.CIDR().Addr()
		for _, a := range b.Allocations {
			if a != nil && b.Attributes[*a].Secondary[ipam.AttrType] == "" {
				held[addr.String()] = *b.Attributes[*a].HandleID
			}
			addr = addr.Next()
		}
	}
	weps, _, err := s.List(t.Context(), store.KindWorkloadEndpoint, "")
	for _, o := range weps {
		for _, n := range o.Value.(*store.WorkloadEndpoint).Spec.IPNetworks {
			endpoints[strings.TrimSuffix(n, "/32")] = true
		}
	}
	return held, endpoints, err
}

// remembered counts the addresses of the reserve that a journal knows.
func remembered(t *testing.T, path string) (n int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		_, entry, _ := strings.Cut(line, " ")
		var l struct {
			Key   string `json:"k"`
			Value struct {
				Addresses map[string][]int `json:"addresses"`
			} `json:"v"`
		}
		if json.Unmarshal([]byte(entry), &l) != nil || l.Key != "ipam/reserve" {
			continue
		}
		n = 0
		for _, ordinals := range l.Value.Addresses {
			n += len(ordinals)
		}
	}
	return n
}

// TestRebootWhileDatastoreAway: the datastore is away, the host boots (no
// daemon, no namespaces, its disk as it was), a hundred workloads start and
// fifty end. When the datastore is back it says what is so: no address twice,
// none lost.
func TestRebootWhileDatastoreAway(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config["bgp"] = map[string]any{"enabled": false}
	h.config["ipam"] = map[string]any{"reserve": map[string]any{"min": 110, "max": 110}}
	h.config["defaultPool"] = map[string]any{"blockSize": 24}
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	h.usesStore(socket)
	s := startStore(t, dir, socket)
	r := h.start()
	r.ready()
	for i := range 5 {
		if _, err := r.attach(fmt.Sprint("before", i)); err != nil {
			t.Fatal(err)
		}
	}
	c := h.store(socket)
	await.Until(t, "the reserve and the workloads are in the datastore", func() error {
		handle, err := c.Get(t.Context(), store.HandleKey(store.ReserveHandle("node1")))
		if err != nil {
			return err
		}
		n := 0
		for _, in := range handle.Value.(*store.Handle).Block {
			n += in
		}
		held, endpoints, err := holders(t, c)
		if err == nil && (n < 105 || len(held) != 5 || len(endpoints) != 5) {
			err = fmt.Errorf("reserve %d, held %v, endpoints %v", n, held, endpoints)
		}
		return err
	})
	// A second later what a daemon goes by at such a boot is on its disk.
	await.Until(t, "what the daemon knows is on its disk", func() error {
		copied, err := os.ReadFile(filepath.Join(h.dir, "state", "cluster.journal"))
		if err != nil {
			return err
		}
		for _, path := range []string{"ippools/default-ipv4-ippool", "nodes/node1"} {
			if !strings.Contains(string(copied), path) {
				return fmt.Errorf("the copy of the cluster lacks %s", path)
			}
		}
		if n := remembered(t, filepath.Join(h.dir, "state", "workloads", "journal")); n < 105 {
			return fmt.Errorf("%d addresses of the reserve are remembered", n)
		}
		return nil
	})
	r.kill(syscall.SIGKILL)
	s.Close()
	h.forgetWires()

	r = h.start()
	addrs := map[string]string{}
	for i := range 100 {
		id := fmt.Sprint("pod", i)
		var resp *apiv1.AddResponse
		await.Until(t, "ADD without the datastore", func() (err error) {
			resp, err = r.attach(id)
			return err
		})
		addr := strings.TrimSuffix(resp.GetAddresses()[0].GetCidr(), "/32")
		if other, twice := addrs[addr]; twice {
			t.Errorf("%s is given to %s and to %s", addr, other, id)
		}
		addrs[addr] = "routerd." + id
	}
	// The runtime gives up what the boot ended, and some of the new ones.
	for i := range 50 {
		if err := r.detach(fmt.Sprint("pod", i)); err != nil {
			t.Errorf("DEL without the datastore: %v", err)
		}
		for a, handle := range addrs {
			if handle == fmt.Sprint("routerd.pod", i) {
				delete(addrs, a)
			}
		}
	}
	for i := range 5 {
		if err := r.detach(fmt.Sprint("before", i)); err != nil {
			t.Errorf("DEL without the datastore: %v", err)
		}
	}
	startStore(t, dir, socket)
	r.ready()
	await.Until(t, "the datastore says what is so", func() error {
		held, endpoints, err := holders(t, c)
		if err != nil {
			return err
		}
		var wrong []error
		for a, handle := range addrs {
			if held[a] != handle || !endpoints[a] {
				wrong = append(wrong, fmt.Errorf("%s of %s: held by %q, endpoint %v", a, handle, held[a], endpoints[a]))
			}
		}
		if len(held) != len(addrs) || len(endpoints) != len(addrs) {
			wrong = append(wrong, fmt.Errorf("%d held and %d endpoints, want %d", len(held), len(endpoints), len(addrs)))
		}
		return errors.Join(wrong...)
	})
}

// forgetWires removes what a boot does: the wires of workloads, and the rules.
func (h *host) forgetWires() {
	h.t.Helper()
	for _, family := range []string{"inet", "arp"} {
		if _, err := h.exec("nft", "delete", "table", family, nft.TableName); err != nil {
			h.t.Fatal(err)
		}
	}
	err := h.ns.Do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			if strings.HasPrefix(l.Attrs().Name, "cali") {
				if err := netlink.LinkDel(l); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

// TestADDWithoutDatastore: the datastore goes away under a daemon that holds a
// reserve. Workloads start and end as before, and it hears of them later.
func TestADDWithoutDatastore(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	h.usesStore(socket)
	s := startStore(t, dir, socket)
	r := h.start()
	r.ready()
	c := h.store(socket)
	await.Until(t, "the reserve", func() error {
		_, err := c.Get(t.Context(), store.HandleKey(store.ReserveHandle("node1")))
		return err
	})
	if _, err := r.attach("first"); err != nil {
		t.Fatal(err)
	}
	s.Close()
	r.when("the outage is told", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), socket)
	})
	second, err := r.attach("second")
	if err != nil {
		t.Fatalf("ADD without the datastore: %v", err)
	}
	for _, id := range []string{"first", "never there"} {
		if err := r.detach(id); err != nil {
			t.Errorf("DEL without the datastore: %v", err)
		}
	}
	startStore(t, dir, socket)
	addr := strings.TrimSuffix(second.GetAddresses()[0].GetCidr(), "/32")
	await.Until(t, "the datastore knows", func() error {
		held, endpoints, err := holders(t, c)
		if err == nil && (len(held) != 1 || held[addr] != "routerd.second" || len(endpoints) != 1 || !endpoints[addr]) {
			err = fmt.Errorf("held %v, endpoints %v, want %s alone", held, endpoints, addr)
		}
		return err
	})
}
