package vrouter

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/control/spans"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Config is what a [Core] needs.
type Config struct {
	Node string       // this host's name; required
	Sink Sink         // required
	Log  *slog.Logger // required

	// Status says what became of a wanted object, and whether anybody wants it,
	// as the sink's owner does. Optional: everything counts as done at once.
	Status func(dataplane.Key) (dataplane.Status, bool)

	// Publish says that [Core.Publications] has a reader. Without it this
	// host follows its pools at once, like a node that knows nothing of live
	// changes.
	Publish bool

	// UsePodCIDR says that the ranges that Kubernetes gave Nodes are theirs, as blocks are.
	UsePodCIDR bool

	// WithoutBGP says that no best paths will ever come, so that the desired state is
	// complete as soon as the store is in sync.
	WithoutBGP bool

	// DeferBGP is how long at most what BGP learns is held back until its
	// peers have announced all they know. After a restart the first path to come is
	// often not the best one, and the kernel still has the routes of before:
	// they are not to move there and back (RFC 4724, section 4.1, calls it the
	// deferral of route selection). The bound is for peers that died
	// meanwhile. Zero: nothing is held back.
	DeferBGP time.Duration

	// Tracer records how long a change of the datastore takes to the kernel; nil:
	// nothing does.
	Tracer *spans.Tracer
}

// Core owns the table. Its methods may be called from any goroutine; they hand
// their argument to the loop of [Core.Run] and wait for room, so that a fast
// producer is slowed down to what the core can take.
type Core struct {
	cfg    Config
	events chan func(*loop)
	alive  atomic.Pointer[time.Time] // the loop's last turn, with its monotonic part: the host's clock may jump
	mtus   mtus
	hint   chan dataplane.Revision
	steps  chan struct{} // a token for each step of BGP's that is not applied

	tracing      tracing
	started      chan struct{}
	targets      latest[[]dataplane.ProbeTarget]
	publications latest[store.NodeEncaps]
}

// New returns a core that does nothing until [Core.Run].
func New(cfg Config) *Core {
	c := &Core{
		cfg: cfg, events: make(chan func(*loop), 64), hint: make(chan dataplane.Revision, 1), steps: make(chan struct{}, maxSteps),
		mtus: mtus{changed: make(chan struct{}, 1)}, started: make(chan struct{}),
	}
	c.tracing.tracer, c.tracing.wait = cfg.Tracer, cfg.Sink.Wait
	c.beat()
	return c
}

// loop is what only the goroutine of Run touches.
type loop struct {
	*table
	storeSynced bool
	fromDisk    bool // there is a complete state all the same, which may be old
	bgpSynced   bool
	settled     bool // nothing has come since the last flush, and that left nothing to do
	replaced    bool // the sink has the first complete state
	synced      bool // the sink knows that the desired state is complete
	waiting     string

	unsure   map[dataplane.Key]struct{} // next hops put whose end is not known
	removals []dataplane.Revision       // of the sink, with next hops to go

	cuts []dataplane.Key // next hops flushed since routes were last chosen

	published time.Time   // when what is to be measured was
	probes    *time.Timer // for what has changed of it since

	held    []rib.Update // what BGP learned, while it is held back
	holdEnd time.Time    // zero: nothing is held back any more
}

// Store applies a step of the cluster's copy. One from the disk, after a boot, says what
// is to be there, and never that anything else is not.
func (c *Core) Store(ctx context.Context, s cluster.Step) error {
	var traced span
	if c.cfg.Tracer.Enabled() {
		traced = c.tracing.begin(ctx, s)
	}
	return c.post(ctx, func(l *loop) {
		for _, ch := range s.Changes {
			l.apply(ch)
		}
		if traced.end != nil {
			c.tracing.open = append(c.tracing.open, traced)
		}
		l.rib.PreferLearned(s.Source == cluster.Disk)
		if s.Source == cluster.Disk {
			l.fromDisk = l.fromDisk || s.Synced
			return
		}
		l.storeSynced = l.storeSynced || s.Synced
	})
}

