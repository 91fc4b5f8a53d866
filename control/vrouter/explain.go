package vrouter

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/nexthop"
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
// Reason cannot be used. It is to be called within a round, see [table.begin].
func (r *rib) candidates(p netip.Prefix, out []Candidate) []Candidate {
	route := dataplane.Route{Prefix: p, Table: dataplane.MainTable}
	poolName, inPool := r.poolTree.LookupPrefix(p)
	fam := dataplane.FamilyOf(p.Addr())
	inside, insideAddr, covers := r.covered(p, poolName)

	o, ok := r.origin(p)
	if ok {
		switch {
		case o.node == r.self:
			if c, ok := ownBlock(p, o, poolName); ok {
				if covers {
					c.Reason = errCovers(inside, insideAddr).Error()
				}
				out = append(out, c)
			}
		case !inPool:
			out = append(out, Candidate{
				Prefix: p, Source: SourceStore, Type: originType(o), Peer: o.node,
				Reason: "no pool contains it", route: route,
			})
		default:
			c := Candidate{
				Prefix: p, Source: SourceStore, Type: originType(o), Pool: poolName, Peer: o.node,
				route: route, hop: hopKey{pool: poolName, node: o.node, fam: fam},
			}
			if n, w := r.nodes[o.node], r.sender.forwardingPaths[c.hop]; n != nil {
				c.NextHop = n.Addr.Of(w.outer).Addr()
			}
			if covers {
				c.Reason = errCovers(inside, insideAddr).Error()
			} else {
				c.fill(r.complete(c.hop))
			}
			out = append(out, c)
		}
	}
	if announced, learned := r.paths[p]; learned {
		path, k := announced.Value(), learnedKey(p, announced)
		c := Candidate{
			Prefix: p, Source: SourceBGP, Type: "learned", Pool: poolName, Peer: path.Peer,
			NextHop: path.NextHop, route: route, hop: k, hops: path.Hops,
		}
		// A next hop that is a node of the cluster is reached as the pool of the
		// prefix asks for, so that both sides agree on the device; the direct
		// driver may have no path to it by itself, and then the underlay has.
		if n, ok := r.nodeAt(path.NextHop); ok && inPool && !covers && n != r.self {
			k := hopKey{pool: poolName, node: n, fam: fam}
			if w := r.sender.forwardingPaths[k]; w.encap.Driver != dataplane.DriverDirect || r.usable(k).err == nil {
				c.hop = k
			}
		}
		var usurped error
		if !ok {
			usurped = r.usurped(p, path)
		}
		if ok && o.node == r.self { // a local workload has it, or nobody
			c.Reason = "the prefix is this host's own"
		} else if usurped != nil {
			c.Reason = usurped.Error()
		} else if via := c.hop.hops.Single(); fam == dataplane.IPv6 && via.Is4() {
			c.Reason = fmt.Sprintf("next hop %s: %v", path.NextHop, errWrongFamily)
		} else if c.hop == k && (ok || covers) && inPool && r.tunnelled(poolName, o.node, fam) {
			c.Reason = errPlain(poolName).Error()
		} else if c.hop == k {
			l := r.byHop[k]
			if l.seen != r.round {
				l.seen, l.with = r.round, r.complete(k)
			}
			c.fill(l.with)
		} else {
			c.fill(r.complete(c.hop))
		}
		out = append(out, c)
	}
	return out
}

// usurped says why a path that BGP has for a prefix is not used: the prefix is a part
// of a block, and the path leads elsewhere than to the node that holds it. Who can
// announce anything at all would have another's workloads' packets otherwise, for the
// more specific prefix wins. The prefix must be no block and no borrowed address.
func (r *rib) usurped(p netip.Prefix, a nexthop.Announcement) error {
	block, holder, ok := r.holder(p)
	if !ok || a.Named > block.Bits() {
		return nil
	}
	for hop := range a.Hops.All() {
		if n, ok := r.nodeAt(hop); !ok || n != holder {
			return errPart(block, holder)
		}
	}
	return nil
}

