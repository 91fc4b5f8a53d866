package etcd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store"
)

// RawKey is a key as it is stored.
type RawKey struct {
	Path  string
	Value []byte
	rev   int64 // at which it was written
}

// Raw calls each for every key of Calico's and routerd's, in order, as the store was
// at a revision; zero is the newest one at its beginning. What ends with a lease
// belongs to a running daemon and is left out, and so are changes: they are of this datastore alone.
func (s *Store) Raw(ctx context.Context, at store.Revision, each func(RawKey) error) error {
	rev := int64(at)
	for _, root := range []string{store.RootPath, store.OwnRootPath} {
		from, end := root, clientv3.GetPrefixRangeEnd(root)
		for {
			resp, err := s.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(smallPage), clientv3.WithRev(rev))
			if err != nil {
				return fmt.Errorf("read all keys: %w", s.explain(ctx, err))
			}
			if rev == 0 {
				rev = resp.Header.Revision
			}
			for _, kv := range resp.Kvs {
				if k, _ := store.ParsePath(string(kv.Key)); kv.Lease != 0 || k.Kind == store.KindChange || k.Kind == store.KindUnconfirmed {
					continue
				}
				if err := each(RawKey{string(kv.Key), kv.Value, kv.ModRevision}); err != nil {
					return err
				}
			}
			if !resp.More || len(resp.Kvs) == 0 {
				break
			}
			from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
		}
	}
	return nil
}

// Loading is what [Store.Load] is to write.
type Loading struct {
	Keys []RawKey
	// Replace makes the store have these keys and no others. Without it a key that
	// is there and differs, or is not among them, is an error.
	Replace bool
	DryRun  bool // only counts
}

// Loaded is how many keys [Store.Load] wrote, removed, and left as they were.
type Loaded struct{ Written, Removed, Same int }

// Load writes keys as they are. It does so in transactions of no more than
// [store.MaxOps] keys and half of the bytes that etcd allows; one of them fails, with
// [store.ErrConflict], when somebody else has written a key since Load began. What
// was written until an error stays; a second call goes on.
func (s *Store) Load(ctx context.Context, l Loading) (Loaded, error) {
	have := map[string]RawKey{}
	if err := s.Raw(ctx, 0, func(k RawKey) error { have[k.Path] = k; return nil }); err != nil {
		return Loaded{}, err
	}
	var done Loaded
	var b batch
	var there []string // and must not be
	for _, k := range l.Keys {
		old, exists := have[k.Path]
		delete(have, k.Path)
		if exists && bytes.Equal(old.Value, k.Value) {
			done.Same++
			continue
		}
		if exists {
			there = append(there, k.Path)
		}
		b.add(old, clientv3.OpPut(k.Path, string(k.Value)), len(k.Path)+len(k.Value))
		done.Written++
	}
	for _, path := range slices.Sorted(maps.Keys(have)) {
		there = append(there, path)
		b.add(have[path], clientv3.OpDelete(path), len(path))
		done.Removed++
	}
	if len(there) > 0 && !l.Replace {
		return Loaded{}, fmt.Errorf("%w: %d other keys, the first of them %s", store.ErrExists, len(there), there[0])
	}
	if l.DryRun {
		return done, nil
	}
	return done, b.commit(ctx, s)
}

// loadBytes is how large a transaction of [Store.Load] may be: etcd's limit for a
// request is 1.5 MiB.
const loadBytes = 768 << 10

// batch gathers conditional writes for as few transactions as etcd allows.
type batch struct {
	txns []rawTxn
	size int // bytes of the last one
}

type rawTxn struct {
	cmps  []clientv3.Cmp
	ops   []clientv3.Op
	paths []string
}

// add has a key written, or deleted, that is as old says.
func (b *batch) add(old RawKey, op clientv3.Op, size int) {
	if n := len(b.txns); n == 0 || b.size+size > loadBytes || len(b.txns[n-1].ops) == store.MaxOps {
		b.txns, b.size = append(b.txns, rawTxn{}), 0
	}
	t := &b.txns[len(b.txns)-1]
	path := string(op.KeyBytes())
	t.cmps = append(t.cmps, clientv3.Compare(clientv3.ModRevision(path), "=", old.rev))
	t.ops = append(t.ops, op)
	t.paths = append(t.paths, path)
	b.size += size
}

func (b *batch) commit(ctx context.Context, s *Store) error {
	for _, t := range b.txns {
		resp, err := s.client.Txn(ctx).If(t.cmps...).Then(t.ops...).Commit()
		if err != nil {
			return fmt.Errorf("write keys from %s on: %w", t.paths[0], s.explain(ctx, err))
		}
		if !resp.Succeeded {
			return fmt.Errorf("write keys from %s to %s: %w: stop who else writes, and do it again", t.paths[0], t.paths[len(t.paths)-1], store.ErrConflict)
		}
	}
	return nil
}

// Snapshot writes etcd's database to w, in the form that etcdctl saves and etcdutl
// reads: the file, and its SHA-256, which is checked. It returns how many bytes that
// is. All of etcd is in it, not only the keys that routerd knows.
func (s *Store) Snapshot(ctx context.Context, w io.Writer) (int64, error) {
	resp, err := s.client.Snapshot(ctx)
	if err != nil {
		return 0, fmt.Errorf("snapshot: %w", s.explain(ctx, err))
	}
	defer resp.Close()
	sum := &summed{w: w, h: sha256.New()}
	n, err := io.Copy(sum, resp)
	if err != nil {
		return n, fmt.Errorf("snapshot: after %d bytes: %w", n, s.explain(ctx, err))
	}
	if err := sum.check(); err != nil {
		return n, fmt.Errorf("snapshot: %w: take it again", err)
	}
	return n, nil
}

// summed passes on what is written and compares its last bytes with the SHA-256 of
// all before them.
type summed struct {
	w    io.Writer
	h    hash.Hash
	tail []byte // the last bytes, at most as many as a sum has
}

func (s *summed) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	t := append(s.tail, p[:n]...)
	cut := max(0, len(t)-sha256.Size)
	s.h.Write(t[:cut])
	s.tail = slices.Clone(t[cut:])
	return n, err
}

func (s *summed) check() error {
	if !bytes.Equal(s.tail, s.h.Sum(nil)) {
		return errors.New("its checksum is wrong")
	}
	return nil
}
