package probe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

// Core says what is to be measured and decides by what was found. Maps are by
// node and belong to the callee; calls come one after the other. Each names the peers
// of which something changed, in a family of the underlay, with a zero Reach or an
// empty list where nothing is known any more. Nobody changes a list of Probes.
type Core interface {
	Probes(ctx context.Context) <-chan []dataplane.ProbeTarget
	Reach(ctx context.Context, f dataplane.Family, peers map[string]dataplane.Reach) error
	Delivery(ctx context.Context, f dataplane.Family, peers map[string][]dataplane.Delivery) error
}

// SourcePorts makes VXLAN's data to some peers leave from a port, until Run's
// context ends. Setting what is set already must cost nothing.
type SourcePorts interface {
	Set(port uint16, peers []netip.AddrPort) error
	Run(ctx context.Context) error
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
	Store store.Store // for the keys that the hosts share, and this host's annotation; required
	Core  Core        // required
	Log   *slog.Logger

	File   string // keeps what was found over a restart; empty: nothing is kept
	Former string // what earlier versions kept of the underlay; it is read once

	Underlay UnderlayConfig
	Tunnel   TunnelConfig
}

// UnderlayConfig is what probes of the underlay need.
type UnderlayConfig struct {
	// Enabled is false where peers are sent to at their own addresses, unmeasured.
	Enabled bool
	// Interval is the time between probes of a peer when all is well.
	Interval time.Duration
	// Addresses are published as where hosts outside send to. Nil: what such
	// hosts see as our source; empty: none.
	Addresses []netip.Addr

	SourcePorts SourcePorts // nil: source ports are not fixed
	Neighbours  Neighbours  // nil: neighbours are not asked

	// Sources is called when the packets of a node come from other addresses than
	// before; nil: nobody is notified. It is not to wait.
	Sources func(node string, addrs []netip.Addr)
}

// Prober measures. [Prober.Run] does the work; the other methods may be called
// from any goroutine.
type Prober struct {
	cfg          Config
	kernel, boot string // this host's: what was found under another may not hold

	underlayKey, tunnelKey *secret
	asking                 *asking

	wake    async.Signal // the fields below changed
	publish async.Signal // the annotation may have to be written
	events  chan event
	counts  counts

	mu         sync.Mutex
	targets    []dataplane.ProbeTarget
	underlay   *dataplane.Underlay // nil: not known yet
	inside     map[int]bool        // its devices for tunnels, by index
	nodes      map[string]node
	synced     bool // all nodes are known
	fresh      bool // targets or the underlay have changed
	viewed     bool // the tunnels' prober knows all of this
	neighbours []neighbour.Event
	asks       []func(*loop)
	haveAddr   *string // this host's annotation; nil: it is not registered
	wantAddr   string
	knowAddr   bool
}

// node is what matters of a Node resource here.
type node struct {
	accepts bool         // it takes part in what nodes agree on, so it answers probes
	outer   netip.Addr   // IPv4, on the underlay; not valid: none
	addrs   []netip.Addr // inside tunnels; IPIP's is that on the underlay
}

// counts are of messages over the underlay that were of no use.
type counts struct {
	forged   atomic.Uint64 // a wrong authentication code
	garbage  atomic.Uint64 // no message of ours
	overflow atomic.Uint64 // more came than could be looked at
}

// New returns a Prober that does nothing until [Prober.Run].
func New(cfg Config) *Prober {
	p := &Prober{
		cfg: cfg, underlayKey: newSecret(underlaySecret), tunnelKey: newSecret(tunnelSecret), asking: newAsking(),
		wake: async.NewSignal(), publish: async.NewSignal(), events: make(chan event, 1024), nodes: map[string]node{},
	}
	var kerr, berr error
	p.kernel, kerr = KernelRelease()
	p.boot, berr = bootid.Read()
	if err := errors.Join(kerr, berr); err != nil {
		cfg.Log.Warn("what was measured is not kept for the next start", "error", err)
		p.cfg.File = ""
	}
	if cfg.Underlay.Addresses != nil {
		p.wantAddr, p.knowAddr = tunnelAddresses(cfg.Underlay.Addresses), true
	}
	return p
}

// change changes what the loop is to know.
func (p *Prober) change(f func()) {
	p.mu.Lock()
	f()
	p.viewed = false
	p.mu.Unlock()
	p.wake.Set()
}

