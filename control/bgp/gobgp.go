package bgp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Timers that every session has.
const (
	connectRetry = 5 * time.Second // between attempts; Calico's is the same

	// deferral is how long GoBGP, as a restarting speaker, waits for its peers'
	// End-of-RIB before it announces (RFC 4724 section 4.1). Nothing that we
	// announce depends on what we learn, so the shortest time it knows will do;
	// a dead peer would otherwise hold up the announcements to all others.
	deferral = time.Second
)

// gobgp is the [backend] of GoBGP's server.
type gobgp struct {
	srv      *server.BgpServer
	log      *slog.Logger
	asn      uint32
	routerID netip.Addr
	listen   bool   // it has a listener
	port     uint16 // of the listener

	out     *queue
	closed  atomic.Bool
	ctx     context.Context // ends with it
	cancel  context.CancelFunc
	wg      sync.WaitGroup          // Serve, and what is done in the background
	looking sync.Mutex              // held by who looks for connections that GoBGP lost
	local   map[netip.Prefix]origin // what we originate

	change  sync.Mutex            // held while GoBGP's peers are changed
	pending map[netip.Addr]resets // of running peers; change guards it

	mu      sync.Mutex // guards the rest
	policy  *policy
	peers   map[netip.Addr]*gobgpPeer
	conv    converter
	changes uint64 // events about paths, and configurations, so far
	tally   tally
}

// origin is what a path that we originate says.
type origin struct {
	nextHop netip.Addr
	tags    string
	pref    uint32 // LOCAL_PREF
}

// startGoBGP starts GoBGP with a config's identity and policies but without
// peers or paths.
func startGoBGP(ctx context.Context, log *slog.Logger, q *queue, c *Config, listen bool) (*gobgp, error) {
	e := &gobgp{
		log: log, out: q, asn: c.ASN, routerID: c.RouterID, listen: listen, port: c.ListenPort,
		local: map[netip.Prefix]origin{}, pending: map[netip.Addr]resets{}, peers: map[netip.Addr]*gobgpPeer{},
	}
	e.conv.peerOf = func(a netip.Addr) *Peer {
		if p, ok := e.peers[a]; ok {
			return &p.Peer
		}
		return nil
	}
	e.ctx, e.cancel = context.WithCancel(context.WithoutCancel(ctx))
	e.srv = server.NewBgpServer(server.LoggerOption(
		slog.New(tap{next: log.Handler(), emit: e.logged, done: &e.closed}), new(slog.LevelVar)))
	e.wg.Go(e.srv.Serve)
	if err := e.start(ctx, c); err != nil {
		return nil, errors.Join(err, e.stop(ctx, false))
	}
	return e, nil
}

func (e *gobgp) start(ctx context.Context, c *Config) error {
	g := &api.Global{Asn: c.ASN, RouterId: c.RouterID.String(), ListenPort: -1, UseMultiplePaths: true}
	if e.listen {
		g.ListenPort = int32(c.ListenPort)
		for _, a := range c.ListenAddrs {
			g.ListenAddresses = append(g.ListenAddresses, a.String())
		}
	}
	if err := e.srv.StartBgp(ctx, &api.StartBgpRequest{Global: g}); err != nil {
		return fmt.Errorf("start GoBGP: %w", err)
	}
	if err := e.setPolicies(ctx, c); err != nil {
		return err
	}
	e.adopt(c)
	for _, a := range assignments() {
		if err := e.srv.SetPolicyAssignment(ctx, &api.SetPolicyAssignmentRequest{Assignment: a}); err != nil {
			return fmt.Errorf("assign %s policy: %w", a.Policies[0].Name, err)
		}
	}
	return e.watch()
}

func (e *gobgp) setPolicies(ctx context.Context, c *Config) error {
	if err := e.srv.SetPolicies(ctx, policies(c)); err != nil {
		return fmt.Errorf("set policies: %w", err)
	}
	return nil
}

