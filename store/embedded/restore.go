package embedded

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/etcdutl/v3/snapshot"

	"github.com/routerd/routerd/control/atomicfile"
)

// revisionBump is how far the revision jumps when a snapshot is restored. Those who
// have followed the store know revisions that the snapshot has not reached; with the
// jump theirs are compacted ones, and they read the state again. etcd's guide to
// recovery names this number.
const revisionBump = 1_000_000_000

// Restored is what [Restore] did.
type Restored struct {
	Revision int64  // of the snapshot
	Keys     int    // in it
	Previous string // where the data of before are now; empty: there were none
}

// Restore puts a snapshot, as etcd saves one, in the place of the data in c.Dir; Dir
// and Name of c count. No server may use the directory, and it refuses to work while
// one does. The data of before stay beside it, under another name. Killed at any
// point it leaves the data of before, the new ones, or, between two renames, both
// beside the place: then [Restore] again completes it.
func Restore(ctx context.Context, c Config, file string, now time.Time) (Restored, error) {
	r, err := restore(ctx, c, file, now)
	if err != nil {
		return Restored{}, fmt.Errorf("restore %s: %w", file, err)
	}
	return r, nil
}

func restore(ctx context.Context, c Config, file string, now time.Time) (r Restored, err error) {
	if c.Socket == "" {
		c.Socket = "/unused"
	}
	if err := c.complete(); err != nil {
		return r, err
	}
	if err := checkSum(file); err != nil {
		return r, err
	}
	lock, err := lockDir(c.Dir)
	if err != nil {
		return r, err
	}
	defer lock.Close()

	next := filepath.Clean(c.Dir) + ".restoring"
	if err := os.RemoveAll(next); err != nil { // of a run that was killed
		return r, err
	}
	defer os.RemoveAll(next)
	status, err := unpack(c, file, next)
	if err != nil {
		return r, err
	}
	r.Revision, r.Keys = status.Revision, status.TotalKey
	if err := inspect(next, false); err != nil {
		return r, err
	}
	if err := ctx.Err(); err != nil {
		return r, err
	}
	if _, err := os.Stat(filepath.Join(c.Dir, "member")); err == nil {
		r.Previous = filepath.Clean(c.Dir) + ".before-" + now.UTC().Format(stamp)
		if err := os.Rename(c.Dir, r.Previous); err != nil {
			return r, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return r, err
	} else if err := os.RemoveAll(c.Dir); err != nil { // but for the lock it is empty
		return r, err
	}
	if err := os.Rename(next, c.Dir); err != nil {
		return r, err
	}
	return r, atomicfile.SyncDir(filepath.Dir(filepath.Clean(c.Dir)))
}

// checkSum compares the SHA-256 at the end of a snapshot with what is before it.
func checkSum(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	sum := sha256.New()
	want := make([]byte, sha256.Size)
	if size := info.Size() - sha256.Size; size > 0 {
		if _, err := io.CopyN(sum, f, size); err != nil {
			return err
		}
		if _, err := io.ReadFull(f, want); err != nil {
			return err
		}
	}
	if !bytes.Equal(want, sum.Sum(nil)) {
		return errors.New("its checksum is wrong: it is damaged, or not what `routerctl cluster snapshot` or `etcdctl snapshot save` wrote")
	}
	return nil
}

// unpack makes a data directory of one member of a snapshot. Where etcd would end the
// process, that becomes an error.
func unpack(c Config, file, dir string) (snapshot.Status, error) {
	type result struct {
		snapshot.Status
		err error
	}
	words := make(chan string, 1)
	done := make(chan result, 1)
	go func() {
		r := result{err: errors.New("etcd's tool ended without a word")}
		defer func() {
			if p := recover(); p != nil {
				r.err = fmt.Errorf("etcd's tool panicked: %v", p)
			}
			done <- r
		}()
		tool := snapshot.NewV3(zapLogger(c.Logger, func(msg string) { words <- msg }))
		status, err := tool.Status(file)
		if err != nil {
			r.err = err
			return
		}
		r.Status = status
		r.err = tool.Restore(snapshot.RestoreConfig{
			SnapshotPath: file, OutputDataDir: dir,
			Name: c.Name, PeerURLs: []string{peerURL}, InitialCluster: c.Name + "=" + peerURL,
			RevisionBump: revisionBump, MarkCompacted: true,
		})
	}()
	r := <-done
	select {
	case msg := <-words:
		return r.Status, errors.New(msg)
	default:
		return r.Status, r.err
	}
}
