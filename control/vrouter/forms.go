package vrouter

import (
	"fmt"
	"maps"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/crosssubnet"
	"github.com/routerd/routerd/dataplane/direct"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

func families() []dataplane.Family { return []dataplane.Family{dataplane.IPv4, dataplane.IPv6} }

// driverFor returns the driver that carries packets of an encapsulation.
func driverFor(e store.Encapsulation) dataplane.Driver {
	switch e {
	case store.IPIP:
		return ipip.Driver{}
	case store.VXLAN:
		return vxlan.Driver{}
	case store.IPIPCrossSubnet:
		return crosssubnet.Driver{Near: direct.Driver{}, Far: ipip.Driver{}}
	case store.VXLANCrossSubnet:
		return crosssubnet.Driver{Near: direct.Driver{}, Far: vxlan.Driver{}}
	case store.Direct:
	}
	return direct.Driver{}
}

// driverOf returns the driver whose packets have a form.
func driverOf(f dataplane.Form) dataplane.Driver {
	switch f.Driver {
	case dataplane.DriverIPIP:
		return ipip.Driver{}
	case dataplane.DriverVXLAN:
		return vxlan.Driver{}
	}
	return direct.Driver{}
}

// outerFor chooses the family of the underlay over which two hosts exchange
// packets of a family of workloads: that family itself, or else the one that
// both have. Both come to the same answer.
func outerFor(inner dataplane.Family, mine, theirs func(dataplane.Family) bool) (dataplane.Family, bool) {
	other := dataplane.IPv4
	if inner == dataplane.IPv4 {
		other = dataplane.IPv6
	}
	for _, f := range []dataplane.Family{inner, other} {
		if mine(f) && theirs(f) {
			return f, true
		}
	}
	return 0, false
}

func (t *table) hasHost(f dataplane.Family) bool {
	_, ok := t.hosts[f]
	return ok
}

// modeOf is how a pool is to be carried.
func (t *table) modeOf(p pool) store.Mode {
	return store.NewMode(p.encap, t.settings.vni, t.settings.port)
}

// hostFor is this host as a driver sees it, for workloads of a family over an
// underlay of a family, with the numbers of a mode or a form.
func (t *table) hostFor(inner, outer dataplane.Family, vni uint32, port uint16) dataplane.Host {
	h, n := t.hosts[outer], t.nodes[t.self]
	h.Family = inner
	h.VXLANVNI, h.VXLANPort = vni, port
	h.IPIPAddr, h.VXLANAddr, h.VXLANMAC = n.ipipAddr[inner], n.vxlanAddr[inner], n.vxlanMAC[outer]
	h.IPIPMTU, h.VXLANMTU = t.settings.tunnelMTU(outer)
	h.VXLANDevice = vxlan.DeviceName(outer, t.slots[dataplane.Form{Driver: dataplane.DriverVXLAN, Outer: outer, VNI: vni, Port: port}])
	return h
}

// peerFor is a node as a driver sees it.
func (t *table) peerFor(n *node, inner, outer dataplane.Family) dataplane.Peer {
	r := t.reach[outer][n.name]
	return dataplane.Peer{
		Name: n.name, Addr: n.addr[outer].Addr(), Near: r.Near, TunnelAddr: r.Addr, TunnelPort: r.Port,
		VXLANAddr: n.vxlanAddr[inner], VXLANMAC: n.vxlanMAC[outer],
	}
}

// formOf is what travels to a node in a mode.
func (t *table) formOf(m store.Mode, inner, outer dataplane.Family, n *node) (dataplane.Form, error) {
	return driverFor(m.Encapsulation).Form(t.hostFor(inner, outer, m.VNI, m.Port), t.peerFor(n, inner, outer))
}

// outers lists the families of the underlay over which this host may be sent
// packets of a family of workloads: the usual one, and the other where some
// node has no address of the usual one.
func (t *table) outers(inner dataplane.Family) []dataplane.Family {
	var out []dataplane.Family
	for _, f := range families() {
		if !t.hasHost(f) {
			continue
		}
		needed := f == inner || !t.hasHost(inner)
		for has, n := range t.nodesWith {
			if o, ok := outerFor(inner, t.hasHost, has.family); n > 0 && ok && o == f {
				needed = true
			}
		}
		if needed {
			out = append(out, f)
		}
	}
	return out
}

// familySet says in which families a node has an address.
type familySet struct{ ipv4, ipv6 bool }

func (s familySet) family(f dataplane.Family) bool {
	return f == dataplane.IPv4 && s.ipv4 || f == dataplane.IPv6 && s.ipv6
}

func (n *node) families() familySet {
	return familySet{n.addr[dataplane.IPv4].IsValid(), n.addr[dataplane.IPv6].IsValid()}
}

// formsOf lists what nodes may send to this host in a mode, for workloads of a
// family.
func (t *table) formsOf(m store.Mode, inner dataplane.Family) []dataplane.Form {
	var out []dataplane.Form
	for _, outer := range t.outers(inner) {
		out = append(out, driverFor(m.Encapsulation).Forms(t.hostFor(inner, outer, m.VNI, m.Port))...)
	}
	return out
}

// wantedForms lists what this host has to take in by its pools' modes.
func (t *table) wantedForms() set[dataplane.Form] {
	out := set[dataplane.Form]{}
	for _, p := range t.pools {
		for _, f := range t.formsOf(t.modeOf(p), p.family()) {
			out[f] = struct{}{}
		}
	}
	return out
}

// own is what this host has published, as the watch showed it, and what it is
// about to publish: a write whose result has not been seen may have happened
// or not, so that what is taken in is the union and what may be sent is the
// intersection.
func (t *table) own() (accepts, uses set[dataplane.Form]) {
	accepts, uses = set[dataplane.Form]{}, set[dataplane.Form]{}
	seen := t.nodes[t.self]
	if seen == nil {
		return accepts, uses
	}
	maps.Copy(accepts, seen.forms.accepts)
	maps.Copy(uses, seen.forms.uses)
	if t.inflight != nil {
		maps.Copy(accepts, t.inflight.accepts)
		maps.Copy(uses, t.inflight.uses)
	}
	return accepts, uses
}

// published reports whether this host takes part in what nodes agree on by
// what they publish. Before it does it follows the pools at once.
func (t *table) published() bool {
	n := t.nodes[t.self]
	return n != nil && n.forms.Published
}

// may reports whether packets may be sent in a form: everybody was told before.
func (t *table) may(f dataplane.Form) bool {
	if !t.published() {
		return true
	}
	_, seen := t.nodes[t.self].forms.uses[f]
	if t.inflight == nil {
		return seen
	}
	_, soon := t.inflight.uses[f]
	return seen && soon
}

// takesIn reports whether this host takes a form in. What it published stands
// until the kernel refuses: a device that somebody deleted is put back sooner
// than the others would have changed.
func (t *table) takesIn(f dataplane.Form) bool {
	st := t.kernel[f]
	if st.err != nil {
		return false
	}
	if st.done || !t.published() {
		return true
	}
	_, ok := t.nodes[t.self].forms.accepts[f]
	return ok
}

// formState is how far the kernel is with what takes a form in.
type formState struct {
	done bool
	err  error // the kernel refused
}

// parseForms reads a published list. Forms of a later version that are not
// known here are left out: nobody here sends them.
func parseForms(list []string) set[dataplane.Form] {
	out := set[dataplane.Form]{}
	for _, s := range list {
		if f, err := dataplane.ParseForm(s); err == nil {
			out[f] = struct{}{}
		}
	}
	return out
}

func sortedForms(s set[dataplane.Form]) []dataplane.Form {
	return slices.SortedFunc(maps.Keys(s), dataplane.CompareForms)
}

// ownDevice finds a device of the host in an underlay.
func ownDevice(u *dataplane.Underlay, name string) (dataplane.UnderlayLink, bool) {
	if u == nil {
		return dataplane.UnderlayLink{}, false
	}
	i := slices.IndexFunc(u.Links, func(l dataplane.UnderlayLink) bool { return l.Name == name })
	if i < 0 {
		return dataplane.UnderlayLink{}, false
	}
	return u.Links[i], true
}

func errNoFamily(inner dataplane.Family, node string) error {
	return fmt.Errorf("no family of addresses that both this host and node %s have, for %s workloads: %w", node, inner, dataplane.ErrIncomplete)
}
