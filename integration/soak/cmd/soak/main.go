// Command soak lets a cluster live through changes and faults for a
// time, and says what it went through. docs/reliability.md says how to read it. It
// needs root, and the programs of make build.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/soak"
	"github.com/routerd/routerd/store"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// logLines is how much of each host's log is shown with an error: what led to it may be
// some groups of changes back.
const logLines = 400

// downTime is how long the lab may take to go.
const downTime = time.Minute

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	fs := flag.NewFlagSet("soak", flag.ContinueOnError)
	fs.SetOutput(stderr)
	binDir := fs.String("bin", cmp.Or(os.Getenv("ROUTERD_BIN"), "bin"), "`directory` of the programs")
	length := fs.Duration("for", 10*time.Minute, "least `time` of the run")
	seed := fs.Uint64("seed", rand.Uint64(), "`number` from which the changes follow")
	members := 1
	fs.Func("members", "`number` of the datastore's members, 1 or 3: the first hosts (default 1)", func(v string) error {
		if v != "1" && v != "3" {
			return errors.New("want 1 or 3")
		}
		members = int(v[0] - '0')
		return nil
	})
	dual := fs.Bool("dual", false, "pods and hosts have an address of each family")
	modes := soak.Modes()
	fs.Func("modes", "`modes` of the pool, with commas between them (default VXLANCrossSubnet,VXLAN,Direct)", func(v string) error {
		modes = nil
		for n := range strings.SplitSeq(v, ",") {
			e, err := store.ParseEncapsulation(n)
			if err != nil {
				return err
			}
			if all := soak.Modes(); !slices.Contains(all, e) {
				return fmt.Errorf("want one of %v", all)
			}
			modes = append(modes, e)
		}
		return nil
	})
	if err := fs.Parse(args); err != nil {
		return err
	}
	l, err := lab.Up(ctx, lab.Options{Name: fmt.Sprintf("so%d", os.Getpid()), Topology: soak.Topology(modes[0], members, *dual), BinDir: *binDir})
	if err != nil {
		return err
	}
	down := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTime)
		defer cancel()
		return l.Down(ctx)
	}
	defer func() { err = errors.Join(err, down()) }()
	hosts := l.Hosts()
	undo, err := soak.SmallDisks(ctx, l, members)
	if undo != nil {
		defer func() { err = errors.Join(err, undo()) }()
	}
	if err != nil {
		return err
	}
	report, err := soak.Run(ctx, soak.Options{Lab: l, BinDir: *binDir, Seed: *seed, For: *length, Modes: modes, Members: members, Log: slog.New(slog.NewTextHandler(stderr, nil))})
	fmt.Fprint(stdout, report)
	if err != nil {
		for _, h := range hosts {
			fmt.Fprintf(stderr, "the last lines of %s's log:\n%s\n", h, l.LogTail(h, logLines))
		}
	}
	return err
}
