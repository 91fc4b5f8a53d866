package runtimes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/ns"
)

// prefix begins the names of the hosts' directories, and of all network namespaces, before
// the number of the process that made them.
const prefix = "rdrt"

func TestMain(m *testing.M) {
	if err := removeOrphans(); err != nil {
		fmt.Fprintln(os.Stderr, "runtimes:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// removeOrphans removes what runs left that were killed, with the daemons and containers
// that still run in there.
func removeOrphans() error {
	spaces, err := orphansIn(ns.Dir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	if err := ns.KillAll(ctx, spaces...); err != nil {
		return err
	}
	for _, s := range spaces {
		if err := ns.Delete(s); err != nil {
			return err
		}
	}
	dirs, err := orphansIn(os.TempDir())
	for _, d := range dirs {
		err = errors.Join(err, os.RemoveAll(filepath.Join(os.TempDir(), d)))
	}
	return err
}

func orphansIn(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if bring.Orphaned(prefix, e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// TestOrphans: the next run removes what one left that was killed, and nothing of one that
// still runs.
func TestOrphans(t *testing.T) {
	t.Parallel()
	killed := exec.CommandContext(t.Context(), "true")
	if err := killed.Run(); err != nil {
		t.Fatal(err)
	}
	makes := func(pid int) (space, dir string) {
		space = fmt.Sprintf("%s%d-orphans", prefix, pid)
		dir = filepath.Join(os.TempDir(), space)
		if err := errors.Join(ns.Create(space), os.Mkdir(dir, 0o700)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := errors.Join(ns.Delete(space), os.RemoveAll(dir)); err != nil {
				t.Error(err)
			}
		})
		return space, dir
	}
	gone, goneDir := makes(killed.Process.Pid)
	here, hereDir := makes(os.Getpid())
	ctx := await.Context(t)
	left := exec.CommandContext(ctx, "sleep", "infinity")
	if err := ns.Start(gone, left); err != nil {
		t.Fatal(err)
	}
	if err := removeOrphans(); err != nil {
		t.Fatal(err)
	}
	if _ = left.Wait(); ctx.Err() != nil { // its status is that of the signal
		t.Error("what ran there goes on")
	}
	for _, path := range []string{ns.Path(gone), goneDir} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	for _, path := range []string{ns.Path(here), hereDir} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("of a run that goes on: %v", err)
		}
	}
}
