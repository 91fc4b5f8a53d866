package nft

import (
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// desired is what the table should be, and how that follows from a ruleset. It
// does no I/O. What changes is noted in the journal.
type desired struct {
	cfg       Config
	settings  filter.Settings
	policies  map[filter.PolicyID]filter.Policy
	members   map[filter.SetID]*members
	endpoints map[string]*placed

	nodes    map[string]*node
	readers  map[filter.PolicyID]map[string]struct{} // nodes to be written anew when a policy changes
	users    map[filter.SetID]map[string]struct{}    // and when a set takes another name
	stale    map[string]struct{}                     // nodes to be written anew now
	literals map[string]int                          // nodes that use a literal set
	floating map[elemID][]claim
	tally    tally

	chains map[string]*chain
	sets   map[string]*set
	arp    map[elemID]struct{} // what changed that the table of ARP mirrors
	journal
}

// journal is what the kernel had before, of all that may have changed since.
type journal struct {
	chains map[string]bool               // whether there was such a chain
	sets   map[string]*set               // nil: there was none; its elements are not looked at
	elems  map[string]map[string]element // old elements; with no key: there was none
}

func newJournal() journal {
	return journal{chains: make(map[string]bool), sets: make(map[string]*set), elems: make(map[string]map[string]element)}
}

func (j *journal) empty() bool { return len(j.chains)+len(j.sets)+len(j.elems) == 0 }

// members are those of a filter set, by family.
type members struct {
	def filter.Set
	of  map[dataplane.Family]map[filter.Member]struct{}
	net map[dataplane.Family]int // members that are more than one address
}

// node is a chain in use.
type node struct {
	source   chainSource
	refs     int
	jumps    []chainSource
	literals []string
	reads    []filter.PolicyID
	uses     []filter.SetID
}

type elemID struct{ set, key string }

// claim is an endpoint's claim to an element that others may want too.
type claim struct{ owner, data string }

// tally counts endpoints by what they need of the base chains.
type tally struct{ hosts, untracked, preDNAT, nets, floating, odd, limited, dscp int }

func (t *tally) add(o tally, sign int) {
	t.hosts += sign * o.hosts
	t.untracked += sign * o.untracked
	t.preDNAT += sign * o.preDNAT
	t.nets += sign * o.nets
	t.floating += sign * o.floating
	t.odd += sign * o.odd
	t.limited += sign * o.limited
	t.dscp += sign * o.dscp
}

// needs is what the base chains are made from.
func (t tally) needs() [8]bool {
	return [8]bool{t.hosts > 0, t.untracked > 0, t.preDNAT > 0, t.nets > 0, t.floating > 0, t.odd > 0, t.limited > 0, t.dscp > 0}
}

// placed is an endpoint and what it has in the table.
type placed struct {
	filter.Endpoint
	roots []chainSource
	elems []placedElem
	needs tally
}

type placedElem struct {
	elemID
	data string
}

func newDesired(cfg Config) *desired {
	w := &desired{
		cfg:       cfg,
		policies:  make(map[filter.PolicyID]filter.Policy),
		members:   make(map[filter.SetID]*members),
		endpoints: make(map[string]*placed),
		nodes:     make(map[string]*node),
		readers:   make(map[filter.PolicyID]map[string]struct{}),
		users:     make(map[filter.SetID]map[string]struct{}),
		stale:     make(map[string]struct{}),
		literals:  make(map[string]int),
		floating:  make(map[elemID][]claim),
		chains:    make(map[string]*chain),
		sets:      make(map[string]*set),
		arp:       make(map[elemID]struct{}),
		journal:   newJournal(),
	}
	for name, s := range fixedSets() {
		w.putSet(name, s)
	}
	w.putBases()
	return w
}

// apply applies a step. On an error the desired table is of no more use.
func (w *desired) apply(d *filter.Delta) error {
	needs := w.tally.needs()
	if d.Settings != nil {
		again := !slices.Equal(w.settings.WorkloadPrefixes, d.Settings.WorkloadPrefixes)
		w.settings = *d.Settings
		if again { // for some, another set of interfaces
			for _, p := range w.endpoints {
				w.putEndpoint(&p.Endpoint)
			}
		}
		for name := range w.nodes {
			w.stale[name] = struct{}{}
		}
	}
	if err := w.applySets(d); err != nil {
		return err
	}
	for _, p := range d.PutPolicies {
		w.policies[p.ID] = p
		maps.Copy(w.stale, w.readers[p.ID])
	}
	for i := range d.PutEndpoints {
		w.putEndpoint(&d.PutEndpoints[i])
	}
	for _, name := range d.DelEndpoints {
		if w.endpoints[name] == nil {
			return fmt.Errorf("delete endpoint %s: there is none", name)
		}
		w.delEndpoint(name)
	}
	if d.Settings != nil || needs != w.tally.needs() || concernsAny(d) {
		w.putBases()
	}
	if needs != w.tally.needs() {
		// They are made from it too.
		for _, f := range dataplane.Families() {
			w.stale[icmpError{f}.name()] = struct{}{}
		}
	}
	w.refresh()
	for _, id := range d.DelPolicies {
		if len(w.readers[id]) > 0 {
			return fmt.Errorf("delete policy %s: it is in use", id)
		}
		delete(w.policies, id)
	}
	for _, id := range d.DelSets {
		if err := w.delMembers(id); err != nil {
			return err
		}
	}
	return nil
}

// concernsAny reports whether a step is about the endpoint that stands for all
// interfaces, which is part of the base chains.
func concernsAny(d *filter.Delta) bool {
	return slices.Contains(d.DelEndpoints, filter.AnyInterface) ||
		slices.ContainsFunc(d.PutEndpoints, func(e filter.Endpoint) bool { return e.Interface == filter.AnyInterface })
}

// refresh writes the stale nodes anew.
func (w *desired) refresh() {
	for len(w.stale) > 0 {
		for _, name := range slices.Sorted(maps.Keys(w.stale)) {
			delete(w.stale, name)
			if n := w.nodes[name]; n != nil {
				w.write(name, n)
			}
		}
	}
}

// Nodes.

// acquire makes a chain if there is none, and holds it.
func (w *desired) acquire(s chainSource) {
	name := s.name()
	if n := w.nodes[name]; n != nil {
		n.refs++
		return
	}
	n := &node{source: s, refs: 1}
	w.nodes[name] = n
	w.noteChain(name)
	w.chains[name] = &chain{comment: s.comment(), hook: hookOf(s)}
	w.write(name, n)
}

func hookOf(s chainSource) *hook {
	if b, ok := s.(baseSource); ok {
		return &b.hook
	}
	return nil
}

// release lets go of a chain, which goes when nobody holds it.
func (w *desired) release(s chainSource) {
	name := s.name()
	n := w.nodes[name]
	if n.refs--; n.refs > 0 {
		return
	}
	delete(w.nodes, name)
	w.noteChain(name)
	delete(w.chains, name)
	w.forget(name, n)
}

// forget takes back what a node holds.
func (w *desired) forget(name string, n *node) {
	for _, id := range n.reads {
		if delete(w.readers[id], name); len(w.readers[id]) == 0 {
			delete(w.readers, id)
		}
	}
	for _, id := range n.uses {
		if delete(w.users[id], name); len(w.users[id]) == 0 {
			delete(w.users, id)
		}
	}
	for _, s := range n.jumps {
		w.release(s)
	}
	for _, l := range n.literals {
		if w.literals[l]--; w.literals[l] == 0 {
			delete(w.literals, l)
			w.delSet(l)
		}
	}
}

// write writes a chain's rules.
func (w *desired) write(name string, n *node) {
	c := &chainWriter{w: w}
	n.source.rules(c)
	for _, s := range c.jumps {
		w.acquire(s)
	}
	old := *n
	n.jumps, n.literals, n.reads, n.uses = c.jumps, c.literals, c.reads, c.uses
	w.forget(name, &old)
	for _, id := range n.reads {
		if w.readers[id] == nil {
			w.readers[id] = make(map[string]struct{})
		}
		w.readers[id][name] = struct{}{}
	}
	for _, id := range n.uses {
		if w.users[id] == nil {
			w.users[id] = make(map[string]struct{})
		}
		w.users[id][name] = struct{}{}
	}
	now := w.chains[name]
	if slices.EqualFunc(now.rules, c.out, func(a, b rule) bool { return a.hash == b.hash }) {
		return
	}
	w.noteChain(name)
	w.chains[name] = &chain{comment: now.comment, hook: now.hook, rules: c.out}
}

func (w *desired) noteChain(name string) {
	if _, ok := w.journal.chains[name]; !ok {
		_, there := w.chains[name]
		w.journal.chains[name] = there
	}
}

// Sets of the kernel.

func (w *desired) noteSet(name string) {
	if _, ok := w.journal.sets[name]; !ok {
		w.journal.sets[name] = w.sets[name]
	}
}

func (w *desired) putSet(name string, s *set) {
	w.noteSet(name)
	w.sets[name] = s
}

func (w *desired) delSet(name string) {
	w.noteSet(name)
	delete(w.sets, name)
}

// noteElem is called before an element changes.
func (w *desired) noteElem(id elemID) {
	w.mirrored(id)
	if was, ok := w.journal.sets[id.set]; ok && was != w.sets[id.set] {
		return // all of it is new
	}
	changes := w.elems[id.set]
	if changes == nil {
		changes = make(map[string]element)
		w.elems[id.set] = changes
	}
	if _, ok := changes[id.key]; ok {
		return
	}
	old := element{}
	if data, ok := w.sets[id.set].elems[id.key]; ok {
		old = element{id.key, data}
	}
	changes[id.key] = old
}

func (w *desired) putElem(id elemID, data string) {
	w.noteElem(id)
	w.sets[id.set].elems[id.key] = data
}

func (w *desired) delElem(id elemID) {
	w.noteElem(id)
	delete(w.sets[id.set].elems, id.key)
}

func (w *desired) acquireLiteral(name string, s *set) {
	if w.literals[name]++; w.literals[name] == 1 {
		w.putSet(name, s)
	}
}

// Filter sets.

func (w *desired) kindOf(id filter.SetID) filter.SetType {
	if m := w.members[id]; m != nil {
		return m.def.Type
	}
	return filter.Nets
}

// setName returns the name of the kernel's set with a filter set's members of
// a family. While all of them are single addresses, the set is a hash table;
// otherwise it is one of intervals, under another name.
func (w *desired) setName(id filter.SetID, f dataplane.Family) string {
	suffix := ""
	if m := w.members[id]; m != nil && m.net[f] > 0 {
		suffix = "n"
	}
	return nameOf(string(id), f) + suffix
}

func (w *desired) applySets(d *filter.Delta) error {
	for _, s := range d.PutSets {
		if w.members[s.ID] != nil {
			return fmt.Errorf("put set %s: it exists", s.ID)
		}
		m := &members{def: s, of: make(map[dataplane.Family]map[filter.Member]struct{}), net: make(map[dataplane.Family]int)}
		w.members[s.ID] = m
		for _, f := range dataplane.Families() {
			m.of[f] = make(map[filter.Member]struct{})
			w.putSet(w.setName(s.ID, f), w.kernelSet(m, f))
		}
		if isFixed(s.ID) {
			w.putBases()
			w.markFailsafes()
		}
	}
	for _, c := range d.Members {
		m := w.members[c.Set]
		if m == nil {
			return fmt.Errorf("change set %s: there is none", c.Set)
		}
		if err := w.change(m, c); err != nil {
			return fmt.Errorf("change set %s: %w", c.Set, err)
		}
	}
	return nil
}

func isFixed(id filter.SetID) bool {
	return id == filter.NATSources || id == filter.NATExempt || id == filter.TunnelSources
}

// kernelSet returns a set with a filter set's members of a family.
func (w *desired) kernelSet(m *members, f dataplane.Family) *set {
	intervals := m.net[f] > 0
	s := netsSet(f, intervals)
	if m.def.Type == filter.Ports {
		s = portsSet(f)
	}
	s.comment = m.def.Origin
	for member := range m.of[f] {
		for _, key := range memberKeys(member, m.def.Type, intervals) {
			s.elems[key] = elemNone
		}
	}
	return s
}

func (w *desired) change(m *members, c filter.MemberChange) error {
	var before [7]string
	for _, f := range dataplane.Families() {
		before[f] = w.setName(c.Set, f)
	}
	for _, one := range c.Del {
		of := m.of[dataplane.FamilyOf(one.Prefix.Addr())]
		if _, ok := of[one]; !ok {
			return fmt.Errorf("delete %s: it is no member", one)
		}
		delete(of, one)
		w.countNet(m, one, -1)
	}
	for _, one := range c.Add {
		of := m.of[dataplane.FamilyOf(one.Prefix.Addr())]
		if _, ok := of[one]; ok {
			return fmt.Errorf("add %s: it is a member", one)
		}
		of[one] = struct{}{}
		w.countNet(m, one, 1)
	}
	for _, f := range dataplane.Families() {
		name := w.setName(c.Set, f)
		if name != before[f] {
			w.delSet(before[f])
			w.putSet(name, w.kernelSet(m, f))
			maps.Copy(w.stale, w.users[c.Set])
			continue
		}
		w.changeElems(name, m, f, c)
	}
	return nil
}

func (w *desired) changeElems(name string, m *members, f dataplane.Family, c filter.MemberChange) {
	own := func(one filter.Member) bool { return dataplane.FamilyOf(one.Prefix.Addr()) == f }
	for _, one := range c.Del {
		if own(one) {
			for _, key := range memberKeys(one, m.def.Type, m.net[f] > 0) {
				w.delElem(elemID{name, key})
			}
		}
	}
	for _, one := range c.Add {
		if own(one) {
			for _, key := range memberKeys(one, m.def.Type, m.net[f] > 0) {
				w.putElem(elemID{name, key}, elemNone)
			}
		}
	}
}

func (w *desired) countNet(m *members, one filter.Member, n int) {
	if m.def.Type == filter.Nets && !one.Prefix.IsSingleIP() {
		m.net[dataplane.FamilyOf(one.Prefix.Addr())] += n
	}
}

func (w *desired) delMembers(id filter.SetID) error {
	switch {
	case w.members[id] == nil:
		return fmt.Errorf("delete set %s: there is none", id)
	case len(w.users[id]) > 0 && !isFixed(id):
		return fmt.Errorf("delete set %s: it is in use", id)
	}
	for _, f := range dataplane.Families() {
		w.delSet(w.setName(id, f))
	}
	delete(w.members, id)
	if isFixed(id) {
		w.putBases()
		w.refresh()
	}
	return nil
}

func mapSpec(keyType, keyLen uint32) setSpec {
	return setSpec{keyType: keyType, keyLen: keyLen, flags: unix.NFT_SET_MAP}
}
