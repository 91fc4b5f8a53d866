package vrouter

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// The sources of candidates, best first.
const (
	SourceLocal = "local" // this host's own blocks
	SourceStore = "store" // what the store knows of other nodes' blocks
	SourceBGP   = "bgp"   // what peers announced
)

// Candidate is one way to reach a prefix, with what speaks against it.
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
	Reason  string // why it cannot be used, or lost; for the best one why it is there
	Form    dataplane.Form
	Delayed string // why packets do not travel as the pool asks for; empty: they do

	route dataplane.Route
	hop   hopKey
	set   HopSet
}

// candidates appends every way to reach p to out, best first. A candidate with a
// Reason cannot be used. It is to be called within a round, see [table.begin].
func (t *table) candidates(p netip.Prefix, out []Candidate) []Candidate {
	route := dataplane.Route{Prefix: p, Table: dataplane.MainTable}
	poolName, inPool := t.poolTree.LookupPrefix(p)
	fam := dataplane.FamilyOf(p.Addr())
	inside, insideAddr, covers := t.nodeWithin(p)

	o, ok := t.origins[p]
	if ok {
		switch {
		case o.node == t.self:
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
			if n, w := t.nodes[o.node], t.ways[c.hop]; n != nil {
				c.NextHop = n.addr[w.outer].Addr()
			}
			if covers {
				c.Reason = errCovers(inside, insideAddr).Error()
			} else {
				c.fill(t.complete(c.hop))
			}
			out = append(out, c)
		}
	}
	if path := t.paths[p]; path != nil {
		c := Candidate{
			Prefix: p, Source: SourceBGP, Type: "learned", Pool: poolName, Peer: path.peer,
			NextHop: path.nextHop, route: route, hop: path.hop, set: path.set,
		}
		// A next hop that is a node of the cluster is reached as the pool of the
		// prefix asks for, so that both sides agree on the device; the direct
		// driver may have no path to it by itself, and then the underlay has.
		if n, ok := t.nodeAt(path.nextHop); ok && inPool && !covers && n != t.self {
			k := hopKey{pool: poolName, node: n, fam: fam}
			if w := t.ways[k]; w.form.Driver != dataplane.DriverDirect || t.usable(k).err == nil {
				c.hop = k
			}
		}
		if ok && o.node == t.self { // a local workload has it, or nobody
			c.Reason = "the prefix is this host's own"
		} else if fam == dataplane.IPv6 && c.hop.via.Is4() {
			c.Reason = fmt.Sprintf("next hop %s: %v", path.nextHop, errWrongFamily)
		} else if c.hop == path.hop {
			if path.seen != t.round {
				path.seen, path.with = t.round, t.complete(c.hop)
			}
			c.fill(path.with)
		} else {
			c.fill(t.complete(c.hop))
		}
		out = append(out, c)
	}
	return out
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
	form                          dataplane.Form
}

func (t *table) complete(k hopKey) completed {
	pl := t.usable(k)
	if pl.err != nil {
		return completed{driver: pl.driver, reason: pl.err.Error()}
	}
	w := t.ways[k]
	return completed{driver: pl.driver, via: pl.hop.Gateway, link: pl.hop.Link, mtu: pl.mtu, form: w.form, delayed: w.reason}
}

func (c *Candidate) fill(w completed) {
	c.Driver, c.Reason, c.Via, c.Link, c.route.MTU, c.Form, c.Delayed = w.driver, w.reason, w.via, w.link, w.mtu, w.form, w.delayed
}

// explain lists the candidates of all prefixes that overlap filter, or of all
// if filter is not valid, in prefix order with the best first.
func (t *table) explain(filter netip.Prefix) []Candidate {
	prefixes := set[netip.Prefix]{}
	for p := range t.origins {
		prefixes[p] = struct{}{}
	}
	for p := range t.paths {
		prefixes[p] = struct{}{}
	}
	t.begin()
	var out []Candidate
	for p := range prefixes {
		if filter.IsValid() && !filter.Overlaps(p) {
			continue
		}
		best := -1
		cs := t.candidates(p, nil)
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
		s += fmt.Sprintf("; it goes in %s because %s", c.Form, c.Delayed)
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
	if c.set != "" && c.hop.set != "" {
		return fmt.Sprintf("announced by %s and others of equal cost with next hops %s", c.Peer, strings.ReplaceAll(string(c.set), " ", ", "))
	}
	return fmt.Sprintf("announced by %s with next hop %s", c.Peer, c.NextHop)
}

// PoolStatus says how a pool is carried and what stands in the way.
type PoolStatus struct {
	Name          string
	CIDR          netip.Prefix
	Encapsulation store.Encapsulation
	Mode          store.Mode
	Driver        dataplane.Driver
	Host          []dataplane.Key // what must be on this host to carry it: the device, its address
	Err           error           // why that cannot be told

	// Behind names the peers to which packets do not travel as the pool asks
	// for, with the reason; the first few, by name.
	Behind      []Delay
	BehindTotal int
}

// Delay says why packets to a node do not travel as a pool asks for.
type Delay struct {
	Node   string
	Form   dataplane.Form // in which they travel; the zero form: not at all
	Reason string
}

// maxDelays bounds how many peers a status names.
const maxDelays = 5

func (t *table) poolStatus() []PoolStatus {
	var out []PoolStatus
	for _, p := range t.pools {
		m := t.modeOf(p)
		st := PoolStatus{Name: p.name, CIDR: p.cidr, Encapsulation: p.encap, Mode: m, Driver: driverFor(p.encap), BehindTotal: t.behind[p.name]}
		forms := t.formsOf(m, p.family())
		for _, f := range forms {
			st.Host = append(st.Host, t.formKeys[f]...)
			if err := t.formErrs[f]; err != nil {
				st.Err = fmt.Errorf("pool %s (%s): %w", p.name, p.encap, err)
			}
		}
		if len(forms) == 0 && len(t.hosts) > 0 {
			_, err := driverFor(p.encap).Host(t.hostFor(p.family(), t.outers(p.family())[0], m.VNI, m.Port))
			st.Err = fmt.Errorf("pool %s (%s): %w", p.name, p.encap, cmp.Or(err, dataplane.ErrNoPath))
		}
		st.Behind = t.delays(p)
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b PoolStatus) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func (t *table) delays(p pool) []Delay {
	if t.behind[p.name] == 0 {
		return nil
	}
	var out []Delay
	for _, name := range slices.Sorted(maps.Keys(t.nodes)) {
		w, ok := t.ways[hopKey{pool: p.name, node: name, fam: p.family()}]
		if !ok || w.settled() {
			continue
		}
		reason := w.reason
		if reason == "" && w.err != nil {
			reason = w.err.Error()
		}
		if out = append(out, Delay{name, w.form, reason}); len(out) == maxDelays {
			break
		}
	}
	return out
}