// watch subscribes to what the speaker wants to know. One watcher for all
// keeps the order: a peer's End-of-RIB comes after its paths.
func (e *gobgp) watch() error {
	err := e.srv.WatchEvent(e.ctx, server.WatchEventMessageCallbacks{
		OnBestPath: func(paths []*apiutil.Path, _ time.Time) { e.learned(paths) },
		OnPathEor: func(p *apiutil.Path, _ time.Time) {
			e.emit(event{kind: eventEOR, peer: p.PeerAddress, families: []wire.Family{fromPacket(p.Family)}})
		},
		OnPeerUpdate: func(p *apiutil.WatchEventMessage_PeerEvent, _ time.Time) {
			if p.Type == apiutil.PEER_EVENT_STATE {
				e.changed(p.Peer.State)
			}
		},
	}, server.WatchBestPath(true), server.WatchEor(true), server.WatchPeer())
	if err != nil {
		return fmt.Errorf("watch GoBGP: %w", err)
	}
	return nil
}

// stop ends GoBGP and waits for it. With graceful no Cease is sent: peers keep
// our routes for the restart time (RFC 4724 section 4.2). Nothing that happens
// while stopping is reported, for it is no news about the network.
func (e *gobgp) stop(ctx context.Context, graceful bool) error {
	e.closed.Store(true)
	e.cancel()
	done := make(chan error, 1)
	go func() {
		if !graceful {
			e.sayGoodbye(ctx)
		}
		err := e.srv.StopBgp(context.WithoutCancel(ctx), &api.StopBgpRequest{AllowGracefulRestart: graceful})
		e.srv.Stop() // StopBgp leaves the goroutines of BFD
		e.wg.Wait()
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("stop GoBGP: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop GoBGP: %w", ctx.Err())
	}
}

// goodbyeTime bounds for how long stopping waits until every peer was sent its
// notification.
const goodbyeTime = 2 * time.Second

// sayGoodbye ends the sessions one by one, each with a Cease. StopBgp sends one
// too, but closes connections at the same time and now and then wins.
func (e *gobgp) sayGoodbye(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, goodbyeTime)
	defer cancel()
	established := func() (peers []string) {
		err := e.srv.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
			if p.GetState().GetSessionState() == api.PeerState_SESSION_STATE_ESTABLISHED {
				peers = append(peers, p.GetConf().GetNeighborAddress())
			}
		})
		if err != nil {
			return nil // the server is gone: nobody is left to tell
		}
		return peers
	}
	for _, addr := range established() {
		if err := e.srv.DisablePeer(ctx, &api.DisablePeerRequest{Address: addr}); err != nil {
			return // as above
		}
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for len(established()) > 0 {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// announce makes the paths that we originate those of c: new ones first, so
// that an aggregate or a part of it is there throughout.
func (e *gobgp) announce(c *Config) error {
	want := map[netip.Prefix]bool{}
	var errs []error
	for _, p := range c.Announce {
		want[p] = true
		o := origin{nextHop: c.nextHopOf(p), tags: c.Tags[p], pref: c.localPrefOf(p)}
		if e.local[p] == o {
			continue
		}
		if err := e.originate(p, o); err != nil {
			errs = append(errs, fmt.Errorf("announce %s: %w", p, err))
			continue
		}
		e.local[p] = o
	}
	for p, o := range e.local {
		if want[p] {
			continue
		}
		path, err := localPath(p, o)
		if err == nil {
			err = e.srv.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{path}})
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("withdraw %s: %w", p, err))
			continue
		}
		delete(e.local, p)
	}
	return errors.Join(errs...)
}

func (e *gobgp) originate(p netip.Prefix, o origin) error {
	path, err := localPath(p, o)
	if err != nil {
		return err
	}
	resp, err := e.srv.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{path}})
	if err != nil {
		return err
	}
	return resp[0].Error
}

