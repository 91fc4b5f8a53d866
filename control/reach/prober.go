package reach

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

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/store"
)

// SourcePorts makes VXLAN's data to some peers leave from a port. Setting what
// is set already must cost nothing.
type SourcePorts interface {
	Set(port uint16, peers []netip.AddrPort) error
}

// Neighbours asks about neighbours. See [neighbour.Asker].
type Neighbours interface {
	Ask(linkIndex int, addr netip.Addr) error
	Probe(linkIndex int, addr netip.Addr, mac dataplane.MAC) error
	Run(ctx context.Context, fn func(neighbour.Event)) error
}

// Config is what a [Prober] needs.
type Config struct {
	Node  string      // this host's name; required
	Store store.Store // for the key that the hosts share, and this host's annotation; required
	Log   *slog.Logger

	// Interval is the time between probes of a peer when all is well.
	Interval time.Duration
	// Addresses are published as where hosts outside send to. Nil: what such
	// hosts see as our source; empty: none.
	Addresses []netip.Addr
	// PublishOnly leaves out the measuring.
	PublishOnly bool
	// StateFile keeps what was measured over a restart of the daemon.
	StateFile string

	// Deliver is told what was measured of all peers of a family, in the order
	// of the changes. The map is the callee's.
	Deliver func(context.Context, dataplane.Family, map[string]dataplane.Reach) error

	SourcePorts SourcePorts
	Neighbours  Neighbours
}

// Prober measures. [Prober.Run] does the work; the other methods may be called
// from any goroutine and do not block.
type Prober struct {
	cfg Config
	key atomic.Pointer[[]byte] // that the hosts share; nil: not known yet

	wake    chan struct{} // size one: the fields below changed
	doubt   chan struct{} // size one: the key may be another
	publish chan struct{} // size one: the annotation may have to be written
	events  chan event

	mu       sync.Mutex
	targets  []Target
	underlay *dataplane.Underlay
	fresh    bool // one of the two has changed
	heard    []neighbour.Event
	asks     []func(*loop)
	state    error   // why nothing is measured
	haveAddr *string // this host's annotation; nil: it is not registered
	wantAddr string
	knowAddr bool

	counts [reasons]atomic.Uint64
}

// event is a message that arrived.
type event struct {
	local local
	from  netip.AddrPort
	msg   message
}

// reason is why a message was of no use.
type reason int

// The reasons.
const (
	forged   reason = iota // a wrong authentication code
	garbage                // no message of ours
	overflow               // more came than could be looked at
	reasons
)

// New returns a Prober that does nothing until [Prober.Run].
func New(cfg Config) *Prober {
	p := &Prober{
		cfg: cfg, wake: make(chan struct{}, 1), doubt: make(chan struct{}, 1), publish: make(chan struct{}, 1), events: make(chan event, 1024),
	}
	if cfg.Addresses != nil {
		p.wantAddr, p.knowAddr = tunnelAddresses(cfg.Addresses), true
	}
	return p
}

// SetTargets replaces what is to be measured. The slice must not be changed
// afterwards.
func (p *Prober) SetTargets(ts []Target) {
	p.mu.Lock()
	p.targets, p.fresh = ts, true
	p.mu.Unlock()
	p.poke()
}

// HandleUnderlay takes in a snapshot of the network around the host.
func (p *Prober) HandleUnderlay(u dataplane.Underlay) {
	p.mu.Lock()
	p.underlay, p.fresh = &u, true
	p.mu.Unlock()
	p.poke()
}

// HandleStore takes in a batch of the store's watch: of its own Node it sees
// what is published.
func (p *Prober) HandleStore(b store.Batch) {
	for _, ev := range b.Events {
		if ev.Err != nil || ev.Key != store.ResourceKey(store.KindNode, p.cfg.Node) {
			continue
		}
		n, ok := ev.Object.Value.(*store.Node)
		p.mu.Lock()
		if p.haveAddr = nil; ok {
			p.haveAddr = new(n.Annotations[store.AnnotationTunnelAddress])
		}
		p.mu.Unlock()
		signal(p.publish)
	}
}

func (p *Prober) poke() { signal(p.wake) }

func (p *Prober) setState(err error) {
	p.mu.Lock()
	was := p.state
	p.state = err
	p.mu.Unlock()
	if err != nil && was == nil {
		p.cfg.Log.Warn("the underlay is not measured; what was known stays in use", "error", err)
	}
}

