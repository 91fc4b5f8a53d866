package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// Errors that callers branch on, beside those of packages workload and store.
var (
	// ErrInvalid says that the request cannot be carried out as it is.
	ErrInvalid = errors.New("invalid request")
	// ErrNoAddress says that the pools have no address left, or not the one
	// that was asked for. An [IPAM] returns it.
	ErrNoAddress = errors.New("no address available")
	// ErrHeld is an ErrNoAddress: the address that was asked for is held by
	// somebody else.
	ErrHeld = fmt.Errorf("%w: held by somebody else", ErrNoAddress)
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

// AddRequest is what ADD asks for.
type AddRequest struct {
	ID         ID
	Workload   Workload
	Netns      string // path of the container's network namespace
	MTU        int    // bytes; 0: what Attacher.SetMTU said last
	IPv4       bool   // give an IPv4 address
	IPv6       bool
	IPv4Pools  []string      // names or CIDRs; empty: chosen by the pools' selectors
	IPv6Pools  []string      // likewise
	Addresses  []netip.Addr  // these, at most one of a family; the others: any
	Forwarding bool          // leave IP forwarding on inside the container
	MAC        dataplane.MAC // of the container's end; zero: the kernel's choice

	// Node is the node that the request means; empty: whichever this is.
	Node string
	// NamespaceLabels are those of the workload's namespace, for pools that
	// choose by them.
	NamespaceLabels map[string]string
	// Given are addresses that somebody else gave and takes back. Then none is
	// assigned, and IPv4, IPv6, pools and Addresses do not count.
	Given []netip.Addr
}

// Address is an address of an attachment.
type Address struct {
	Addr    netip.Addr   `json:"addr"`
	Gateway netip.Addr   `json:"gateway"` // what the container's default route names
	Block   netip.Prefix `json:"block"`   // the IPAM block that Addr is from
}

// Result is what ADD made.
type Result struct {
	Device    string // on the host
	HostMAC   dataplane.MAC
	MAC       dataplane.MAC // inside the container
	MTU       int           // bytes
	Addresses []Address
}

// DelRequest is what DEL asks for.
type DelRequest struct {
	ID            ID
	Workload      Workload
	AddressesOnly bool // what [Attacher.Allocate] gave
}

// Collected is what GC did.
type Collected struct {
	Removed []ID
	// Left are those that are not valid and still there: their release failed, or
	// another call works on them.
	Left []ID
	// Unlisted says that there may be more: nobody knows which wires are there.
	Unlisted bool
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

// Endpoint describes an attachment for status reports.
type Endpoint struct {
	ID        ID
	Workload  Workload
	Device    string
	Netns     string // path of the container's network namespace
	Addresses []netip.Addr
	MTU       int       // bytes
	State     string    // attached; adding or releasing while under way or cut short
	Lost      string    // why the workload has no route: its address is somebody else's; empty: it has
	Since     time.Time // of the attachment
}

// IPAM gives addresses and takes them back. Package control/ipam does that;
// errors match [ErrNoAddress], [ErrInvalid] or [store.ErrUnavailable] where
// these apply.
type IPAM interface {
	// Assign returns for each request the address of its family that the handle
	// has, and gives it one if it has none: all of them, or none. The requests
	// are of one handle and of different families. A repeat returns the same.
	Assign(ctx context.Context, reqs ...AssignRequest) ([]Assignment, error)
	// ReleaseHandle takes back all addresses of a handle but those to keep. A
	// handle without any is success.
	ReleaseHandle(ctx context.Context, handle string, keep ...netip.Addr) error

	// Confirm writes to the datastore addresses that Assign gave as Reserved, and
	// returns an error or nil for each. [ErrNoAddress]: it is not this host's any
	// more.
	Confirm(ctx context.Context, cs ...Confirmation) []error
	// Claim says that a handle has addresses, by its record, before any is
	// assigned; Unclaim that the handle has none any more on this host, or not
	// those named. Rest comes before: it makes them rest, if released addresses
	// do, also after a crash before Unclaim.
	Claim(handle string, addrs ...netip.Addr)
	Rest(handle string) error
	Unclaim(handle string, addrs ...netip.Addr)
	// Ready reports whether Assign can give addresses without the datastore.
	Ready() bool
}

// AssignRequest asks for one address.
type AssignRequest struct {
	Handle     string // whose the address is: <network>.<container id>
	Family     dataplane.Family
	Pools      []string          // names or CIDRs; empty: chosen by selectors
	Address    netip.Addr        // invalid: any
	Namespace  string            // Kubernetes namespace
	Labels     map[string]string // of the namespace, for the pools' selectors
	Attributes map[string]string // kept beside the address
	// Again says that the workload lives with Address: whether it would be given
	// to somebody new does not count.
	Again bool
	// Fresh says that what the handle may hold is of an earlier life, and on its
	// way back.
	Fresh bool
}

// Assignment is an address and the block it is from.
type Assignment struct {
	Addr  netip.Addr
	Block netip.Prefix
	// Reserved says that the datastore does not know yet whose the address is:
	// the record of the attachment has to say so until it is confirmed.
	Reserved bool
}

// Wire makes wires; *[workload.Wire] does.
type Wire interface {
	Attach(ctx context.Context, spec workload.Spec) (workload.End, error)
	Detach(ctx context.Context, device string, owner workload.Owner) error
	Verify(ctx context.Context, spec workload.Spec, mac dataplane.MAC) error
	SetMTU(ctx context.Context, spec workload.Spec, ours ...int) error
	VerifyRoute(ctx context.Context, device string, addr netip.Addr) error
	Devices(ctx context.Context) (map[string]string, error)
	HostSysctls(device string, addrs []netip.Addr) []dataplane.Sysctl
}

// Config is what [New] needs. All fields without a default are required.
type Config struct {
	Node string // this host's name in the datastore
	Dir  string // for the MTU of workloads; made with mode 0700 if missing
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
	// its name. What is to be told waits for it; wires are cut all the same.
	// nil or a nil result: it does. It must not block or call the Attacher.
	Held func() error

	// Behind answers ADD and DEL when the journal has them, and tells the
	// datastore afterwards, many in one transaction. Else the datastore knows
	// before the answer.
	Behind bool
	// Linger is how long the first that is to be told waits for others; 0: 100 ms.
	Linger time.Duration
	// Announce tells of an endpoint of this host, or of its end, before the
	// datastore does, and of the profile of a network that is new; the event has
	// no revision. It must not block or call the Attacher. Who also follows the
	// datastore is told after [Attacher.HandleStore]. Where Rules is set and Announce is not, endpoints are written before the answer.
	Announce func(store.Event)

	// Written tells that the datastore has an endpoint that was announced, at a
	// revision; Ended that nothing is left of one whose end was announced, and
	// whether the datastore ever heard of it. Both may be nil, and are as Announce.
	Written func(key store.Key, rev store.Revision)
	Ended   func(key store.Key, told bool)

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

	Log *slog.Logger
}

// undoTimeout bounds what is done after a failure. It runs in a context of its
// own: the caller's may be what ended.
const undoTimeout = 10 * time.Second

// Attacher carries out the verbs. It is safe for concurrent use: calls about
// different containers run in parallel.
type Attacher struct {
	cfg   Config
	log   *slog.Logger
	locks keyedMutex
	poke  chan struct{} // something is to be completed
	cuts  chan struct{} // wires are to be cut
	dirty chan struct{} // the datastore is to be told
	back  chan struct{} // the datastore answers again
	pass  chan struct{} // holds a token while it is told of what was attached

	mu        sync.Mutex
	records   map[ID]record
	touched   map[ID]bool // the datastore may have heard of these
	retries   retries     // of what [Attacher.Run] could not complete
	restored  bool
	storeAway bool            // the watch says so
	kept      map[string]kept // by network
	byHandle  map[string][]ID // of the records: see handle
	// What the watch told of this host's Node; see HandleStore.
	synced, nodeKnown bool
	forgotten         bool // the datastore may lack what is attached
	doubt             doubt
	profiles          map[string]bool
	mtu, reachedMTU   MTU // see SetMTU

	mtuPass  sync.Mutex // held while workloads are brought to another MTU
	mtuState mtuState   // guarded by mtuPass once restored

	// hook is called between steps; tests fail or "kill" there.
	hook func(step string) error
}

// New returns an Attacher that serves after [Attacher.Restore].
func New(cfg Config) (*Attacher, error) {
	switch {
	case cfg.Node == "":
		return nil, errors.New("attach: node name is missing")
	case cfg.IPAM == nil || cfg.Sink == nil || cfg.Store == nil || cfg.Wire == nil || cfg.Journal == nil:
		return nil, errors.New("attach: one of IPAM, sink, store, wire, journal is missing")
	}
	if cfg.StoreTimeout == 0 {
		cfg.StoreTimeout = 10 * time.Second
	}
	if cfg.RulesTimeout == 0 {
		cfg.RulesTimeout = 10 * time.Second
	}
	if cfg.Retry == 0 {
		cfg.Retry = time.Second
	}
	if cfg.Linger == 0 {
		cfg.Linger = 100 * time.Millisecond
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := makeStateDir(cfg.Dir); err != nil {
		return nil, err
	}
	a := &Attacher{
		cfg:     cfg,
		log:     cfg.Log,
		poke:    make(chan struct{}, 1),
		cuts:    make(chan struct{}, 1),
		dirty:   make(chan struct{}, 1),
		back:    make(chan struct{}, 1),
		pass:    make(chan struct{}, 1),
		records: make(map[ID]record),
		touched: make(map[ID]bool),
		retries: retries{first: cfg.Retry, by: make(map[ID]retry)},

		profiles: make(map[string]bool),
		kept:     make(map[string]kept),
		byHandle: make(map[string][]ID),
	}
	a.claim()
	return a, nil
}

// at is a point between two steps.
func (a *Attacher) at(step string) error {
	if a.hook == nil {
		return nil
	}
	return a.hook(step)
}

// Endpoints lists the attachments, ordered by id.
func (a *Attacher) Endpoints() []Endpoint {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]Endpoint, 0, len(a.records))
	for _, r := range a.records {
		out = append(out, Endpoint{
			ID: r.id(), Workload: r.workload(), Device: r.Device, Netns: r.Netns,
			Addresses: r.addrs(), MTU: r.MTU, State: string(r.State), Since: r.Since, Lost: r.Lost,
		})
	}
	slices.SortFunc(out, func(x, y Endpoint) int { return compareIDs(x.ID, y.ID) })
	return out
}

// Status reports whether ADD can be served: [ErrNotReady] or
// [store.ErrUnavailable] with the reason if not.
func (a *Attacher) Status(ctx context.Context) error {
	if err := a.ready(); err != nil {
		return err
	}
	if a.behind() && a.cfg.IPAM.Ready() {
		return nil
	}
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	pools, _, err := a.cfg.Store.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return storeError("list IP pools", err)
	}
	for _, p := range pools {
		if pool, ok := p.Value.(*v3.IPPool); ok && servesWorkloads(pool) {
			return nil
		}
	}
	return fmt.Errorf("no enabled pool for workloads (%d pools defined): create an IPPool: %w", len(pools), ErrNotReady)
}

