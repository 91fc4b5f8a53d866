package vrouter

import (
	"errors"
	"fmt"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// way is how packets of a pool go to a node, and how they are to.
type way struct {
	outer  dataplane.Family
	wanted dataplane.Form
	decision
	err error // why there is none
}

// settled reports whether the way is what the pool asks for.
func (w way) settled() bool {
	return w.err != nil && w.wanted == (dataplane.Form{}) || w.form == w.wanted
}

// planWay applies the sender's rule to a pool and a node. It is a pure
// function of the table's inputs.
func (t *table) planWay(p pool, n *node) way {
	inner := p.family()
	outer, ok := outerFor(inner, t.hasHost, func(f dataplane.Family) bool { return n.addr[f].IsValid() })
	if !ok {
		return way{err: t.missingAddr(inner, n)}
	}
	w := way{outer: outer}
	var err error
	if w.wanted, err = t.formOf(t.modeOf(p), inner, outer, n); err != nil {
		w.err = err
		return w
	}
	c := choice{
		peer: n.name, wanted: w.wanted, may: t.may,
		accepts: func(f dataplane.Form) bool { return n.forms.takesIn(f) },
		can:     func(f dataplane.Form) error { return t.canSend(f, inner) },
		refusal: func(f dataplane.Form) string { return n.forms.refuses[f] },
		probing: t.probing[outer],
		verdict: func(f dataplane.Form) (dataplane.Delivery, bool) {
			v, ok := t.delivery[outer][n.name][f]
			return v, ok
		},
	}
	for _, m := range t.movedTo(p.name) {
		if f, err := t.formOf(m, inner, outer, n); err == nil {
			c.moved = append(c.moved, f)
		}
	}
	c.others = func() []dataplane.Form {
		return t.fallbacks(hopKey{pool: p.name, node: n.name, fam: inner}, n, outer)
	}
	w.decision = c.decide()
	if w.form == (dataplane.Form{}) {
		w.err = fmt.Errorf("%s to node %s: %w: %w", w.target, n.name, errNotPublished, dataplane.ErrIncomplete)
	}
	return w
}

// movedTo lists the modes that this host has moved a pool to, the newest first:
// what is being published, and what is.
func (t *table) movedTo(pool string) []store.Mode {
	var out []store.Mode
	if t.inflight != nil {
		if m, ok := t.inflight.sends[pool]; ok {
			out = append(out, m)
		}
	}
	if m, ok := t.nodes[t.self].forms.sends[pool]; ok && !slices.Contains(out, m) {
		out = append(out, m)
	}
	return out
}

// fallbacks lists what else a node takes in whether or not this host sends it,
// what pools ask for and what the node itself sends, as far as this host has a
// path to it.
func (t *table) fallbacks(k hopKey, n *node, outer dataplane.Family) []dataplane.Form {
	if len(n.forms.sorted) == 0 {
		return nil
	}
	modes := set[store.Mode]{}
	for _, p := range t.pools {
		modes[t.modeOf(p)] = struct{}{}
	}
	for _, m := range n.forms.sends {
		modes[m] = struct{}{}
	}
	var out []dataplane.Form
	for _, f := range n.forms.sorted {
		for m := range modes {
			if slices.Contains(m.Forms(), f.String()) && t.hasPath(f, k, outer) {
				out = append(out, f)
				break
			}
		}
	}
	return out
}

// hasPath reports whether a form can carry packets to a node by itself.
func (t *table) hasPath(f dataplane.Form, k hopKey, outer dataplane.Family) bool {
	if f.Outer != 0 && f.Outer != outer {
		return false
	}
	_, err := driverOf(f).Peer(t.wayEnds(k, outer, f, 0))
	return err == nil
}

// errLarger says why a form waits for the workloads.
var errLarger = errors.New("workloads on this host still send packets larger than it takes")

// canSend says why this host cannot send in a form.
func (t *table) canSend(f dataplane.Form, inner dataplane.Family) error {
	if !t.takesIn(f) {
		if err := t.kernel[f].err; err != nil {
			return err
		}
		return errors.New("its device is not ready yet")
	}
	if !t.published() {
		return nil
	}
	if pods := t.podMTU[inner]; pods > 0 && f.Driver != dataplane.DriverDirect && pods > t.formMTU(f) {
		if _, using := t.nodes[t.self].forms.uses[f]; !using {
			return fmt.Errorf("%w: %d bytes, and %s takes %d", errLarger, pods, f, t.formMTU(f))
		}
	}
	return nil
}

func (t *table) missingAddr(inner dataplane.Family, n *node) error {
	switch {
	case len(t.hosts) == 0:
		return fmt.Errorf("%s address of this host: %w", inner, dataplane.ErrIncomplete)
	case len(n.addr) == 0:
		return fmt.Errorf("%s address of node %s: %w", inner, n.name, dataplane.ErrIncomplete)
	}
	return errNoFamily(inner, n.name)
}

// rechoose applies the sender's rule anew to a node, for every pool, and
// reports whether anything came out different.
func (t *table) rechoose(name string) bool {
	changed := false
	for _, p := range t.pools {
		if t.rechoosePool(p, name) {
			changed = true
		}
	}
	return changed
}

func (t *table) rechoosePool(p pool, name string) bool {
	k := hopKey{pool: p.name, node: name, fam: p.family()}
	n := t.nodes[name]
	t.retarget[name] = struct{}{}
	if n == nil || name == t.self || t.nodes[t.self] == nil {
		return t.dropWay(k)
	}
	old, had := t.ways[k]
	now := t.planWay(p, n)
	t.prepare(k, now)
	if had && old.equal(now) {
		return false
	}
	t.count(k, now, 1)
	if had {
		t.count(k, old, -1)
	}
	t.ways[k] = now
	return true
}

func (w way) equal(o way) bool {
	return w.outer == o.outer && w.wanted == o.wanted && w.decision == o.decision && sameError(w.err, o.err)
}

func sameError(a, b error) bool {
	return (a == nil) == (b == nil) && (a == nil || a.Error() == b.Error())
}

func (t *table) dropWay(k hopKey) bool {
	w, ok := t.ways[k]
	if !ok {
		return false
	}
	t.count(k, w, -1)
	t.retarget[k.node] = struct{}{}
	delete(t.ways, k)
	t.unprepare(k)
	return true
}

// count keeps the numbers of ways: by form, and by pool those that are not
// what the pool asks for.
func (t *table) count(k hopKey, w way, n int) {
	for _, f := range []dataplane.Form{w.target, w.form} {
		if f != (dataplane.Form{}) && tally(t.sending, f, n) {
			t.formsDirty = true
		}
	}
	if !w.settled() {
		tally(t.behind, k.pool, n)
	}
}

// prepare puts in place what a form that is to come needs apart from the next
// hop, so that probes can go through it.
func (t *table) prepare(k hopKey, w way) {
	old := t.prepared[k]
	if len(old) == 0 && w.wanted == w.form {
		return // the usual case
	}
	delete(t.prepared, k)
	if w.wanted != w.form && w.wanted.Driver == dataplane.DriverVXLAN && t.takesIn(w.wanted) {
		objs, err := driverOf(w.wanted).Peer(t.wayEnds(k, w.outer, w.wanted, 0))
		if err == nil {
			for _, o := range objs {
				if _, ok := o.(dataplane.NextHop); !ok {
					t.acquire(o)
					t.prepared[k] = append(t.prepared[k], o)
				}
			}
		}
	}
	for _, o := range old {
		t.release(o)
	}
}

func (t *table) unprepare(k hopKey) {
	for _, o := range t.prepared[k] {
		t.release(o)
	}
	delete(t.prepared, k)
}

// wayEnds are both ends of a way as a driver sees them.
func (t *table) wayEnds(k hopKey, outer dataplane.Family, f dataplane.Form, id dataplane.NextHopID) (dataplane.Host, dataplane.Peer) {
	p := t.peerFor(t.nodes[k.node], k.fam, outer)
	p.NextHop = id
	vni, port := f.VNI, f.Port
	if f.Driver != dataplane.DriverVXLAN {
		vni, port = t.settings.vni, t.settings.port
	}
	return t.hostFor(k.fam, outer, vni, port), p
}

// rechooseAll applies the sender's rule anew to every node. It is for changes
// of this host, which are rare.
func (t *table) rechooseAll() {
	for name := range t.nodes {
		if t.rechoose(name) {
			t.refreshNode(name)
		}
	}
}
