package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// watcher says which settings below /proc/sys a program wrote, by inotify(7).
// It does not see what the kernel changes by itself, as net/ipv4/ip_forward
// changes the setting of each device: RTM_NEWNETCONF notifies of these. A write
// through another mount of procfs is seen by neither; the full check finds it.
type watcher struct {
	root string // where the settings are

	f   *os.File
	raw syscall.RawConn

	mu      sync.Mutex
	names   map[int32]string
	ids     map[string]int32
	written map[string]time.Time
	undone  bool // of some write we do not know of what
}

// watchFiles opens a watcher that watches nothing yet.
func watchFiles(root string) (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch sysctls: %w: raise fs.inotify.max_user_instances if there are too many", os.NewSyscallError("inotify_init1", err))
	}
	f := os.NewFile(uintptr(fd), "inotify")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch sysctls: %w", err), f.Close())
	}
	return &watcher{
		root: root, f: f, raw: raw, names: make(map[int32]string), ids: make(map[string]int32), written: make(map[string]time.Time),
	}, nil
}

func (w *watcher) Close() error { return w.f.Close() }

// add watches a setting of the calling thread's network namespace.
func (w *watcher) add(name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.ids[name]; ok {
		return nil
	}
	var id int
	var err error
	cerr := w.raw.Control(func(fd uintptr) {
		id, err = unix.InotifyAddWatch(int(fd), filepath.Join(w.root, name), unix.IN_MODIFY)
	})
	if err := errors.Join(cerr, os.NewSyscallError("inotify_add_watch", err)); err != nil {
		return fmt.Errorf("watch sysctl %s: %w", name, err)
	}
	w.names[int32(id)], w.ids[name] = name, int32(id)
	return nil
}

// remove stops watching a setting, which may have gone with its device.
func (w *watcher) remove(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	id, ok := w.ids[name]
	if !ok {
		return
	}
	delete(w.ids, name)
	delete(w.names, id)
	// The only error is that the kernel has removed the watch already.
	_ = w.raw.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(id)) })
}

// run collects writes and calls arrived after each burst, until the watcher is
// closed.
func (w *watcher) run(arrived func()) {
	buf := make([]byte, 1<<12)
	for {
		n, err := w.f.Read(buf)
		if err != nil {
			return
		}
		w.mu.Lock()
		for id := range inotifyEvents(buf[:n]) {
			if name, ok := w.names[id]; ok {
				w.written[name] = time.Now()
			} else if id == -1 { // IN_Q_OVERFLOW
				w.undone = true
			}
		}
		w.mu.Unlock()
		arrived()
	}
}

// take returns the settings that were written and not taken yet.
func (w *watcher) take() (written map[string]time.Time, undone bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	undone, w.undone = w.undone, false
	if len(w.written) == 0 {
		return nil, undone // the map stays run's alone
	}
	written, w.written = w.written, make(map[string]time.Time)
	return written, undone
}

// inotifyEvents iterates over the watch descriptors of struct inotify_event.
func inotifyEvents(b []byte) func(yield func(int32) bool) {
	return func(yield func(int32) bool) {
		for len(b) >= unix.SizeofInotifyEvent {
			id := int32(nl.Value(b).Uint32())
			n := unix.SizeofInotifyEvent + int(nl.Value(b[12:]).Uint32())
			if n > len(b) || n < unix.SizeofInotifyEvent || !yield(id) {
				return
			}
			b = b[n:]
		}
	}
}

// drainSettings applies what a program wrote to settings and offloads.
func (ob *observer) drainSettings() error {
	written, undone := ob.sysctls.watch.take()
	if undone {
		ob.listing.ask("notifications of sysctls were lost")
	}
	for name, at := range written {
		ob.drift.notice = notice{"inotify", at}
		ob.reread(name)
	}
	if ob.offloads == nil {
		return nil
	}
	events, overrun, err := ob.offloads.changes.take()
	if overrun {
		ob.listing.ask("notifications of offloads were lost")
	}
	seen := map[int]bool{}
	for _, m := range events {
		f, ok := parseFeatures(m.Body)
		if m.Type != ob.offloads.family || !ok || seen[f.link] {
			continue
		}
		seen[f.link] = true // what is read is of now, after all of the events
		ob.drift.notice = notice{"ETHTOOL_MSG_FEATURES_NTF", m.at}
		ob.haveFeatures(ob.mirror.linkName(f.link), ob.set)
	}
	return err
}

// reread looks at a setting that a program may have written.
func (ob *observer) reread(name string) {
	o := dataplane.Sysctl{Name: name}
	if _, ok := ob.sysctls.made[o.Key()]; !ok {
		return
	}
	v, ok, err := ob.sysctls.read(name)
	switch {
	case err != nil:
		ob.log.Warn("sysctl cannot be read", "sysctl", name, "error", err)
	case !ok:
		ob.lose(o.Key())
	default:
		o.Value = v
		ob.set(o)
	}
}

// allDevices begins the ifindexes of a configuration that is not of one
// device: NETCONFA_IFINDEX_ALL is -1, NETCONFA_IFINDEX_DEFAULT -2.
const allDevices = -1

// parseNetconf reads RTM_NEWNETCONF (linux/netconf.h): the device whose
// settings changed; negative for those of none.
func parseNetconf(b []byte) (link int, ok bool) {
	const size = 4 // struct netconfmsg, padded
	if len(b) < size {
		return 0, false
	}
	for t, v := range nl.Attributes(b[size:]) {
		if t == 1 && len(v) >= 4 { // NETCONFA_IFINDEX
			return int(int32(v.Uint32())), true
		}
	}
	return 0, false
}

// netconfEvent looks again at the settings of a device, or at those that are
// of no device.
func (ob *observer) netconfEvent(link int) {
	if link > allDevices {
		for key := range ob.onLink[ob.mirror.linkName(link)] {
			if s, ok := key.(dataplane.SysctlKey); ok {
				ob.reread(s.Name)
			}
		}
		return
	}
	for key := range ob.sysctls.made {
		if s := key.(dataplane.SysctlKey); sysctlLink(s.Name) == "" {
			ob.reread(s.Name)
		}
	}
}
