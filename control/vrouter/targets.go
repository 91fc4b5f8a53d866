package vrouter

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// targets lists what is to be measured, by node and family. It reports whether
// that changed since it was asked last.
func (t *table) targets() ([]Target, bool) {
	changed := false
	for name := range t.retarget {
		now := t.targetsOf(name)
		if slices.EqualFunc(now, t.targeted[name], Target.equal) {
			continue
		}
		changed = true
		if len(now) == 0 {
			delete(t.targeted, name)
		} else {
			t.targeted[name] = now
		}
	}
	clear(t.retarget)
	if !changed {
		return nil, false
	}
	out := make([]Target, 0, len(t.targeted))
	for _, name := range slices.Sorted(maps.Keys(t.targeted)) {
		out = append(out, t.targeted[name]...)
	}
	return out, true
}

// targetsOf lists what is to be measured towards a node, by family.
func (t *table) targetsOf(name string) []Target {
	n := t.nodes[name]
	if n == nil {
		return nil
	}
	found := map[dataplane.Family]*Target{}
	for _, p := range t.pools {
		k := hopKey{pool: p.name, node: name, fam: p.family()}
		w := t.ways[k]
		h, ok := t.hosts[w.outer]
		if !ok {
			continue
		}
		tg := found[w.outer]
		if tg == nil {
			tg = &Target{Node: name, Family: w.outer, Uplink: h.Uplink, Local: h.Addr, Addrs: []netip.Addr{n.addr[w.outer].Addr()}}
			if a := n.public[w.outer]; a.IsValid() && a != tg.Addrs[0] {
				tg.Addrs = append(tg.Addrs, a)
			}
			found[w.outer] = tg
		}
		for _, f := range []dataplane.Form{w.form, w.wanted} {
			if tun, ok := t.tunnel(k, w, f); ok {
				tg.Forms = append(tg.Forms, tun)
			}
		}
	}
	var out []Target
	for _, f := range families() {
		tg := found[f]
		if tg == nil {
			continue
		}
		slices.SortFunc(tg.Forms, func(a, b Tunnel) int {
			return cmp.Or(dataplane.CompareForms(a.Form, b.Form), cmp.Compare(a.Inner, b.Inner), boolCompare(b.InUse, a.InUse))
		})
		// What one pool uses and another is to use is in use.
		tg.Forms = slices.CompactFunc(tg.Forms, func(a, b Tunnel) bool { return a.Form == b.Form && a.Inner == b.Inner })
		out = append(out, *tg)
	}
	return out
}

// tunnel describes a form towards a node; ok is false where there is nothing
// to probe: plain packets, and forms that one of the two ends does not take in.
func (t *table) tunnel(k hopKey, w way, f dataplane.Form) (Tunnel, bool) {
	if f.Driver == "" || f.Driver == dataplane.DriverDirect || !t.takesIn(f) || !t.nodes[k.node].forms.takesIn(f) {
		return Tunnel{}, false
	}
	h, p := t.wayEnds(k, w.outer, f, 0)
	objs, err := driverOf(f).Host(h)
	if err != nil {
		return Tunnel{}, false
	}
	tun := Tunnel{Form: f, Inner: k.fam, InUse: w.form == f, Local: h.VXLANAddr, Peer: p.VXLANAddr}
	if f.Driver == dataplane.DriverIPIP {
		tun.Local, tun.Peer = h.IPIPAddr, t.nodes[k.node].ipipAddr[k.fam]
	}
	for _, o := range objs {
		if l, ok := o.(dataplane.Link); ok {
			tun.Device, tun.MTU = l.Name, l.MTU
		}
	}
	tun.Gateway = planWith(driverOf(f), h, p).hop.Gateway
	return tun, true
}
