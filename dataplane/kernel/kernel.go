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

	"github.com/routerd/routerd/control/async"
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
	// Sysctls is where the kernel's settings are: /proc/sys, unless that is
	// read-only in a container that is given them elsewhere. Optional: there.
	Sysctls string

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
	// Drift is called with the number of objects that another program changed,
	// removed or added.
	Drift func(kind dataplane.Kind, n int)
	// Repaired is called for each object that was put back, with the time
	// since the kernel announced the change. What went with a device does not
	// count: it waits for the device.
	Repaired func(kind dataplane.Kind, took time.Duration)
	// Listed is called with the time that a complete listing took.
	Listed func(time.Duration)
}

// Kernel makes the tables of one network namespace what their sources want.
// [Kernel.Run] does the work; all other methods may be called from any
// goroutine, before Run and after it too.
type Kernel struct {
	cfg  *Config
	log  *slog.Logger
	want tracker
	ns   *namespace
	wake async.Signal

	started   atomic.Bool
	closed    sync.Once
	ready     readiness
	heard     heard
	refused   *refusals
	supported sync.Map // dataplane.LinkType

	// The loop owns what follows, where it does not say otherwise.
	listing  *listing
	actual   *actual
	observer *observer
	writer   *writer
}

// readiness is what [Kernel.Ready] answers from.
type readiness struct {
	mu      sync.Mutex
	done    bool  // a pass that left nothing due was done after every source spoke
	listErr error // of the last listing
	listed  bool  // there was one
}

func (r *readiness) passed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = true
}

func (r *readiness) wasListed(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listErr = err
	r.listed = r.listed || err == nil
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
	if cfg.Sysctls == "" {
		cfg.Sysctls = sysctlRoot
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
	if err := lis.ignore(c.Port()); err != nil {
		return nil, errors.Join(err, lis.Close(), c.Close(), ns.Close())
	}
	settings, err := watchFiles(cfg.Sysctls)
	if err != nil {
		return nil, errors.Join(err, lis.Close(), c.Close(), ns.Close())
	}
	offloads, err := openEthtool()
	if err != nil {
		return nil, errors.Join(err, settings.Close(), lis.Close(), c.Close(), ns.Close())
	}
	k := &Kernel{
		cfg: &cfg, log: cfg.Log, ns: ns, wake: async.NewSignal(),
		refused: &refusals{keys: make(map[dataplane.Key]struct{})},
		listing: &listing{why: "start", backoff: async.Backoff{Min: minListBackoff, Max: maxListBackoff}},
	}
	k.actual = &actual{
		cfg: k.cfg, log: k.log, offloads: offloads,
		sysctls: &sysctls{root: cfg.Sysctls, ns: ns, watch: settings, made: make(map[dataplane.Key]struct{}), refused: k.refused},
		mirror:  newMirror(), onLink: make(map[string]map[dataplane.Key]struct{}), hops: newNextHops(),
	}
	k.want = newTracker(k.actual.noteHave, dataplane.SourceWorkload, dataplane.SourceCore, dataplane.SourceProbe)
	k.actual.want = k.want
	k.observer = &observer{
		actual: k.actual, lis: lis, listing: k.listing,
		drift: newDriftLog(k.cfg, k.want), waiting: make(waiting),
	}
	k.writer = &writer{
		observer: k.observer, conn: &connection{transport: wrap(c), ns: ns, lis: lis, listing: k.listing, log: k.log},
		ns: ns, doubted: make(doubted), quiescer: quiescer{wait: cfg.quiesce},
	}
	// Of what probes want, no sweep removes a setting, and their routes of the previous run may
	// go: nothing waits for them.
	k.want.Synced(dataplane.SourceProbe)
	return k, nil
}

// probe finds out whether we may write and the kernel has next-hop objects, by
// a request that is incomplete and so changes nothing.
func probe(c transport) error {
	var b builder
	b.deleteNextHop(0)
	errs, err := c.Batch(&b.Batch, nil)
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
		k.observer.underlay.close()
		err = errors.Join(k.observer.lis.Close(), k.writer.conn.Close(), k.ns.Close(), k.actual.sysctls.watch.Close())
		if k.actual.offloads != nil {
			err = errors.Join(err, k.actual.offloads.Close(), k.actual.offloads.changes.Close())
		}
	})
	return err
}

// none yields nothing.
func none[T any](func(T) bool) {}

