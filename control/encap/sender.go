package encap

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Path is how a pool's packets go to a node, and how they are to.
type Path struct {
	Outer  dataplane.Family // of the underlay
	Wanted dataplane.Encap  // by the pool
	decision
	Err error // why there is none
}

// PathTo returns how a pool's packets go to a node; the zero value: it is not known.
func (s *sender) PathTo(k Key) Path { return s.paths[k] }

// settled reports whether packets go as the pool asks.
func (w Path) settled() bool {
	return w.Err != nil && w.Wanted == (dataplane.Encap{}) || w.Encap == w.Wanted
}

// sender is how packets go to each node.
type sender struct {
	*receiver
	delivery map[dataplane.Family]map[string]map[dataplane.Encap]dataplane.Delivery // what was measured, by node
	probing  map[dataplane.Family]bool                                              // there is a prober
	paths    map[Key]Path
	lost     map[string]int                                              // by pool, paths that stay as they were because probes get lost
	prepared map[Key][]dataplane.Object                                  // what an encapsulation that is to come needs
	learned  func(netip.Addr) (gateway netip.Addr, link string, ok bool) // by BGP; nil: not known

	// The nodes for which what is to be measured may have changed; all: for every one.
	retarget    set[string]
	retargetAll bool

	// To be planned anew: with what changed of a node, and of this host, which is
	// rare.
	touched   set[string]
	replanAll bool
}

func newSender(r *receiver) *sender {
	return &sender{
		receiver: r, delivery: map[dataplane.Family]map[string]map[dataplane.Encap]dataplane.Delivery{}, probing: map[dataplane.Family]bool{},
		paths: map[Key]Path{}, lost: map[string]int{}, prepared: map[Key][]dataplane.Object{}, touched: set[string]{}, retarget: set[string]{},
	}
}

// poolView is a pool with what the paths to all nodes have in common. It holds until what
// the planner knows of this host changes.
type poolView struct {
	*cluster.Pool
	mode  store.Mode
	moved []store.Mode // which this host has moved the pool to

	ready    dataplane.Encap // the last one that was asked for
	sendable bool            // this host can send it, and has published that
}

func (s *sender) view(p *cluster.Pool) *poolView {
	v := &poolView{Pool: p, mode: s.pools.Mode(p)}
	if s.nodes.Own() != nil {
		v.moved = s.movedTo(p.Name)
	}
	return v
}

// simple reports whether nothing stands between a node and the encapsulation that it is to
// be sent: no other one is left, and both ends are ready for it. That is what a
// [choice] comes to for nearly all nodes.
func (s *sender) simple(v *poolView, n *cluster.Node, wanted dataplane.Encap) bool {
	if slices.ContainsFunc(v.moved, func(m store.Mode) bool { return m != v.mode }) {
		return false
	}
	if wanted != v.ready {
		v.ready, v.sendable = wanted, s.mayUse(wanted) && s.canSend(wanted, v.Family()) == nil
	}
	return v.sendable && canAccept(n.Encaps, wanted)
}

// planPath applies the sender's rule to a pool and a node. It is a pure
// function of what the planner knows.
func (s *sender) planPath(p *poolView, n *cluster.Node) Path {
	inner := p.Family()
	outer, ok := outerFor(inner, s.hasHost, func(f dataplane.Family) bool { return n.Addr.Of(f).IsValid() })
	if !ok {
		return Path{Err: s.missingAddr(inner, n)}
	}
	w := Path{Outer: outer}
	var err error
	if w.Wanted, err = s.encapOf(p.mode, inner, outer, n); err != nil {
		w.Err = err
		return w
	}
	if s.simple(p, n, w.Wanted) {
		w.Target, w.Encap = w.Wanted, w.Wanted
		return w
	}
	w.decision = s.choose(p, n, w)
	if w.Encap == (dataplane.Encap{}) {
		w.Err = fmt.Errorf("%s to node %s: %w: %w", w.Target, n.Name, errNotPublished, dataplane.ErrIncomplete)
	}
	return w
}

