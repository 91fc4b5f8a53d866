package kernel

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// DefaultProtocol is the routing protocol number that marks our routes and
// next hops. Neither the kernel's headers, FRR, BIRD nor Calico use it.
const DefaultProtocol = 77

// DefaultFullCheck is the time between complete listings.
const DefaultFullCheck = 90 * time.Second

// DefaultListingShare lets complete listings take a fiftieth of the time.
const DefaultListingShare = 50

// Config says how a [Kernel] works.
type Config struct {
	// Protocol marks our routes and next hops (RTPROT_*). Optional:
	// DefaultProtocol. Numbers up to 4 belong to the kernel and the
	// administrator and are refused.
	Protocol uint8
	// Log is required.
	Log *slog.Logger
	// FullCheck is the time between complete listings, more where one takes
	// over a part of it that ListingShare says; a tenth more or less is added at
	// random. Optional: DefaultFullCheck.
	FullCheck time.Duration
	// ListingShare bounds the part of the time that complete listings take, for
	// nothing is written meanwhile: 50 is a fiftieth. Optional:
	// DefaultListingShare.
	ListingShare int
	// Hooks are optional.
	Hooks Hooks

	quiesce func() // for tests; see [quiesce]
}

// Hooks are called by the loop when something happens that is worth counting.
// Each is optional, must be quick and must not call the [Kernel].
type Hooks struct {
	// Written is called with the number of objects that were created,
	// changed or, if removed is set, removed in one batch.
	Written func(kind dataplane.Kind, removed bool, n int)
	// Refused is called when the kernel refused an object.
	Refused func(kind dataplane.Kind)
	// Drift is called with the number of objects that somebody else changed,
	// removed or added.
	Drift func(kind dataplane.Kind, n int)
	// Repaired is called for each object that was put back, with the time
	// since the kernel told of the change. What went with a device does not
	// count: it waits for the device.
	Repaired func(kind dataplane.Kind, took time.Duration)
	// Listed is called with the time that a complete listing took.
	Listed func(time.Duration)
}

// Kernel makes the tables of one network namespace what their sources want.
// [Kernel.Run] does the work; all other methods may be called from any
// goroutine, before Run and after it too.
type Kernel struct {
	cfg  Config
	log  *slog.Logger
	want *reconcile.Tracker[dataplane.Key, dataplane.Object]
	ns   *namespace
	lis  *listener
	eth  *ethtool  // nil: the kernel has none
	offs *listener // to changes of offloads; nil without eth
	// settings tells of sysctls that were written.
	settings *watcher
	poke     chan struct{}

	alive   atomic.Int64 // nanoseconds since the epoch
	writes  atomic.Int64 // messages that change something, and sysctls
	started atomic.Bool
	closed  sync.Once

	subs subscribers

	mu       sync.Mutex
	passed   bool  // a pass that left nothing due was done after every source spoke
	listErr  error // of the last listing
	listed   bool  // there was one
	supports map[dataplane.LinkType]bool
	toCut    []dataplane.Key // next hops

	// What follows belongs to the loop.
	nl        transport
	mir       *mirror
	onLink    map[string]map[dataplane.Key]struct{} // what there is, by device
	nextHops  map[dataplane.NextHopID]struct{}      // what there is
	groups    map[dataplane.NextHopID]struct{}      // those of them that are groups
	users     map[dataplane.NextHopID]int           // routes and groups that there are, by next hop
	routes    int                                   // routes that there are
	measured  map[dataplane.NextHopID]struct{}      // next hops of which a route has, or had, metrics
	sysctls   map[dataplane.Key]struct{}            // settings that are as we made them
	waits     map[dataplane.Key][]dataplane.Key     // who waits for what
	held      map[dataplane.NextHopID]dataplane.Key // unwanted, but still in use
	freed     []dataplane.Key                       // of those, no longer in use
	cut       map[dataplane.NextHopID]struct{}      // gone, with the routes that users still counts
	doubted   map[dataplane.Key]struct{}            // the last answer about them contradicted what we believed
	asked     map[dataplane.NextHopID]struct{}      // to go with what leads to them, when the connection broke
	seen      map[dataplane.Kind][]dataplane.Key    // foreign changes to be told of
	adrift    map[dataplane.Key]drift               // until it is put right
	notice    notice                                // what is being taken in
	went      map[string]map[dataplane.Kind]int     // what went with a device, to be told of
	cause     string                                // the device with which things are going
	quiet     bool                                  // changes of devices are our own doing
	rerouted  bool                                  // routes or next hops were written, and packets may still go by what was before
	dirty     string                                // why a listing is needed
	listAt    time.Time                             // not before
	fullAt    time.Time
	showAt    time.Time // when to publish the underlay; zero: nothing new
	showDelay time.Duration
	listTries int
}

