package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/integration/lab/ns"
)

// MeasureRoutes returns rows for n routes put into the kernel by
// dataplane/kernel, beside ip -batch and beside bare messages.
func MeasureRoutes(ctx context.Context, n int, log *slog.Logger) ([]Row, error) {
	prefixes := routePrefixes(n)
	space := func(what string) string { return fmt.Sprintf("rdbench%d-%s", os.Getpid(), what) }
	var ours, batch, bare time.Duration
	for _, series := range []struct {
		name string
		run  func(space string) error
	}{
		{"batch", func(space string) (err error) { batch, err = routesByIPBatch(ctx, space, prefixes); return err }},
		{"bare", func(space string) (err error) { bare, err = routesBare(ctx, space, prefixes); return err }},
		{"ours", func(space string) (err error) { ours, err = routesByKernel(ctx, space, prefixes, log); return err }},
	} {
		name := space(series.name)
		if err := inRouteSpace(ctx, name, func() error { return series.run(name) }); err != nil {
			return nil, fmt.Errorf("%d routes (%s): %w", n, series.name, err)
		}
	}
	rate := func(d time.Duration) float64 { return float64(n) / d.Seconds() }
	what := fmt.Sprintf("routes programmed, %d", n)
	return []Row{
		{what, rate(ours), rate(batch), "ip -batch", PerSecond},
		{what, rate(ours), rate(bare), "bare batched netlink, by next-hop number", PerSecond},
	}, nil
}

// routesByKernel hands all routes to the writer at once, as after a start, and
// returns how long it takes until all are in the kernel.
func routesByKernel(ctx context.Context, space string, prefixes []netip.Prefix, log *slog.Logger) (took time.Duration, err error) {
	var k *kernel.Kernel
	err = ns.Do(space, func() (err error) {
		k, err = kernel.New(kernel.Config{Protocol: 77, Log: log})
		return err
	})
	if err != nil {
		return 0, err
	}
	runCtx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	var runErr error
	running.Go(func() { runErr = k.Run(runCtx) })
	defer func() {
		stop()
		running.Wait()
		if !errors.Is(runErr, context.Canceled) {
			err = errors.Join(err, runErr)
		}
		err = errors.Join(err, k.Close())
	}()
	objects := []dataplane.Object{dataplane.NextHop{ID: routeID, Link: routeLink, Gateway: routeGateway()}}
	if err := k.Wait(ctx, k.Replace(dataplane.SourceCore, objects)); err != nil {
		return 0, err
	}
	for _, p := range prefixes {
		objects = append(objects, dataplane.Route{Prefix: p, Table: dataplane.MainTable, NextHop: routeID})
	}
	start := time.Now()
	err = k.Wait(ctx, k.Replace(dataplane.SourceCore, objects))
	return time.Since(start), err
}
