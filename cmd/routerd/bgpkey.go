package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/store"
)

// bgpKeyFile is where the cluster's key of BGP is kept, for a start while the datastore is
// away: other hosts would not take this one's sessions without it.
func bgpKeyFile(c config.Config) string { return filepath.Join(c.StateDir, "bgp.key") }

// bgpKeys has BGP sign the sessions with other nodes with the cluster's key.
type bgpKeys struct {
	store   store.Store
	file    string
	log     *slog.Logger
	use     func(bgp.Keyring)  // in sessions; nil: there is no BGP
	publish func(ids []string) // what this host has
	canSign func() error

	changed async.Signal  // the datastore may have another key
	made    chan struct{} // closed when what a cluster begins with is made
	known   bool          // whether there is a key, and which
	last    *store.Secret // nil: none
}

const (
	// rereadBGPKey is after what time the key is read again though nobody says that it is another.
	rereadBGPKey = 10 * time.Minute
	readBGPKeyIn = 10 * time.Second
)

// load goes by what the previous run knew, before BGP begins.
func (b *bgpKeys) load() {
	k, err := readBGPKey(b.file)
	if err != nil {
		b.log.Warn("the cluster's bgp key is not known before the datastore answers", "error", err)
	} else if k != nil {
		b.take(k)
	}
}

// run follows the key that the datastore has, and has this host publish which one it has,
// until ctx ends. Without BGP, and on a kernel that cannot sign, it publishes that it has none.
func (b *bgpKeys) run(ctx context.Context) error {
	if b.use == nil {
		return b.without()
	}
	if err := b.canSign(); err != nil {
		b.log.Warn("bgp sessions with other nodes go without the cluster's key", "error", err)
		b.use(bgp.WithoutKeys(fmt.Sprintf("this kernel cannot sign: %v", err)))
		return b.without()
	}
	pause, failing := firstWrites(), false
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
			b.log.Warn("the cluster's bgp key cannot be read; what was known stays in use", "error", err)
			if !b.known {
				b.use(bgp.WithoutKeys(err.Error()))
				b.publish(nil) // an earlier run may have had one
			}
		}
		_ = pause.Wait(ctx)
	}
	return ctx.Err()
}

// without has this host do without keys.
func (b *bgpKeys) without() error {
	b.publish(nil)
	if err := b.keep(nil); err != nil {
		b.log.Warn("a key of bgp stays on disk that this host does not use", "error", err)
	}
	return nil
}

// read reads the key once, and has it used.
func (b *bgpKeys) read(ctx context.Context) error {
	made := false
	select {
	case <-b.made:
		made = true
	default:
	}
	attempt, cancel := context.WithTimeout(ctx, readBGPKeyIn)
	defer cancel()
	k, err := store.BGPKey(attempt, b.store)
	switch {
	case err != nil:
		return err
	case k == nil && !made:
		return nil // it is perhaps about to be made
	case b.known && reflect.DeepEqual(k, b.last):
		b.publish(k.KeyIDs())
		return nil
	}
	b.log.Info("bgp sessions between nodes", "key", b.take(k).String())
	if err := b.keep(k); err != nil {
		b.log.Warn("a restart without the datastore will have no sessions with other nodes", "error", err)
	}
	return nil
}

// take has a key used and published; nil: the cluster has none.
func (b *bgpKeys) take(k *store.Secret) bgp.Keyring {
	ring := bgp.WithoutKeys("the cluster has no key: routerctl bgp key rotate makes one")
	if k != nil {
		ring = bgp.NewKeyring(k)
	}
	b.known, b.last = true, k
	b.use(ring)
	b.publish(k.KeyIDs())
	return ring
}

// readBGPKey reads what [bgpKeys.keep] wrote; nil: nothing is there.
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
func (b *bgpKeys) keep(k *store.Secret) error {
	if k == nil {
		if err := os.Remove(b.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget the key of bgp: %w", err)
		}
		return nil
	}
	text, err := json.Marshal(k)
	if err != nil {
		return fmt.Errorf("keep the key of bgp: %w", err)
	}
	return atomicfile.Write(b.file, text, 0o600)
}
