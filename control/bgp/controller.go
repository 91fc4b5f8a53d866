package bgp

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os/exec"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/bgp/inject"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Options are the settings of a [Controller].
type Options struct {
	Log  *slog.Logger // required
	Node string       // this host's name; required

	// Handle takes what BGP learned; required. It is called by one goroutine,
	// one call after the other; while it works, further changes are coalesced
	// into the next call.
	Handle func(context.Context, Changes)

	// Devices is called with the devices, sorted, on whose links there are to be
	// sessions over link-local addresses; [Controller.SetAdjacent] is to say who
	// is there. It must not block. Nil: there are no such sessions.
	Devices func(names []string)

	// SecretDir is where the passwords of sessions are, as [ReadSecret] says.
	SecretDir string

	// Secrets has the passwords that are not there; nil: nothing has. SecretsFile keeps those that are used over
	// a restart without it; empty: nothing does.
	Secrets     Secrets
	SecretsFile string

	// PreviousFile is where the version before kept the last configuration, which is
	// gone by at a start while the datastore is away if there is no state from disk;
	// empty: nowhere.
	PreviousFile string

	// MayResume reports whether this host may speak by what was known before: the
	// datastore cannot be asked whether the node's name is its own, and no other host
	// is known to have it. It is asked when a step arrives, and must not
	// block. Nil: it always may.
	MayResume func() bool

	// Answers reports whether the datastore has answered this host since it started: then
	// more of it is waited for before what was known before is gone by. It must not block.
	// Nil: it is not known.
	Answers func() bool

	// KeysChanged is called when the datastore says that the keys of the cluster are others
	// ([store.AnnotationBGPKeys] of the BGPConfiguration named default), or when it is first
	// heard of: [Controller.SetKeys] is to have them. It must not block. Nil: it is not called.
	KeysChanged func()

	// BFD returns the command line of BFD's process, as [bfd.NewSupervisor] has it, which runs while a peer is to be
	// watched; nil: no peer is.
	BFD func() *exec.Cmd

	// CallersFile keeps over a restart of the daemon who has connected from a range of a BGPPeer; empty: nothing does.
	CallersFile string

	// Services says that the datastore has Services of Kubernetes: the steps are of
	// [ServiceKinds] too.
	Services bool

	// Inject bounds what other programs on the host may have it announce.
	Inject InjectOptions

	Restarting  bool          // as in [SpeakerOptions]
	SyncTimeout time.Duration // as in [SpeakerOptions]
}

// Status is the state of BGP on this host.
type Status struct {
	ASN      uint32     // 0: not known yet
	RouterID netip.Addr // invalid: not known yet

	// Err says why the speaker as a whole does not do what it should: the
	// node's own resource is missing, the port is taken. Nil: it does.
	Err   error
	Peers []PeerStatus

	// Signing says what the sessions with other nodes are signed with, or why they are not.
	Signing string

	// Collectors are the BMP collectors, in the order of their addresses.
	Collectors []CollectorStatus

	// Store says why the datastore cannot be reached; BGP goes on with what was
	// last known.
	Store error
}

// Controller joins the store with a [Speaker]. It keeps the last known good
// configuration while the store is away or what it says makes no sense.
type Controller struct {
	opts      Options
	log       *slog.Logger
	speaker   *Speaker
	dirty     async.Signal
	injecting async.Signal // what is injected has changed
	calling   async.Signal // a host has connected from a range

	watchers watchers
	injected *inject.Table
	bfd      *watchdog   // nil: no peer is watched
	damped   *time.Timer // until addresses of Services that came and went may be announced; drive's
	applied  bool        // the speaker does what the view wanted, but for these addresses; drive's
	whole    atomic.Bool // more than these addresses may be another

	adjacency adjacency

	files   *secretFiles
	objects *secretObjects // nil: there are none

	withdraw atomic.Bool // the end is sent to peers

	mu         sync.Mutex // guards the rest
	callers    callers
	reflecting reflecting
	view       View
	memo       memo
	err        error // of the last Desired or Apply
	store      error
	patient    bool // the datastore has not been waited for long enough
	asn        uint32
	routerID   netip.Addr
	ignored    []string
	links      map[string][]netip.Prefix
}

