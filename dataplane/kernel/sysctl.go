package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// sysctlRoot is where the kernel's settings usually are. Those below net are of the
// network namespace of the thread that opens them.
const sysctlRoot = "/proc/sys"

// sysctlLink is the device that a setting belongs to:
// net/<family>/{conf,neigh}/<device>/<setting>. Those of all devices and of
// future ones ("all", "default") belong to none.
func sysctlLink(name string) string {
	p := strings.Split(name, "/")
	if len(p) == 5 && p[0] == "net" && (p[2] == "conf" || p[2] == "neigh") && p[3] != "all" && p[3] != "default" {
		return p[3]
	}
	return ""
}

// refusals are the settings that could not be made as wanted when they were last tried.
// It is safe for concurrent use.
type refusals struct {
	mu   sync.Mutex
	keys map[dataplane.Key]struct{}
}

func (r *refusals) note(key dataplane.Key, refused bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if refused {
		r.keys[key] = struct{}{}
	} else {
		delete(r.keys, key)
	}
}

// list returns them in order.
func (r *refusals) list() []dataplane.Key {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Keys(r.keys), dataplane.CompareKeys)
}

// sysctls are the kernel's settings in one network namespace.
type sysctls struct {
	root  string // where they are
	ns    *namespace
	watch *watcher                   // of those that were written
	made  map[dataplane.Key]struct{} // that are as we made them

	refused *refusals
}

// note notes that there is a setting of ours now, or no more.
func (s *sysctls) note(key dataplane.SysctlKey, has bool) {
	if has {
		s.made[key] = struct{}{}
		return
	}
	delete(s.made, key)
	s.watch.remove(key.Name)
}

// read returns the value in its canonical form; ok is false if there is
// no such setting.
func (s *sysctls) read(name string) (value string, ok bool, err error) {
	err = s.ns.do(func() error {
		b, err := os.ReadFile(filepath.Join(s.root, name))
		value = canonicalSysctl(string(b))
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return value, true, nil
}

func (s *sysctls) write(name, value string) error {
	return s.ns.do(func() error {
		f, err := os.OpenFile(filepath.Join(s.root, name), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value)
		return errors.Join(err, f.Close())
	})
}

// addTo fills in those settings of devices that the underlay has. Only
// devices with addresses are asked: they are few, while workloads' are many.
// What cannot be read stays zero, as on a host without IPv6.
func (s *sysctls) addTo(u *dataplane.Underlay) error {
	asked := map[string]bool{}
	for _, a := range u.Addresses {
		asked[a.Link] = !isWorkload(a.Link)
	}
	return s.ns.do(func() error {
		all := s.readNumber("net/ipv4/conf/all/rp_filter")
		for i := range u.Links {
			l := &u.Links[i]
			if !asked[l.Name] {
				continue
			}
			// The larger of the two is in effect (ip-sysctl.rst of the kernel).
			l.RPFilter = max(all, s.readNumber("net/ipv4/conf/"+l.Name+"/rp_filter"))
			l.AcceptRA = s.readNumber("net/ipv6/conf/" + l.Name + "/accept_ra")
		}
		return nil
	})
}

func (s *sysctls) readNumber(name string) int {
	b, err := os.ReadFile(filepath.Join(s.root, name))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(canonicalSysctl(string(b)))
	if err != nil {
		return 0
	}
	return n
}

// putSysctl makes a setting be as wanted; one that is already is not written.
func (wr *writer) putSysctl(o op) result {
	w := o.Want.other.(dataplane.Sysctl)
	if err := validate(w); err != nil {
		return result{Op: o, Outcome: reconcile.Refused, Err: err}
	}
	// Watched before it is read, so that no write is missed.
	if err := wr.ns.do(func() error { return wr.sysctls.watch.add(w.Name) }); err != nil && !errors.Is(err, unix.ENOENT) {
		wr.log.Debug("only the full check will notice a change", "sysctl", w.Name, "error", err)
	}
	now, ok, err := wr.sysctls.read(w.Name)
	if err == nil && !ok {
		if link := sysctlLink(w.Name); link != "" {
			r := wr.waitForLink(o, link)
			r.Op = o
			return *r
		}
		err = fmt.Errorf("no such setting in this kernel: is its module loaded?")
	}
	if err == nil && now != w.Value {
		wr.writes.Add(1)
		if err = wr.sysctls.write(w.Name, w.Value); err == nil {
			wr.wrote(dataplane.KindSysctl, false, 1)
			if !isWorkload(sysctlLink(w.Name)) {
				wr.underlay.changed() // the underlay has some of them
			}
		}
	}
	if err != nil {
		return result{Op: o, Outcome: reconcile.Refused, Err: err}
	}
	return result{Op: o}
}
