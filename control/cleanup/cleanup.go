// Package cleanup removes from a host what routerd put there, and nothing else.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/hostlock"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/dataplane/sourceport"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// Config says what is routerd's on a host, beside what carries its mark in the kernel.
type Config struct {
	Protocol   uint8  // of its routes
	Sysctls    string // directory
	RunDir     string // goes when it is empty
	StateDir   string // goes with Purge
	Purge      bool
	JournalDir string // of workloads
	// Files are routerd's whatever is in them, as are those that match Patterns.
	Files, Patterns []string
	// Written are files that others write too.
	Written []File
	// Workloads says that wires go whose workloads are still attached, and have no network then.
	Workloads bool
	// Node is this host's name in the datastore, which Datastore opens for a function; nil: it
	// is this host's own, and stopped.
	Node      func() (string, error)
	Datastore func(context.Context, func(context.Context, store.Store) error) error
	// Condition returns what routerd says of the network on this host's Node in Kubernetes, if it
	// says something, and takes it away if told to; nil: there is no Kubernetes.
	Condition func(ctx context.Context, node string, remove bool) (string, error)
	Out       io.Writer
}

// File is one that goes only while it is as routerd wrote it.
type File struct {
	Path string
	Ours func(content []byte) bool
}

// cleanup is one run.
type cleanup struct {
	cfg    Config
	kernel *kernel.Kernel
	wire   *workload.Wire
	wires  []string // devices on the host's side
}

// thing is something of routerd's on this host.
type thing struct {
	what   string
	remove func(context.Context) error // nil: goes with those of the kernel's tables
}

// Run lists what there is, and removes it if agreed, called with the number,
// returns true. Without agreed nothing is removed.
func Run(ctx context.Context, c Config, agreed func(n int) bool) error {
	cl := &cleanup{cfg: c}
	unlock, err := cl.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	cl.kernel, err = kernel.New(kernel.Config{
		Protocol: cl.cfg.Protocol, Sysctls: cl.cfg.Sysctls, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	defer cl.kernel.Close()
	if cl.wire, err = workload.New(workload.Config{Sysctls: cl.cfg.Sysctls}); err != nil {
		return err
	}
	defer cl.wire.Close()

	things, err := cl.find(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(things) == 0:
		fmt.Fprintln(cl.cfg.Out, "nothing of routerd's is on this host")
		return nil
	case agreed == nil:
		cl.list("would remove", things)
		return nil
	}
	cl.list("to be removed:", things)
	if n := len(cl.wires); n > 0 && !cl.cfg.Workloads {
		return fmt.Errorf("nothing was removed: %d workloads are attached, which would have no network (%s): move them away first (kubectl drain), or say --force", n, strings.Join(cl.wires[:min(n, 5)], " "))
	}
	if !agreed(len(things)) {
		return errors.New("nothing was removed")
	}
	return cl.removeAll(ctx, things)
}

// lock makes sure that no daemon runs, and that none starts before unlock.
func (cl *cleanup) lock(ctx context.Context) (unlock func(), err error) {
	alone, err := hostlock.Namespace(ctx)
	if err != nil {
		return nil, hostlock.NamespaceHeld(ctx, err)
	}
	// Without the file no daemon ever used the directory; it is not made here.
	if _, err := os.Stat(hostlock.File(cl.cfg.RunDir)); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return func() { _ = alone.Close() }, nil
	}
	host, err := hostlock.Dir(cl.cfg.RunDir)
	if err != nil {
		return nil, errors.Join(hostlock.DirHeld(cl.cfg.RunDir, err), alone.Close())
	}
	return func() { _, _ = host.Close(), alone.Close() }, nil
}

func (cl *cleanup) list(verb string, things []thing) {
	for _, t := range things {
		fmt.Fprintln(cl.cfg.Out, verb, t.what)
	}
}

// find lists what there is of routerd's, in the order of removal.
func (cl *cleanup) find(ctx context.Context) ([]thing, error) {
	var things []thing
	objects, err := cl.kernel.Leftovers(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		things = append(things, thing{what: describeLeftover(o)})
	}
	wires, err := cl.wire.Marked(ctx)
	if err != nil {
		return nil, err
	}
	cl.wires = wires
	for _, name := range wires {
		things = append(things, thing{"link " + name + " type veth", func(ctx context.Context) error { return cl.wire.RemoveMarked(ctx, name) }})
	}
	for _, table := range []string{nft.TableName, nft.OffloadTable, sourceport.TableName} {
		found, err := cl.kernel.DeleteTable(table, true)
		if err != nil {
			return nil, err
		}
		if found {
			things = append(things, thing{"nftables table inet " + table, func(context.Context) error {
				_, err := cl.kernel.DeleteTable(table, false)
				return err
			}})
		}
	}
	protocol := cl.cfg.Protocol
	switch n, err := rule.Sweep(protocol, true); {
	case err != nil:
		return nil, err
	case n > 0:
		things = append(things, thing{fmt.Sprintf("rules that look into table %d: %d", rule.Table, n), func(context.Context) error {
			_, err := rule.Sweep(protocol, false)
			return err
		}})
	}
	held, err := cl.reserve(ctx)
	if err != nil {
		return nil, err
	}
	said, err := cl.condition(ctx)
	if err != nil {
		return nil, err
	}
	files, err := cl.files()
	return slices.Concat(things, held, said, files), err
}

// describeLeftover shows an object as ip(8) does.
func describeLeftover(o dataplane.Object) string {
	what := o.Key().Kind().String() + " " + o.String()
	if l, ok := o.Key().(dataplane.LinkKey); ok && l.Name == "tunl0" {
		what += " (the kernel's own: it is set down and stays)"
	}
	return what
}

// files lists the files that routerd wrote.
func (cl *cleanup) files() ([]thing, error) {
	var things []thing
	add := func(path string) {
		things = append(things, thing{"file " + path, func(context.Context) error { return os.Remove(path) }})
	}
	for _, f := range cl.cfg.Written {
		switch b, err := os.ReadFile(f.Path); {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR):
		case err != nil:
			return nil, err
		case f.Ours(b):
			add(f.Path)
		default:
			fmt.Fprintf(cl.cfg.Out, "left alone: %s was changed since routerd wrote it\n", f.Path)
		}
	}
	run := slices.Clone(cl.cfg.Files)
	for _, pattern := range cl.cfg.Patterns {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		run = append(run, found...)
	}
	var left []string // of writes that a kill ended
	for _, path := range run {
		list, err := atomicfile.Leftovers(path)
		if err != nil {
			return nil, err
		}
		left = append(left, list...)
	}
	for _, path := range append(run, left...) {
		if _, err := os.Lstat(path); err == nil {
			add(path)
		}
	}
	if state, err := os.ReadDir(cl.cfg.StateDir); err == nil && len(state) > 0 && cl.cfg.Purge {
		things = append(things, thing{"directory " + cl.cfg.StateDir, func(context.Context) error { return removeDir(cl.cfg.StateDir) }})
	}
	return things, nil
}