// choose chooses in which encapsulation a pool's packets go to a node.
func (s *sender) choose(p *poolView, n *cluster.Node, w Path) decision {
	inner, outer := p.Family(), w.Outer
	c := choice{
		peer: n.Name, wanted: w.Wanted, mayUse: s.mayUse,
		accepts: func(f dataplane.Encap) bool { return canAccept(n.Encaps, f) },
		can:     func(f dataplane.Encap) error { return s.canSend(f, inner) },
		refusal: func(f dataplane.Encap) string { return n.Encaps.Refuse[f] },
		probing: s.probing[outer],
		verdict: func(f dataplane.Encap) (dataplane.Delivery, bool) {
			v, ok := s.delivery[outer][n.Name][f]
			return v, ok
		},
	}
	c.moved = s.movedEncaps(p, n, outer)
	c.forced = p.Forced
	if w.Wanted.Driver == dataplane.DriverDirect {
		_, c.plain = s.plainProbe(Key{p.Name, n.Name, inner}, outer, c.moved)
	}
	c.others = func() []dataplane.Encap {
		return s.fallbacks(Key{p.Name, n.Name, inner}, n, outer)
	}
	return c.decide()
}

// movedEncaps lists the encapsulations of the modes that this host has moved a pool to,
// as they are towards a node, the newest first.
func (s *sender) movedEncaps(p *poolView, n *cluster.Node, outer dataplane.Family) []dataplane.Encap {
	var out []dataplane.Encap
	for _, m := range p.moved {
		if f, err := s.encapOf(m, p.Family(), outer, n); err == nil {
			out = append(out, f)
		}
	}
	return out
}

// fallbacks lists what else a node accepts whether or not this host sends it,
// what pools ask for and what the node itself sends, as far as this host has a
// path to it; and the tunnels in which this host sends already. They are all that there
// is while a cluster starts and its settings change: a host has moved to no mode yet.
func (s *sender) fallbacks(k Key, n *cluster.Node, outer dataplane.Family) []dataplane.Encap {
	if len(n.Encaps.Accepted) == 0 {
		return nil
	}
	modes := set[store.Mode]{}
	for _, p := range s.pools.ByName {
		modes[s.pools.Mode(p)] = struct{}{}
	}
	for _, m := range n.Encaps.Send {
		modes[m] = struct{}{}
	}
	var out []dataplane.Encap
	for _, f := range n.Encaps.Accepted {
		meant := f.Driver != dataplane.DriverDirect && s.published() && s.mayUse(f)
		for m := range modes {
			meant = meant || slices.Contains(m.Encaps(), f.String())
		}
		if meant && s.hasPath(f, k, outer) {
			out = append(out, f)
		}
	}
	return out
}

// hasPath reports whether an encapsulation can carry packets to a node by itself.
func (s *sender) hasPath(f dataplane.Encap, k Key, outer dataplane.Family) bool {
	if f.Outer != 0 && f.Outer != outer {
		return false
	}
	_, err := driverOf(f).Peer(s.pathEnds(k, outer, f, 0))
	return err == nil
}

// errLarger says why an encapsulation waits for the workloads.
var errLarger = errors.New("workloads on this host still send packets larger than it takes")

// canSend says why this host cannot send in an encapsulation.
func (s *sender) canSend(f dataplane.Encap, inner dataplane.Family) error {
	if !s.accepts(f) {
		if err := s.kernel[f].Err; err != nil {
			return err
		}
		return errors.New("its device is not ready yet")
	}
	if !s.published() {
		return nil
	}
	if pods := s.podMTU[inner]; pods > 0 && f.Driver != dataplane.DriverDirect && pods > s.encapMTU(f) {
		if _, using := s.nodes.Own().Encaps.Use[f]; !using {
			return fmt.Errorf("%w: %d bytes, and %s takes %d", errLarger, pods, f, s.encapMTU(f))
		}
	}
	return nil
}

// replan applies the sender's rule anew to every node that is marked, and returns
// those whose next hops and routes are to follow.
func (s *sender) replan() set[string] {
	follow := s.touched
	s.touched = set[string]{}
	names := maps.Keys(follow)
	if s.replanAll {
		names = maps.Keys(s.nodes.ByName)
		s.retargetAll = true
	} else {
		maps.Copy(s.retarget, follow)
	}
	s.replanAll = false
	pools := make([]*poolView, 0, len(s.pools.ByName))
	for _, p := range s.pools.ByName {
		pools = append(pools, s.view(p))
	}
	for name := range names {
		for _, p := range pools {
			if s.rechoosePool(p, name) {
				follow[name] = struct{}{}
			}
		}
	}
	return follow
}

func (s *sender) rechoosePool(p *poolView, name string) bool {
	k := Key{p.Name, name, p.Family()}
	n := s.nodes.ByName[name]
	if n == nil || name == s.nodes.Self || s.nodes.Own() == nil {
		return s.dropPath(k)
	}
	old, had := s.paths[k]
	now := s.planPath(p, n)
	s.prepare(k, now)
	if had && old.equal(now) {
		return false
	}
	s.count(k, now, 1)
	if had {
		s.count(k, old, -1)
	}
	s.paths[k] = now
	return true
}

