package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestFreedUnderAPod: the address of a running workload that somebody frees, as
// `calicoctl ipam release` does, is given to nobody else, and is soon the workload's
// again.
func TestFreedUnderAPod(t *testing.T) {
	t.Parallel()
	for name, take := range map[string]func(*testing.T, store.Store, netip.Addr, store.Object){
		"address": freeAddress,
		"block": func(t *testing.T, s store.Store, _ netip.Addr, block store.Object) {
			if err := store.Delete(t.Context(), s, block.Key, 0); err != nil {
				t.Fatal(err)
			}
		},
		"affinity": func(t *testing.T, s store.Store, _ netip.Addr, block store.Object) {
			if err := store.Delete(t.Context(), s, store.AffinityKey("node1", block.Key.CIDR()), 0); err != nil {
				t.Fatal(err)
			}
		},
		"address and handle": func(t *testing.T, s store.Store, addr netip.Addr, block store.Object) {
			all, err := ipam.Allocations(block.Key.CIDR(), block.Value.(*store.Block))
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(all, func(a ipam.Allocation) bool { return a.Addr == addr })
			if err := store.Delete(t.Context(), s, store.HandleKey(all[i].Handle), 0); err != nil {
				t.Fatal(err)
			}
			freeAddress(t, s, addr, block)
		},
		"block and affinity": func(t *testing.T, s store.Store, _ netip.Addr, block store.Object) {
			if err := store.Delete(t.Context(), s, block.Key, 0); err != nil {
				t.Fatal(err)
			}
			if err := store.Delete(t.Context(), s, store.AffinityKey("node1", block.Key.CIDR()), 0); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testFreedUnderAPod(t, take)
		})
	}
}

// freeAddress does what Calico's client does: it takes the address out of its block, and
// deletes the handle with the last one.
func freeAddress(t *testing.T, s store.Store, addr netip.Addr, block store.Object) {
	edit, ok, err := ipam.EditBlock(block, func(a ipam.Allocation) bool { return a.Addr == addr }, false, time.Now(), 0)
	if err != nil || !ok {
		t.Fatalf("%s is not in %s: %v", addr, block.Key, err)
	}
	handles, err := ipam.ReadHandles(t.Context(), s, edit)
	if err != nil {
		t.Fatal(err)
	}
	ops, _ := ipam.EditOps(handles, edit)
	if _, err := s.Txn(t.Context(), ops...); err != nil {
		t.Fatal(err)
	}
}

// victim starts a host and gives a workload an address, of which the datastore knows in
// the block that it returns.
func victim(t *testing.T) (h *host, r *running, s store.Store, addr netip.Addr, block store.Object) {
	t.Helper()
	h = newHost(t, "10.1.0.11/24")
	socket := filepath.Join(h.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	h.usesStore(socket)
	r = h.start()
	r.ready()
	s = h.store(socket)
	got, err := r.attach("victim")
	if err != nil {
		t.Fatal(err)
	}
	addr = netip.MustParsePrefix(got.GetAddresses()[0].GetCidr()).Addr()
	await.Until(t, "the datastore knows of it", func() error {
		held, endpoints, err := holders(t, s)
		if err == nil && (len(held) != 1 || held[addr.String()] == "" || len(endpoints) != 1) {
			err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
		}
		return err
	})
	list, _, err := s.List(t.Context(), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatal(err)
	}
	return h, r, s, addr, list[slices.IndexFunc(list, func(o store.Object) bool { return o.Key.CIDR().Contains(addr) })]
}

func testFreedUnderAPod(t *testing.T, take func(*testing.T, store.Store, netip.Addr, store.Object)) {
	_, r, s, addr, block := victim(t)
	take(t, s, addr, block)
	nobodyElses(t, r, addr)
	await.Until(t, "the address is its workload's again", func() error {
		held, _, err := holders(t, s)
		if err == nil && held[addr.String()] == "" {
			err = fmt.Errorf("%s is free", addr)
		}
		return err
	})
}

// TestHandleDeletedUnderAPod: a workload whose handle somebody deleted keeps its address,
// and DEL frees it by what the block says.
func TestHandleDeletedUnderAPod(t *testing.T) {
	t.Parallel()
	_, r, s, addr, block := victim(t)
	held, _, err := holders(t, s)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), s, store.HandleKey(held[addr.String()]), 0); err != nil {
		t.Fatal(err)
	}
	other, err := r.attach("other")
	if err != nil {
		t.Fatal(err)
	}
	if a := netip.MustParsePrefix(other.GetAddresses()[0].GetCidr()).Addr(); a == addr {
		t.Errorf("%s was given to another workload", a)
	}
	if err := r.detach("victim"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the address is free", func() error {
		now, err := s.Get(t.Context(), block.Key)
		if err != nil {
			return err
		}
		all, err := ipam.Allocations(block.Key.CIDR(), now.Value.(*store.Block))
		if err != nil {
			return err
		}
		for _, a := range all {
			if a.Addr == addr && a.Handle == held[addr.String()] {
				err = fmt.Errorf("%s is held by %q", addr, a.Handle)
			}
		}
		return err
	})
}

