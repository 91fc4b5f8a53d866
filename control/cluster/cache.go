package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/store"
)

// Saved lists the kinds that are kept on disk: what is decided by when the datastore
// does not answer at a start. Of affinities those that concern this host are, and the others
// only where a watch can go on from them ([store.Resumer]). Of blocks all are, of others' what
// routes go by ([store.Block.Routing]) where no watch goes on from them.
func Saved() []store.Kind {
	return append(savedForPolicy(),
		store.KindBGPPeer, store.KindBGPFilter, store.KindIPReservation, store.KindIPAMConfig, store.KindIPAMAffinity, store.KindIPAMBlock,
		store.KindClusterInformation)
}

// savedForPolicy lists what the version before kept, in a file for policy alone.
func savedForPolicy() []store.Kind {
	return []store.Kind{
		store.KindTier, store.KindProfile, store.KindNode, store.KindIPPool, store.KindFelixConfiguration, store.KindBGPConfiguration,
		store.KindWorkloadEndpoint, store.KindHostEndpoint, store.KindNetworkSet, store.KindGlobalNetworkSet,
		store.KindNetworkPolicy, store.KindGlobalNetworkPolicy,
		store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy, store.KindStagedKubernetesNetworkPolicy,
	}
}

// Pauses between two writes of what changed, and after one that failed.
const (
	savePause = time.Second
	saveRetry = 10 * time.Second
)

// completeKey is the key of [complete] in the file. Keys of objects are their paths,
// which begin with a slash.
const completeKey = "complete"

// complete says that the file has all objects of some kinds. Without it nothing of
// the file is used: a policy that is missing leaves open what it denied.
type complete struct {
	Node  string       `json:"node"` // whose file it is
	Kinds []store.Kind `json:"kinds"`

	// Own are kinds of which it has all there is of this host, and of others at most what was
	// once. An earlier version does not know it, and takes them for missing.
	Own []store.Kind `json:"own,omitempty"`

	// Places is how far the watch was, and Version by which conversion these values are:
	// another one may make others of the same objects.
	Places  map[string]store.Revision `json:"places,omitempty"`
	Version string                    `json:"version,omitempty"`

	// Others says that blocks and affinities which do not concern this host are there,
	// too, and whole.
	Others bool `json:"others,omitempty"`
}

// saved is an object of a watch that can go on: with its revision.
type saved struct {
	Revision store.Revision  `json:"revision"`
	Object   json.RawMessage `json:"object"`
}

// unpack returns an object as it is on disk. No stored object has these members
// itself.
func unpack(raw json.RawMessage) saved {
	var s saved
	if json.Unmarshal(raw, &s) != nil || s.Object == nil || s.Revision == 0 {
		return saved{Object: raw}
	}
	return s
}

// cache keeps on disk what the datastore said. What the disk refuses makes it void:
// the file is taken away, for what is old may lack a policy, and written whole
// later.
type cache struct {
	path     string
	node     string
	version  string
	previous []string // files of the version before, which go when this one is complete
	log      *slog.Logger
	changed  async.Signal
	kinds    []store.Kind
	others   bool // blocks and affinities that do not concern this host are kept whole, too

	mu      sync.Mutex // guards what follows
	pending map[store.Key]unsaved
	near    map[store.Key]bool // blocks and affinities that concern this host, of those that the datastore named
	synced  bool               // pending completes what the datastore has
	without []store.Kind       // but for these, of which it has said nothing
	ownOnly bool               // of WorkloadEndpoints it says only which this host has
	places  map[string]store.Revision
	err     error // of the last write

	writing sync.Mutex       // guards the rest
	file    *journal.Journal // nil: it cannot be used
	mark    *complete        // what the file says of what it is complete; nil: of nothing
	whole   bool             // the file has what the datastore said first in this run
	read    map[string]saved // what load read, for known; nil: the watch has begun
}

// unsaved is what the datastore said of an object last and the file does not have.
type unsaved struct {
	event store.Event
	fresh bool // the object is another than the file knows: it ended in between
}

