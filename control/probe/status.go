package probe

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// answerWithin is how long ask waits for the loop.
const answerWithin = 2 * time.Second

// ask has the loop do something and waits for it.
func (p *Prober) ask(ctx context.Context, f func(*loop)) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	done := make(chan struct{})
	p.mu.Lock()
	p.asks = append(p.asks, func(l *loop) { f(l); close(done) })
	p.mu.Unlock()
	p.wake.Set()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("ask the prober: %w", context.Cause(ctx))
	}
}

// Paths returns what was measured of the underlay towards each peer, by node and
// family.
func (p *Prober) Paths(ctx context.Context) (*apiv1.PathsResponse, error) {
	if !p.cfg.Underlay.Enabled {
		return &apiv1.PathsResponse{State: "reach.enabled is false: every peer is sent to at its own address"}, nil
	}
	out := &apiv1.PathsResponse{State: p.underlayKey.state()}
	p.mu.Lock()
	if p.haveAddr != nil {
		addrs, _ := store.ParseTunnelAddresses(*p.haveAddr)
		for _, a := range addrs {
			out.TunnelAddresses = append(out.TunnelAddresses, a.String())
		}
	}
	p.mu.Unlock()
	err := p.ask(ctx, func(l *loop) {
		now := time.Now()
		for _, pr := range l.eng.peers {
			out.Paths = append(out.Paths, pr.path(now))
		}
	})
	if err != nil {
		return nil, err // the loop may still write to out
	}
	slices.SortFunc(out.Paths, func(a, b *apiv1.Path) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Family, b.Family))
	})
	return out, nil
}

func (p *peer) path(now time.Time) *apiv1.Path {
	out := &apiv1.Path{
		Node: p.key.node, Family: p.key.fam.String(), Port: uint32(p.reach.Port), Mtu: uint32(p.reach.MTU), Near: p.reach.Near.String(),
	}
	for _, c := range p.cands {
		out.Candidates = append(out.Candidates, c.String())
	}
	if least, most, ok := p.clock.ahead(now); ok {
		out.ClockAtLeast, out.ClockAtMost = durationpb.New(least), durationpb.New(most)
	}
	addr := p.target.Registered
	switch c := p.chosen; {
	case !probed(p.target):
		out.Why = "no pool uses a tunnel: nothing to be probed"
	case c == nil && p.reach.Addr.IsValid():
		addr, out.Why = p.reach.Addr, "as measured before the restart"
	case c == nil:
		out.Why = "no address has answered; its own is used"
	default:
		addr, out.Answers, out.Why = c.to.Addr(), c.up, c.rank.String()
		if c.rtt > 0 {
			out.Rtt = durationpb.New(c.rtt)
		}
		if !c.last.IsZero() {
			out.LastAnswer = timestamppb.New(c.last)
		}
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
	if addr.IsValid() {
		out.Address = addr.String()
	}
	return out
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

func (c *candidate) String() string {
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

// Tunnels returns what probes found of the tunnels to each peer, by node, family
// and encapsulation. Those to the nodes of retry, or all, are measured anew, as if
// nothing were known of them.
func (p *Prober) Tunnels(ctx context.Context, retry []string, all bool) (*apiv1.TunnelsResponse, error) {
	if !p.cfg.Tunnel.Enabled {
		return &apiv1.TunnelsResponse{State: "probes are switched off: probe.enabled is false in the daemon's configuration"}, nil
	}
	if all {
		retry = []string{""}
	}
	out := &apiv1.TunnelsResponse{State: p.tunnelKey.state()}
	err := p.ask(ctx, func(l *loop) {
		for _, node := range retry {
			l.tunnels.retry(node, time.Now())
		}
		out.Tunnels = l.tunnels.status()
	})
	if err != nil {
		return nil, err // as in Paths
	}
	return out, nil
}

func (p *tunnels) status() []*apiv1.Tunnel {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*apiv1.Tunnel
	for _, t := range p.sorted() {
		s := &apiv1.Tunnel{
			Node: t.Node, Form: t.Encap.String(), Inner: t.Tunnel.Inner.String(), Device: t.Tunnel.Link, InUse: t.Tunnel.InUse,
			BytesPerSecond: t.goodput, Reason: t.reason,
		}
		if t.settled {
			s.Delivers = t.result.String()
		}
		if t.result == dataplane.Yes {
			s.Mtu = uint32(cmp.Or(t.mtu, t.Tunnel.MTU))
		}
		if t.need != 0 {
			s.NeedsOff = t.need.String()
		}
		if off := p.applied[t.Tunnel.Link]; off != 0 {
			s.DeviceOff = off.String()
		}
		if t.answered != 0 {
			s.Answered = timestamppb.New(time.Unix(t.answered, 0))
		}
		out = append(out, s)
	}
	return out
}
