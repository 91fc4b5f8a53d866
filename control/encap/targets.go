package encap

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// probeTargets is what is to be measured.
type probeTargets struct {
	*sender
	plainTo  set[string]                        // nodes to which plain packets are measured
	targeted map[string][]dataplane.ProbeTarget // by node
	order    []string                           // the nodes, by name; nil: not known
	shared   map[dataplane.ProbePath]*dataplane.ProbePath
	last     *dataplane.ProbePath // of shared: the next one is often the same
	usual    map[dataplane.Family]dataplane.Encap

	// Of one [probeTargets.Targets], with room for the next.
	tunnelEnds []tunnelEnd
	tunnels    []candidate
	found      []dataplane.ProbeTarget
}

// maxShared bounds the paths that are kept for the next targets: a host has few, and those
// of before go when there are as many.
const maxShared = 64

func newProbeTargets(s *sender) *probeTargets {
	return &probeTargets{
		sender: s, plainTo: set[string]{}, targeted: map[string][]dataplane.ProbeTarget{},
		shared: map[dataplane.ProbePath]*dataplane.ProbePath{}, usual: map[dataplane.Family]dataplane.Encap{},
	}
}

// Targets lists what is to be measured, by node and family, each underlay
// before its tunnels. It reports whether that changed since it was asked last.
func (t *probeTargets) Targets() ([]dataplane.ProbeTarget, bool) {
	for _, f := range families() {
		if usual := t.usualEncap(f); usual != t.usual[f] {
			t.usual[f] = usual
			t.retargetAll = true
		}
	}
	t.tunnelEnds = t.tunnelEnds[:0]
	pools := make([]*poolView, 0, len(t.pools.ByName))
	for _, p := range t.pools.ByName {
		pools = append(pools, t.view(p))
	}
	changed := false
	again := func(name string) {
		now := t.targetsOf(pools, name)
		if slices.EqualFunc(now, t.targeted[name], dataplane.ProbeTarget.Equal) {
			return
		}
		changed = true
		if len(now) == 0 {
			delete(t.targeted, name)
			t.order = nil
			return
		}
		if _, ok := t.targeted[name]; !ok {
			t.inOrder(name)
		}
		t.targeted[name] = slices.Clone(now)
	}
	for name := range t.retarget {
		again(name)
	}
	if t.retargetAll {
		for name := range t.nodes.ByName {
			again(name)
		}
	}
	t.retarget, t.retargetAll = set[string]{}, false
	if !changed {
		return nil, false
	}
	if t.order == nil {
		t.order = slices.AppendSeq(make([]string, 0, len(t.targeted)), maps.Keys(t.targeted))
		slices.Sort(t.order)
	}
	n := 0
	for _, list := range t.targeted {
		n += len(list)
	}
	out := make([]dataplane.ProbeTarget, 0, n)
	for _, name := range t.order {
		from := len(out)
		out = append(out, t.targeted[name]...)
		t.targeted[name] = out[from:len(out):len(out)] // kept once: no reader changes it
	}
	return out, true
}

// inOrder puts a node that is new in its place. Where many are, one by one, their order is found
// at once instead.
func (t *probeTargets) inOrder(name string) {
	if len(t.order) == 0 || t.retargetAll || len(t.retarget) > 16 {
		t.order = nil
		return
	}
	at, _ := slices.BinarySearch(t.order, name)
	t.order = slices.Insert(t.order, at, name)
}

// RoutesChanged has found anew by which gateways plain packets that are measured leave.
func (t *probeTargets) RoutesChanged() { maps.Copy(t.retarget, t.plainTo) }

// Retargeted reports whether what is to be measured may have changed since
// [probeTargets.Targets] was asked last.
func (t *probeTargets) Retargeted() bool { return t.retargetAll || len(t.retarget) > 0 }

