package bgp

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// backend runs an [engine.Engine] for a [Speaker]: it puts a [Config] into the
// engine's terms, and what the engine reports into events. A change of the AS, the router
// id or the listener needs a new one.
type backend struct {
	*engine.Engine
	collectors *collectors
	listening  bool
	out        *queue
	cancel     context.CancelFunc
	wg         sync.WaitGroup // who takes what the engine reports

	change sync.Mutex // held while peers are changed; guards want
	want   map[netip.Addr]engine.Peer

	mu     sync.Mutex           // guards the rest
	policy *policy              // only who changes the backend replaces it, and may read it without mu
	gone   map[netip.Addr]*Peer // that ran before the policy was made, as they were last. Never changed: it is replaced
	owners *owners              // of what was announced since the policy was made

	complete func() // says that no peer is awaited any more; nil: none is. Who changes the backend has it
}

const (
	connectRetry = 5 * time.Second // between attempts; Calico's is the same

	// passiveWait is for how long the side that waits by Calico's rule does: where the
	// other one waits too, for a reason of its own, there would be no session.
	passiveWait = 2 * connectRetry

	// limitPause is for how long a peer that announced too much is left alone.
	limitPause = 5 * time.Minute
)

// restartDeferral is for how long End-of-RIB waits after a restart for peers that have
// not announced all they have (RFC 4724 section 4.1). Until it comes they keep what
// they had of this node; nothing that it announces waits.
const restartDeferral = 5 * time.Second

// startBackend starts an engine with a config's identity, policies and listeners, but
// without peers or paths.
func startBackend(ctx context.Context, o SpeakerOptions, q *queue, c *Config, restarting, listen bool) (*backend, error) {
	b := &backend{out: q, listening: listen, want: map[netip.Addr]engine.Peer{}, gone: map[netip.Addr]*Peer{}, policy: &policy{}}
	var err error
	b.Engine, err = engine.New(engine.Options{
		Log: o.Log, AS: c.ASN, RouterID: c.RouterID, Restarting: restarting, Deferral: restartDeferral, LimitPause: limitPause, Call: o.Call,
	})
	if err != nil {
		return nil, fmt.Errorf("start BGP: %w", err)
	}
	b.adopt(newPolicy(c))
	b.collectors = newCollectors(b.Engine, o.Log, c)
	if listen {
		var at []netip.AddrPort
		for _, a := range c.ListenAddrs {
			at = append(at, netip.AddrPortFrom(a, c.ListenPort))
		}
		if err := b.Listen(ctx, at); err != nil {
			return nil, errors.Join(fmt.Errorf("listen for BGP: %w", err), b.Engine.Stop(ctx, nil))
		}
	}
	taking, cancel := context.WithCancel(context.WithoutCancel(ctx))
	b.cancel = cancel
	b.wg.Go(func() { b.take(taking) })
	return b, nil
}

func (b *backend) listens() bool { return b.listening }

// adopt makes the judgement that of p.
func (b *backend) adopt(p *policy) {
	ended := map[netip.Addr]*Peer{}
	for id, q := range b.policy.running {
		if p.running[id] == nil {
			was := *q // so that it does not keep the list that q is in
			ended[id] = &was
		}
	}
	b.mu.Lock()
	b.policy, b.owners = p, &owners{of: map[netip.Addr]string{}}
	if len(ended) > 0 {
		gone := maps.Clone(b.gone)
		maps.Copy(gone, ended)
		b.gone = gone
	}
	b.mu.Unlock()
	b.SetPolicy(p)
}

func (b *backend) announce(c *Config) error {
	origins, err := c.origins()
	if err != nil {
		return err
	}
	b.Announce(origins)
	return nil
}

// update changes what is announced for some addresses of Services. c has these alone.
func (b *backend) update(c *Config, gone []netip.Prefix) error {
	origins, err := c.origins()
	if err != nil {
		return err
	}
	b.mu.Lock()
	o := b.owners
	b.mu.Unlock()
	o.mu.Lock()
	for _, p := range c.Announce {
		o.of[p.Addr()] = c.serviceOf(p)
	}
	for _, p := range gone {
		o.of[p.Addr()] = ""
	}
	o.mu.Unlock()
	b.Update(origins, gone)
	return nil
}

