package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/bgp/inject"
)

// ErrRefused says that a prefix may not be injected.
var ErrRefused = errors.New("refused")

// InjectOptions are the limits of what other programs on the host may have it announce.
type InjectOptions struct {
	Allow     []netip.Prefix // what lies in these; empty: whatever is not refused below
	MaxRoutes int            // of an owner, or of a peer on the loopback; 0: none may
	File      string         // keeps the routes over a restart of the daemon
}

// injection is what a [View] has of it.
type injection struct {
	allow  []netip.Prefix
	limit  int
	routes []inject.Entry
}

// inject adds what others on the host have it announce, as far as they may.
func (d *derivation) inject(c *Config) {
	c.InjectAllow, c.NodesAt = d.v.injection.allow, d.v.index().at
	if len(d.v.injection.routes) == 0 {
		return
	}
	c.Injected = map[netip.Prefix]Injected{}
	known := make(map[netip.Prefix]bool, len(c.Announce))
	for _, p := range c.Announce {
		known[p] = true
	}
	tags := map[netip.Prefix]string{}
	for _, e := range d.v.injection.routes {
		p := e.Prefix
		if known[p] || c.refusesInjection(p) != "" {
			continue
		}
		c.Injected[p] = Injected{Owner: e.Owner, NextHop: e.NextHop, LocalPref: e.LocalPref}
		c.Announce = append(c.Announce, p)
		tags[p] = strings.Join(e.Communities, " ")
	}
	slices.SortFunc(c.Announce, comparePrefixes)
	for p, own := range d.tags(c.Announce) {
		tags[p] = strings.TrimSpace(tags[p] + " " + own)
	}
	c.Tags = tags
}

// refusesInjection says why a prefix may not be injected on this host; empty: it may. What has an owner in the cluster is
// refused unless an entry of bgp.inject.allow that is as narrow names it.
func (c *Config) refusesInjection(p netip.Prefix) string {
	within := func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) }
	switch {
	case inAny(martianRanges(), p):
		return verdict{why: whyMartian}.reason()
	case p.Bits() == 0 && !slices.Contains(c.InjectAllow, p):
		return "the default route: it is accepted only if bgp.inject.allow lists exactly it"
	case len(c.InjectAllow) > 0 && !slices.ContainsFunc(c.InjectAllow, within):
		return "outside bgp.inject.allow"
	}
	if names := c.NodesAt[p.Addr()]; p.IsSingleIP() && len(names) > 0 {
		return "the address of node " + names[0]
	}
	for _, pool := range c.Pools {
		named := func(q netip.Prefix) bool { return within(q) && q.Bits() >= pool.Bits() }
		if within(pool) && !slices.ContainsFunc(c.InjectAllow, named) {
			return fmt.Sprintf("inside the pool %s, whose addresses IPAM assigns: it is accepted only if bgp.inject.allow lists a part of the pool", pool)
		}
	}
	return ""
}

// loopbackOf is where this host listens for a peer on the loopback.
func loopbackOf(peer netip.Addr) netip.Addr {
	if peer.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// asLocal fills in what follows from the peer being a program on this host: its routes are announced as this node's own, to iBGP
// peers too, for which BGP has clients of a reflector (RFC 4456). Where it would have this node's port this node has it, so it
// is the peer that connects.
func (d *derivation) asLocal(p *Peer) {
	if !p.Addr.IsLoopback() {
		return
	}
	p.Local, p.PoolsOnly, p.Source = true, false, netip.Addr{}
	p.Passive = p.Port == d.v.portOf(d.node)
	if p.MaxPrefixes == 0 {
		p.MaxPrefixes = uint32(d.v.injection.limit)
	}
	if p.ibgp(d.asn) {
		p.ClusterID = routerID(d.node, d.self)
	}
}

// InjectedRoute is a route that a program on the host injected.
type InjectedRoute struct {
	inject.Entry
	Refused string // why it is not announced; empty: it is
}

// Inject has an owner's routes announced as [inject.Table.Put] keeps them.
func (c *Controller) Inject(owner string, l inject.Lease, routes []inject.Route, all bool) error {
	if err := c.mayInject(routes); err != nil {
		return err
	}
	return c.injected.Put(owner, l, routes, all)
}

// OpenInjection begins a stream of an owner; see [inject.Table.Open].
func (c *Controller) OpenInjection(owner string, grace time.Duration) (*Injection, error) {
	s, err := c.injected.Open(owner, grace)
	if err != nil {
		return nil, err
	}
	return &Injection{s, c}, nil
}

// Injection is an owner that is there until it is closed.
type Injection struct {
	*inject.Stream
	c *Controller
}

// Put is [Controller.Inject] for as long as the stream is open.
func (i *Injection) Put(routes []inject.Route, all bool) error {
	if err := i.c.mayInject(routes); err != nil {
		return err
	}
	return i.Stream.Put(routes, all)
}

// WithdrawInjected takes routes of an owner back, all if none is named, and says how many there were.
func (c *Controller) WithdrawInjected(owner string, prefixes []netip.Prefix) (int, error) {
	return c.injected.Withdraw(owner, prefixes)
}

// Injected returns what programs on the host injected.
func (c *Controller) Injected() []InjectedRoute {
	c.mu.Lock()
	cfg, err := c.memo.desired(&c.view, c.opts.Node)
	c.mu.Unlock()
	var out []InjectedRoute
	for _, e := range c.injected.List() {
		r := InjectedRoute{Entry: e}
		switch _, announced := cfg.Injected[e.Prefix]; {
		case err != nil:
			r.Refused = err.Error()
		case !announced && cfg.Drain != "":
			r.Refused = "this host is drained"
		case !announced:
			if r.Refused = cfg.refusesInjection(e.Prefix); r.Refused == "" {
				r.Refused = "this host announces the prefix itself"
			}
		}
		out = append(out, r)
	}
	return out
}

// mayInject says what of an owner's routes may not be injected.
func (c *Controller) mayInject(routes []inject.Route) error {
	if c.opts.Inject.MaxRoutes == 0 {
		return fmt.Errorf("%w: no routes may be injected on this host (bgp.inject.maxRoutes is 0)", ErrRefused)
	}
	c.mu.Lock()
	cfg, err := c.memo.desired(&c.view, c.opts.Node)
	c.mu.Unlock()
	if err != nil { // judged again when the datastore has been read
		cfg = Config{InjectAllow: c.opts.Inject.Allow}
	}
	for _, r := range routes {
		p := r.Prefix
		if !p.IsValid() {
			continue // the table says so
		}
		if why := cfg.refusesInjection(p); why != "" {
			return fmt.Errorf("%w: prefix %s: %s", ErrRefused, p, why)
		}
		for _, text := range r.Communities {
			if _, err := parseCommunity(text); err != nil {
				return fmt.Errorf("%w: community of %s: %w", inject.ErrInvalid, p, err)
			}
		}
	}
	return nil
}
