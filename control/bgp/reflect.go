package bgp

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

// reflection is who reflects and whom, where nodes choose their reflectors among themselves (the annotation
// [store.AnnotationReflectors]). It follows from the datastore alone, so that both ends of a session come to the same, and is
// never changed.
//
// No node decides for all. A node that is to reflect says so on its Node, and every node that it serves, and every
// other reflector, has a session with it from then on, beside those it has. A node says on its own Node of which reflectors it
// has all routes. Two nodes end their session of the mesh when both have the routes of one reflector, or of two that have each
// other's; a reflector that is no longer to be one waits until all that it serves have the routes of the others.
type reflection struct {
	auto    store.Reflectors // zero: there are to be none
	why     string           // there are none though they are asked for; empty: nothing keeps them
	members map[string]bool  // nodes that reflect, or are served
	serving []string         // nodes that reflect, in order
	by      map[string][]string
	linked  map[[2]string]bool // two reflectors of which each has the other's routes
}

func (v *View) reflection() *reflection {
	if v.reflects != nil {
		return v.reflects
	}
	r := &reflection{members: map[string]bool{}, by: map[string][]string{}, linked: map[[2]string]bool{}}
	v.reflects = r
	if value, ok := v.defaultNotes()[store.AnnotationReflectors]; ok {
		var err error
		if r.auto, err = store.ParseReflectors(value); err != nil {
			r.why = fmt.Sprintf("annotation %s is %q: %v", store.AnnotationReflectors, value, err)
		}
	}
	for _, name := range v.nodeNames() {
		n := v.nodes[name]
		if n.cluster != "" && r.auto.Count > 0 {
			r.auto, r.why = store.Reflectors{}, fmt.Sprintf("node %s has a spec.bgp.routeReflectorClusterID: reflectors that are configured so are not chosen", name)
		}
		if !n.bgp || len(n.addrs()) == 0 || n.cluster != "" || n.asn != 0 && n.asn != v.globalASN() {
			continue
		}
		r.members[name] = true
		if n.reflection.Reflects {
			r.serving = append(r.serving, name)
		}
	}
	for _, name := range r.serving {
		g := v.groupOf(name)
		r.by[g] = append(r.by[g], name)
		for other, has := range v.nodes[name].reflection.By {
			if has && r.reflects(other) && v.nodes[other].reflection.By[name] {
				r.linked[[2]string{name, other}] = true
			}
		}
	}
	return r
}

// globalASN is the AS of nodes that have none of their own.
func (v *View) globalASN() uint32 {
	if c := v.defaults(); c.ASNumber != nil && *c.ASNumber != 0 {
		return uint32(*c.ASNumber)
	}
	return DefaultASN
}

// groupOf is whose reflectors serve a node: those with the same value of the label, or all.
func (v *View) groupOf(name string) string {
	r := v.reflection()
	if r.auto.Per == "" {
		return ""
	}
	return store.GroupOf(v.nodes[name].labels, r.auto.Per)
}

func (r *reflection) reflects(name string) bool {
	_, found := slices.BinarySearch(r.serving, name)
	return found
}

// servedBy returns the reflectors that a node has sessions with: those that it is to have, and those that it says to have
// routes by. A session that ended before it says otherwise would be counted on by a reflector that goes.
func (v *View) servedBy(name string) []string {
	out := v.toServe(name)
	by := v.nodes[name].reflection.By
	for _, x := range v.reflection().serving {
		if _, had := by[x]; had && !slices.Contains(out, x) {
			out = append(slices.Clip(out), x)
		}
	}
	return out
}

