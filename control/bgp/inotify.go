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

// dirWatch calls changed after each change in one of the directories
// (inotify(7)), and after it began to watch one, for what came just before went
// unseen. For a directory that does not exist the nearest one above is watched.
type dirWatch struct {
	init    func() (int, error) // makes the kernel's instance
	dirs    []string            // what is watched
	lists   <-chan []string     // replace dirs
	changed func()
}

func newInotify() (int, error) { return unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK) }

// run watches until ctx ends, and returns nil then. The error says what the
// kernel refused; run may be called again.
func (w *dirWatch) run(ctx context.Context) error {
	fd, err := w.init()
	if err != nil {
		return watchError(err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	hints := make(chan struct{})
	ended := make(chan struct{})
	go func() { // ends when f is closed
		defer close(hints)
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			select {
			case hints <- struct{}{}:
			case <-ended:
				return
			}
		}
	}()
	defer func() {
		close(ended)
		f.Close()
		for range hints { //nolint:revive // waits for the reader
		}
	}()
	watched := map[string]int{}
	for news := false; ; {
		if watched, news, err = w.move(fd, watched, news); err != nil {
			return watchError(err)
		}
		if news {
			w.changed()
		}
		news = false
		select {
		case <-ctx.Done():
			return nil
		case w.dirs = <-w.lists:
		case _, ok := <-hints:
			if !ok {
				return errors.New("watch secrets: inotify ended")
			}
			news = true
		}
	}
}

// move watches the present list and nothing else. It reports whether something
// may have gone unseen.
func (w *dirWatch) move(fd int, watched map[string]int, news bool) (map[string]int, bool, error) {
	now := map[string]int{}
	for _, d := range w.dirs {
		d, wd, err := watchNearest(fd, d)
		switch {
		case errors.Is(err, unix.ENOSPC):
			return nil, false, err
		case err != nil:
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
	return now, news, nil
}

// watchError names the cure of what the kernel refuses (inotify_init1(2),
// inotify_add_watch(2)).
func watchError(err error) error {
	cure := ""
	switch {
	case errors.Is(err, unix.EMFILE):
		cure = ": raise the sysctl fs.inotify.max_user_instances, or the daemon's limit of open files"
	case errors.Is(err, unix.ENFILE):
		cure = ": raise the sysctl fs.file-max"
	case errors.Is(err, unix.ENOSPC):
		cure = ": raise the sysctl fs.inotify.max_user_watches"
	}
	return fmt.Errorf("watch secrets: %w%s", err, cure)
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
