package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/archive"
	"github.com/routerd/routerd/store/etcd"
)

func (a datastoreCommands) exportCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "export",
		Short: "Export the datastore to a file",
		Long: `Export every key of Calico and routerd in the datastore, as stored and as of one
moment, to a file for "routerctl datastore import": resources, records of IPAM, and
what other programs keep below /calico/. Keys that running daemons hold by a lease are
left out. The file is text, with one line for each key, and ends with a checksum.

The file contains the secrets of the cluster: keep it safe. To copy a datastore in
use, lock it first, so that no address is assigned after the copy.

The Kubernetes datastore (DATASTORE_TYPE=kubernetes) must be locked. Its export has
what etcd would hold, and can be imported there.`,
		Example: "  routerctl datastore lock\n  routerctl datastore export -o cluster.jsonl\n  routerctl datastore export | zstd > cluster.jsonl.zst",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write := func(export func(io.Writer) (int, error)) error {
				n := 0
				err := a.writeFile(file, func(w io.Writer) (err error) { n, err = export(w); return err })
				if err == nil && file != "" {
					fmt.Fprintf(a.stdout, "Exported %d keys to %s.\n", n, file)
				}
				return err
			}
			if is, err := a.kubernetes(); err != nil {
				return err
			} else if is {
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
					return write(func(w io.Writer) (int, error) { return exportObjects(ctx, s, w) })
				})
			}
			return a.withEtcd(cmd, func(ctx context.Context, s *etcd.Store) error {
				return write(func(w io.Writer) (int, error) { return export(ctx, s, w) })
			})
		},
	}
	c.Flags().StringVarP(&file, "output", "o", "", "file to write, readable only by its owner (default standard output)")
	return c
}

func export(ctx context.Context, s *etcd.Store, w io.Writer) (keys int, err error) {
	info, rev, err := s.List(ctx, store.KindClusterInformation, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return 0, err
	}
	h := archive.Header{Revision: rev, Time: time.Now().UTC().Truncate(time.Second)}
	for _, o := range info {
		h.ClusterGUID = o.Value.(*v3.ClusterInformation).Spec.ClusterGUID
	}
	out, err := archive.NewWriter(w, h)
	if err != nil {
		return 0, err
	}
	err = s.Raw(ctx, rev, func(k etcd.RawKey) error {
		keys++
		return out.Write(archive.Entry{Path: k.Path, Value: k.Value})
	})
	if err != nil {
		return keys, err
	}
	return keys, out.Close()
}

// kubernetes reports whether the datastore is Kubernetes' API.
func (a datastoreCommands) kubernetes() (bool, error) {
	d, err := a.direct()
	return d.kube != nil, err
}

// exportObjects writes what Kubernetes' API holds, which is of one moment only while nobody
// writes.
func exportObjects(ctx context.Context, s store.Store, w io.Writer) (int, error) {
	info, err := s.Get(ctx, clusterInformation())
	if err != nil {
		return 0, err
	}
	if !isLocked(info) {
		return 0, errNotLocked
	}
	entries, err := archive.Objects(ctx, s)
	if err != nil {
		return 0, err
	}
	h := archive.Header{ClusterGUID: info.Value.(*v3.ClusterInformation).Spec.ClusterGUID, Time: time.Now().UTC().Truncate(time.Second)}
	out, err := archive.NewWriter(w, h)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		if err := out.Write(e); err != nil {
			return 0, err
		}
	}
	return len(entries), out.Close()
}

func clusterInformation() store.Key {
	return store.ResourceKey(store.KindClusterInformation, store.DefaultName)
}

// isLocked reports whether a ClusterInformation says that the datastore is locked.
func isLocked(o store.Object) bool {
	info, ok := o.Value.(*v3.ClusterInformation)
	return ok && info.Spec.DatastoreReady != nil && !*info.Spec.DatastoreReady
}

var errNotLocked = errors.New("the datastore is not locked, so hosts may write to it meanwhile; lock it first with `routerctl datastore lock`")

func (a datastoreCommands) importCommand() *cobra.Command {
	var file string
	var replace, dryRun bool
	c := &cobra.Command{
		Use:   "import -f FILE",
		Short: "Import an exported file into the datastore",
		Long: `Import the keys of a file written by "routerctl datastore export", unchanged, after
checking the file. The datastore stays locked until "routerctl datastore unlock".

The datastore must be empty, or hold only keys of the file. With --replace it need
only be locked, and ends up with exactly the keys of the file. An interrupted import
leaves part of the keys written; run it again with --replace.

Into the Kubernetes datastore (DATASTORE_TYPE=kubernetes) only objects that have a
place there are written; of Nodes and pods, only what routerd records on them.
Whatever other objects of Kubernetes represent, such as namespaces for profiles, is
left out and counted.`,
		Example: "  routerctl datastore import -f cluster.jsonl\n  routerctl datastore lock && routerctl datastore import -f cluster.jsonl --replace --dry-run\n  routerctl datastore unlock",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := readArchive(a.stdin, file)
			if err != nil {
				return err
			}
			if is, err := a.kubernetes(); err != nil {
				return err
			} else if is {
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
					return a.loadObjects(ctx, s, from, archive.Loading{Replace: replace, DryRun: dryRun})
				})
			}
			return a.withEtcd(cmd, func(ctx context.Context, s *etcd.Store) error { return a.load(ctx, s, from, replace, dryRun) })
		},
	}
	f := c.Flags()
	f.StringVarP(&file, "filename", "f", "", "file written by export, or - for standard input")
	f.BoolVar(&replace, "replace", false, "replace the content of the datastore with the keys of the file")
	f.BoolVar(&dryRun, "dry-run", false, "print what would be written, but write nothing")
	return c
}

