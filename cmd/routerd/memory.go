package main

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/routerd/routerd/control/async"
)

// ofMemory is the share of the memory that the daemon may have which its heap is
// kept to: the rest is for stacks, and what the collector leaves for the moment.
const ofMemory = 0.9

// limitMemory has the garbage collector keep to what the host lets the daemon
// have (MemoryMax= of systemd, a container's limit), so that a table which grows
// costs processor time before it costs the daemon. GOMEMLIMIT in the
// environment goes before it.
func limitMemory(log *slog.Logger, limits memlimit.Provider) {
	limit, err := memlimit.Set(memlimit.WithProvider(limits), memlimit.WithRatio(ofMemory))
	switch {
	case errors.Is(err, memlimit.ErrNoCgroup):
	case err != nil:
		log.Warn("this host's limit of memory is not known; GOMEMLIMIT can tell it", "error", err)
	case limit != math.MaxInt64:
		log.Info("memory is limited", "bytes", limit)
	}
}

// When memory that the daemon does not need goes back to the host. Each time costs
// a collection, of which a heap has one for each releaseShare bytes in
// releaseEvery at most: a thousandth of a processor.
const (
	releaseLook  = 5 * time.Second
	releaseEvery = time.Minute
	releaseShare = 100 << 20 // bytes
	releaseLeast = 8 << 20   // bytes; less is not worth a collection
)

// releaseMemory gives back what a burst of work has left, such as the first
// reading of a large cluster. Of itself the runtime collects the garbage of the
// last burst minutes later, and keeps room for as much again.
func releaseMemory(ctx context.Context) {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
	}
	held := func() (sum uint64) {
		metrics.Read(samples)
		for _, s := range samples {
			sum += s.Value.Uint64()
		}
		return sum
	}
	var last time.Time
	var left uint64
	for async.Sleep(ctx, releaseLook) == nil {
		if mayRelease(held(), left, time.Since(last)) {
			debug.FreeOSMemory()
			last, left = time.Now(), held()
		}
	}
}

// mayRelease says whether it is worth a collection, of a heap that holds so many
// bytes and held fewer when the last one was over, to give the rest back. What was
// alive says nothing here: in a burst, garbage counts as that.
func mayRelease(held, left uint64, since time.Duration) bool {
	every := max(releaseEvery, time.Duration(left/releaseShare)*releaseEvery)
	return held >= left+max(releaseLeast, left/8) && since >= every
}
