package collect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// DefaultGrace is Calico's leakGracePeriod.
const DefaultGrace = 15 * time.Minute

// Config is what a [Collector] needs.
type Config struct {
	Store store.Store // required
	Node  string      // required: this node's name
	Host  Host        // what the host knows of its own addresses; nil: only the cluster's work

	// Grace is how long a leak must have been one until [Collector.SetGrace]; 0: none is looked for.
	Grace time.Duration
	// Interval is the time between two looks; 0: a third of the grace period.
	Interval time.Duration

	Clock func() time.Time // nil: time.Now
	Log   *slog.Logger     // nil: none
}

// Host is what a host knows and can do about the addresses that are in use on
// it. Methods are safe for concurrent use.
type Host interface {
	// Allocations lists what the host's own blocks give.
	Allocations() []ipam.Allocation
	// Uses reports whether a handle's addresses are in use: by a workload of
	// this host, a tunnel, a reserve. It does not block.
	Uses(handle string) bool
	// Wired returns the handles of the workloads whose devices are on this host,
	// whether or not it knows more of them.
	Wired(ctx context.Context) (map[string]bool, error)
	// Release frees addresses that used still says are not in use.
	Release(ctx context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error)
}

// Report is what a look found and did.
type Report struct {
	Suspects   int // that are not due yet
	Addresses  int // freed
	Blocks     int // deleted, or given to nobody
	Handles    int // deleted
	Endpoints  int // deleted
	Unreadable int // records that could not be decoded; the others were looked at
}

// freed reports whether a look changed anything.
func (r Report) freed() bool { return r.Addresses+r.Blocks+r.Handles+r.Endpoints > 0 }

// Collector looks for leaks. [Collector.RunHost] and [Collector.RunCluster] may
// run side by side.
type Collector struct {
	cfg                     Config
	host, borrowed, cluster *suspects

	mu      sync.Mutex
	period  time.Duration // of grace; 0: nothing is looked for
	changed chan struct{} // closed when it is another
}

