package kernel

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// BenchmarkRoutes programs and removes routes by next-hop id.
func BenchmarkRoutes(b *testing.B) {
	l := newBenchLab(b)
	for _, n := range []int{1, 1000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			k, stop := l(b)
			defer stop()
			objs := manyRoutes(n, 8)
			ctx := context.Background()
			if err := k.Wait(ctx, k.Update(dataplane.SourceCore, []dataplane.Object{via(8, "10.0.0.2", "up0")}, nil)); err != nil {
				b.Fatal(err)
			}
			keys := make([]dataplane.Key, n)
			for i, o := range objs {
				keys[i] = o.Key()
			}
			total := 0
			for b.Loop() {
				if err := k.Wait(ctx, k.Update(dataplane.SourceCore, objs, nil)); err != nil {
					b.Fatal(err)
				}
				total += n
				b.StopTimer()
				if err := k.Wait(ctx, k.Update(dataplane.SourceCore, nil, keys)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(total)/b.Elapsed().Seconds(), "routes/s")
		})
	}
}

// BenchmarkBareRoutes is the limit that BenchmarkRoutes is to be held against:
// the same messages in the same batches, with nobody to think about them.
func BenchmarkBareRoutes(b *testing.B) {
	l := newLab(b)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.run("ip nexthop add id 8 via 10.0.0.2 dev up0 proto 77")
	objs := manyRoutes(100_000, 8)
	send := func(c *nl.Conn, encode func(*builder, dataplane.Route)) {
		var m builder
		for batch := range slices.Chunk(objs, batchSize) {
			m.Reset()
			for _, o := range batch {
				encode(&m, o.(dataplane.Route))
			}
			if errs, err := c.Batch(&m.Batch, nil); err != nil || len(errs) > 0 {
				b.Error(err, errs)
			}
		}
	}
	l.do(func() {
		c, err := dialConn()
		if err != nil {
			b.Error(err)
			return
		}
		defer c.Close()
		for b.Loop() {
			send(c, func(m *builder, r dataplane.Route) { m.putRoute(r, create, DefaultProtocol, 0, false) })
			b.StopTimer()
			send(c, func(m *builder, r dataplane.Route) { m.deleteRoute(r.Key().(dataplane.RouteKey), 0, DefaultProtocol) })
			b.StartTimer()
		}
		b.ReportMetric(float64(b.N*len(objs))/b.Elapsed().Seconds(), "routes/s")
	})
}

// newBenchLab makes a namespace with a wire and returns what starts a Kernel
// in it.
func newBenchLab(b *testing.B) func(*testing.B) (*Kernel, func()) {
	b.Helper()
	return func(b *testing.B) (k *Kernel, stop func()) {
		b.Helper()
		l := newLab(b)
		l.wire("up0", "up1", "10.0.0.1/24")
		var err error
		l.do(func() { k, err = New(Config{Log: slog.New(slog.DiscardHandler)}) })
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- k.Run(ctx) }()
		k.Synced(dataplane.SourceWorkload)
		k.Synced(dataplane.SourceCore)
		return k, func() {
			cancel()
			if err := <-done; err != nil {
				b.Error(err)
			}
		}
	}
}
