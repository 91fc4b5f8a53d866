package rib

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// The sources of candidates, best first.
const (
	SourceLocal = "local" // this host's own blocks
	SourceStore = "store" // what the store knows of other nodes' blocks
	SourceBGP   = "bgp"   // what peers announced
)

// Candidate is a source's offer for a prefix, with what speaks against it.
type Candidate struct {
	Prefix  netip.Prefix
	Best    bool
	Source  string     // SourceLocal, SourceStore or SourceBGP
	Type    string     // blackhole, block, borrowed or learned
	Driver  string     // empty for local ones
	Pool    string     // empty outside the pools
	Peer    string     // the node, or the BGP peer
	NextHop netip.Addr // before resolution: the node's address, or as announced
	Via     netip.Addr // gateway in the kernel
	Link    string
	Reason  string // why it cannot be used, or another is better; for the best one why it is there
	Encap   dataplane.Encap
	Delayed string // why packets do not travel as the pool asks for; empty: they do

	route dataplane.Route
	hop   hopKey
	hops  nexthop.Set // what BGP named
}

// candidates appends every candidate for p to out, best first. A candidate with a
// Reason cannot be used. It is to be called within a round, see [RIB.begin].
func (r *RIB) candidates(p netip.Prefix, path uint32, out []Candidate) []Candidate {
	first := len(out)
	route := dataplane.Route{Prefix: p, Table: dataplane.MainTable}
	poolName, inPool := r.pools.Of(p)
	fam := dataplane.FamilyOf(p.Addr())
	inside, insideAddr, covers := r.covered(p, poolName)
	o, ok := r.blocks.Origin(p)
	if ok {
		switch {
		case o.Node == r.nodes.Self && (inPool || !o.PodCIDR):
			if c, ok := ownBlock(p, o, poolName); ok {
				if covers {
					c.Reason = errCovers(inside, insideAddr).Error()
				} else if a, ok := r.bridged(p); ok {
					c.Reason = errBridged(a).Error()
				}
				out = append(out, c)
			}
		case !inPool:
			out = append(out, Candidate{
				Prefix: p, Source: SourceStore, Type: originType(o), Peer: o.Node,
				Reason: "no pool contains it", route: route,
			})
		default:
			c := Candidate{
				Prefix: p, Source: SourceStore, Type: originType(o), Pool: poolName, Peer: o.Node,
				route: route, hop: hopKey{Key: encap.Key{Pool: poolName, Node: o.Node, Family: fam}},
			}
			if n, w := r.nodes.ByName[o.Node], r.planner.PathTo(c.hop.Key); n != nil {
				c.NextHop = n.Addr.Of(w.Outer).Addr()
			}
			if covers {
				c.Reason = errCovers(inside, insideAddr).Error()
			} else {
				c.fill(r.complete(c.hop))
			}
			if c.Reason == "" {
				c.Reason = r.unready(p, o.Node, c.Encap)
			}
			out = append(out, c)
		}
	}
	if path != 0 {
		says := r.said.Value(path)
		path, k := says.Value(), says.by.key
		c := Candidate{
			Prefix: p, Source: SourceBGP, Type: "learned", Pool: poolName, Peer: path.Peer,
			NextHop: path.NextHop, route: route, hop: k, hops: path.Hops,
		}
		// A next hop that is a node of the cluster is reached as the pool of the
		// prefix asks for, so that both sides agree on the device; the direct
		// driver may have no path to it by itself, and then the underlay has.
		if n, ok := r.nodes.At(path.NextHop); ok && inPool && !covers && n != r.nodes.Self {
			k := hopKey{Key: encap.Key{Pool: poolName, Node: n, Family: fam}}
			if w := r.planner.PathTo(k.Key); w.Encap.Driver != dataplane.DriverDirect || r.usable(k).Err == nil {
				c.hop = k
			}
		}
		var usurped error
		if !ok {
			usurped = r.usurped(p, path)
		}
		if ok && o.Node == r.nodes.Self { // a local workload has it, or none
			c.Reason = "the prefix is this host's own"
		} else if usurped != nil {
			c.Reason = usurped.Error()
		} else if wrongFamily(fam, c.hop) {
			c.Reason = fmt.Sprintf("next hop %s: %v", path.NextHop, errWrongFamily)
		} else if c.hop == k && (ok || covers) && inPool && r.tunnelled(poolName, o.Node, fam) {
			c.Reason = errPlain(poolName).Error()
		} else if c.hop == k {
			c.fill(*r.completed(says.by))
		} else {
			c.fill(r.complete(c.hop))
		}
		out = append(out, c)
		if r.preferLearned && out[first].Source == SourceStore {
			slices.Reverse(out[first:])
		}
	}
	return out
}

