package encap

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// publishing is what this host publishes of what it sends, and how far that has
// come.
type publishing struct {
	ends       *ends
	inflight   *cluster.Encaps // what is being published; nil: nothing
	inflightAt store.Revision  // where it is in the store; 0: not known to be there
	// said has the encapsulations that this host published itself: of its record only these
	// count, for others can write there. nil: it has seen no record of its own.
	said set[dataplane.Encap]

	sending   map[dataplane.Encap]int // forwarding paths that use it or are to
	behind    map[string]int          // by pool, forwarding paths that are not as wanted
	confirmed bool                    // the kernel has every next hop as wanted
}

func newPublishing(e *ends) *publishing {
	return &publishing{ends: e, sending: map[dataplane.Encap]int{}, behind: map[string]int{}}
}

// seeOwn takes note of this host's record. The first is the previous run's: VXLAN at a system
// port counts as made up there.
func (p *publishing) seeOwn(n *cluster.Node) {
	if n == nil || p.said != nil {
		return
	}
	p.said = publishedIn(n.Encaps)
	maps.DeleteFunc(p.said, func(f dataplane.Encap, _ struct{}) bool {
		return f.Driver == dataplane.DriverVXLAN && store.IsSystemPort(f.Port)
	})
}

// Published has what a record says count as published by this host itself.
func (p *publishing) Published(e *cluster.Encaps) { p.said = publishedIn(e) }

// publishedIn has the encapsulations that a record says are accepted or sent.
func publishedIn(e *cluster.Encaps) set[dataplane.Encap] {
	out := set[dataplane.Encap]{}
	maps.Copy(out, e.Accept)
	maps.Copy(out, e.Use)
	return out
}

// own is what this host has published, as the watch showed it, and what it is
// about to publish: a write whose result has not been seen may have happened
// or not, so what is accepted is the union and what may be sent the
// intersection.
func (p *publishing) own() (accepts, uses set[dataplane.Encap]) {
	accepts, uses = set[dataplane.Encap]{}, set[dataplane.Encap]{}
	seen := p.ends.nodes.Own()
	if seen == nil {
		return accepts, uses
	}
	for f := range p.said {
		if _, ok := seen.Encaps.Accept[f]; ok {
			accepts[f] = struct{}{}
		}
		if _, ok := seen.Encaps.Use[f]; ok {
			uses[f] = struct{}{}
		}
	}
	if p.inflight != nil {
		maps.Copy(accepts, p.inflight.Accept)
		maps.Copy(uses, p.inflight.Use)
	}
	return accepts, uses
}

// published reports whether this host takes part in what nodes agree on by
// what they publish. Before it does it follows the pools at once.
func (p *publishing) published() bool {
	n := p.ends.nodes.Own()
	return n != nil && n.Encaps.Published
}

// mayUse reports whether packets may be sent in an encapsulation: only after that
// was published.
func (p *publishing) mayUse(f dataplane.Encap) bool {
	if !p.published() {
		return true
	}
	_, seen := p.ends.nodes.Own().Encaps.Use[f]
	if p.inflight == nil {
		return seen
	}
	_, soon := p.inflight.Use[f]
	return seen && soon
}

// movedTo lists the modes that this host has moved a pool to, the newest first:
// what is being published, and what is.
func (p *publishing) movedTo(pool string) []store.Mode {
	var out []store.Mode
	if p.inflight != nil {
		if m, ok := p.inflight.Send[pool]; ok {
			out = append(out, m)
		}
	}
	if m, ok := p.ends.nodes.Own().Encaps.Send[pool]; ok && !slices.Contains(out, m) {
		out = append(out, m)
	}
	return out
}

// publication is what this host should have published. It reports false while
// that is not known: before the kernel was seen to accept, or to refuse, what
// the pools ask for, this host would say that it accepts nothing.
func (r *receiver) publication() (store.NodeEncaps, bool) {
	self := r.nodes.Own()
	if self == nil || len(r.hosts) == 0 {
		return store.NodeEncaps{}, false
	}
	seen := self.Encaps.NodeEncaps
	wanted := r.WantedEncaps()
	if !seen.Published {
		for f := range wanted {
			if st := r.kernel[f]; !st.Done && st.Err == nil && r.devices[f].Err == nil {
				return store.NodeEncaps{}, false
			}
		}
	}
	return store.NodeEncaps{
		Published: true, Accepts: r.publicAccepts(), Uses: r.publicUses(), Sends: r.publicSends(self), Refuses: r.publicRefuses(self, wanted),
	}, true
}

// publicAccepts lists what is needed and the kernel accepts.
func (r *receiver) publicAccepts() []string {
	out := set[dataplane.Encap]{}
	for f := range r.neededEncaps() {
		if r.devices[f].Err == nil && r.accepts(f) && (r.published() || r.kernel[f].Done) {
			out[f] = struct{}{}
		}
	}
	return encapNames(out)
}

