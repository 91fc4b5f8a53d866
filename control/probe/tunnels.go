package probe

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// When a path is measured again.
const (
	atOnce      = 8                      // measurements at the same time
	interval    = time.Hour              // when all is well; with jitter, between 3/4 and 5/4 of it
	soon        = 200 * time.Millisecond // with nothing known, after a failure that passes by itself
	firstRetry  = time.Second            // after a result that is not Yes
	slowestSick = time.Minute            // after many that are No
	slowestMute = 5 * time.Minute        // after many without an answer
	noProber    = time.Hour              // after one, where the peer's Node says of no prober
	applyWithin = 5 * time.Second        // for the kernel to take a setting
	pinWithin   = time.Second            // the same where other probes wait meanwhile
	spread      = 2 * time.Minute        // over which what is known from before a restart is checked
	doubts      = 3                      // bad measurements in a row that make a No of a Yes
)

// TunnelConfig is what probes through tunnels need.
type TunnelConfig struct {
	Enabled bool
	Sink    dataplane.Sink // applies the devices' offloads; required
	Port    uint16         // 0: [DefaultPort]
	// Rules has the probes' packets, and no others, look for their routes in a table
	// of their own; required.
	Rules Rules
	// Measure does the measuring; nil: [Sockets].
	Measure Measurer
	// Driver names the driver of an uplink; nil: [DriverOf].
	Driver func(link string) string
}

// Rules leads packets that are bound to a device into the table of probes. See
// [rule.Rules].
type Rules interface {
	Add(f dataplane.Family, link string) error
	Remove(f dataplane.Family, link string) error
}

// tunnels measures what tunnels deliver and sets the offloads of their devices.
// The goroutine of [Prober.Run] uses it, and those that measure do.
type tunnels struct {
	cfg     TunnelConfig
	log     *slog.Logger
	publish func(context.Context, dataplane.Family, map[string][]dataplane.Delivery) error // of the peers that changed

	done     chan *attempt // measurements that ended
	room     int           // how many more may run
	secret   []byte
	asking   *asking
	answers  answers
	ways     *ways
	saved    map[string]record // of the file, by carrier
	reported map[tunnelPeer][]dataplane.Delivery

	mu       sync.Mutex // guards what follows
	round    uint64     // of views
	tracks   map[tunnelPeer][]*track
	known    int                 // in tracks
	touched  map[tunnelPeer]bool // of whom something else may be known than was reported
	queue    schedule[*track]    // those that are neither being measured nor to be skipped, and are accepted
	quiet    schedule[*track]    // likewise of peers that publish nothing of them, of which one is measured at a time
	quietly  bool                // one of these is being measured
	applied  map[string]Setting  // of each device, as last asked of the sink
	pinned   bool                // VXLAN's source port is rewritten towards some peers
	revision dataplane.Revision  // of the sink, that has what was applied
	dirty    bool                // what is known has changed since it was saved
}

// tunnelPeer is a node over one family of the underlay.
type tunnelPeer struct {
	family dataplane.Family
	node   string
}

func (t *track) peer() tunnelPeer { return tunnelPeer{t.Family, t.Node} }

// track is what is known of one tunnel, and when it is measured next.
type track struct {
	wake
	in *schedule[*track] // nil: it is not scheduled
	Target
	settled bool // measured at least once, or known from before a restart
	result  dataplane.Answer
	need    Setting // that this path needs of the device
	running bool
	again   bool // it changed while it was being measured

	mtu         int // bytes that get through, where less than the device's; 0: the device's
	reason      string
	goodput     float64 // of the last transfer, bytes a second
	answered    int64   // Unix seconds of the last answer; 0: none
	settledPath string  // that delivers; empty: the result is not Yes

	round    uint64 // of the last view that had it
	failures int    // results in a row that were not Yes
}

// attempt is one measurement and what came of it.
type attempt struct {
	target  Target
	before  Finding
	finding Finding
	verdict verdict
	err     error   // of this host: nothing could be measured
	need    Setting // proven to help
}

