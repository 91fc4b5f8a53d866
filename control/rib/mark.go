package rib

import (
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/store"
)

// SetPaths applies a step of BGP's best paths.
func (r *RIB) SetPaths(u Update) {
	if u.Reset {
		for _, p := range u.Put {
			r.prefixes.At(r.prefixes.make(p.Prefix)).flags |= isKept
		}
		for at, rec := range r.prefixes.All() {
			if rec.flags&isKept == 0 {
				r.forgetPath(at)
			}
		}
	}
	for _, p := range u.Del {
		if at := r.prefixes.find(p); at != 0 {
			r.forgetPath(at)
		}
	}
	r.SetDown(u.Down, nil)
	r.up = append(r.up, u.Up...)
	for _, p := range u.Put {
		at := r.prefixes.make(p.Prefix)
		r.prefixes.At(at).flags &^= isKept
		if r.putPath(at, p.Announced) {
			r.mark(at)
		}
	}
}

// PreferLearned says whether what BGP says of a prefix precedes what is known of other nodes'
// blocks, because that may be old.
func (r *RIB) PreferLearned(prefer bool) {
	if r.preferLearned == prefer {
		return
	}
	r.preferLearned = prefer
	for at, rec := range r.prefixes.All() {
		if rec.path == 0 {
			continue
		}
		if _, ok := r.blocks.Origin(rec.prefix()); ok {
			r.mark(at)
		}
	}
}

func (r *RIB) forgetPath(at ref) {
	if r.deletePath(at) {
		r.mark(at)
	}
}

// SetUnderlay follows a new snapshot of the network around the host, which set applies.
func (r *RIB) SetUnderlay(set func()) {
	before, bridges := r.resolutions(), r.otherPods()
	set()
	if !slices.Equal(bridges, r.otherPods()) {
		r.MarkOwn()
	}
	for p := range r.waiting {
		r.mark(r.prefixes.make(p))
	}
	for a, was := range before {
		if now := r.resolution(a); now != was {
			// Another gateway is one object replaced, and so is a group that lost a
			// member; one that came up or went down is a choice for every prefix behind it.
			r.followNextHop(a, now.ok != was.ok)
		}
	}
}

// resolutions says how each next hop is reached that BGP names, or that is in
// use still by routes which are to be chosen anew: until then others would take
// it for as usable as it was.
func (r *RIB) resolutions() map[netip.Addr]resolution {
	out := map[netip.Addr]resolution{}
	for a := range r.hopsOf.Keys() {
		out[a] = r.resolution(a)
	}
	for k := range r.hops {
		if via := k.hops.Single(); via.IsValid() && !k.group() {
			out[via] = r.resolution(via)
		}
	}
	return out
}

// refreshNode brings all that depends on a node up to date: its next hops in
// place where they stay usable, and its prefixes anew where that may have
// changed.
func (r *RIB) refreshNode(name string) {
	for _, p := range r.pools.ByName {
		r.refresh(hopKey{Key: encap.Key{Pool: p.Name, Node: name, Family: p.Family()}})
	}
	for p := range r.blocks.Of(name) {
		if at := r.prefixes.make(p); !r.wellRouted(r.prefixes.At(at), name) {
			r.mark(at)
		}
	}
	n := r.nodes.ByName[name]
	if n == nil {
		return
	}
	for _, a := range n.Addrs() {
		for k := range r.hopsOf.Of(a) {
			for at, rec := range r.behind(r.byHop[k]) {
				if !r.wellRouted(rec, name) {
					r.mark(at)
				}
			}
		}
	}
}

// wellRouted reports whether a prefix has a route to a node as the forwarding
// path to it is now.
func (r *RIB) wellRouted(rec *record, name string) bool {
	c := r.choices.Value(rec.route)
	return c.on != nil && c.on.key.Node == name && !r.stale[c.on.key] && c.mtu == c.on.plan.MTU
}

// MarkWithin marks what lies inside a pool; a prefix that is not valid: all.
// Pools change rarely, so this may look at everything.
func (r *RIB) MarkWithin(cidr netip.Prefix) {
	within := func(p netip.Prefix) bool {
		return !cidr.IsValid() || cidr.Bits() <= p.Bits() && cidr.Contains(p.Addr())
	}
	for p := range r.blocks.Prefixes() {
		if within(p) {
			r.mark(r.prefixes.make(p))
		}
	}
	for at, rec := range r.prefixes.All() {
		if rec.path != 0 && within(rec.prefix()) {
			r.mark(at)
		}
	}
}

// MarkOrigins marks prefixes that are another node's now, by the blocks.
func (r *RIB) MarkOrigins(changed []netip.Prefix) {
	for _, p := range changed {
		r.mark(r.prefixes.make(p))
		r.markParts(p)
	}
}

// markParts marks what BGP says of parts of a block: whether it counts depends on who
// holds the block. Blocks are small, and there may be a million paths.
func (r *RIB) markParts(block netip.Prefix) {
	if len(r.byHop) == 0 {
		return // BGP says nothing
	}
	free := block.Addr().BitLen() - block.Bits()
	if free > topology.MaxBlockBits || r.prefixes.Len() < 2<<free {
		for at, rec := range r.prefixes.All() {
			if p := rec.prefix(); rec.path != 0 && p.Bits() > block.Bits() && block.Contains(p.Addr()) {
				r.mark(at)
			}
		}
		return
	}
	for bits := block.Bits() + 1; bits <= block.Addr().BitLen(); bits++ {
		for i := range 1 << (bits - block.Bits()) {
			a, _ := store.AddrAt(block, i<<(block.Addr().BitLen()-bits)) // it lies inside
			r.markPath(netip.PrefixFrom(a, bits))
		}
	}
}