// toServe returns the reflectors that a node is to have sessions with: a reflector those of all groups, others those of their own,
// or where that has none, or none that it reaches, all. Those that it has routes by stay until it has those of its own, and these have those of all others.
func (v *View) toServe(name string) []string {
	r := v.reflection()
	own := r.by[v.groupOf(name)]
	by := v.nodes[name].reflection.By
	lost := func(o string) bool { has, had := by[o]; return had && !has }
	if r.reflects(name) || !slices.ContainsFunc(own, func(o string) bool { return !lost(o) }) {
		return r.serving
	}
	complete := !slices.ContainsFunc(own, func(o string) bool {
		return !by[o] || slices.ContainsFunc(r.serving, func(x string) bool { return x != o && !r.linked[[2]string{o, x}] })
	})
	if complete {
		return own
	}
	out := slices.Clone(own)
	for _, x := range r.serving {
		if _, had := by[x]; had && !slices.Contains(own, x) {
			out = append(out, x)
		}
	}
	return out
}

// reflected reports whether two nodes have a session because one of them is a reflector.
func (v *View) reflected(a, b string) bool {
	r := v.reflection()
	switch {
	case a == b || !r.members[a] || !r.members[b]:
		return false
	case r.reflects(a) && slices.Contains(v.servedBy(b), a):
		return true
	}
	return r.reflects(b) && slices.Contains(v.servedBy(a), b)
}

// released reports whether two nodes need no session of the mesh.
func (v *View) released(a, b string) bool {
	r := v.reflection()
	if r.auto.Count == 0 || !r.members[a] || !r.members[b] {
		return false
	}
	theirs := v.routesOf(b)
	for _, x := range v.routesOf(a) {
		for _, y := range theirs {
			if x == y || r.linked[[2]string{x, y}] {
				return true
			}
		}
	}
	return false
}

// routesOf returns the reflectors through which a node's routes and others' pass, itself if it is one.
func (v *View) routesOf(name string) (out []string) {
	r := v.reflection()
	if r.reflects(name) {
		return []string{name}
	}
	by := v.nodes[name].reflection.By
	if by[store.ReflectedMesh] {
		return nil // reflectors were to go a moment ago, and may be about to: what it says of them is not of now
	}
	// Of one that is lost it has none, but a mesh that came back for that would go again when another takes its place.
	for other := range by {
		if r.reflects(other) {
			out = append(out, other)
		}
	}
	return out
}

// Alive is which hosts are there, as leases in the datastore say, or else their Nodes ([View.present]).
type Alive struct {
	Nodes      map[string]bool
	Reflectors []string // that hold the lease of one, for the longest first

	linked map[string]time.Time // with which this host has its sessions, since when

	// unheard is set where no willing node is there, as when the certificates of all kubelets have
	// expired. Then Reflectors are all that reflect, and what this host sees itself counts:
	// see [reflecting.sight].
	unheard bool
	standIn string // this host, if it takes the place of a reflector that it does not see
}

// present is which hosts are there by what their Nodes say: for a datastore that has no leases of theirs. Who reflects
// and is there counts as holding a lease; of too many the first by name stay.
func (v *View) present() Alive {
	a := Alive{Nodes: map[string]bool{}, unheard: true}
	for _, name := range v.nodeNames() {
		if n := v.nodes[name]; n.ours && !n.away {
			a.Nodes[name] = true
			a.unheard = a.unheard && !v.willing(name)
		}
	}
	for _, name := range v.nodeNames() {
		if v.nodes[name].reflection.Reflects && (a.Nodes[name] || a.unheard && v.nodes[name].ours) {
			a.Reflectors = append(a.Reflectors, name)
		}
	}
	return a
}

// willing reports whether a node may be a reflector.
func (v *View) willing(name string) bool {
	n := v.nodes[name]
	return v.reflection().members[name] && n.labels[store.LabelReflector] != store.NeverReflects && n.drain == ""
}

// chosen returns who is to reflect, by group: those that do stay while they are there, and the others are the first willing
// nodes that are there, by name.
func (v *View) chosen(alive Alive) map[string][]string {
	r := v.reflection()
	out := map[string][]string{}
	if r.auto.Count == 0 {
		return out
	}
	taken := map[string]bool{}
	holds := map[string]bool{}
	for _, name := range alive.Reflectors {
		holds[name] = true
	}
	take := func(name string) {
		g := v.groupOf(name)
		if v.willing(name) && !taken[name] && len(out[g]) < r.auto.Count {
			out[g] = append(out[g], name)
			taken[name] = true
		}
	}
	for _, name := range alive.Reflectors {
		take(name)
	}
	if alive.standIn != "" {
		take(alive.standIn)
	}
	for _, name := range v.nodeNames() {
		if alive.Nodes[name] && (holds[name] || !r.reflects(name)) { // one that reflects without a lease has just died
			take(name)
		}
	}
	return out
}

