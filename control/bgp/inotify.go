package bgp

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// dirEvents are the changes of a directory that may change a file in it:
// written, replaced by a rename (as Kubernetes updates a mounted secret), gone.
const dirEvents = unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_CREATE | unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_ONLYDIR

// watchDirs calls changed after each change in one of the directories
// (inotify(7)) until ctx ends. A new list replaces the one before; a directory
// that does not exist is left out, so list its parent too.
func watchDirs(ctx context.Context, lists <-chan []string, changed func()) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch secrets: %w", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	hints := make(chan struct{})
	go func() { // ends when f is closed
		defer close(hints)
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			select {
			case hints <- struct{}{}:
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() {
		f.Close()
		for range hints { //nolint:revive // waits for the reader
		}
	}()
	var dirs []string
	watched := map[string]int{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case dirs = <-lists:
		case _, ok := <-hints:
			if !ok {
				return errors.New("watch secrets: inotify ended")
			}
			changed()
		}
		now := map[string]int{}
		for _, d := range dirs {
			// Watching twice is one watch with the same number.
			if wd, err := unix.InotifyAddWatch(fd, d, dirEvents); err == nil {
				now[d] = wd
			}
		}
		for d, wd := range watched {
			if _, keep := now[d]; !keep {
				_, _ = unix.InotifyRmWatch(fd, uint32(wd)) // it may be gone with its directory
			}
		}
		watched = now
	}
}
