package bgp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/store"
)

// at is the peer's address, or one of its range, which gives the family.
func (p Peer) at() netip.Addr {
	if p.Range.IsValid() && !p.Addr.IsValid() {
		return p.Range.Addr()
	}
	return p.Addr
}

// field names what of a BGPPeer says where the peer is.
func (p Peer) field() string {
	if p.Range.IsValid() {
		return fmt.Sprintf("annotation %s %s", store.AnnotationListenRange, p.Range)
	}
	return fmt.Sprintf("spec.peerIP %s", p.Addr)
}

// withCallers adds to the peers those that have connected from ranges among them, as long as their range's limit lets in. An
// address that is configured, which is in seen, stays what it is. signed are the passwords of nodes that may connect from ranges: a
// node signs what it opens, which the listener has to know before.
func (d *derivation) withCallers(peers []Peer, seen map[netip.Addr]Peer) (all []Peer, signed map[netip.Addr]Password) {
	var ranges []Peer
	for i := range peers {
		if p := &peers[i]; p.listens() {
			if p.Problem = p.rangeProblem(peers[:i], peers); p.Problem == "" && d.usable(*p) {
				ranges = append(ranges, *p)
			}
		}
	}
	member := func(a netip.Addr) (p Peer, limit int, ok bool) {
		p, ok = rangeOf(ranges, a)
		if _, configured := seen[a]; !ok || configured || d.isSelf(a) {
			return Peer{}, 0, false
		}
		limit, p.Addr, p.Limit = p.Limit, a, 0
		d.asNode(&p)
		p.Passive = true
		return p, limit, true
	}
	members := map[string]int{}
	for _, a := range d.v.callers {
		if p, limit, ok := member(a); ok && members[p.Name] < limit {
			members[p.Name]++
			peers = append(peers, p)
		}
	}
	if len(ranges) == 0 {
		return peers, nil
	}
	signed = map[netip.Addr]Password{}
	for _, n := range d.v.nodes {
		for _, a := range n.addrs() {
			if p, _, ok := member(a); ok && p.Password != (Password{}) {
				signed[a] = p.Password
			}
		}
	}
	return peers, signed
}

// rangeProblem says why a range cannot be run beside the other peers.
func (p Peer) rangeProblem(before, all []Peer) string {
	for _, q := range before {
		if q.listens() && q.Range == p.Range {
			return fmt.Sprintf("annotation %s: BGPPeer %s listens for %s already: keep one of the two", store.AnnotationListenRange, q.Name, p.Range)
		}
	}
	if p.Secret == (SecretRef{}) && p.AO.N == 0 {
		return ""
	}
	// The kernel asks each address of the prefix for the password, but for those with one of their own. The keys of the prefix it takes
	// of each of them, whatever it has of its own, and it takes none where there is a password.
	for _, q := range all {
		inside := q.Addr.IsValid() && p.Range.Contains(q.Addr) || q.listens() && q.Range.Bits() > p.Range.Bits() && p.Range.Contains(q.Range.Addr())
		if inside && q.wanted() && p.AO.N+q.AO.N > 0 {
			return fmt.Sprintf("annotation %s: %s is inside %s, and the kernel can sign for an address in one way only: narrow the range, or let neither have TCP-AO", store.AnnotationTCPAO, q.Name, p.Range)
		}
		if inside && q.wanted() && q.Secret == (SecretRef{}) && q.Password == (Password{}) {
			return fmt.Sprintf("spec.password: %s is inside %s and has no password, but the kernel would require this one of it: give it one too, or narrow the range", q.Name, p.Range)
		}
	}
	return ""
}

// rangeOf returns the narrowest range that has an address.
func rangeOf(ranges []Peer, a netip.Addr) (in Peer, ok bool) {
	for _, p := range ranges {
		if p.Range.Contains(a) && (!ok || p.Range.Bits() > in.Range.Bits()) {
			in, ok = p, true
		}
	}
	return in, ok
}

// rangeAuth is what is signed with of the ranges, and of nodes in them.
func rangeAuth(c *Config) map[netip.Prefix]conn.Auth {
	out := map[netip.Prefix]conn.Auth{}
	for a, p := range c.Callers {
		out[netip.PrefixFrom(a, a.BitLen())] = conn.Auth{Password: p.reveal()}
	}
	for _, p := range c.Peers {
		if p.listens() && p.auth() != (conn.Auth{}) {
			out[p.Range] = p.auth()
		}
	}
	return out
}

// callers are the neighbours that have connected from ranges. The controller's lock guards them.
type callers struct {
	ranges  []Peer                      // where they may, as the last configuration has it
	known   map[netip.Addr]bool         // addresses that it says something else of: the node's own, those of peers
	state   map[netip.Addr]*callerState // of each of the view's
	refused map[string]string           // by the name of the range's BGPPeer, who was refused last and why
}

// callerState is a neighbour that has connected from a range.
type callerState struct {
	seen time.Time // when it had a session last, or has connected
	had  bool      // it has had one
}

// callPatience is how long one that has connected may take until it has a session.
const callPatience = 30 * time.Second

// listen notes the ranges of a configuration.
func (c *Controller) listen(cfg *Config) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.callers.ranges, c.callers.known = nil, map[netip.Addr]bool{cfg.NextHop: true, cfg.NextHop6: true}
	for _, p := range cfg.Peers {
		switch {
		case p.listens():
			c.callers.ranges = append(c.callers.ranges, p)
		case !p.Range.IsValid():
			c.callers.known[p.Addr] = true
		}
	}
}