func newTunnels(cfg TunnelConfig, log *slog.Logger, asking *asking, publish func(context.Context, dataplane.Family, map[string][]dataplane.Delivery) error) *tunnels {
	cfg.Port = cmp.Or(cfg.Port, DefaultPort)
	if cfg.Measure == nil {
		cfg.Measure = Sockets{Port: cfg.Port}
	}
	if cfg.Driver == nil {
		cfg.Driver = DriverOf
	}
	t := &tunnels{
		cfg: cfg, log: log, asking: asking, publish: publish, done: make(chan *attempt, atOnce), room: atOnce,
		reported: map[tunnelPeer][]dataplane.Delivery{}, touched: map[tunnelPeer]bool{},
		tracks: map[tunnelPeer][]*track{}, applied: map[string]Setting{},
		ways: newWays(cfg.Sink, cfg.Rules, log),
	}
	t.answers = answers{port: cfg.Port, log: log, allow: asking, running: map[endpoint]context.CancelFunc{}}
	return t
}

// view replaces what is known of the cluster and this host.
func (p *tunnels) view(ctx context.Context, v tunnelView) error {
	p.secret = v.key
	p.asking.setKey(v.key)
	p.answers.set(ctx, v.endpoints, v.outside)
	if !p.set(v, time.Now()) {
		return nil
	}
	return p.report(ctx)
}

// set makes the tunnels those of the view and reports whether there is something
// to publish.
func (p *tunnels) set(v tunnelView, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(v.key) == 0 {
		return false
	}
	changed, same, n := false, 0, 0
	p.round++
	for _, t := range v.tunnels {
		old := p.find(t.key())
		ok := old != nil
		if ok && old.round != p.round {
			old.round = p.round
			n++
		}
		switch {
		case ok && old.same(t): // most, whatever has changed
			old.Target = t // and no older list of them is kept
			same++
		case !ok || old.Tunnel.Skip != t.Tunnel.Skip:
			tr, next := p.newTrack(t, now)
			if ok {
				tr.running, tr.again = old.running, old.running
				p.forget(old)
				n--
			}
			p.keep(tr)
			n++
			p.due(tr, next)
			changed = true
		case old.path() != t.path():
			// What was found holds until more is known: the tunnel may be in use.
			if old.carrier() != t.carrier() {
				old.need = 0
			}
			old.Target = t
			p.anew(old, now)
		default:
			accepts := t.Accepts && !old.Accepts
			old.Target = t
			if accepts {
				p.anew(old, now)
			} else {
				p.due(old, old.at) // among those of its kind
			}
		}
	}
	if n < p.known {
		for tr := range p.all() {
			if tr.round != p.round {
				p.forget(tr)
				changed = true
			}
		}
	}
	if changed || same < len(v.tunnels) {
		p.apply()
		p.ways.keep(v.tunnels)
	}
	return changed
}

// find returns what is known of a tunnel; nil: it is no target. The caller has the lock.
func (p *tunnels) find(k tunnelKey) *track {
	for _, tr := range p.tracks[tunnelPeer{k.fam, k.node}] {
		if tr.key() == k {
			return tr
		}
	}
	return nil
}

// all yields what is known of each tunnel. The caller has the lock, and may forget
// one that was yielded.
func (p *tunnels) all() iter.Seq[*track] {
	return func(yield func(*track) bool) {
		for _, of := range p.tracks {
			for _, tr := range slices.Backward(of) {
				if !yield(tr) {
					return
				}
			}
		}
	}
}

// keep makes tr what is known of a tunnel. The caller has the lock.
func (p *tunnels) keep(tr *track) {
	tr.round = p.round
	of := tr.peer()
	p.tracks[of] = append(p.tracks[of], tr)
	p.known++
	p.touched[of] = true
}