// then returns what is to be saved after a later event.
func (u unsaved) then(next unsaved) unsaved {
	switch {
	case next.fresh:
		return next
	case next.event.Err == nil:
		return unsaved{next.event, u.fresh}
	case u.event.Deleted():
		return unsaved{next.event, true}
	case u.event.Err == nil:
		return u // what was known of it holds
	}
	return unsaved{next.event, u.fresh}
}

// openCache opens the file. One that was damaged is not used, and begun anew; one
// that cannot be opened is taken away, since it could not be kept up to date.
func openCache(cfg Config) *cache {
	c := &cache{
		path: cfg.File, node: cfg.Node, version: cfg.Version, previous: cfg.PreviousFiles, log: cfg.Log, changed: async.NewSignal(),
		kinds:   append(Saved(), store.KindKubeControllersConfiguration), // which may be missing
		pending: map[store.Key]unsaved{}, near: map[store.Key]bool{}, read: map[string]saved{},
	}
	if cfg.Services {
		c.kinds = append(c.kinds, serviceKinds()...)
	}
	if _, c.others = cfg.Store.(store.Resumer); c.others {
		c.kinds = append(c.kinds, store.KindCalicoNodeStatus) // of which nothing else is left to be read anew
	}
	err := c.open(cfg.PreviousFile)
	if err != nil {
		err = errors.Join(fmt.Errorf("keep the datastore's state on disk: %w", err), remove(c.path), remove(cfg.PreviousFile))
		c.log.Warn("the datastore's state is not kept on disk: after a boot without the datastore no workload is attached", "error", err)
	}
	c.err = err
	return c
}

