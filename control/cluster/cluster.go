// Package cluster is this host's copy of the cluster: what the datastore says,
// read once, decoded once, and handed to each part of the daemon at that part's
// own pace.
//
// One goroutine, [Cluster.Run], reads the one ordered watch. What it decodes is
// immutable and shared by all. A part follows the kinds that concern it with
// [Cluster.Follow]: it gets what changed since it asked last, a key once. What
// this host writes it shows at once, with [Cluster.Announce]. The package knows
// nothing of which datastore is behind [store.Store].
package cluster

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/routerd/routerd/store"
)

// Kinds lists the kinds that the copy is of.
func Kinds() []store.Kind {
	return []store.Kind{
		store.KindNode, store.KindIPPool, store.KindIPReservation,
		store.KindIPAMConfig, store.KindIPAMAffinity, store.KindIPAMBlock,
		store.KindFelixConfiguration, store.KindClusterInformation,
		store.KindBGPConfiguration, store.KindBGPFilter, store.KindBGPPeer,
		store.KindTier, store.KindProfile,
		store.KindWorkloadEndpoint, store.KindHostEndpoint, store.KindNetworkSet, store.KindGlobalNetworkSet,
		store.KindNetworkPolicy, store.KindGlobalNetworkPolicy,
		store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy, store.KindStagedKubernetesNetworkPolicy,
	}
}

// Config is what [New] needs.
type Config struct {
	Store store.Store  // required
	Node  string       // this host's name; required
	Log   *slog.Logger // required
}

// Cluster is the copy. Its methods are safe for concurrent use.
type Cluster struct {
	cfg     Config
	decoder decoder // Run's

	mu        sync.Mutex // guards the rest, and the followers
	running   bool
	followers []*Follower
	revision  store.Revision
	fresh     Freshness
	own       own
	moved     chan struct{} // closed when a follower may have come further; nil: nobody waits
}

// Source says where a copy comes from.
type Source uint8

// The sources.
const (
	Unread Source = iota // the datastore has not said everything yet
	Live                 // the copy follows the datastore
	Stale                // the datastore said everything once, and cannot be reached now
)

func (s Source) String() string {
	switch s {
	case Live:
		return "live"
	case Stale:
		return "stale"
	case Unread:
	}
	return "not read yet"
}

// Freshness says how far a copy of the datastore can be relied on: the one answer
// for all who read it.
type Freshness struct {
	Source Source
	Since  time.Time // of the source, or of the outage
	Err    error     // why the datastore cannot be reached; nil: it can, or nobody has tried yet
}

// New returns a copy that is empty until [Cluster.Run].
func New(cfg Config) *Cluster {
	return &Cluster{cfg: cfg, decoder: newDecoder(cfg.Node), own: newOwn(), fresh: Freshness{Since: time.Now()}}
}

// Run follows the datastore until ctx ends. It is to be called once.
func (c *Cluster) Run(ctx context.Context) error {
	c.mu.Lock()
	c.running = true
	c.mu.Unlock()
	for b := range c.cfg.Store.Watch(ctx, Kinds()...) {
		c.apply(b)
	}
	return ctx.Err()
}

// apply hands a batch of the watch to the followers.
func (c *Cluster) apply(b store.Batch) {
	changes := make([]*Change, 0, len(b.Events))
	for _, ev := range b.Events {
		ch := c.decoder.change(ev)
		if ch.Err != nil {
			c.cfg.Log.Warn("object cannot be decoded; what was known of it stays in use", "key", ev.Key, "error", ch.Err)
		}
		changes = append(changes, ch)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.revision = max(c.revision, b.Revision)
	turned := c.turn(b.Err, b.Synced)
	c.own.filter(changes, b.Revision, b.Synced)
	c.hand(changes, b.Synced, turned)
	c.advanced()
}

// hand gives all followers what is new. The caller has the lock.
func (c *Cluster) hand(changes []*Change, synced, turned bool) {
	for _, f := range c.followers {
		f.add(changes, synced, turned)
	}
}

// SetOutage says why the datastore cannot be reached, or with nil that it can,
// before [Cluster.Run], which finds out by itself.
func (c *Cluster) SetOutage(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.running && c.turn(err, false) {
		c.hand(nil, false, true)
	}
}

// turn takes note of whether the datastore answers. It reports whether that is
// new. The caller has the lock.
func (c *Cluster) turn(err error, synced bool) bool {
	was := c.fresh
	switch {
	case synced || err == nil && was.Source == Stale:
		c.fresh.Source = Live
	case err != nil && was.Source == Live:
		c.fresh.Source = Stale
	}
	c.fresh.Err = err
	if c.fresh.Source != was.Source || (err != nil) != (was.Err != nil) {
		c.fresh.Since = time.Now()
	}
	switch {
	case err != nil && was.Err == nil:
		c.cfg.Log.Warn("datastore cannot be reached; what runs keeps running", "error", err)
	case err == nil && was.Err != nil:
		c.cfg.Log.Info("datastore is back")
	}
	return c.fresh.Source != was.Source || text(err) != text(was.Err)
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Freshness says how far the copy can be relied on.
func (c *Cluster) Freshness() Freshness {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fresh
}

// Revision returns the revision of the datastore that the copy is of.
func (c *Cluster) Revision() store.Revision {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.revision
}

// advanced wakes those who wait for a follower. The caller has the lock.
func (c *Cluster) advanced() {
	if c.moved != nil {
		close(c.moved)
		c.moved = nil
	}
}
