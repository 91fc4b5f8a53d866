package ipam

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// realStore starts an etcd server and returns what opens a client of it.
func realStore(tb testing.TB) (open func() store.Store) {
	tb.Helper()
	// Not TempDir: the path of a unix socket is short.
	dir, err := os.MkdirTemp("", "ipam") //nolint:usetesting // its names are too long for a socket
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	ctx := await.Context(tb)
	server, err := embedded.Start(ctx, embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s")})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(server.Close)
	return func() store.Store {
		tb.Helper()
		st, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{server.Endpoint()}})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = st.Close() })
		return st
	}
}

// race makes four hosts race for every address of one pool, and give them
// back.
func race(t *testing.T, open func() store.Store) {
	t.Helper()
	const total = 1000 // of 1,000 addresses that are not reserved
	st := open()
	put(t, st, newPool("p", "10.0.0.0/22", blockSize(28)), newReservation("r", "10.0.0.16/29", "10.0.3.240/28"))
	hosts := make([]*host, 4)
	for i := range hosts {
		name := fmt.Sprint("node", i)
		put(t, st, newNode(name, nil))
		hosts[i] = start(t, open(), name, time.Now)
		defer hosts[i].stop()
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := map[netip.Addr]string{}
	for i := range total {
		wg.Go(func() {
			handle := fmt.Sprintf("net.%04d", i)
			as, err := hosts[i%len(hosts)].Assign(await.Context(t), Request{Family: dataplane.IPv4, Handle: handle, Idempotent: i%2 == 0})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if other, ok := got[as[0].Addr]; ok {
				t.Errorf("%s is given to %s and to %s", as[0].Addr, other, handle)
			}
			got[as[0].Addr] = handle
		})
	}
	wg.Wait()
	mustDiff(t, "what callers got and what is stored", got, audit(t, st))
	for i := range total {
		wg.Go(func() {
			handle := fmt.Sprintf("net.%04d", i)
			if _, err := hosts[(i+i/7)%len(hosts)].ReleaseHandle(await.Context(t), handle); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	mustDiff(t, "left", map[netip.Addr]string{}, audit(t, st))
}

func TestRace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	race(t, func() store.Store { return w.st })
}

func TestRaceEtcd(t *testing.T) {
	t.Parallel()
	race(t, realStore(t))
}

// bench assigns from many callers, and gives back what it took outside the
// clock, so that the pool never runs out.
func bench(b *testing.B, callers int) {
	st := realStore(b)()
	put(b, st, newPool("p", "10.0.0.0/16"), newNode("node-a", nil))
	h := start(b, st, "node-a", time.Now)
	defer h.stop()
	ctx := context.Background()
	var next atomic.Int64
	left := b.N
	b.ResetTimer()
	for left > 0 {
		round := min(left, 512)
		left -= round
		var todo atomic.Int64
		todo.Store(int64(round))
		first := next.Load()
		var wg sync.WaitGroup
		for range callers {
			wg.Go(func() {
				for todo.Add(-1) >= 0 {
					r := Request{Family: dataplane.IPv4, Handle: fmt.Sprint("net.", next.Add(1)), Idempotent: true}
					r.Attributes = map[string]string{AttrPod: "pod-0", AttrNamespace: "default", AttrTimestamp: "2026-11-21 17:31:36.8948024 +0000 UTC"}
					if _, err := h.Assign(ctx, r); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		b.StopTimer()
		for i := first + 1; i <= next.Load(); i++ {
			wg.Go(func() {
				if _, err := h.ReleaseHandle(ctx, fmt.Sprint("net.", i)); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		b.StartTimer()
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "addresses/s")
}

func BenchmarkAssign(b *testing.B)   { bench(b, 1) }
func BenchmarkAssign16(b *testing.B) { bench(b, 16) }

// BenchmarkCompareAndPut is what the datastore alone allows: one conditional
// write after the other.
func BenchmarkCompareAndPut(b *testing.B) {
	st := realStore(b)()
	key := store.HandleKey("h")
	putAt(b, st, key, &store.Handle{Block: map[string]int{"10.0.0.0/26": 1}})
	obj, err := st.Get(context.Background(), key)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		out, err := st.Txn(context.Background(), store.Op{If: store.IfRevision(obj.Revision), Action: store.Put, Object: obj})
		if err != nil {
			b.Fatal(err)
		}
		obj = out[0]
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "writes/s")
}