// forget drops a tunnel. The caller has the lock.
func (p *tunnels) forget(tr *track) {
	tr.unschedule()
	of := tr.peer()
	left := slices.DeleteFunc(p.tracks[of], func(o *track) bool { return o == tr })
	p.known--
	if p.tracks[of] = left; len(left) == 0 {
		delete(p.tracks, of)
	}
	if c := tr.carrier(); tr.plain() {
		delete(p.saved, c) // of the next change it says nothing
	} else if r, ok := p.saved[c]; ok && !r.Left {
		r.Left = true
		p.saved[c], p.dirty = r, true
	}
	p.touched[of] = true
}

// due schedules a tunnel, if it is not being measured and can be.
func (p *tunnels) due(t *track, at time.Time) {
	if t.at = at; t.running || t.Tunnel.Skip != "" {
		return
	}
	in := &p.queue
	if !t.Accepts {
		in = &p.quiet
	}
	if t.in != in {
		t.unschedule()
		t.in = in
	}
	in.set(t, at)
}

func (t *track) unschedule() {
	if t.in != nil {
		t.in.drop(t)
		t.in = nil
	}
}

// anew has a tunnel measured now; a measurement under way is of no use any more.
func (p *tunnels) anew(t *track, now time.Time) {
	t.failures, t.again = 0, t.running
	p.due(t, now)
}

// newTrack begins with what was known before a restart: the offloads that the
// path needs and, if nothing about it has changed, the result. That of a tunnel which
// was given up meanwhile is no reason to move to it.
func (p *tunnels) newTrack(t Target, now time.Time) (tr *track, next time.Time) {
	tr = &track{Target: t}
	if t.Tunnel.Skip != "" {
		tr.settled, tr.reason = true, t.Tunnel.Skip
		return tr, now
	}
	r, ok := p.saved[t.carrier()]
	if !ok {
		return tr, now
	}
	tr.need = r.Need
	if r.Path != t.path() || r.Result != dataplane.Yes || r.Left && !t.Tunnel.InUse || t.plain() && now.Sub(time.Unix(r.At, 0)) > plainHolds {
		return tr, now
	}
	tr.settled, tr.result, tr.mtu, tr.reason, tr.goodput, tr.answered = true, r.Result, r.MTU, r.Reason, r.Goodput, r.At
	tr.settledPath = t.path()
	return tr, now.Add(rand.N(spread))
}

// start begins the measurements that are due, as far as there is room, and
// returns when to call it again; the zero time: when one ends. Of a peer that says
// nothing of the encapsulation silence is awaited, a second of it, and there may be
// thousands: these are measured one after the other, in what room the rest leaves.
func (p *tunnels) start(ctx context.Context, wg *sync.WaitGroup, now time.Time) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.room > 0 {
		t := p.next(now)
		if t == nil {
			break
		}
		if t.at.After(now) {
			return t.at
		}
		t.unschedule()
		t.running = true
		p.room--
		p.quietly = p.quietly || !t.Accepts
		target, secret := t.Target, p.secret // the key may change while it measures
		wg.Go(func() { p.done <- p.measure(ctx, target, secret) })
	}
	return time.Time{}
}

// next returns what is to be measured next, if it is not due yet; nil: nothing is
// before a measurement ends. The caller has the lock.
func (p *tunnels) next(now time.Time) *track {
	t, ok := p.queue.first()
	if ok && !t.at.After(now) || p.quietly {
		return t
	}
	if q, there := p.quiet.first(); there && (!ok || q.at.Before(t.at)) {
		return q
	}
	return t
}

// ended handles a measurement that ended.
func (p *tunnels) ended(ctx context.Context, a *attempt) error {
	p.free(a.target)
	p.settle(a, time.Now())
	return p.report(ctx)
}

// free makes room for the next measurement.
func (p *tunnels) free(of Target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.room++
	p.quietly = p.quietly && of.Accepts
}

// sorted returns all tunnels by node, family and encapsulation. The caller has
// the lock.
func (p *tunnels) sorted() []*track {
	return slices.SortedFunc(p.all(), compareTunnels)
}

func compareTunnels(a, b *track) int {
	return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Family, b.Family),
		dataplane.CompareEncaps(a.Encap, b.Encap), cmp.Compare(a.Tunnel.Inner, b.Tunnel.Inner))
}