// tunnelled reports whether packets of a pool go to a node in a tunnel: by the pool's
// mode or, where that depends on the node, by what was chosen for it.
func (r *rib) tunnelled(poolName, node string, fam dataplane.Family) bool {
	if e := r.pools[poolName].Encap; e == store.IPIP || e == store.VXLAN {
		return true
	}
	w := r.sender.forwardingPaths[hopKey{pool: poolName, node: node, fam: fam}]
	return w.encap.Driver == dataplane.DriverIPIP || w.encap.Driver == dataplane.DriverVXLAN
}

// ownBlock is the route that keeps packets for unused addresses of this host's
// own block from leaving by a less specific route. A block of one address
// needs none.
func ownBlock(p netip.Prefix, o origin, poolName string) (Candidate, bool) {
	if o.borrowed || p.IsSingleIP() {
		return Candidate{}, false
	}
	return Candidate{
		Prefix: p, Source: SourceLocal, Type: "blackhole", Pool: poolName, Peer: o.node,
		route: dataplane.Route{Prefix: p, Table: dataplane.MainTable, Type: dataplane.Blackhole},
	}, true
}

func originType(o origin) string {
	if o.borrowed {
		return "borrowed"
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

func (r *rib) complete(k hopKey) completed {
	pl := r.usable(k)
	if pl.err != nil {
		return completed{driver: pl.driver, reason: pl.err.Error()}
	}
	w := r.sender.forwardingPaths[k]
	return completed{driver: pl.driver, via: pl.hop.Gateway, link: pl.hop.Link, mtu: pl.mtu, encap: w.encap, delayed: w.reason}
}

func (c *Candidate) fill(w completed) {
	c.Driver, c.Reason, c.Via, c.Link, c.route.MTU, c.Encap, c.Delayed = w.driver, w.reason, w.via, w.link, w.mtu, w.encap, w.delayed
}

// explain lists the candidates of all prefixes that overlap filter, or of all
// if filter is not valid, in prefix order with the best first.
func (r *rib) explain(filter netip.Prefix) []Candidate {
	prefixes := set[netip.Prefix]{}
	for p := range r.claims {
		prefixes[p] = struct{}{}
	}
	for p := range r.paths {
		prefixes[p] = struct{}{}
	}
	r.begin()
	var out []Candidate
	for p := range prefixes {
		if filter.IsValid() && !filter.Overlaps(p) {
			continue
		}
		best := -1
		cs := r.candidates(p, nil)
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
		return cmp.Or(a.Prefix.Compare(b.Prefix), boolCompare(b.Best, a.Best))
	})
	return out
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
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

// PoolStatus says how a pool is carried and what keeps it from being so.
type PoolStatus struct {
	Name          string
	CIDR          netip.Prefix
	Encapsulation store.Encapsulation
	Mode          store.Mode
	Driver        dataplane.Driver
	Host          []dataplane.Key // what must be on this host to carry it: the device, its address
	Err           error           // why that is not known

	// Behind names the peers to which packets do not travel as the pool asks
	// for, with the reason; the first few, by name.
	Behind      []Delay
	BehindTotal int
}

// Delay says why packets to a node do not travel as a pool asks for.
type Delay struct {
	Node   string
	Encap  dataplane.Encap // in which they travel; zero: not at all
	Reason string
}

// maxDelays bounds how many peers a status names.
const maxDelays = 5

func (t *table) poolStatus() []PoolStatus {
	var out []PoolStatus
	for _, p := range t.pools {
		m := t.modeOf(p)
		st := PoolStatus{Name: p.Name, CIDR: p.CIDR, Encapsulation: p.Encap, Mode: m, Driver: driverFor(p.Encap), BehindTotal: t.behind[p.Name]}
		encaps := t.encapsOf(m, familyOf(p))
		for _, f := range encaps {
			st.Host = append(st.Host, t.deviceKeys[f]...)
			if err := t.deviceErrs[f]; err != nil {
				st.Err = fmt.Errorf("pool %s (%s): %w", p.Name, p.Encap, err)
			}
		}
		if len(encaps) == 0 && len(t.hosts) > 0 {
			_, err := driverFor(p.Encap).Host(t.hostFor(familyOf(p), t.outers(familyOf(p))[0], m.VNI, m.Port))
			st.Err = fmt.Errorf("pool %s (%s): %w", p.Name, p.Encap, cmp.Or(err, dataplane.ErrNoPath))
		}
		st.Behind = t.delays(p)
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b PoolStatus) int { return cmp.Compare(a.Name, b.Name) })
	return out
}