// origins is what c has announced in the engine's terms.
func (c *Config) origins() ([]engine.Origin, error) {
	origins := make([]engine.Origin, 0, len(c.Announce))
	for _, p := range c.Announce {
		out := engine.Origin{Prefix: p, NextHop: c.nextHopOf(p), LocalPref: c.localPrefOf(p)}
		for tag := range strings.FieldsSeq(c.Tags[p]) {
			small, large, err := readCommunity(tag)
			if err != nil {
				return nil, fmt.Errorf("announce %s: %w", p, err)
			}
			out.Communities, out.Large = append(out.Communities, small...), append(out.Large, large...)
		}
		origins = append(origins, out)
	}
	return origins, nil
}

// owners are what addresses are announced for of which that has changed since a policy was
// made; empty: nothing.
type owners struct {
	mu sync.Mutex
	of map[netip.Addr]string
}

// owner names what a prefix that begins here is announced for; empty: nothing that has a name.
func (r *reader) owner(p netip.Prefix) string {
	r.owners.mu.Lock()
	name, known := r.owners.of[p.Addr()]
	r.owners.mu.Unlock()
	if known && p.IsSingleIP() {
		return name
	}
	return cmp.Or(r.policy.c.Injected[p].Owner, r.policy.c.serviceOf(p))
}

func (b *backend) addPeer(_ context.Context, c *Config, p Peer) error {
	b.change.Lock()
	defer b.change.Unlock()
	b.want[p.id()] = enginePeer(c, p)
	if err := b.SetPeer(b.want[p.id()]); err != nil {
		delete(b.want, p.id())
		return fmt.Errorf("add peer %s: %w", p.Addr, errors.Join(err, b.RemovePeer(p.id())))
	}
	return nil
}

// auth is what the sessions are signed with.
func (p Peer) auth() conn.Auth { return conn.Auth{Password: p.Password.reveal(), Keys: p.AO.reveal()} }

// resign gives sessions the passwords and keys that peers have now.
func (b *backend) resign(peers []Peer) error {
	b.change.Lock()
	defer b.change.Unlock()
	for _, p := range peers {
		w := b.want[p.id()]
		w.Auth, w.Others = p.auth(), p.Others.reveal()
		b.want[p.id()] = w
	}
	if err := b.SetPeers(slices.Collect(maps.Values(b.want))); err != nil {
		return fmt.Errorf("change passwords and keys: %w", err)
	}
	return nil
}

func (b *backend) deletePeer(_ context.Context, p Peer) error {
	b.change.Lock()
	defer b.change.Unlock()
	delete(b.want, p.id())
	if err := b.RemovePeer(p.id()); err != nil {
		return fmt.Errorf("delete peer %s: %w", p.Addr, err)
	}
	return nil
}

// await has a restart wait for peers that are still to be found, as long as it waits for peers at all.
func (b *backend) await(some bool) {
	switch {
	case some && b.complete == nil:
		b.complete = b.Incomplete()
	case !some && b.complete != nil:
		b.complete()
		b.complete = nil
	}
}

// enginePeer is a peer in the engine's terms.
func enginePeer(c *Config, p Peer) engine.Peer {
	out := engine.Peer{
		Addr: p.id(), Port: p.Port, AS: p.ASN, LocalAS: p.localASN(c.ASN), Source: p.Source, Passive: p.Passive, Hops: p.TTLSecurity,
		Auth: p.auth(), Others: p.Others.reveal(),
		HoldTime: p.HoldTime, Keepalive: p.Keepalive, ConnectRetry: connectRetry, RestartTime: p.RestartTime, AllowOwnAS: int(p.AllowOwnASN),
		ClusterID: p.ClusterID, ExportKey: p.exportKey(),
	}
	if p.Passive && !p.Local && !p.Range.IsValid() {
		out.Wait = passiveWait
	}
	for _, f := range p.carries() {
		out.Families[f] = engine.Family{Enabled: true, Limit: int(p.MaxPrefixes), StaleTime: p.StaleTime}
		out.ExtendedNextHop = out.ExtendedNextHop || f == wire.IPv4 && p.Addr.Is6()
	}
	return out
}

