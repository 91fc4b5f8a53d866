package hostile

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// freeAddresses frees the addresses of node2's pod under it, as Calico's client does: each by
// itself, then with the whole block and its affinity. No pod that starts meanwhile is given
// one, the pod has them again, and as long as the block is there no packet is lost.
func freeAddresses(t *testing.T, l *lab.Lab, s store.Store) {
	const pod = "node2/pod1"
	started := 0
	again := func(f dataplane.Family, free func(block store.Object, held ipam.Allocation)) {
		t.Helper()
		addr := addrOf(t, l, pod, f)
		var block store.Object
		var held ipam.Allocation
		poll(t, "the datastore knows whose the address is", func() string {
			if block, held = holderOf(t, s, addr); held.Handle == "" || held.Handle == store.ReserveHandle("node2") {
				return fmt.Sprintf("%s is held by %q", addr, held.Handle)
			}
			return ""
		})
		free(block, held)
		for _, host := range []string{"node1", "node2"} {
			started++
			other := fmt.Sprintf("%s/free%d", host, started)
			if _, err := l.AttachPod(await.Context(t), other); err != nil {
				t.Fatal(err)
			}
			if addrOf(t, l, other, f) == addr {
				t.Errorf("%s was given %s, which %s has", other, addr, pod)
			}
			if err := l.DetachPod(await.Context(t), other); err != nil {
				t.Fatal(err)
			}
		}
		poll(t, fmt.Sprint(pod, " has its address again, ", f), func() string {
			if _, now := holderOf(t, s, addr); now.Handle != held.Handle {
				return fmt.Sprintf("%s is held by %q, want %q", addr, now.Handle, held.Handle)
			}
			return ""
		})
	}
	load, err := l.StartLoad(traffic.LoadOptions{Rate: 200}, [2]string{"node1/pod1", pod})
	if err != nil {
		t.Fatal(err)
	}
	defer load.Stop()
	for _, f := range dataplane.Families() {
		again(f, func(block store.Object, held ipam.Allocation) {
			edit, ok, err := ipam.EditBlock(block, func(a ipam.Allocation) bool { return a.Addr == held.Addr }, false, time.Now(), 0)
			if err != nil || !ok {
				t.Fatalf("%s is not in %s: %v", held.Addr, block.Key, err)
			}
			handles, err := ipam.ReadHandles(t.Context(), s, edit)
			if err != nil {
				t.Fatal(err)
			}
			ops, _ := ipam.EditOps(handles, edit)
			if _, err := s.Txn(t.Context(), ops...); err != nil {
				t.Fatal(err)
			}
		})
	}
	if bad := load.Stop().Bad(); len(bad) > 0 {
		t.Errorf("packets were lost: %v", bad)
	}
	for _, f := range dataplane.Families() {
		again(f, func(block store.Object, _ ipam.Allocation) {
			for _, key := range []store.Key{block.Key, store.AffinityKey("node2", block.Key.CIDR())} {
				if err := store.Delete(t.Context(), s, key, 0); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
	reachable(t, l)
}

// holderOf returns the block of an address and who holds that; without one it holds nothing.
func holderOf(t *testing.T, s store.Store, addr netip.Addr) (store.Object, ipam.Allocation) {
	t.Helper()
	blocks, _, err := s.List(t.Context(), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range blocks {
		b, ok := o.Value.(*store.Block)
		if !ok || !o.Key.CIDR().Contains(addr) {
			continue
		}
		all, err := ipam.Allocations(o.Key.CIDR(), b)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range all {
			if a.Addr == addr {
				return o, a
			}
		}
		return o, ipam.Allocation{}
	}
	return store.Object{}, ipam.Allocation{}
}