// otherPods are the addresses by which another network of pods is on this host.
func (r *RIB) otherPods() []dataplane.UnderlayAddress {
	return r.network.OtherPods(r.blocks.PodCIDRs(r.nodes.Self))
}

// bridged finds a bridge behind which pods of another network have addresses of a prefix of
// this host's own: the kernel's route to it is in the place of ours, which would drop what
// is for them.
func (r *RIB) bridged(p netip.Prefix) (dataplane.UnderlayAddress, bool) {
	for _, a := range r.otherPods() {
		if !a.Prefix.IsSingleIP() && a.Prefix.Overlaps(p) {
			return a, true
		}
	}
	return dataplane.UnderlayAddress{}, false
}

// unready says why what is a node's by its pod CIDRs is left to the route that another
// network has there: the node has not said that it accepts what would be sent. Its
// address is known before its devices are ready, and pods run on it.
func (r *RIB) unready(p netip.Prefix, node string, e dataplane.Encap) string {
	delete(r.waiting, p)
	if len(r.blocks.PodCIDRs(node)) == 0 {
		return ""
	}
	pool, ok := r.pools.Of(p)
	u, routed := r.network.RouteTo(p.Addr())
	if !ok || !routed || u.Prefix.Bits() > p.Bits() || u.Prefix.Bits() <= r.pools.ByName[pool].CIDR.Bits() {
		return ""
	}
	if n := r.nodes.ByName[node]; n != nil && n.Encaps.Published {
		if _, accepts := n.Encaps.Accept[e]; accepts {
			return ""
		}
	}
	r.waiting[p] = struct{}{}
	return errUnready(node, u).Error()
}

// usurped says why a path that BGP has for a prefix is not used: the prefix is a part
// of a block, and the path leads elsewhere than to the node that holds it. Who can
// announce anything at all would have another's workloads' packets otherwise, for the
// more specific prefix wins. The prefix must be no block and no borrowed address.
func (r *RIB) usurped(p netip.Prefix, a nexthop.Announcement) error {
	block, holder, ok := r.blocks.Holder(p)
	if !ok || a.Named > block.Bits() {
		return nil
	}
	for hop := range a.Hops.All() {
		if n, ok := r.nodes.At(hop); !ok || n != holder {
			return errPart(block, holder)
		}
	}
	return nil
}

// tunnelled reports whether packets of a pool go to a node in a tunnel: by the pool's
// mode or, where that depends on the node, by what was chosen for it.
func (r *RIB) tunnelled(poolName, node string, fam dataplane.Family) bool {
	if e := r.pools.ByName[poolName].Encap; e == store.IPIP || e == store.VXLAN {
		return true
	}
	w := r.planner.PathTo(encap.Key{Pool: poolName, Node: node, Family: fam})
	return w.Encap.Driver == dataplane.DriverIPIP || w.Encap.Driver == dataplane.DriverVXLAN
}

// ownBlock is the route that keeps packets for unused addresses of this host's
// own block from leaving by a less specific route. A block of one address
// needs none.
func ownBlock(p netip.Prefix, o topology.Origin, poolName string) (Candidate, bool) {
	if o.Borrowed || p.IsSingleIP() {
		return Candidate{}, false
	}
	return Candidate{
		Prefix: p, Source: SourceLocal, Type: "blackhole", Pool: poolName, Peer: o.Node,
		route: dataplane.Route{Prefix: p, Table: dataplane.MainTable, Type: dataplane.Blackhole},
	}, true
}

