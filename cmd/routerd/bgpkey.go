package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/store"
)

// bgpKeyFile is where the cluster's key of BGP is kept, for a start while the datastore is
// away: other hosts would not take this one's sessions without it.
func bgpKeyFile(c config.Config) string { return filepath.Join(c.StateDir, "bgp.key") }

// followBGPKey has BGP use the key that the datastore has, and this host publish which one
// it has, until ctx ends.
func (d *router) followBGPKey(ctx context.Context) error {
	log := d.log.With("component", "bgp")
	if d.bgp == nil {
		d.node.SetBGPKeys(nil) // an earlier start may have published one
		return nil
	}
	if err := bgp.CanSign(); err != nil {
		log.Warn("bgp sessions with other nodes go without the cluster's key: this kernel cannot sign", "error", err)
		d.node.SetBGPKeys(nil)
		return nil
	}
	if k, err := readBGPKey(bgpKeyFile(d.cfg)); err != nil {
		log.Warn("the cluster's bgp key is not known before the datastore answers", "error", err)
	} else {
		d.bgp.SetKeys(bgp.NewKeyring(k))
	}
	seen, failed := false, ""
	for b := range d.store.Watch(ctx, store.KindSecret) {
		var now *store.Secret
		changed := b.Synced && !seen // a complete state without it says that there is none
		seen = seen || b.Synced
		for _, e := range b.Events {
			switch {
			case e.Key != store.SecretKey(store.BGPSecret):
			case e.Err != nil:
				log.Warn("the cluster's bgp key cannot be read; what was known stays in use", "error", e.Err)
				changed = false
			default:
				now, changed = secretOf(e), true
			}
		}
		if !changed {
			continue
		}
		d.bgp.SetKeys(bgp.NewKeyring(now))
		d.node.SetBGPKeys(now.KeyIDs())
		log.Info("bgp key of the cluster", "keys", now.KeyIDs())
		if err := writeBGPKey(bgpKeyFile(d.cfg), now); err != nil && failed != err.Error() {
			failed = err.Error()
			log.Warn("a restart without the datastore will have no sessions with other nodes", "error", err)
		}
	}
	return ctx.Err()
}

func secretOf(e store.Event) *store.Secret {
	k, _ := e.Object.Value.(*store.Secret)
	return k
}

// readBGPKey reads what [writeBGPKey] wrote; nil: nothing is there.
func readBGPKey(path string) (*store.Secret, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // there need be none
	}
	if err != nil {
		return nil, err
	}
	k := new(store.Secret)
	if err := json.Unmarshal(b, k); err != nil {
		return nil, fmt.Errorf("read %s: it is damaged", path) // the error of a parser may show it
	}
	return k, nil
}

// writeBGPKey keeps a key, or with nil none.
func writeBGPKey(path string, k *store.Secret) error {
	if k == nil {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	b, err := json.Marshal(k)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, b, 0o600)
}
