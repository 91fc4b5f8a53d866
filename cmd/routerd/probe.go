package main

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

// tunnels joins what the prober must know of the world from those who know it.
type tunnels struct {
	self   string
	prober *probe.Prober
	driver func(link string) string // of an uplink

	mu       sync.Mutex
	targets  []vrouter.Target
	underlay dataplane.Underlay
	nodes    map[string]tunnelNode
	synced   bool // all nodes are known
	key      []byte
	err      error // why there is no key
}

// tunnelNode is what matters of a Node resource here.
type tunnelNode struct {
	accepts bool         // it takes part in what nodes agree on, so it answers probes
	outer   netip.Addr   // IPv4, on the underlay; not valid: none
	addrs   []netip.Addr // inside tunnels; IPIP's is that on the underlay
}

// newTunnels makes the prober, or nil where probes are not enabled.
func (d *router) newTunnels() (*tunnels, error) {
	if !d.cfg.Probe.Enabled {
		return nil, nil //nolint:nilnil // there is none
	}
	release, err := probe.KernelRelease()
	if err != nil {
		return nil, err
	}
	return &tunnels{
		self: d.name, driver: probe.DriverOf, nodes: map[string]tunnelNode{}, err: errors.New("the cluster's key is not read yet"),
		prober: probe.New(probe.Config{
			Sink: d.kernel, Log: d.log.With("component", "probe"), File: filepath.Join(d.cfg.StateDir, "probes.json"),
			Kernel: release, Port: uint16(d.cfg.Probe.Port), Report: d.core.Delivery,
		}),
	}, nil
}

// run measures until ctx ends.
func (t *tunnels) run(ctx context.Context, core *vrouter.Core, s store.Store) error {
	// Before anything is measured: from now on a peer is moved to a tunnel only
	// after its probe.
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		if err := core.Delivery(ctx, f, nil); err != nil {
			return err
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { t.followKey(ctx, s) })
	wg.Go(func() {
		for targets := range core.Probes(ctx) {
			t.change(func() { t.targets = targets })
		}
	})
	return t.prober.Run(ctx)
}

// The pace of reading the cluster's key: until it is known, and then in case
// somebody replaced it.
const (
	keyName   = "probe"
	keyWithin = 10 * time.Second
	keyMin    = 200 * time.Millisecond
	keyMax    = 30 * time.Second
	keyAgain  = 10 * time.Minute
)

