package vrouter

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Difference is one object that the kernel is to have after a change and not before, or
// the reverse, or as another.
type Difference struct {
	Key       dataplane.Key
	Was, Will string // as ip(8) shows it, routes with their next hops; empty: it is not there
}

// Foreseen is what a change does to this host.
type Foreseen struct {
	Objects   []Difference // of the kernel
	Was, Will store.NodeEncaps
}

// Ahead says what becomes of the cluster when a change has been carried out everywhere.
type Ahead struct {
	Changes []*cluster.Change
	// Learned says which of BGP's paths are left; nil: all.
	Learned func(rib.Path) bool
	// Hosts begins what hosts make of nodes, and of the blocks that they hold, by the pools that there are then. It
	// is asked for each node, in the order of their names; a block without a holder is given up. Nil: nothing.
	Hosts func(pools []*cluster.Pool) func(*cluster.Node) (*cluster.Node, []*cluster.Block)
}

// Plan says what a change of the cluster would do to what the core wants the kernel to
// have, and to what it publishes, once all hosts have followed it. Two tables like the core's own compute that, so
// what it decides by is all that is looked at.
//
// Of the way there nothing is shown: each node counts as one that follows its pools at
// once, so that nothing is left of encapsulations that peers accept or send for the time of a
// change. Where a kernel refuses an encapsulation, or probes get lost in it, peers stay in the old
// one all the same.
func (c *Core) Plan(ctx context.Context, a Ahead) (Foreseen, error) {
	facts, err := ask(ctx, c, func(l *loop) *facts { return l.facts() })
	if err != nil {
		return Foreseen{}, err
	}
	t := facts.table()
	if err := t.encap.Ready(); err != nil {
		return Foreseen{}, err
	}
	return facts.plan(t, a), nil
}

// plan brings a table of these facts to where a change leads.
func (f *facts) plan(t *table, a Ahead) Foreseen {
	before := shown(t.desired())
	t.foresee(a, f.paths.Update())
	out := Foreseen{Objects: differences(before, shown(t.desired()))}
	if own := f.nodes[f.self]; own != nil && own.Encaps.Published {
		out.Was, out.Will = own.Encaps.NodeEncaps, t.encap.Foreseen()
	}
	return out
}

// facts is what a table decides by.
type facts struct {
	self     string
	nodes    map[string]*cluster.Node
	pools    map[string]*cluster.Pool
	blocks   []*cluster.Block
	felix    map[string]*v3.FelixConfigurationSpec
	underlay *dataplane.Underlay
	paths    rib.State
	measured encap.Measured

	usePodCIDR bool
}

func (t *table) facts() *facts {
	return &facts{
		self: t.nodes.Self, nodes: maps.Clone(t.nodes.ByName), pools: maps.Clone(t.pools.ByName), blocks: t.blocks.List(), felix: maps.Clone(t.pools.Felix()),
		underlay: t.network.Underlay, paths: t.rib.State(), measured: t.encap.Measured(),
		usePodCIDR: t.pods.on,
	}
}

// table makes another table of the same facts, but for how far a change of
// encapsulations is.
func (f *facts) table() *table {
	t := newTable(f.self)
	t.pods.on = f.usePodCIDR
	if f.underlay != nil {
		t.setUnderlay(*f.underlay)
	}
	for name, spec := range f.felix {
		t.pools.SetFelix(f.self, name, &v3.FelixConfiguration{Spec: *spec})
	}
	for name, p := range f.pools {
		t.setPool(name, p)
	}
	for name, n := range f.nodes {
		t.setNode(name, following(n))
	}
	for _, b := range f.blocks {
		t.setBlock(b.CIDR, b)
	}
	t.encap.Foresee(f.measured)
	t.rib.SetPaths(f.paths.Update())
	t.settle()
	return t
}

// following is a node that follows its pools at once.
func following(n *cluster.Node) *cluster.Node {
	out := *n
	out.Encaps = cluster.NewEncaps(store.NodeEncaps{})
	return &out
}

// foresee brings a table to where a change leads.
func (t *table) foresee(a Ahead, paths rib.Update) {
	// A VXLAN network that comes gets a device beside those that go: they are both there
	// for a while.
	if own := t.nodes.Own(); own != nil {
		held := *own
		accepts := store.NodeEncaps{Published: true}
		for f := range t.encap.Devices() {
			accepts.Accepts = append(accepts.Accepts, f.String())
		}
		held.Encaps = cluster.NewEncaps(accepts)
		t.encap.Published(held.Encaps)
		t.setNode(own.Name, &held)
	}
	for _, ch := range a.Changes {
		if n, ok := ch.Value.(*cluster.Node); ok && n.Name == t.nodes.Self {
			continue // below
		} else if ok {
			t.setNode(n.Name, following(n))
			continue
		}
		t.apply(ch)
	}
	t.settle()
	for _, ch := range a.Changes {
		if n, ok := ch.Value.(*cluster.Node); ok && n.Name == t.nodes.Self {
			t.setNode(n.Name, n)
		}
	}
	paths.Put = t.followHosts(a, paths.Put)
	if a.Learned != nil {
		var gone []netip.Prefix
		for _, p := range paths.Put {
			if !a.Learned(p) {
				gone = append(gone, p.Prefix)
			}
		}
		t.rib.SetPaths(rib.Update{Del: gone})
	}
	t.settle()
}

