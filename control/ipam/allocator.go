package ipam

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Config is what an [Allocator] needs.
type Config struct {
	Store store.Store  // required
	Node  string       // required: this node's name
	Log   *slog.Logger // required

	// Clock returns the time; nil: time.Now.
	Clock func() time.Time

	// Unusable says why no workload on this node may get an address of a pool;
	// empty: it may. It must not block. Nil: every pool is usable.
	Unusable func(pool string) string

	// UsePodCIDR keeps this node's addresses within the ranges that Kubernetes gave
	// its Node: no address of a pool that lies outside is given.
	UsePodCIDR bool

	// Piecewise says that the datastore writes one object at a time ([store.Piecewise]).
	// Then what the reserve's handle counts of a block is at least what that has of the reserve.
	Piecewise bool

	// Reserve says how many addresses are held ready for workloads to come.
	Reserve ReserveConfig

	// Timeout bounds one read or one transaction, so that a datastore that
	// does not answer does not hold up those who ask later; 0: 10 seconds.
	Timeout time.Duration
}

// Kinds lists what [Allocator.Run] follows of the cluster.
func Kinds() []store.Kind {
	return []store.Kind{
		store.KindIPPool, store.KindIPReservation, store.KindNode,
		store.KindIPAMConfig, store.KindIPAMBlock, store.KindIPAMAffinity,
	}
}

// Allocator gives and takes back this node's addresses. Its methods are safe
// for concurrent use; they wait until [Allocator.Run] has read the state
// of the datastore, and one goroutine of Run does all the work.
type Allocator struct {
	cfg Config

	mu    sync.Mutex // guards state
	state *state

	queue          queue
	reserveChanged async.Signal  // the reserve is to be looked at
	synced         chan struct{} // closed once the state is there
	stopped        chan struct{} // closed when Run returns
}

