package encap

import (
	"cmp"
	"maps"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// probeTargets is what is to be measured.
type probeTargets struct {
	*sender
	plainTo  set[string]                        // nodes to which plain packets are measured
	targeted map[string][]dataplane.ProbeTarget // by node
	shared   map[dataplane.ProbePath]*dataplane.ProbePath
	usual    map[dataplane.Family]dataplane.Encap
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
			for name := range t.nodes.ByName {
				t.retarget[name] = struct{}{}
			}
		}
	}
	changed := false
	for name := range t.retarget {
		now := t.targetsOf(name)
		if slices.EqualFunc(now, t.targeted[name], dataplane.ProbeTarget.Equal) {
			continue
		}
		changed = true
		if len(now) == 0 {
			delete(t.targeted, name)
		} else {
			t.targeted[name] = now
		}
	}
	t.retarget = set[string]{}
	if !changed {
		return nil, false
	}
	n := 0
	for _, list := range t.targeted {
		n += len(list)
	}
	out := make([]dataplane.ProbeTarget, 0, n)
	for _, name := range slices.Sorted(maps.Keys(t.targeted)) {
		from := len(out)
		out = append(out, t.targeted[name]...)
		t.targeted[name] = out[from:len(out):len(out)] // kept once: no reader changes it
	}
	return out, true
}

// RoutesChanged has found anew by which gateways plain packets that are measured leave.
func (t *probeTargets) RoutesChanged() { maps.Copy(t.retarget, t.plainTo) }

// Retargeted reports whether what is to be measured may have changed since
// [probeTargets.Targets] was asked last.
func (t *probeTargets) Retargeted() bool { return len(t.retarget) > 0 }

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

// targetsOf lists what is to be measured towards a node, by family.
func (t *probeTargets) targetsOf(name string) []dataplane.ProbeTarget {
	delete(t.plainTo, name)
	n := t.nodes.ByName[name]
	if n == nil {
		return nil
	}
	tunnels := map[dataplane.Family][]dataplane.ProbeTarget{}
	for _, p := range t.pools.ByName {
		k := Key{p.Name, name, p.Family()}
		w := t.paths[k]
		h, ok := t.hosts[w.Outer]
		if !ok {
			continue
		}
		underlay := dataplane.ProbePath{Family: w.Outer, Uplink: h.Uplink, Local: h.Addr, Encap: t.usual[w.Outer]}
		peer := dataplane.ProbeTarget{Node: name, Registered: n.Addr.Of(w.Outer).Addr()}
		if a := n.Public.Of(w.Outer); a != peer.Registered {
			peer.Public = a
		}
		list := tunnels[w.Outer]
		if list == nil {
			list = append(list, along(underlay, peer))
		}
		for _, f := range []dataplane.Encap{w.Encap, w.Wanted} {
			if tg := along(underlay, peer); t.tunnel(&tg, k, w, f) {
				list = append(list, tg)
			}
		}
		if plain, ok := t.plainProbe(k, w.Outer, t.movedEncaps(p, n, w.Outer)); ok && w.Wanted.Driver == dataplane.DriverDirect {
			t.plainTo[name] = struct{}{}
			if plain.gateway.IsValid() {
				tg := along(underlay, peer)
				tg.Encap, tg.Tunnel, tg.Peer, tg.Gateway = w.Wanted, plain.ProbeTunnel, plain.peer, plain.gateway
				list = append(list, tg)
			}
		}
		tunnels[w.Outer] = list
	}
	var out []dataplane.ProbeTarget
	for _, f := range families() {
		if list := tunnels[f]; len(list) > 0 {
			out = append(out, sortTargets(list[0], list[1:])...)
		}
	}
	for i, tg := range out {
		out[i].ProbePath = t.kept(*tg.ProbePath)
	}
	return out
}

// along is a peer with a path of its own, which may be changed until it is kept.
func along(p dataplane.ProbePath, peer dataplane.ProbeTarget) dataplane.ProbeTarget {
	peer.ProbePath = &p
	return peer
}

// kept returns the one path of all targets that have the same.
func (t *probeTargets) kept(p dataplane.ProbePath) *dataplane.ProbePath {
	if one, ok := t.shared[p]; ok {
		return one
	}
	if len(t.shared) >= maxShared {
		clear(t.shared)
	}
	t.shared[p] = &p
	return &p
}

// sortTargets orders the tunnels over one underlay, and has the underlay probed
// in the encapsulation of the first.
func sortTargets(underlay dataplane.ProbeTarget, tunnels []dataplane.ProbeTarget) []dataplane.ProbeTarget {
	slices.SortFunc(tunnels, func(a, b dataplane.ProbeTarget) int {
		return cmp.Or(dataplane.CompareEncaps(a.Encap, b.Encap), cmp.Compare(a.Tunnel.Inner, b.Tunnel.Inner), boolCompare(b.Tunnel.InUse, a.Tunnel.InUse))
	})
	// What one pool uses and another is to use is in use.
	tunnels = slices.CompactFunc(tunnels, func(a, b dataplane.ProbeTarget) bool { return a.Encap == b.Encap && a.Tunnel.Inner == b.Tunnel.Inner })
	if i := slices.IndexFunc(tunnels, func(t dataplane.ProbeTarget) bool { return t.Encap.Driver != dataplane.DriverDirect }); i >= 0 {
		underlay.Encap = tunnels[i].Encap
		underlay.Encap.VNI = 0
	}
	// While the address of one of the two devices is not known nothing can be
	// sent that way.
	tunnels = slices.DeleteFunc(tunnels, func(t dataplane.ProbeTarget) bool { return !t.Tunnel.Local.IsValid() || !t.Peer.IsValid() })
	return append([]dataplane.ProbeTarget{underlay}, tunnels...)
}

// tunnel makes tg a tunnel to a node. It reports false where there is nothing
// to probe: plain packets, and encapsulations that one of the two ends does not
// accept.
func (t *probeTargets) tunnel(tg *dataplane.ProbeTarget, k Key, w Path, f dataplane.Encap) bool {
	if f.Driver == "" || f.Driver == dataplane.DriverDirect || !t.accepts(f) || !canAccept(t.nodes.ByName[k.Node].Encaps, f) {
		return false
	}
	h, p := t.pathEnds(k, w.Outer, f, 0)
	objs, err := driverOf(f).Host(h)
	if err != nil {
		return false
	}
	tun := dataplane.ProbeTunnel{Inner: k.Family, InUse: w.Encap == f, Local: h.VXLANAddr}
	for _, o := range objs {
		if l, ok := o.(dataplane.Link); ok {
			tun.Link, tun.MTU = l.Name, l.MTU
		}
	}
	tg.Peer = p.VXLANAddr
	gateway := planWith(driverOf(f), h, p).Hop.Gateway
	switch {
	case f.Driver == dataplane.DriverIPIP && w.Outer == dataplane.IPv4:
		// Without a route, the kernel takes the inner destination as that of the
		// outer header: so it is the peer's own address.
		tun.Local, tg.Peer = tg.Local.Addr(), tg.Registered
		if tg.Public.IsValid() {
			tun.Skip = "IPIP to a host behind NAT is not measured"
		}
	case f.Driver == dataplane.DriverIPIP:
		tun.Local, tg.Peer, tg.Gateway = h.IPIPAddr, t.nodes.ByName[k.Node].IPIPAddr.Of(k.Family), gateway
	case k.Family == dataplane.IPv6:
		tg.Gateway = gateway
	}
	tg.Encap, tg.Tunnel = f, tun
	return true
}