// localPath is a path that we originate. IPv4's next hop is an attribute of its
// own (RFC 4271, section 5.1.3), IPv6's stands beside the prefix (RFC 4760,
// section 3).
func localPath(p netip.Prefix, o origin) (*apiutil.Path, error) {
	nlri, err := packet.NewIPAddrPrefix(p)
	if err != nil {
		return nil, err
	}
	family := toPacket(familyOf(p.Addr()))
	var hop packet.PathAttributeInterface
	if family == packet.RF_IPv4_UC {
		hop, err = packet.NewPathAttributeNextHop(o.nextHop)
	} else {
		hop, err = packet.NewPathAttributeMpReachNLRI(family, []packet.PathNLRI{{NLRI: nlri}}, o.nextHop)
	}
	if err != nil {
		return nil, err
	}
	tags, err := communityAttributes(o.tags)
	if err != nil {
		return nil, err
	}
	return &apiutil.Path{
		Family: family, Nlri: nlri, Age: time.Now().Unix(),
		Attrs: append([]packet.PathAttributeInterface{
			packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP), hop,
			packet.NewPathAttributeLocalPref(o.pref),
		}, tags...),
	}, nil
}

// toPacket is a family as GoBGP names it.
func toPacket(f wire.Family) packet.Family { return packet.NewFamily(f.AFI(), packet.SAFI_UNICAST) }

// fromPacket is a family that GoBGP names.
func fromPacket(f packet.Family) wire.Family {
	if f == packet.RF_IPv6_UC {
		return wire.IPv6
	}
	return wire.IPv4
}

func (e *gobgp) listens() bool { return e.listen }

// addPeer starts a session. restarting has the peer told of the Restart State and
// Forwarding State bits (RFC 4724 section 3).
func (e *gobgp) addPeer(ctx context.Context, c *Config, p Peer, restarting bool) error {
	e.change.Lock()
	defer e.change.Unlock()
	e.mu.Lock()
	e.peers[p.Addr] = &gobgpPeer{Peer: p}
	e.mu.Unlock()
	err := e.add(ctx, c, p, restarting)
	if err != nil {
		e.mu.Lock()
		delete(e.peers, p.Addr)
		e.mu.Unlock()
	}
	return err
}

func (e *gobgp) add(ctx context.Context, c *Config, p Peer, restarting bool) error {
	n := &api.Peer{
		Conf: &api.PeerConf{NeighborAddress: p.Addr.String(), PeerAsn: p.ASN, AllowOwnAsn: uint32(p.AllowOwnASN)},
		Timers: &api.Timers{Config: &api.TimersConfig{
			ConnectRetry: uint64(connectRetry / time.Second), HoldTime: uint64(p.HoldTime / time.Second),
			KeepaliveInterval:      uint64(p.Keepalive / time.Second),
			IdleHoldTimeAfterReset: uint64(connectRetry / time.Second),
		}},
		Transport: &api.Transport{RemotePort: uint32(p.Port), PassiveMode: p.Passive},
		GracefulRestart: &api.GracefulRestart{
			Enabled: true, RestartTime: uint32(p.RestartTime / time.Second),
			DeferralTime: uint32(deferral / time.Second), LocalRestarting: restarting,
		},
	}
	for _, f := range p.carries() {
		n.AfiSafis = append(n.AfiSafis, p.afiSafi(f))
	}
	if p.Source.IsValid() {
		n.Transport.LocalAddress = p.Source.String()
	}
	switch {
	case p.TTLSecurity != 0:
		// Both sides send 255, so what comes over n hops has 256-n at least
		// (RFC 5082 section 3).
		n.TtlSecurity = &api.TtlSecurity{Enabled: true, TtlMin: uint32(256 - int(p.TTLSecurity))}
	case !p.ibgp(c.ASN):
		n.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: 255}
	}
	n.Conf.LocalAsn, n.Conf.AuthPassword = p.LocalASN, p.Password.reveal()
	if p.ClusterID.IsValid() {
		n.RouteReflector = &api.RouteReflector{RouteReflectorClient: true, RouteReflectorClusterId: p.ClusterID.String()}
	}
	n.GracefulRestart.LonglivedEnabled = p.StaleTime != 0
	if err := e.srv.AddPeer(ctx, &api.AddPeerRequest{Peer: n}); err != nil {
		return fmt.Errorf("add peer %s: %w", p.Addr, err)
	}
	return nil
}

