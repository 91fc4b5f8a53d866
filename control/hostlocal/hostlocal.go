// Package hostlocal reads, and frees in, what the CNI plugin host-local has given on this
// host: the addresses of pods that flannel, kube-router or the bridge plugin attached.
// For each address it keeps a file of that name in a directory of each network, whose
// first line is the container's id and whose second the interface in it
// (https://www.cni.dev/plugins/current/ipam/host-local/).
package hostlocal

import (
	"context"
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

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/dirwatch"
)

// Store is host-local's directory (its dataDir), in which each network has one:
// /var/lib/cni/networks unless the network says otherwise. One that does not exist is
// empty.
type Store string

// Addresses returns what is given, in ascending order, each once.
func (s Store) Addresses() ([]netip.Addr, error) {
	var out []netip.Addr
	err := s.each(func(_ string, a netip.Addr) error {
		out = append(out, a)
		return nil
	})
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), err
}

// Release frees what a container has, as host-local does it: under the lock of the
// network, for which it waits until ctx ends, [lockWait] at most. One that has nothing is
// no error.
func (s Store) Release(ctx context.Context, container string) error {
	if container == "" {
		return errors.New("release addresses of host-local: the container's id is missing")
	}
	return s.each(func(file string, _ netip.Addr) error {
		if owner, err := ownerOf(file); err != nil || owner != container {
			return err
		}
		unlock, err := lock(ctx, filepath.Dir(file))
		if err != nil {
			return err
		}
		defer unlock()
		// It may be another's by now.
		if owner, err := ownerOf(file); err != nil || owner != container {
			return err
		}
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("release address of host-local: %w", err)
		}
		return nil
	})
}

// each calls do with every address and its file. What is no address, such as
// last_reserved_ip.0 and lock, is passed over.
func (s Store) each(do func(file string, a netip.Addr) error) error {
	dirs, err := s.networks()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		files, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("read addresses of host-local: %w", err)
		}
		for _, f := range files {
			a, err := netip.ParseAddr(f.Name())
			if err != nil || a.Zone() != "" {
				continue
			}
			if err := do(filepath.Join(dir, f.Name()), a.Unmap()); err != nil {
				return err
			}
		}
	}
	return nil
}

// networks are the directories of the networks.
func (s Store) networks() ([]string, error) {
	all, err := os.ReadDir(string(s))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read networks of host-local: %w", err)
	}
	var out []string
	for _, d := range all {
		if d.IsDir() {
			out = append(out, filepath.Join(string(s), d.Name()))
		}
	}
	return out, nil
}

// ownerOf reads whose an address is; empty: it was freed.
func ownerOf(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read address of host-local: %w", err)
	}
	owner, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	return strings.TrimSpace(owner), nil
}

const (
	// lockWait bounds the wait for a network's lock: host-local has it for milliseconds, and
	// whoever waits here holds up a container's DEL.
	lockWait = 10 * time.Second
	// lockRetry is how often the lock is tried: flock(2) that waits cannot be ended.
	lockRetry = 10 * time.Millisecond
)

// lock takes the lock of a network: flock(2) of its file of that name.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock addresses of host-local: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = f.Close() }, nil // which unlocks it
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			if err = async.Sleep(ctx, lockRetry); err == nil {
				continue
			}
			err = fmt.Errorf("%s is held by another process (lslocks names it): %w", path, err)
		}
		return nil, errors.Join(fmt.Errorf("lock addresses of host-local: %w", err), f.Close())
	}
}

// unwatched is how often the store is read where the kernel lets nobody watch it.
const unwatched = 5 * time.Second

// Follow calls changed whenever the store may have changed, and once at the start, until
// ctx ends.
func (s Store) Follow(ctx context.Context, changed func()) {
	lists := make(chan []string, 1)
	w := dirwatch.Watch{Open: dirwatch.Open, Dirs: s.watched(), Lists: lists, Interval: unwatched, Changed: func() {
		// A network that is new has a directory of its own.
		select {
		case lists <- s.watched():
		default: // the list before is not taken yet, and taking it calls this again
		}
		changed()
	}}
	w.Run(ctx)
}

// watched are the directories to be watched. That of all networks alone is where they
// cannot be read.
func (s Store) watched() []string {
	dirs, _ := s.networks()
	return append(dirs, string(s))
}