func originType(o topology.Origin) string {
	switch {
	case o.Borrowed:
		return "borrowed"
	case o.PodCIDR:
		return "podCIDR"
	}
	return "block"
}

// completed is what a driver makes of a next hop.
type completed struct {
	driver, reason, link, delayed string
	via                           netip.Addr
	mtu                           uint32
	encap                         dataplane.Encap
}

// completed is [RIB.complete] of next hops that BGP names, once a round. It is to be
// read.
func (r *RIB) completed(by *learned) *completed {
	if by.seen != r.round {
		by.seen, by.with = r.round, r.complete(by.key)
	}
	return &by.with
}

// wrongFamily reports whether packets of a family cannot be sent to a single next hop.
func wrongFamily(f dataplane.Family, k hopKey) bool {
	return f == dataplane.IPv6 && k.hops.Single().Is4()
}

func (r *RIB) complete(k hopKey) completed {
	pl := r.usable(k)
	if pl.Err != nil {
		return completed{driver: pl.Driver, reason: pl.Err.Error()}
	}
	w := r.planner.PathTo(k.Key)
	return completed{driver: pl.Driver, via: pl.Hop.Gateway, link: pl.Hop.Link, mtu: pl.MTU, encap: w.Encap, delayed: w.Reason}
}

func (c *Candidate) fill(w completed) {
	c.Driver, c.Reason, c.Via, c.Link, c.route.MTU, c.Encap, c.Delayed = w.driver, w.reason, w.via, w.link, w.mtu, w.encap, w.delayed
}

// Explain lists the candidates of all prefixes that overlap filter, or of all
// if filter is not valid, in prefix order with the best first.
func (r *RIB) Explain(filter netip.Prefix) []Candidate {
	paths := map[netip.Prefix]uint32{}
	for p := range r.blocks.Prefixes() {
		paths[p] = 0
	}
	for _, rec := range r.prefixes.All() {
		if p := rec.prefix(); rec.path != 0 {
			paths[p] = rec.path
		}
	}
	r.begin()
	var out []Candidate
	for p, path := range paths {
		if filter.IsValid() && !filter.Overlaps(p) {
			continue
		}
		best := -1
		cs := r.candidates(p, path, nil)
		for i := range cs {
			c := &cs[i]
			switch {
			case c.Reason != "":
			case best < 0:
				best, c.Best, c.Reason = i, true, because(*c)
			default:
				c.Reason = fmt.Sprintf("%s is preferred to %s", cs[best].Source, c.Source)
			}
		}
		out = append(out, cs...)
	}
	slices.SortStableFunc(out, func(a, b Candidate) int {
		if by := a.Prefix.Compare(b.Prefix); by != 0 || a.Best == b.Best {
			return by
		}
		if a.Best {
			return -1
		}
		return 1
	})
	return out
}

// because says in a sentence why a chosen candidate is there.
func because(c Candidate) string {
	s := whyChosen(c)
	if c.Delayed != "" {
		s += fmt.Sprintf("; it goes in %s because %s", c.Encap, c.Delayed)
	}
	return s
}

func whyChosen(c Candidate) string {
	switch c.Type {
	case "blackhole":
		return "own block: addresses that no workload has are dropped here"
	case "block":
		return fmt.Sprintf("block of node %s in pool %s", c.Peer, c.Pool)
	case "borrowed":
		return fmt.Sprintf("address that node %s borrowed from another node's block", c.Peer)
	}
	if c.hop.group() {
		return fmt.Sprintf("announced by %s and others of equal cost with next hops %s", c.Peer, c.hops.Join(", "))
	}
	return fmt.Sprintf("announced by %s with next hop %s", c.Peer, c.NextHop)
}