// pairs yields routes and objects as the tracker has them.
func pairs(routes iter.Seq[dataplane.Route], objs []dataplane.Object) iter.Seq2[key, shape] {
	return func(yield func(key, shape) bool) {
		for r := range routes {
			if k, s := pairOf(canonicalRoute(r)); !yield(k, s) {
				return
			}
		}
		for _, o := range objs {
			o = canonical(o)
			if !yield(keyOf(o.Key()), shapeOf(o)) {
				return
			}
		}
	}
}

// Replace implements dataplane.Sink.
func (k *Kernel) Replace(src dataplane.Source, objs []dataplane.Object) dataplane.Revision {
	defer k.wake.Set()
	k.writer.toFlush.cancel(objs)
	return k.want.Replace(src, pairs(none, objs))
}

// Update implements dataplane.Sink. An object that is put although it is
// wanted already is tried again at once.
func (k *Kernel) Update(src dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	return k.UpdateRoutes(src, dataplane.RouteChanges{Put: none[dataplane.Route], Del: none[dataplane.RouteKey]}, put, del)
}

// UpdateRoutes is Update of routes and other objects, in one call.
func (k *Kernel) UpdateRoutes(src dataplane.Source, routes dataplane.RouteChanges, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	defer k.wake.Set()
	k.writer.toFlush.cancel(put)
	return k.want.Update(src, pairs(routes.Put, put), func(yield func(key) bool) {
		for gone := range routes.Del {
			if !yield(keyOfRoute(canonicalRouteKey(gone))) {
				return
			}
		}
		for _, gone := range del {
			if !yield(keyOf(canonicalKey(gone))) {
				return
			}
		}
	})
}

// Synced implements dataplane.Sink.
func (k *Kernel) Synced(src dataplane.Source) {
	defer k.wake.Set()
	k.want.Synced(src)
}

// Wait implements dataplane.Sink. It returns errors only of the objects that
// the call which returned rev named: others answer for themselves. An object
// that waits for a device or for another object is waited for until ctx ends,
// and the error then says what for.
//
// What the kernel said before the call of rev is heard first: a device that was made
// anew has none of what the one before it had.
func (k *Kernel) Wait(ctx context.Context, rev dataplane.Revision) error {
	k.heard.wait(ctx, rev)
	return k.want.Wait(ctx, rev)
}

// Status returns what became of the object with that key, and whether anybody
// wants it.
func (k *Kernel) Status(key dataplane.Key) (dataplane.Status, bool) {
	s, ok := k.want.Status(keyOf(canonicalKey(key)))
	if !ok {
		return dataplane.Status{}, false
	}
	return status(s), true
}

// Statuses returns what became of every wanted object, by key.
func (k *Kernel) Statuses() []dataplane.Status {
	all := k.want.Statuses()
	slices.SortFunc(all, func(a, b reconcile.Status[key, shape]) int { return compareKeys(a.Key, b.Key) })
	out := make([]dataplane.Status, len(all))
	for i, s := range all {
		out[i] = status(s)
	}
	return out
}

func status(s reconcile.Status[key, shape]) dataplane.Status {
	return dataplane.Status{Object: s.Want.whole(s.Key), Source: s.Source, State: s.State, Since: s.Since, Err: s.Err}
}

// Alive returns when the loop last turned. An idle loop turns every second;
// a long pass counts each of its batches. Zero: not running yet.
func (k *Kernel) Alive() time.Time {
	if at := k.writer.pulse.at.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// Ready reports whether the kernel's tables were made what is wanted once
// since every source first spoke, and can still be read, and no setting that is wanted
// is refused, as in a container with a read-only /proc/sys: a host that does not forward
// carries nothing. If not, it says why.
// A source need not be synced: only the sweep of leftovers waits for that.
func (k *Kernel) Ready() (bool, string) {
	r := &k.ready
	r.mu.Lock()
	defer r.mu.Unlock()
	silent := k.want.Silent()
	switch {
	case r.listErr != nil:
		return false, fmt.Sprintf("cannot list the kernel's tables: %v", r.listErr)
	case !r.listed:
		return false, "the kernel's tables are not listed yet"
	case len(silent) > 0:
		return false, fmt.Sprintf("source %s has not said yet what it wants", silent[0])
	case !r.done:
		return false, "the first pass is not done yet"
	}
	for _, key := range k.refused.list() {
		s, wanted := k.Status(key)
		if w, ok := s.Object.(dataplane.Sysctl); ok && wanted && s.State == dataplane.Failed {
			return false, fmt.Sprintf("the kernel's setting %s has to be %s, and cannot be made so: %v", w.Name, w.Value, s.Err)
		}
	}
	return true, ""
}
