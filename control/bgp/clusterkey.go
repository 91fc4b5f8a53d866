package bgp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"reflect"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/store"
)

// ClusterKeyConfig says what a [ClusterKey] works with.
type ClusterKeyConfig struct {
	Store store.Store
	// File is where the key is kept for a start while the datastore is away: other hosts
	// would not take this one's sessions without it.
	File string
	// Use has sessions signed; nil: there is no BGP.
	Use func(Keyring)
	// Publish says which keys this host has.
	Publish func(ids []string)
	// CanSign reports why the kernel cannot; nil: [CanSign].
	CanSign func() error
	Log     *slog.Logger
}

// ClusterKey has BGP sign the sessions with other nodes with the cluster's key. Make one with
// [NewClusterKey].
type ClusterKey struct {
	c       ClusterKeyConfig
	changed async.Signal  // the datastore may have another key
	made    chan struct{} // closed when what a cluster begins with is made
	known   bool          // whether there is a key, and which
	last    *store.Secret // nil: none
}

// NewClusterKey makes what follows the cluster's key.
func NewClusterKey(c ClusterKeyConfig) *ClusterKey {
	if c.CanSign == nil {
		c.CanSign = CanSign
	}
	return &ClusterKey{c: c, changed: async.NewSignal(), made: make(chan struct{})}
}

// Changed says that the datastore may have another key.
func (b *ClusterKey) Changed() { b.changed.Set() }

// Made says that the datastore has what a cluster begins with. It is to be called once.
func (b *ClusterKey) Made() { close(b.made) }

const (
	// rereadBGPKey is after what time the key is read again though no message says that it is another.
	rereadBGPKey = 10 * time.Minute
	readBGPKeyIn = 10 * time.Second
)

// Load goes by what the previous run knew, before BGP begins.
func (b *ClusterKey) Load() {
	k, err := readBGPKey(b.c.File)
	if err != nil {
		b.c.Log.Warn("the cluster's bgp key is not known before the datastore answers", "error", err)
	} else if k != nil {
		b.useKey(k)
	}
}

// Run follows the key that the datastore has, and has this host publish which one it has,
// until ctx ends. Without BGP, and on a kernel that cannot sign, it publishes that it has none.
func (b *ClusterKey) Run(ctx context.Context) error {
	if b.c.Use == nil {
		return b.without()
	}
	if err := b.c.CanSign(); err != nil {
		b.c.Log.Warn("bgp sessions with other nodes are not signed", "error", err)
		b.c.Use(WithoutKeys(fmt.Sprintf("this kernel cannot sign: %v", err)))
		return b.without()
	}
	pause, failing := async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}, false
	for ctx.Err() == nil {
		err := b.read(ctx)
		switch {
		case err == nil:
			failing = false
			pause.Reset()
			made := b.made
			if b.known {
				made = nil
			}
			select {
			case <-ctx.Done():
			case <-b.changed:
			case <-made:
			case <-time.After(rereadBGPKey):
			}
			continue
		case !failing && ctx.Err() == nil:
			failing = true
			b.c.Log.Warn("the cluster's bgp key cannot be read; the last known key stays in use", "error", err)
			if !b.known {
				b.c.Use(WithoutKeys(err.Error()))
				b.c.Publish(nil) // the previous run may have had one
			}
		}
		_ = pause.Wait(ctx)
	}
	return ctx.Err()
}

// without has this host do without keys.
func (b *ClusterKey) without() error {
	b.c.Publish(nil)
	if err := b.keep(nil); err != nil {
		b.c.Log.Warn("an unused bgp key stays on disk", "error", err)
	}
	return nil
}

// read reads the key once, and has it used.
func (b *ClusterKey) read(ctx context.Context) error {
	made := false
	select {
	case <-b.made:
		made = true
	default:
	}
	attempt, cancel := context.WithTimeout(ctx, readBGPKeyIn)
	defer cancel()
	k, err := store.BGPKey(attempt, b.c.Store)
	switch {
	case err != nil:
		return err
	case k == nil && !made:
		return nil // it is perhaps about to be made
	case b.known && reflect.DeepEqual(k, b.last):
		b.c.Publish(k.KeyIDs())
		return nil
	}
	// Others expect what is published, also of a host that has lost power since: the disk has
	// each key before, and none is gone from there before that is published.
	if k != nil {
		err = b.keep(k)
	}
	b.c.Log.Info("bgp sessions between nodes", "key", b.useKey(k).String())
	if k == nil {
		err = b.keep(nil)
	}
	if err != nil {
		b.c.Log.Warn("a restart without the datastore will have no sessions with other nodes", "error", err)
	}
	return nil
}

// useKey has a key used and published; nil: the cluster has none.
func (b *ClusterKey) useKey(k *store.Secret) Keyring {
	ring := WithoutKeys("the cluster has no key: create one with routerctl bgp key rotate")
	if k != nil {
		ring = NewKeyring(k)
	}
	b.known, b.last = true, k
	b.c.Use(ring)
	b.c.Publish(k.KeyIDs())
	return ring
}

// readBGPKey reads what [ClusterKey.keep] wrote; nil: nothing is there.
func readBGPKey(path string) (*store.Secret, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // there need be none
	}
	if err != nil {
		return nil, err
	}
	k := new(store.Secret)
	if err := json.Unmarshal(b, k); err != nil || len(k.Key) == 0 {
		return nil, fmt.Errorf("read %s: it is damaged", path) // the error of a parser may show it
	}
	return k, nil
}

// keep keeps a key on disk, or with nil none.
func (b *ClusterKey) keep(k *store.Secret) error {
	if k == nil {
		if err := os.Remove(b.c.File); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget the key of bgp: %w", err)
		}
		return nil
	}
	text, err := json.Marshal(k)
	if err != nil {
		return fmt.Errorf("keep the key of bgp: %w", err)
	}
	return atomicfile.Write(b.c.File, text, 0o600)
}