// followHosts has nodes and blocks be what their hosts make of them. It returns BGP's paths with those to blocks that come.
func (t *table) followHosts(a Ahead, paths []rib.Path) []rib.Path {
	host := func(n *cluster.Node) (*cluster.Node, []*cluster.Block) { return n, nil }
	if a.Hosts != nil {
		host = a.Hosts(slices.SortedFunc(maps.Values(t.pools.ByName), func(a, b *cluster.Pool) int { return strings.Compare(a.Name, b.Name) }))
	}
	known := t.announcedBlocks(paths)
	for _, name := range slices.Sorted(maps.Keys(t.nodes.ByName)) {
		n, blocks := host(t.nodes.ByName[name])
		heard := t.heard(known, blocks)
		t.rib.SetPaths(heard)
		paths = append(slices.Clip(paths), heard.Put...)
		for _, b := range blocks {
			if b.Holder == "" {
				t.setBlock(b.CIDR, nil)
				continue
			}
			t.setBlock(b.CIDR, b)
		}
		t.setNode(name, following(n))
	}
	return paths
}

// via is from whom a node's blocks of a family are known by BGP.
type via struct {
	node   string
	family dataplane.Family
}

// announcedBlocks says how BGP tells of the blocks of nodes.
func (t *table) announcedBlocks(paths []rib.Path) map[via]rib.Path {
	out := map[via]rib.Path{}
	for _, p := range paths {
		is, ok := t.blocks.Origin(p.Prefix)
		key := via{is.Node, dataplane.FamilyOf(p.Prefix.Addr())}
		if first, has := out[key]; ok && !is.Borrowed && (!has || p.Prefix.Compare(first.Prefix) < 0) {
			out[key] = p
		}
	}
	return out
}

// heard is what BGP tells of a node's blocks that come, as it tells of others of the node, and of those that it gives up.
// What filters make of a single prefix is not looked at.
func (t *table) heard(known map[via]rib.Path, blocks []*cluster.Block) rib.Update {
	var u rib.Update
	for _, b := range blocks {
		if b.Holder == "" {
			u.Del = append(u.Del, b.CIDR)
			continue
		}
		p, ok := known[via{b.Holder, dataplane.FamilyOf(b.CIDR.Addr())}]
		pool, _ := t.pools.Of(b.CIDR)
		if of := t.pools.ByName[pool]; ok && (of == nil || !of.Hidden) {
			u.Put = append(u.Put, rib.Path{Prefix: b.CIDR, Announced: p.Announced})
		}
	}
	return u
}

// shown is objects as people read them. Next hops are shown with their routes.
func shown(all []dataplane.Object) map[dataplane.Key]string {
	hops := map[dataplane.NextHopID]string{}
	for _, o := range all {
		if h, ok := o.(dataplane.NextHop); ok {
			hops[h.ID] = fmt.Sprintf("via %s dev %s", h.Gateway, h.Link)
		}
	}
	for _, o := range all {
		if g, ok := o.(dataplane.NextHopGroup); ok {
			var of []string
			for m := range g.Members.All() {
				of = append(of, hops[m.ID])
			}
			slices.Sort(of)
			hops[g.ID] = strings.Join(of, ", ")
		}
	}
	out := make(map[dataplane.Key]string, len(all))
	for _, o := range all {
		switch o := o.(type) {
		case dataplane.NextHop, dataplane.NextHopGroup:
		case dataplane.Route:
			hop := o.NextHop
			o.NextHop = 0
			s := o.String()
			if hop != 0 {
				s = strings.Replace(s, o.Prefix.String(), o.Prefix.String()+" "+hops[hop], 1)
			}
			out[o.Key()] = s
		default:
			out[o.Key()] = o.String()
		}
	}
	return out
}

// differences compares what there is before a change with what there is after, in the
// order of the keys.
func differences(before, after map[dataplane.Key]string) []Difference {
	var out []Difference
	for k, was := range before {
		will, stays := after[k]
		switch {
		case stays && was == will:
		case !stays && (k.Kind() == dataplane.KindSysctl || k.Kind() == dataplane.KindFeature): // they stay as they are
		default:
			out = append(out, Difference{k, was, will})
		}
	}
	for k, will := range after {
		if _, had := before[k]; !had {
			out = append(out, Difference{Key: k, Will: will})
		}
	}
	slices.SortFunc(out, func(a, b Difference) int { return dataplane.CompareKeys(a.Key, b.Key) })
	return out
}