// publicUses lists what is sent or is to be. What was named before stays until
// the kernel has left it.
func (p *publishing) publicUses() []string {
	out := set[dataplane.Encap]{}
	for f := range p.sending {
		out[f] = struct{}{}
	}
	if !p.confirmed {
		_, uses := p.own()
		maps.Copy(out, uses)
	}
	return encapNames(out)
}

// publicSends names the mode of each pool that every peer was moved to.
func (p *publishing) publicSends(self *cluster.Node) map[string]string {
	out := map[string]string{}
	for _, pool := range p.ends.pools.ByName {
		if p.behind[pool.Name] == 0 && p.confirmed {
			out[pool.Name] = p.ends.pools.Mode(pool).String()
		} else if m, ok := self.Encaps.Send[pool.Name]; ok {
			out[pool.Name] = m.String()
		}
	}
	return out
}

// Foreseen is what this host publishes once every host has followed its pools: it is to be asked of a planner
// whose nodes have published nothing, which follows them at once. What the kernel refuses is not known to it.
func (p *Planner) Foreseen() store.NodeEncaps {
	accepts, uses, sends := set[dataplane.Encap]{}, set[dataplane.Encap]{}, map[string]string{}
	for f := range p.neededEncaps() {
		if p.devices[f].Err == nil {
			accepts[f] = struct{}{}
		}
	}
	for f := range p.sending {
		uses[f] = struct{}{}
	}
	for _, pool := range p.ends.pools.ByName {
		sends[pool.Name] = p.ends.pools.Mode(pool).String()
	}
	return store.NodeEncaps{Published: true, Accepts: encapNames(accepts), Uses: encapNames(uses), Sends: sends}
}

// maxReason bounds the length of a published reason, in bytes.
const maxReason = 400

// publicRefuses says why the kernel does not accept what is wanted, or could not
// if it were.
func (r *receiver) publicRefuses(self *cluster.Node, wanted set[dataplane.Encap]) map[string]string {
	out := map[string]string{}
	if r.unsupported == nil {
		maps.Copy(out, self.Encaps.Refuses)
	}
	note := func(f dataplane.Encap, err error) {
		s := err.Error()
		if len(s) > maxReason {
			// A cut may fall within a character.
			s = strings.ToValidUTF8(s[:maxReason], "") + "…"
		}
		out[f.String()] = s
	}
	for f, err := range r.unsupported {
		if f.Driver == dataplane.DriverVXLAN {
			f.VNI, f.Port = r.pools.Settings.VNI, r.pools.Settings.Port
		}
		if r.hasHost(f.Outer) {
			note(f, err)
		}
	}
	for f := range wanted {
		if err := r.devices[f].Err; err != nil {
			note(f, err)
		} else if err := r.kernel[f].Err; err != nil {
			note(f, err)
		} else if r.kernel[f].Done {
			delete(out, f.String())
		}
	}
	return out
}

// publicStays says, by pool, to which peers this host sends as before because probes
// get lost.
func (s *sender) publicStays() map[string]string {
	if len(s.lost) == 0 {
		return nil
	}
	out := map[string]string{}
	for name, n := range s.lost {
		p := s.pools.ByName[name]
		if p == nil {
			continue
		}
		for node := range s.sortedNodes() {
			w := s.paths[Key{name, node, p.Family()}]
			if !w.Lost {
				continue
			}
			text := fmt.Sprintf("%s stays in %s: %s", node, w.Encap, w.Reason)
			if len(text) > maxReason {
				text = text[:maxReason] + "…"
			}
			if n > 1 {
				text += fmt.Sprintf("; and %d more", n-1)
			}
			out[name] = text
			break
		}
	}
	return out
}

func encapNames(s set[dataplane.Encap]) []string {
	var out []string
	for _, f := range sortedEncaps(s) {
		out = append(out, f.String())
	}
	slices.Sort(out)
	return out
}

// Offer is what is to be published and is not: nil where there is nothing, and
// while an earlier one is under way.
func (p *Planner) Offer() *store.NodeEncaps {
	if p.inflight != nil {
		return nil
	}
	f, ok := p.publication()
	f.Stays = p.publicStays()
	if !ok || sameEncaps(f, p.nodes.Own().Encaps.NodeEncaps) {
		return nil
	}
	p.inflight, p.inflightAt = cluster.NewEncaps(f), 0
	maps.Copy(p.said, publishedIn(p.inflight))
	p.Changed()
	return &f
}

// Written notes at which revision what was offered is in the store.
func (p *Planner) Written(rev store.Revision) {
	if p.inflight == nil {
		return
	}
	p.inflightAt = rev
	if p.settleInflight() {
		p.Changed()
	}
}

// settleInflight forgets what was being published once the watch has shown it. From
// then on what the others wrote before it is known here too.
func (p *publishing) settleInflight() bool {
	self := p.ends.nodes.Own()
	if p.inflight == nil || p.inflightAt == 0 || self == nil || self.Revision < p.inflightAt {
		return false
	}
	p.Published(p.inflight)
	p.inflight, p.inflightAt = nil, 0
	return true
}
