package probe

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"sync"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/rule"
)

// Probes' next hops have numbers that the core's do not: those of the upper
// half. Their routes stand in a table of their own ([rule.Table]). To one address may lead a
// route into a tunnel and another for plain packets, by another device.
const (
	probeHops   = 1 << 31
	routeMetric = 1 << 30
	plainMetric = routeMetric + 1
)

// ways keeps the routes that probes take and nothing else. A socket that is bound to a
// device needs none for IPv4, for which the kernel takes any address behind the device as
// its link's; for IPv6, and into tunnels in IPv6, it does, to answer as well as to ask. So
// a way into a tunnel that is not in use stands for as long as the tunnel is a target,
// whoever measures; where plain packets would go, the answer comes by the usual routes,
// and the way is there while this host measures. The methods may be called from any
// goroutine.
type ways struct {
	sink  dataplane.Sink
	rules Rules
	log   *slog.Logger

	mu       sync.Mutex
	hops     map[dataplane.NextHopID]bool // of all ways
	standing map[tunnelKey]*way
}

// way is one route, with its next hop.
type way struct {
	hop   dataplane.NextHop
	route dataplane.Route
	inner dataplane.Family
	rev   dataplane.Revision // of the sink, that has both
	ruled bool               // there is a rule that leads to the route
}

func newWays(sink dataplane.Sink, rules Rules, log *slog.Logger) *ways {
	return &ways{sink: sink, rules: rules, log: log, hops: map[dataplane.NextHopID]bool{}, standing: map[tunnelKey]*way{}}
}

// needed reports whether the kernel takes a route of the probes' own to send to the target.
func needed(t Target) bool { return t.Gateway.IsValid() && !t.Tunnel.InUse }

// keep has a way stand into each of the tunnels that takes one, and ends the others.
func (w *ways) keep(tunnels []Target) {
	w.mu.Lock()
	defer w.mu.Unlock()
	wanted := map[tunnelKey]bool{}
	for _, t := range tunnels {
		if t.plain() || !needed(t) {
			continue
		}
		k := t.key()
		wanted[k] = true
		old := w.standing[k]
		if old != nil && old.leadsTo(t) {
			continue
		}
		if old != nil {
			w.end(old)
		}
		w.standing[k] = w.begin(t)
		if err := w.lead(w.standing[k]); err != nil { // the next measurement tries again
			w.log.Warn("this host cannot answer probes yet", "node", t.Node, "link", t.Tunnel.Link, "error", err)
		}
	}
	maps.DeleteFunc(w.standing, func(k tunnelKey, old *way) bool {
		if !wanted[k] {
			w.end(old)
		}
		return !wanted[k]
	})
}

// enter has the kernel know the way to a target, if it takes one, and returns what is to
// be called when the target has been measured.
func (w *ways) enter(ctx context.Context, t Target) (leave func(), err error) {
	leave = func() {}
	if !needed(t) {
		return leave, nil
	}
	w.mu.Lock()
	to := w.standing[t.key()]
	switch {
	case t.plain():
		to = w.begin(t)
		leave = func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.end(to)
		}
	case to == nil:
		w.mu.Unlock()
		return leave, nil // it is no target any more, or in use by now
	}
	err = w.lead(to)
	rev := to.rev
	w.mu.Unlock()
	if err != nil {
		return leave, err
	}
	ctx, cancel := context.WithTimeout(ctx, applyWithin)
	defer cancel()
	return leave, w.sink.Wait(ctx, rev)
}

// begin makes a way to which no rule leads yet. The caller has the lock.
func (w *ways) begin(t Target) *way {
	id := t.nextHop()
	for w.hops[id] {
		id = id&0x7fffffff + 1 | probeHops
	}
	w.hops[id] = true
	metric := uint32(routeMetric)
	if t.plain() {
		metric = plainMetric
	}
	n := &way{
		hop:   dataplane.NextHop{ID: id, Link: t.Tunnel.Link, Gateway: t.Gateway, OnLink: true},
		route: dataplane.Route{Prefix: netip.PrefixFrom(t.Peer, t.Peer.BitLen()), Table: rule.Table, Metric: metric, NextHop: id},
		inner: t.Tunnel.Inner,
	}
	n.rev = w.sink.Update(dataplane.SourceProbe, []dataplane.Object{n.hop, n.route}, nil)
	return n
}

// lead has packets that are bound to the device look for the way. The caller has the lock.
func (w *ways) lead(to *way) error {
	if to.ruled {
		return nil
	}
	if err := w.rules.Add(to.inner, to.hop.Link); err != nil {
		return err
	}
	to.ruled = true
	return nil
}

// end takes a way back. The caller has the lock.
func (w *ways) end(old *way) {
	if old.ruled {
		if err := w.rules.Remove(old.inner, old.hop.Link); err != nil {
			w.log.Warn("a rule of the probes is left", "error", err)
		}
	}
	w.sink.Update(dataplane.SourceProbe, nil, []dataplane.Key{old.route.Key(), old.hop.Key()})
	delete(w.hops, old.hop.ID)
}

func (y *way) leadsTo(t Target) bool {
	return y.hop.Link == t.Tunnel.Link && y.hop.Gateway == t.Gateway && y.route.Prefix.Addr() == t.Peer
}
