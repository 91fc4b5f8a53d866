package probe

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
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
	slowestMute = 5 * time.Minute        // after many from a peer that cannot answer
	applyWithin = 5 * time.Second        // for the kernel to take a setting
	spread      = 2 * time.Minute        // over which what is known from before a restart is checked
	doubts      = 3                      // bad measurements in a row that make a No of a Yes
)

// Config is what a [Prober] needs.
type Config struct {
	Sink   dataplane.Sink // takes the devices' offloads; required
	Log    *slog.Logger   // required
	File   string         // where findings outlive a restart; empty: nowhere
	Kernel string         // the kernel's release: findings of another are void
	Port   uint16         // 0: [DefaultPort]

	// Report is told what was found, whenever that changed: all peers of a
	// family of the underlay, by node. Calls come one after the other. The map
	// belongs to the callee. Required.
	Report func(context.Context, dataplane.Family, map[string][]dataplane.Delivery) error

	// Measure does the measuring; nil: [Sockets].
	Measure Measurer
}

// Prober measures the targets that it is given. Its methods are safe for
// concurrent use.
type Prober struct {
	cfg    Config
	world  chan World    // of capacity one: the newest
	retry  chan string   // nodes to measure anew
	done   chan *attempt // measurements that ended
	asking atomic.Pointer[asking]

	reported map[dataplane.Family]map[string][]dataplane.Delivery // of Run alone

	mu       sync.Mutex // guards what follows
	tracks   map[key]*track
	applied  map[string]Setting           // of each device, as last asked of the sink
	hops     map[dataplane.NextHopID]bool // of measurements under way
	revision dataplane.Revision           // of the sink, that has what was applied
	dirty    bool                         // the file is older than what is known
	saved    time.Time                    // when it was written
}

// track is what is known of one target, and when it is measured next.
type track struct {
	Status
	settledPath string // that the status is about
	next        time.Time
	running     bool
	again       bool // it changed while it was being measured
	failures    int  // results in a row that were not Yes
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

// New returns a prober that does nothing until [Prober.Run].
func New(cfg Config) *Prober {
	if cfg.Port == 0 {
		cfg.Port = DefaultPort
	}
	if cfg.Measure == nil {
		cfg.Measure = Sockets{Port: cfg.Port}
	}
	return &Prober{
		cfg: cfg, world: make(chan World, 1), retry: make(chan string, 16), done: make(chan *attempt, atOnce),
		reported: map[dataplane.Family]map[string][]dataplane.Delivery{},
		tracks:   map[key]*track{}, applied: map[string]Setting{}, hops: map[dataplane.NextHopID]bool{},
	}
}

// Set replaces what the prober knows of the world. It does not wait.
func (p *Prober) Set(w World) {
	for {
		select {
		case p.world <- w:
			return
		default:
		}
		select {
		case <-p.world:
		default:
		}
	}
}

// Retry forgets what was found of the paths to a node, or to all if it is
// empty, and measures them anew with all offloads that no other peer needs off.
func (p *Prober) Retry(ctx context.Context, node string) error {
	select {
	case p.retry <- node:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("ask for another measurement: %w", context.Cause(ctx))
	}
}

// Status returns what is known of each target, by node, family and form.
func (p *Prober) Status() []Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Status
	for _, t := range p.tracks {
		s := t.Status
		s.Device = p.applied[s.Target.Link]
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Status) int {
		return cmp.Or(cmp.Compare(a.Target.Node, b.Target.Node), cmp.Compare(a.Target.Family, b.Target.Family),
			dataplane.CompareForms(a.Target.Form, b.Target.Form), cmp.Compare(a.Target.Inner, b.Target.Inner))
	})
	return out
}

