package main

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// usedBlock is a block of node whose first addresses handles hold.
func usedBlock(cidr, node string, handles ...string) *store.Block {
	b := emptyBlock(netip.MustParsePrefix(cidr), node)
	b.Unallocated = b.Unallocated[len(handles):]
	for i, h := range handles {
		b.Attributes = append(b.Attributes, store.Attribute{HandleID: &h, Secondary: map[string]string{"node": node}})
		b.Allocations[i] = &i
	}
	return b
}

// TestDrainWaits: the command ends when the last address is free, and tells of
// each step.
func TestDrainWaits(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	docs := documents(t, poolText("old", "10.0.0.0/24", ", blockSize: 29, vxlanMode: Always")+poolText("new", "10.1.0.0/24", ", vxlanMode: CrossSubnet"))
	if err := write(t.Context(), s, &strings.Builder{}, apply, docs, writing{}); err != nil {
		t.Fatal(err)
	}
	putBlock(t, s, usedBlock("10.0.0.0/29", "n1", "c1", "vxlan-tunnel-addr-n1"))
	putBlock(t, s, usedBlock("10.0.0.8/29", "n2", "c2"))
	// Each time the drain has told of something, the next thing goes.
	steps := []*store.Block{
		usedBlock("10.0.0.8/29", "n2"),
		usedBlock("10.0.0.0/29", "n1", "vxlan-tunnel-addr-n1"),
		usedBlock("10.0.0.0/29", "n1"),
	}
	out := &stepper{step: func() {
		if len(steps) > 0 {
			putBlock(t, s, steps[0])
			steps = steps[1:]
		}
	}}
	d := drain{store: s, out: out, every: time.Millisecond, wait: true}
	if err := d.run(t.Context(), "old"); err != nil {
		t.Fatal(err)
	}
	want := `IPPool(old) disabled: no more addresses are given of it
Workloads that have addresses of it: 2; make them anew to move them to: new
NODE   NAMESPACE   WORKLOAD   ADDRESS
n1     -           c1         10.0.0.0
n2     -           c2         10.0.0.8
Tunnel addresses of it: 1; their nodes take others by themselves
workloads: 1, tunnels: 1 (1 on n1; the first is c1 with 10.0.0.0 on n1)
workloads: 0, tunnels: 1
workloads: 0, tunnels: 0
IPPool(old) is drained; delete it with: routerctl delete ippool old
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !getPool(t, s, "old").Spec.Disabled {
		t.Error("the pool is not disabled")
	}
}

// stepper takes a step at each line about tunnels.
type stepper struct {
	strings.Builder
	step func()
}

func (s *stepper) Write(b []byte) (int, error) {
	n, err := s.Builder.Write(b)
	if strings.Contains(strings.ToLower(string(b)), "tunnel") {
		s.step()
	}
	return n, err
}

// TestDeletionWaitsForTunnels: the pool's key goes after nodes have taken other
// tunnel addresses, and what they leave goes too.
func TestDeletionWaitsForTunnels(t *testing.T) {
	t.Parallel()
	s := newMemory(t)
	docs := documents(t, poolText("old", "10.0.0.0/24", ", blockSize: 29, ipipMode: Always")+poolText("new", "10.1.0.0/24", ", ipipMode: Always"))
	if err := write(t.Context(), s, &strings.Builder{}, apply, docs, writing{}); err != nil {
		t.Fatal(err)
	}
	putBlock(t, s, usedBlock("10.0.0.0/29", "n1", "ipip-tunnel-addr-n1"))
	looked := 0
	watched := &listing{Store: s, listed: func(k store.Kind) {
		if looked == 4 || k != store.KindIPAMBlock {
			return
		}
		// The pool is there, and disabled but for the first look.
		if looked++; getPool(t, s, "old").Spec.Disabled != (looked > 1) {
			t.Errorf("look %d: disabled %v", looked, looked <= 1)
		}
		if looked == 4 { // the node does its part
			putBlock(t, s, emptyBlock(netip.MustParsePrefix("10.0.0.0/29"), "n1"))
		}
	}}
	var notes strings.Builder
	d := &deletion{store: watched, out: &strings.Builder{}, notes: &notes, patience: time.Minute, every: time.Millisecond}
	if err := d.run(t.Context(), []target{{key: store.ResourceKey(store.KindIPPool, "old")}}); err != nil {
		t.Fatal(err)
	}
	for _, k := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity} {
		if left, _, err := s.List(t.Context(), k, ""); err != nil || len(left) != 0 {
			t.Errorf("%d of %s are left (%v)", len(left), k, err)
		}
	}
	if notes.String() != "" || looked != 4 {
		t.Errorf("after %d looks, notes: %s", looked, notes.String())
	}
}

// listing tells of each listing before it is made.
type listing struct {
	store.Store
	listed func(store.Kind)
}

func (l *listing) List(ctx context.Context, k store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	l.listed(k)
	return l.Store.List(ctx, k, namespace)
}