// needs returns the reflectors that a node has to have the routes of before another one may go: those of its group, or where
// no node there is willing, all.
func (v *View) needs(name string, chosen map[string][]string) []string {
	if own := chosen[v.groupOf(name)]; len(own) > 0 && !slices.Contains(own, name) {
		return own
	}
	var all []string
	for _, g := range slices.Sorted(maps.Keys(chosen)) {
		all = append(all, chosen[g]...)
	}
	return all
}

// mayLeave reports whether a reflector that is no longer to be one may go: every node that has routes by it has them by others.
// What keeps it is a node that has not.
func (v *View) mayLeave(self string, alive Alive) (waits string, ok bool) {
	chosen := v.chosen(alive)
	r := v.reflection()
	for _, name := range v.nodeNames() {
		n := v.nodes[name]
		_, had := n.reflection.By[self]
		_, linked := alive.linked[name] // then it is there, whatever is said of it
		if !r.members[name] || name != self && (!alive.Nodes[name] && !linked || !had) {
			continue
		}
		if r.auto.Count == 0 {
			if v.meshed() && !n.reflection.By[store.ReflectedMesh] {
				return name, false
			}
			continue
		}
		need := v.needs(name, chosen)
		if len(need) == 0 {
			return name, false // no node is willing
		}
		for _, other := range need {
			if other != name && (!r.reflects(other) || !n.reflection.By[other]) {
				return name, false
			}
		}
	}
	return "", true
}

// meshed reports whether there is to be a mesh of the nodes.
func (v *View) meshed() bool {
	on := v.defaults().NodeToNodeMeshEnabled
	return on == nil || *on
}

// ReflectorStatus is how far the nodes' choice of reflectors is.
type ReflectorStatus struct {
	Setting string // what is asked for; empty: nothing
	Problem string // why there are none all the same
	Groups  []ReflectorGroup
	Nodes   int      // that take part
	Mesh    int      // of the pairs of nodes, those that still have a session of the mesh for want of reflectors
	Waiting []string // nodes that have not got the routes of all reflectors of theirs
}

// ReflectorGroup is the nodes with one value of the label.
type ReflectorGroup struct {
	Name       string
	Nodes      int
	Reflectors []string
	Leaving    []string // of these, which go when all have the routes of the others
}

// status says how far the choice of reflectors is.
func (v *View) reflectorStatus(alive Alive) ReflectorStatus {
	r := v.reflection()
	s := ReflectorStatus{Problem: r.why, Nodes: len(r.members)}
	if r.auto.Count > 0 {
		s.Setting = r.auto.String()
	}
	groups := map[string]*ReflectorGroup{}
	chosen := v.chosen(alive)
	for _, name := range v.nodeNames() {
		if !r.members[name] {
			continue
		}
		g := groups[v.groupOf(name)]
		if g == nil {
			g = &ReflectorGroup{Name: v.groupOf(name)}
			groups[g.Name] = g
		}
		g.Nodes++
		if r.reflects(name) {
			g.Reflectors = append(g.Reflectors, name)
			if !slices.Contains(chosen[g.Name], name) {
				g.Leaving = append(g.Leaving, name)
			}
		}
		for _, other := range v.toServe(name) {
			if other != name && !v.nodes[name].reflection.By[other] {
				s.Waiting = append(s.Waiting, name)
				break
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		s.Groups = append(s.Groups, *groups[name])
	}
	if v.meshed() {
		members := slices.Sorted(maps.Keys(r.members))
		for i, a := range members {
			for _, b := range members[i+1:] {
				if !v.reflected(a, b) && !v.released(a, b) {
					s.Mesh++
				}
			}
		}
	}
	return s
}