// HandleUnderlay applies a snapshot of the network around the host.
func (p *Prober) HandleUnderlay(u dataplane.Underlay) {
	tunnels := map[int]bool{}
	for _, l := range u.Links {
		if isTunnel(l.Name) {
			tunnels[l.Index] = true
		}
	}
	p.change(func() { p.underlay, p.inside, p.fresh = &u, tunnels, true })
}

// isTunnel reports whether a device is for routerd's tunnels.
func isTunnel(name string) bool {
	return name == ipip.Device || name == ipip.DeviceV6 || name == vxlan.DeviceV6 || strings.HasPrefix(name, vxlan.Device)
}

// HandleStore applies a step of the cluster's copy: the nodes, and of this host's
// own what it publishes.
func (p *Prober) HandleStore(s cluster.Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := s.Synced && !p.synced
	p.synced = p.synced || s.Synced
	for _, ev := range s.Changes {
		if ev.Key.Kind != store.KindNode || ev.Err != nil {
			continue
		}
		var now node
		if n, ok := ev.Value.(*cluster.Node); ok {
			now = newNode(n)
		}
		if ev.Key.Name == p.cfg.Node {
			p.haveAddr = nil
			if n, ok := ev.Object.Value.(*store.Node); ok {
				p.haveAddr = new(n.Annotations[store.AnnotationTunnelAddress])
			}
			p.publish.Set()
		}
		old := p.nodes[ev.Key.Name]
		if now.accepts != old.accepts || now.outer != old.outer || !slices.Equal(now.addrs, old.addrs) {
			p.nodes[ev.Key.Name] = now
			own := ev.Key.Name == p.cfg.Node
			if !own {
				p.asking.replace(old.addrs, now.addrs)
			}
			// Where another node is says its target.
			changed = changed || own || now.accepts != old.accepts
		}
	}
	if changed {
		p.viewed = false
		p.wake.Set()
	}
}

func newNode(n *cluster.Node) node {
	out := node{accepts: n.Encaps.Published, outer: n.Addr.IPv4.Addr()}
	for _, a := range []netip.Addr{out.outer, n.VXLANAddr.IPv4, n.VXLANAddr.IPv6, n.IPIPAddr.IPv6, n.IPIPAddr.IPv4} {
		if a.IsValid() {
			out.addrs = append(out.addrs, a)
		}
	}
	return out
}

// mute reports whether a node is known to have no prober.
func (p *Prober) mute(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.nodes[name]
	return ok && !n.accepts
}

// Restore publishes what the previous run measured, and that from now on a peer
// is moved to a tunnel only after its probe. It is to be called once, before
// [Prober.Run], and before the core begins to act.
func (p *Prober) Restore(ctx context.Context) error {
	_, saved := p.load()
	if p.cfg.Underlay.Enabled && p.cfg.Underlay.Sources != nil {
		from := map[string][]netip.Addr{}
		for k, v := range saved {
			from[k.node] = append(from[k.node], v.sources...)
		}
		for node, addrs := range from {
			p.cfg.Underlay.Sources(node, addrs)
		}
	}
	byFamily := map[dataplane.Family]map[string]dataplane.Reach{}
	for k, v := range saved {
		if byFamily[k.fam] == nil {
			byFamily[k.fam] = map[string]dataplane.Reach{}
		}
		byFamily[k.fam][k.node] = v.Reach
	}
	for _, f := range dataplane.Families() {
		if m := byFamily[f]; m != nil && p.cfg.Underlay.Enabled {
			if err := p.cfg.Core.Reach(ctx, f, m); err != nil {
				return fmt.Errorf("publish what was measured before: %w", err)
			}
		}
		if p.cfg.Tunnel.Enabled {
			if err := p.cfg.Core.Delivery(ctx, f, nil); err != nil {
				return fmt.Errorf("publish that tunnels are measured: %w", err)
			}
		}
	}
	return nil
}

// loop is what only the goroutine of Run touches.
type loop struct {
	p          *Prober
	log        *slog.Logger
	eng        *engine
	neighbours *neighbours
	ends       ends
	tunnels    *tunnels // nil: not enabled
	measuring  sync.WaitGroup
	saved      map[string]record // what is kept of tunnels that are not measured

	delivered map[peerKey]dataplane.Reach // what the core knows that is not zero
	deliverAt time.Time
	unsaved   bool
	saveAt    time.Time // not before
	pins      []netip.AddrPort
	pinned    bool // pins are in the kernel
	retryAt   time.Time
}