// maxSteps is how many steps of BGP's may wait: one is read while another is applied. What
// changes while they are under way is one change of its prefix in BGP's table.
const maxSteps = 2

// Paths applies a step of BGP's best paths.
func (c *Core) Paths(ctx context.Context, u rib.Update) error {
	select {
	case c.steps <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("hand paths to the core: %w", context.Cause(ctx))
	}
	err := c.post(ctx, func(l *loop) {
		<-c.steps
		l.bgpSynced = l.bgpSynced || u.Synced
		if l.rib.SetDown(u.Down, nil); len(u.Down) > 0 && l.replaced {
			// Next hops go first: what follows takes time by the number of prefixes.
			c.handOver(l)
			c.cut(l, u.Down)
		}
		l.held = append(l.held, u)
		l.releasePaths(time.Now())
	})
	if err != nil {
		<-c.steps
	}
	return err
}

// releasePaths lets in what BGP learned once it is in sync, or has been held
// back long enough. It reports whether there was anything.
func (l *loop) releasePaths(now time.Time) bool {
	if !l.bgpSynced && now.Before(l.holdEnd) {
		return false
	}
	l.holdEnd = time.Time{}
	held := l.held
	l.held = nil
	for _, u := range held {
		l.rib.SetPaths(u)
	}
	if len(held) > 0 {
		l.encap.RoutesChanged()
	}
	return len(held) > 0
}

// Underlay applies a snapshot of the network around the host.
func (c *Core) Underlay(ctx context.Context, u dataplane.Underlay) error {
	return c.post(ctx, func(l *loop) { l.setUnderlay(u) })
}

// Explain lists the candidates of the prefixes that overlap filter, or of all
// if filter is not valid, in prefix order with the best first.
func (c *Core) Explain(ctx context.Context, filter netip.Prefix) ([]rib.Candidate, error) {
	return ask(ctx, c, func(l *loop) []rib.Candidate { return l.rib.Explain(filter) })
}

// Pools returns how each pool is carried, by name.
func (c *Core) Pools(ctx context.Context) ([]encap.PoolStatus, error) {
	return ask(ctx, c, func(l *loop) []encap.PoolStatus { return l.encap.Status() })
}

// TunnelConflicts says which nodes' VTEPs are left out, for another node has their
// address or MAC.
func (c *Core) TunnelConflicts(ctx context.Context) ([]string, error) {
	return ask(ctx, c, func(l *loop) []string { return l.encap.Conflicts() })
}

// Host returns this host's place on the underlay in a family.
func (c *Core) Host(ctx context.Context, f dataplane.Family) (dataplane.Host, error) {
	return ask(ctx, c, func(l *loop) dataplane.Host { return l.encap.Host(f) })
}

// Waiting says what the core still waits for before it can hand over the desired state;
// it is empty when nothing is missing.
func (c *Core) Waiting(ctx context.Context) (string, error) {
	return ask(ctx, c, func(l *loop) string { return l.waiting })
}

// Started returns a channel that is closed once the core knows this host and the
// first complete state was handed over.
func (c *Core) Started() <-chan struct{} { return c.started }

// Publications returns a channel that carries what this host is to publish in
// its Node resource. The next one comes after [Core.Published] was called for
// the one before. The channel is closed when ctx ends.
func (c *Core) Publications(ctx context.Context) <-chan store.NodeEncaps {
	return c.publications.subscribe(ctx)
}

// Published says that the last publication is in the store, in the Node's
// revision rev or an earlier one.
func (c *Core) Published(ctx context.Context, rev store.Revision) error {
	return c.post(ctx, func(l *loop) { l.encap.Written(rev) })
}

func (c *Core) beat() {
	now := time.Now()
	c.alive.Store(&now)
}

