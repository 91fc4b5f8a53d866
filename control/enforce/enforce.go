// Package enforce brings policy into force: it feeds control/policy with what
// the datastore and the kernel say, hands the steps that come out to the writer
// of the kernel's tables, and cuts the connections that a step denies.
package enforce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/spans"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// Table carries rulesets into the kernel. Package dataplane/nft does.
type Table interface {
	// Apply takes a step. With nil the kernel judges by it; with an error it
	// judges as before.
	Apply(d filter.Delta) error
	// Replace makes a ruleset the one that the kernel judges by, whatever was
	// before.
	Replace(r *filter.Ruleset) error
}

// Connections is the kernel's table of tracked connections;
// *[conntrack.Table] is.
type Connections interface {
	Judge(ctx context.Context, of []netip.Addr, judge func(conntrack.Flow) conntrack.Verdict) (cut, renewed int, err error)
}

// Config is what [New] needs. All fields without a default are required.
type Config struct {
	Node             string            // this host's name in the datastore
	AutoHostEndpoint bool              // of every node; see [policy.Config]
	HostPorts        []filter.Tunnel   // see [policy.Config]
	Guarded          []filter.Tunnel   // likewise
	Datastore        []filter.Failsafe // see [policy.Config]

	Services policy.Services // likewise

	// TunnelsFromAnywhere and MaxConnections are as in [policy.Config].
	TunnelsFromAnywhere bool
	MaxConnections      uint32

	Table       Table
	Connections Connections
	Offload     Offload // nil: all packets take the way of rules

	// Retry is the first pause after a step that the kernel refused; pauses
	// double up to ten seconds. 0: 100 ms.
	Retry time.Duration
	// CutPause is the longest pause between two looks at the table of
	// connections; what changes meanwhile is looked at together. A pause is 24
	// times what the look took, and a fifth of CutPause passes before one. 0: 500
	// ms, so that a change is felt within a second.
	CutPause time.Duration

	// AskOthers is called when rules begin to depend on who the workloads of other hosts are
	// ([policy.Calculator.AsksOthers]), and when they cease to. nil: nothing is called.
	AskOthers func(asks bool)

	// Heard is called before rules that follow the datastore take the place of
	// those from before: from then on what is on disk of the datastore's state may be
	// older than the kernel's rules. nil: nothing is called.
	Heard func()

	// Tracer records what each step took; nil: nothing does.
	Tracer *spans.Tracer

	Log *slog.Logger
}

// Enforcer keeps this host's rules in force. Its methods are safe for
// concurrent use.
type Enforcer struct {
	cfg  Config
	log  *slog.Logger
	poke async.Signal // something is to be applied
	cut  async.Signal // connections are to be looked at

	offload    async.Signal // devices or endpoints changed
	offloading sync.Mutex   // held from the look at them to the end of the kernel's transaction

	heard bool // Heard was called; Run's
	asked bool // as AskOthers was told last; Run's

	mu      sync.Mutex
	queue   []cluster.Step
	ownOnly bool                    // as the last step has it
	lacks   []store.Kind            // likewise
	ifaces  map[string][]netip.Addr // nil: nothing new
	links   map[string]bool         // with ifaces: those that cannot be workloads'
	sources map[string][]netip.Addr // by node: from where its packets come, as far as that is new
	seen    map[string][]netip.Addr // by node: the same, all of it
	changed map[string]bool         // interfaces whose connections are to be judged anew
	gone    map[netip.Addr]bool     // addresses that workloads here had, whose connections are to be cut
	own     map[netip.Addr]bool     // this host's addresses; nil: not known yet
	moved   bool                    // they changed: all connections are to be judged anew
	owed    bool                    // offloaded flows are to be forgotten

	underlay dataplane.Underlay
	status   Status
	held     time.Time                 // since when rules wait for workloads of other hosts; zero: none do
	live     map[string][]netip.Prefix // by interface: the sources of the endpoints whose rules the kernel has
	inForce  chan struct{}             // closed and replaced when what is in force changes

	rules sync.RWMutex
	have  *filter.Ruleset // what was handed to the table
}

