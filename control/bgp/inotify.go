package bgp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// dirEvents are the changes of a directory that may change a file in it:
// written, replaced by a rename (as Kubernetes updates a mounted secret), gone.
const dirEvents = unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_CREATE | unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_ONLYDIR

// watchDirs calls changed after each change in one of the directories
// (inotify(7)), and after it began to watch one, for what came just before went
// unseen, until ctx ends. A new list replaces the one before. For a directory
// that does not exist the nearest one above is watched.
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
		news := false
		select {
		case <-ctx.Done():
			return nil
		case dirs = <-lists:
		case _, ok := <-hints:
			if !ok {
				return errors.New("watch secrets: inotify ended")
			}
			news = true
		}
		now := map[string]int{}
		for _, d := range dirs {
			d, wd, err := watchNearest(fd, d)
			if err != nil {
				continue // nobody can follow it; each reconciliation reads it
			}
			before, ok := watched[d]
			news = news || !ok || before != wd
			now[d] = wd
		}
		for d, wd := range watched {
			if _, keep := now[d]; !keep {
				_, _ = unix.InotifyRmWatch(fd, uint32(wd)) // it may be gone with its directory
			}
		}
		watched = now
		if news {
			changed()
		}
	}
}

// watchNearest watches a directory, or the nearest one above that exists. It
// returns which, with the number of the watch; watching twice is one watch.
func watchNearest(fd int, dir string) (string, int, error) {
	for {
		wd, err := unix.InotifyAddWatch(fd, dir, dirEvents)
		if err == nil || !errors.Is(err, unix.ENOENT) || filepath.Dir(dir) == dir {
			return dir, wd, err
		}
		dir = filepath.Dir(dir)
	}
}
