package vrouter

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Config is what a [Core] needs.
type Config struct {
	Node string         // this host's name; required
	Sink dataplane.Sink // required
	Log  *slog.Logger   // required

	// WithoutBGP says that no best paths will ever come, so that the wish is
	// complete as soon as the store is in sync.
	WithoutBGP bool

	// DeferBGP is how long at most what BGP learns is held back until its
	// peers have told all they know. After a restart the first path to come is
	// often not the best one, and the kernel still has the routes of before:
	// they are not to move there and back (RFC 4724, section 4.1, calls it the
	// deferral of route selection). The bound is for peers that died
	// meanwhile. Zero: nothing is held back.
	DeferBGP time.Duration
}

// Core owns the table. Its methods may be called from any goroutine; they hand
// their argument to the loop of [Core.Run] and wait for room, so that a fast
// producer is slowed down to what the core can take.
type Core struct {
	cfg    Config
	events chan func(*loop)
	alive  atomic.Int64 // Unix nanoseconds of the loop's last turn
	mtus   mtus

	targets latest[[]Target]
}

// New returns a core that does nothing until [Core.Run].
func New(cfg Config) *Core {
	c := &Core{cfg: cfg, events: make(chan func(*loop), 64), mtus: mtus{changed: make(chan struct{}, 1)}}
	c.alive.Store(time.Now().UnixNano())
	return c
}

// loop is what only the goroutine of Run touches.
type loop struct {
	*table
	storeSynced bool
	bgpSynced   bool
	replaced    bool // the first whole wish was handed over
	synced      bool // the sink was told that the wish is complete
	waiting     string

	held    []PathUpdate // what BGP learned, while it is held back
	holdEnd time.Time    // zero: nothing is held back any more
}

// Store takes in a batch of the store's watch.
func (c *Core) Store(ctx context.Context, b store.Batch) error {
	return c.post(ctx, func(l *loop) {
		for _, ev := range b.Events {
			if ev.Err != nil {
				c.cfg.Log.Warn("object cannot be decoded; keeping what was known", "key", ev.Key, "error", ev.Err)
			}
			l.apply(ev)
		}
		l.storeSynced = l.storeSynced || b.Synced
	})
}

// Paths takes in best paths from BGP.
func (c *Core) Paths(ctx context.Context, u PathUpdate) error {
	return c.post(ctx, func(l *loop) {
		l.bgpSynced = l.bgpSynced || u.Synced
		l.held = append(l.held, u)
		l.releasePaths(time.Now())
	})
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
		l.setPaths(u)
	}
	return len(held) > 0
}

// Underlay takes in a snapshot of the network around the host.
func (c *Core) Underlay(ctx context.Context, u dataplane.Underlay) error {
	return c.post(ctx, func(l *loop) { l.setUnderlay(u) })
}

// Explain lists the candidates of the prefixes that overlap filter, or of all
// if filter is not valid, in prefix order with the best first.
func (c *Core) Explain(ctx context.Context, filter netip.Prefix) ([]Candidate, error) {
	return ask(ctx, c, func(l *loop) []Candidate { return l.explain(filter) })
}

// Pools returns how each pool is carried, by name.
func (c *Core) Pools(ctx context.Context) ([]PoolStatus, error) {
	return ask(ctx, c, func(l *loop) []PoolStatus { return l.poolStatus() })
}

// Host returns this host's place on the underlay in a family.
func (c *Core) Host(ctx context.Context, f dataplane.Family) (dataplane.Host, error) {
	return ask(ctx, c, func(l *loop) dataplane.Host { return l.hosts[f] })
}

// Waiting says what the core still waits for before it can hand over its wish;
// it is empty when nothing is missing.
func (c *Core) Waiting(ctx context.Context) (string, error) {
	return ask(ctx, c, func(l *loop) string { return l.waiting })
}

// Alive is when the loop last turned. A loop that works turns every second.
func (c *Core) Alive() time.Time { return time.Unix(0, c.alive.Load()) }

func (c *Core) post(ctx context.Context, f func(*loop)) error {
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
	if err := c.post(ctx, func(l *loop) {
		c.flush(l)
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

// Run is the loop. It returns when ctx ends.
func (c *Core) Run(ctx context.Context) error {
	l := &loop{table: newTable(c.cfg.Node), bgpSynced: c.cfg.WithoutBGP}
	if c.cfg.DeferBGP > 0 {
		l.holdEnd = time.Now().Add(c.cfg.DeferBGP)
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case now := <-tick.C:
			if len(l.held) > 0 && l.releasePaths(now) {
				c.flush(l)
			}
		case f := <-c.events:
			f(l)
			for more := true; more; {
				select {
				case f := <-c.events:
					f(l)
				default:
					more = false
				}
			}
			c.flush(l)
		}
		c.alive.Store(time.Now().UnixNano())
	}
}

// flush hands what changed to the sink. Before the store is in sync nothing is
// handed over: a partial view would only cause writes that the rest reverts.
func (c *Core) flush(l *loop) {
	if !l.storeSynced {
		l.waiting = "the datastore's first complete answer"
		return
	}
	if err := l.ready(); err != nil {
		l.waiting = err.Error()
		return
	}
	l.settle()
	c.mtus.set(l.table)
	switch {
	case !l.replaced:
		c.cfg.Sink.Replace(dataplane.SourceCore, l.wish())
		l.replaced = true
	case len(l.put)+len(l.del) > 0:
		c.cfg.Sink.Update(dataplane.SourceCore, slices.Collect(maps.Values(l.put)), slices.Collect(maps.Keys(l.del)))
	}
	clear(l.put)
	clear(l.del)
	// BGP is not waited for here: a dead peer must not make the host unready.
	// Only the sweep of what an earlier life left waits for it.
	l.waiting = ""
	if l.bgpSynced && !l.synced {
		c.cfg.Sink.Synced(dataplane.SourceCore)
		l.synced = true
		c.cfg.Log.Info("the wish is complete", "routes", len(l.routes), "nexthops", len(l.hops))
	}
}

// wish returns every wanted object in a fixed order.
func (t *table) wish() []dataplane.Object {
	out := make([]dataplane.Object, 0, len(t.objs))
	for _, w := range t.objs {
		out = append(out, w.obj)
	}
	slices.SortFunc(out, func(a, b dataplane.Object) int { return dataplane.CompareKeys(a.Key(), b.Key()) })
	return out
}
