package kernel

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

const (
	// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
	membarrierGlobal = 1
	// quiesceAfter is what is waited where the kernel cannot be asked: many
	// times what a processor takes for the packets of one turn.
	quiesceAfter = 50 * time.Millisecond
)

// quiesce returns when no packet is being forwarded any more by what the
// tables said before. The kernel chooses a packet's route first and looks the
// neighbour, the FDB entry and the device up later; what it finds missing then
// costs the packet, even if the route has changed meanwhile. All of it happens
// within one read-side section of RCU, and membarrier(2) with
// MEMBARRIER_CMD_GLOBAL returns when every processor has left those that it was
// in: synchronize_rcu in kernel/sched/membarrier.c. Kernels with nohz_full
// refuse it.
func quiesce() {
	if membarrier() != nil {
		time.Sleep(quiesceAfter)
	}
}

func membarrier() error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// quiescer waits, where routes or next hops were changed, until no packet is on
// its way to what is to be removed.
type quiescer struct {
	wait   func()
	needed bool // packets may still go by what was before
}

func (q *quiescer) before(kind dataplane.Kind) {
	switch kind {
	case dataplane.KindLink, dataplane.KindNeighbour, dataplane.KindFDB:
	default:
		return // nothing is looked up there by a packet that has its route
	}
	if q.needed {
		q.wait()
		q.needed = false
	}
}