// call decides whether a host that connects is to be a peer.
func (c *Controller) call(from netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := rangeOf(c.callers.ranges, from)
	if !ok || c.callers.known[from] {
		return false
	}
	if c.callers.state[from] != nil {
		return true
	}
	members := 0
	for a := range c.callers.state {
		if q, ok := rangeOf(c.callers.ranges, a); ok && q.Name == p.Name {
			members++
		}
	}
	if members >= p.Limit {
		c.refuse(p.Name, from, fmt.Sprintf("there are %d already, as many as annotation %s allows", members, store.AnnotationListenLimit))
		return false
	}
	c.admit(from, false)
	c.calling.Set()
	c.poke()
	return true
}

// admit has a neighbour be a peer. The caller holds c.mu.
func (c *Controller) admit(a netip.Addr, had bool) {
	if c.callers.state == nil {
		c.callers.state = map[netip.Addr]*callerState{}
	}
	c.callers.state[a] = &callerState{time.Now(), had}
	c.view.callers = append(slices.Clip(c.view.callers), a)
	c.view.sessionsChanged()
}

// refuse notes who was refused. The caller holds c.mu.
func (c *Controller) refuse(name string, from netip.Addr, why string) {
	if c.callers.refused == nil {
		c.callers.refused = map[string]string{}
	}
	c.callers.refused[name] = fmt.Sprintf("%s was refused last: %s", from, why)
}

// forgetCallers has neighbours that have no session any more be peers no longer, until ctx ends.
func (c *Controller) forgetCallers(ctx context.Context) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.calling:
		case <-tick.C:
		}
		if c.visitCallers(time.Now()) > 0 {
			tick.Reset(time.Second)
		}
	}
}

// visitCallers looks at each neighbour that has connected, and returns how many there are.
func (c *Controller) visitCallers(now time.Time) int {
	sessions, speaks := c.speaker.callers()
	c.mu.Lock()
	defer c.mu.Unlock()
	changed, gone := false, false
	for a, s := range c.callers.state {
		st, runs := sessions[a]
		if st.had && !s.had {
			changed, s.had = true, true
		}
		if st.up || !speaks { // while the datastore is waited for no neighbour can come
			s.seen = now
			continue
		}
		patience := callPatience
		if s.had && runs {
			patience = st.patience // its routes may be kept so long
		}
		if now.Sub(s.seen) < patience {
			continue
		}
		if p, ok := rangeOf(c.callers.ranges, a); ok && !s.had {
			c.refuse(p.Name, a, st.info)
		}
		delete(c.callers.state, a)
		changed, gone = changed || s.had, true
	}
	if gone {
		c.view.callers = slices.DeleteFunc(slices.Clone(c.view.callers), func(a netip.Addr) bool { return c.callers.state[a] == nil })
		c.view.sessionsChanged()
		c.poke()
	}
	if changed {
		if err := c.saveCallers(); err != nil {
			c.log.Warn("neighbours that connected from a range are not kept across a restart", "error", err)
		}
	}
	return len(c.callers.state)
}

// saveCallers keeps who has had a session, for whom a restarted daemon waits. The caller holds c.mu.
func (c *Controller) saveCallers() error {
	if c.opts.CallersFile == "" {
		return nil
	}
	list := []netip.Addr{}
	for _, a := range c.view.callers {
		if s := c.callers.state[a]; s != nil && s.had {
			list = append(list, a)
		}
	}
	raw, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return atomicfile.Write(c.opts.CallersFile, raw, 0o600)
}

func (c *Controller) loadCallers() error {
	if c.opts.CallersFile == "" {
		return nil
	}
	raw, err := os.ReadFile(c.opts.CallersFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var list []netip.Addr
	if err == nil {
		err = json.Unmarshal(raw, &list)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", c.opts.CallersFile, err)
	}
	for _, a := range list {
		if a.IsValid() && a.Zone() == "" && c.callers.state[a] == nil {
			c.admit(a, true)
		}
	}
	return nil
}

// describeRanges says of the ranges among peers how many neighbours they have, and who was refused last.
func (c *Controller) describeRanges(peers []PeerStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	members := map[string]int{}
	for _, p := range peers {
		if p.Range.IsValid() && p.Addr.IsValid() && p.State == StateUp {
			members[p.Name]++
		}
	}
	for i := range peers {
		p := &peers[i]
		if p.State != StateListening {
			continue
		}
		p.Neighbours = members[p.Name]
		p.Info = fmt.Sprintf("%d of %d neighbours", p.Neighbours, p.Limit)
		if why := c.callers.refused[p.Name]; why != "" {
			p.Info += "; " + why
		}
	}
}

// callerSession is how a neighbour that has connected is.
type callerSession struct {
	up, had  bool // it has a session, has had one
	info     string
	patience time.Duration // for how long it may be without a session
}

// callers returns how the neighbours are that have connected from ranges, and whether BGP runs at all.
func (s *Speaker) callers() (out map[netip.Addr]callerSession, speaks bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out = map[netip.Addr]callerSession{}
	counted := s.count()
	for _, ss := range s.sessions {
		if ss.peer.Range.IsValid() {
			_, info := ss.info(s.listenErr, counted)
			out[ss.peer.Addr] = callerSession{ss.up, ss.tally.established > 0, info, ss.peer.RestartTime + ss.peer.StaleTime}
		}
	}
	return out, s.engine != nil
}
