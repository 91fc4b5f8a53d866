package embedded

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// roomy is what a server needs to last, in bytes: a segment of the log, which etcd
// allocates as soon as it runs (wal.SegmentSizeBytes), and as much beside it.
const roomy = 2 * 64 << 20

// IsFull reports whether a server could not start, or ended, because its disk is full or
// its quota used up. etcd tells why it gave up only in words.
func IsFull(err error) bool {
	if err == nil {
		return false
	}
	for _, e := range []error{unix.ENOSPC, unix.EDQUOT} {
		if errors.Is(err, e) || strings.Contains(err.Error(), e.Error()) {
			return true
		}
	}
	return false
}

// Room reports why a server would soon fail again in a directory: there is not enough
// room on its disk.
func Room(dir string) error {
	f, err := os.CreateTemp(dir, ".room-*")
	if err != nil {
		return fmt.Errorf("look for room on the datastore's disk: %w", err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil { // it goes with the descriptor, also when the process is killed
		return fmt.Errorf("look for room on the datastore's disk: %w", err)
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, roomy)
	if errors.Is(err, unix.EOPNOTSUPP) {
		var fs unix.Statfs_t
		if err = unix.Fstatfs(int(f.Fd()), &fs); err == nil && fs.Bavail*uint64(fs.Bsize) < roomy { //nolint:gosec // a size is not negative
			err = unix.ENOSPC
		}
	}
	if err != nil {
		return fmt.Errorf("allocate %d MiB in %s: %w", roomy>>20, dir, err)
	}
	return nil
}