// usualEncap is the encapsulation, without a VNI, that some pool uses towards
// some peers at least: peers that are sent plain packets are probed in it. VXLAN
// goes before IPIP, for it has ports.
func (e *ends) usualEncap(f dataplane.Family) dataplane.Encap {
	var usual dataplane.Encap
	for _, p := range e.pools.ByName {
		switch p.Encap {
		case store.VXLAN, store.VXLANCrossSubnet:
			return dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: f, Port: e.pools.Settings.Port}
		case store.IPIP, store.IPIPCrossSubnet:
			usual = dataplane.Encap{Driver: dataplane.DriverIPIP, Outer: f}
		case store.Direct:
		}
	}
	return usual
}

// candidate is a target whose path is not kept yet.
type candidate struct {
	dataplane.ProbeTarget
	path dataplane.ProbePath
}

// targetsOf lists what is to be measured towards a node, by family. The list is good until the
// next call.
func (t *probeTargets) targetsOf(pools []*poolView, name string) []dataplane.ProbeTarget {
	delete(t.plainTo, name)
	n := t.nodes.ByName[name]
	if n == nil {
		return nil
	}
	out := t.found[:0]
	for _, outer := range families() {
		h, ok := t.hosts[outer]
		if !ok {
			continue
		}
		underlay := candidate{path: dataplane.ProbePath{Family: outer, Uplink: h.Uplink, Local: h.Addr, Encap: t.usual[outer]}}
		underlay.Node, underlay.Registered = name, n.Addr.Of(outer).Addr()
		if a := n.Public.Of(outer); a != underlay.Registered {
			underlay.Public = a
		}
		goes := false
		tunnels := t.tunnels[:0]
		for _, p := range pools {
			k := Key{p.Name, name, p.Family()}
			w := t.paths[k]
			if w.Outer != outer {
				continue
			}
			goes = true
			tunnels = t.along(tunnels, underlay, k, w, w.Encap)
			if w.Wanted != w.Encap {
				tunnels = t.along(tunnels, underlay, k, w, w.Wanted)
			}
			if w.Wanted.Driver != dataplane.DriverDirect {
				continue
			}
			if plain, ok := t.plainProbe(k, outer, t.movedEncaps(p, n, outer)); ok {
				t.plainTo[name] = struct{}{}
				if plain.gateway.IsValid() {
					c := underlay
					c.path.Encap, c.path.Tunnel, c.Peer, c.Gateway = w.Wanted, plain.ProbeTunnel, plain.peer, plain.gateway
					tunnels = append(tunnels, c)
				}
			}
		}
		if t.tunnels = tunnels; !goes {
			continue
		}
		tunnels = sortTargets(&underlay, tunnels)
		out = append(out, t.kept(underlay))
		for _, c := range tunnels {
			out = append(out, t.kept(c))
		}
	}
	t.found = out
	return out
}

// kept is a candidate as a target, with the one path of all targets that have the same.
func (t *probeTargets) kept(c candidate) dataplane.ProbeTarget {
	if t.last == nil || *t.last != c.path {
		one, ok := t.shared[c.path]
		if !ok {
			if len(t.shared) >= maxShared {
				clear(t.shared)
			}
			p := c.path
			one = &p
			t.shared[p] = one
		}
		t.last = one
	}
	c.ProbePath = t.last
	return c.ProbeTarget
}

// sortTargets orders the tunnels over one underlay, and has the underlay probed
// in the encapsulation of the first.
func sortTargets(underlay *candidate, tunnels []candidate) []candidate {
	slices.SortFunc(tunnels, func(a, b candidate) int {
		return cmp.Or(dataplane.CompareEncaps(a.path.Encap, b.path.Encap), cmp.Compare(a.path.Tunnel.Inner, b.path.Tunnel.Inner), boolCompare(b.path.Tunnel.InUse, a.path.Tunnel.InUse))
	})
	// What one pool uses and another is to use is in use.
	tunnels = slices.CompactFunc(tunnels, func(a, b candidate) bool {
		return a.path.Encap == b.path.Encap && a.path.Tunnel.Inner == b.path.Tunnel.Inner
	})
	if i := slices.IndexFunc(tunnels, func(c candidate) bool { return c.path.Encap.Driver != dataplane.DriverDirect }); i >= 0 {
		underlay.path.Encap = tunnels[i].path.Encap
		underlay.path.Encap.VNI = 0
	}
	// While the address of one of the two devices is not known nothing can be
	// sent that way.
	return slices.DeleteFunc(tunnels, func(c candidate) bool { return !c.path.Tunnel.Local.IsValid() || !c.Peer.IsValid() })
}

