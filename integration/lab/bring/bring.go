// Package bring has labs that go with a test: brought up for it, taken down after
// it, and looked after when the test binary was killed.
package bring

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/labtest"
)

// downTime is how long a lab may take to go.
const downTime = time.Minute

// Up brings a lab up, with programs of a directory, that goes with the test. What
// its daemons logged is shown when the test fails, and what is left of the lab
// fails it. Prefixes keep the labs of test binaries apart: they are a few letters.
func Up(t *testing.T, limit time.Duration, prefix, suffix string, top lab.Topology, binDir string) *lab.Lab {
	t.Helper()
	return UpWith(t, limit, prefix, suffix, lab.Options{Topology: top, BinDir: binDir})
}

// UpWith is [Up] with options, of which it sets the name.
func UpWith(t *testing.T, limit time.Duration, prefix, suffix string, o lab.Options) *lab.Lab {
	t.Helper()
	name := fmt.Sprintf("%s%d-%s", prefix, os.Getpid(), suffix)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	start := time.Now()
	o.Name = name
	l, err := lab.Up(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("lab %s is up after %.1f s", name, time.Since(start).Seconds())
	t.Cleanup(func() {
		if t.Failed() {
			for _, h := range append(l.Hosts(), "spine") {
				t.Logf("the last lines of %s's log:\n%s", h, l.LogTail(h, 60))
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), downTime)
		defer cancel()
		if err := l.Down(ctx); err != nil {
			t.Error(err)
		}
		labtest.NothingLeft(t, name, filepath.Join(lab.Root, name))
	})
	return l
}

// BinDir is where the programs are that labs run: $ROUTERD_BIN, or bin/ of the tree as a
// package of integration sees it.
func BinDir() string {
	if d := os.Getenv("ROUTERD_BIN"); d != "" {
		return d
	}
	return filepath.Join("..", "..", "bin")
}

// Main runs the tests of a package whose labs have a prefix, or says what is missing to
// run any, and returns the exit code.
func Main(m *testing.M, prefix string) int {
	flag.Parse()
	if err := ready(prefix); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func ready(prefix string) error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run the tests with sudo")
	}
	for _, p := range []string{"routerd", "routerd-cni", "routerctl"} {
		if _, err := os.Stat(filepath.Join(BinDir(), p)); err != nil {
			return fmt.Errorf("%w: run \"make build\" first, or say by ROUTERD_BIN where the programs are", err)
		}
	}
	return RemoveOrphans(prefix)
}

// RemoveOrphans removes labs with a prefix of test binaries that were killed.
func RemoveOrphans(prefix string) error {
	names, err := lab.List()
	if err != nil {
		return err
	}
	for _, n := range names {
		if !Orphaned(prefix, n) {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), downTime)
		err = lab.Down(ctx, n)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// Orphaned reports whether a name is the prefix, the number of a process that is gone, and
// a dash with more behind it: of what a test binary made that was killed.
func Orphaned(prefix, name string) bool {
	rest, ours := strings.CutPrefix(name, prefix)
	number, _, named := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(number)
	return ours && named && err == nil && pid > 0 && unix.Kill(pid, 0) != nil
}