// loop is what only the goroutine of Run touches.
type loop struct {
	p     *Prober
	eng   *engine
	near  *vicinity
	socks sockets
	log   *slog.Logger

	told      map[dataplane.Family]map[string]dataplane.Reach
	deliverAt time.Time
	saveAt    time.Time // zero: nothing to save
	pins      []netip.AddrPort
	pinned    bool // pins are in the kernel
	retryAt   time.Time
}

// How long changes are collected before they are told and saved.
const (
	deliverPause = 50 * time.Millisecond
	savePause    = 200 * time.Microsecond // for each peer: the file has them all
	// kernelRetry is the time between attempts at what the kernel refused.
	kernelRetry = time.Second
)

// Restore tells what an earlier life of the daemon measured. It is to be called
// once, before [Prober.Run], and before those who are told begin to act.
func (p *Prober) Restore(ctx context.Context) error {
	kept := p.load()
	byFamily := map[dataplane.Family]map[string]dataplane.Reach{}
	for k, v := range kept {
		if byFamily[k.fam] == nil {
			byFamily[k.fam] = map[string]dataplane.Reach{}
		}
		byFamily[k.fam][k.node] = v.Reach
	}
	for f, m := range byFamily {
		if err := p.cfg.Deliver(ctx, f, m); err != nil {
			return fmt.Errorf("tell what was measured before: %w", err)
		}
	}
	return nil
}

// Run measures until ctx ends. What was found stays as it is then.
func (p *Prober) Run(ctx context.Context) error {
	if p.cfg.PublishOnly {
		signal(p.publish)
		p.followTunnelAddress(ctx)
		return ctx.Err()
	}
	now := time.Now()
	l := &loop{
		p: p, log: p.cfg.Log, eng: newEngine(p.cfg.Node, p.cfg.Interval, now), near: newVicinity(p.cfg.Neighbours, p.cfg.Interval),
		socks: sockets{p: p, open: map[local]*pair{}, done: make(chan struct{})}, told: map[dataplane.Family]map[string]dataplane.Reach{},
	}
	l.eng.remind(now, p.load())
	l.pins = l.eng.pins()
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer l.socks.close()
	wg.Go(func() { p.followKey(ctx) })
	wg.Go(func() { p.followTunnelAddress(ctx) })
	broken := make(chan error, 1)
	if p.cfg.Neighbours != nil {
		wg.Go(func() { broken <- p.cfg.Neighbours.Run(ctx, p.hearNeighbour) })
	}
	signal(p.publish)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			l.save()
			return ctx.Err()
		case err := <-broken:
			if ctx.Err() == nil {
				// What was heard stays; tunnels do not depend on it.
				l.log.Error("the kernel says nothing of neighbours any more", "error", err)
			}
		case <-p.wake:
			l.takeIn(time.Now())
		case ev := <-p.events:
			l.arrived(time.Now(), ev)
		case <-timer.C:
		}
		next, err := l.turn(ctx, time.Now())
		if err != nil {
			return err
		}
		timer.Reset(time.Until(next))
	}
}

func (p *Prober) hearNeighbour(e neighbour.Event) {
	p.mu.Lock()
	p.heard = append(p.heard, e)
	p.mu.Unlock()
	p.poke()
}

// takeIn takes what other goroutines left.
func (l *loop) takeIn(now time.Time) {
	p := l.p
	p.mu.Lock()
	targets, underlay, fresh, heard, asks := p.targets, p.underlay, p.fresh, p.heard, p.asks
	p.fresh, p.heard, p.asks = false, nil, nil
	p.mu.Unlock()
	if fresh && underlay != nil {
		for _, link := range underlay.Links {
			l.eng.setUplink(now, link.Name, link.MTU)
		}
		l.eng.setTargets(now, targets)
		moved, before := l.near.set(targets, *underlay)
		if moved {
			// Another way out may be another translator.
			l.eng.again(now)
		}
		heard = append(before, heard...)
		l.socks.want(targets)
		l.retryAt = time.Time{}
	}
	for _, e := range heard {
		for k, a := range l.near.heard(e) {
			l.eng.setNear(k, a)
		}
	}
	for _, f := range asks {
		f(l)
	}
}