// New returns an allocator; [Allocator.Run] makes it work. It panics when a
// required part of the configuration is missing.
func New(cfg Config) *Allocator {
	if cfg.Store == nil || cfg.Node == "" || cfg.Log == nil {
		panic("ipam: Config lacks Store, Node or Log")
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	st := newState(cfg.Node)
	st.unusable, st.usePodCIDR, st.piecewise = cfg.Unusable, cfg.UsePodCIDR, cfg.Piecewise
	st.reserve = newReserve(cfg.Reserve)
	if cfg.Reserve.Journal != nil {
		st.loadCooldowns(cfg.Reserve.Journal.Entries())
		if err := st.load(cfg.Reserve.Journal.Entries()); err != nil {
			cfg.Log.Error("no addresses are given before the datastore answers", "error", err)
			st.invalidate()
		}
	}
	return &Allocator{
		cfg:   cfg,
		state: st,
		queue: queue{wake: async.NewSignal()},

		reserveChanged: async.NewSignal(),

		synced:  make(chan struct{}),
		stopped: make(chan struct{}),
	}
}

// Run keeps the allocator's view of the datastore by following [Kinds], and
// serves the callers, until ctx ends; then it returns nil, and those who still
// wait get [ErrStopped]. It may be called once.
//
// After each synchronisation, and when pools or the node change, it ends what
// crashes left half done in this node's affinities and gives up empty blocks
// of pools that do not select the node any more, or are gone. The last address
// that leaves such a block takes the block with it.
func (a *Allocator) Run(ctx context.Context, steps *cluster.Follower) error {
	work, cancel := context.WithCancel(ctx)
	var worker sync.WaitGroup
	worker.Go(func() { a.work(work) })
	worker.Go(func() { a.keepReserve(work) })
	defer func() {
		cancel()
		worker.Wait()
		close(a.stopped)
		for _, c := range a.queue.close() {
			c.finish(ErrStopped)
		}
	}()
	for st := range steps.Steps(ctx) {
		a.apply(st)
	}
	return nil
}

func (a *Allocator) apply(st cluster.Step) {
	if st.Source == cluster.Disk {
		a.loadCluster(st)
		return
	}
	a.mu.Lock()
	if st.Synced || len(st.Changes) > 0 {
		a.state.invalidate()
	}
	tidy := st.Synced
	a.state.synced = a.state.synced || st.Synced
	for _, ch := range st.Changes {
		if err := a.state.apply(ch, st.Revision); err != nil {
			a.cfg.Log.Warn("ignored what cannot be read", "key", ch.Key.String(), "error", err)
		}
		tidy = tidy || ch.Key.Kind == store.KindIPPool || ch.Key.Kind == store.KindNode && ch.Key.Name == a.cfg.Node ||
			ch.Key.Kind == store.KindIPAMBlock && a.state.empties(ch.Key.CIDR())
	}
	var blocks []netip.Prefix
	if tidy {
		blocks = a.state.tidyable()
	}
	a.remember()
	a.mu.Unlock()
	if len(st.Changes) > 0 || st.Synced {
		a.reserveChanged.Set()
	}
	if len(blocks) > 0 {
		a.queue.push(&call{step: &tidyStep{blocks: blocks}})
	}
	if st.Synced {
		select {
		case <-a.synced:
		default:
			close(a.synced)
		}
	}
}

// Assign gives addresses: all that the request asks for, or none and an error.
// An error that matches [store.ErrUnavailable] leaves open whether they were
// given; repeat the request with Idempotent set, or call
// [Allocator.ReleaseHandle]. When ctx ends first, what is given nevertheless
// is released again.
func (a *Allocator) Assign(ctx context.Context, r Request) ([]Assignment, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	r.Attributes = maps.Clone(r.Attributes)
	st := &assignStep{req: r}
	if err := a.do(ctx, st); err != nil {
		return nil, fmt.Errorf("assign %s address to %s: %w", r.Family, r.Handle, err)
	}
	return append(st.held, st.given...), nil
}

// AssignAddr gives one particular address. A block of it that does not exist
// is taken for this node. Reservations and the pools' selectors are not asked.
func (a *Allocator) AssignAddr(ctx context.Context, addr netip.Addr, r Request) (Assignment, error) {
	if err := checkAddr(&r, addr); err != nil {
		return Assignment{}, err
	}
	r.Attributes = maps.Clone(r.Attributes)
	st := &addrStep{req: r, addr: addr}
	err := a.doNamed(ctx, st, Part{Request: r, Addr: addr})
	if err != nil {
		return Assignment{}, fmt.Errorf("assign %s to %s: %w", addr, r.Handle, err)
	}
	return append(st.held, st.given...)[0], nil
}

// ReleaseHandle releases all that a handle holds, on whatever node, and
// returns it. A handle that holds nothing is no error.
func (a *Allocator) ReleaseHandle(ctx context.Context, handle string) ([]netip.Addr, error) {
	return a.releaseHandle(ctx, &handleStep{handle: handle})
}

// ReleaseHandleHere is like ReleaseHandle for what the handle holds on this
// node, by the addresses' "node" attribute: another node may use the same
// handle for a container of its own. Addresses of keep stay the handle's.
func (a *Allocator) ReleaseHandleHere(ctx context.Context, handle string, keep ...netip.Addr) ([]netip.Addr, error) {
	return a.releaseHandle(ctx, &handleStep{handle: handle, node: a.cfg.Node, keep: keep})
}

func (a *Allocator) releaseHandle(ctx context.Context, st *handleStep) ([]netip.Addr, error) {
	handle := st.handle
	if handle == "" {
		return nil, fmt.Errorf("%w: handle is empty", ErrInvalidRequest)
	}
	if err := a.do(ctx, st); err != nil {
		return nil, fmt.Errorf("release the addresses of %s: %w", handle, err)
	}
	return st.released, nil
}

// maxClaims is how many claims one transaction takes: each may touch a block
// and a handle of its own.
const maxClaims = 32

// Release releases addresses and returns those that were held. Addresses that
// are free already are no error; a claim that names another handle or another
// sequence number than the present one is, and then none of its step is
// released. Many claims are released in steps.
func (a *Allocator) Release(ctx context.Context, claims ...Claim) ([]netip.Addr, error) {
	var out []netip.Addr
	for len(claims) > 0 {
		n := min(len(claims), maxClaims)
		st := &claimsStep{claims: claims[:n:n]}
		if err := a.do(ctx, st); err != nil {
			return out, fmt.Errorf("release addresses: %w", err)
		}
		out = append(out, st.released...)
		claims = claims[n:]
	}
	return out, nil
}

// ByHandle returns what a handle holds, on whatever node, ordered by block and
// address.
func (a *Allocator) ByHandle(ctx context.Context, handle string) ([]Assignment, error) {
	st := &queryStep{handle: handle}
	if err := a.do(ctx, st); err != nil {
		return nil, fmt.Errorf("look up the addresses of %s: %w", handle, err)
	}
	return st.held, nil
}

// Tidy does now what [Allocator.Run] does after each synchronisation, and
// returns the blocks that the node has given up.
func (a *Allocator) Tidy(ctx context.Context) ([]netip.Prefix, error) {
	if err := a.waitSynced(ctx); err != nil {
		return nil, err
	}
	a.mu.Lock()
	st := &tidyStep{blocks: a.state.tidyable()}
	a.mu.Unlock()
	if len(st.blocks) == 0 {
		return nil, nil
	}
	if err := a.do(ctx, st); err != nil {
		return nil, fmt.Errorf("tidy blocks: %w", err)
	}
	return st.released, nil
}

// BlockStatus is a block that this node holds.
type BlockStatus struct {
	CIDR  netip.Prefix
	Pool  string // name; empty when no pool contains the block any more
	Size  int    // addresses
	InUse int    // of them assigned or cooling down
}

// Blocks returns the blocks that this node holds, in the order of their keys.
// It does not ask the datastore.
func (a *Allocator) Blocks() []BlockStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]BlockStatus, 0, len(a.state.own))
	for _, b := range a.state.own {
		s := BlockStatus{CIDR: b.CIDR, Size: b.Size, InUse: b.Used}
		if p := a.state.poolOf(b.CIDR); p != nil {
			s.Pool = p.name
		}
		out = append(out, s)
	}
	return out
}

func (a *Allocator) waitSynced(ctx context.Context) error {
	select {
	case <-a.synced:
		return nil
	case <-a.stopped:
		return ErrStopped
	case <-ctx.Done():
		return fmt.Errorf("%w: the datastore's state has not been read yet: %w", ErrNotReady, ctx.Err())
	}
}

// do has the worker carry a step out and waits for it.
func (a *Allocator) do(ctx context.Context, st step) error {
	if err := a.waitSynced(ctx); err != nil {
		return err
	}
	c := &call{step: st, done: make(chan struct{})}
	if !a.queue.push(c) {
		return ErrStopped
	}
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	if !c.abandon() {
		<-c.done
		return c.err
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%w: it has not answered in time: %w", store.ErrUnavailable, ctx.Err())
	}
	return ctx.Err()
}
