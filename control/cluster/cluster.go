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
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
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
		store.KindCalicoNodeStatus, store.KindKubeControllersConfiguration,
	}
}

// serviceKinds lists what there is besides where the datastore has Services. The state
// on disk may be without them.
func serviceKinds() []store.Kind {
	return []store.Kind{store.KindService, store.KindEndpointSlice, store.KindServiceCIDR}
}

// Config is what [New] needs.
type Config struct {
	Store store.Store  // required
	Node  string       // this host's name; required
	Log   *slog.Logger // required

	// Services says that the datastore has Services of Kubernetes, which are followed
	// then too.
	Services bool

	// Version names how the datastore's objects were made into these: what is on disk by
	// another one is not gone on from.
	Version string

	// File is where the copy is kept on disk, as [Saved] lists it, for a start at
	// which the datastore does not answer. Empty: nowhere.
	File string
	// PreviousFile is where the version before kept a part of it, in the same
	// format: File takes its place. Empty: nowhere.
	PreviousFile string
	// PreviousFiles are others of the version before, which are removed when File
	// has all. While there is one, a complete File is taken to be older, and not
	// used.
	PreviousFiles []string
}

// Cluster is the copy. Its methods are safe for concurrent use.
type Cluster struct {
	cfg     Config
	decoder decoder // Run's
	cache   *cache  // nil: nothing is kept on disk

	mu        sync.Mutex // guards the rest, and the followers
	running   bool
	followers []*Follower
	revision  store.Revision
	fresh     Freshness
	own       own
	moved     chan struct{} // closed when a follower may have come further; nil: none is waited for
	ownOnly   bool          // as the watch said last
	unknown   []store.Kind  // of which it has said nothing
	demand    demand

	others   store.Demand // for the watch
	demanded async.Signal // demand changed
}

// Source says where a copy comes from.
type Source uint8

// The sources.
const (
	Unread Source = iota // the datastore has not said everything yet
	Disk                 // nor has it here: the copy is what the disk had at the start
	Live                 // the copy follows the datastore
	Stale                // the datastore said everything once, and cannot be reached now
)

