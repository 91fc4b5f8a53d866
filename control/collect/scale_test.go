package collect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// serverDir in the environment makes the test's binary an etcd server, so that
// its memory is not taken for the collector's.
const serverDir = "COLLECT_TEST_ETCD"

func TestMain(m *testing.M) {
	dir := os.Getenv(serverDir)
	if dir == "" {
		os.Exit(m.Run())
	}
	s, err := embedded.Start(context.Background(), embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock")})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
	s.Close()
}

// serve starts an etcd server in a process of its own.
func serve(tb testing.TB) (connect func() *etcd.Store) {
	tb.Helper()
	dir := tb.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serverDir+"="+dir)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			tb.Error(err)
		}
	})
	connect = func() *etcd.Store {
		s, err := etcd.Open(context.Background(), etcd.Config{Endpoints: []string{"unix://" + filepath.Join(dir, "s.sock")}})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { s.Close() })
		return s
	}
	first := connect()
	await.Until(tb, "the server answers", func() error {
		if _, err := first.Get(await.Context(tb), store.IPAMConfigKey()); !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("want %w: %w", store.ErrNotFound, err)
		}
		return nil
	})
	return connect
}

// leak writes blocks of nodes that are gone, each with a leaked address, its
// handle and its affinity.
func leak(tb testing.TB, s store.Store, blocks int) {
	tb.Helper()
	var g errgroup.Group
	g.SetLimit(8)
	const perTxn = 40
	for from := 0; from < blocks; from += perTxn {
		g.Go(func() error {
			var ops []store.Op
			for i := from; i < min(from+perTxn, blocks); i++ {
				node := fmt.Sprintf("gone-%d", i%100)
				cidr := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64 + byte(i>>10&63), byte(i >> 2), byte(i << 6)}), 26)
				handle := fmt.Sprintf("net1.%032x", i)
				key, b := blockOf(cidr.String(), node, handle+"@"+node)
				for _, o := range []store.Object{
					{Key: key, Value: b},
					{Key: store.HandleKey(handle), Value: &store.Handle{Block: map[string]int{cidr.String(): 1}}},
					{Key: store.AffinityKey(node, cidr), Value: &store.Affinity{State: store.AffinityConfirmed}},
				} {
					ops = append(ops, store.Op{Action: store.Put, Object: o})
				}
			}
			_, err := s.Txn(context.Background(), ops...)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		tb.Fatal(err)
	}
}

