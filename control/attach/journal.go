package attach

import (
	"fmt"

	"github.com/routerd/routerd/control/journal"
)

// JournalError says what the disk refuses of the journal that keeps workloads, and what was
// lost of it, until the daemon starts again.
func JournalError(j *journal.Journal) error {
	if err := j.Err(); err != nil {
		return fmt.Errorf("workloads cannot be started: %w", err)
	}
	lost := j.Damage()
	if lost.Lines == 0 {
		return nil
	}
	kept := "as it was is " + lost.Copy
	if lost.Copy == "" {
		kept = "still has them, for there was no room for a copy"
	}
	return fmt.Errorf("%d damaged lines of the journal were skipped: their changes of workloads are lost, compare routerctl ipam check; the file %s, and the disk may be failing", lost.Lines, kept)
}
