package vrouter

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// forwardingPath is how a pool's packets go to a node, and how they are to.
type forwardingPath struct {
	outer  dataplane.Family
	wanted dataplane.Encap
	decision
	err error // why there is none
}

// settled reports whether packets go as the pool asks.
func (w forwardingPath) settled() bool {
	return w.err != nil && w.wanted == (dataplane.Encap{}) || w.encap == w.wanted
}

// sender is how packets go to each node.
type sender struct {
	*receiver
	delivery        map[dataplane.Family]map[string]map[dataplane.Encap]dataplane.Delivery // what was measured, by node
	probing         map[dataplane.Family]bool                                              // there is somebody who probes
	forwardingPaths map[hopKey]forwardingPath
	prepared        map[hopKey][]dataplane.Object // what an encapsulation that is to come needs
	retarget        set[string]                   // nodes for which what is to be measured may have changed

	// To be planned anew: with what changed of a node, and of this host, which is
	// rare.
	touched   set[string]
	replanAll bool
}

func newSender(r *receiver) *sender {
	return &sender{
		receiver: r, delivery: map[dataplane.Family]map[string]map[dataplane.Encap]dataplane.Delivery{}, probing: map[dataplane.Family]bool{},
		forwardingPaths: map[hopKey]forwardingPath{}, prepared: map[hopKey][]dataplane.Object{}, touched: set[string]{}, retarget: set[string]{},
	}
}

// planPath applies the sender's rule to a pool and a node. It is a pure
// function of the table's inputs.
func (s *sender) planPath(p *cluster.Pool, n *cluster.Node) forwardingPath {
	inner := familyOf(p)
	outer, ok := outerFor(inner, s.hasHost, func(f dataplane.Family) bool { return n.Addr.Of(f).IsValid() })
	if !ok {
		return forwardingPath{err: s.missingAddr(inner, n)}
	}
	w := forwardingPath{outer: outer}
	var err error
	if w.wanted, err = s.encapOf(s.modeOf(p), inner, outer, n); err != nil {
		w.err = err
		return w
	}
	c := choice{
		peer: n.Name, wanted: w.wanted, mayUse: s.mayUse,
		accepts: func(f dataplane.Encap) bool { return canAccept(n.Encaps, f) },
		can:     func(f dataplane.Encap) error { return s.canSend(f, inner) },
		refusal: func(f dataplane.Encap) string { return n.Encaps.Refuse[f] },
		probing: s.probing[outer],
		verdict: func(f dataplane.Encap) (dataplane.Delivery, bool) {
			v, ok := s.delivery[outer][n.Name][f]
			return v, ok
		},
	}
	for _, m := range s.movedTo(p.Name) {
		if f, err := s.encapOf(m, inner, outer, n); err == nil {
			c.moved = append(c.moved, f)
		}
	}
	c.others = func() []dataplane.Encap {
		return s.fallbacks(hopKey{pool: p.Name, node: n.Name, fam: inner}, n, outer)
	}
	w.decision = c.decide()
	if w.encap == (dataplane.Encap{}) {
		w.err = fmt.Errorf("%s to node %s: %w: %w", w.target, n.Name, errNotPublished, dataplane.ErrIncomplete)
	}
	return w
}

// fallbacks lists what else a node accepts whether or not this host sends it,
// what pools ask for and what the node itself sends, as far as this host has a
// path to it.
func (s *sender) fallbacks(k hopKey, n *cluster.Node, outer dataplane.Family) []dataplane.Encap {
	if len(n.Encaps.Accepted) == 0 {
		return nil
	}
	modes := set[store.Mode]{}
	for _, p := range s.pools {
		modes[s.modeOf(p)] = struct{}{}
	}
	for _, m := range n.Encaps.Send {
		modes[m] = struct{}{}
	}
	var out []dataplane.Encap
	for _, f := range n.Encaps.Accepted {
		for m := range modes {
			if slices.Contains(m.Encaps(), f.String()) && s.hasPath(f, k, outer) {
				out = append(out, f)
				break
			}
		}
	}
	return out
}

// hasPath reports whether an encapsulation can carry packets to a node by itself.
func (s *sender) hasPath(f dataplane.Encap, k hopKey, outer dataplane.Family) bool {
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
		if err := s.kernel[f].err; err != nil {
			return err
		}
		return errors.New("its device is not ready yet")
	}
	if !s.published() {
		return nil
	}
	if pods := s.podMTU[inner]; pods > 0 && f.Driver != dataplane.DriverDirect && pods > s.encapMTU(f) {
		if _, using := s.nodes[s.self].Encaps.Use[f]; !using {
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
		names = maps.Keys(s.nodes)
	}
	s.replanAll = false
	for name := range names {
		for _, p := range s.pools {
			if s.rechoosePool(p, name) {
				follow[name] = struct{}{}
			}
		}
	}
	return follow
}

