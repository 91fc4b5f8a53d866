package presence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// TTL is how long a host that cannot be seen counts as there, by a lease in etcd. Nothing is freed
// when it is over; what waits for it is another machine of the same name.
const TTL = 15 * time.Second

// FenceEvery is how often a host that is refused looks whose its workloads' addresses are.
const FenceEvery = time.Minute

// Store is what a [Keeper] asks of the datastore.
type Store interface {
	Name(ctx context.Context, node string) (store.NameState, error)
	Claim(ctx context.Context, node string, seen store.NameState, as store.Incarnation, ttl time.Duration) (store.Hold, error)
	WatchName(ctx context.Context, node string, since store.Revision) <-chan struct{}
	Rest(ctx context.Context, failures int)
}

// Config is what a [Keeper] needs.
type Config struct {
	Node  string // the name
	Store Store
	File  string // keeps the [Identity]
	Self  store.Incarnation

	// Disown is notified, before the name is taken that another machine had, that what
	// the datastore shows under it is that machine's. nil: nothing is. On an error
	// the name is not taken.
	Disown func() error
	// Doubt is notified, before anything is served, that what was assigned to this
	// host's workloads may be another's by now. It must not block.
	Doubt func()
	// Verified returns when each workload's addresses have been compared with
	// the datastore and those that are not its own any more are out of use.
	Verified func(context.Context) error
	// Fence takes down the routes of workloads whose addresses are others' by now. It is
	// called at once when another machine has the name, and every [FenceEvery] for as long
	// as that is so: a host that is refused must not follow the datastore. nil: nothing is.
	Fence func(context.Context) error
	// Outage is notified that the datastore cannot be reached, once per outage, and
	// nil when it answers again, until the name is held.
	Outage func(error)

	Log *slog.Logger
}

// Keeper holds a node's name. Its methods are safe for concurrent use.
type Keeper struct {
	cfg     Config
	held    chan struct{}
	refused async.Signal

	mu     sync.Mutex
	as     store.Incarnation
	is     bool // the name is held
	unsaid bool // ... but the datastore could not be written yet
	err    error
	away   bool
	shadow string    // who it was refused for
	since  time.Time // since when, without an outage in between
}

// New returns a keeper that does nothing until [Keeper.Run].
func New(cfg Config) *Keeper {
	return &Keeper{cfg: cfg, held: make(chan struct{}), refused: async.NewSignal(), as: cfg.Self}
}

// Held is closed when the name is held for the first time. Until then this host
// must not write to the datastore, nor serve or announce by what it says.
func (k *Keeper) Held() <-chan struct{} { return k.held }

// Refused says that, and why, another machine has the name; nil: none has, as
// far as is known. It matches [RefusedError].
func (k *Keeper) Refused() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// MayWrite says why this host must not write to the datastore; nil: it holds its name.
func (k *Keeper) MayWrite() error {
	select {
	case <-k.held:
		return nil
	default:
	}
	if err := k.Refused(); err != nil {
		return err
	}
	return errNotHeld
}

var errNotHeld = errors.New("this host does not hold its name yet")

// MayResume reports whether this host may do what its previous run did, before it
// holds its name: the datastore cannot be asked, and no other machine is known to
// have the name. It may also once it holds it.
func (k *Keeper) MayResume() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err == nil && (k.is || k.away)
}

// Epoch returns the epoch of this host; 0: it has not held its name yet.
func (k *Keeper) Epoch() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.is {
		return 0
	}
	return k.as.Epoch
}

// Run holds the name until ctx ends, or until another has taken it: then the
// error matches [GivenUpError], and the daemon must end. The name stays this
// host's for as long as its lease lasts, [TTL] at most: a daemon that is started
// anew waits for nothing, and no clone that waits gets the name in between.
func (k *Keeper) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel() // a host that gives its name up verifies nothing any more
	if k.cfg.Fence != nil {
		work.Go(func() { k.fence(ctx) })
	}
	var hold store.Hold
	defer func() {
		if hold != nil {
			hold.Forget()
		}
	}()
	for failures := 0; ctx.Err() == nil; {
		st, err := k.cfg.Store.Name(ctx, k.cfg.Node)
		var next step
		if err == nil {
			next, err = k.look(ctx, st, hold)
		}
		var given *GivenUpError
		switch {
		case errors.As(err, &given):
			return err
		case errors.Is(err, store.ErrConflict):
			continue // another host was faster: look again
		case err != nil:
			k.outage(ctx, err)
			k.cfg.Store.Rest(ctx, failures)
			failures++
			continue
		}
		failures = 0
		k.outage(ctx, nil)
		if next.hold != hold {
			if hold != nil {
				hold.Forget()
			}
			hold = next.hold
		}
		if next.doubt {
			work.Go(func() { k.verify(ctx, next.epoch) })
		}
		if next.again {
			continue
		}
		k.wait(ctx, st, hold)
	}
	return ctx.Err()
}

// step is what came of a look.
type step struct {
	hold  store.Hold
	doubt bool // what was assigned before the epoch is to be verified
	epoch int64
	again bool // what was written is to be looked at
}

