package bench

import (
	"context"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// The store behind the delay is an etcd, each of whose answers takes that much
// longer, and every transaction that writes is counted once.
func TestSlowStore(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := startSlowStore(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.endpoint()}, DialTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := c.Put(ctx, "connect", ""); err != nil {
		t.Fatal(err)
	}
	before, err := s.revision(ctx)
	if err != nil {
		t.Fatal(err)
	}

	const delay = 40 * time.Millisecond
	s.setDelay(delay)
	start := time.Now()
	if _, err := c.Txn(ctx).Then(clientv3.OpPut("a", "1"), clientv3.OpPut("b", "2")).Commit(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < delay {
		t.Errorf("a transaction took %v, want at least %v", took, delay)
	}
	if r, err := c.Get(ctx, "b"); err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "2" {
		t.Errorf("b: %v, %v", r, err)
	}
	if err := s.quiet(ctx); err != nil {
		t.Error(err)
	}
	if after, err := s.revision(ctx); err != nil || after != before+1 {
		t.Errorf("revision %d, %v; want %d", after, err, before+1)
	}
}