// afiSafi is what a session does with the routes of a family.
func (p Peer) afiSafi(f wire.Family) *api.AfiSafi {
	family := apiFamily(f)
	out := &api.AfiSafi{
		Config:            &api.AfiSafiConfig{Family: family, Enabled: true},
		MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
	}
	if p.MaxPrefixes != 0 {
		out.PrefixLimits = &api.PrefixLimit{Family: family, MaxPrefixes: p.MaxPrefixes}
	}
	if p.StaleTime != 0 {
		out.LongLivedGracefulRestart = &api.LongLivedGracefulRestart{
			Config: &api.LongLivedGracefulRestartConfig{Enabled: true, RestartTime: uint32(p.StaleTime / time.Second)},
		}
	}
	return out
}

// apiFamily is a unicast family in the form of GoBGP's interface.
func apiFamily(f wire.Family) *api.Family {
	out := &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}
	if f == wire.IPv6 {
		out.Afi = api.Family_AFI_IP6
	}
	return out
}

func (e *gobgp) deletePeer(ctx context.Context, p Peer) error {
	e.change.Lock()
	defer e.change.Unlock()
	e.mu.Lock()
	known, ok := e.peers[p.Addr]
	e.mu.Unlock()
	if !ok {
		return nil
	}
	if !known.removed {
		if err := e.remove(ctx, p); err != nil {
			return err
		}
	}
	e.mu.Lock()
	known.stopDiagnosis()
	delete(e.peers, p.Addr)
	e.mu.Unlock()
	return nil
}

func (e *gobgp) remove(ctx context.Context, p Peer) error {
	err := e.srv.DeletePeer(ctx, &api.DeletePeerRequest{Address: p.Addr.String()})
	if err == nil && p.Password != (Password{}) {
		err = e.forgetPassword(ctx, p.Addr)
	}
	if err != nil {
		return fmt.Errorf("delete peer %s: %w", p.Addr, err)
	}
	return nil
}

// forgetPassword takes the password of a peer that was deleted from the
// listeners, where GoBGP leaves it: it would not hear the peer without one. But
// it takes that of a range of neighbours away with the range. Meanwhile nobody
// knows the range's password.
func (e *gobgp) forgetPassword(ctx context.Context, addr netip.Addr) error {
	const group = "forgotten"
	only := netip.PrefixFrom(addr.WithZone(""), addr.BitLen()).String()
	conf := &api.PeerGroupConf{PeerGroupName: group, AuthPassword: rand.Text()}
	if err := e.srv.AddPeerGroup(ctx, &api.AddPeerGroupRequest{PeerGroup: &api.PeerGroup{Conf: conf}}); err != nil {
		return err
	}
	err := e.srv.AddDynamicNeighbor(ctx, &api.AddDynamicNeighborRequest{DynamicNeighbor: &api.DynamicNeighbor{Prefix: only, PeerGroup: group}})
	if err == nil {
		err = e.srv.DeleteDynamicNeighbor(ctx, &api.DeleteDynamicNeighborRequest{Prefix: only, PeerGroup: group})
	}
	return errors.Join(err, e.srv.DeletePeerGroup(ctx, &api.DeletePeerGroupRequest{Name: group}))
}

// reimport judges again what peers have sent: all of them, or one.
func (e *gobgp) reimport(ctx context.Context, addr netip.Addr) error {
	r := &api.ResetPeerRequest{Soft: true, Direction: api.ResetPeerRequest_DIRECTION_IN}
	if addr.IsValid() {
		r.Address = addr.String()
	}
	if err := e.srv.ResetPeer(ctx, r); err != nil {
		return fmt.Errorf("judge received routes again: %w", err)
	}
	return nil
}