// TestGivenBackToAPod: a workload whose address somebody gave to another one has no route,
// and has it again when that one is gone.
func TestGivenBackToAPod(t *testing.T) {
	t.Parallel()
	h, r, s, addr, was := victim(t)
	held, _, err := holders(t, s)
	if err != nil {
		t.Fatal(err)
	}
	mine, block := held[addr.String()], was.Key
	_, err = store.Modify(t.Context(), s, block, func(cur store.Object) (any, error) {
		b := store.Clone(cur.Value).(*store.Block)
		n, _ := b.Ordinal(addr)
		b.Attribute(n).HandleID = new("stranger")
		return b, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r.when("the workload has lost its address", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "WorkloadAddresses").GetReason(), addr.String(), "stranger")
	})
	now, err := s.Get(t.Context(), block)
	if err != nil {
		t.Fatal(err)
	}
	freeAddress(t, s, addr, now)
	r.when("the workload has its address again", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "WorkloadAddresses"); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		held, _, err := holders(t, s)
		if err == nil && held[addr.String()] != mine {
			err = fmt.Errorf("held by %q, want %q", held[addr.String()], mine)
		}
		return err
	})
	await.Until(t, "its route is back", func() error { return h.lists("route show "+addr.String(), addr.String()) })
}

// nobodyElses attaches more workloads than a block has addresses: none gets the one of
// another that the datastore does not know of.
func nobodyElses(t *testing.T, r *running, addr netip.Addr) {
	t.Helper()
	for n := range 80 {
		other, err := r.attach(fmt.Sprint("other", n))
		if err != nil {
			t.Fatal(err)
		}
		if a := netip.MustParsePrefix(other.GetAddresses()[0].GetCidr()).Addr(); a == addr {
			t.Fatalf("%s was given to another workload", a)
		}
	}
}

// TestRestoredUnderAPod: the datastore is restored from a snapshot that is older than a
// workload of a host that runs: its address is given to nobody else, and the workload is in
// the datastore again.
func TestRestoredUnderAPod(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	socket, dir, snapshot := filepath.Join(h.dir, "ext.sock"), t.TempDir(), filepath.Join(t.TempDir(), "snapshot")
	server := startStore(t, dir, socket)
	h.usesStore(socket)
	r := h.start()
	r.ready()
	attached := func(id string, n int) netip.Addr {
		t.Helper()
		got, err := r.attach(id)
		if err != nil {
			t.Fatal(err)
		}
		s := h.store(socket)
		await.Until(t, "the datastore knows of "+id, func() error {
			held, endpoints, err := holders(t, s)
			if err == nil && (len(held) != n || len(endpoints) != n) {
				err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
			}
			return err
		})
		return netip.MustParsePrefix(got.GetAddresses()[0].GetCidr()).Addr()
	}
	attached("early", 1)
	server.Close()
	if err := os.CopyFS(snapshot, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	server = startStore(t, dir, socket)
	late := attached("late", 2)
	server.Close()
	startStore(t, snapshot, socket)
	await.Until(t, "the daemon notices", func() error {
		return mentions(strings.Join(r.log.lines("restored from a snapshot"), " "), "everything is read anew")
	})
	nobodyElses(t, r, late)
	s := h.store(socket)
	await.Until(t, "the datastore knows of late again", func() error {
		held, endpoints, err := holders(t, s)
		if at := late.String(); err == nil && (held[at] == "" || !endpoints[at]) {
			err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
		}
		return err
	})
}
