package attach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/control/spans"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// Errors that callers branch on, beside those of packages ipam, workload and
// store.
var (
	// ErrInvalid says that the request cannot be carried out as it is.
	ErrInvalid = errors.New("invalid request")
	// ErrNoAddress says that there is no address for the request, for a reason
	// that is not package ipam's.
	ErrNoAddress = errors.New("no address available")
	// ErrUnknown says that nothing is known of an attachment.
	ErrUnknown = errors.New("unknown attachment")
	// ErrNotReady says that the daemon cannot serve yet; trying again helps.
	ErrNotReady = errors.New("not ready")
)

// ID names one interface of one container in one network. It is comparable.
type ID = workload.Owner

// Workload is what the runtime says of a container beyond its id.
type Workload struct {
	Orchestrator string // "k8s" or "cni"
	Namespace    string // Kubernetes namespace, else "default"
	Pod          string // Kubernetes pod name, else empty
}

// The orchestrators of a [Workload].
const (
	Kubernetes = "k8s"
	CNI        = "cni"
)

// Endpoint describes an attachment for status reports.
type Endpoint struct {
	ID        ID
	Workload  Workload
	Device    string
	Netns     string // path of the container's network namespace
	Addresses []netip.Addr
	MTU       int       // bytes
	State     string    // attached; adding or releasing while under way or cut short
	Lost      string    // why the workload has no route: another has its address; empty: it has
	Since     time.Time // of the attachment
}

// LingerEnd is long enough for [Config.LingerEnd]: a kubelet deletes a pod some two seconds
// after the DEL.
const LingerEnd = 5 * time.Second

// LingerConfirm is long enough for [Config.LingerConfirm] to leave out pods of short jobs.
const LingerConfirm = 30 * time.Second

// Config is what [New] needs. All fields without a default are required.
type Config struct {
	Node string // this host's name in the datastore
	// Network is the name that the CNI plugin's configuration gives the network; empty: it
	// is not compared with that of workloads which Calico attached.
	Network string
	Dir     string // for the MTU of workloads; made with mode 0700 if missing
	// Journal keeps the records, under keys that begin with "workload/".
	Journal *journal.Journal
	IPAM    IPAM
	Sink    dataplane.Sink
	Store   store.Store
	Wire    Wire

	// Ready says why the daemon as a whole cannot serve ADD; nil or a nil
	// result: it can.
	Ready func() error

	// Held says why the datastore must not be written: this host does not hold
	// its name. What is to be written waits for it; wires are removed all the
	// same. nil or a nil result: it does. It must not block or call the Attacher.
	Held func() error

	// Behind answers ADD and DEL when the journal has them, and writes to the
	// datastore afterwards, many in one transaction. Else the datastore knows
	// before the answer, and also where Rules is set and OwnWrites is not.
	Behind bool
	// Linger is how long the first that is to be written waits for others; 0: 100 ms.
	Linger time.Duration
	// LingerEnd is how long, with Kubernetes, what the datastore has of a container that ended
	// waits for the end of its pod, which tells those who read pods that it has no address any
	// more, and for others that end; 0: it does not wait. Until then no other gets its address.
	LingerEnd time.Duration
	// LingerConfirm is how long, with Kubernetes, the addresses of a pod stay the reserve's in
	// the datastore after they were written to the pod: those of one that ends before are never written
	// there, and others' are many at once; 0: they are written first.
	LingerConfirm time.Duration
	// Kubernetes says that the datastore is the API of Kubernetes: a pod's endpoint is
	// the pod, of which this host writes the addresses alone, and what else it says
	// comes from there. What is no pod is served without the datastore.
	Kubernetes bool
	// Pods is Kubernetes' API where the datastore is another one: what a pod's endpoint says
	// beside its addresses comes from there. nil: from the datastore if that is the API,
	// else the network alone says it.
	Pods PodAPI
	// UsePodCIDR says that addresses are those of the Node's pod CIDRs. Where they are
	// not, who asks for such is refused.
	UsePodCIDR bool
	// ReleaseOther frees what another network's IPAM gave a container that was never
	// attached here: the runtime asks for its end by the configuration that is now. It must
	// do nothing where there is none. nil: it is not called.
	ReleaseOther func(ctx context.Context, containerID string) error
	// OwnWrites is shown what this host writes; nil: it is not called.
	OwnWrites OwnWrites

	// Rules waits until the rules that judge what the device's workload sends
	// and receives are in force, for all of these addresses; the error says why
	// they are not. It is asked after the endpoint was written or announced, and an ADD whose
	// rules do not come fails. nil: there are no rules to wait for.
	Rules func(ctx context.Context, device string, addrs []netip.Addr) error
	// RulesTimeout bounds that wait. 0: 10 s.
	RulesTimeout time.Duration

	// StoreTimeout bounds each step that needs the datastore. 0: 10 s.
	StoreTimeout time.Duration
	// Retry is the first pause between tries to complete what was cut short;
	// pauses double up to a minute, of each attachment by itself. 0: 1 s.
	Retry time.Duration

	// Tracer gets what each step of a verb took; nil: it is not called.
	Tracer *spans.Tracer

	Log *slog.Logger
}