const (
	// deliverPause is how long changes of the underlay are collected before they
	// are published.
	deliverPause = 50 * time.Millisecond
	// What was found is saved at most this often, for the file has all of it.
	saveEvery   = 100 * time.Millisecond
	savePerPeer = 400 * time.Microsecond
	// kernelRetry is the time between attempts at what the kernel refused.
	kernelRetry = time.Second
)

// Run measures until ctx ends. What was found stays as it is then.
func (p *Prober) Run(ctx context.Context) error {
	under := p.cfg.Underlay
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	background := func(f func()) { g.Go(func() error { f(); return nil }) }
	l := p.newLoop(time.Now())
	rekeyed := func() { p.change(func() {}) }
	if under.Enabled {
		background(func() { p.underlayKey.follow(ctx, p.cfg.Store, p.cfg.Log, rekeyed) })
	}
	if l.tunnels != nil {
		background(func() { p.tunnelKey.follow(ctx, p.cfg.Store, p.cfg.Log, rekeyed) })
	}
	background(func() { p.followTunnelAddress(ctx) })
	background(func() {
		for targets := range p.cfg.Core.Probes(ctx) {
			p.change(func() { p.targets, p.fresh = targets, true })
		}
	})
	if under.SourcePorts != nil {
		g.Go(func() error { return under.SourcePorts.Run(ctx) })
	}
	if under.Neighbours != nil {
		background(func() {
			if err := under.Neighbours.Run(ctx, p.noteNeighbour); err != nil && ctx.Err() == nil {
				// What was said stays; tunnels do not depend on it.
				p.cfg.Log.Error("the kernel says nothing of neighbours any more", "error", err)
			}
		})
	}
	p.publish.Set()
	err := l.run(ctx) // here, for sockets are of the network namespace of the caller's thread
	cancel()
	if other := g.Wait(); other != nil && errors.Is(err, context.Canceled) {
		return other
	}
	return err
}

func (p *Prober) newLoop(now time.Time) *loop {
	records, saved := p.load()
	under := p.cfg.Underlay
	l := &loop{
		p: p, log: p.cfg.Log, saved: records,
		eng: newEngine(p.cfg.Node, under.Interval, now), neighbours: newNeighbours(under.Neighbours, under.Interval),
		ends:      ends{secret: p.underlayKey, log: p.cfg.Log, events: p.events, counts: &p.counts, open: map[localEnd]*openEnd{}, done: make(chan struct{})},
		delivered: map[peerKey]dataplane.Reach{},
	}
	l.eng.mute = p.mute
	if under.Enabled {
		l.eng.seed(now, saved)
		l.pins = l.eng.pins()
	}
	if p.cfg.Tunnel.Enabled {
		l.tunnels = newTunnels(p.cfg.Tunnel, p.cfg.Log, p.asking, p.cfg.Core.Delivery)
		l.tunnels.saved = records
		l.tunnels.pinned = under.SourcePorts != nil && len(l.pins) > 0 // as the previous run left the kernel
	}
	return l
}

// noteNeighbour notes what the kernel says of a neighbour on the underlay. Those inside tunnels
// are what routerd itself has written, one for each node.
func (p *Prober) noteNeighbour(e neighbour.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inside[e.LinkIndex] {
		return
	}
	p.neighbours = append(p.neighbours, e)
	p.wake.Set()
}

func (l *loop) run(ctx context.Context) error {
	defer l.ends.close()
	var ended chan *attempt
	if l.tunnels != nil {
		ended = l.tunnels.done
		defer l.tunnels.ways.keep(nil)
		defer l.tunnels.answers.stop()
	}
	// Those that still measure end with ctx; ended has room for all.
	defer l.measuring.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			l.save()
			return ctx.Err()
		case <-l.p.wake:
			err = l.read(ctx, time.Now())
		case ev := <-l.p.events:
			l.arrived(time.Now(), ev)
		case a := <-ended:
			err = l.tunnels.ended(ctx, a)
		case <-timer.C:
		}
		var next time.Time
		if err == nil {
			next, err = l.turn(ctx, time.Now())
		}
		if err != nil {
			return err
		}
		timer.Reset(time.Until(next))
	}
}

