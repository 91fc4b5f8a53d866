package operator

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/store"
)

// Speaker answers for BGP, and its plans know of the blocks that hosts take and give up.
type Speaker struct {
	rpc.BGP
	Server *Server
}

// Plan implements [rpc.BGP].
func (s Speaker) Plan(ctx context.Context, changes []store.Event, yield func(bgp.Plan) error) error {
	blocks, err := s.Server.plannedBlocks(changes)
	if err != nil {
		return err
	}
	return s.BGP.Plan(ctx, slices.Concat(changes, blocks), yield)
}

// plannedBlocks is what changes of pools and Nodes have hosts write about blocks.
func (s *Server) plannedBlocks(changes []store.Event) ([]store.Event, error) {
	concern := func(k store.Key) bool { return k.Kind == store.KindIPPool || k.Kind == store.KindNode }
	if !slices.ContainsFunc(changes, func(ev store.Event) bool { return concern(ev.Key) }) {
		return nil, nil
	}
	holds, err := s.cfg.Snapshot(concern)
	if err != nil {
		return nil, err
	}
	then := map[store.Key]any{} // nil: it is gone
	for _, ch := range slices.Concat(holds, s.decoded(changes)) {
		if ch.Err == nil {
			then[ch.Key] = ch.Value
		}
	}
	nodes, pools := map[string]*cluster.Node{}, []*cluster.Pool(nil)
	for _, v := range then {
		switch v := v.(type) {
		case *cluster.Node:
			nodes[v.Name] = v
		case *cluster.Pool:
			pools = append(pools, v)
		}
	}
	host := s.foreseeing().hosts(pools)
	var out []store.Event
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		_, blocks := host(nodes[name])
		for _, b := range blocks {
			out = append(out, claim(name, b)...)
		}
	}
	return out, nil
}

// claim is what a node writes when it takes a block, or gives it up.
func claim(node string, b *cluster.Block) []store.Event {
	block, affinity := store.Event{Key: store.BlockKey(b.CIDR)}, store.Event{Key: store.AffinityKey(node, b.CIDR)}
	if b.Holder != "" {
		is := &store.Block{CIDR: b.CIDR.String()}
		is.SetHolder(b.Holder)
		block.Object.Value, affinity.Object.Value = is, &store.Affinity{State: store.AffinityConfirmed}
	}
	return []store.Event{block, affinity}
}

// foreseeing begins to say what becomes of tunnels and blocks.
func (s *Server) foreseeing() *foreseeing {
	return &foreseeing{self: s.cfg.Node, ipam: s.cfg.IPAM, kind: s.cfg.TunnelKind, invented: map[netip.Addr]string{}}
}
