package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/integration/lab/ns"
)

// Root is the directory of all labs of this machine.
const Root = "/run/routerd-lab"

const (
	stateFile = "lab.json"
	lockFile  = ".lock" // guards stateFile; a dot, so that no host has this name
)

// state is what is known of a lab beyond the life of the process that made it.
// It is written before what it describes is made.
type state struct {
	Name     string                `json:"name"`
	Topology Topology              `json:"topology"`
	BinDir   string                `json:"binDir"`
	Created  time.Time             `json:"created"`
	Complete bool                  `json:"complete"` // Up reached its end
	Spine    ns.Process            `json:"spine,omitzero"`
	Daemons  map[string]ns.Process `json:"daemons"` // by host
	Pods     []Pod                 `json:"pods"`
}

// Pod is a workload of the lab.
type Pod struct {
	Host        string       `json:"host"`
	Name        string       `json:"name"`
	Namespace   string       `json:"namespace,omitempty"` // of Kubernetes; empty: it is no pod of Kubernetes
	UID         string       `json:"uid,omitempty"`       // there
	ContainerID string       `json:"containerID"`
	Addrs       []netip.Addr `json:"addrs,omitempty"` // empty while it is not attached
	MTU         int          `json:"mtu,omitempty"`   // bytes
}

// String returns HOST/POD.
func (p Pod) String() string { return p.Host + "/" + p.Name }

func dir(lab string) string { return filepath.Join(Root, lab) }

// namespaces lists every namespace that the lab has or may have.
func (s *state) namespaces() []string {
	names := []string{s.Name + "-" + spineName}
	for _, r := range s.Topology.routers() {
		names = append(names, s.Name+"-"+r)
	}
	for _, n := range s.Topology.Nodes {
		names = append(names, s.Name+"-"+n.Name)
	}
	for _, p := range s.Pods {
		names = append(names, s.Name+"-"+p.Host+"-"+p.Name)
	}
	return names
}

func (s *state) pod(host, name string) int {
	return slices.IndexFunc(s.Pods, func(p Pod) bool { return p.Host == host && p.Name == name })
}

// readState reads a lab's state. It matches [fs.ErrNotExist] when there is no
// such lab.
func readState(lab string) (*state, error) {
	b, err := os.ReadFile(filepath.Join(dir(lab), stateFile))
	if err != nil {
		return nil, fmt.Errorf("read state of lab %s: %w", lab, err)
	}
	s := new(state)
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("read state of lab %s: %w", lab, err)
	}
	return s, nil
}

// writeState replaces the file in one step: a reader, or the next process after
// a kill, sees the old state or the new one.
func writeState(s *state) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("write state of lab %s: %w", s.Name, err)
	}
	return atomicfile.Write(filepath.Join(dir(s.Name), stateFile), append(b, '\n'), 0o600)
}

// updateState changes the state under a lock, so that several processes may
// work on one lab.
func updateState(lab string, change func(*state) error) (*state, error) {
	f, err := os.OpenFile(filepath.Join(dir(lab), lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock state of lab %s: %w", lab, err)
	}
	defer f.Close()
	if err := flock(f, unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock state of lab %s: %w", lab, err)
	}
	s, err := readState(lab)
	if err != nil {
		return nil, err
	}
	if err := change(s); err != nil {
		return nil, err
	}
	return s, writeState(s)
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// lockLab takes the lab for one that makes or removes it (exclusive), or for
// one that works on its hosts and pods (shared), and waits for those that have
// it. The lock ends with the process. create makes the lab's directory.
func lockLab(ctx context.Context, lab string, exclusive, create bool) (release func(), err error) {
	how := unix.LOCK_SH | unix.LOCK_NB
	if exclusive {
		how = unix.LOCK_EX | unix.LOCK_NB
	}
	for {
		if create {
			if err := os.MkdirAll(dir(lab), 0o700); err != nil {
				return nil, fmt.Errorf("lock lab %s: %w", lab, err)
			}
		}
		f, err := os.Open(dir(lab))
		if err != nil {
			return nil, fmt.Errorf("lock lab %s: %w", lab, err)
		}
		err = flock(f, how)
		if err == nil && sameFile(f, dir(lab)) {
			return func() { f.Close() }, nil
		}
		f.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock lab %s: %w", lab, err)
		}
		// Another has it, or removed it while we waited.
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return nil, fmt.Errorf("lock lab %s, which another command works on: %w", lab, err)
		}
	}
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

// pause waits, or returns ctx's error.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// List returns the names of the labs of this machine in order, those that were
// left half made included.
func List() ([]string, error) {
	entries, err := os.ReadDir(Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