// Status says how things stand.
type Status struct {
	FromDisk  bool          // the rules follow what the previous run knew, for the datastore has not said all yet
	InForce   bool          // the rules follow the datastore; before, those of the previous run hold
	Err       error         // why the kernel does not have the newest rules; nil: it has
	Held      time.Duration // for how long rules wait until all workloads of other hosts are known; 0: none do
	Steps     uint64
	Cut       uint64 // connections
	CutErr    error
	Problems  []policy.Problem
	Took      time.Duration // of the last step: from what was heard to what is in force
	Endpoints int
	Policies  int
	Sets      int
	Members   int
}

// New returns an Enforcer that works while [Enforcer.Run] does.
func New(cfg Config) *Enforcer {
	if cfg.Retry == 0 {
		cfg.Retry = 100 * time.Millisecond
	}
	if cfg.CutPause == 0 {
		cfg.CutPause = 500 * time.Millisecond
	}
	return &Enforcer{
		cfg: cfg, log: cfg.Log, poke: async.NewSignal(), cut: async.NewSignal(), offload: async.NewSignal(),
		sources: make(map[string][]netip.Addr), seen: make(map[string][]netip.Addr), changed: make(map[string]bool), gone: make(map[netip.Addr]bool), live: make(map[string][]netip.Prefix), inForce: make(chan struct{}), have: filter.NewRuleset(),
	}
}

// HandleStore applies a step of [policy.Kinds] of the cluster's copy, and of [policy.ServiceKinds]. It does not
// wait.
func (e *Enforcer) HandleStore(s cluster.Step) {
	e.mu.Lock()
	if len(s.Changes) == 0 && !s.Synced && s.OwnOnly == e.ownOnly && slices.Equal(s.Lacks, e.lacks) {
		e.mu.Unlock()
		return
	}
	e.ownOnly, e.lacks = s.OwnOnly, s.Lacks
	e.queue = append(e.queue, s)
	e.status.FromDisk = s.Source == cluster.Disk
	e.mu.Unlock()
	e.poke.Set()
}

// HandleUnderlay applies the addresses of this host. It does not wait.
func (e *Enforcer) HandleUnderlay(u dataplane.Underlay) {
	addrs, links := interfaces(u)
	own := make(map[netip.Addr]bool)
	for _, a := range u.Addresses {
		own[a.Prefix.Addr()] = true
	}
	e.mu.Lock()
	e.moved = e.moved || !maps.Equal(e.own, own)
	e.ifaces, e.own, e.links, e.underlay = addrs, own, links, u
	e.mu.Unlock()
	e.poke.Set()
	e.offload.Set()
}

// interfaces returns the addresses of the host's devices, and which of these are its own.
func interfaces(u dataplane.Underlay) (addrs map[string][]netip.Addr, links map[string]bool) {
	addrs, links = make(map[string][]netip.Addr), make(map[string]bool)
	for _, l := range u.Links {
		if hostLink(l) {
			links[l.Name] = true
		}
	}
	for _, a := range u.Addresses {
		addrs[a.Link] = append(addrs[a.Link], a.Prefix.Addr())
	}
	return addrs, links
}

// SetSources sets from which addresses packets of a node were seen to come; see
// [policy.Calculator.SetSources]. It does not wait.
func (e *Enforcer) SetSources(node string, addrs []netip.Addr) {
	e.mu.Lock()
	e.sources[node] = addrs
	if e.seen[node] = addrs; len(addrs) == 0 {
		delete(e.seen, node)
	}
	e.mu.Unlock()
	e.poke.Set()
}

// hostLink reports whether a device is the host's own by its type (IFLA_INFO_KIND,
// ip-link(8)), which is empty for physical ones and the loopback: those that
// workloads are attached by are named here.
func hostLink(l dataplane.UnderlayLink) bool {
	return l.Loopback || !slices.Contains([]string{"veth", "tun", "netkit", "macvlan", "macvtap", "ipvlan", "ipvtap"}, l.Type)
}

// maxRetry is the longest pause after a step that the kernel refused.
const maxRetry = 10 * time.Second