// Attacher carries out the verbs. It is safe for concurrent use: calls about
// different containers run in parallel.
type Attacher struct {
	node         string
	usePodCIDR   bool
	releaseOther func(ctx context.Context, containerID string) error
	unready      func() error
	rules        func(ctx context.Context, device string, addrs []netip.Addr) error
	rulesTimeout time.Duration
	linger       time.Duration
	log          *slog.Logger

	store     *datastore
	ledger    *ledger
	locks     *locks
	host      *host
	addresses *addresses
	endpoints *endpoints
	pods      *pods
	own       *ownWrites
	gateways  *gateways
	mtus      *mtus
	flusher   *flusher
	releaser  *releaser
	reclaimer *reclaimer
	adopter   *adopter
	schedule  *schedule
	steps     *runner
	work      async.Signal // the datastore is to be written
	now       async.Signal // likewise, at once, whatever failed before
}

// New returns an Attacher that serves after [Attacher.Restore].
func New(cfg Config) (*Attacher, error) {
	switch {
	case cfg.Node == "":
		return nil, errors.New("attach: node name is missing")
	case cfg.IPAM == nil || cfg.Sink == nil || cfg.Store == nil || cfg.Wire == nil || cfg.Journal == nil:
		return nil, errors.New("attach: one of IPAM, sink, store, wire, journal is missing")
	case cfg.Dir == "":
		return nil, errors.New("attach: directory for state is missing")
	}
	cfg.StoreTimeout = cmp.Or(cfg.StoreTimeout, 10*time.Second)
	cfg.RulesTimeout = cmp.Or(cfg.RulesTimeout, 10*time.Second)
	cfg.Retry = cmp.Or(cfg.Retry, time.Second)
	cfg.Linger = cmp.Or(cfg.Linger, 100*time.Millisecond)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory for the state of workloads: %w", err)
	}
	a := assemble(cfg)
	a.ledger.claim(cfg.IPAM)
	return a, nil
}