func readArchive(stdin io.Reader, file string) (*archive.Archive, error) {
	in := stdin
	switch file {
	case "":
		return nil, usagef("name the file that `routerctl datastore export` wrote with -f FILE, or - for standard input")
	case "-":
		file = "standard input"
	default:
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close() //nolint:errcheck // it was only read
		in = f
	}
	from, err := archive.Read(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return from, nil
}

func (a datastoreCommands) load(ctx context.Context, s *etcd.Store, from *archive.Archive, replace, dryRun bool) error {
	entries, err := toLoad(ctx, s, from, replace)
	if err != nil {
		return err
	}
	l := etcd.Loading{Replace: replace, DryRun: dryRun}
	for _, e := range entries {
		l.Keys = append(l.Keys, etcd.RawKey{Path: e.Path, Value: e.Value})
	}
	done, err := s.Load(ctx, l)
	if err != nil {
		return holdsElse(err)
	}
	if dryRun {
		fmt.Fprintf(a.stdout, "Would write %d keys, remove %d, and leave %d as they are. Nothing was written (--dry-run)\n", done.Written, done.Removed, done.Same)
		return nil
	}
	fmt.Fprintf(a.stdout, "Imported %d keys: %d written, %d were there already, %d others removed.\nThe datastore is locked; let hosts use it with `routerctl datastore unlock`.\n",
		len(from.Entries), done.Written, done.Same, done.Removed)
	return nil
}

// toLoad returns what a file has for a datastore, with the lock set.
func toLoad(ctx context.Context, s store.Store, from *archive.Archive, replace bool) ([]archive.Entry, error) {
	have, err := s.Get(ctx, clusterInformation())
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	if replace && err == nil && !isLocked(have) {
		return nil, errNotLocked
	}
	out := slices.Clone(from.Entries)
	for i, e := range out {
		if e.Path == clusterInformation().Path() {
			if out[i].Value, err = locked(clusterInformation(), e.Value); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// holdsElse explains an error of loading.
func holdsElse(err error) error {
	if errors.Is(err, store.ErrExists) {
		return fmt.Errorf("the datastore holds something else already (%w); to have it hold what the file says and nothing else, give --replace", err)
	}
	return err
}

// loadObjects writes what a file has into Kubernetes' API.
func (a datastoreCommands) loadObjects(ctx context.Context, s store.Store, from *archive.Archive, l archive.Loading) error {
	entries, err := toLoad(ctx, s, from, l.Replace)
	if err != nil {
		return err
	}
	done, err := l.Into(ctx, s, entries)
	if err != nil {
		return holdsElse(err)
	}
	for _, why := range slices.Sorted(maps.Keys(done.Left)) {
		paths := done.Left[why]
		fmt.Fprintf(a.stdout, "Left out %d keys, such as %s: %s.\n", len(paths), paths[0], why)
	}
	if l.DryRun {
		fmt.Fprintf(a.stdout, "Would write %d objects, remove %d, and leave %d as they are. Nothing was written (--dry-run)\n", done.Written, done.Removed, done.Same)
		return nil
	}
	fmt.Fprintf(a.stdout, "Imported: %d objects written, %d were there already, %d others removed.\nThe datastore is locked; let hosts use it with `routerctl datastore unlock`.\n",
		done.Written, done.Same, done.Removed)
	return nil
}

// locked returns the value of the ClusterInformation with the lock set.
func locked(key store.Key, raw []byte) ([]byte, error) {
	v, err := store.Decode(key, raw)
	if err != nil {
		return nil, fmt.Errorf("the file: %w", err)
	}
	ready := false
	v.(*v3.ClusterInformation).Spec.DatastoreReady = &ready
	return store.Encode(key, v, raw)
}

// writeFile has a file written whole or not at all; "" and "-" are standard output.
// What is written there goes out as it is.
func (a *app) writeFile(name string, write func(io.Writer) error) error {
	if name == "" || name == "-" {
		return write(a.rawOut)
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer os.Remove(f.Name())
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err == nil {
		err = atomicfile.SyncDir(filepath.Dir(name))
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
