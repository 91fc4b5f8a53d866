package embedded_test

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// fullBlock is a /26 with every address taken, as large as blocks get.
func fullBlock(cidr netip.Prefix) *store.Block {
	host := "host:node-a"
	b := &store.Block{CIDR: cidr.String(), Affinity: &host, Unallocated: []int{}, SequenceNumberForAllocation: map[string]uint64{}}
	for i := range 64 {
		handle := fmt.Sprintf("net1.%064d", i)
		b.Allocations = append(b.Allocations, &i)
		b.Attributes = append(b.Attributes, store.Attribute{HandleID: &handle, Secondary: map[string]string{
			"node": "node-a", "namespace": "default", "pod": fmt.Sprint("pod-", i), "timestamp": "2026-11-21 17:31:36.8948024 +0000 UTC",
		}})
		b.SequenceNumberForAllocation[fmt.Sprint(i)] = 1795282296903635738
	}
	return b
}

func benchStore(b *testing.B) *etcd.Store {
	b.Helper()
	dir := b.TempDir()
	server, err := embedded.Start(b.Context(), embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock")})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(server.Close)
	s, err := etcd.Open(b.Context(), etcd.Config{Endpoints: []string{server.Endpoint()}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	return s
}

// BenchmarkBlockWrite writes a full block on condition of its revision, as an
// allocation does.
func BenchmarkBlockWrite(b *testing.B) {
	write := func(ctx context.Context, s store.Store, obj store.Object) (store.Object, error) {
		cond := store.IfAbsent()
		if obj.Revision != 0 {
			cond = store.IfRevision(obj.Revision)
		}
		objs, err := s.Txn(ctx, store.Op{If: cond, Action: store.Put, Object: obj})
		if err != nil {
			return obj, err
		}
		return objs[0], nil
	}
	object := func(n int64) store.Object {
		cidr := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n), 0, 0}), 26)
		return store.Object{Key: store.BlockKey(cidr), Value: fullBlock(cidr)}
	}
	b.Run("one", func(b *testing.B) {
		s, obj := benchStore(b), object(0)
		for b.Loop() {
			var err error
			if obj, err = write(b.Context(), s, obj); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("sixteen", func(b *testing.B) {
		s := benchStore(b)
		var n atomic.Int64
		b.SetParallelism(8) // times two processors
		b.RunParallel(func(pb *testing.PB) {
			obj := object(n.Add(1))
			for pb.Next() {
				var err error
				if obj, err = write(b.Context(), s, obj); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
}

func BenchmarkGet(b *testing.B) {
	s := benchStore(b)
	if _, err := s.Txn(b.Context(), handle(1)); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Get(b.Context(), store.HandleKey("h1")); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCodec reads and writes a full block, without a datastore.
func BenchmarkCodec(b *testing.B) {
	cidr := netip.MustParsePrefix("10.0.0.0/26")
	key, block := store.BlockKey(cidr), fullBlock(cidr)
	raw, err := store.Encode(key, block, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("decode", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		for b.Loop() {
			if _, err := store.Decode(key, raw); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encode over old", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		for b.Loop() {
			if _, err := store.Encode(key, block, raw); err != nil {
				b.Fatal(err)
			}
		}
	})
}