// assemble makes the parts, each of which gets those that it needs.
func assemble(cfg Config) *Attacher {
	log := cfg.Log
	steps, schedule, work, now := &runner{tracer: cfg.Tracer}, newSchedule(cfg.Retry), async.NewSignal(), async.NewSignal()
	db := &datastore{Store: cfg.Store, timeout: cfg.StoreTimeout, mayHold: cfg.Held}
	ledger := newLedger(cfg.Journal, log)
	host := &host{Wire: cfg.Wire, sink: cfg.Sink, ledger: ledger}
	addresses := &addresses{node: cfg.Node, ipam: cfg.IPAM, store: db, ledger: ledger}
	endpoints := &endpoints{node: cfg.Node, kubernetes: cfg.Kubernetes, store: db, profiles: make(map[string]bool)}
	own := &ownWrites{to: cfg.OwnWrites, endpoints: endpoints, ledger: ledger}
	gateways := &gateways{journal: cfg.Journal, addresses: addresses, ledger: ledger, log: log, kept: make(map[string]kept), freed: make(map[netip.Addr]time.Time)}
	locks := &locks{ledger: ledger, gateways: gateways}
	reclaimer := &reclaimer{
		node: cfg.Node, ledger: ledger, locks: locks, host: host, addresses: addresses, endpoints: endpoints,
		store: db, schedule: schedule, log: log, work: work, now: now,
	}
	flusher := &flusher{
		ledger: ledger, store: db, addresses: addresses, endpoints: endpoints, own: own, schedule: schedule,
		reclaim: reclaimer, steps: steps, log: log, linger: cfg.LingerConfirm, pass: make(chan struct{}, 1),
	}
	pods := newPods(cfg.podAPI(db), cfg.Node, db, log)
	mtus := &mtus{dir: cfg.Dir, ledger: ledger, locks: locks, host: host, steps: steps, log: log}
	return &Attacher{
		node: cfg.Node, usePodCIDR: cfg.UsePodCIDR, releaseOther: cfg.ReleaseOther, unready: cfg.Ready, rules: cfg.Rules, rulesTimeout: cfg.RulesTimeout, linger: cfg.Linger, log: log,
		store: db, ledger: ledger, locks: locks, host: host, addresses: addresses, endpoints: endpoints, own: own,
		pods:     pods,
		gateways: gateways, flusher: flusher, reclaimer: reclaimer, schedule: schedule, steps: steps, work: work, now: now,
		mtus: mtus,
		adopter: &adopter{
			node: cfg.Node, network: cfg.Network, ledger: ledger, locks: locks, host: host, addresses: addresses, endpoints: endpoints, store: db, mtus: mtus,
			steps: steps, retry: cfg.Retry, log: log,
		},
		releaser: &releaser{
			behind: cfg.Behind && (cfg.Rules == nil || cfg.OwnWrites != nil),
			ledger: ledger, locks: locks, host: host, store: db, addresses: addresses, endpoints: endpoints, gateways: gateways,
			own: own, flusher: flusher, pods: pods, linger: cfg.LingerEnd, schedule: schedule, steps: steps, log: log, wires: async.NewSignal(),
		},
	}
}

// podAPI is what is asked for pods; nil: nothing is.
func (c *Config) podAPI(db *datastore) PodAPI {
	if c.Kubernetes {
		return db
	}
	return c.Pods
}

// behind reports whether an answer may come before the datastore knows.
func (a *Attacher) behind() bool { return a.releaser.behind }

// Endpoints lists the attachments, ordered by id.
func (a *Attacher) Endpoints() []Endpoint {
	var out []Endpoint
	for _, r := range a.ledger.snapshot() {
		out = append(out, Endpoint{
			ID: r.id(), Workload: r.workload(), Device: r.Device, Netns: r.Netns,
			Addresses: r.addrs(), MTU: r.MTU, State: r.State.phase(), Since: r.Since, Lost: r.Fenced,
		})
	}
	slices.SortFunc(out, func(x, y Endpoint) int { return compareIDs(x.ID, y.ID) })
	return out
}

// Status reports whether ADD can be served: [ErrNotReady] or
// [store.ErrUnavailable] with the reason if not.
func (a *Attacher) Status(ctx context.Context) error {
	if err := a.errNotServing(); err != nil {
		return err
	}
	if a.behind() && len(a.addresses.ipam.Ready()) > 0 {
		return nil
	}
	ctx, cancel := a.store.context(ctx)
	defer cancel()
	pools, _, err := a.store.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return storeError("list IP pools", err)
	}
	for _, p := range pools {
		if pool := cluster.NewPool(p); pool != nil && pool.Off == "" && pool.Allows(v3.IPPoolAllowedUseWorkload) {
			return nil
		}
	}
	return fmt.Errorf("no enabled pool for workloads (%d pools defined): create an IPPool: %w", len(pools), ErrNotReady)
}

// errNotServing says why ADD cannot be served.
func (a *Attacher) errNotServing() error {
	if !a.ledger.restored() {
		return errStarting()
	}
	if a.unready != nil {
		if err := a.unready(); err != nil {
			return fmt.Errorf("%w: %w", ErrNotReady, err)
		}
	}
	return a.reclaimer.errDoubt()
}

func errStarting() error { return fmt.Errorf("the daemon is starting: %w", ErrNotReady) }

// Kinds lists what an [Attacher] wants to see of the store.
func Kinds() []store.Kind {
	return []store.Kind{store.KindNode, store.KindProfile, store.KindClusterInformation, store.KindIPAMBlock}
}