// read reads what other goroutines left.
func (l *loop) read(ctx context.Context, now time.Time) error {
	p := l.p
	p.mu.Lock()
	underlay, fresh, events, asks := p.underlay, p.fresh, p.neighbours, p.asks
	p.fresh, p.neighbours, p.asks = false, nil, nil
	targets := p.targets // replaced as a whole
	var view *tunnelView
	if !p.viewed && p.synced && l.tunnels != nil {
		p.viewed = true
		view = p.view(l.tunnels.cfg.Driver)
	}
	p.mu.Unlock()
	if fresh && underlay != nil {
		if !l.p.cfg.Underlay.Enabled {
			targets = nil
		}
		for _, link := range underlay.Links {
			l.eng.setUplink(now, link.Name, link.MTU)
		}
		l.eng.setTargets(now, targets)
		moved, earlier := l.neighbours.set(targets, *underlay)
		if moved {
			// Another way out may be another translator.
			l.eng.again(now)
		}
		events = append(earlier, events...)
		l.ends.want(targets)
		l.retryAt = time.Time{}
	}
	for _, e := range events {
		for k, a := range l.neighbours.note(e) {
			l.eng.setNear(k, a)
		}
	}
	for _, f := range asks {
		f(l)
	}
	if view != nil {
		return l.tunnels.view(ctx, *view)
	}
	return nil
}

// view is what the tunnels' prober is to know. The caller has the lock.
func (p *Prober) view(driver func(string) string) *tunnelView {
	endpoints, outside := p.endpoints()
	v := &tunnelView{key: p.tunnelKey.get(), endpoints: endpoints, outside: outside, tunnels: make([]Target, 0, len(p.targets)/2)}
	cards := map[string]string{}
	var path *dataplane.ProbePath // of the one before: nearly all have the same
	card := ""
	for i := range p.targets {
		t := &p.targets[i]
		if t.Tunnel == (dataplane.ProbeTunnel{}) {
			continue
		}
		if t.ProbePath != path {
			path = t.ProbePath
			if _, ok := cards[t.Uplink]; !ok {
				cards[t.Uplink] = strings.TrimSpace(t.Uplink + " " + driver(t.Uplink))
			}
			card = cards[t.Uplink]
		}
		v.tunnels = append(v.tunnels, Target{t, p.nodes[t.Node].accepts, card})
	}
	return v
}

// endpoints lists where this host answers: on its tunnel devices, and at their
// addresses to plain packets that came by a device of outside, by index. The caller has
// the lock.
func (p *Prober) endpoints() (out []endpoint, outside map[int]bool) {
	if p.underlay == nil {
		return nil, nil
	}
	own := p.nodes[p.cfg.Node].outer
	addrs := map[string][]netip.Addr{}
	for _, a := range p.underlay.Addresses {
		if !a.Prefix.Addr().IsLinkLocalUnicast() {
			addrs[a.Link] = append(addrs[a.Link], a.Prefix.Addr())
		}
	}
	outside = map[int]bool{}
	for _, l := range p.underlay.Links {
		switch {
		case l.Name == ipip.Device:
			if len(addrs[l.Name]) > 0 && own.IsValid() {
				out = append(out, endpoint{l.Name, l.Index, own})
			}
		case isTunnel(l.Name):
			for _, a := range addrs[l.Name] {
				out = append(out, endpoint{l.Name, l.Index, a})
			}
		default:
			if !l.Loopback && !strings.HasPrefix(l.Name, "cali") {
				outside[l.Index] = true
			}
			continue
		}
		for _, a := range addrs[l.Name] {
			out = append(out, endpoint{addr: a})
		}
	}
	return out, outside
}

// arrived handles a message and those that wait behind it.
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
	next := now.Add(cmp.Or(l.p.cfg.Underlay.Interval, time.Hour))
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	sooner(l.neighbours.ask(now, l.log))
	if l.retryAt.IsZero() || !now.Before(l.retryAt) {
		l.retryAt = time.Time{}
		if !l.ends.ensure() {
			l.retryAt = now.Add(kernelRetry)
		}
	}
	if key := l.p.underlayKey.get(); key != nil {
		out, at := l.eng.tick(now)
		for _, o := range out {
			l.ends.send(o, key)
		}
		sooner(at)
	}
	l.publicAddress()
	l.sources()
	if len(l.eng.changed) > 0 && !now.Before(l.deliverAt) {
		if err := l.deliver(ctx, now); err != nil {
			return now, err
		}
	}
	if len(l.eng.changed) > 0 {
		sooner(l.deliverAt)
	}
	if !l.pinned && l.retryAt.IsZero() {
		if l.pinned = l.pin(ctx); !l.pinned && (len(l.pins) == 0 || l.eng.port() != 0) {
			l.retryAt = now.Add(kernelRetry)
		}
	}
	if l.tunnels != nil {
		sooner(l.tunnels.start(ctx, &l.measuring, now))
		l.unsaved = l.unsaved || l.tunnels.changed()
	}
	if l.unsaved && !now.Before(l.saveAt) {
		l.unsaved, l.saveAt = false, now.Add(max(saveEvery, time.Duration(len(l.eng.peers))*savePerPeer))
		l.save()
	}
	if l.unsaved {
		sooner(l.saveAt)
	}
	sooner(l.retryAt)
	return next, nil
}

