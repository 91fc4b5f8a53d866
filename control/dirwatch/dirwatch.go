// Package dirwatch follows directories by inotify(7): those that exist, and those that
// are to come.
package dirwatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// events are the changes of a directory that may change a file in it: written,
// replaced by a rename (as Kubernetes updates a mounted secret), its mode, gone.
const events = unix.IN_CLOSE_WRITE | unix.IN_ATTRIB | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_CREATE | unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// Watch calls Changed after each change in one of the directories, and after it began
// to watch one, for what came just before went unseen. For a directory that does not
// exist the nearest one above is watched.
type Watch struct {
	Open    func() (int, error) // makes the kernel's instance, as [Open]
	Dirs    []string            // what is watched
	Lists   <-chan []string     // replace Dirs; nil: they stay
	Changed func()
	// Interval is how often Changed is called, and watching tried again, while the kernel
	// refuses it.
	Interval time.Duration
	// Refused is called with why the kernel refuses, once for each reason in a row, and with
	// nil when it does no more. It may be nil.
	Refused func(error)

	refused string // the reason
}

// Open makes an instance of inotify.
func Open() (int, error) { return unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK) }

// Run watches until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	for {
		err := w.watch(ctx)
		if ctx.Err() != nil {
			return
		}
		w.report(err)
		w.Changed()
		w.pause(ctx)
	}
}

// report says what the kernel refuses, if that is new.
func (w *Watch) report(err error) {
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	if reason != w.refused && w.Refused != nil {
		w.Refused(err)
	}
	w.refused = reason
}

// pause waits for Interval and takes lists meanwhile, whose senders wait.
func (w *Watch) pause(ctx context.Context) {
	over := time.NewTimer(w.Interval)
	defer over.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case w.Dirs = <-w.Lists:
		case <-over.C:
			return
		}
	}
}

// watch watches until ctx ends, and returns nil then, or what the kernel refused.
func (w *Watch) watch(ctx context.Context) error {
	fd, err := w.Open()
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
		w.report(nil)
		if news {
			w.Changed()
		}
		news = false
		select {
		case <-ctx.Done():
			return nil
		case w.Dirs = <-w.Lists:
		case _, ok := <-hints:
			if !ok {
				return errors.New("watch directories: inotify ended")
			}
			news = true
		}
	}
}

// move watches the present list and nothing else. It reports whether something
// may have gone unseen.
func (w *Watch) move(fd int, watched map[string]int, news bool) (map[string]int, bool, error) {
	now := map[string]int{}
	for _, d := range w.Dirs {
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
	return fmt.Errorf("watch directories: %w%s", err, cure)
}

// watchNearest watches a directory, or the nearest one above that exists. It
// returns which, with the number of the watch; watching twice is one watch.
func watchNearest(fd int, dir string) (string, int, error) {
	for {
		wd, err := unix.InotifyAddWatch(fd, dir, events)
		if err == nil || !errors.Is(err, unix.ENOENT) || filepath.Dir(dir) == dir {
			return dir, wd, err
		}
		dir = filepath.Dir(dir)
	}
}