// changed reports whether there is something to save.
func (p *tunnels) changed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dirty
}

// records returns what is to outlive the daemon. What was known of peers that are not targets at present
// stays: they may be back.
func (p *tunnels) records() map[string]record {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dirty = false
	for t := range p.all() {
		switch r := t.record(); {
		case !t.settled:
		case r.useful():
			p.saved[t.carrier()] = r
		default:
			delete(p.saved, t.carrier())
		}
	}
	trim(p.saved)
	return p.saved
}

func (t *track) record() record {
	return record{Path: t.settledPath, Result: t.result, Need: t.need, MTU: t.mtu, Reason: t.reason, Goodput: t.goodput, At: t.answered}
}

// measure measures a target, tries a cure if one is called for, and measures
// again.
func (p *tunnels) measure(ctx context.Context, t Target, secret []byte) *attempt {
	a := &attempt{target: t}
	had := p.setting(t.Tunnel.Link)
	leave, err := p.ways.enter(ctx, t)
	defer leave()
	if err != nil {
		a.err = fmt.Errorf("make a route for the probe: %w", err)
		a.verdict = judge(t, a.before, a.err)
		return a
	}
	a.before, a.err = p.cfg.Measure.Measure(ctx, t, secret)
	a.finding, a.verdict = a.before, judge(t, a.before, a.err)
	for range len(Offloads()) { // one cure may bring the next fault to light
		missing := a.verdict.need &^ had.effective()
		if missing == 0 {
			return a
		}
		if err := p.lower(ctx, t, missing); err != nil {
			p.takeBack(t, missing)
			a.verdict.reason = fmt.Sprintf("%s; %s could not be set: %v", a.verdict.reason, missing, err)
			return a
		}
		had = p.setting(t.Tunnel.Link)
		after, err := p.cfg.Measure.Measure(ctx, t, secret)
		good := helped(missing, a.finding, after)
		p.takeBack(t, missing&^good)
		if err != nil || good == 0 {
			a.verdict.reason += fmt.Sprintf("; %s does not help", missing)
			a.ease()
			return a
		}
		a.need |= good
		a.finding, a.verdict = after, judge(t, after, nil)
	}
	return a
}

// ease takes back a No that no setting changes, where single packets of every
// size get through and TCP copes: the path loses some of what comes in bursts.
func (a *attempt) ease() {
	if a.finding.Checksum == dataplane.Yes && a.finding.Transfer.Done {
		a.verdict.result = dataplane.Yes
	}
}

func (p *tunnels) setting(link string) Setting {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.applied[link]
}

// lower has the device do what one more peer needs, on trial, and waits for it.
func (p *tunnels) lower(ctx context.Context, t Target, s Setting) error {
	p.mu.Lock()
	if tr := p.find(t.key()); tr != nil {
		tr.need |= s
	}
	p.apply()
	rev := p.revision
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, applyWithin)
	defer cancel()
	return p.cfg.Sink.Wait(ctx, rev)
}

// pin has VXLAN's devices send no packets whose checksum is left to the hardware, or lets
// them again. Such a packet has an outer checksum that was made for it already (the
// kernel's local checksum offload) and that a rule which rewrites the source port leaves
// as it was (nft_payload_set_eval): receivers drop it. So the caller waits for this before
// it writes such rules, and calls with false when they are gone.
func (p *tunnels) pin(ctx context.Context, on bool) error {
	p.mu.Lock()
	p.pinned = on
	p.apply()
	rev := p.revision
	p.mu.Unlock()
	if !on || rev == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pinWithin)
	defer cancel()
	return p.cfg.Sink.Wait(ctx, rev)
}

// takeBack ends the trial of what did not help.
func (p *tunnels) takeBack(t Target, s Setting) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if tr := p.find(t.key()); tr != nil {
		tr.need &^= s
	}
	p.apply()
}

