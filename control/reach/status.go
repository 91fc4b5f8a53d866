package reach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Status is what a [Prober] knows.
type Status struct {
	State     error        // why nothing is measured; nil: it is
	Published []netip.Addr // where hosts outside send to, as this host publishes it
	Paths     []Path       // by node, then family
	Refused   map[string]uint64
}

// Path is the way to a peer.
type Path struct {
	Node       string
	Family     dataplane.Family
	Reach      dataplane.Reach
	Addr       netip.Addr // in use, also where it is the peer's registered one
	Why        string
	Answers    bool
	SourcePort string // any, fixed, or empty: not known, or the form has none
	RTT        time.Duration
	LastAnswer time.Time // zero: none yet
	Candidates []string
}

// Status asks the prober.
func (p *Prober) Status(ctx context.Context) (Status, error) {
	if p.cfg.PublishOnly {
		return Status{State: errors.New("reach.enabled is false: every peer is sent to at its own address")}, nil
	}
	answer := make(chan Status, 1)
	p.mu.Lock()
	p.asks = append(p.asks, func(l *loop) { answer <- l.status() })
	p.mu.Unlock()
	p.poke()
	select {
	case s := <-answer:
		return s, nil
	case <-ctx.Done():
		return Status{}, fmt.Errorf("ask for the paths to peers: %w", context.Cause(ctx))
	}
}

func (l *loop) status() Status {
	p := l.p
	p.mu.Lock()
	s := Status{State: p.state}
	if p.haveAddr != nil {
		s.Published, _ = store.ParseTunnelAddresses(*p.haveAddr)
	}
	p.mu.Unlock()
	if s.State == nil && p.key.Load() == nil {
		s.State = errors.New("the key for probes is not read yet")
	}
	s.Refused = p.Refused()
	s.Refused["unknown"], s.Refused["replayed"], s.Refused["unasked"] = l.eng.unknown, l.eng.replayed, l.eng.unasked
	for k, pr := range l.eng.peers {
		s.Paths = append(s.Paths, pr.path(k))
	}
	slices.SortFunc(s.Paths, func(a, b Path) int {
		if c := strings.Compare(a.Node, b.Node); c != 0 {
			return c
		}
		return int(a.Family) - int(b.Family)
	})
	return s
}

// Refused counts what arrived and was thrown away before anybody looked at who
// sent it.
func (p *Prober) Refused() map[string]uint64 {
	return map[string]uint64{"forged": p.counts[forged].Load(), "garbage": p.counts[garbage].Load(), "overflow": p.counts[overflow].Load()}
}

func (r rank) String() string {
	switch r {
	case registered:
		return "its own address"
	case public:
		return "published tunnel address"
	case learned:
		return "where its probes come from"
	}
	return "unknown"
}

func (p *peer) path(k key) Path {
	out := Path{Node: k.node, Family: k.fam, Reach: p.reach, Addr: p.target.Registered}
	for _, c := range p.cands {
		out.Candidates = append(out.Candidates, c.describe())
	}
	switch c := p.chosen; {
	case !p.target.tunnelled():
		out.Why = "no pool uses a tunnel: nothing to be probed"
	case c == nil && p.reach.Addr.IsValid():
		out.Addr, out.Why = p.reach.Addr, "as measured before the restart"
	case c == nil:
		out.Why = "no address has answered; its own is used"
	default:
		out.Addr, out.Answers, out.RTT, out.LastAnswer = c.to.Addr(), c.up, c.rtt, c.last
		out.Why = c.rank.String()
		if !c.up {
			out.Why += ", which does not answer at present"
		}
		switch {
		case c.pinned():
			out.SourcePort = "fixed"
		case c.any == dataplane.Yes:
			out.SourcePort = "any"
		}
	}
	return out
}

func (c *candidate) describe() string {
	addr := c.to.Addr().String()
	if c.to.Port() != 0 {
		addr = c.to.String()
	}
	state := "not asked yet"
	switch {
	case c.up:
		state = "answers"
	case c.ever:
		state = "does not answer any more"
	case c.misses > 0:
		state = "does not answer"
	}
	return fmt.Sprintf("%s (%s): %s", addr, c.rank, state)
}
