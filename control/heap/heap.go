// Package heap keeps the daemon's memory small: it is limited to what the host gives, how
// much garbage there may be follows what the collector has to look at, and what a burst of
// work has left goes back to the host, as do the pages of the program's file that only the
// burst needed.
package heap

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/routerd/routerd/control/async"
)

// Profiled says whether profiles of the heap may be asked for. The runtime notes for them
// who allocates, one stack in 512 kB, in tables of its own of which it never frees any: they
// are not kept where nobody can read them. It is to be called before much is allocated.
func Profiled(asked bool) {
	if !asked {
		runtime.MemProfileRate = 0
	}
}

// ofMemory is the share of the memory that the daemon may have which its heap is
// kept to: the rest is for stacks, and what the collector leaves for the moment.
const ofMemory = 0.9

// Limit has the garbage collector keep to what the host lets the daemon
// have (MemoryMax= of systemd, a container's limit), so that a table which grows
// costs processor time before it costs the daemon. GOMEMLIMIT in the
// environment goes before it.
func Limit(log *slog.Logger, limits memlimit.Provider) {
	limit, err := memlimit.Set(memlimit.WithProvider(limits), memlimit.WithRatio(ofMemory))
	switch {
	case errors.Is(err, memlimit.ErrNoCgroup):
	case err != nil:
		log.Warn("this host's limit of memory is not known; GOMEMLIMIT can tell it", "error", err)
	case limit != math.MaxInt64:
		log.Info("memory is limited", "bytes", limit)
	}
}

// pacer sets how much garbage there may be before the collector runs. What it costs to
// run is what it has to look at, and of a large table that is nothing: prefixes, routes
// and paths are kept without pointers. So the heap may grow by what the collector looks
// at, and not, as the runtime has it, by all that is alive: half of the memory would be
// garbage while 500,000 prefixes come.
type pacer struct {
	samples []metrics.Sample
	percent int // in force
}

// The garbage that there may be at least, by which a small heap is not collected all the
// time, and by share of what is alive.
const (
	paceLeast  = 8 << 20
	paceFloor  = 10
	paceAtMost = 100 // GOGC of a program that sets nothing
	paceStep   = 10  // to set it stops all goroutines for a moment
)

// Pace has the pace follow what is alive, after each collection, until ctx ends.
// GOGC in the environment goes before it.
func Pace(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	p := &pacer{samples: []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/heap:bytes"}}, percent: paceAtMost}
	p.watch(ctx)
}

// watch has the pace looked at after the next collection.
func (p *pacer) watch(ctx context.Context) {
	type collected struct{ _ *pacer } // with a pointer, or others would share its memory
	runtime.AddCleanup(&collected{p}, func(p *pacer) {
		if ctx.Err() == nil {
			p.look()
			p.watch(ctx)
		}
	}, p)
}

func (p *pacer) look() {
	metrics.Read(p.samples)
	now := pace(p.samples[0].Value.Uint64(), p.samples[1].Value.Uint64())
	if d := now - p.percent; d >= paceStep || d <= -paceStep || now != p.percent && now == paceAtMost {
		debug.SetGCPercent(now)
		p.percent = now
	}
}

// pace is the share of what is alive by which the heap may grow, in percent, where so
// many bytes are alive and the collector looks at so many.
func pace(live, looked uint64) int {
	return int(min(max((looked+paceLeast)*100/max(live, 1), paceFloor), paceAtMost))
}

// When memory that the daemon does not need goes back to the host. Each time costs
// a collection, of which a heap has one for each releaseShare bytes in
// releaseEvery at most: a thousandth of a processor. So a start so slow that it counted as
// over before the cluster was read, with little alive, has what it left given back soon all
// the same. It waits for the end of a burst, which would take the memory again, but not
// longer than releaseEvery.
const (
	releaseLook  = 2 * time.Second
	releaseEvery = time.Minute
	releaseSoon  = 10 * time.Second // between two, however small the heap
	releaseShare = 100 << 20        // bytes
	releaseLeast = 8 << 20          // bytes; less is not worth a collection
	releaseCalm  = 4 << 20          // bytes; what is allocated between two looks where there is no burst
)

// Release gives back what a burst of work has left, such as the first
// reading of a large cluster, and what it needed of the program's file. Of
// itself the runtime collects the garbage of the last burst minutes later, and keeps room
// for as much again.
func Release(ctx context.Context, log *slog.Logger) {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/gc/heap/allocs:bytes"},
	}
	read := func() (held, allocated uint64) {
		metrics.Read(samples)
		for _, s := range samples[:3] {
			held += s.Value.Uint64()
		}
		return held, samples[3].Value.Uint64()
	}
	r := release{began: time.Now()}
	for async.Sleep(ctx, releaseLook) == nil {
		if held, allocated := read(); r.due(held, allocated, time.Now()) {
			debug.FreeOSMemory()
			if err := forgetProgram(); err != nil {
				log.Debug("what the burst needed of the program's file stays in memory", "error", err)
			}
			held, _ = read()
			r.done(held, time.Now())
		}
	}
}

// release says when memory goes back.
type release struct {
	began     time.Time
	last      time.Time // zero: never
	left      uint64    // bytes that the heap held after that
	allocated uint64    // bytes, since the start, up to the last look
}

// due says whether it is worth a collection, of a heap that holds so many bytes of the
// host's memory, to give some back. What is alive says nothing here: in a burst, garbage
// counts as that.
func (r *release) due(held, allocated uint64, now time.Time) bool {
	calm := allocated-r.allocated <= releaseCalm
	r.allocated = allocated
	if held < r.left+max(releaseLeast, r.left/8) {
		return false
	}
	if r.last.IsZero() {
		return calm || now.Sub(r.began) >= releaseEvery
	}
	every := max(releaseSoon, time.Duration(r.left>>20)*releaseEvery/(releaseShare>>20))
	since := now.Sub(r.last)
	return since >= every && (calm || since >= every+releaseEvery)
}

// done notes that a collection has left so many bytes.
func (r *release) done(left uint64, now time.Time) { r.last, r.left = now, left }