func servesWorkloads(p *v3.IPPool) bool {
	_, err := netip.ParsePrefix(p.Spec.CIDR)
	uses := p.Spec.AllowedUses
	return err == nil && !p.Spec.Disabled && p.DeletionTimestamp == nil &&
		(len(uses) == 0 || slices.Contains(uses, v3.IPPoolAllowedUseWorkload))
}

func (a *Attacher) ready() error {
	if !a.isRestored() {
		return errStarting()
	}
	if a.cfg.Ready == nil {
		return a.errVerifying()
	}
	if err := a.cfg.Ready(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return a.errVerifying()
}

func (a *Attacher) isRestored() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.restored
}

func errStarting() error { return fmt.Errorf("the daemon is starting: %w", ErrNotReady) }

// storeContext bounds a step that needs the datastore. It leaves a tenth of
// the caller's time for the answer.
func (a *Attacher) storeContext(ctx context.Context) (context.Context, context.CancelFunc) {
	timeout := a.cfg.StoreTimeout
	if deadline, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(deadline)*9/10)
	}
	return context.WithTimeout(ctx, timeout)
}

// awaitRules waits for the rules of an attachment. Before they are in force the
// device carries nothing, so a workload that is started without them would find
// no network.
func (a *Attacher) awaitRules(ctx context.Context, r record) error {
	if a.cfg.Rules == nil {
		return nil
	}
	timeout := a.cfg.RulesTimeout
	if deadline, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(deadline)*9/10)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := a.cfg.Rules(ctx, r.Device, r.addrs()); err != nil {
		return fmt.Errorf("wait for the policy rules of %s: %w: %w", r.Device, ErrNotReady, err)
	}
	return nil
}

// storeError names the step, and the datastore when waiting for it is what
// took too long.
func storeError(step string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, store.ErrUnavailable) {
		return fmt.Errorf("%s: %w: %w", step, store.ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", step, err)
}

func (a *Attacher) record(id ID) (record, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r, ok := a.records[id]
	return r, ok
}