var _ dataplane.Sink = (*Kernel)(nil)

// New opens a Kernel on the network namespace of the calling thread, to which
// the caller has locked itself if that is not the process's. It needs
// CAP_NET_ADMIN there, and CAP_SYS_ADMIN too where the namespace is not the
// process's. It changes nothing.
func New(cfg Config) (*Kernel, error) {
	return open(cfg, bufferBytes, func(t transport) transport { return t })
}

// open is New with a listening buffer of that many bytes and a transport that
// goes through wrap, for tests.
func open(cfg Config, listenBuffer int, wrap func(transport) transport) (*Kernel, error) {
	if cfg.Protocol == 0 {
		cfg.Protocol = DefaultProtocol
	}
	if cfg.Protocol <= unix.RTPROT_STATIC {
		return nil, fmt.Errorf("protocol %s cannot mark our routes: choose a number from 5 to 255 that no other daemon here uses", protocolName(cfg.Protocol))
	}
	if cfg.FullCheck == 0 {
		cfg.FullCheck = DefaultFullCheck
	}
	if cfg.ListingShare == 0 {
		cfg.ListingShare = DefaultListingShare
	}
	if cfg.Log == nil {
		return nil, errors.New("log: a logger is required")
	}
	if cfg.quiesce == nil {
		cfg.quiesce = quiesce
	}
	ns, err := currentNamespace()
	if err != nil {
		return nil, err
	}
	c, err := dialConn()
	if err != nil {
		ns.Close()
		return nil, err
	}
	if err := probe(c); err != nil {
		return nil, errors.Join(err, c.Close(), ns.Close())
	}
	lis, err := listen(listenBuffer)
	if err != nil {
		return nil, errors.Join(err, c.Close(), ns.Close())
	}
	if err := lis.ignore(c.port()); err != nil {
		return nil, errors.Join(err, lis.Close(), c.Close(), ns.Close())
	}
	settings, err := watchFiles()
	if err != nil {
		return nil, errors.Join(err, lis.Close(), c.Close(), ns.Close())
	}
	eth, offs, err := openEthtool()
	if err != nil {
		return nil, errors.Join(err, settings.Close(), lis.Close(), c.Close(), ns.Close())
	}
	k := &Kernel{
		cfg: cfg, log: cfg.Log, ns: ns, lis: lis, nl: wrap(c), eth: eth, offs: offs, settings: settings,
		poke:     make(chan struct{}, 1),
		supports: make(map[dataplane.LinkType]bool),
		mir:      newMirror(),
		onLink:   make(map[string]map[dataplane.Key]struct{}),
		nextHops: make(map[dataplane.NextHopID]struct{}),
		groups:   make(map[dataplane.NextHopID]struct{}),
		users:    make(map[dataplane.NextHopID]int),
		sysctls:  make(map[dataplane.Key]struct{}),
		waits:    make(map[dataplane.Key][]dataplane.Key),
		held:     make(map[dataplane.NextHopID]dataplane.Key),
		cut:      make(map[dataplane.NextHopID]struct{}),
		asked:    make(map[dataplane.NextHopID]struct{}),
		doubted:  make(map[dataplane.Key]struct{}),
		seen:     make(map[dataplane.Kind][]dataplane.Key),
		measured: make(map[dataplane.NextHopID]struct{}),
		adrift:   make(map[dataplane.Key]drift),
		went:     make(map[string]map[dataplane.Kind]int),
		dirty:    "start",
	}
	k.want = reconcile.New(reconcile.Config[dataplane.Key, dataplane.Object]{
		Sources: []reconcile.Source{
			reconcile.Source(dataplane.SourceWorkload), reconcile.Source(dataplane.SourceCore), reconcile.Source(dataplane.SourceProbe),
		},
		Classes: len(dataplane.Kinds()),
		Class:   func(key dataplane.Key) int { return class(key.Kind()) },
		Equal:   equal,
		OnHave:  k.noteHave,
	})
	// Probes want settings alone, which no sweep removes: nothing waits for them.
	k.want.Synced(reconcile.Source(dataplane.SourceProbe))
	return k, nil
}

