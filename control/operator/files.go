package operator

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// filesRoom is what a file system must have left, in bytes: a file is written beside the one
// that it replaces.
const filesRoom = 1 << 20

// filesError says in which of the daemon's directories its files cannot be written. The
// journals keep room of their own and speak for themselves; for a moment without room the others
// stay as they were, and are written at the next change.
func filesError(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			errs = append(errs, fmt.Errorf("read the state of the file system of %s: %w", dir, err))
			continue
		}
		switch left := fs.Bavail * uint64(fs.Bsize); { //nolint:gosec // no block size is negative
		case fs.Flags&unix.ST_RDONLY != 0:
			errs = append(errs, fmt.Errorf("the file system of %s is read-only, so its files cannot be updated; find the reason in the kernel's log, then mount it read-write", dir))
		case left < filesRoom:
			errs = append(errs, fmt.Errorf("the disk of %s is full (%d KiB are left), so its files cannot be updated; free space on it", dir, left>>10))
		case fs.Files > 0 && fs.Ffree == 0:
			errs = append(errs, fmt.Errorf("the disk of %s has no inode left, so its files cannot be updated; delete files on it", dir))
		}
	}
	return errors.Join(errs...)
}
