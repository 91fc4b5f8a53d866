package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/vrouter"
)

// workloadIPAM gives attach what it asks of IPAM.
type workloadIPAM struct{ *ipam.Allocator }

func (w workloadIPAM) Assign(ctx context.Context, reqs ...attach.AssignRequest) ([]attach.Assignment, error) {
	var parts []ipam.Part
	for _, r := range reqs {
		parts = append(parts, ipam.Part{Addr: r.Address, Request: ipam.Request{
			Family: r.Family, Handle: r.Handle, Attributes: r.Attributes, Pools: r.Pools, Use: ipam.Workload, Idempotent: true,
			NamespaceLabels: r.Labels, Again: r.Again, Fresh: r.Fresh,
		}})
	}
	var out []attach.Assignment
	if ready, ok := w.Take(parts...); ok {
		for _, g := range ready {
			out = append(out, attach.Assignment{Addr: g.Addr, Block: g.Block, Reserved: true})
		}
		return out, nil
	}
	got, err := w.AssignTogether(ctx, parts...)
	if err != nil {
		return nil, ipamError(err)
	}
	for _, g := range got {
		out = append(out, attach.Assignment{Addr: g[0].Addr, Block: g[0].Block})
	}
	return out, nil
}

func (w workloadIPAM) ReleaseHandle(ctx context.Context, handle string, keep ...netip.Addr) error {
	_, err := w.ReleaseHandleHere(ctx, handle, keep...)
	return err
}

// Confirm implements [attach.IPAM].
func (w workloadIPAM) Confirm(ctx context.Context, cs ...attach.Confirmation) []error {
	list := make([]ipam.Confirmation, len(cs))
	for i, c := range cs {
		list[i] = ipam.Confirmation(c)
	}
	errs := w.Allocator.Confirm(ctx, list...)
	for i, err := range errs {
		if err != nil {
			errs[i] = ipamError(err)
		}
	}
	return errs
}

// Ready implements [attach.IPAM].
func (w workloadIPAM) Ready() bool { return len(w.Allocator.Ready()) > 0 }

// ipamError says in attach's terms what kind of refusal this is.
func ipamError(err error) error {
	switch {
	case errors.Is(err, ipam.ErrInvalidRequest), errors.Is(err, ipam.ErrUnknownPool), errors.Is(err, ipam.ErrOutsidePools):
		return fmt.Errorf("%w: %w", attach.ErrInvalid, err)
	case errors.Is(err, ipam.ErrNotReady), errors.Is(err, ipam.ErrNodeMissing), errors.Is(err, ipam.ErrStopped):
		return fmt.Errorf("%w: %w", attach.ErrNotReady, err)
	}
	if errors.Is(err, ipam.ErrTaken) && !errors.Is(err, ipam.ErrResting) {
		return fmt.Errorf("%w: %w", attach.ErrHeld, err)
	}
	for _, refusal := range []error{
		ipam.ErrNoPool, ipam.ErrExhausted, ipam.ErrBlockLimit, ipam.ErrTaken, ipam.ErrStrictAffinity, ipam.ErrNotHolder,
	} {
		if errors.Is(err, refusal) {
			return fmt.Errorf("%w: %w", attach.ErrNoAddress, err)
		}
	}
	return err
}

// tunnelIPAM gives the node's agent what it asks of IPAM.
type tunnelIPAM struct{ *ipam.Allocator }

func tunnelKind(t node.Tunnel) ipam.TunnelKind {
	switch t {
	case node.TunnelIPIP:
		return ipam.IPIPTunnel
	case node.TunnelIPIPv6:
		return ipam.IPIPv6Tunnel
	case node.TunnelVXLANv6:
		return ipam.VXLANv6Tunnel
	case node.TunnelVXLAN:
	}
	return ipam.VXLANTunnel
}

// Ensure gives no address when the pools of the encapsulation do not select
// this host: it has no workloads in them.
func (w tunnelIPAM) Ensure(ctx context.Context, t node.Tunnel) (netip.Addr, bool, error) {
	got, old, err := w.EnsureTunnel(ctx, tunnelKind(t))
	if errors.Is(err, ipam.ErrNoPool) {
		return netip.Addr{}, false, nil
	}
	return got.Addr, len(old) > 0, err
}

func (w tunnelIPAM) Release(ctx context.Context, t node.Tunnel, keep netip.Addr) error {
	return w.ReleaseTunnel(ctx, tunnelKind(t), keep)
}

// hopSet names the next hops of all paths of equal cost, if there are several.
func hopSet(p bgp.Path) vrouter.HopSet {
	if len(p.More) == 0 {
		return ""
	}
	hops := []netip.Addr{p.NextHop}
	for _, h := range p.More {
		hops = append(hops, h.NextHop)
	}
	return vrouter.HopSetOf(hops...)
}

// pathUpdate turns what BGP learned into what the core takes. Neighbours in it
// often have the same next hops, so what is said of them is kept.
func pathUpdate(ch bgp.Changes) vrouter.PathUpdate {
	u := vrouter.PathUpdate{Reset: ch.Reset, Del: ch.Del, Lost: ch.Lost, Found: ch.Found, Synced: ch.Synced}
	if len(ch.Put) == 0 {
		return u
	}
	u.Put = make([]vrouter.Path, len(ch.Put))
	var last bgp.Path
	for i, p := range ch.Put {
		out := vrouter.Path{Prefix: p.Prefix, NextHop: p.NextHop}
		if i > 0 && p.Hop == last.Hop && slices.Equal(p.More, last.More) {
			out.Peer, out.Set = u.Put[i-1].Peer, u.Put[i-1].Set
		} else {
			out.Peer, out.Set = p.Peer, hopSet(p)
			if p.PeerAddr.IsValid() && p.PeerAddr.String() != p.Peer {
				out.Peer = fmt.Sprintf("%s (%s)", p.Peer, p.PeerAddr)
			}
		}
		u.Put[i], last = out, p
	}
	return u
}