// probe finds out whether we may write and the kernel has next-hop objects, by
// a request that is incomplete and so changes nothing.
func probe(c transport) error {
	var b builder
	b.deleteNextHop(0)
	errs, err := c.batch(&b)
	if err != nil {
		return fmt.Errorf("talk to the kernel: %w", err)
	}
	switch err := errs[0]; {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("write the kernel's routing tables: %w: run as root or give the process CAP_NET_ADMIN", err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("use next-hop objects: %w: Linux 5.3 or later is needed", err)
	}
	return nil
}

func class(k dataplane.Kind) int { return int(k - dataplane.KindLink) }

// Close releases what New opened. Run calls it; it is for a Kernel that is
// never run.
func (k *Kernel) Close() error {
	var err error
	k.closed.Do(func() {
		k.subs.close()
		err = errors.Join(k.lis.Close(), k.nl.Close(), k.ns.Close(), k.settings.Close())
		if k.eth != nil {
			err = errors.Join(err, k.eth.Close(), k.offs.Close())
		}
	})
	return err
}

func (k *Kernel) wakeLoop() {
	select {
	case k.poke <- struct{}{}:
	default:
	}
}

func pairs(objs []dataplane.Object) iter.Seq2[dataplane.Key, dataplane.Object] {
	return func(yield func(dataplane.Key, dataplane.Object) bool) {
		for _, o := range objs {
			o = canonical(o)
			if !yield(o.Key(), o) {
				return
			}
		}
	}
}

// Replace implements dataplane.Sink.
func (k *Kernel) Replace(src dataplane.Source, objs []dataplane.Object) dataplane.Revision {
	defer k.wakeLoop()
	k.spare(objs)
	return dataplane.Revision(k.want.Replace(reconcile.Source(src), pairs(objs)))
}

// Update implements dataplane.Sink. An object that is put although it is
// wanted already is tried again at once.
func (k *Kernel) Update(src dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	defer k.wakeLoop()
	k.spare(put)
	return dataplane.Revision(k.want.Update(reconcile.Source(src), pairs(put), func(yield func(dataplane.Key) bool) {
		for _, key := range del {
			if !yield(canonicalKey(key)) {
				return
			}
		}
	}))
}

// Synced implements dataplane.Sink.
func (k *Kernel) Synced(src dataplane.Source) {
	defer k.wakeLoop()
	k.want.Synced(reconcile.Source(src))
}

// Wait implements dataplane.Sink. It returns errors only of the objects that
// the call which returned rev named: others answer for themselves. An object
// that waits for a device or for another object is waited for until ctx ends,
// and the error then says what for.
func (k *Kernel) Wait(ctx context.Context, rev dataplane.Revision) error {
	return k.want.Wait(ctx, reconcile.Revision(rev))
}

// Status returns what became of the object with that key, and whether anybody
// wants it.
func (k *Kernel) Status(key dataplane.Key) (dataplane.Status, bool) {
	s, ok := k.want.Status(canonicalKey(key))
	return status(s), ok
}

// Statuses returns what became of every wanted object, by key.
func (k *Kernel) Statuses() []dataplane.Status {
	all := k.want.Statuses()
	slices.SortFunc(all, func(a, b reconcile.Status[dataplane.Key, dataplane.Object]) int {
		return dataplane.CompareKeys(a.Key, b.Key)
	})
	out := make([]dataplane.Status, len(all))
	for i, s := range all {
		out[i] = status(s)
	}
	return out
}

func status(s reconcile.Status[dataplane.Key, dataplane.Object]) dataplane.Status {
	state := dataplane.Pending
	switch s.State {
	case reconcile.Done:
		state = dataplane.Done
	case reconcile.Failed:
		state = dataplane.Failed
	}
	return dataplane.Status{
		Object: s.Want, Source: dataplane.Source(s.Source), State: state, Since: s.Since, Err: s.Err, Attempts: s.Attempts,
	}
}

// Alive returns when the loop last turned. An idle loop turns every second;
// a long pass counts each of its batches. Zero: not running yet.
func (k *Kernel) Alive() time.Time {
	if n := k.alive.Load(); n != 0 {
		return time.Unix(0, n)
	}
	return time.Time{}
}

// Ready reports whether the kernel's tables were made what is wanted once
// since every source first spoke, and can still be read. If not, it says why.
// A source need not be synced: only the sweep of leftovers waits for that.
func (k *Kernel) Ready() (bool, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	silent := k.want.Silent()
	switch {
	case k.listErr != nil:
		return false, fmt.Sprintf("cannot list the kernel's tables: %v", k.listErr)
	case !k.listed:
		return false, "the kernel's tables are not listed yet"
	case len(silent) > 0:
		return false, fmt.Sprintf("source %s has not said yet what it wants", dataplane.Source(silent[0]))
	case !k.passed:
		return false, "the first pass is not done yet"
	}
	return true, ""
}
