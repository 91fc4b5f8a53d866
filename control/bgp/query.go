package bgp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/engine/attrs"
)

// Table names one of the tables that [Speaker.Query] reads.
type Table uint8

// The tables.
const (
	TableBest       Table = iota // what is originated here, and every path that was let in
	TableReceived                // what a peer sent, before import judged it
	TableAdvertised              // what was advertised to a peer
)

// States of a [Route].
const (
	RouteBest       = "best"
	RouteLost       = "lost"
	RouteAccepted   = "accepted" // of a peer's received routes
	RouteFiltered   = "filtered"
	RouteAdvertised = "advertised"
	RouteWithheld   = "withheld" // not advertised to a peer
)

// Query selects routes.
type Query struct {
	Table  Table
	Peer   netip.Addr   // of the two tables of a peer
	Prefix netip.Prefix // this one and what lies inside; invalid: all
	Exact  bool         // this one alone
}

// Route is one path of a table, for people.
type Route struct {
	Prefix netip.Prefix
	Hop
	Own         bool   // originated here
	Owner       string // of what was injected, or "Service namespace/name"; empty: the node itself
	Origin      string // IGP, EGP, incomplete
	Communities []string
	State       string
	Reason      string // why it has this state; empty: nothing is special
	Since       time.Time

	path       []uint32 // AS path
	length     int      // of the AS path, where a set of ASes counts one
	origin     uint8
	originator netip.Addr   // ORIGINATOR_ID (RFC 4456)
	clusters   []netip.Addr // CLUSTER_LIST
	leaving    bool         // it is about to go (GRACEFUL_SHUTDOWN, RFC 8326)
	equal      bool         // of the table's paths: as good as the best
}

// ErrNoPeer says that a query names a peer that has no session.
var ErrNoPeer = errors.New("no session with this peer is configured")

// PeerName is the address by which a [Route] names a peer, with its port where peers differ by it.
func PeerName(id netip.Addr) string { return engine.Name(id) }

// Query calls yield for the routes of a table, in the order of their prefixes,
// until it returns false. Listing 100,000 routes takes 0.5 s.
func (s *Speaker) Query(ctx context.Context, q Query, yield func(Route) bool) error {
	e, policy, peers := s.snapshot()
	if e == nil {
		return nil
	}
	var out []Route
	err := e.routes(ctx, q, func(routes []Route) {
		if ctx.Err() == nil {
			policy.states(q, peers, routes)
			out = append(out, routes...)
		}
	})
	if err != nil {
		return err
	}
	slices.SortStableFunc(out, func(a, b Route) int { return a.Prefix.Compare(b.Prefix) })
	for _, r := range out {
		if !yield(r) {
			break
		}
	}
	return ctx.Err()
}

// snapshot returns the backend, what it judges by, and what its peers are.
func (s *Speaker) snapshot() (*backend, *policy, map[netip.Addr]Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	peers := map[netip.Addr]Peer{}
	for a, ss := range s.sessions {
		peers[a] = ss.peer
	}
	return s.engine, s.policy, peers
}

// states says of the routes of one prefix what they are, and why.
func (p *policy) states(q Query, peers map[netip.Addr]Peer, routes []Route) {
	for i := range routes {
		r := &routes[i]
		switch q.Table {
		case TableBest:
			switch {
			case i == 0:
				r.State = RouteBest
			case r.equal:
				r.State, r.Reason = RouteBest, "as good as the first"
			default:
				r.State, r.Reason = RouteLost, lostTo(routes[0], *r)
			}
		case TableReceived:
			accepted, reason := p.judgeImport(peers[q.Peer], r.judged())
			r.State, r.Reason = RouteFiltered, reason
			if accepted {
				r.State = RouteAccepted
			}
		case TableAdvertised:
			r.State = RouteAdvertised
		}
	}
}

func (r Route) judged() *judged {
	return &judged{
		prefix: r.Prefix, nextHop: r.NextHop, localPref: r.LocalPref, own: r.Own, local: engine.Remote(r.PeerAddr).IsLoopback(), ibgp: r.IBGP, leaving: r.leaving, originator: r.originator, attributes: r,
	}
}

// CountAS returns how often an AS is in the path.
func (r Route) CountAS(as uint32) (n int) {
	for _, x := range r.path {
		if x == as {
			n++
		}
	}
	return n
}

// BeginsWith reports whether the AS path begins with a list.
func (r Route) BeginsWith(list []uint32) bool {
	return len(r.path) >= len(list) && slices.Equal(r.path[:len(list)], list)
}

// HasCommunity reports whether a community of RFC 1997 is among the route's.
func (r Route) HasCommunity(c uint32) bool {
	return slices.Contains(r.Communities, textOf(c>>16, c&0xffff))
}

// HasLarge reports whether a community of RFC 8092 is among the route's.
func (r Route) HasLarge(c attrs.Large) bool {
	return slices.Contains(r.Communities, textOf(c[:]...))
}