// tunnelEnd is this host's end of tunnels in an encapsulation, for workloads of a family over an
// underlay of a family. All peers have it in common.
type tunnelEnd struct {
	encap        dataplane.Encap
	inner, outer dataplane.Family
	tunnel       dataplane.ProbeTunnel
	ipip         netip.Addr // of the device for IPIP
	err          error      // why there is none
}

// endOf returns this host's end, which [probeTargets.Targets] derives once.
func (t *probeTargets) endOf(f dataplane.Encap, inner, outer dataplane.Family) tunnelEnd {
	if i := slices.IndexFunc(t.tunnelEnds, func(e tunnelEnd) bool { return e.encap == f && e.inner == inner && e.outer == outer }); i >= 0 {
		return t.tunnelEnds[i]
	}
	h := t.pathHost(inner, outer, f)
	e := tunnelEnd{encap: f, inner: inner, outer: outer, tunnel: dataplane.ProbeTunnel{Inner: inner, Local: h.VXLANAddr}, ipip: h.IPIPAddr}
	var objs []dataplane.Object
	objs, e.err = driverOf(f).Host(h)
	for _, o := range objs {
		if l, ok := o.(dataplane.Link); ok {
			e.tunnel.Link, e.tunnel.MTU = l.Name, l.MTU
		}
	}
	t.tunnelEnds = append(t.tunnelEnds, e)
	return e
}

// along appends a tunnel to a node over the underlay. There is nothing to probe of plain
// packets, and in encapsulations that one of the two ends does not accept.
func (t *probeTargets) along(tunnels []candidate, underlay candidate, k Key, w Path, f dataplane.Encap) []candidate {
	n := t.nodes.ByName[k.Node]
	if f.Driver == "" || f.Driver == dataplane.DriverDirect || !t.accepts(f) || !canAccept(n.Encaps, f) {
		return tunnels
	}
	e := t.endOf(f, k.Family, w.Outer)
	if e.err != nil {
		return tunnels
	}
	c, tun := underlay, e.tunnel
	tun.InUse = w.Encap == f
	switch {
	case f.Driver == dataplane.DriverIPIP && w.Outer == dataplane.IPv4:
		// Without a route, the kernel takes the inner destination as that of the
		// outer header: so it is the peer's own address.
		tun.Local, c.Peer = c.path.Local.Addr(), c.Registered
		if c.Public.IsValid() {
			tun.Skip = "IPIP to a host behind NAT is not measured"
		}
	case f.Driver == dataplane.DriverIPIP:
		tun.Local, c.Peer, c.Gateway = e.ipip, n.IPIPAddr.Of(k.Family), t.gatewayTo(k, w.Outer, f)
	default:
		if t.vteps.refuses(n, k.Family, w.Outer) == nil {
			c.Peer = n.VXLANAddr.Of(k.Family)
		}
		if k.Family == dataplane.IPv6 {
			c.Gateway = t.gatewayTo(k, w.Outer, f)
		}
	}
	c.path.Encap, c.path.Tunnel = f, tun
	return append(tunnels, c)
}

// gatewayTo is the gateway on a tunnel's device that leads to a node.
func (t *probeTargets) gatewayTo(k Key, outer dataplane.Family, f dataplane.Encap) netip.Addr {
	h, p := t.pathEnds(k, outer, f, 0)
	return planWith(driverOf(f), h, p).Hop.Gateway
}