// Alive is when the loop last turned. A loop that works turns every second.
func (c *Core) Alive() time.Time { return *c.alive.Load() }

// post hands the loop an event, after which there may be something to hand over.
func (c *Core) post(ctx context.Context, f func(*loop)) error {
	return c.hand(ctx, func(l *loop) {
		l.settled = false
		f(l)
	})
}

func (c *Core) hand(ctx context.Context, f func(*loop)) error {
	select {
	case c.events <- f:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("hand an event to the core: %w", context.Cause(ctx))
	}
}

// ask answers a question about all that was posted before it.
func ask[T any](ctx context.Context, c *Core, f func(*loop) T) (T, error) {
	answer := make(chan T, 1)
	var zero T
	if err := c.hand(ctx, func(l *loop) {
		if !l.settled {
			c.flush(l)
		}
		answer <- f(l)
	}); err != nil {
		return zero, err
	}
	select {
	case v := <-answer:
		return v, nil
	case <-ctx.Done():
		return zero, fmt.Errorf("wait for the core: %w", context.Cause(ctx))
	}
}

// turnSize bounds about how many prefixes one turn applies: while the kernel
// gets those the core goes on with the next, and none waits for all. Who writes them
// waits while they are handed over.
const turnSize = 1 << 12

// Run is the loop. It returns when ctx ends.
func (c *Core) Run(ctx context.Context) error {
	l := &loop{table: newTable(c.cfg.Node), bgpSynced: c.cfg.WithoutBGP, unsure: map[dataplane.Key]struct{}{}, probes: time.NewTimer(gather)}
	defer l.probes.Stop()
	l.pods.on = c.cfg.UsePodCIDR
	if c.cfg.DeferBGP > 0 {
		l.holdEnd = time.Now().Add(c.cfg.DeferBGP)
	}
	ctx, cancel := context.WithCancel(ctx)
	var hints sync.WaitGroup
	hints.Go(func() { c.followSink(ctx) })
	defer hints.Wait()
	defer c.tracing.ends.Wait()
	defer cancel()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case now := <-tick.C:
			// The kernel says nothing of its own accord about what it refused
			// and then took after all.
			if l.releasePaths(now) || l.replaced && c.look(l) {
				c.flush(l)
			}
		case <-l.probes.C:
			c.publishTargets(l)
		case f := <-c.events:
			f(l)
			for more := true; more && l.rib.Unsettled() < turnSize; {
				select {
				case f := <-c.events:
					f(l)
				default:
					more = false
				}
			}
			if !l.settled {
				c.flush(l)
			}
		}
		c.beat()
	}
}

// flush hands what changed to the sink. Before the store is in sync nothing is
// handed over: a partial view would only cause writes that the rest reverts.
func (c *Core) flush(l *loop) {
	l.settled = true
	if !l.storeSynced && !l.fromDisk {
		l.waiting = "the datastore's first complete answer"
		return
	}
	if err := l.encap.Ready(); err != nil {
		l.waiting = err.Error()
		return
	}
	var rev dataplane.Revision
	l.settled = false
	for range maxRounds {
		l.settle()
		l.mend()
		rev = max(rev, c.handOver(l))
		if l.settled = !c.look(l) && !c.publish(l); l.settled {
			break
		}
	}
	c.tracing.handed(rev)
	c.mtus.set(l.encap.MTU)
	c.publishTargets(l)
	// BGP is not waited for here: a dead peer must not make the host unready.
	// Only the sweep of what the previous run left waits for it.
	l.waiting = ""
	if l.bgpSynced && l.storeSynced && !l.synced {
		c.cfg.Sink.Synced(dataplane.SourceCore)
		l.synced = true
		routes, hops := l.rib.Counts()
		c.cfg.Log.Info("the desired state is complete", "routes", routes, "nexthops", hops)
		c.flush(l) // encapsulations of the previous run are left now; see confirmed
	}
}