// exportKey is equal for peers of one type and AS to which the same is advertised.
func (p Peer) exportKey() string {
	return fmt.Sprintf("%s %d %t %v", p.Filters, p.NextHopMode, p.Reflect, p.ownHop())
}

func (b *backend) state(peer netip.Addr) fsm.State {
	s, _ := b.Peer(peer)
	return s.State
}

func (b *backend) counts() map[netip.Addr]peerCounts {
	out := map[netip.Addr]peerCounts{}
	for _, s := range b.Peers() {
		c := peerCounts{in: Messages(s.In), out: Messages(s.Out), keys: s.Keys}
		for i, f := range s.Families {
			if f.Enabled {
				c.families = append(c.families, FamilyCounts{
					Family: familyName(wire.Family(i)), Received: f.Received, Accepted: f.Accepted, Advertised: f.Advertised,
				})
			}
		}
		out[s.Addr] = c
	}
	return out
}

func (b *backend) stop(ctx context.Context, graceful bool) error {
	b.cancel()
	b.wg.Wait()
	b.collectors.stop()
	var n *fsm.Notification
	if !graceful {
		shutdown := fsm.Cease(fsm.CeaseShutdown, "")
		n = &shutdown
	}
	if err := b.Engine.Stop(ctx, n); err != nil {
		return fmt.Errorf("stop BGP: %w", err)
	}
	return nil
}

// step is how many prefixes are taken at a time.
const step = 4096

// take passes on what the engine reports until ctx ends.
func (b *backend) take(ctx context.Context) {
	for size := 1; ; {
		select {
		case <-ctx.Done():
			return
		case <-b.Changed():
		}
		for more := true; more && ctx.Err() == nil; {
			// The reader is made with the engine's lock: one from before would read by the former
			// policy what was judged again by another meanwhile, which is handed on once.
			var r *reader
			var changes []chosenPaths
			var events []engine.Event
			more = b.Take(step, func(e engine.Event) { events = append(events, e) }, func(prefix wire.Prefix, paths iter.Seq[*engine.Path]) {
				if changes == nil {
					r, changes = b.reader(), make([]chosenPaths, 0, size)
				}
				changes = append(changes, chosenPaths{prefix, r.hops(paths)})
			})
			b.tell(events, changes)
			size = max(len(changes), 1) // most that follow many are many
			if !more {
				break
			}
			// What changes meanwhile is one change of its prefix in the engine.
			select {
			case <-ctx.Done():
			case <-b.out.taken():
			}
		}
	}
}

// tell adds what was taken to the speaker's queue: that next hops are lost before
// the changes that follow from it, and what is over behind them.
func (b *backend) tell(events []engine.Event, changes []chosenPaths) {
	put := func(e event) {
		e.from = b
		if e.time.IsZero() {
			e.time = time.Now()
		}
		b.out.put(e)
	}
	for _, e := range events {
		if e.Kind == engine.Down && !e.Retained || e.Kind == engine.Lost {
			put(event{kind: eventLost, peer: e.Peer})
		}
	}
	if len(changes) > 0 {
		put(event{kind: eventChosen, chosen: changes})
	}
	for _, e := range events {
		ev := event{peer: e.Peer, time: e.Time, reason: e.Reason}
		switch e.Kind {
		case engine.Up:
			ev.kind, ev.canGR = eventUp, e.Session.Peer.GracefulRestart
			for f, s := range e.Session.Wire.Family {
				if s.Enabled {
					ev.families = append(ev.families, wire.Family(f))
				}
			}
		case engine.Down:
			ev.kind, ev.kept = eventDown, e.Retained
		case engine.Failed:
			ev.kind = eventFail
		case engine.EndOfRIB:
			ev.kind, ev.families = eventEOR, []wire.Family{e.Family}
		case engine.Expired:
			ev.kind = eventExpired
		case engine.Withdrawn:
			ev.kind = eventSwept
		case engine.Resumed:
			ev.kind = eventResumed
		default:
			continue
		}
		put(ev)
	}
}

