package main

import (
	"errors"
	"log/slog"
	"math"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

// ofMemory is the share of the memory that the daemon may have which its heap is
// kept to: the rest is for stacks, and what the collector leaves for the moment.
const ofMemory = 0.9

// limitMemory has the garbage collector keep to what the host lets the daemon
// have (MemoryMax= of systemd, a container's limit), so that a table which grows
// costs processor time before it costs the daemon's life. GOMEMLIMIT in the
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
