package main

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestClonedHost: of two machines with one name the second is refused while the
// first is there: it names both, serves nothing and writes nothing. When the
// first is gone it takes over, and says so.
func TestClonedHost(t *testing.T) {
	t.Parallel()
	one, two := newHost(t, "10.1.0.11/24"), newHost(t, "10.1.0.12/24")
	socket := filepath.Join(one.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	one.usesStore(socket)
	two.usesStore(socket)
	first := one.start()
	n := first.ready()
	pod, err := first.attach("pod")
	if err != nil {
		t.Fatal(err)
	}
	c := one.store(socket)
	addr := strings.TrimSuffix(pod.GetAddresses()[0].GetCidr(), "/32")
	holds := func() error {
		held, endpoints, err := holders(t, c)
		if err == nil && (held[addr] != "routerd.pod" || len(endpoints) != 1) {
			err = fmt.Errorf("%s is held by %q, endpoints %v", addr, held[addr], endpoints)
		}
		return err
	}
	await.Until(t, "the pod is in the datastore", holds)

	second := two.start()
	words := []string{"node1", "10.1.0.11", "10.1.0.12", "boot id", "nodeName"}
	second.when("the second is refused", func(n *apiv1.NodeResponse) error {
		if n.GetHealth().GetReady().GetOk() {
			t.Fatal("two machines of one name are ready")
		}
		return errors.Join(mentions(conditionOf(n, "Registered").GetReason(), words...), mentions(n.GetHealth().GetReady().GetReason(), words...))
	})
	second.tells(1, append(words, "level=ERROR")...)
	if _, err := second.attach("pod2"); status.Code(err) != codes.Unavailable || mentions(err.Error(), "10.1.0.11") != nil {
		t.Errorf("ADD on the refused host: %v", err)
	}
	// Its runtime, a copy too, cleans up.
	if err := second.detach("pod"); err != nil {
		t.Errorf("DEL on the refused host: %v", err)
	}
	if _, err := second.cni.GC(t.Context(), &apiv1.GCRequest{Network: "routerd"}); status.Code(err) != codes.Unavailable || mentions(err.Error(), "10.1.0.11") != nil {
		t.Errorf("GC on the refused host: %v", err)
	}
	obj, err := c.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
	if err != nil || obj.Value.(*store.Node).Spec.BGP.IPv4Address != n.GetIpv4Address() {
		t.Errorf("the first one's Node is %+v, %v", obj.Value, err)
	}

	// A restart in place does not give the name away.
	first.kill(syscall.SIGTERM)
	first = one.start()
	first.ready()
	second.when("the second is refused still", func(n *apiv1.NodeResponse) error {
		return mentions(n.GetHealth().GetReady().GetReason(), words...)
	})
	first.kill(syscall.SIGTERM)
	now, err := c.Name(t.Context(), "node1")
	if err == nil {
		err = c.EndPresence(t.Context(), now) // sooner than time would
	}
	if err != nil {
		t.Fatal(err)
	}
	second.ready()
	second.tells(1, "level=WARN", "taken over", "10.1.0.11")
	// What the first one's pods have is not freed by that, nor by the DEL before.
	second.when("what was to be detached is gone here", func(n *apiv1.NodeResponse) error {
		if n.GetWorkloads() != 0 {
			return fmt.Errorf("%d workloads", n.GetWorkloads())
		}
		return nil
	})
	if err := holds(); err != nil {
		t.Error(err)
	}
	// The first, when it is back, is the one too many.
	first = one.start()
	first.when("the first is refused", func(n *apiv1.NodeResponse) error {
		return mentions(n.GetHealth().GetReady().GetReason(), "10.1.0.12")
	})
	if err := one.lists("route", addr); err != nil {
		t.Errorf("the route of a pod whose address is nobody else's: %v", err)
	}
}

// makeOthers gives a workload's address to another host's, and frees another
// one, as happens when a Node was deleted.
func makeOthers(t *testing.T, c store.Store, others, free string) {
	t.Helper()
	blocks, _, err := c.List(t.Context(), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range blocks {
		if !o.Key.CIDR().Contains(netip.MustParseAddr(others)) {
			continue
		}
		_, err := store.Modify(t.Context(), c, o.Key, func(cur store.Object) (any, error) {
			b := store.Clone(cur.Value).(*store.Block)
			addr := o.Key.CIDR().Addr()
			for i, a := range b.Allocations {
				switch {
				case addr.String() == others:
					handle := "net.elsewhere"
					b.Attributes = append(slices.Clone(b.Attributes), store.Attribute{HandleID: &handle, Secondary: map[string]string{"node": "node2"}})
					n := len(b.Attributes) - 1
					b.Allocations[i] = &n
				case addr.String() == free && a != nil:
					b.Allocations[i], b.Unallocated = nil, append(b.Unallocated, i)
				}
				addr = addr.Next()
			}
			return b, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestNodeMadeAnew: a Node is deleted and made anew, as it was or as Calico makes one,
// while its daemon is away or runs. Addresses that are another's by now are taken out of use and their
// workloads named; those that are free are taken again.
func TestNodeMadeAnew(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name       string
		away, bare bool
	}{
		{"while the daemon is away", true, false},
		{"while it runs", false, false},
		{"by Calico while the daemon is away", true, true},
		{"by Calico while it runs", false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, "10.1.0.11/24")
			h.config["bgp"] = map[string]any{"enabled": false}
			socket := filepath.Join(h.dir, "ext.sock")
			startStore(t, t.TempDir(), socket)
			h.usesStore(socket)
			r := h.start()
			r.ready()
			c := h.store(socket)
			addrs := map[string]string{}
			for _, id := range []string{"others", "free"} {
				resp, err := r.attach(id)
				if err != nil {
					t.Fatal(err)
				}
				addrs[id] = strings.TrimSuffix(resp.GetAddresses()[0].GetCidr(), "/32")
			}
			await.Until(t, "the pods are in the datastore", func() error {
				held, endpoints, err := holders(t, c)
				if err == nil && (held[addrs["others"]] != "routerd.others" || held[addrs["free"]] != "routerd.free" || len(endpoints) != 2) {
					err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
				}
				return err
			})
			if tt.away {
				r.kill(syscall.SIGKILL)
			}
			key := store.ResourceKey(store.KindNode, "node1")
			node, err := c.Get(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			makeOthers(t, c, addrs["others"], addrs["free"])
			if err := store.Delete(t.Context(), c, key, 0); err != nil {
				t.Fatal(err)
			}
			n := store.Clone(node.Value).(*store.Node)
			n.ResourceVersion = ""
			if tt.bare { // as calico/node makes it: no annotations, no tunnel's address yet
				name, addr := n.Name, n.Spec.BGP.IPv4Address
				n = &store.Node{Spec: store.NodeSpec{BGP: &store.NodeBGPSpec{IPv4Address: addr}}}
				n.Name = name
			}
			if _, err := store.Create(t.Context(), c, n); err != nil && !errors.Is(err, store.ErrExists) {
				t.Fatal(err) // its daemon may have been faster
			}
			if tt.away {
				r = h.start()
			}
			r.when("the workload is named", func(n *apiv1.NodeResponse) error {
				return mentions(conditionOf(n, "WorkloadAddresses").GetReason(), "others", addrs["others"], "net.elsewhere")
			})
			await.Until(t, "what is another's is out of use, and what was free is held", func() error {
				if h.lists("route", addrs["others"]+" dev") == nil {
					return errors.New("the route is there")
				}
				held, _, err := holders(t, c)
				if err == nil && (held[addrs["others"]] != "net.elsewhere" || held[addrs["free"]] != "routerd.free") {
					err = fmt.Errorf("held %v", held)
				}
				return errors.Join(err, h.lists("route", addrs["free"]+" dev"))
			})
			r.tells(1, "level=ERROR", "others", addrs["others"])
			r.ready()
			await.Until(t, "the Node says again what the host has", func() error {
				obj, err := c.Get(t.Context(), key)
				if err != nil {
					return err
				}
				was, is := node.Value.(*store.Node), obj.Value.(*store.Node)
				if is.Spec.IPv4VXLANTunnelAddr == "" {
					return errors.New("it has no address of a tunnel")
				}
				for _, a := range slices.Sorted(maps.Keys(was.Annotations)) {
					if is.Annotations[a] == "" {
						return fmt.Errorf("it has no annotation %s: %v", a, is.Annotations)
					}
				}
				return nil
			})
			if err := r.detach("others"); err != nil {
				t.Error(err)
			}
			await.Until(t, "DEL leaves the other's address alone", func() error {
				held, _, err := holders(t, c)
				if err == nil && held[addrs["others"]] != "net.elsewhere" {
					t.Fatalf("held %v", held)
				}
				n, nerr := r.node()
				if nerr == nil && n.GetWorkloads() != 1 {
					nerr = fmt.Errorf("%d workloads", n.GetWorkloads())
				}
				return errors.Join(err, nerr)
			})
		})
	}
}