func (t *tunnels) followKey(ctx context.Context, s store.Store) {
	pause := keyMin
	for {
		attempt, cancel := context.WithTimeout(ctx, keyWithin)
		k, err := store.SharedSecret(attempt, s, keyName)
		cancel()
		wait := keyAgain
		switch {
		case err == nil:
			pause = keyMin
			t.change(func() { t.key, t.err = k, nil })
		case t.known():
			wait = keyMax // the old one serves as long as the datastore is away
		default:
			wait, pause = pause, min(2*pause, keyMax)
			t.change(func() { t.err = err })
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (t *tunnels) known() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.key) > 0
}

// HandleStore takes in the nodes. A tunnels that is nil takes nothing.
func (t *tunnels) HandleStore(b store.Batch) {
	if t == nil {
		return
	}
	changed := b.Synced && !t.isSynced()
	for _, ev := range b.Events {
		if ev.Key.Kind != store.KindNode || ev.Err != nil {
			continue
		}
		var now tunnelNode
		if n, ok := ev.Object.Value.(*store.Node); ok && !ev.Deleted() {
			now = newTunnelNode(n)
		}
		t.mu.Lock()
		old := t.nodes[ev.Key.Name]
		if now.accepts != old.accepts || now.outer != old.outer || !slices.Equal(now.addrs, old.addrs) {
			changed = true
			t.nodes[ev.Key.Name] = now
		}
		t.mu.Unlock()
	}
	if changed {
		t.change(func() { t.synced = t.synced || b.Synced })
	}
}

func (t *tunnels) isSynced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

func newTunnelNode(n *store.Node) tunnelNode {
	out := tunnelNode{accepts: store.FormsOf(n).Published}
	inside := []string{n.Spec.IPv4VXLANTunnelAddr, n.Spec.IPv6VXLANTunnelAddr, n.Annotations[store.AnnotationIPv6IPIPTunnelAddr]}
	if n.Spec.BGP != nil {
		inside = append(inside, n.Spec.BGP.IPv4IPIPTunnelAddr)
		if p, err := store.ParseAddress(n.Spec.BGP.IPv4Address); err == nil {
			out.outer = p.Addr()
			out.addrs = append(out.addrs, p.Addr())
		}
	}
	for _, s := range inside {
		if p, err := store.ParseAddress(s); err == nil {
			out.addrs = append(out.addrs, p.Addr())
		}
	}
	return out
}

// HandleUnderlay takes in a snapshot of the host's network.
func (t *tunnels) HandleUnderlay(u dataplane.Underlay) {
	if t != nil {
		t.change(func() { t.underlay = u })
	}
}

// change changes what is known and hands the whole to the prober.
func (t *tunnels) change(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
	if t.synced {
		t.prober.Set(t.world())
	}
}

// world is what the prober is to know. The caller has the lock.
func (t *tunnels) world() probe.World {
	w := probe.World{Key: t.key, Endpoints: t.endpoints()}
	for _, name := range slices.Sorted(maps.Keys(t.nodes)) {
		if name != t.self {
			w.Peers = append(w.Peers, t.nodes[name].addrs...)
		}
	}
	uplinks := map[string]string{}
	for _, tg := range t.targets {
		if _, ok := uplinks[tg.Uplink]; !ok {
			uplinks[tg.Uplink] = strings.TrimSpace(tg.Uplink + " " + t.driver(tg.Uplink))
		}
		for _, tun := range tg.Forms {
			if tg, ok := newTarget(tg, tun, uplinks[tg.Uplink], t.nodes[tg.Node].accepts); ok {
				w.Targets = append(w.Targets, tg)
			}
		}
	}
	return w
}

// newTarget says how to measure a tunnel. It reports false while the address of
// one of the two devices is not known: nothing can be sent that way either.
func newTarget(tg vrouter.Target, tun vrouter.Tunnel, uplink string, accepts bool) (probe.Target, bool) {
	out := probe.Target{
		Node: tg.Node, Family: tg.Family, Inner: tun.Inner, Form: tun.Form, Link: tun.Device, MTU: tun.MTU,
		Local: tun.Local, Addr: tun.Peer, Uplink: uplink, Accepts: accepts, InUse: tun.InUse,
	}
	if len(tg.Addrs) > 0 {
		out.Outer = tg.Addrs[0]
	}
	switch {
	case tun.Form.Driver == dataplane.DriverIPIP && tg.Family == dataplane.IPv4:
		// Without a route, the kernel takes the inner destination as that of the
		// outer header: so it is the peer's own address.
		out.Local, out.Addr = tg.Local.Addr(), out.Outer
		if len(tg.Addrs) > 1 {
			out.Skip = "IPIP to a host behind NAT is not measured"
		}
	case tun.Form.Driver == dataplane.DriverIPIP, tun.Inner == dataplane.IPv6:
		out.Via = tun.Gateway
	}
	return out, out.Local.IsValid() && out.Addr.IsValid()
}

// endpoints lists where this host answers: on its tunnel devices.
func (t *tunnels) endpoints() []probe.Endpoint {
	own := t.nodes[t.self].outer
	addrs := map[string][]netip.Addr{}
	for _, a := range t.underlay.Addresses {
		if !a.Prefix.Addr().IsLinkLocalUnicast() {
			addrs[a.Link] = append(addrs[a.Link], a.Prefix.Addr())
		}
	}
	var out []probe.Endpoint
	for _, l := range t.underlay.Links {
		switch {
		case l.Name == ipip.Device && len(addrs[l.Name]) > 0 && own.IsValid():
			out = append(out, probe.Endpoint{Link: l.Name, Index: l.Index, Addr: own})
		case strings.HasPrefix(l.Name, vxlan.Device), l.Name == vxlan.DeviceV6, l.Name == ipip.DeviceV6:
			for _, a := range addrs[l.Name] {
				out = append(out, probe.Endpoint{Link: l.Name, Index: l.Index, Addr: a})
			}
		}
	}
	return out
}

// Tunnels implements [rpc.Operator].
func (d *router) Tunnels(ctx context.Context, retry []string, all bool) (*apiv1.TunnelsResponse, error) {
	if d.tunnels == nil {
		return &apiv1.TunnelsResponse{State: "probes are switched off: probe.enabled is false in the daemon's configuration"}, nil
	}
	if all {
		retry = []string{""}
	}
	for _, node := range retry {
		if err := d.tunnels.prober.Retry(ctx, node); err != nil {
			return nil, err
		}
	}
	out := &apiv1.TunnelsResponse{}
	d.tunnels.mu.Lock()
	if d.tunnels.err != nil {
		out.State = d.tunnels.err.Error()
	}
	d.tunnels.mu.Unlock()
	for _, s := range d.tunnels.prober.Status() {
		out.Tunnels = append(out.Tunnels, tunnelOf(s))
	}
	return out, nil
}

func tunnelOf(s probe.Status) *apiv1.Tunnel {
	out := &apiv1.Tunnel{
		Node: s.Target.Node, Form: s.Target.Form.String(), Inner: s.Target.Inner.String(), Device: s.Target.Link, InUse: s.Target.InUse,
		BytesPerSecond: s.Goodput, Reason: s.Reason,
	}
	if s.Settled {
		out.Delivers = s.Result.String()
	}
	if s.Result == dataplane.Yes {
		out.Mtu = uint32(cmp.Or(s.MTU, s.Target.MTU))
	}
	if s.Need != 0 {
		out.NeedsOff = s.Need.String()
	}
	if s.Device != 0 {
		out.DeviceOff = s.Device.String()
	}
	if s.At != 0 {
		out.Answered = timestamppb.New(time.Unix(s.At, 0))
	}
	return out
}