func (s Source) String() string {
	switch s {
	case Disk:
		return "from disk"
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
	Err    error     // why the datastore cannot be reached; nil: it can, or was not tried yet

	// Withheld says what it does not tell, which stays as it was last known; nil: it
	// tells all.
	Withheld error
}

// New returns a copy that is empty until [Cluster.Run].
func New(cfg Config) *Cluster {
	c := &Cluster{cfg: cfg, decoder: newDecoder(cfg.Node), own: newOwn(), fresh: Freshness{Since: time.Now()}, demanded: async.NewSignal()}
	if cfg.File != "" {
		c.cache = openCache(cfg)
	}
	return c
}

// Load hands readers the state that the disk has, where that is all of their kinds,
// before [Cluster.Run] and once. They get it as a step from [Disk]; what the
// datastore says waits until it has said all, and then they get what is different. It
// is for those who may decide by a state that can be old.
func (c *Cluster) Load(readers ...*Follower) {
	if c.cache == nil {
		return
	}
	kinds, ownOnly := c.cache.complete()
	readers = slices.DeleteFunc(slices.Clone(readers), func(f *Follower) bool { return !f.isOf(kinds) })
	if len(readers) == 0 {
		return
	}
	others := slices.ContainsFunc(readers, func(f *Follower) bool { return f.others })
	events, err := c.cache.load(others, func(key store.Key) bool {
		return slices.Contains(kinds, key.Kind) && slices.ContainsFunc(readers, func(f *Follower) bool { return f.wants(key) })
	})
	if err != nil {
		c.cfg.Log.Error("what is on disk of the datastore's state is not used", "error", err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running {
		panic("cluster: Load after Run")
	}
	changes := make([]*Change, 0, len(events))
	for _, ev := range events {
		changes = append(changes, c.decoder.change(ev))
	}
	own := c.cache.withoutOthers(changes)
	for _, f := range readers {
		from := own
		if f.others {
			from = changes
		}
		f.load(from, kinds, ownOnly)
		c.fresh.Source = Disk
	}
}

// Save writes to disk what the followers have been handed and the disk does not have.
// Without an error the disk has all of it.
func (c *Cluster) Save() error {
	if c.cache == nil {
		return errUnread
	}
	_, err := c.cache.save()
	return err
}

// Snapshot returns the objects that are wanted, of kinds that are kept whole on disk ([Saved], but for
// blocks and affinities), as followers have been handed them. What this host announced and the datastore
// does not show yet is not among them.
func (c *Cluster) Snapshot(wanted func(store.Key) bool) ([]*Change, error) {
	if err := c.Save(); err != nil {
		return nil, fmt.Errorf("the state on disk is not up to date: %w", err)
	}
	events, err := c.cache.load(false, wanted)
	if err != nil {
		return nil, fmt.Errorf("read the state on disk: %w", err)
	}
	d := newDecoder(c.cfg.Node)
	out := make([]*Change, 0, len(events))
	for _, ev := range events {
		out = append(out, d.change(ev))
	}
	return out, nil
}

// SaveErr says why the disk does not have the copy; nil: it has, or will soon.
func (c *Cluster) SaveErr() error {
	if c.cache == nil {
		return nil
	}
	c.cache.mu.Lock()
	defer c.cache.mu.Unlock()
	return c.cache.err
}

// Close closes what is on disk, after [Cluster.Run].
func (c *Cluster) Close() error {
	if c.cache == nil {
		return nil
	}
	return c.cache.close()
}

// Run follows the datastore until ctx ends. It is to be called once.
func (c *Cluster) Run(ctx context.Context) error {
	c.mu.Lock()
	c.running = true
	c.mu.Unlock()
	var saving sync.WaitGroup
	defer saving.Wait()
	if c.cache != nil {
		saving.Go(func() { c.cache.run(ctx) })
	}
	watch := c.watch(ctx)
	if _, ok := c.cfg.Store.(store.NodeWatcher); ok {
		saving.Go(func() { c.followDemand(ctx) })
	}
	for b := range watch {
		c.apply(b)
	}
	return ctx.Err()
}

// watch follows the datastore, from where the run before was if it can.
func (c *Cluster) watch(ctx context.Context) <-chan store.Batch {
	var known store.Known
	goesOn := false
	if c.cache != nil {
		known, goesOn = c.cache.known()
	}
	if w, ok := c.cfg.Store.(store.NodeWatcher); ok {
		if c.cache != nil {
			if kinds, ownOnly := c.cache.complete(); !ownOnly && slices.Contains(kinds, store.KindWorkloadEndpoint) {
				// Rules may follow what the disk has of them, and who asks does so once all is known.
				c.mu.Lock()
				c.demand.left = time.Now()
				c.others.Set(true)
				c.mu.Unlock()
			}
		}
		return w.WatchNode(ctx, c.cfg.Node, &c.others, known, c.kinds()...)
	}
	if r, ok := c.cfg.Store.(store.Resumer); ok && goesOn {
		return r.WatchFrom(ctx, known, c.kinds()...)
	}
	return c.cfg.Store.Watch(ctx, c.kinds()...)
}

// kinds lists the kinds that this copy is of.
func (c *Cluster) kinds() []store.Kind {
	if c.cfg.Services {
		return append(Kinds(), serviceKinds()...)
	}
	return Kinds()
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
	unknown, withheld := withheldBy(b)
	if c.cache != nil {
		c.cache.note(changes, b.Synced, b.OwnOnly, unknown, b.Places) // what followers act by is on its way to the disk
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.revision = max(c.revision, b.Revision)
	turned := c.turn(b.Err, b.Synced) || c.ownOnly != b.OwnOnly || !slices.Equal(c.unknown, unknown)
	c.ownOnly, c.unknown = b.OwnOnly, unknown
	c.fresh.Withheld = withheld
	c.own.filter(changes, b.Revision, b.Synced)
	changes = lastOfEach(changes)
	for _, f := range c.followers {
		// Who decides by a kind of which nothing is known does not know all.
		f.add(changes, b.Synced && !slices.ContainsFunc(unknown, func(k store.Kind) bool { return f.needs(k) }), turned)
	}
	c.advanced()
}

// lastOfEach returns the last change of each key, in their order.
func lastOfEach(changes []*Change) []*Change {
	last := make(map[store.Key]int, len(changes))
	for i, ch := range changes {
		last[ch.Key] = i
	}
	if len(last) == len(changes) {
		return changes
	}
	var out []*Change
	for i, ch := range changes {
		if last[ch.Key] == i {
			out = append(out, ch)
		}
	}
	return out
}

// withheldBy returns the kinds of which a batch's store has said nothing, and why there
// is something that it does not tell.
func withheldBy(b store.Batch) (unknown []store.Kind, why error) {
	for _, k := range slices.Sorted(maps.Keys(b.Withheld)) {
		w := b.Withheld[k]
		if !w.Known {
			unknown = append(unknown, k)
		}
		if err := fmt.Errorf("%s: %w", k, w.Err); why == nil {
			why = err
		} else {
			why = fmt.Errorf("%w; %w", why, err)
		}
	}
	return unknown, why
}

// hand gives all followers what is new. The caller has the lock.
func (c *Cluster) hand(changes []*Change, turned bool) {
	for _, f := range c.followers {
		f.add(changes, false, turned)
	}
}

// SetOutage says why the datastore cannot be reached, or with nil that it can,
// before [Cluster.Run], which finds out by itself.
func (c *Cluster) SetOutage(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.running && c.turn(err, false) {
		c.hand(nil, true)
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
