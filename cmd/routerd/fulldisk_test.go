package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// smallDisk puts the files of the host's daemon on a disk of their own.
func (h *host) smallDisk(size string) (dir string) {
	h.t.Helper()
	dir = filepath.Join(h.dir, "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		h.t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			h.t.Error(err)
		}
	})
	return dir
}

// fill fills a disk with a file of somebody else's.
func fill(t *testing.T, dir, name string) (file string) {
	t.Helper()
	file = filepath.Join(dir, name)
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	for page := make([]byte, os.Getpagesize()); err == nil; {
		_, err = f.Write(page)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestFullDiskOfDatastore: a host whose own datastore ended because the disk is full is
// as one whose datastore is away, also after the daemon was killed. With room again the
// datastore runs again, with nothing lost.
func TestFullDiskOfDatastore(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	state := h.smallDisk("480m") // etcd allocates segments of 64 MiB for its log
	r := h.start()
	r.ready()
	for i := range 3 {
		if _, err := r.attach(fmt.Sprint("pod", i)); err != nil {
			t.Fatal(err)
		}
	}
	operators := filepath.Join(h.runDir(), config.OperatorSocketName)
	await.Until(t, "the datastore knows of all", func() error {
		_, endpoints, err := holders(t, h.store(operators))
		if err == nil && len(endpoints) != 3 {
			err = fmt.Errorf("there are %v", endpoints)
		}
		return err
	})
	others := fill(t, state, "others")
	wide := map[string]int{}
	for i := range 1000 {
		wide[fmt.Sprintf("10.%d.%d.0/26", i/256, i%256)] = 1
	}
	exhaust := func() {
		t.Helper()
		s := h.store(operators)
		for n := range 1000 {
			if _, err := s.Txn(await.Context(t), store.Op{Action: store.Put, Object: store.Object{Key: store.HandleKey(fmt.Sprint("wide", n)), Value: &store.Handle{Block: wide}}}); err != nil {
				return
			}
		}
		t.Fatal("the datastore takes more than the disk has")
	}
	exhaust()
	full := func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Datastore")
		if c.GetOk() {
			return errors.New("all is well")
		}
		return mentions(c.GetReason(), "disk of", "is full", "make room there")
	}
	r.when("the full disk is said", full)
	if err := r.detach("pod0"); err != nil {
		t.Errorf("DEL on a full disk: %v", err)
	}
	r.kill(syscall.SIGKILL)
	more := fill(t, state, "more") // an end may have made room
	r = h.start()
	r.when("the full disk is said after a kill", func(n *apiv1.NodeResponse) error {
		exhaust() // it may have come up once more
		return full(n)
	})
	await.Until(t, "DEL on a full disk, after the daemon was killed", func() error { return r.detach("pod1") })
	for _, f := range []string{others, more} {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if r.ended().Success() { // else systemd would not start it
		t.Error("the daemon ended as one that was asked to")
	}
	r = h.start()
	r.ready()
	if _, err := r.attach("late"); err != nil {
		t.Error(err)
	}
	await.Until(t, "the datastore knows of those that are left", func() error {
		held, endpoints, err := holders(t, h.store(operators))
		if err == nil && (len(endpoints) != 2 || len(held) != 2) {
			err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
		}
		return err
	})
}

// TestFullDisk: on a full disk no workload starts, those that there are can end, also
// after the daemon was killed in the middle of a line, and node status says why.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	socket := filepath.Join(h.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	h.usesStore(socket)
	state := h.smallDisk("8m")
	r := h.start()
	r.ready()
	for i := range 3 {
		if _, err := r.attach(fmt.Sprint("pod", i)); err != nil {
			t.Fatal(err)
		}
	}
	s := h.store(socket)
	await.Until(t, "the datastore knows of all", func() error {
		_, endpoints, err := holders(t, s)
		if err == nil && len(endpoints) != 3 {
			err = fmt.Errorf("there are %v", endpoints)
		}
		return err
	})
	others := fill(t, state, "others")
	full := func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Journal")
		if c.GetOk() {
			return errors.New("all is well")
		}
		if c := conditionOf(n, "Files"); c.GetOk() {
			return errors.New("all is well with the other files")
		}
		return mentions(c.GetReason(), "disk is full")
	}
	// Workloads start as long as what was kept lasts.
	started := 0
	await.Until(t, "ADD is refused", func() error {
		_, err := r.attach(fmt.Sprint("more", started))
		if err == nil {
			started++
			return errors.New("it is not")
		}
		if err := mentions(err.Error(), "disk is full"); err != nil {
			t.Error(err)
		}
		return nil
	})
	r.when("the full disk is said", full)
	if err := r.detach("pod0"); err != nil {
		t.Errorf("DEL on a full disk: %v", err)
	}
	r.kill(syscall.SIGKILL)
	journal := filepath.Join(state, "workloads", "journal")
	f, err := os.OpenFile(journal, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	// What a write that was cut short leaves.
	if _, err := f.WriteString("0123abcd {"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	r = h.start()
	r.ready()
	await.Until(t, "DEL on a full disk, after the daemon was killed", func() error { return r.detach("pod1") })
	if err := os.Remove(others); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "ADD with room again", func() error {
		_, err := r.attach("late")
		return err
	})
	r.when("all is said to be well", func(n *apiv1.NodeResponse) error {
		for _, name := range []string{"Journal", "Files"} {
			if c := conditionOf(n, name); !c.GetOk() {
				return errors.New(c.GetReason())
			}
		}
		return nil
	})
	await.Until(t, "the datastore knows of those that are left", func() error {
		held, endpoints, err := holders(t, s)
		if err == nil && (len(endpoints) != 2+started || len(held) != 2+started) {
			err = fmt.Errorf("%d more were started; held %v, endpoints %v", started, held, endpoints)
		}
		return err
	})
	if l := r.log.lines("level=ERROR", "panic"); len(l) > 0 {
		t.Errorf("log: %s", strings.Join(l, "\n"))
	}
}
