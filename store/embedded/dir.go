package embedded

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"go.etcd.io/etcd/api/v3/version"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"golang.org/x/sys/unix"
)

// lockName is the file in the data directory whose lock says that a server
// uses it. etcd has a lock of its own, but waits for it for ever.
const lockName = "routerd.lock"

// boltPatience is how long another process may take to let go of etcd's file.
const boltPatience = 500 * time.Millisecond

// lockDir makes the data directory and takes its lock. The lock ends with the
// file's being closed, also by the end of the process.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory %s: %w: give it a place that this process may write to", dir, err)
	}
	path := filepath.Join(dir, lockName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w: give it a place that this process may write to", dir, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		holder, _ := os.ReadFile(path) // only to name the holder
		if pid := strings.TrimSpace(string(holder)); pid != "" {
			return nil, fmt.Errorf("data directory %s is in use by process %s: stop that one, or choose another directory", dir, pid)
		}
		return nil, fmt.Errorf("data directory %s is in use by another process: stop that one, or choose another directory", dir)
	}
	if err := errors.Join(f.Truncate(0), writeAt0(f, strconv.Itoa(os.Getpid())+"\n")); err != nil {
		f.Close()
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	return f, nil
}

func writeAt0(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// inspect reads the database in a data directory, if there is one, and
// refuses what etcd would answer with a panic or by waiting for ever. several says that
// the data may be those of a member among others.
func inspect(dir string, several bool) error {
	path := filepath.Join(dir, "member", "snap", "db")
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0 { // whoever made it was killed before there was anything in it
		return nil
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: boltPatience})
	if err != nil {
		if errors.Is(err, bolterrors.ErrTimeout) {
			return fmt.Errorf("database %s is in use by another etcd: stop that one, or choose another data directory", path)
		}
		return fmt.Errorf("database %s cannot be read: %w: restore it from a backup, or move %s away to begin anew", path, err, dir)
	}
	defer db.Close()
	return db.View(func(tx *bolt.Tx) error {
		if members := tx.Bucket(schema.Members.Name()); members != nil {
			if n := members.Stats().KeyN; n > 1 && !several {
				return fmt.Errorf("data directory %s belongs to an etcd cluster of %d members: and nothing says that this host is one of them; choose another directory, or name that cluster's endpoints as the datastore", dir, n)
			}
		}
		for _, at := range []struct{ bucket, key []byte }{
			{schema.Cluster.Name(), schema.ClusterClusterVersionKeyName},
			{schema.Meta.Name(), schema.MetaStorageVersionName},
		} {
			b := tx.Bucket(at.bucket)
			if b == nil {
				continue
			}
			if v := string(b.Get(at.key)); newer(v, version.Version) {
				return fmt.Errorf("data directory %s was written by etcd %s, newer than the %s within this program: upgrade the program, or choose another directory", dir, v, version.Version)
			}
		}
		return nil
	})
}

// newer reports whether version a has a greater major or minor number than b.
// What is not a version is not newer.
func newer(a, b string) bool {
	major := func(v string) (x, y int) {
		fields := strings.SplitN(v, ".", 3)
		if len(fields) < 2 {
			return 0, 0
		}
		x, errX := strconv.Atoi(fields[0])
		y, errY := strconv.Atoi(fields[1])
		if errX != nil || errY != nil {
			return 0, 0
		}
		return x, y
	}
	ax, ay := major(a)
	bx, by := major(b)
	return ax > bx || ax == bx && ay > by
}

// httpSuffix is added to the socket's name for etcd's second service, health
// and metrics by HTTP. On one socket with the other, gRPC would be slower and
// know less of its connections.
const httpSuffix = ".http"

// prepareSocket makes a socket's directory, and removes a socket at which
// nobody answers.
func prepareSocket(path string) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of socket %s: %w", path, err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("directory of socket %s: %w", path, err)
	}
	if mode := info.Mode(); mode.Perm()&0o022 != 0 && mode&fs.ModeSticky == 0 {
		return fmt.Errorf("others may write to %s, the directory of socket %s (%v): chmod 700 it", dir, path, mode)
	}
	info, err = os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is in the way and is no socket: move it away", path)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		conn.Close()
		return fmt.Errorf("another process answers at socket %s: stop that one, or choose another path", path)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove stale socket: %w", err)
	}
	return nil
}