// PodKinds lists what one with [Config.Kubernetes] or [Config.Pods] wants to see beside
// [Kinds]: this host's pods, and what their namespaces ask for.
func PodKinds() []store.Kind { return []store.Kind{store.KindWorkloadEndpoint, store.KindProfile} }

// HandlePods takes account of a step of the cluster's copy: what an ADD of a pod need
// not ask the API for. It may be the disk's state. It does not block.
func (a *Attacher) HandlePods(s cluster.Step) { a.pods.handle(s) }

// HandleStore takes account of a step of the cluster's copy: whether the
// datastore is there, this host's Node, and which profiles there are: an ADD then
// need not ask. It does not block.
//
// Who deletes a Node gives its workloads' addresses back and deletes their
// endpoints, as Calico's tools do. If the daemon runs, or comes back, its
// workloads live on all the same: [Attacher.Run] then takes their addresses
// again and writes the endpoints anew, before others get the addresses.
func (a *Attacher) HandleStore(s cluster.Step) {
	if a.store.handle(s) {
		a.now.Set()
	}
	a.endpoints.handle(s)
	a.reclaimer.handle(s)
}

// Restore takes over what the previous run left: it reads the records, hands to
// the sink what the attachments need whose devices are there, and announces those
// that the datastore does not know yet. Of the others, from before a reboot, only
// the record stays, for DEL and GC. An ADD that was cut short is released by
// [Attacher.Run], unless the runtime repeats it first. Call it once, before
// serving.
func (a *Attacher) Restore(ctx context.Context) error {
	records, err := a.ledger.load(a.mtus.dir)
	if err != nil {
		return err
	}
	if err := a.mtus.load(records); err != nil {
		return err
	}
	a.gateways.load()
	devices, err := a.host.Devices(ctx)
	if err != nil {
		return fmt.Errorf("restore attachments: %w", err)
	}
	a.ledger.restore(records)
	if err := a.reclaimer.compareKind(a.mtus.dir); err != nil {
		return err
	}
	var live []record
	for _, r := range records {
		if !r.State.attached() || !r.onHost(devices) {
			continue
		}
		live = append(live, r)
		if r.State.pending() {
			a.own.announce(r)
		}
	}
	a.host.restore(live)
	a.ledger.serve()
	a.work.Set()
	a.log.Info("attachments restored", "records", len(records), "live", len(live))
	return nil
}

// Run completes what was cut short: releases that the datastore's absence or
// the daemon's end interrupted. It also gives the datastore back what it forgot
// of living workloads; see [Attacher.HandleStore]. At first it takes over the workloads
// that Calico attached to this host. It returns when ctx ends.
func (a *Attacher) Run(ctx context.Context) {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { a.releaser.runWires(ctx, a.work) })
	beside.Go(func() { a.adopter.run(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	var flush time.Time // when to write what has come; zero: nothing has
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.now:
			a.schedule.clear()
			flush = time.Now()
		case <-a.work:
			if flush.IsZero() {
				flush = time.Now().Add(a.linger)
			}
		case <-a.schedule.changed:
		case <-timer.C:
			flush = time.Time{}
			a.workThrough(ctx)
		}
		timer.Stop()
		next, due := a.schedule.next()
		if !flush.IsZero() && (!due || flush.Before(next)) {
			next, due = flush, true
		}
		if due {
			timer.Reset(time.Until(next))
		}
	}
}

// settleTimeout bounds [Attacher.Settle]: the journal has what is left.
const settleTimeout = 5 * time.Second

// Settle writes to the datastore at once what waits for others or for a pod's end, as far as it
// succeeds: for a daemon that ends, whose host may be another program's afterwards.
func (a *Attacher) Settle(ctx context.Context) {
	ctx, cancel := bounded(ctx, settleTimeout)
	defer cancel()
	if a.flusher.linger == 0 && a.releaser.linger == 0 || !a.store.writable() {
		return
	}
	a.flusher.ending.Store(true)
	now := func(ID) bool { return false }
	a.flusher.all(ctx, now)
	a.releaser.complete(ctx, now)
}