// removeDir removes a directory with all that is in it. One that is mounted, as in a container, stays
// and is empty.
func removeDir(dir string) error {
	list, err := os.ReadDir(dir)
	errs := []error{err}
	for _, e := range list {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	if err := os.Remove(dir); !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EROFS) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// NamesOurProtocol reports whether a file of rt_protos.d says nothing but the
// name of routerd's protocol.
func NamesOurProtocol(b []byte) bool {
	found := false
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || strings.HasPrefix(f[0], "#"):
		case len(f) == 2 && f[1] == "routerd":
			found = true
		default:
			return false
		}
	}
	return found
}

// removeAll removes what was found. One thing that cannot be removed does not
// stop the others.
func (cl *cleanup) removeAll(ctx context.Context, things []thing) error {
	left, err := cl.kernel.Sweep(ctx)
	errs := []error{err}
	stays := map[string]bool{}
	for _, o := range left {
		stays[describeLeftover(o)] = true
	}
	n := 0
	for _, t := range things {
		if t.remove == nil {
			if stays[t.what] {
				continue
			}
		} else if err := t.remove(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove %s: %w", t.what, err))
			continue
		}
		n++
		fmt.Fprintln(cl.cfg.Out, "removed", t.what)
	}
	// Whoever put something else there keeps it.
	_ = os.Remove(cl.cfg.RunDir)
	fmt.Fprintf(cl.cfg.Out, "%d of %d things removed\n", n, len(things))
	return errors.Join(errs...)
}

// reserveWithin bounds the search for the datastore, and for Kubernetes: cleanup goes on without
// them.
const reserveWithin = 5 * time.Second

// condition lists what this host's Node in Kubernetes says of the network, which nobody else takes
// back: it may keep pods away.
func (cl *cleanup) condition(ctx context.Context) ([]thing, error) {
	if cl.cfg.Condition == nil {
		return nil, nil
	}
	node, err := cl.cfg.Node()
	if err != nil {
		return nil, err
	}
	look, cancel := context.WithTimeout(ctx, reserveWithin)
	defer cancel()
	what, err := cl.cfg.Condition(look, node, false)
	if err != nil {
		fmt.Fprintf(cl.cfg.Out, "left alone: what the Node %s says of the network, for Kubernetes cannot be asked (%v); run this again when it can\n", node, err)
		return nil, nil
	}
	if what == "" {
		return nil, nil
	}
	return []thing{{"condition " + what + " of the Node " + node, func(ctx context.Context) error {
		_, err := cl.cfg.Condition(ctx, node, true)
		return err
	}}}, nil
}

// reserve lists the addresses that this host holds ready in the datastore. Where
// that cannot be reached they stay, and it is said how they go.
func (cl *cleanup) reserve(ctx context.Context) ([]thing, error) {
	if cl.cfg.Datastore == nil {
		return nil, nil // it is stopped, and no other host is short of them
	}
	node, err := cl.cfg.Node()
	if err != nil {
		return nil, err
	}
	look, cancel := context.WithTimeout(ctx, reserveWithin)
	defer cancel()
	n := 0
	err = cl.cfg.Datastore(look, func(ctx context.Context, s store.Store) (err error) {
		n, err = ipam.Held(ctx, s, node)
		return err
	})
	if err != nil {
		fmt.Fprintf(cl.cfg.Out, "left alone: the addresses that node %s holds ready, for the datastore cannot be reached (%v); run this again when it can, or give them back with routerctl delete node %s\n", node, err, node)
		return nil, nil
	}
	if n == 0 {
		return nil, nil
	}
	return []thing{{fmt.Sprintf("reserve of %d addresses in the datastore", n), func(ctx context.Context) error {
		if err := cl.forgetReserve(); err != nil {
			return err
		}
		return cl.cfg.Datastore(ctx, func(ctx context.Context, s store.Store) error {
			_, err := ipam.GiveBack(ctx, s, node)
			return err
		})
	}}}, nil
}

// forgetReserve has this host forget what it holds ready.
func (cl *cleanup) forgetReserve() error {
	path := filepath.Join(cl.cfg.JournalDir, "journal")
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	j, err := journal.Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	return errors.Join(ipam.ForgetReserve(j), j.Close())
}