// apply asks of the sink what each device needs for all its peers, where that
// changed. The caller has the lock.
func (p *tunnels) apply() {
	need := map[string]Setting{}
	var path *dataplane.ProbePath // of the one before: nearly all have the same
	var sum Setting
	for t := range p.all() {
		if t.ProbePath != path {
			if path != nil {
				need[path.Tunnel.Link] |= sum
			}
			if path, sum = t.ProbePath, 0; t.plain() { // the uplink is left alone
				path = nil
			} else if p.pinned && t.Encap.Driver == dataplane.DriverVXLAN {
				sum = NoChecksum
			}
		}
		if path != nil {
			sum |= t.need
		}
	}
	if path != nil {
		need[path.Tunnel.Link] |= sum
	}
	var put []dataplane.Object
	var del []dataplane.Key
	for link, s := range need {
		old, ok := p.applied[link]
		if ok && old == s {
			continue
		}
		if old&^s != 0 {
			p.remeasure(link)
		}
		p.applied[link] = s
		put = append(put, s.features(link)...)
	}
	for link := range p.applied {
		if _, ok := need[link]; !ok {
			delete(p.applied, link)
			for _, o := range Setting(0).features(link) {
				del = append(del, o.Key())
			}
		}
	}
	if len(put)+len(del) > 0 {
		p.revision = p.cfg.Sink.Update(dataplane.SourceProbe, put, del)
	}
}

// remeasure has all peers of a device measured now: an offload is on again that
// was off while they were measured.
func (p *tunnels) remeasure(link string) {
	now := time.Now()
	for t := range p.all() {
		if t.Tunnel.Link == link && t.at.After(now) {
			p.due(t, now)
		}
	}
}

// settle draws the conclusion of a measurement.
func (p *tunnels) settle(a *attempt, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.find(a.target.key())
	if t == nil {
		return // not a target any more
	}
	t.running = false
	if t.again {
		t.again = false
		p.due(t, t.at)
		return // of a path that is not the present one
	}
	v := a.verdict
	if v.result == dataplane.Yes {
		t.failures = 0
	} else {
		t.failures++
	}
	if v.result != dataplane.Yes && t.result == dataplane.Yes && t.settledPath == t.path() &&
		(!a.finding.Answered || t.failures < doubts) {
		// A peer that was well and is silent is down, or restarts; and one bad
		// measurement may be the network's bad moment.
		v.result, v.mtu, v.reason = dataplane.Yes, t.mtu, "it delivered before; now: "+v.reason
	}
	if !t.settled && t.failures < doubts && (a.err != nil || t.Accepts && a.finding.Refused) {
		// A device gets its address, or a peer's daemon starts: the answer that
		// counts comes in a moment, and somebody may be waiting for it.
		p.due(t, now.Add(soon<<t.failures))
		return
	}
	if t.result != v.result || !t.settled || t.reason != v.reason || a.need != 0 {
		p.logFinding(t, a, v)
	}
	t.settled, t.settledPath = true, ""
	if v.result == dataplane.Yes {
		t.settledPath = t.path()
	}
	t.result, t.mtu, t.reason = v.result, v.mtu, v.reason
	if a.finding.Answered {
		t.answered, t.goodput = now.Unix(), a.finding.Transfer.Goodput()
	}
	p.due(t, now.Add(t.pause(a.err)))
	p.touched[t.peer()] = true
	if r, kept := p.saved[t.carrier()]; kept != t.record().useful() || kept && r != t.record() {
		p.dirty = true
	}
}

// pause returns how long to wait before the next measurement, after one with an
// error of this host's or none.
func (t *track) pause(err error) time.Duration {
	if t.failures == 0 {
		return interval*3/4 + rand.N(interval/2)
	}
	d := firstRetry << min(t.failures-1, 10)
	switch {
	case t.result != dataplane.Unknown:
		d = min(d, slowestSick)
	case t.Accepts || err != nil:
		d = min(d, slowestMute)
	default:
		d = noProber // what it publishes when it gets one has it measured at once
	}
	return d*3/4 + rand.N(d/2)
}