func (s *sender) rechoosePool(p *cluster.Pool, name string) bool {
	k := hopKey{pool: p.Name, node: name, fam: familyOf(p)}
	n := s.nodes[name]
	s.retarget[name] = struct{}{}
	if n == nil || name == s.self || s.nodes[s.self] == nil {
		return s.dropPath(k)
	}
	old, had := s.forwardingPaths[k]
	now := s.planPath(p, n)
	s.prepare(k, now)
	if had && old.equal(now) {
		return false
	}
	s.count(k, now, 1)
	if had {
		s.count(k, old, -1)
	}
	s.forwardingPaths[k] = now
	return true
}

func (w forwardingPath) equal(o forwardingPath) bool {
	return w.outer == o.outer && w.wanted == o.wanted && w.decision == o.decision && sameError(w.err, o.err)
}

func sameError(a, b error) bool {
	return (a == nil) == (b == nil) && (a == nil || a.Error() == b.Error())
}

func (s *sender) dropPath(k hopKey) bool {
	w, ok := s.forwardingPaths[k]
	if !ok {
		return false
	}
	s.count(k, w, -1)
	s.retarget[k.node] = struct{}{}
	delete(s.forwardingPaths, k)
	s.unprepare(k)
	return true
}

// count keeps the numbers of forwarding paths: by encapsulation, and by pool those
// that are not what the pool asks for.
func (s *sender) count(k hopKey, w forwardingPath, n int) {
	for _, f := range []dataplane.Encap{w.target, w.encap} {
		if f != (dataplane.Encap{}) && tally(s.sending, f, n) {
			s.devicesDirty = true
		}
	}
	if !w.settled() {
		tally(s.behind, k.pool, n)
	}
}

// prepare desires what an encapsulation that is to come needs apart from the next
// hop, so that probes can go through it.
func (s *sender) prepare(k hopKey, w forwardingPath) {
	old := s.prepared[k]
	if len(old) == 0 && w.wanted == w.encap {
		return // the usual case
	}
	delete(s.prepared, k)
	if w.wanted != w.encap && w.wanted.Driver == dataplane.DriverVXLAN && s.accepts(w.wanted) {
		objs, err := driverOf(w.wanted).Peer(s.pathEnds(k, w.outer, w.wanted, 0))
		if err == nil {
			for _, o := range objs {
				if _, ok := o.(dataplane.NextHop); !ok {
					s.acquire(o)
					s.prepared[k] = append(s.prepared[k], o)
				}
			}
		}
	}
	for _, o := range old {
		s.release(o)
	}
}

func (s *sender) unprepare(k hopKey) {
	for _, o := range s.prepared[k] {
		s.release(o)
	}
	delete(s.prepared, k)
}

// planNode asks the driver how a node is reached for the prefixes of a pool. It
// is a pure function of the parts' inputs.
func (s *sender) planNode(k hopKey, id dataplane.NextHopID) plan {
	w, ok := s.forwardingPaths[k]
	if !ok {
		return plan{err: fmt.Errorf("node %s: %w", k.node, dataplane.ErrIncomplete)}
	}
	if w.err != nil {
		return plan{driver: w.target.Driver, err: w.err}
	}
	h, p := s.pathEnds(k, w.outer, w.encap, id)
	pl := planWith(driverOf(w.encap), h, p)
	if pl.err != nil && w.encap.Driver == dataplane.DriverVXLAN {
		if refused := s.vteps.refuses(s.nodes[k.node], k.fam, w.outer); refused != nil {
			pl.err = refused
		}
	}
	pl.mtu = s.pathMTU(k, w)
	return pl
}

// pathMTU is what the path to a node leaves for workloads where that was
// measured to be less than the device takes, in bytes; 0: what the device
// takes. Both the underlay and the tunnel itself are measured; the less counts.
func (s *sender) pathMTU(k hopKey, w forwardingPath) uint32 {
	mtu := s.reach[w.outer][k.node].MTU - driverOf(w.encap).Overhead(w.outer)
	if inside := s.delivery[w.outer][k.node][w.encap].MTU; saneMTU(inside) && (inside < mtu || !saneMTU(mtu)) {
		mtu = inside
	}
	if !saneMTU(mtu) || mtu >= s.encapMTU(w.encap) {
		return 0
	}
	return uint32(mtu)
}

// dropNode forgets the forwarding paths to a node.
func (s *sender) dropNode(name string) {
	for _, p := range s.pools {
		s.dropPath(hopKey{pool: p.Name, node: name, fam: familyOf(p)})
	}
}

// dropPool forgets the forwarding paths of a pool.
func (s *sender) dropPool(name string) {
	for k := range s.forwardingPaths {
		if k.pool == name {
			s.dropPath(k)
		}
	}
}

func (s *sender) delays(p *cluster.Pool) []Delay {
	if s.behind[p.Name] == 0 {
		return nil
	}
	var out []Delay
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		w, ok := s.forwardingPaths[hopKey{pool: p.Name, node: name, fam: familyOf(p)}]
		if !ok || w.settled() {
			continue
		}
		reason := w.reason
		if reason == "" && w.err != nil {
			reason = w.err.Error()
		}
		if out = append(out, Delay{name, w.encap, reason}); len(out) == maxDelays {
			break
		}
	}
	return out
}
