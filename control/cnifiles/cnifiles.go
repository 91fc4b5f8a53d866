// Package cnifiles keeps the CNI plugin and its configuration where the container
// runtime looks for them.
package cnifiles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/dirwatch"
)

const (
	// poll is how often the host is asked whether it attaches workloads, until the files
	// are there, and how often they are put back at most.
	poll = time.Second
	// unwatchedPoll is how often the files are looked at where the kernel lets nobody
	// watch their directories.
	unwatchedPoll = 5 * time.Second
)

// Keeper puts the files in place as soon as workloads can be attached, and puts them
// back when something removes or changes them: what is there makes a kubelet start
// pods. They stay when the daemon stops.
type Keeper struct {
	Files cni.InstallOptions
	Ready func() error // nil: workloads can be attached
	Log   *slog.Logger

	seen   string // the files, as they were when nothing had to be done
	failed string // the last error
}

// Run keeps the files until ctx ends, whose error it returns.
func (k *Keeper) Run(ctx context.Context) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for k.Ready() != nil || k.install() != nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	changed := async.NewSignal()
	watching := make(chan struct{})
	inner, cancel := context.WithCancel(ctx)
	defer func() { cancel(); <-watching }()
	go func() {
		defer close(watching)
		k.watch(inner, changed.Set)
	}()
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		// Once a second at most: another program may insist on files of its own.
		for again := true; again; {
			again = k.look() != nil
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// watch calls changed when a file may have changed, until ctx ends.
func (k *Keeper) watch(ctx context.Context, changed func()) {
	w := dirwatch.Watch{Open: dirwatch.Open, Dirs: []string{k.Files.BinDir, k.Files.ConfDir}, Changed: changed, Interval: unwatchedPoll, Refused: func(err error) {
		if err != nil {
			k.Log.Debug("the files of the CNI plugin are looked at from time to time", "interval", unwatchedPoll, "error", err)
		}
	}}
	w.Run(ctx)
}

// look puts the files back if they are not what they were.
func (k *Keeper) look() error {
	if k.seen != "" && k.state() == k.seen {
		return nil
	}
	return k.install()
}

func (k *Keeper) install() error {
	now := k.state()
	files, err := cni.Install(k.Files)
	if len(files) > 0 {
		k.Log.Info("the CNI plugin is in place", "changed", files)
	}
	if k.seen = ""; err == nil && len(files) == 0 {
		k.seen = now
	}
	if err == nil {
		k.failed = ""
		return nil
	}
	if err.Error() != k.failed {
		k.failed = err.Error()
		k.Log.Error("the CNI plugin cannot be put in place; will try again", "error", err)
	}
	return err
}

// state tells apart what is there of the plugin's files: by size and time, for other
// plugins have the same directories.
func (k *Keeper) state() string {
	var b strings.Builder
	for _, path := range []string{
		filepath.Join(k.Files.BinDir, cni.PluginType), filepath.Join(k.Files.BinDir, cni.LoopbackType), filepath.Join(k.Files.ConfDir, cni.ConflistName),
	} {
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			fmt.Fprintln(&b, path, "missing")
		case err != nil:
			fmt.Fprintln(&b, path, err)
		default:
			fmt.Fprintln(&b, path, info.Size(), info.Mode(), info.ModTime())
		}
	}
	return b.String()
}