// gather is the least time between two lists of what is to be measured: each is
// of all nodes, and many nodes may come one after the other.
const gather = 250 * time.Millisecond

func (c *Core) publishTargets(l *loop) {
	if wait := gather - time.Since(l.published); wait > 0 && l.encap.Retargeted() {
		l.probes.Reset(wait)
	} else if now, changed := l.encap.Targets(); changed {
		l.published = time.Now()
		c.targets.publish(now)
	}
}

// handOver hands the first complete state, or the changes of it, to the sink.
// Devices go first and apart from the rest, so that what becomes of them is
// known without waiting for routes.
func (c *Core) handOver(l *loop) (rev dataplane.Revision) {
	defer l.objects.HandedOver()
	defer l.rib.HandedOver()
	if !l.replaced {
		rev = c.cfg.Sink.Replace(dataplane.SourceCore, l.desired())
		l.replaced = true
		close(c.started)
		l.noteHops(l.objects.Put)
		l.removals = append(l.removals, rev)
		c.hintAt(rev)
		return rev
	}
	var first, rest []dataplane.Object
	for k, o := range l.objects.Put {
		if k.Kind() <= dataplane.KindSysctl {
			first = append(first, o)
		} else {
			rest = append(rest, o)
		}
	}
	if len(first) > 0 {
		rev = c.cfg.Sink.Update(dataplane.SourceCore, first, nil)
		c.hintAt(rev)
	}
	del := slices.Collect(maps.Keys(l.objects.Del))
	if !l.rib.Changed() && len(rest)+len(del) == 0 {
		return rev
	}
	rev = c.cfg.Sink.UpdateRoutes(dataplane.SourceCore, l.rib.Changes(), rest, del)
	if l.noteHops(l.objects.Put); l.goingHops(l.objects.Del) {
		l.removals = append(l.removals, rev)
	}
	c.hintAt(rev)
	return rev
}

// cut takes next hops that are of no use any more out of the kernel, and what
// leads to them, before new routes are chosen.
func (c *Core) cut(l *loop, down []netip.Addr) {
	keys := l.rib.Useless(down)
	if len(keys) == 0 {
		return
	}
	rev := c.cfg.Sink.Flush(dataplane.SourceCore, keys)
	l.cuts = append(l.cuts, keys...)
	l.removals = append(l.removals, rev)
	c.hintAt(rev)
}

// mend wants again what was cut and is in use now that routes were chosen.
func (l *loop) mend() {
	for _, k := range l.cuts {
		l.objects.Again(k)
	}
	l.cuts = nil
}

// noteHops notes next hops whose end is to be awaited.
func (l *loop) noteHops(put map[dataplane.Key]dataplane.Object) {
	for k := range put {
		if k.Kind() == dataplane.KindNextHop {
			l.unsure[k] = struct{}{}
		}
	}
}

// goingHops reports whether next hops are to go.
func (l *loop) goingHops(del map[dataplane.Key]struct{}) bool {
	going := false
	for k := range del {
		if k.Kind() == dataplane.KindNextHop {
			delete(l.unsure, k)
			going = true
		}
	}
	return going
}

// publish offers what this host is to publish, if it differs from what it has
// published. It reports whether it did.
func (c *Core) publish(l *loop) bool {
	if !c.cfg.Publish {
		return false
	}
	f := l.encap.Offer()
	if f == nil {
		return false
	}
	c.cfg.Log.Debug("to be published", "accepts", f.Accepts, "uses", f.Uses, "sends", f.Sends, "refuses", f.Refuses)
	c.publications.publish(*f)
	return true
}

// desired returns every object that the kernel is to have.
func (t *table) desired() []dataplane.Object {
	routes, _ := t.rib.Counts()
	out := slices.AppendSeq(make([]dataplane.Object, 0, t.objects.Len()+routes), t.objects.All())
	for r := range t.rib.Routes() {
		out = append(out, r)
	}
	return out
}