// arrived takes in a message and those that wait behind it.
func (l *loop) arrived(now time.Time, ev event) {
	for range cap(l.p.events) {
		l.eng.arrived(now, ev.local, ev.from, ev.msg)
		select {
		case ev = <-l.p.events:
		default:
			return
		}
	}
}

// turn does what is due and returns when to turn again.
func (l *loop) turn(ctx context.Context, now time.Time) (time.Time, error) {
	next := now.Add(l.p.cfg.Interval)
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	sooner(l.near.ask(now, l.log))
	if l.retryAt.IsZero() || !now.Before(l.retryAt) {
		l.retryAt = time.Time{}
		if !l.socks.ensure(l.log) {
			l.retryAt = now.Add(kernelRetry)
		}
	}
	if key := l.p.key.Load(); key != nil {
		out, at := l.eng.tick(now)
		for _, o := range out {
			l.socks.send(o, *key)
		}
		sooner(at)
	}
	l.publicAddress()
	if len(l.eng.changed) > 0 && !now.Before(l.deliverAt) {
		if err := l.deliver(ctx, now); err != nil {
			return now, err
		}
	}
	if len(l.eng.changed) > 0 {
		sooner(l.deliverAt)
	}
	if !l.pinned && l.retryAt.IsZero() {
		if l.pinned = l.pin(); !l.pinned && (len(l.pins) == 0 || l.eng.port() != 0) {
			l.retryAt = now.Add(kernelRetry)
		}
	}
	if !l.saveAt.IsZero() && !now.Before(l.saveAt) {
		l.save()
	}
	sooner(l.saveAt)
	sooner(l.retryAt)
	return next, nil
}

// deliver tells what changed. The kernel is made ready for the new paths first.
func (l *loop) deliver(ctx context.Context, now time.Time) error {
	if pins := l.eng.pins(); !slices.Equal(pins, l.pins) {
		l.pins, l.pinned = pins, false
		l.pinned = l.pin()
	}
	for f := range l.eng.changed {
		m := l.eng.reach(f)
		if maps.Equal(m, l.told[f]) {
			continue
		}
		for node, r := range m {
			if was := l.told[f][node]; was != r {
				l.log.Info("path to a peer", "peer", node, "family", f.String(), "address", addrText(r.Addr), "port", r.Port, "mtu", r.MTU, "near", r.Near.String())
			}
		}
		l.told[f] = maps.Clone(m)
		if err := l.p.cfg.Deliver(ctx, f, m); err != nil {
			return fmt.Errorf("tell what was measured: %w", err)
		}
	}
	clear(l.eng.changed)
	l.deliverAt = now.Add(deliverPause)
	if l.saveAt.IsZero() {
		l.saveAt = now.Add(time.Duration(len(l.eng.peers)) * savePause)
	}
	return nil
}

// addrText shows an address for people: none is the peer's own.
func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return "registered"
	}
	return a.String()
}

// pin makes VXLAN send from its own port where that is needed. Before the first
// targets what an earlier life of the daemon did stays.
func (l *loop) pin() bool {
	if l.p.cfg.SourcePorts == nil {
		return true
	}
	port := l.eng.port()
	if port == 0 && len(l.pins) > 0 {
		return false
	}
	if err := l.p.cfg.SourcePorts.Set(port, l.pins); err != nil {
		l.log.Error("VXLAN's source port not fixed; will try again", "peers", len(l.pins), "error", err)
		return false
	}
	return true
}

// publicAddress wishes for what hosts outside see of this host, once some peer
// has said it.
func (l *loop) publicAddress() {
	if l.p.cfg.Addresses != nil {
		return
	}
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	var old []netip.Addr
	if p.haveAddr != nil {
		old, _ = store.ParseTunnelAddresses(*p.haveAddr)
	}
	var now []netip.Addr
	know := false
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		switch {
		case l.eng.told[f]:
			know = true
			if a, ok := l.eng.public[f]; ok {
				now = append(now, a)
			}
		default: // nobody said anything in this family: what was published stays
			for _, a := range old {
				if dataplane.FamilyOf(a) == f {
					now = append(now, a)
				}
			}
		}
	}
	if want := tunnelAddresses(now); know && (!p.knowAddr || want != p.wantAddr) {
		p.wantAddr, p.knowAddr = want, true
		signal(p.publish)
	}
}