// reexport judges again what a peer has been told.
func (e *gobgp) reexport(ctx context.Context, addr netip.Addr) error {
	r := &api.ResetPeerRequest{Soft: true, Direction: api.ResetPeerRequest_DIRECTION_OUT, Address: addr.String()}
	if err := e.srv.ResetPeer(ctx, r); err != nil {
		return fmt.Errorf("judge what %s is told again: %w", addr, err)
	}
	return nil
}

// table calls fn with the paths in use of each prefix, and all others behind them.
func (e *gobgp) table(fn func([]*apiutil.Path)) error {
	for _, f := range families() {
		r := apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: toPacket(f)}
		if err := e.srv.ListPath(r, func(_ packet.NLRI, paths []*apiutil.Path) { fn(paths) }); err != nil {
			return fmt.Errorf("list %s routes: %w", f, err)
		}
	}
	return nil
}

func (e *gobgp) chosen(_ context.Context, fn func(netip.Prefix, []Hop)) error {
	conv := e.newConverter()
	return e.table(func(paths []*apiutil.Path) {
		var prefix netip.Prefix
		var hops []Hop
		for i, p := range paths {
			if to, h, ok := conv.path(p); ok && (i == 0 || p.Best) {
				prefix, hops = to, append(hops, h)
			}
		}
		if len(hops) > 0 {
			fn(prefix, hops)
		}
	})
}

func (e *gobgp) state(peer netip.Addr) fsm.State {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p, ok := e.peers[peer]; ok && !p.limited {
		return fsm.State(p.state)
	}
	return fsm.Idle
}

// snapshot returns what is judged by and who the peers are.
func (e *gobgp) snapshot() (*policy, map[netip.Addr]Peer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	peers := make(map[netip.Addr]Peer, len(e.peers))
	for a, p := range e.peers {
		peers[a] = p.Peer
	}
	return e.policy, peers
}

// newConverter returns a converter that needs no lock.
func (e *gobgp) newConverter() converter {
	policy, peers := e.snapshot()
	c := converter{policy: policy}
	c.peerOf = func(a netip.Addr) *Peer {
		if p, ok := peers[a]; ok {
			return &p
		}
		return nil
	}
	return c
}

// routes lists a table of GoBGP's.
func (e *gobgp) routes(_ context.Context, q Query, fn func([]Route)) error {
	_, peers := e.snapshot()
	for _, f := range families() {
		if q.Prefix.IsValid() && familyOf(q.Prefix.Addr()) != f {
			continue
		}
		r := apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: toPacket(f)}
		if q.Table != TableBest {
			r.Name = q.Peer.String()
			r.TableType = api.TableType_TABLE_TYPE_ADJ_IN
		}
		if q.Table == TableAdvertised {
			r.TableType = api.TableType_TABLE_TYPE_ADJ_OUT
		}
		if q.Prefix.IsValid() {
			how := apiutil.LOOKUP_LONGER
			if q.Exact {
				how = apiutil.LOOKUP_EXACT
			}
			r.Prefixes = []*apiutil.LookupPrefix{{Prefix: q.Prefix.String(), LookupOption: how}}
		}
		if err := e.srv.ListPath(r, func(_ packet.NLRI, paths []*apiutil.Path) { fn(routesOf(peers, paths, e.asn)) }); err != nil {
			if strings.Contains(err.Error(), "doesn't exist") {
				return fmt.Errorf("%s: %w", q.Peer, ErrNoPeer)
			}
			return fmt.Errorf("list %s routes: %w", f, err)
		}
	}
	return nil
}

// routesOf reads the paths of one prefix.
func routesOf(peers map[netip.Addr]Peer, paths []*apiutil.Path, asn uint32) []Route {
	var out []Route
	for _, p := range paths {
		from := peers[p.PeerAddress]
		if r, ok := readPath(p, &from, asn); ok {
			out = append(out, r)
		}
	}
	return out
}