// Run works until ctx ends.
func (e *Enforcer) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { e.cutLoop(ctx) })
	wg.Go(func() { e.offloadLoop(ctx) })

	calc := e.calculator()
	backoff := async.Backoff{Min: e.cfg.Retry, Max: maxRetry}
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-e.poke:
		case <-retry.C:
		}
		if err := e.step(ctx, calc); err == nil {
			retry.Stop()
			backoff.Reset()
			continue
		}
		retry.Reset(backoff.Next())
	}
}

// calculator returns a calculator of this host's rules that knows nothing yet.
func (e *Enforcer) calculator() *policy.Calculator {
	return policy.New(policy.Config{
		Node: e.cfg.Node, AutoHostEndpoints: e.cfg.AutoHostEndpoint, HostPorts: e.cfg.HostPorts, Guarded: e.cfg.Guarded, Datastore: e.cfg.Datastore, Services: e.cfg.Services,
		TunnelsFromAnywhere: e.cfg.TunnelsFromAnywhere, MaxConnections: e.cfg.MaxConnections,
	})
}

// step applies what was heard and brings what follows from it into force.
func (e *Enforcer) step(ctx context.Context, calc *policy.Calculator) error {
	start := time.Now()
	ctx, end := e.cfg.Tracer.Start(ctx, "policy change") // of which nothing is recorded when nothing follows
	e.mu.Lock()
	queue, ifaces, links, before := e.queue, e.ifaces, e.links, e.status
	known, moved := e.own != nil, e.moved
	sources := e.sources
	e.queue, e.ifaces, e.moved, e.sources = nil, nil, false, make(map[string][]netip.Addr)
	e.mu.Unlock()
	if ifaces != nil {
		calc.SetHostLinks(links)
		calc.SetInterfaces(ifaces)
	}
	for _, s := range queue {
		calc.HandleStore(s)
	}
	for node, addrs := range sources {
		calc.SetSources(node, addrs)
	}
	if !known {
		return nil // host endpoints are found by the addresses, and cuts go by them
	}
	if moved {
		e.judgeAll(before.InForce && before.Err == nil)
	}
	d, ok := calc.Flush()
	e.askOthers(calc)
	if !ok || d.Empty() && before.Err == nil && before.InForce {
		e.note(func(s *Status) { s.Problems = calc.Problems() })
		return nil
	}
	if !before.FromDisk && !e.heard {
		if e.heard = true; e.cfg.Heard != nil {
			e.cfg.Heard()
		}
	}
	e.rules.Lock()
	touched, left := touched(e.have, &d), left(e.have, &d)
	hold, forget := recalls(e.have, &d)
	err := e.have.Apply(&d)
	if err != nil {
		e.have = calc.Snapshot() // in place of half a step
	}
	e.rules.Unlock()
	_, kernel := e.cfg.Tracer.Start(ctx, "kernel")
	again := before.Err != nil // what an earlier step concerned, this one does
	if err == nil && (hold || again) {
		err = e.hold()
	}
	switch {
	case err != nil:
		// A fault of the calculator's, for one: what the kernel has stays.
		err = fmt.Errorf("apply a step of the rules: %w", err)
	case again:
		e.rules.RLock()
		err = e.cfg.Table.Replace(e.have)
		e.rules.RUnlock()
	default:
		err = e.cfg.Table.Apply(d)
	}
	kernel(err)
	end(err)
	if err == nil {
		e.goesLive(&d, again)
		e.offload.Set()
	}
	if err == nil && (forget || again) {
		if err := e.forget(); err != nil {
			e.log.Error("offloaded flows could not be removed and stay offloaded; will try again", "error", err)
		}
	}
	e.mu.Lock()
	for name := range touched {
		e.changed[name] = true
	}
	for _, a := range left {
		e.gone[a] = true
	}
	e.mu.Unlock()
	e.applied(calc, err, time.Since(start))
	return err
}

// askOthers asks for the workloads of other hosts if rules depend on them.
func (e *Enforcer) askOthers(calc *policy.Calculator) {
	e.note(func(*Status) {
		switch held := calc.Held(); {
		case !held:
			e.held = time.Time{}
		case e.held.IsZero():
			e.held = time.Now()
		}
	})
	if asks := calc.AsksOthers(); asks != e.asked {
		if e.asked = asks; e.cfg.AskOthers != nil {
			e.cfg.AskOthers(asks)
		}
	}
}

