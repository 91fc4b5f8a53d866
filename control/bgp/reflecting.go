package bgp

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

const (
	// settleTime is how long a session with a reflector has to have been in sync before others may go: what was
	// just advertised to the reflector is with its other peers by then.
	settleTime = 2 * time.Second

	// missTime is how long a session with a reflector may be down before others are notified, so that a restart of its daemon
	// is not written to every Node.
	missTime = 15 * time.Second

	// turnTime is how long each node waits for the one before it to take the place of a reflector that is
	// gone, where no source says which of them is there.
	turnTime = 5 * time.Second
)

// reflecting is what a host has seen of reflectors, and so what it says of itself. The controller's lock guards it.
type reflecting struct {
	since   map[string]time.Time // since when all sessions with a node are in sync, of those that are
	missed  map[string]time.Time // since when they are not, of reflectors whose routes it had
	serves  map[string]time.Time // since when a reflector is seen to be one, and that it does; this host, since when it is
	unasked time.Time            // since when there are to be none; zero: they are asked for
	lacking time.Time            // since when it sees too few reflectors, and no source says which nodes are there; zero: it does not
}

// inSync returns the addresses of peers that have advertised all they have in the session that is up.
func (s *Speaker) inSync() map[netip.Addr]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[netip.Addr]bool{}
	for a, ss := range s.sessions {
		out[a] = ss.up && len(ss.due) == 0
	}
	return out
}

// Reflection returns what this host's Node is to say about reflectors, and whether it says something else yet. It is to be
// called about once a second while it is asked for.
func (c *Controller) Reflection(alive Alive, now time.Time) (want store.NodeReflection, differs bool) {
	synced := c.speaker.inSync()
	c.mu.Lock()
	defer c.mu.Unlock()
	v, self := &c.view, c.opts.Node
	n, known := v.nodes[self]
	if !known || !v.synced {
		return n.reflection, false
	}
	c.reflecting.see(v, self, synced, now)
	want = c.reflecting.says(v, self, alive, now)
	return want, !want.Equal(n.reflection)
}

// Present is which hosts are there by what their Nodes say; zero: that is not known yet.
func (c *Controller) Present() Alive {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.view.synced {
		return Alive{}
	}
	return c.view.present()
}

// ReflectionAsked reports whether [Controller.Reflection] is to be asked: reflectors are wanted, or there still are some.
func (c *Controller) ReflectionAsked() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, n := c.view.reflection(), c.view.nodes[c.opts.Node].reflection
	return r.auto.Count > 0 || len(r.serving) > 0 || n.Reflects || len(n.By) > 0
}

// ReflectorStatus says how far the nodes' choice of reflectors is.
func (c *Controller) ReflectorStatus(alive Alive) (ReflectorStatus, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.view.synced && !c.view.fromDisk {
		return ReflectorStatus{}, ErrNotSynced
	}
	return c.view.reflectorStatus(alive), nil
}

// says is what a node is to say of itself.
func (r *reflecting) says(v *View, self string, alive Alive, now time.Time) store.NodeReflection {
	alive.linked = r.since
	alive = r.sight(v, self, alive, now)
	out := store.NodeReflection{Reflects: v.shouldReflect(self, alive), By: r.by(v, self, alive, now)}
	// What others see it has seen itself, and done.
	out.Ready = out.Reflects && r.settled(r.serves, self, now)
	return out
}

// sight completes which nodes are there by what this host sees, where no source says it of any willing node: a
// reflector with which it has had no session for a while is gone for it, and when its turn comes by name it takes
// the place. That may be too many for a while; it leaves no node without routes, and when they see each other
// the first by name stay.
func (r *reflecting) sight(v *View, self string, alive Alive, now time.Time) Alive {
	if !alive.unheard || v.reflection().auto.Count == 0 {
		r.lacking = time.Time{}
		return alive
	}
	var seen []string
	here := 0
	for _, name := range alive.Reflectors {
		if since, misses := r.missed[name]; misses && now.Sub(since) >= missTime {
			continue
		}
		seen = append(seen, name)
		if v.willing(name) && v.groupOf(name) == v.groupOf(self) {
			here++
		}
	}
	alive.Reflectors = seen
	if here >= v.reflection().auto.Count || !v.willing(self) || v.reflection().reflects(self) {
		r.lacking = time.Time{}
		return alive
	}
	if r.lacking.IsZero() {
		r.lacking = now
	}
	turn := 0
	for _, name := range v.nodeNames() {
		if name < self && v.willing(name) && v.groupOf(name) == v.groupOf(self) && !v.reflection().reflects(name) {
			turn++
		}
	}
	if now.Sub(r.lacking) >= time.Duration(turn)*turnTime {
		alive.standIn = self
	}
	return alive
}