// workThrough tries everything that is due.
func (a *Attacher) workThrough(ctx context.Context) {
	start := time.Now()
	a.flusher.all(ctx, a.schedule.waits)
	if !a.schedule.waits(ID{}) {
		// Before releases, which may take long: until then others may get the
		// addresses of workloads that live here.
		a.reclaimer.all(ctx)
	}
	a.releaser.complete(ctx, a.schedule.waits)
	a.schedule.tried(start)
}

// DelRequest is what DEL asks for.
type DelRequest struct {
	ID            ID
	Workload      Workload
	AddressesOnly bool // what [Attacher.Allocate] gave
}

// Del detaches a container. It succeeds when there is nothing to detach; the
// container's namespace need not exist. Without a record it goes by what
// follows from the names. With [Config.Behind] it answers when it is certain
// that the attachment goes, also after the loss of power; so it does while an
// operator has the datastore locked, and what it frees waits for the end of that. Else, while the
// datastore is away, it removes the wire and returns [store.ErrUnavailable], or
// [ErrNotReady] where the host does not hold its name; the caller should try
// again, and the daemon does so by itself.
func (a *Attacher) Del(ctx context.Context, req DelRequest) error {
	if !a.ledger.restored() {
		return errStarting()
	}
	if a.behind() && a.ledger.state(req.ID).leaving() {
		a.releaser.wires.Set() // it was answered before, or failed, and the rest is on its way
		return a.ledger.sync()
	}
	l, err := a.locks.lock(ctx, req.ID, req.Workload)
	if err != nil {
		return err
	}
	defer l.unlock()
	if !l.known && a.releaseOther != nil {
		if err := a.releaseOther(ctx, req.ID.ContainerID); err != nil {
			return err
		}
	}
	if !l.known && req.AddressesOnly {
		l.AddressesOnly, l.Device = true, ""
	}
	if a.behind() || a.store.locked() {
		return a.releaser.answer(ctx, l.record)
	}
	if err := a.releaser.release(ctx, l.record); err != nil {
		a.schedule.failed(req.ID)
		return err
	}
	return nil
}

// CheckRequest is what CHECK asks for. What is empty is not compared.
type CheckRequest struct {
	ID        ID
	Netns     string
	Device    string
	MAC       string
	Addresses []netip.Addr

	AddressesOnly bool // what [Attacher.Allocate] gave
}

// Check verifies that an attachment is as ADD made it, and that the runtime
// remembers it rightly. It changes nothing. The error matches [ErrUnknown] or
// [workload.ErrDiffers] and names every difference.
func (a *Attacher) Check(ctx context.Context, req CheckRequest) error {
	if !a.ledger.restored() {
		return errStarting()
	}
	l, err := a.locks.lock(ctx, req.ID, Workload{})
	if err != nil {
		return err
	}
	defer l.unlock()
	r := l.record
	if !r.State.attached() {
		return fmt.Errorf("container %s, interface %s in network %s: %w", req.ID.ContainerID, req.ID.Interface, req.ID.Network, ErrUnknown)
	}
	errs := []error{req.compare(r)}
	if r.AddressesOnly != req.AddressesOnly {
		errs = append(errs, errRole(r))
	}
	if r.AddressesOnly {
		return errors.Join(errs...)
	}
	spec := r.spec()
	if req.Netns != "" {
		spec.Netns = req.Netns
	}
	errs = append(errs, a.host.Verify(ctx, spec, r.mac()))
	for _, addr := range r.addrs() {
		errs = append(errs, a.host.VerifyRoute(ctx, r.Device, addr))
	}
	return errors.Join(errs...)
}

// compare compares what the runtime knows with the record.
func (req CheckRequest) compare(r record) error {
	var errs []error
	differ := func(what, have, want string) {
		errs = append(errs, fmt.Errorf("%s in prevResult is %s, attached was %s: %w", what, have, want, workload.ErrDiffers))
	}
	if req.Device != "" && req.Device != r.Device {
		differ("the host's interface", req.Device, r.Device)
	}
	if req.MAC != "" && !strings.EqualFold(req.MAC, r.MAC) {
		differ("the container's MAC address", req.MAC, r.MAC)
	}
	if len(req.Addresses) > 0 && !sameAddrs(req.Addresses, r.addrs()) {
		differ("the address", fmt.Sprint(req.Addresses), fmt.Sprint(r.addrs()))
	}
	return errors.Join(errs...)
}