// New returns a controller. Nothing happens before [Controller.Run].
func New(opts Options) *Controller {
	c := &Controller{
		opts: opts, log: opts.Log, dirty: async.NewSignal(), injecting: async.NewSignal(), calling: async.NewSignal(), err: ErrNotSynced, patient: true,
		view: View{self: opts.Node, hasServices: opts.Services, keys: WithoutKeys("the key of the cluster is not read yet")},
	}
	c.speaker = NewSpeaker(SpeakerOptions{
		Log: opts.Log, Restarting: opts.Restarting, SyncTimeout: opts.SyncTimeout,
		Call:    c.call,
		OnState: func(p Peer, state, info string) { c.watchers.session(p, state, info, time.Now()) },
	})
	c.files = newSecretFiles(opts.SecretDir, c.log, c.poke)
	if opts.Secrets != nil {
		c.objects = newSecretObjects(opts.Secrets, opts.SecretsFile, c.log, c.poke)
	}
	c.damped = time.NewTimer(time.Hour)
	c.damped.Stop()
	var err error
	c.injected, err = inject.New(inject.Options{MaxRoutes: opts.Inject.MaxRoutes, File: opts.Inject.File, Changed: c.takeInjected})
	if err != nil {
		c.log.Warn("routes injected before the restart are not announced until their owners add them again", "error", err)
	}
	if err := c.loadCallers(); err != nil {
		c.log.Warn("the restart does not wait for neighbours that had connected from a range", "error", err)
	}
	c.view.injection = injection{allow: opts.Inject.Allow, limit: opts.Inject.MaxRoutes, routes: c.injected.List()}
	if opts.BFD != nil {
		c.bfd = newWatchdog(opts.Log, opts.BFD, c.speaker.Unreachable)
	}
	return c
}

// Run follows the steps, of [Kinds], until ctx ends and returns nil then. When they
// end before, it goes on with what it knows. On return the speaker has been stopped without
// telling the peers, so that they keep this host's routes for the restart time:
// the kernel goes on forwarding. After [Controller.Withdraw] they are notified.
func (c *Controller) Run(ctx context.Context, steps *cluster.Follower) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		for s := range steps.Steps(gctx) {
			if c.take(s) {
				c.dirty.Set()
			}
		}
		return nil
	})
	g.Go(func() error { c.drive(gctx); return nil })
	g.Go(func() error { return c.deliver(gctx) })
	g.Go(func() error { c.files.run(gctx); return nil })
	if c.objects != nil {
		g.Go(func() error { c.objects.run(gctx); return nil })
	}
	g.Go(func() error { c.expireInjected(gctx); return nil })
	g.Go(func() error { c.forgetCallers(gctx); return nil })
	var watching sync.WaitGroup
	watch, endWatch := context.WithCancel(context.WithoutCancel(ctx))
	defer endWatch()
	if c.bfd != nil {
		watching.Go(func() { c.bfd.run(watch) })
	}
	err := g.Wait()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = errors.Join(err, c.speaker.Stop(stop, !c.withdraw.Load()))
	// BFD goes last: FRR takes a session that goes administratively for one that fails, and would
	// end a BGP session that is still there in a way that keeps no routes (RFC 8538).
	endWatch()
	watching.Wait()
	return err
}

// takeInjected brings the view to what is injected now.
func (c *Controller) takeInjected() {
	c.injecting.Set()
	c.mu.Lock()
	c.view.injection.routes = c.injected.List()
	c.mu.Unlock()
	c.poke()
}

// expireInjected has injected routes go when their owners do, until ctx ends.
func (c *Controller) expireInjected(ctx context.Context) {
	defer c.injected.Freeze()
	for {
		next := time.NewTimer(c.injected.Expire())
		select {
		case <-ctx.Done():
		case <-c.injecting:
		case <-next.C:
		}
		next.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// take reports whether there is something to reconcile.
func (c *Controller) take(s cluster.Step) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// Before the first answer any word of the datastore may change whether the
	// configuration of the previous run is to be run.
	unread := !c.view.synced
	c.store = s.Err
	keys := c.view.defaultNotes()[store.AnnotationBGPKeys]
	changed, err := c.view.Apply(s)
	if c.opts.KeysChanged != nil && c.view.defaultNotes()[store.AnnotationBGPKeys] != keys {
		c.opts.KeysChanged()
	}
	if err != nil {
		c.log.Warn("bgp input refused", "error", err)
	}
	if unread || c.view.other {
		c.view.other = false
		c.whole.Store(true)
	}
	return changed || unread
}

// poke has all of the configuration made anew.
func (c *Controller) poke() {
	c.whole.Store(true)
	c.dirty.Set()
}

// Pauses between attempts to apply a configuration.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// drive brings the speaker to what the view wants, and tries again with
// growing pauses what does not work.
func (c *Controller) drive(ctx context.Context) {
	backoff := async.Backoff{Min: minRetry, Max: maxRetry}
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	begin, patience := time.Now(), time.NewTimer(storePatience)
	defer patience.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.dirty:
			backoff.Reset()
		case <-retry.C:
		case <-c.damped.C:
		case <-patience.C:
			if c.reads(time.Since(begin)) {
				patience.Reset(minRetry)
				continue
			}
			c.mu.Lock()
			c.patient = false
			c.mu.Unlock()
		}
		if !c.reconcile(ctx) {
			retry.Reset(backoff.Next())
		} else {
			retry.Stop()
		}
	}
}