func (r *reflecting) settled(since map[string]time.Time, name string, now time.Time) bool {
	t, ok := since[name]
	return ok && now.Sub(t) >= settleTime
}

// shouldReflect reports whether a node is to reflect. Who is there has to be known.
func (v *View) shouldReflect(self string, alive Alive) bool {
	reflects := v.nodes[self].reflection.Reflects
	if alive.Nodes == nil || !v.reflection().members[self] {
		return reflects && v.reflection().members[self]
	}
	for _, l := range v.chosen(alive) {
		if slices.Contains(l, self) {
			return true
		}
	}
	if !reflects {
		return false
	}
	_, leaves := v.mayLeave(self, alive)
	return !leaves
}

// see notes with whom sessions are in sync, and who reflects.
func (r *reflecting) see(v *View, self string, synced map[netip.Addr]bool, now time.Time) {
	if r.since == nil {
		r.since, r.missed, r.serves = map[string]time.Time{}, map[string]time.Time{}, map[string]time.Time{}
	}
	switch {
	case v.reflection().auto.Count > 0:
		r.unasked = time.Time{}
	case r.unasked.IsZero():
		r.unasked = now
	}
	own := v.nodes[self]
	inSync := func(name string) bool {
		sessions := 0
		for _, a := range v.nodes[name].addrs() {
			if a.Is4() && !own.addr.IsValid() || a.Is6() && !own.addr6.IsValid() {
				continue
			}
			if !synced[a] {
				return false
			}
			sessions++
		}
		return sessions > 0
	}
	keep := func(m map[string]time.Time, name string, on bool) {
		if _, has := m[name]; on && !has {
			m[name] = now
		} else if !on {
			delete(m, name)
		}
	}
	keep(r.serves, self, v.reflection().reflects(self))
	for _, name := range v.nodeNames() {
		if name == self {
			continue
		}
		in, serves := inSync(name), v.reflection().reflects(name)
		keep(r.since, name, in)
		keep(r.serves, name, serves && v.nodes[name].reflection.Ready)
		keep(r.missed, name, serves && !in)
	}
	for _, m := range []map[string]time.Time{r.since, r.missed, r.serves} {
		maps.DeleteFunc(m, func(name string, _ time.Time) bool { _, there := v.nodes[name]; return !there })
	}
}

// by is of which reflectors a node has all routes, or had them and has lost them since.
func (r *reflecting) by(v *View, self string, alive Alive, now time.Time) map[string]bool {
	out := map[string]bool{}
	had := v.nodes[self].reflection.By
	if !v.reflection().members[self] {
		return out
	}
	for _, name := range v.toServe(self) {
		live, known := had[name]
		missed, misses := r.missed[name]
		switch {
		case name == self:
		case r.settled(r.since, name, now) && r.settled(r.serves, name, now):
			out[name] = true
		case known:
			if live = live && !(misses && now.Sub(missed) >= missTime); live || !had[store.ReflectedMesh] {
				out[name] = live
			}
		}
	}
	if v.reflection().auto.Count > 0 || len(v.reflection().serving) == 0 || !v.meshed() || alive.Nodes == nil {
		return out
	}
	// Reflectors are to go: when the sessions of the mesh are there. One that is not in time is of a host that is gone, if that is
	// said of it; said alone it may be of its kubelet.
	late := now.Sub(r.unasked) >= missTime
	for name := range v.reflection().members {
		if name != self && (alive.Nodes[name] || !late) && !r.settled(r.since, name, now) {
			return out
		}
	}
	out[store.ReflectedMesh] = true
	return out
}