// New returns a collector. It panics when a required part of the configuration
// is missing.
func New(cfg Config) *Collector {
	if cfg.Store == nil || cfg.Node == "" {
		panic("collect: Config lacks Store or Node")
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Collector{cfg: cfg, period: cfg.Grace, changed: make(chan struct{}), host: newSuspects(), borrowed: newSuspects(), cluster: newSuspects()}
}

// GraceOf returns how long an address must have leaked before it is freed, by the host's own setting, which counts unless it is the
// default, and by the KubeControllersConfiguration; nil: there is none.
func GraceOf(own time.Duration, k *v3.KubeControllersConfiguration) time.Duration {
	if own != DefaultGrace || k == nil || k.Spec.Controllers.Node == nil || k.Spec.Controllers.Node.LeakGracePeriod == nil {
		return own
	}
	grace := k.Spec.Controllers.Node.LeakGracePeriod.Duration
	if grace <= 0 {
		return 0
	}
	// A container that is being made has its address before anything else tells of it.
	return max(grace, time.Minute)
}

// SetGrace changes how long a leak must have been one; 0: none is looked for.
func (c *Collector) SetGrace(grace time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if grace == c.period {
		return
	}
	c.cfg.Log.Info("leaks are freed after another time", "grace", grace, "before", c.period)
	c.period = grace
	close(c.changed)
	c.changed = make(chan struct{})
}

// grace returns how long a leak must have been one, and what is closed when that changes.
func (c *Collector) grace() (time.Duration, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.period, c.changed
}

// borrowedEvery is how many looks at the host's own blocks, which need no
// reading, come to one at all others, for addresses that it borrowed.
const borrowedEvery = 12

// RunHost looks after this host's addresses until ctx ends. The first look at
// what it borrowed is left to chance, some time from the second look on: it reads
// all blocks, which a host that starts has no time for, and which many that start
// together are not to do at once.
func (c *Collector) RunHost(ctx context.Context) {
	if c.cfg.Host == nil {
		return
	}
	wait := 1 + rand.N(borrowedEvery) //nolint:gosec // no secret
	c.every(ctx, "host", func(ctx context.Context) (Report, error) {
		r, err := c.LookHost(ctx)
		if wait > 0 || err != nil {
			wait--
			return r, err
		}
		wait = borrowedEvery - 1
		more, err := c.LookBorrowed(ctx)
		r.Suspects, r.Addresses, r.Unreadable = r.Suspects+more.Suspects, r.Addresses+more.Addresses, more.Unreadable
		return r, err
	})
}

// RunCluster looks after what no host does until ctx ends. It is for the one
// host of the cluster that holds the leader-election lease (see etcd.Store.Lead);
// two at once do no harm. The first look, which reads the whole cluster's records, comes as late
// after the start as each other one after the one before: hosts that all start again
// at once have the datastore do enough.
func (c *Collector) RunCluster(ctx context.Context) {
	c.cluster.clear()
	grace, changed := c.grace()
	c.cfg.Log.Info("this host looks for leaks of the whole cluster", "grace", grace)
	if grace > 0 {
		c.rest(ctx, grace, changed)
	}
	c.every(ctx, "cluster", c.LookCluster)
}

// every calls look again and again. No event announces a leak: so there is a
// clock.
func (c *Collector) every(ctx context.Context, scope string, look func(context.Context) (Report, error)) {
	for ctx.Err() == nil {
		grace, changed := c.grace()
		if grace == 0 {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		start := time.Now()
		r, err := look(ctx)
		attrs := []any{
			"scope", scope, "suspects", r.Suspects, "addresses", r.Addresses, "blocks", r.Blocks,
			"handles", r.Handles, "endpoints", r.Endpoints, "unreadable", r.Unreadable, "took", time.Since(start),
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			c.cfg.Log.Warn("look for leaks is incomplete; the next one goes on", append(attrs, "error", err)...)
		case r.freed():
			c.cfg.Log.Info("leaks freed", attrs...)
		default:
			c.cfg.Log.Debug("looked for leaks", attrs...)
		}
		c.rest(ctx, grace, changed)
	}
}

// rest waits until the next look is due, or the time of grace is another.
func (c *Collector) rest(ctx context.Context, grace time.Duration, changed <-chan struct{}) {
	interval := c.cfg.Interval
	if interval <= 0 {
		interval = grace / 3
	}
	next := time.NewTimer(interval)
	defer next.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-next.C:
	}
}

// old reports whether an address was given long enough ago, as far as its
// attributes say.
func old(a ipam.Allocation, now time.Time, grace time.Duration) bool {
	return now.Sub(a.Assigned()) >= grace
}

// LookHost looks once at the addresses of this host's blocks.
func (c *Collector) LookHost(ctx context.Context) (Report, error) {
	uses := func(cl ipam.Claim) bool { return c.cfg.Host.Uses(cl.Handle) }
	return c.lookHost(ctx, c.host, uses, func(see func(ipam.Allocation)) (int, error) {
		for _, a := range c.cfg.Host.Allocations() {
			see(a)
		}
		return 0, nil
	})
}

// LookBorrowed looks once at the addresses that this host has of blocks that it
// does not hold. Its reserve is among them where it has lost a block: nobody is
// given an address of that, see [ipam.Allocator.ReleaseUnless].
func (c *Collector) LookBorrowed(ctx context.Context) (Report, error) {
	uses := func(cl ipam.Claim) bool {
		return cl.Handle != store.ReserveHandle(c.cfg.Node) && c.cfg.Host.Uses(cl.Handle)
	}
	return c.lookHost(ctx, c.borrowed, uses, func(see func(ipam.Allocation)) (unreadable int, err error) {
		err = store.Pages(ctx, c.cfg.Store, store.KindIPAMBlock, "", func(objs []store.Object) error {
			for _, o := range objs {
				b, _ := o.Value.(*store.Block)
				all, err := ipam.Allocations(o.Key.CIDR(), b)
				if err != nil {
					unreadable++
					continue
				}
				if owner := b.Holder(); owner == c.cfg.Node {
					continue
				}
				for _, a := range all {
					see(a)
				}
			}
			return nil
		})
		return unreadable, err
	})
}

// lookHost looks once at the allocations that each yields, of which uses says that
// they are in use.
func (c *Collector) lookHost(
	ctx context.Context, known *suspects, uses func(ipam.Claim) bool, each func(see func(ipam.Allocation)) (int, error),
) (Report, error) {
	now := c.cfg.Clock()
	grace, _ := c.grace()
	if grace == 0 {
		return Report{}, nil
	}
	known.begin()
	var r Report
	due := map[netip.Addr]ipam.Claim{}
	unreadable, err := each(func(a ipam.Allocation) {
		claim := ipam.Claim{Addr: a.Addr, Handle: a.Handle, Sequence: a.Sequence}
		if a.Node != c.cfg.Node || !a.ReleasedAt.IsZero() || a.Handle == "" || uses(claim) || !old(a, now, grace) {
			return
		}
		r.Suspects++
		if known.see(a.Addr.String(), a.Sequence, now, grace) {
			due[a.Addr] = claim
		}
	})
	r.Unreadable = unreadable
	if err != nil {
		return r, err // suspects are kept: nothing is known of what was not seen
	}
	known.end()
	if len(due) == 0 {
		return r, nil
	}
	if err := c.lastLook(ctx, due); err != nil {
		return r, err
	}
	var errs []error
	for _, claim := range due {
		// One by one: a claim that does not hold any more must not spoil others.
		freed, err := c.cfg.Host.Release(ctx, uses, claim)
		switch {
		case errors.Is(err, ipam.ErrNotHolder):
		case err != nil:
			errs = append(errs, err)
		case len(freed) > 0:
			r.Addresses++
			r.Suspects--
			c.cfg.Log.Info("leaked address freed", "address", claim.Addr, "handle", claim.Handle)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return r, errors.Join(errs...)
}

// lastLook takes out of due what an endpoint or a device of this host has.
func (c *Collector) lastLook(ctx context.Context, due map[netip.Addr]ipam.Claim) error {
	wired, err := c.cfg.Host.Wired(ctx)
	if err != nil {
		return fmt.Errorf("look for the workloads' devices: %w", err)
	}
	for addr, claim := range due {
		if wired[claim.Handle] {
			delete(due, addr)
		}
	}
	return store.Pages(ctx, c.cfg.Store, store.KindWorkloadEndpoint, "", func(objs []store.Object) error {
		for _, o := range objs {
			w, ok := o.Value.(*store.WorkloadEndpoint)
			if !ok {
				return fmt.Errorf("%s cannot be decoded, and may have any address: %w", o.Key, store.ErrDecode)
			}
			for _, a := range w.Addresses() {
				delete(due, a)
			}
		}
		return nil
	})
}