// reader reads the engine's paths. Prefixes of one UPDATE share their attributes, so
// the last path is kept. Not safe for concurrent use.
type reader struct {
	policy *policy
	gone   map[netip.Addr]*Peer
	owners *owners
	judged judged // scratch

	set  attrs.Handle
	peer netip.Addr
	last Hop

	read, told []Hop                   // scratch; what was returned last
	here       bool                    // it is a program on this host that has the prefix
	note       func(*engine.Path) bool // adds a path to read: one function for all prefixes
}

func (b *backend) reader() *reader {
	b.mu.Lock()
	r := &reader{policy: b.policy, gone: b.gone, owners: b.owners}
	b.mu.Unlock()
	r.note = func(p *engine.Path) bool {
		switch {
		case engine.Remote(p.Peer).IsLoopback():
			r.here = true
		case p.Peer.IsValid():
			r.read = append(r.read, r.hop(p))
		}
		return !r.here
	}
	return r
}

// from returns the peer that sent a path; one that is no more, whose paths are about to go, as it was.
func (r *reader) from(p *engine.Path) *Peer {
	if q := cmp.Or(r.policy.running[p.Peer], r.gone[p.Peer]); q != nil {
		return q
	}
	return &Peer{}
}

// hops returns those of paths that peers sent: what it returned last if they are the same.
func (r *reader) hops(paths iter.Seq[*engine.Path]) []Hop {
	r.read, r.here = r.read[:0], false
	if paths(r.note); r.here {
		return nil
	}
	if !slices.Equal(r.read, r.told) {
		r.told = slices.Clone(r.read)
	}
	return r.told
}

func (r *reader) hop(p *engine.Path) Hop {
	if p.Set != r.set || p.Peer != r.peer || r.set == 0 {
		from := r.from(p)
		r.set, r.peer = p.Set, p.Peer
		r.last = Hop{
			NextHop: nextHopOf(p, from.ibgp(r.policy.c.ASN)), Peer: from.Name, PeerAddr: p.Peer, IBGP: from.ibgp(r.policy.c.ASN), ASPath: p.PathText(),
			LocalPref: localPrefOf(p), MED: p.Summary.MED, LongLived: p.Flags&attrs.LLGRStale != 0,
		}
	}
	h := r.last
	h.Stale = p.Stale
	if from := r.from(p); from.Filters != "" {
		r.judged.read(p, from.ibgp(r.policy.c.ASN))
		h.Named = r.policy.named(*from, &r.judged)
	}
	return h
}

func localPrefOf(p *engine.Path) uint32 {
	if p.Flags&attrs.HasLocalPref == 0 {
		return 0
	}
	return p.Summary.LocalPref
}

// nextHopOf is [onLink] of a path's next hop.
func nextHopOf(p *engine.Path, ibgp bool) netip.Addr { return onLink(p.NextHopAddr(), p.Peer, ibgp) }

// read makes j what the policies see of a path.
func (j *judged) read(p *engine.Path, ibgp bool) {
	*j = judged{prefix: p.Prefix, nextHop: nextHopOf(p, ibgp), localPref: localPrefOf(p), own: !p.Peer.IsValid(), local: engine.Remote(p.Peer).IsLoopback(), leaving: p.Flags&attrs.GracefulShutdown != 0, attributes: p}
	j.ibgp = ibgp && !j.own
}

// Import implements [engine.Policy].
func (p *policy) Import(q engine.Peer) engine.Judge {
	return judge(p.importsOf(p.peer(q.Addr)))
}

// Export implements [engine.Policy].
func (p *policy) Export(q engine.Peer) engine.Judge {
	like := p.exportsLike(q)
	if like == nil {
		return func(*engine.Path) engine.Verdict { return engine.Verdict{} } // it is about to go
	}
	return judge(p.exportsOf(*like))
}