// lostTo says which step of the choice (RFC 4271 section 9.1.2.2, RFC 9494
// section 4.3) decided between a best path and another one.
func lostTo(best, r Route) string {
	pref := func(r Route) uint32 {
		if r.LocalPref == 0 {
			return 100
		}
		return r.LocalPref
	}
	switch {
	case r.LongLived && !best.LongLived:
		return "its peer has not come back within its restart time: any other path is better"
	case r.leaving && !r.IBGP && !best.leaving:
		return "its peer is about to shut down (GRACEFUL_SHUTDOWN, RFC 8326)"
	case pref(best) != pref(r):
		return fmt.Sprintf("local preference %d is less than %d", pref(r), pref(best))
	case best.Own && !r.Own:
		return "this node originates the prefix itself"
	case best.length != r.length:
		return fmt.Sprintf("the AS path has %d ASes, the best one has %d", r.length, best.length)
	case best.origin != r.origin:
		return fmt.Sprintf("origin %s is worse than %s", r.Origin, best.Origin)
	case best.MED != r.MED && sameNeighbourAS(best, r):
		return fmt.Sprintf("MED %d is more than %d", r.MED, best.MED)
	case !best.IBGP && r.IBGP:
		return "an eBGP path is preferred to an iBGP path"
	}
	return fmt.Sprintf("all else equal: the path of %s has the lower router id or ORIGINATOR_ID, the shorter CLUSTER_LIST, or the lower address", engine.Name(best.PeerAddr))
}

// sameNeighbourAS reports whether two paths came from the same neighbouring AS, so
// that their MEDs can be compared; those without an AS began in the own one.
func sameNeighbourAS(a, b Route) bool {
	if len(a.path) == 0 || len(b.path) == 0 {
		return len(a.path) == len(b.path)
	}
	return a.path[0] == b.path[0]
}

// Explain returns all that is known of a prefix: every path with why it won or
// lost, what peers sent that import refused, and for each peer why it is advertised
// of the prefix or not.
func (s *Speaker) Explain(ctx context.Context, prefix netip.Prefix) ([]Route, error) {
	e, policy, peers := s.snapshot()
	if e == nil {
		return nil, nil
	}
	var out []Route
	collect := func(q Query) error {
		return s.Query(ctx, q, func(r Route) bool { out = append(out, r); return true })
	}
	if err := collect(Query{Table: TableBest, Prefix: prefix, Exact: true}); err != nil {
		return nil, err
	}
	var best *Route
	if len(out) > 0 {
		first := out[0]
		best = &first
	}
	order := make([]netip.Addr, 0, len(peers))
	for a := range peers {
		order = append(order, a)
	}
	slices.SortFunc(order, netip.Addr.Compare)
	for _, a := range order {
		q := Query{Table: TableReceived, Peer: a, Prefix: prefix, Exact: true}
		err := s.Query(ctx, q, func(r Route) bool {
			if r.State == RouteFiltered {
				out = append(out, r)
			}
			return true
		})
		if err != nil && !errors.Is(err, ErrNoPeer) {
			return nil, err
		}
		if best == nil {
			continue
		}
		to, err := s.advertisedTo(ctx, policy, peers[a], *best)
		if err != nil && !errors.Is(err, ErrNoPeer) {
			return nil, err
		}
		if err == nil {
			out = append(out, to)
		}
	}
	return out, nil
}

// advertisedTo says whether a prefix was advertised to a peer, and why not.
func (s *Speaker) advertisedTo(ctx context.Context, policy *policy, p Peer, best Route) (Route, error) {
	out := Route{Prefix: best.Prefix, State: RouteWithheld, Hop: Hop{Peer: p.Name, PeerAddr: p.id()}}
	found := false
	err := s.Query(ctx, Query{Table: TableAdvertised, Peer: p.id(), Prefix: best.Prefix, Exact: true}, func(r Route) bool {
		peer, addr := out.Peer, out.PeerAddr
		out, found = r, true
		out.Peer, out.PeerAddr = peer, addr
		return false
	})
	if err != nil {
		return Route{}, err
	}
	accepted, reason := policy.judgeExport(p, best.judged())
	out.Reason = reason
	switch {
	case found:
	case !p.carriesOf(best.Prefix):
		out.Reason = fmt.Sprintf("the session does not carry %s", familyName(familyOf(best.Prefix.Addr())))
	case best.PeerAddr == p.id():
		out.Reason = "the best path came from this peer"
	case accepted && p.ClusterID.IsValid() && slices.Contains(best.clusters, p.ClusterID):
		out.Reason = fmt.Sprintf("its cluster list holds this node's cluster id, %s", p.ClusterID)
	case accepted:
		out.Reason = cmp.Or(s.silent(p.id()), "BGP's own rules keep it from this peer: the AS path holds the peer's AS, it is iBGP to iBGP, or its attributes do not fit into a message that the peer takes (4096 bytes; 65535 by RFC 8654)")
	}
	return out, nil
}

// silent says that a session is not up.
func (s *Speaker) silent(a netip.Addr) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss, ok := s.sessions[a]; ok && !ss.up {
		return "the session is not up"
	}
	return ""
}

// Query lists routes as [Speaker.Query] does.
func (c *Controller) Query(ctx context.Context, q Query, yield func(Route) bool) error {
	return c.speaker.Query(ctx, q, yield)
}

// Explain explains a prefix as [Speaker.Explain] does.
func (c *Controller) Explain(ctx context.Context, prefix netip.Prefix) ([]Route, error) {
	return c.speaker.Explain(ctx, prefix)
}