func sameAddrs(a, b []netip.Addr) bool {
	sorted := func(list []netip.Addr) []netip.Addr {
		return slices.Compact(slices.SortedFunc(slices.Values(list), netip.Addr.Compare))
	}
	return slices.Equal(sorted(a), sorted(b))
}

// SetMTU makes m the MTU of workloads: of new ones at once, and of running
// ones before it returns. Those whose request gave an MTU keep that, and one
// that was lowered inside the workload stays (see [workload.Wire.SetMTU]).
// A workload whose namespace is gone is left out; the error names those that
// could not be changed, and a repetition tries them again. It may be repeated and
// cut short at any point: the record says what may be there.
//
// No packet is dropped without an answer on the way: the host's routes have the
// smaller MTU for as long as the two ends of a wire may differ.
//
// What makes room in packets (a pool's change to an encapsulation with more
// overhead, a smaller tunnel device) has to wait until [Attacher.ReachedMTU] says
// that the workloads are small enough; what takes less comes first, and then
// SetMTU.
func (a *Attacher) SetMTU(ctx context.Context, m MTU) error { return a.mtus.set(ctx, m) }

// ReachedMTU is what no workload of this host is above, of those that follow
// [Attacher.SetMTU]. After [Attacher.Restore] it is what the previous run of the
// daemon left; where that is not known, and on a new host, it is zero until
// SetMTU has succeeded.
func (a *Attacher) ReachedMTU() MTU { return a.mtus.isReached() }

// Doubt says that what was assigned to this host's workloads may be another
// host's by now: its Node was deleted, or it is in a new epoch. ADD waits until
// each workload has been compared with the datastore once: what is still its
// own, or free, it keeps, or takes again; of what is another's the routes are
// taken down and the workload is named (see [Endpoint]). It does not block.
func (a *Attacher) Doubt() { a.reclaimer.raise() }

// Verified waits until no doubt is left: see [Attacher.Doubt].
func (a *Attacher) Verified(ctx context.Context) error { return a.reclaimer.wait(ctx) }

// FenceForeign takes down the routes of workloads whose addresses others hold
// in the datastore, and writes nothing there: it is for a host that must not,
// because another has its name. What is free, or cannot be read, stays.
func (a *Attacher) FenceForeign(ctx context.Context) error { return a.reclaimer.fenceForeign(ctx) }

// Disown says that what the datastore shows under this host's name is another
// machine's: what is on its way out here is released without it. What was this
// machine's own of that is freed as leaked. It is to be called before the name
// is taken: a daemon that dies afterwards would not know. A repeat does nothing.
func (a *Attacher) Disown() error {
	n, err := a.ledger.disown()
	if n == 0 || err != nil {
		return err
	}
	if err := a.ledger.sync(); err != nil {
		return err
	}
	a.log.Warn("endpoints of attachments being released belong to another machine in the datastore, and stay", "attachments", n)
	return nil
}

// Uses reports whether a handle's addresses are in use by what this host knows:
// an attachment, be it under way or not given back yet, or what the host keeps
// for a network. An ADD is known before it asks for an address. Before
// [Attacher.Restore] everything is in use. It does not block.
func (a *Attacher) Uses(h string) bool { return a.ledger.uses(h) || a.gateways.uses(h) }

// KeptForHost reports whether an address is one that the host keeps for itself
// as the gateway of a network that another plugin makes, or was so within the last 30
// seconds: that plugin gives it to a device of the host, and takes that away after the
// address is free.
func (a *Attacher) KeptForHost(addr netip.Addr) bool { return a.gateways.has(addr, time.Now()) }

// Wired returns the handles of the containers whose devices are on this host,
// also of those that it has no record of.
func (a *Attacher) Wired(ctx context.Context) (map[string]bool, error) {
	devices, err := a.host.Devices(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the containers' devices: %w", err)
	}
	out := make(map[string]bool, len(devices))
	for _, alias := range devices {
		if id, ok := workload.ParseAlias(alias); ok {
			out[handle(id)] = true
		}
	}
	return out, nil
}