func (w Path) equal(o Path) bool {
	return w.Outer == o.Outer && w.Wanted == o.Wanted && w.decision == o.decision && sameError(w.Err, o.Err)
}

func sameError(a, b error) bool {
	return (a == nil) == (b == nil) && (a == nil || a.Error() == b.Error())
}

func (s *sender) dropPath(k Key) bool {
	w, ok := s.paths[k]
	if !ok {
		return false
	}
	s.count(k, w, -1)
	s.retarget[k.Node] = struct{}{}
	delete(s.paths, k)
	s.unprepare(k)
	return true
}

// count keeps the numbers of forwarding paths: by encapsulation, and by pool those
// that are not what the pool asks for.
func (s *sender) count(k Key, w Path, n int) {
	for _, f := range []dataplane.Encap{w.Target, w.Encap} {
		if f != (dataplane.Encap{}) && tally(s.sending, f, n) {
			s.devicesDirty = true
		}
	}
	if w.Lost {
		tally(s.lost, k.Pool, n)
	}
	if !w.settled() {
		tally(s.behind, k.Pool, n)
	}
}

// prepare desires what an encapsulation that is to come needs apart from the next
// hop, so that probes can go through it.
func (s *sender) prepare(k Key, w Path) {
	old := s.prepared[k]
	if len(old) == 0 && w.Wanted == w.Encap {
		return // the usual case
	}
	delete(s.prepared, k)
	if w.Wanted != w.Encap && w.Wanted.Driver == dataplane.DriverVXLAN && s.accepts(w.Wanted) {
		objs, err := driverOf(w.Wanted).Peer(s.pathEnds(k, w.Outer, w.Wanted, 0))
		if err == nil {
			for _, o := range objs {
				if _, ok := o.(dataplane.NextHop); !ok {
					s.objects.Acquire(o)
					s.prepared[k] = append(s.prepared[k], o)
				}
			}
		}
	}
	for _, o := range old {
		s.objects.Release(o)
	}
}

func (s *sender) unprepare(k Key) {
	for _, o := range s.prepared[k] {
		s.objects.Release(o)
	}
	delete(s.prepared, k)
}

// Plan asks the driver how a node is reached for the prefixes of a pool. It
// is a pure function of what the planner knows.
func (s *sender) Plan(k Key, id dataplane.NextHopID) Plan {
	w, ok := s.paths[k]
	if !ok {
		return Plan{Err: fmt.Errorf("node %s: %w", k.Node, dataplane.ErrIncomplete)}
	}
	if w.Err != nil {
		return Plan{Driver: w.Target.Driver, Err: w.Err}
	}
	h, p := s.pathEnds(k, w.Outer, w.Encap, id)
	pl := planWith(driverOf(w.Encap), h, p)
	if pl.Err != nil && w.Encap.Driver == dataplane.DriverVXLAN {
		if refused := s.vteps.refuses(s.nodes.ByName[k.Node], k.Family, w.Outer); refused != nil {
			pl.Err = refused
		}
	}
	pl.MTU = s.pathMTU(k, w)
	return pl
}

// pathMTU is what the path to a node leaves for workloads where that was
// measured to be less than the device takes, in bytes; 0: what the device
// takes. Both the underlay and the tunnel itself are measured; the less counts.
func (s *sender) pathMTU(k Key, w Path) uint32 {
	mtu := s.reach[w.Outer][k.Node].MTU - driverOf(w.Encap).Overhead(w.Outer)
	if inside := s.delivery[w.Outer][k.Node][w.Encap].MTU; topology.SaneMTU(inside) && (inside < mtu || !topology.SaneMTU(mtu)) {
		mtu = inside
	}
	if !topology.SaneMTU(mtu) || mtu >= s.encapMTU(w.Encap) {
		return 0
	}
	return uint32(mtu)
}

// dropNode forgets the forwarding paths to a node.
func (s *sender) dropNode(name string) {
	for _, p := range s.pools.ByName {
		s.dropPath(Key{p.Name, name, p.Family()})
	}
}

// dropPool forgets the forwarding paths of a pool.
func (s *sender) dropPool(name string) {
	for k := range s.paths {
		if k.Pool == name {
			s.dropPath(k)
		}
	}
}