// Run measures until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	known, err := load(p.cfg.File, p.cfg.Kernel)
	if err != nil {
		// What was found before only saves time.
		p.cfg.Log.Warn("findings of before cannot be read; measuring anew", "file", p.cfg.File, "error", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	answers := &answers{port: p.cfg.Port, log: p.cfg.Log, allow: p.asking.Load, running: map[Endpoint]context.CancelFunc{}}
	defer answers.stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	room := atOnce
	var secret []byte
	for {
		now := time.Now()
		for _, t := range p.due(now, room) {
			room--
			with := secret // the key may change while it measures
			wg.Go(func() { p.done <- p.measure(ctx, t, with) })
		}
		p.save(known, now, false)
		timer.Reset(p.until(now, room))
		select {
		case <-ctx.Done():
			p.save(known, time.Now(), true)
			// Those that still measure end with ctx; done has room for all.
			return ctx.Err()
		case w := <-p.world:
			secret = w.Key
			p.asking.Store(newAsking(w))
			answers.set(ctx, w.Endpoints)
			if p.take(w, known, time.Now()) {
				err = p.report(ctx)
			}
		case a := <-p.done:
			room++
			p.settle(a, time.Now())
			err = p.report(ctx)
		case node := <-p.retry:
			p.forget(node, time.Now())
		case <-timer.C:
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// take makes the targets those of the world and reports whether there is
// something to tell.
func (p *Prober) take(w World, known map[string]record, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(w.Key) == 0 {
		return false
	}
	changed := false
	wanted := map[key]bool{}
	for _, t := range w.Targets {
		k := t.key()
		wanted[k] = true
		old, ok := p.tracks[k]
		switch {
		case !ok || old.Target.Skip != t.Skip:
			p.tracks[k] = newTrack(t, known, now)
			p.tracks[k].again = ok && old.running
			p.tracks[k].running = p.tracks[k].again
			changed = true
		case old.Target.path() != t.path():
			// What was found holds until more is known: the tunnel may be in use.
			if old.Target.carrier() != t.carrier() {
				old.Need = 0
			}
			old.Target, old.next, old.failures = t, now, 0
			old.again = old.running
		case old.Target != t:
			if t.Accepts && !old.Target.Accepts {
				old.next, old.failures = now, 0
				old.again = old.running
			}
			old.Target = t
		}
	}
	for k := range p.tracks {
		if !wanted[k] {
			delete(p.tracks, k)
			changed = true
		}
	}
	p.apply()
	return changed
}

// newTrack begins with what was known before a restart: the offloads that the
// path needs and, if nothing about it has changed, the result.
func newTrack(t Target, known map[string]record, now time.Time) *track {
	tr := &track{Status: Status{Target: t}, next: now}
	if t.Skip != "" {
		tr.Settled, tr.Reason = true, t.Skip
		return tr
	}
	r, ok := known[t.carrier()]
	if !ok {
		return tr
	}
	tr.Need = r.Need
	if r.Path != t.path() || r.Result != dataplane.Yes {
		return tr
	}
	tr.Settled, tr.Result, tr.MTU, tr.Reason, tr.Goodput, tr.At = true, r.Result, r.MTU, r.Reason, r.Goodput, r.At
	tr.settledPath, tr.next = t.path(), now.Add(rand.N(spread))
	return tr
}

// due returns the targets to measure now, and marks them.
func (p *Prober) due(now time.Time, room int) []Target {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ready []*track
	for _, t := range p.tracks {
		if !t.running && t.Target.Skip == "" && !t.next.After(now) {
			ready = append(ready, t)
		}
	}
	slices.SortFunc(ready, func(a, b *track) int {
		return cmp.Or(a.next.Compare(b.next), cmp.Compare(a.Target.Node, b.Target.Node))
	})
	var out []Target
	for _, t := range ready[:min(room, len(ready))] {
		t.running = true
		out = append(out, t.Target)
	}
	return out
}

// until returns how long nothing is due.
func (p *Prober) until(now time.Time, room int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := time.Hour
	if p.dirty && p.cfg.File != "" {
		d = max(0, p.saved.Add(saveGap).Sub(now))
	}
	if room == 0 {
		return d
	}
	for _, t := range p.tracks {
		if !t.running && t.Target.Skip == "" {
			d = min(d, max(0, t.next.Sub(now)))
		}
	}
	return d
}

// measure measures a target, tries a cure if one is called for, and measures
// again.
func (p *Prober) measure(ctx context.Context, t Target, secret []byte) *attempt {
	a := &attempt{target: t}
	had := p.setting(t.Link)
	leave, err := p.enter(ctx, t)
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
		had = p.setting(t.Link)
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

// enter makes the route into a tunnel that is not in use, if it takes one, and
// returns what removes it.
func (p *Prober) enter(ctx context.Context, t Target) (leave func(), err error) {
	if !t.Via.IsValid() || t.InUse {
		return func() {}, nil
	}
	p.mu.Lock()
	id := t.nextHop()
	for p.hops[id] {
		id = id&0x7fffffff + 1 | probeHops
	}
	p.hops[id] = true
	hop := dataplane.NextHop{ID: id, Link: t.Link, Gateway: t.Via, OnLink: true}
	route := dataplane.Route{Prefix: netip.PrefixFrom(t.Addr, t.Addr.BitLen()), Table: dataplane.MainTable, Metric: routeMetric, NextHop: id}
	rev := p.cfg.Sink.Update(dataplane.SourceProbe, []dataplane.Object{hop, route}, nil)
	p.mu.Unlock()
	leave = func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.cfg.Sink.Update(dataplane.SourceProbe, nil, []dataplane.Key{route.Key(), hop.Key()})
		delete(p.hops, id)
	}
	ctx, cancel := context.WithTimeout(ctx, applyWithin)
	defer cancel()
	return leave, p.cfg.Sink.Wait(ctx, rev)
}

// ease takes back a No that no setting changes, where single packets of every
// size get through and TCP copes: the path loses some of what comes in bursts.
func (a *attempt) ease() {
	if a.finding.Checksum == dataplane.Yes && a.finding.Transfer.Done {
		a.verdict.result = dataplane.Yes
	}
}

func (p *Prober) setting(link string) Setting {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.applied[link]
}

// lower has the device do what one more peer needs, on trial, and waits for it.
func (p *Prober) lower(ctx context.Context, t Target, s Setting) error {
	p.mu.Lock()
	if tr := p.tracks[t.key()]; tr != nil {
		tr.Need |= s
	}
	p.apply()
	rev := p.revision
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, applyWithin)
	defer cancel()
	return p.cfg.Sink.Wait(ctx, rev)
}

// takeBack ends the trial of what did not help.
func (p *Prober) takeBack(t Target, s Setting) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if tr := p.tracks[t.key()]; tr != nil {
		tr.Need &^= s
	}
	p.apply()
}

// apply tells the sink what each device needs for all its peers, where that
// changed. The caller has the lock.
func (p *Prober) apply() {
	need := map[string]Setting{}
	for _, t := range p.tracks {
		need[t.Target.Link] |= t.Need
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

// remeasure has all peers of a device measured soon: an offload is on again
// that was off while they were measured.
func (p *Prober) remeasure(link string) {
	now := time.Now()
	for _, t := range p.tracks {
		if t.Target.Link == link && t.next.After(now) {
			t.next = now
		}
	}
}

// settle takes in what a measurement found.
func (p *Prober) settle(a *attempt, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tracks[a.target.key()]
	if t == nil {
		return // not a target any more
	}
	t.running = false
	if t.again {
		t.again = false
		return // of a path that is not the present one
	}
	v := a.verdict
	if v.result == dataplane.Yes {
		t.failures = 0
	} else {
		t.failures++
	}
	if v.result != dataplane.Yes && t.Result == dataplane.Yes && t.settledPath == t.Target.path() &&
		(!a.finding.Answered || t.failures < doubts) {
		// A peer that was well and is silent is down, or restarts; and one bad
		// measurement may be the network's bad moment.
		v.result, v.mtu, v.reason = dataplane.Yes, t.MTU, "it delivered before; now: "+v.reason
	}
	if !t.Settled && t.failures < doubts && (a.err != nil || t.Target.Accepts && a.finding.Refused) {
		// A device gets its address, or a peer's daemon starts: the answer that
		// counts comes in a moment, and somebody may be waiting for it.
		t.next = now.Add(soon << t.failures)
		return
	}
	if t.Result != v.result || !t.Settled || t.Reason != v.reason || a.need != 0 {
		p.tell(t, a, v)
	}
	t.Settled, t.settledPath = true, t.Target.path()
	t.Result, t.MTU, t.Reason = v.result, v.mtu, v.reason
	if a.finding.Answered {
		t.At, t.Goodput = now.Unix(), a.finding.Transfer.Goodput()
	}
	t.next = now.Add(pause(t.Result, t.failures))
	p.dirty = true
}

// pause returns how long to wait before the next measurement.
func pause(r dataplane.Answer, failures int) time.Duration {
	if failures == 0 {
		return interval*3/4 + rand.N(interval/2)
	}
	slowest := slowestSick
	if r == dataplane.Unknown {
		slowest = slowestMute
	}
	d := firstRetry << min(failures-1, 10)
	d = min(d, slowest)
	return d*3/4 + rand.N(d/2)
}

// tell logs what was found. The caller has the lock.
func (p *Prober) tell(t *track, a *attempt, v verdict) {
	attrs := []any{
		"node", t.Target.Node, "form", t.Target.Form.String(), "inner", t.Target.Inner.String(), "link", t.Target.Link,
		"in_use", a.target.InUse, "result", v.result.String(), "rtt", a.finding.RTT,
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
		p.cfg.Log.Warn("offloads of a tunnel spoil packets: switched off what does",
			append(attrs, "fault", judge(t.Target, a.before, nil).reason, "setting", a.need.String(), "cure", a.need.Cure(t.Target.Link),
				"uplink", t.Target.Uplink, "goodput_before", rate(a.before.Transfer.Goodput()))...)
	case v.result == dataplane.No:
		p.cfg.Log.Warn("a tunnel does not deliver", attrs...)
	default:
		p.cfg.Log.Info("a tunnel was probed", attrs...)
	}
}

// rate writes bytes a second as people read networks.
func rate(bytes float64) string { return fmt.Sprintf("%.1f Mbit/s", bytes*8/1e6) }

// forget has the paths to a node measured as if nothing were known.
func (p *Prober) forget(node string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.tracks {
		if node == "" || t.Target.Node == node {
			t.Need, t.next, t.failures = 0, now, 0
			t.again = t.running
		}
	}
	p.apply()
}

// report hands over what is known where that changed, by family of the
// underlay.
func (p *Prober) report(ctx context.Context) error {
	now := p.deliveries()
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		old, told := p.reported[f]
		if told && maps.EqualFunc(old, now[f], slices.Equal[[]dataplane.Delivery]) {
			continue
		}
		p.reported[f] = now[f]
		peers := make(map[string][]dataplane.Delivery, len(now[f]))
		for n, d := range now[f] {
			peers[n] = slices.Clone(d)
		}
		if err := p.cfg.Report(ctx, f, peers); err != nil {
			return err
		}
	}
	return nil
}

// deliveries joins what is known of both families inside one form: a form
// delivers if nothing in it is known to be lost.
func (p *Prober) deliveries() map[dataplane.Family]map[string][]dataplane.Delivery {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*track, 0, len(p.tracks))
	for _, t := range p.tracks {
		if t.Settled {
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b *track) int {
		return cmp.Or(dataplane.CompareForms(a.Target.Form, b.Target.Form), cmp.Compare(a.Target.Inner, b.Target.Inner))
	})
	out := map[dataplane.Family]map[string][]dataplane.Delivery{}
	for _, t := range all {
		peers := out[t.Target.Family]
		if peers == nil {
			peers = map[string][]dataplane.Delivery{}
			out[t.Target.Family] = peers
		}
		d := dataplane.Delivery{Form: t.Target.Form, Result: t.Result, MTU: t.MTU, Reason: t.Reason}
		list := peers[t.Target.Node]
		if n := len(list); n > 0 && list[n-1].Form == d.Form {
			list[n-1] = join(list[n-1], d)
			continue
		}
		peers[t.Target.Node] = append(list, d)
	}
	return out
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