// look judges a state and does what follows.
func (k *Keeper) look(ctx context.Context, st store.NameState, hold store.Hold) (step, error) {
	k.mu.Lock()
	self, held, unsaid := k.as, k.is, k.unsaid
	k.mu.Unlock()
	d := Decide(self, held && !unsaid, st)
	if unsaid && d.From != nil {
		d.Verdict = GivenUp // it serves already
	}
	switch d.Verdict {
	case GivenUp:
		return step{}, &GivenUpError{Node: k.cfg.Node, Self: self, Other: *d.From}
	case Refuse:
		k.refuse(&RefusedError{Node: k.cfg.Node, Self: self, Other: *d.From})
		return step{hold: hold}, nil
	case Keep:
		if !ended(hold) {
			return step{hold: hold}, nil
		}
	case Take:
	}
	if d.As.Since.IsZero() || d.Why != "" {
		d.As.Since = time.Now().UTC().Truncate(time.Second)
	}
	if k.cfg.Disown != nil && d.over(k.refusedFor()) {
		if err := k.cfg.Disown(); err != nil {
			return step{}, fmt.Errorf("take over the name %s: %w", k.cfg.Node, err)
		}
	}
	got, err := k.cfg.Store.Claim(ctx, k.cfg.Node, st, d.As, TTL)
	if err != nil {
		if !held && !errors.Is(err, store.ErrConflict) && d.undisputed(self, st) {
			k.hold(err)
		}
		return step{}, err
	}
	k.taken(d, self, held)
	return step{hold: got, doubt: d.As.Epoch != self.Epoch, epoch: d.As.Epoch, again: true}, nil
}

func ended(h store.Hold) bool {
	if h == nil {
		return true
	}
	select {
	case <-h.Lost():
		return true
	default:
		return false
	}
}

// taken records that the name is held, and notifies those who must know first.
func (k *Keeper) taken(d Decision, self store.Incarnation, held bool) {
	log := k.cfg.Log.With("node_name", k.cfg.Node, "epoch", d.As.Epoch)
	switch {
	case d.From != nil:
		log.Warn("node name taken over; what the other's workloads had is freed as leaked after the grace period, or at once with `routerctl delete node`",
			"reason", d.Why, "from", d.From.Describe(), "by", d.As.Describe())
	case d.Why != "":
		log.Info("this host is in a new epoch", "reason", d.Why)
	default:
		log.Debug("node name held")
	}
	if d.As.Epoch != self.Epoch && k.cfg.Doubt != nil {
		k.cfg.Doubt()
	}
	k.mu.Lock()
	k.as, k.is, k.unsaid, k.err, k.shadow, k.since = d.As, true, false, nil, "", time.Time{}
	k.mu.Unlock()
	if !held {
		close(k.held)
	}
}

// hold records that the name is this host's by what the datastore says, though
// it cannot be written: it may be full, or readable for this host alone. Unless
// another was there meanwhile, a host that starts does not wait for it.
func (k *Keeper) hold(cause error) {
	k.mu.Lock()
	disputed := k.err != nil
	k.is, k.unsaid = !disputed, !disputed
	k.mu.Unlock()
	if disputed {
		return
	}
	k.cfg.Log.Warn("the presence of this host cannot be written; its name is its own by what the datastore said before; will try again",
		"node_name", k.cfg.Node, "error", cause)
	close(k.held)
}

func (k *Keeper) refuse(err *RefusedError) {
	k.mu.Lock()
	k.err = err
	who := err.Other.Instance + err.Other.BootID
	changed := k.shadow != who
	k.shadow = who
	if changed || k.since.IsZero() {
		k.since = time.Now()
	}
	k.mu.Unlock()
	if !changed {
		return
	}
	k.cfg.Log.Error("this host is refused: another machine has its name", "error", err)
	k.refused.Set()
}

// fence has the routes of others' addresses taken down from the first refusal until the
// name is held, or ctx ends.
func (k *Keeper) fence(ctx context.Context) {
	select {
	case <-k.refused:
	case <-k.held:
		return
	case <-ctx.Done():
		return
	}
	tick := time.NewTicker(FenceEvery)
	defer tick.Stop()
	for {
		if err := k.cfg.Fence(ctx); err != nil && ctx.Err() == nil {
			k.cfg.Log.Warn("it is not known whose the addresses of all workloads are; will look again", "error", err)
		}
		select {
		case <-tick.C:
		case <-k.held:
			return
		case <-ctx.Done():
			return
		}
	}
}

// refusedFor returns for how long the one before was seen there.
func (k *Keeper) refusedFor() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.since.IsZero() {
		return 0
	}
	return time.Since(k.since)
}

// verify waits until the workloads are verified, and writes down that they are:
// a daemon that dies before begins anew.
func (k *Keeper) verify(ctx context.Context, epoch int64) {
	if k.cfg.Verified != nil {
		if err := k.cfg.Verified(ctx); err != nil {
			return
		}
	}
	if err := (Identity{Instance: k.cfg.Self.Instance, Epoch: epoch}).save(k.cfg.File); err != nil {
		k.cfg.Log.Warn("the next start will verify all workloads again", "error", err)
	}
}

// outage reports the datastore until the name is held; then others do.
func (k *Keeper) outage(ctx context.Context, err error) {
	k.mu.Lock()
	changed := !k.is && k.away != (err != nil)
	k.away = err != nil
	if k.away {
		k.since = time.Time{} // leases may have been prolonged by it
	}
	k.mu.Unlock()
	if changed && k.cfg.Outage != nil && ctx.Err() == nil {
		k.cfg.Outage(err)
	}
}

// wait returns when there may be something to be done.
func (k *Keeper) wait(ctx context.Context, st store.NameState, hold store.Hold) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var lost <-chan struct{}
	if hold != nil {
		lost = hold.Lost()
	}
	select {
	case <-ctx.Done():
	case <-k.cfg.Store.WatchName(ctx, k.cfg.Node, st.Revision):
	case <-lost:
		k.cfg.Log.Info("this host could not be seen in the datastore for a while; nothing is freed by that", "node_name", k.cfg.Node, "ttl", TTL)
	}
}

// String describes a verdict for tests and logs.
func (v Verdict) String() string {
	switch v {
	case Keep:
		return "keep"
	case Take:
		return "take"
	case Refuse:
		return "refuse"
	case GivenUp:
		return "given up"
	}
	return fmt.Sprintf("verdict %d", uint8(v))
}