// reconcile reports whether there is nothing to try again.
func (c *Controller) reconcile(ctx context.Context) bool {
	whole := c.whole.Swap(false) || !c.applied
	c.mu.Lock()
	synced, links := c.view.synced, c.links
	again := c.view.damp(time.Now())
	touched := c.view.takeTouched()
	var some []announced
	if !whole {
		var narrow bool
		some, narrow = c.memo.touchedOf(&c.view, c.opts.Node, touched)
		whole = !narrow
	}
	var cfg Config
	var err error
	if whole {
		cfg, err = c.memo.desired(&c.view, c.opts.Node)
	}
	c.mu.Unlock()
	c.damped.Stop()
	if again > 0 {
		c.damped.Reset(again)
	}
	if !whole {
		if err := c.speaker.update(some); err != nil {
			c.applied = false
			c.log.Debug("bgp announcements for Services not changed alone", "error", err)
			return c.reconcile(ctx)
		}
		return true
	}
	c.applied = false
	if !synced {
		return c.resume(ctx, cfg, err)
	}
	if err != nil {
		c.setErr(err)
		return true // more input will wake us
	}
	cfg.Links = links
	cfg, err = c.apply(ctx, cfg)
	c.mu.Lock()
	c.asn, c.routerID = cfg.ASN, cfg.RouterID
	news := cfg.Ignored
	if slices.Equal(news, c.ignored) {
		news = nil
	}
	c.ignored = cfg.Ignored
	c.mu.Unlock()
	for _, s := range news {
		c.log.Warn("bgp setting ignored", "setting", s)
	}
	c.setErr(err)
	c.applied = err == nil
	return err == nil
}

// apply has the speaker and BFD do what a configuration asks for, with what it leaves to links and secrets filled in.
func (c *Controller) apply(ctx context.Context, cfg Config) (Config, error) {
	cfg, devices, changed := c.adjacency.resolve(cfg)
	if changed && c.opts.Devices != nil {
		c.opts.Devices(devices)
	}
	cfg = c.secrets(ctx, cfg)
	c.listen(&cfg)
	err := c.speaker.Apply(ctx, cfg)
	if c.bfd != nil {
		c.bfd.watch(bfdSessions(&cfg, c.adjacency.now()))
	}
	return cfg, err
}

// SetLinks says which subnets this host's devices have, for the filters that
// ask for a route's interface. It may be called at any time.
func (c *Controller) SetLinks(links map[string][]netip.Prefix) {
	c.mu.Lock()
	same := reflect.DeepEqual(links, c.links)
	c.links = links
	c.mu.Unlock()
	if !same {
		c.poke()
	}
}

func (c *Controller) setErr(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case errors.Is(err, ErrNoNode):
		// How every first start begins; who stays so is shown by the status.
		c.log.Debug("bgp waits", "error", err)
	case err != nil && (c.err == nil || c.err.Error() != err.Error()):
		c.log.Warn("bgp not as configured", "error", err)
	case err == nil && c.err != nil:
		c.log.Info("bgp as configured")
	}
	c.err = err
}

// deliver hands changes to the handler.
func (c *Controller) deliver(ctx context.Context) error {
	for {
		ch, err := c.speaker.Next(ctx)
		if err != nil {
			return nil // ctx has ended
		}
		c.watchers.changes(ch, time.Now())
		c.opts.Handle(ctx, ch)
	}
}

// Status returns the present state.
func (c *Controller) Status(ctx context.Context) Status {
	c.mu.Lock()
	st := Status{ASN: c.asn, RouterID: c.routerID, Err: c.err, Store: c.store, Signing: c.view.keys.String()}
	c.mu.Unlock()
	st.Peers = c.speaker.Peers()
	st.Collectors = c.speaker.Collectors()
	c.describeRanges(st.Peers)
	if c.bfd != nil {
		c.bfd.describe(ctx, st.Peers)
	}
	return st
}

// Sessions is Status without the numbers of prefixes, for those who ask often: it costs by the number of peers, and
// Status now and then by that of prefixes.
func (c *Controller) Sessions() Status {
	c.mu.Lock()
	st := Status{ASN: c.asn, RouterID: c.routerID, Err: c.err, Store: c.store}
	c.mu.Unlock()
	_, st.Peers = c.speaker.states()
	c.describeRanges(st.Peers)
	return st
}

// Routes returns the best path of every learned prefix, for a full comparison.
func (c *Controller) Routes(ctx context.Context) ([]Path, error) { return c.speaker.Routes(ctx) }