// MarkAround marks what depends on whether and how a node has an address:
// paths with that next hop, prefixes in which it lies, and as whether a pool lies over
// the hosts' network counts for all of its prefixes, these.
func (r *RIB) MarkAround(a netip.Addr) {
	if pool, ok := r.pools.Of(topology.Single(a)); ok {
		r.MarkWithin(r.pools.ByName[pool].CIDR)
	}
	r.markNextHop(a)
	for p := range r.blocks.Around(a) {
		r.mark(r.prefixes.make(p))
	}
	if len(r.byHop) == 0 {
		return // BGP says nothing
	}
	for bits := range a.BitLen() + 1 {
		r.markPath(netip.PrefixFrom(a, bits).Masked())
	}
}

// markPath marks a prefix if BGP says something of it.
func (r *RIB) markPath(p netip.Prefix) {
	if at := r.prefixes.find(p); at != 0 && r.prefixes.At(at).path != 0 {
		r.mark(at)
	}
}

// covered finds a node whose own address lies in a prefix of a pool, where a route for
// the prefix would take hosts off the network: where the pool lies over the hosts'
// network. A single Node with an address in a pool that lies apart from it is wrong
// itself: it must not take the workloads of another's block out of their tunnel.
func (r *RIB) covered(p netip.Prefix, poolName string) (node string, a netip.Addr, ok bool) {
	for node, a := range r.nodes.Within(p) {
		if pool := r.pools.ByName[poolName]; node == r.nodes.Self || pool == nil || r.overHosts(pool.CIDR) {
			return node, a, true
		}
	}
	return "", netip.Addr{}, false
}

// overHosts reports whether a pool's range lies over the hosts' network: over what the
// underlay has a route to besides the default one and those to this host's own
// addresses, of which tunnels' lie in pools, or over several nodes' addresses.
func (r *RIB) overHosts(cidr netip.Prefix) bool {
	nodes := 0
	for node := range r.nodes.Within(cidr) {
		if nodes++; node == r.nodes.Self || nodes > 1 {
			return true
		}
	}
	for u := range r.network.RoutesWithin(cidr) {
		if u.Prefix.Bits() > 0 && !r.network.OfOwnAddress(u) {
			return true
		}
	}
	u, ok := r.network.RouteTo(cidr.Addr())
	return ok && u.Prefix.Bits() > 0 && !r.network.OfOwnAddress(u)
}

// SetDown notes next hops that must not be used, and those that may again.
func (r *RIB) SetDown(down, up []netip.Addr) {
	for _, a := range down {
		r.up = slices.DeleteFunc(r.up, func(u netip.Addr) bool { return u == a })
		if !r.down[a] {
			r.down[a] = true
			r.followNextHop(a, true)
		}
	}
	for _, a := range up {
		if r.down[a] {
			delete(r.down, a)
			r.followNextHop(a, true)
		}
	}
}

// followNextHop brings up to date what uses a next hop that changed. With
// turned it came up or went down.
func (r *RIB) followNextHop(a netip.Addr, turned bool) {
	via := hopKeyVia(a)
	r.refresh(via)
	for k := range r.groupsOf(a) {
		r.refresh(k)
	}
	if !turned {
		return
	}
	for k := range r.hopsOf.Of(a) {
		// A group that is still of use moved its routes already; those that
		// desire it and are elsewhere may come.
		if !k.group() || r.wellPlaced(k) < r.byHop[k].n {
			r.turned[k] = struct{}{}
		}
	}
}

func (r *RIB) markNextHop(a netip.Addr) {
	for k := range r.hopsOf.Of(a) {
		r.turned[k] = struct{}{}
	}
}

// MarkOwn marks this host's own prefixes.
func (r *RIB) MarkOwn() {
	for p := range r.blocks.Of(r.nodes.Self) {
		r.mark(r.prefixes.make(p))
	}
}

// MarkAll marks every prefix.
func (r *RIB) MarkAll() { r.MarkWithin(netip.Prefix{}) }

// FollowAll has the next [RIB.Follow] bring every next hop up to date.
func (r *RIB) FollowAll() { r.followAll = true }

// Follow brings up to date what depends on some nodes, and with all every next hop.
func (r *RIB) Follow(nodes map[string]struct{}, all bool) {
	if r.followAll || all {
		for k := range r.hops {
			r.refresh(k)
		}
		r.followAll = false
	}
	for name := range nodes {
		r.refreshNode(name)
	}
}

// RefreshPool brings the next hops up to date by which nodes are reached for a
// pool.
func (r *RIB) RefreshPool(name string) {
	for k := range r.hops {
		if k.Pool == name {
			r.refresh(k)
		}
	}
}

// UseAgain lets gateways be used again of which the withdrawals before have been chosen for.
// It reports whether there are any.
func (r *RIB) UseAgain() bool {
	if len(r.up) == 0 {
		return false
	}
	r.SetDown(nil, r.up)
	r.up = nil
	return true
}