// assigner gives addresses to workloads, as ADDs do, until stop is called.
func assigner(tb testing.TB, s store.Store) (stop func() (given int, slowest time.Duration)) {
	tb.Helper()
	pool := v3.NewIPPool()
	pool.Name, pool.Spec.CIDR = "pool", "10.200.0.0/16"
	store.SetDefaults(pool)
	n := &store.Node{}
	n.Name = "node-a"
	store.SetDefaults(n)
	for _, v := range []any{pool, n} {
		if _, err := store.Create(context.Background(), s, v); err != nil {
			tb.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	a := ipam.New(ipam.Config{Store: s, Node: "node-a", Log: slog.New(slog.DiscardHandler)})
	var wg sync.WaitGroup
	steps, followed := clustertest.Follow(ctx, "node-a", s, ipam.Kinds()...)
	wg.Go(func() {
		_ = a.Run(ctx, steps)
		<-followed
	})
	var count int
	var slowest time.Duration
	var done atomic.Bool
	finished := make(chan error, 1)
	ready := make(chan struct{}) // its view of the datastore is not the collector's memory
	wg.Go(func() {
		for i := 0; !done.Load(); i++ {
			start := time.Now()
			handle := fmt.Sprintf("add.%d", i)
			_, err := a.Assign(ctx, ipam.Request{Family: dataplane.IPv4, Handle: handle})
			if err == nil && i%2 == 0 {
				_, err = a.ReleaseHandle(ctx, handle)
			}
			if err != nil {
				finished <- err
				return
			}
			if count++; count == 1 {
				close(ready)
			}
			if i > 0 { // the first waits for the watch
				slowest = max(slowest, time.Since(start))
			}
			if count >= 600 {
				break // the node's blocks are nearly full
			}
		}
		finished <- nil
	})
	select {
	case <-ready:
	case err := <-finished:
		tb.Fatal(err)
	}
	return func() (int, time.Duration) {
		done.Store(true)
		err := <-finished
		cancel()
		wg.Wait()
		if err != nil {
			tb.Errorf("assign while leaks are freed: %v", err)
		}
		return count, slowest
	}
}

// peak watches the heap until stop is called, which returns how far it grew.
func peak() (stop func() uint64) {
	runtime.GC()
	var base runtime.MemStats
	runtime.ReadMemStats(&base)
	quit, result := make(chan struct{}), make(chan uint64)
	go func() {
		top := base.HeapAlloc
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			top = max(top, m.HeapAlloc)
			select {
			case <-quit:
				result <- top - base.HeapAlloc
				return
			case <-tick.C:
			}
		}
	}()
	return func() uint64 { close(quit); return <-result }
}

// collectAll writes leaks, has them found and freed while addresses are given,
// and reports figures.
func collectAll(tb testing.TB, blocks int) (took time.Duration, heap uint64, given int, slowest time.Duration) {
	tb.Helper()
	connect := serve(tb)
	leak(tb, connect(), blocks)
	now := time.Now()
	s := connect()
	c := New(Config{Store: s, Node: "node-a", Grace: 15 * time.Minute, Clock: func() time.Time { return now }})
	stopAdds := assigner(tb, connect())
	stopHeap := peak()
	start := time.Now()
	if _, err := c.LookCluster(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	now = now.Add(20 * time.Minute)
	r, err := c.LookCluster(tb.Context())
	took, heap = time.Since(start), stopHeap()
	given, slowest = stopAdds()
	if err != nil {
		tb.Fatal(err)
	}
	want := blocks
	if r.Addresses != want || r.Blocks != want || r.Handles != want {
		tb.Errorf("%+v, want %d addresses, blocks and handles", r, want)
	}
	left := 0
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle} {
		err := store.Pages(tb.Context(), s, kind, "", func(objs []store.Object) error {
			for _, o := range objs {
				if len(o.Key.Namespace) > 4 && o.Key.Namespace[:4] == "gone" || len(o.Key.Name) > 30 {
					left++
				}
			}
			return nil
		})
		if err != nil {
			tb.Fatal(err)
		}
	}
	if left > 0 {
		tb.Errorf("%d records of nodes that are gone are left", left)
	}
	return took, heap, given, slowest
}

// Thousands of leaks are freed on a real etcd while addresses are given, and
// the memory does not follow their number: a fully decoded block of 64 addresses
// takes about 5 kB, the suspects of a block a few hundred bytes.
func TestManyLeaks(t *testing.T) {
	t.Parallel()
	const blocks = 1500
	took, heap, given, slowest := collectAll(t, blocks)
	t.Logf("%d leaked blocks: %s, heap %d kB, meanwhile %d addresses given, the slowest in %s", blocks, took, heap/1024, given, slowest)
	if given == 0 {
		t.Error("no address was given meanwhile")
	}
}

// BenchmarkLeaks is the size that issue and documentation name.
func BenchmarkLeaks(b *testing.B) {
	for _, blocks := range []int{4_000, 32_000} {
		b.Run(fmt.Sprint(blocks), func(b *testing.B) {
			for b.Loop() {
				took, heap, given, slowest := collectAll(b, blocks)
				b.ReportMetric(took.Seconds(), "s/all")
				b.ReportMetric(float64(heap)/1e6, "MB-heap")
				b.ReportMetric(float64(given), "ADDs")
				b.ReportMetric(float64(slowest.Milliseconds()), "ms-slowest-ADD")
			}
		})
	}
}

// One process at a time holds an office; when it ends, another follows.
func TestOffice(t *testing.T) {
	t.Parallel()
	connect := serve(t)
	var holders atomic.Int32
	leading := make(chan string, 10)
	run := func(s *etcd.Store, id string) context.CancelFunc {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() {
			// No lease ends here by itself, however slow the machine: one that
			// stops gives its lease back.
			s.Lead(ctx, "test", id, 30*time.Second, func(ctx context.Context) {
				if n := holders.Add(1); n > 1 {
					t.Errorf("%d hold the office", n)
				}
				leading <- id
				<-ctx.Done()
				holders.Add(-1)
			})
		})
		return func() { cancel(); wg.Wait() }
	}
	stopA := run(connect(), "a")
	if got := <-leading; got != "a" {
		t.Fatalf("%s leads, want a", got)
	}
	stopB := run(connect(), "b")
	stopA()
	if got := <-leading; got != "b" {
		t.Errorf("%s leads, want b", got)
	}
	stopB()
	if len(leading) > 0 {
		t.Error("somebody leads who was stopped")
	}
}