func (c *cache) open(previous string) error {
	if err := os.MkdirAll(filepath.Dir(c.path), 0o700); err != nil {
		return err
	}
	if previous != "" {
		// Where it is there the version before ran last, and knows better.
		if err := os.Rename(previous, c.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	j, err := journal.OpenLean(c.path, c.log)
	if err != nil {
		return err
	}
	why := ""
	mark, err := readMark(j)
	switch {
	case j.Damage().Lines > 0:
		why = "it was damaged"
	case err != nil:
		why = err.Error()
	case mark == nil || mark.Node == "":
	case mark.Node != c.node:
		why = "it is of node " + mark.Node
	case slices.ContainsFunc(c.previous, exists):
		why = "an earlier version ran since"
	}
	if why != "" {
		c.log.Warn("what is on disk of the datastore's state is not used", "reason", why, "file", c.path, "copy", j.Damage().Copy)
		if err := errors.Join(j.Close(), os.Remove(c.path)); err != nil {
			return err
		}
		if j, err = journal.OpenLean(c.path, c.log); err != nil {
			return err
		}
		mark = nil
	}
	c.file, c.mark = j, mark
	return nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

func remove(path string) error {
	if err := os.Remove(path); path != "" && err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// readMark returns of what the file has all; nil: of nothing. The version before had
// no more than true there.
func readMark(j *journal.Journal) (*complete, error) {
	raw, err := j.Get(completeKey)
	if raw == nil || err != nil {
		return nil, err
	}
	if string(raw) == "true" {
		return &complete{Kinds: savedForPolicy()}, nil
	}
	var m complete
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, fmt.Errorf("read of what it is complete: %w", err)
	}
	return &m, nil
}

// complete returns of which kinds the file has all there is, with ownOnly of WorkloadEndpoints
// this host's.
func (c *cache) complete() (kinds []store.Kind, ownOnly bool) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.mark == nil {
		return nil, false
	}
	return slices.Concat(c.mark.Kinds, c.mark.Own), len(c.mark.Own) > 0
}

// get returns what the file has of an object. The caller has writing.
func (c *cache) get(path string) (saved, error) {
	if s, ok := c.read[path]; ok {
		return s, nil
	}
	raw, err := c.file.Get(path)
	if err != nil {
		return saved{}, err
	}
	s := unpack(raw)
	if c.read != nil {
		c.read[path] = s
	}
	return s, nil
}

// load returns what the file has of the objects that are wanted; others says whether blocks that
// cannot concern this host are.
func (c *cache) load(others bool, wanted func(store.Key) bool) (events []store.Event, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	for _, path := range c.file.Keys() {
		if path == completeKey {
			continue
		}
		key, ok := store.ParsePath(path)
		if !ok {
			return nil, fmt.Errorf("it makes no sense: %q is not the key of an object", path)
		}
		if !wanted(key) {
			continue
		}
		disk, err := c.get(path)
		if err != nil {
			return nil, err
		}
		if key.Kind == store.KindIPAMBlock && !others && !bytes.Contains(disk.Object, []byte(c.node)) {
			affinity, err := c.file.Get(store.AffinityKey(c.node, key.CIDR()).Path())
			if affinity == nil && err == nil {
				continue // thousands need not be decoded
			}
		}
		value, err := store.Decode(key, disk.Object)
		if err != nil {
			err = fmt.Errorf("read what is on disk of %s: %w", key, err)
			value = nil
		}
		events = append(events, store.Event{Key: key, Object: store.Object{Key: key, Value: value, Raw: disk.Object}, Err: err})
	}
	return events, nil
}

// known returns what a watch that begins now can go on from; false: nothing.
func (c *cache) known() (store.Known, bool) {
	c.writing.Lock()
	defer c.writing.Unlock()
	defer func() { c.read = nil }()
	mark := c.mark
	if mark == nil || len(mark.Places) == 0 || mark.Version != c.version {
		return store.Known{}, false
	}
	k := store.Known{Places: mark.Places, OwnOnly: len(mark.Own) > 0}
	for _, kind := range slices.Concat(mark.Kinds, mark.Own) {
		if (mark.Others || !partly(kind)) && slices.Contains(c.kinds, kind) {
			k.Kinds = append(k.Kinds, kind)
		}
	}
	for _, path := range c.file.Keys() {
		key, ok := store.ParsePath(path)
		if !ok || !slices.Contains(k.Kinds, key.Kind) {
			continue
		}
		if slices.Contains(mark.Own, key.Kind) && !store.IsEndpointOf(key, c.node) {
			continue
		}
		s, err := c.get(path)
		if err != nil || s.Revision == 0 {
			return store.Known{}, false
		}
		k.Objects = append(k.Objects, store.Object{Key: key, Revision: s.Revision, Raw: s.Object})
	}
	return k, true
}

// partly reports whether of a kind those that concern this host are kept for starts without
// the datastore, and the others at most for a watch to go on from.
func partly(kind store.Kind) bool {
	return kind == store.KindIPAMBlock || kind == store.KindIPAMAffinity
}

// note marks what the datastore said to be saved, and how far that is: unknown are the
// kinds of which it has said nothing.
func (c *cache) note(changes []*Change, synced, ownOnly bool, unknown []store.Kind, places map[string]store.Revision) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ownOnly = ownOnly
	if places != nil {
		c.places = places // a notice of an outage has none
	}
	for _, ch := range changes { // before the blocks that they are of
		if ch.Key.Kind == store.KindIPAMAffinity && ch.Key.Namespace == c.node {
			if c.near[ch.Key] = true; ch.Deleted() {
				delete(c.near, ch.Key)
			}
			c.add(ch.Event)
		}
	}
	for _, ch := range changes {
		switch {
		case !slices.Contains(c.kinds, ch.Key.Kind):
		case !partly(ch.Key.Kind):
			c.add(ch.Event)
		case ch.Key.Kind == store.KindIPAMAffinity:
			if c.others && ch.Key.Namespace != c.node {
				c.add(ch.Event)
			}
		case c.concerns(ch, c.near):
			c.near[ch.Key] = true
			c.add(ch.Event)
		case c.others:
			delete(c.near, ch.Key)
			c.add(ch.Event)
		default:
			delete(c.near, ch.Key)
			c.add(routing(ch))
		}
	}
	needed := func(k store.Kind) bool {
		return k != store.KindKubeControllersConfiguration && !slices.Contains(serviceKinds(), k)
	}
	if synced && !slices.ContainsFunc(unknown, needed) {
		c.synced, c.without = true, unknown
	}
	if c.synced {
		c.changed.Set()
	}
}

// routing is what is saved of a block that does not concern this host.
func routing(ch *Change) store.Event {
	b, ok := ch.Object.Value.(*store.Block)
	if !ok {
		return ch.Event // it is gone, or cannot be read
	}
	return store.Event{Key: ch.Key, Object: store.Object{Key: ch.Key, Value: b.Routing()}}
}

// concerns reports whether a block is this host's, by the block or by an affinity that is
// near, or has an address of it. One that cannot be read concerns it where it did before.
func (c *cache) concerns(ch *Change, near map[store.Key]bool) bool {
	b, ok := ch.Value.(*Block)
	if !ok {
		return ch.Err != nil && near[ch.Key]
	}
	return b.Holder == c.node || near[store.AffinityKey(c.node, ch.Key.CIDR())] ||
		slices.ContainsFunc(b.Borrowed, func(a Borrowed) bool { return a.Node == c.node })
}

// withoutOthers returns of changes from the disk those that are not about blocks and
// affinities of others.
func (c *cache) withoutOthers(changes []*Change) []*Change {
	near := make(map[store.Key]bool)
	for _, ch := range changes {
		if ch.Key.Kind == store.KindIPAMAffinity && ch.Key.Namespace == c.node {
			near[ch.Key] = true
			near[store.Key{Kind: store.KindIPAMBlock, Name: ch.Key.Name}] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(changes), func(ch *Change) bool {
		switch ch.Key.Kind {
		case store.KindIPAMAffinity:
			return !near[ch.Key]
		case store.KindIPAMBlock:
			return !c.concerns(ch, near)
		}
		return false
	})
}

// add marks one to be saved. The caller has the lock.
func (c *cache) add(ev store.Event) {
	next := unsaved{event: ev}
	if old, ok := c.pending[ev.Key]; ok {
		next = old.then(next)
	}
	c.pending[ev.Key] = next
}

// run saves what changes until ctx ends, and then what is left.
func (c *cache) run(ctx context.Context) {
	rest := time.NewTimer(time.Hour)
	defer rest.Stop()
	far := time.NewTicker(placesEvery)
	defer far.Stop()
	listen := c.changed
	for {
		select {
		case <-ctx.Done():
			// Who needs to know asks [Cluster.Save].
			_, _ = c.saveAll()
			return
		case <-far.C:
			if _, err := c.saveAll(); err == nil {
				continue
			}
		case <-listen:
		case <-rest.C:
			listen = c.changed
		}
		// What changes meanwhile is written together, and what failed is not tried
		// with every change.
		pause := savePause
		if did, err := c.save(); err != nil {
			pause = saveRetry
		} else if !did {
			continue
		}
		listen = nil
		rest.Reset(pause)
	}
}

// placesEvery is how often the disk learns how far a watch is in which nothing
// happened: a datastore forgets what was minutes ago.
const placesEvery = time.Minute

// errUnread says that there is nothing to save yet.
var errUnread = errors.New("the datastore has not said all since the start")

// save writes what is pending, and reports whether anything was. Nothing is until
// the datastore has said all.
func (c *cache) save() (did bool, err error) { return c.saveIf(false) }

// heard lists the kinds that are saved and of which the datastore has said something. The
// caller has mu.
func (c *cache) heard() []store.Kind {
	return slices.DeleteFunc(slices.Clone(c.kinds), func(k store.Kind) bool { return slices.Contains(c.without, k) })
}

// saveAll is save also where nothing changed but how far the watch is.
func (c *cache) saveAll() (did bool, err error) { return c.saveIf(true) }

func (c *cache) saveIf(far bool) (did bool, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.mu.Lock()
	pending, synced, places, kinds := c.pending, c.synced, c.places, c.heard()
	var own []store.Kind
	if i := slices.Index(kinds, store.KindWorkloadEndpoint); c.ownOnly && i >= 0 {
		own, kinds = kinds[i:i+1:i+1], slices.Concat(kinds[:i], kinds[i+1:])
	}
	switch {
	case c.file == nil:
		clear(c.pending)
		err := c.err
		c.mu.Unlock()
		return false, err
	case !synced:
		c.mu.Unlock()
		return false, errUnread
	case len(pending) == 0 && c.whole && c.mark != nil && slices.Equal(kinds, c.mark.Kinds) && slices.Equal(own, c.mark.Own) && (!far || maps.Equal(places, c.mark.Places)):
		c.mu.Unlock()
		return false, nil
	}
	c.pending = make(map[store.Key]unsaved)
	c.mu.Unlock()
	if err = c.write(pending, complete{Node: c.node, Kinds: kinds, Own: own, Places: places, Version: c.version, Others: c.others}); err != nil {
		c.mark = nil
		// What the disk holds may lack a policy that is in force.
		err = errors.Join(err, c.file.Forget(), c.file.Delete(completeKey))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if before := c.err; err != nil && (before == nil || before.Error() != err.Error()) {
		c.log.Warn("the datastore's state is not kept on disk; will try again", "error", err)
	} else if err == nil && before != nil {
		c.log.Info("the datastore's state is kept on disk again")
	}
	c.err = err
	if err != nil {
		for key, u := range pending {
			if newer, ok := c.pending[key]; ok {
				u = u.then(newer)
			}
			c.pending[key] = u
		}
	}
	return true, err
}

// write brings the file up to date, in one step. The first time pending is all that
// there is; of says of what the file is complete then.
func (c *cache) write(pending map[store.Key]unsaved, of complete) error {
	changes, err := c.changes(pending, of, !c.whole)
	if err != nil {
		return err
	}
	if len(changes) > 0 {
		if err := c.file.Apply(changes...); err != nil {
			return err
		}
		if err := c.file.Sync(); err != nil {
			return err
		}
	}
	if err := removePrevious(c.previous); err != nil {
		return err
	}
	c.whole, c.mark = true, &of
	return nil
}

// removePrevious removes the version before's files, for good.
func removePrevious(files []string) error {
	for _, path := range files {
		if !exists(path) {
			continue
		}
		err := os.Remove(path)
		if err == nil {
			err = atomicfile.SyncDir(filepath.Dir(path))
		}
		if err != nil {
			return fmt.Errorf("remove a file of the version before: %w", err)
		}
	}
	return nil
}

// changes returns what of the file is to change, of which says what is then complete;
// with all, what pending does not name is gone.
func (c *cache) changes(pending map[store.Key]unsaved, of complete, all bool) ([]journal.Change, error) {
	places := of.Places
	var out []journal.Change
	for key, u := range pending {
		path := key.Path()
		old, err := c.file.Get(path)
		if err != nil {
			old = nil // it was damaged, and is written anew
		}
		switch {
		case u.event.Deleted():
			if old != nil || err != nil {
				out = append(out, journal.Change{Key: path})
			}
			continue
		case u.event.Err != nil && !u.fresh && old != nil:
			continue // what was known of it holds
		}
		raw, err := content(u.event)
		if err != nil {
			return nil, err
		}
		// A revision alone is not worth a write: what comes later has a later one.
		was := unpack(old)
		if bytes.Equal(was.Object, raw) && (places == nil) == (was.Revision == 0) {
			continue
		}
		if rev := u.event.Object.Revision; places != nil && rev != 0 {
			if raw, err = json.Marshal(saved{rev, raw}); err != nil {
				return nil, fmt.Errorf("save %s: %w", key, err)
			}
		}
		out = append(out, journal.Change{Key: path, Value: raw, Checked: true})
	}
	if all {
		named := make(map[string]bool, len(pending))
		for key := range pending {
			named[key.Path()] = true
		}
		for _, path := range c.file.Keys() {
			if !named[path] && path != completeKey {
				out = append(out, journal.Change{Key: path})
			}
		}
	}
	mark, err := json.Marshal(of)
	if err != nil {
		return nil, err
	}
	if old, err := c.file.Get(completeKey); err != nil || !bytes.Equal(old, mark) {
		out = append(out, journal.Change{Key: completeKey, Value: json.RawMessage(mark)})
	}
	return out, nil
}

// content is what is saved of an object: JSON, which was decoded or made here, and a string of it
// where it is none.
func content(ev store.Event) (json.RawMessage, error) {
	raw := ev.Object.Raw
	switch {
	case ev.Err != nil && !json.Valid(raw):
		return json.Marshal(string(raw))
	case raw != nil:
		return raw, nil
	}
	raw, err := store.Encode(ev.Key, ev.Object.Value, nil)
	if err != nil {
		return nil, fmt.Errorf("save %s: %w", ev.Key, err)
	}
	return raw, nil
}

func (c *cache) close() error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.file == nil {
		return nil
	}
	return c.file.Close()
}
