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
	"github.com/routerd/routerd/integration/await"
)

// TestFullDisk: on a full disk no workload starts, those that there are can end, also
// after the daemon was killed in the middle of a line, and node status says why.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	socket := filepath.Join(h.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	h.usesStore(socket)
	state := filepath.Join(h.dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", state, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(state, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
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
	others := filepath.Join(state, "others")
	f, err := os.Create(others)
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
	full := func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Journal")
		if c.GetOk() {
			return errors.New("all is well")
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
	f, err = os.OpenFile(journal, os.O_WRONLY|os.O_APPEND, 0)
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
		if c := conditionOf(n, "Journal"); !c.GetOk() {
			return errors.New(c.GetReason())
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
