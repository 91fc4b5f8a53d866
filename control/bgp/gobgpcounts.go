package bgp

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// tally is how many prefixes of each peer import let in, and how many each is
// told. GoBGP's own counts leave the policies out, so the table is counted, and
// again only when something has changed and counting takes no more than a
// twentieth of the time: a large table's numbers may be some seconds old.
type tally struct {
	changes  uint64
	next     time.Time // not before
	received map[peerFamily]int
	accepted map[peerFamily]int
	told     map[Peer]*updateGroup // by [Peer.updateGroup]
}

// peerFamily is one peer's routes of one family.
type peerFamily struct {
	peer   netip.Addr
	family wire.Family
}

func (e *gobgp) counts(ctx context.Context) (map[netip.Addr]peerCounts, error) {
	all, err := e.heard(ctx)
	if err != nil {
		return nil, err
	}
	t, err := e.counted(all)
	if err != nil {
		return nil, err
	}
	_, peers := e.snapshot()
	out := make(map[netip.Addr]peerCounts, len(all))
	for addr, h := range all {
		c := peerCounts{in: h.in, out: h.out}
		for _, f := range families() {
			if received, ok := h.received[f]; ok {
				c.families = append(c.families, FamilyCounts{
					Family: familyName(f), Received: received, Accepted: t.accepted[peerFamily{addr, f}],
					Advertised: t.told[peers[addr].updateGroup()].advertisedTo(f, h.router),
				})
			}
		}
		out[addr] = c
	}
	return out, nil
}

func (e *gobgp) counted(heard map[netip.Addr]heard) (tally, error) {
	received := map[peerFamily]int{}
	for addr, h := range heard {
		for f, n := range h.received {
			received[peerFamily{addr, f}] = n
		}
	}
	e.mu.Lock()
	last, changes := e.tally, e.changes
	e.mu.Unlock()
	start := time.Now()
	if last.accepted != nil && (start.Before(last.next) || last.changes == changes && maps.Equal(last.received, received)) {
		return last, nil
	}
	policy, peers := e.snapshot()
	n := tally{changes: changes, received: received, accepted: map[peerFamily]int{}, told: policy.updateGroups()}
	err := e.table(func(paths []*apiutil.Path) {
		for _, p := range paths {
			if p.PeerAddress.IsValid() {
				n.accepted[peerFamily{p.PeerAddress, fromPacket(p.Family)}]++
			}
		}
		if len(paths) > 0 {
			countAdvertised(n.told, peers, paths[0], e.asn)
		}
	})
	if err != nil {
		return tally{}, err
	}
	now := time.Now()
	n.next = now.Add(20 * now.Sub(start))
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tally = n
	return n, nil
}

// heard is what GoBGP has counted of one peer.
type heard struct {
	router   netip.Addr // its router id; invalid: it has not said
	received map[wire.Family]int
	in, out  Messages
}

// heard asks GoBGP for its counts.
func (e *gobgp) heard(ctx context.Context) (map[netip.Addr]heard, error) {
	all := map[netip.Addr]heard{}
	err := e.srv.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
		addr, err := netip.ParseAddr(p.GetState().GetNeighborAddress())
		if err != nil {
			return
		}
		h := heard{received: map[wire.Family]int{}}
		h.router, _ = netip.ParseAddr(p.GetState().GetRouterId())
		for _, f := range p.GetAfiSafis() {
			family := wire.IPv4
			if f.GetConfig().GetFamily().GetAfi() == api.Family_AFI_IP6 {
				family = wire.IPv6
			}
			h.received[family] += int(f.GetState().GetReceived())
		}
		h.in, h.out = messages(p.GetState().GetMessages().GetReceived()), messages(p.GetState().GetMessages().GetSent())
		all[addr] = h
	})
	if err != nil {
		return nil, fmt.Errorf("list peers: %w", err)
	}
	return all, nil
}

func messages(m *api.Message) Messages {
	return Messages{
		Open: m.GetOpen(), Update: m.GetUpdate(), Notification: m.GetNotification(), Keepalive: m.GetKeepalive(), Refresh: m.GetRefresh(),
	}
}
