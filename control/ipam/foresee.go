package ipam

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/cluster"
)

// Foresight says what hosts make of their blocks and of their tunnels' addresses when the pools, or the nodes' labels,
// are others. It takes every host to hold a reserve as this one does. Nodes are looked at one after the other, as if each had
// its blocks before the next began: where two of them want the same one, which gets it is not known.
type Foresight struct {
	s       *state // of the node that is looked at
	now     time.Time
	held    map[string][]*blockInfo // by node, in the order of their keys
	changed map[netip.Prefix]*cluster.Block
}

// Foresight begins with what there is now, and these pools.
func (a *Allocator) Foresight(pools []*cluster.Pool) *Foresight {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := newState("")
	s.config, s.usePodCIDR, s.reservations = a.state.config, a.state.usePodCIDR, maps.Clone(a.state.reservations)
	s.registered, s.synced = true, true
	s.reserve.cfg.Min = a.cfg.Reserve.Min
	for _, p := range pools {
		s.pools[p.Name] = poolFrom(p.Name, p)
	}
	f := &Foresight{s: s, now: a.cfg.Clock(), held: map[string][]*blockInfo{}}
	for cidr, b := range a.state.blocks {
		counted := *b.Block
		s.setBlock(cidr, &blockInfo{Block: &counted, broken: b.broken})
		if counted.Holder != "" && b.broken == nil {
			f.held[counted.Holder] = append(f.held[counted.Holder], s.blocks[cidr])
		}
	}
	for _, held := range f.held {
		slices.SortFunc(held, byPath)
	}
	return f
}

// Node goes on to the next node. An address of a tunnel that it does not publish is on its way back.
func (f *Foresight) Node(n *cluster.Node) {
	f.s.node, f.s.labels, f.s.podCIDRs = n.Name, n.Labels, n.PodCIDRs
	f.s.setReserved()
	f.changed = map[netip.Prefix]*cluster.Block{}
	published := []netip.Addr{n.IPIPAddr.IPv4, n.IPIPAddr.IPv6, n.VXLANAddr.IPv4, n.VXLANAddr.IPv6}
	for _, b := range f.held[n.Name] {
		for _, t := range b.Tunnels {
			if t.Node == n.Name && !slices.Contains(published, t.Addr) {
				b.Used--
			}
		}
	}
}

// Tunnel says what [Allocator.EnsureTunnel] makes of the address of the node's tunnel: whether it is kept, and if not,
// the pool that a new one is taken from; empty: the tunnel has none then. have is invalid where there is none yet.
func (f *Foresight) Tunnel(k TunnelKind, have netip.Addr) (keep bool, from string) {
	r := &Request{Family: k.family(), Use: Tunnel, tunnel: &k}
	usable, err := f.s.selectPools(r)
	switch {
	case have.IsValid() && slices.ContainsFunc(usable, func(p *pool) bool { return p.cidr.Contains(have) }):
		return true, ""
	case err != nil:
		return have.IsValid() && f.s.stillCarries(k, netip.PrefixFrom(have, have.BitLen())), ""
	}
	var b *blockInfo
	if own := f.in(usable...); slices.ContainsFunc(own, hasRoom) {
		b = own[slices.IndexFunc(own, hasRoom)]
	} else if b = f.claim(r, usable); b == nil {
		return false, usable[0].name // from another node's block
	}
	b.Used++
	return false, f.s.poolOf(b.CIDR).name
}

// Release says that the address of a tunnel goes back.
func (f *Foresight) Release(a netip.Addr) {
	if b := f.s.blockAround(a); b != nil {
		b.Used--
	}
}

// Blocks says what the node's host does to its blocks, once its tunnels' addresses have been looked at: it returns those
// that it takes, and without a holder those that it gives up.
func (f *Foresight) Blocks() []*cluster.Block {
	for _, p := range f.s.poolsByName() {
		if f.s.reserve.cfg.Min > 0 && p.cidr.IsValid() {
			f.reserve(p)
		}
	}
	f.held[f.s.node] = slices.DeleteFunc(f.held[f.s.node], func(b *blockInfo) bool {
		if b.Used > 0 || !f.s.unwanted(b.CIDR) {
			return false
		}
		f.s.setBlock(b.CIDR, nil)
		f.changed[b.CIDR] = &cluster.Block{CIDR: b.CIDR}
		return true
	})
	return slices.SortedFunc(maps.Values(f.changed), func(a, b *cluster.Block) int { return a.CIDR.Compare(b.CIDR) })
}

// reserve does what a [fillStep] does.
func (f *Foresight) reserve(p *pool) {
	own := f.in(p)
	if !f.s.reserves(p, f.now) {
		for _, b := range own {
			b.Used, b.Held = b.Used-b.Held, 0
		}
		return
	}
	target, held, free := f.s.reserve.target(p, f.now), 0, 0
	for _, b := range own {
		held, free = held+b.Held, free+b.Size-b.Used
	}
	if held >= enoughOf(target) {
		return
	}
	for spare := f.s.spare(p); spare && held+free < target; {
		b := f.claim(&Request{Family: p.family(), Use: Workload}, []*pool{p})
		if b == nil {
			break
		}
		own, free = append(own, b), free+b.Size-b.Used
	}
	for _, b := range own {
		n := min(target-held, b.Size-b.Used)
		b.Used, b.Held, held = b.Used+n, b.Held+n, held+n
	}
}

// in returns the node's blocks in some pools, in the order of their keys.
func (f *Foresight) in(pools ...*pool) []*blockInfo {
	in := finder{pools: pools}
	return slices.DeleteFunc(slices.Clone(f.held[f.s.node]), func(b *blockInfo) bool { return in.poolFor(b.CIDR) == nil })
}

func hasRoom(b *blockInfo) bool { return b.Used < b.Size }

func byPath(a, b *blockInfo) int { return strings.Compare(a.path(), b.path()) }

// claim takes the block that the node takes next in one of the pools, nil if there is none for it.
func (f *Foresight) claim(r *Request, pools []*pool) *blockInfo {
	in := finder{d: newDraft(f.s, nil, f.now), r: r, pools: pools, want: 1}
	if !f.s.config.AutoAllocateBlocks || len(f.in(pools...)) >= f.s.blockLimit(r) {
		return nil
	}
	if found, err := in.newBlock(); err != nil || !found {
		return nil
	}
	b := &cluster.Block{CIDR: in.picks[0].bd.block.cidr, Holder: f.s.node, Size: blockLen(in.picks[0].bd.block.cidr)}
	f.s.setBlock(b.CIDR, &blockInfo{Block: b})
	f.changed[b.CIDR] = b
	f.held[f.s.node] = append(f.held[f.s.node], f.s.blocks[b.CIDR])
	slices.SortFunc(f.held[f.s.node], byPath)
	return f.s.blocks[b.CIDR]
}
