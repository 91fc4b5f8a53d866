package workload

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// dumpTries is how often a list of the kernel's is asked for when changes keep
// coming in between; a dump takes microseconds.
const dumpTries = 100

// whole returns a list of the kernel's that no change interrupted (NLM_F_DUMP_INTR,
// netlink(7)): an interrupted one is not a list of anything.
func whole[T any](dump func() ([]T, error)) (list []T, err error) {
	for range dumpTries {
		if list, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}