// exportsLike returns a peer to which the same is to be advertised as to those with q's ExportKey; nil: there is none. The peer that
// the engine asks for may have another key by now, or not be there any more, while others of its update group stay what they are.
func (p *policy) exportsLike(q engine.Peer) *Peer {
	same := func(r *Peer) bool { return r.exportKey() == q.ExportKey && r.ibgp(p.c.ASN) == (q.AS == q.LocalAS) }
	like := p.running[q.Addr]
	if like != nil && same(like) {
		return like
	}
	for _, r := range p.running {
		if same(r) {
			return r
		}
	}
	return like // to whose new group it goes over
}

func judge(decide func(*judged) verdict) engine.Judge {
	var scratch judged // the engine asks one after the other
	return func(p *engine.Path) engine.Verdict {
		scratch.read(p, p.Peer.IsValid() && !p.External)
		v := decide(&scratch)
		return engine.Verdict{Accept: v.accept, Edit: v.edit}
	}
}

func (b *backend) chosen(ctx context.Context, fn func(netip.Prefix, []Hop)) error {
	r := b.reader()
	var at netip.Prefix
	var hops []Hop
	local := false
	flush := func() {
		if len(hops) > 0 && !local {
			fn(at, hops)
		}
		hops, local = nil, false
	}
	err := b.Query(ctx, engine.Query{Table: engine.Best}, func(p *engine.Path) bool {
		if p.Prefix != at {
			flush()
			at = p.Prefix
		}
		if p.Peer.IsValid() && (p.Best || p.Multi) {
			hops, local = append(hops, r.hop(p)), local || engine.Remote(p.Peer).IsLoopback()
		}
		return true
	})
	flush()
	return err
}

func (b *backend) routes(ctx context.Context, q Query, fn func([]Route)) error {
	tables := map[Table]engine.Table{TableBest: engine.Best, TableReceived: engine.Received, TableAdvertised: engine.Advertised}
	if _, known := b.Peer(q.Peer); q.Table != TableBest && !known {
		return fmt.Errorf("%s: %w", q.Peer, ErrNoPeer)
	}
	r := b.reader()
	var same []Route // of one prefix
	flush := func() {
		if len(same) > 0 {
			fn(same)
		}
		same = nil
	}
	err := b.Query(ctx, engine.Query{Table: tables[q.Table], Peer: q.Peer, Prefix: q.Prefix, Exact: q.Exact}, func(p *engine.Path) bool {
		if len(same) > 0 && same[0].Prefix != p.Prefix {
			flush()
		}
		if q.Table != TableBest || p.Accepted || p.Best {
			same = append(same, r.route(p))
		}
		return true
	})
	flush()
	return err
}

// route reads all of a path, for people.
func (r *reader) route(p *engine.Path) Route {
	from := r.from(p)
	out := Route{
		Prefix: p.Prefix, Since: p.Since, Own: !p.Peer.IsValid(), equal: p.Best || p.Multi, leaving: p.Flags&attrs.GracefulShutdown != 0,
		origin: p.Summary.Origin, Origin: []string{"IGP", "EGP", "incomplete"}[min(p.Summary.Origin, 2)], length: int(p.PathLen), path: slices.Collect(p.ASPath()),
	}
	out.Hop = Hop{
		Peer: from.Name, PeerAddr: p.Peer, IBGP: !out.Own && from.ibgp(r.policy.c.ASN), ASPath: p.PathText(), LocalPref: localPrefOf(p), MED: p.Summary.MED,
		LongLived: p.Flags&attrs.LLGRStale != 0, Stale: p.Stale,
	}
	if out.Own {
		out.Owner = r.owner(p.Prefix)
	}
	out.NextHop = nextHopOf(p, out.IBGP)
	if p.Flags&attrs.HasOriginator != 0 {
		out.originator = addrOf(p.Summary.Originator)
	}
	for id := range p.Clusters() {
		out.clusters = append(out.clusters, addrOf(id))
	}
	for c := range p.Communities() {
		out.Communities = append(out.Communities, textOf(c>>16, c&0xffff))
	}
	for c := range p.LargeCommunities() {
		out.Communities = append(out.Communities, textOf(c[:]...))
	}
	return out
}

// addrOf is a number in the form of an IPv4 address.
func addrOf(id uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, id)))
}