// logFinding logs what was found. The caller has the lock.
func (p *tunnels) logFinding(t *track, a *attempt, v verdict) {
	attrs := []any{
		"node", t.Node, "form", t.Encap.String(), "inner", t.Tunnel.Inner.String(), "link", t.Tunnel.Link,
		"in_use", a.target.Tunnel.InUse, "result", v.result.String(), "rtt", a.finding.RTT,
	}
	if v.reason != "" {
		attrs = append(attrs, "reason", v.reason)
	}
	if v.mtu != 0 {
		attrs = append(attrs, "mtu", v.mtu)
	}
	if g := a.finding.Transfer.Goodput(); g > 0 {
		attrs = append(attrs, "goodput", rate(g))
	}
	switch {
	case a.need != 0:
		p.log.Warn("offloads of a tunnel spoil packets: switched off what does",
			append(attrs, "fault", judge(t.Target, a.before, nil).reason, "setting", a.need.String(), "cure", a.need.Cure(t.Tunnel.Link),
				"uplink", t.Card, "goodput_before", rate(a.before.Transfer.Goodput()))...)
	case v.result == dataplane.No && t.plain():
		p.log.Warn("plain packets do not get to a peer", attrs...)
	case v.result == dataplane.No:
		p.log.Warn("a tunnel does not deliver", attrs...)
	default:
		p.log.Info("a tunnel was probed", attrs...)
	}
}

// rate writes bytes a second as people read networks.
func rate(bytes float64) string { return fmt.Sprintf("%.1f Mbit/s", bytes*8/1e6) }

// retry measures the tunnels to a node, or all if it is empty, as if nothing were
// known of them.
func (p *tunnels) retry(node string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for t := range p.all() {
		if node == "" || t.Node == node {
			t.need = 0
			p.anew(t, now)
		}
	}
	p.apply()
}

// report publishes what is known of the peers of which that changed, by family of
// the underlay. The cost follows their number: a cluster may have thousands.
func (p *tunnels) report(ctx context.Context) error {
	for f, peers := range p.unreported() {
		if err := p.publish(ctx, f, peers); err != nil {
			return fmt.Errorf("publish what tunnels deliver: %w", err)
		}
	}
	return nil
}

// unreported returns what differs from what was reported; an empty list says that nothing
// is known of a peer any more.
func (p *tunnels) unreported() map[dataplane.Family]map[string][]dataplane.Delivery {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out map[dataplane.Family]map[string][]dataplane.Delivery
	for of := range p.touched {
		now := deliveries(p.tracks[of])
		if slices.Equal(p.reported[of], now) {
			continue
		}
		if p.reported[of] = now; len(now) == 0 {
			delete(p.reported, of)
		}
		if out == nil {
			out = map[dataplane.Family]map[string][]dataplane.Delivery{}
		}
		if out[of.family] == nil {
			out[of.family] = map[string][]dataplane.Delivery{}
		}
		out[of.family][of.node] = now
	}
	p.touched = map[tunnelPeer]bool{} // it may have been large, and a map never shrinks
	return out
}

// deliveries joins what is known of the tunnels to one peer, both families inside
// one encapsulation: it delivers if nothing in it is known to be lost.
func deliveries(tunnels []*track) []dataplane.Delivery {
	list := make([]*track, 0, len(tunnels))
	for _, t := range tunnels {
		if t.settled {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, compareTunnels)
	var joined []dataplane.Delivery
	for _, t := range list {
		d := dataplane.Delivery{Encap: t.Encap, Result: t.result, MTU: t.mtu, Reason: t.reason}
		if n := len(joined); n > 0 && joined[n-1].Encap == d.Encap {
			joined[n-1] = join(joined[n-1], d)
			continue
		}
		joined = append(joined, d)
	}
	return joined
}

func join(a, b dataplane.Delivery) dataplane.Delivery {
	if a.Result == dataplane.No || a.Result == dataplane.Yes && b.Result == dataplane.Unknown {
		return a
	}
	if b.Result == dataplane.Yes && a.Result == dataplane.Yes && a.MTU != 0 && (b.MTU == 0 || a.MTU < b.MTU) {
		return a
	}
	return b
}
