package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestDoctorOfManyHosts: with a thousand other hosts, to each of which a route leads, the doctor's answer for all takes less than
// ten seconds, and names what is wrong with the records of two of them.
func TestDoctorOfManyHosts(t *testing.T) {
	t.Parallel()
	const hosts, within = 1000, 10 * time.Second
	h := newHost(t, "10.1.0.11/16")
	h.config["bgp"] = map[string]any{"enabled": false}
	r := h.start()
	r.ready()
	s := h.store("")
	var ops []store.Op
	put := func(key store.Key, v any) {
		ops = append(ops, store.Op{Action: store.Put, If: store.IfAbsent(), Object: store.Object{Key: key, Value: v}})
	}
	pool := &v3.IPPool{Spec: v3.IPPoolSpec{CIDR: "10.200.0.0/16", VXLANMode: v3.VXLANModeCrossSubnet, NodeSelector: "!all()"}} // this host takes no block of it
	pool.Name = "others"
	put(store.ResourceKey(store.KindIPPool, pool.Name), pool)
	for i := range hosts {
		n := &store.Node{}
		n.Name = fmt.Sprintf("other%d", i)
		n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: fmt.Sprintf("10.1.%d.%d/16", 1+i/200, 1+i%200)}
		if i == hosts-1 {
			n.Spec.BGP.IPv4Address = "10.1.1.1/16" // of the first
		}
		put(store.ResourceKey(store.KindNode, n.Name), n)
		block := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(i / 4), byte(i % 4 * 64)}), 26)
		put(store.BlockKey(block), freeBlock(block, n.Name))
		put(store.AffinityKey(n.Name, block), &store.Affinity{State: store.AffinityConfirmed})
	}
	put(store.HandleKey("left"), &store.Handle{Block: map[string]int{"10.200.0.0/26": 1}})
	for chunk := range slices.Chunk(ops, store.MaxOps) {
		if _, err := s.Txn(t.Context(), chunk...); err != nil {
			t.Fatal(err)
		}
	}
	await.Until(t, "routes to all of them", func() error {
		a, err := r.op.Routes(t.Context(), &apiv1.RoutesRequest{Prefix: "10.200.249.192/26"})
		if err == nil && len(a.GetRoutes()) == 0 {
			err = fmt.Errorf("there is none to the last")
		}
		return err
	})
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	doctor := apiv1.NewDoctorClient(r.dial(config.OperatorSocketName))
	start := time.Now()
	a, err := doctor.Examine(ctx, &apiv1.ExamineRequest{Hosts: true})
	if err != nil {
		t.Fatal(err)
	}
	facts, err := gather.Cluster(ctx, s, s)
	if err != nil {
		t.Fatal(err)
	}
	gather.Add(a, facts)
	took := time.Since(start)
	t.Logf("%d findings after %v", len(a.GetFindings()), took)
	if took > within {
		t.Errorf("it took %v, more than %v", took, within)
	}
	found := map[string]int{}
	for _, f := range a.GetFindings() {
		found[f.GetCheck()]++
	}
	if found["shared-address"] != 1 || found["ipam-records"] != 1 || len(a.GetUnknown()) > 0 {
		t.Errorf("found %v, want one address of two and one handle of nobody; not examined: %q", found, a.GetUnknown())
	}
}
