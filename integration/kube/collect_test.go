package kube_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestDeletedNode: a Node that is deleted frees all it had, and what others have
// stays.
func TestDeletedNode(t *testing.T) {
	for _, g := range []convert.Group{convert.V1, convert.V3} {
		t.Run(string(g), func(t *testing.T) { deletedNode(t, g) })
	}
}

func deletedNode(t *testing.T, g convert.Group) {
	s, _ := open(t, g)
	ctx := t.Context()
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node1"}}`)
	if _, err := server.Do(ctx, http.MethodPost, "/api/v1/nodes", "application/json", []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"node2"}}`)); err != nil {
		t.Fatal(err)
	}
	put := func(key store.Key, value any) {
		t.Helper()
		if _, err := s.Txn(ctx, store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: value}}); err != nil {
			t.Fatal(err)
		}
	}
	first, b1 := block("10.77.0.0/30", "node1", "node1", "node2")
	second, b2 := block("10.77.0.4/30", "node2", "node2")
	third, b3 := block("10.77.0.8/30", "node2")
	put(first, b1)
	for _, key := range []store.Key{second, third} {
		put(store.AffinityKey("node2", key.CIDR()), &store.Affinity{State: "confirmed"})
	}
	put(second, b2)
	put(third, b3)
	put(store.HandleKey("h-node1"), &store.Handle{Block: map[string]int{"10.77.0.0/30": 1}})
	put(store.HandleKey("h-node2"), &store.Handle{Block: map[string]int{"10.77.0.0/30": 1, "10.77.0.4/30": 1}})

	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	c := collect.New(collect.Config{Store: s, Node: "node1", Grace: 300 * time.Millisecond, Interval: 100 * time.Millisecond})
	go func() {
		defer close(done)
		c.RunCluster(ctx)
	}()
	defer func() { cancel(); <-done }()
	if _, err := server.Do(ctx, http.MethodDelete, "/api/v1/nodes/node2", "", nil); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "all that node2 had is free", func() error {
		for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle} {
			objs, _, err := s.List(ctx, kind, "")
			if err != nil {
				return err
			}
			want := map[store.Kind]int{store.KindIPAMBlock: 1, store.KindIPAMHandle: 1}[kind]
			if len(objs) != want {
				return fmt.Errorf("%d objects of %s, want %d", len(objs), kind, want)
			}
		}
		o, err := s.Get(ctx, first)
		if err != nil {
			return err
		}
		if b := o.Value.(*store.Block); len(b.Unallocated) != 3 || b.Allocations[0] == nil {
			return fmt.Errorf("node1's block: %s", o.Raw)
		}
		return nil
	})
}