// deliver publishes what changed of the underlay. The kernel is made ready for
// the new paths first.
func (l *loop) deliver(ctx context.Context, at time.Time) error {
	if pins := l.eng.pins(); !slices.Equal(pins, l.pins) {
		l.log.Info("packets from any port do not get to some peers: VXLAN sends to these from its own", "peers", pins, "before", l.pins)
		l.pins, l.unsaved = pins, true
		l.pinned = l.pin(ctx)
	}
	now := map[dataplane.Family]map[string]dataplane.Reach{}
	for k := range l.eng.changed {
		r := l.eng.reachOf(k)
		if r == l.delivered[k] {
			continue
		}
		l.log.Info("path to a peer", "peer", k.node, "family", k.fam.String(), "address", addrText(r.Addr), "port", r.Port, "mtu", r.MTU, "near", r.Near.String())
		if l.delivered[k] = r; r == (dataplane.Reach{}) {
			delete(l.delivered, k)
		}
		if now[k.fam] == nil {
			now[k.fam] = map[string]dataplane.Reach{}
		}
		now[k.fam][k.node] = r
	}
	l.eng.changed = map[peerKey]bool{} // it may have been large, and a map never shrinks
	for f, peers := range now {
		l.unsaved = true
		if err := l.p.cfg.Core.Reach(ctx, f, peers); err != nil {
			return fmt.Errorf("publish what was measured: %w", err)
		}
	}
	l.deliverAt = at.Add(deliverPause)
	return nil
}

// sources has published from where peers' packets come.
func (l *loop) sources() {
	if len(l.eng.moved) == 0 {
		return
	}
	l.unsaved = true
	if report := l.p.cfg.Underlay.Sources; report != nil {
		for node := range l.eng.moved {
			report(node, l.eng.sources(node))
		}
	}
	l.eng.moved = map[string]bool{}
}

// addrText shows an address for people: none is the peer's own.
func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return "registered"
	}
	return a.String()
}

// pin makes VXLAN send from its own port where that is needed. Before the first
// targets what the previous run set stays.
func (l *loop) pin(ctx context.Context) bool {
	ports := l.p.cfg.Underlay.SourcePorts
	if ports == nil {
		return true
	}
	port := l.eng.port()
	if port == 0 && len(l.pins) > 0 {
		return false
	}
	if l.tunnels != nil && len(l.pins) > 0 {
		if err := l.tunnels.pin(ctx, true); err != nil {
			// What is rewritten gets there in part, what is not does not at all.
			l.log.Error("checksums are left to the hardware where VXLAN's source port is rewritten: such packets may be lost", "error", err)
		}
	}
	if err := ports.Set(port, l.pins); err != nil {
		l.log.Error("VXLAN's source port not fixed; will try again", "peers", len(l.pins), "error", err)
		return false
	}
	if l.tunnels != nil && len(l.pins) == 0 {
		_ = l.tunnels.pin(ctx, false) // it waits for nothing
	}
	return true
}

// publicAddress has published what hosts outside see of this host, once some peer
// has said it.
func (l *loop) publicAddress() {
	p := l.p
	if p.cfg.Underlay.Addresses != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var old []netip.Addr
	if p.haveAddr != nil {
		old, _ = store.ParseTunnelAddresses(*p.haveAddr)
	}
	var now []netip.Addr
	known := false
	for _, f := range dataplane.Families() {
		switch {
		case l.eng.observed[f]:
			known = true
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
	if want := tunnelAddresses(now); known && (!p.knowAddr || want != p.wantAddr) {
		p.wantAddr, p.knowAddr = want, true
		p.publish.Set()
	}
}