// judgeAll has the connections of all endpoints judged anew: now, or with the
// next step that succeeds.
func (e *Enforcer) judgeAll(now bool) {
	e.rules.RLock()
	defer e.rules.RUnlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	for name := range e.have.Endpoints {
		e.changed[name] = true
	}
	if now {
		e.cut.Set()
	}
}

// goesLive takes note of the endpoints that the kernel took: those of a step, or
// all that there are.
func (e *Enforcer) goesLive(d *filter.Delta, all bool) {
	e.rules.RLock()
	defer e.rules.RUnlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if all {
		e.live = make(map[string][]netip.Prefix, len(e.have.Endpoints))
		for name, ep := range e.have.Endpoints {
			e.live[name] = ep.Sources
		}
		return
	}
	for _, name := range d.DelEndpoints {
		delete(e.live, name)
	}
	for _, ep := range d.PutEndpoints {
		e.live[ep.Interface] = ep.Sources
	}
}

// applied takes note of what became of a step.
func (e *Enforcer) applied(calc *policy.Calculator, err error, took time.Duration) {
	e.rules.RLock()
	endpoints, policies, sets, members := len(e.have.Endpoints), len(e.have.Policies), len(e.have.Sets), 0
	for _, m := range e.have.Members {
		members += len(m)
	}
	e.rules.RUnlock()
	e.note(func(s *Status) {
		if err != nil && (s.Err == nil || s.Err.Error() != err.Error()) {
			e.log.Error("policy rules are not in force; the previous ones still apply", "error", err)
		}
		if err == nil && s.Err != nil {
			e.log.Info("policy rules are in force again")
		}
		if err == nil && !s.InForce {
			e.log.Info("policy rules are in force", "endpoints", endpoints, "policies", policies, "sets", sets, "members", members, "took", took)
		}
		s.Err, s.Problems = err, calc.Problems()
		s.Endpoints, s.Policies, s.Sets, s.Members = endpoints, policies, sets, members
		if err == nil {
			s.InForce, s.Took = true, took
			s.Steps++
		}
	})
	if err == nil {
		e.cut.Set()
	}
}

// note changes the status, and wakes who waits for another.
func (e *Enforcer) note(change func(*Status)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.status)
	close(e.inForce)
	e.inForce = make(chan struct{})
}

// Status says how things stand.
func (e *Enforcer) Status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.statusNow()
}

// statusNow is the status. The lock is held.
func (e *Enforcer) statusNow() Status {
	s := e.status
	s.Problems = slices.Clone(s.Problems)
	if !e.held.IsZero() {
		s.Held = max(1, time.Since(e.held))
	}
	return s
}

// View calls fn with the rules that were last handed to the kernel. fn must not
// keep or change them, and is to be quick.
func (e *Enforcer) View(fn func(*filter.Ruleset)) {
	e.rules.RLock()
	defer e.rules.RUnlock()
	fn(e.have)
}

// Wait waits until the rules of a workload's interface are in force, for all of
// these addresses. The error says what is waited for.
func (e *Enforcer) Wait(ctx context.Context, device string, addrs []netip.Addr) error {
	for {
		e.mu.Lock()
		status, next := e.statusNow(), e.inForce
		sources, known := e.live[device]
		e.mu.Unlock()
		err := waitsFor(status, sources, known, addrs)
		if err == nil {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, ctx.Err())
		}
	}
}

// errHeld says why a workload waits that others could start before.
var errHeld = errors.New("a policy selects workloads by their labels, and the datastore has not yet sent all those of other hosts")

func waitsFor(s Status, sources []netip.Prefix, known bool, addrs []netip.Addr) error {
	switch {
	case s.Err != nil:
		return s.Err
	case s.Held > 0 && (!s.InForce || !known):
		return errHeld
	case !s.InForce:
		return errors.New("the rules are being computed: the datastore's state is not complete yet, or the host's addresses are not known")
	case !known:
		return errors.New("the datastore has not sent the endpoint yet")
	}
	for _, a := range addrs {
		if !slices.ContainsFunc(sources, func(p netip.Prefix) bool { return p.Contains(a) }) {
			return fmt.Errorf("the rules are those of an earlier endpoint without the address %s", a)
		}
	}
	return nil
}
