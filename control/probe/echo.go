package probe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/dataplane"
)

// Echo is what a few packets found of a tunnel that is in use. Nothing follows from it
// but what is said to people: see [Prober.Echoes].
type Echo struct {
	Node   string
	Encap  dataplane.Encap
	Inner  dataplane.Family
	Device string
	Addr   netip.Addr // of the peer on the underlay
	Local  netip.Addr // of this host, inside the tunnel
	Sent   time.Time  // when the first packet was
	Finding
	Err error // of this host: nothing could be sent
}

// echoesAtOnce is how many tunnels [Prober.Echoes] asks at a time, a few packets each.
const echoesAtOnce = 128

// Echoes asks now through every tunnel that is in use whether small and full packets
// get there and back, and returns what came of it by node. Unlike the measurements that
// go on all the time it changes nothing that is known of the tunnels. Those to peers
// that have not published that they take the encapsulation in are left out, and so is everything
// when ctx ends first. An error says why nothing is asked.
func (p *Prober) Echoes(ctx context.Context) ([]Echo, error) {
	if !p.cfg.Tunnel.Enabled {
		return nil, errors.New("probes are switched off: probe.enabled is false in the daemon's configuration")
	}
	key := p.tunnelKey.get()
	if key == nil {
		return nil, errNoKey
	}
	var targets []Target
	if err := p.ask(ctx, func(l *loop) { targets = l.tunnels.used() }); err != nil {
		return nil, err
	}
	m := Sockets{Port: cmp.Or(p.cfg.Tunnel.Port, DefaultPort)}
	out := make([]Echo, len(targets))
	var asking errgroup.Group
	asking.SetLimit(echoesAtOnce)
	for i, t := range targets {
		asking.Go(func() error {
			e := Echo{Node: t.Node, Encap: t.Encap, Inner: t.Tunnel.Inner, Device: t.Tunnel.Link, Addr: t.Registered, Local: t.Tunnel.Local, Sent: time.Now()}
			e.Finding, e.Err = m.echo(ctx, t, key)
			out[i] = e
			return nil
		})
	}
	_ = asking.Wait() // what failed is in the echoes
	if ctx.Err() != nil {
		return nil, fmt.Errorf("ask through %d tunnels: %w", len(targets), context.Cause(ctx))
	}
	return out, nil
}

// Heard returns how long ago an echo of a peer, by its address inside the tunnel, came in by a device. ok is false if none has
// since this daemon started.
func (p *Prober) Heard(device string, peer netip.Addr) (ago time.Duration, ok bool) {
	at := p.asking.lastHeard(peer, device)
	return time.Since(at), !at.IsZero()
}

// used lists the tunnels that are in use and can be asked.
func (p *tunnels) used() []Target {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Target
	for _, t := range p.sorted() {
		if t.Tunnel.InUse && t.Tunnel.Skip == "" && t.Accepts && !t.plain() {
			out = append(out, t.Target)
		}
	}
	return slices.Clip(out)
}

// echo is the part of [Sockets.Measure] that costs a few packets.
func (m Sockets) echo(ctx context.Context, t Target, key []byte) (Finding, error) {
	f := Finding{Full: t.Tunnel.MTU}
	s, err := m.open(ctx, t, key)
	if err != nil {
		return f, fmt.Errorf("open a socket on %s: %w", t.Tunnel.Link, err)
	}
	defer s.close()
	err = s.sizes(ctx, &f)
	return f, err
}
