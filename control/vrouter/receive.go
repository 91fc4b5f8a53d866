package vrouter

import (
	"fmt"
	"maps"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

// neededForms is the receiver's rule: this host takes in what its pools ask
// for, what any other node says that it sends or could send by the mode that it
// has moved to, and the same for itself. So a sender that has to fall back
// falls on what is taken in whether it does or not; else two hosts could follow
// each other for ever.
func (t *table) neededForms() set[dataplane.Form] {
	out := t.wantedForms()
	add := func(pool string, m store.Mode) {
		if p, ok := t.pools[pool]; ok {
			for _, f := range t.formsOf(m, p.family()) {
				out[f] = struct{}{}
			}
		}
	}
	for pm := range t.peerSends {
		add(pm.pool, pm.mode)
	}
	for pool, m := range t.nodes[t.self].forms.sends {
		add(pool, m)
	}
	for f := range t.peerUses {
		out[f] = struct{}{}
	}
	_, uses := t.own()
	maps.Copy(out, uses)
	for f := range t.sending {
		if !t.published() {
			out[f] = struct{}{}
		}
	}
	maps.DeleteFunc(out, func(f dataplane.Form, _ struct{}) bool { return f.Outer != 0 && !t.hasHost(f.Outer) })
	return out
}

// keptForms are the needed ones and those that this host still says that it
// takes in: others may believe it, until they have seen that it no longer does.
func (t *table) keptForms() set[dataplane.Form] {
	out := t.neededForms()
	accepts, _ := t.own()
	for f := range accepts {
		if f.Outer == 0 || t.hasHost(f.Outer) {
			out[f] = struct{}{}
		}
	}
	return out
}

// assignSlots gives each VXLAN network a device. One that has a device keeps
// it, in this life and from an earlier one; a new one gets the first that is
// free.
func (t *table) assignSlots(kept []dataplane.Form) {
	for f := range t.slots {
		_, made := t.deviceOf(f)
		if !slices.Contains(kept, f) || !made && t.kernel[f].err != nil {
			delete(t.slots, f)
		}
	}
	taken := func(outer dataplane.Family, slot int) bool {
		for f, s := range t.slots {
			if f.Outer == outer && s == slot {
				return true
			}
		}
		return false
	}
	var fresh []dataplane.Form
	for _, f := range kept {
		if _, ok := t.slots[f]; ok || f.Driver != dataplane.DriverVXLAN {
			continue
		}
		if slot, ok := t.deviceOf(f); ok && !taken(f.Outer, slot) {
			t.slots[f] = slot
		} else {
			fresh = append(fresh, f)
		}
	}
	// What the pools ask for goes first: it stays.
	wanted := t.wantedForms()
	slices.SortStableFunc(fresh, func(a, b dataplane.Form) int {
		_, x := wanted[a]
		_, y := wanted[b]
		return boolCompare(y, x)
	})
	for _, f := range fresh {
		for slot := 0; ; slot++ {
			if !taken(f.Outer, slot) {
				t.slots[f] = slot
				break
			}
		}
	}
}

// deviceOf finds the device that an earlier life made for a VXLAN network.
func (t *table) deviceOf(f dataplane.Form) (int, bool) {
	for slot := range vxlan.MaxDevices {
		l, ok := ownDevice(t.underlay, vxlan.DeviceName(f.Outer, slot))
		if ok && l.Type == string(dataplane.LinkVXLAN) && l.VNI == f.VNI && l.Port == f.Port {
			return slot, true
		}
	}
	return 0, false
}

// rebuildForms derives what takes packets in on this host: forwarding, and the
// devices of all forms that are kept.
func (t *table) rebuildForms() {
	t.formsDirty = false
	if len(t.hosts) == 0 || t.nodes[t.self] == nil {
		return
	}
	kept := sortedForms(t.keptForms())
	before := maps.Clone(t.slots)
	t.assignSlots(kept)
	now := map[dataplane.Key]dataplane.Object{}
	t.formKeys = map[dataplane.Form][]dataplane.Key{}
	t.formErrs = map[dataplane.Form]error{}
	add := func(f dataplane.Form, objs ...dataplane.Object) {
		for _, o := range objs {
			now[o.Key()] = o
			t.formKeys[f] = append(t.formKeys[f], o.Key())
		}
	}
	for _, f := range kept {
		if f.Driver == dataplane.DriverDirect {
			add(f, t.looseUplinks()...)
			continue
		}
		objs, err := t.deviceObjects(f)
		if err != nil {
			t.formErrs[f] = err
			continue
		}
		add(f, objs...)
		if name, ok := t.lacksAddress(f, objs); ok {
			t.formKeys[f] = append(t.formKeys[f], dataplane.AddressKey{Link: name})
		}
	}
	for _, o := range t.forwarding() {
		now[o.Key()] = o
		for _, f := range kept {
			t.formKeys[f] = append(t.formKeys[f], o.Key())
		}
	}
	for _, o := range now {
		t.acquire(o)
	}
	for _, o := range t.hostObjs {
		t.release(o)
	}
	t.hostObjs = now
	for f := range t.kernel {
		if _, ok := t.formKeys[f]; !ok {
			delete(t.kernel, f)
		}
	}
	if !maps.Equal(before, t.slots) {
		t.rechooseAll()
		for k := range t.hops {
			t.refresh(k)
		}
	}
}

// deviceObjects is what takes in the packets of a tunnel: a device with the
// addresses of the families that travel through it.
func (t *table) deviceObjects(f dataplane.Form) ([]dataplane.Object, error) {
	if f.Driver == dataplane.DriverVXLAN && t.slots[f] >= vxlan.MaxDevices {
		return nil, fmt.Errorf("%s: there are %d other VXLAN networks in use: wait until the change before is complete", f, vxlan.MaxDevices)
	}
	var out []dataplane.Object
	for _, inner := range families() {
		if inner != f.Outer && !slices.Contains(t.outers(inner), f.Outer) {
			continue
		}
		objs, err := driverOf(f).Host(t.hostFor(inner, f.Outer, f.VNI, f.Port))
		if err != nil && inner != f.Outer {
			continue // IPIP over IPv4 carries no IPv6
		}
		if err != nil {
			return nil, err
		}
		for _, o := range objs {
			if l, ok := o.(dataplane.Link); ok {
				o = t.fitToWorkloads(l, f)
			}
			if !slices.Contains(out, o) {
				out = append(out, o)
			}
		}
	}
	slices.SortStableFunc(out, func(a, b dataplane.Object) int { return dataplane.CompareKeys(a.Key(), b.Key()) })
	return out, nil
}

// fitToWorkloads keeps a device as large as the workloads' packets until they
// are smaller: the workloads are lowered first.
func (t *table) fitToWorkloads(l dataplane.Link, f dataplane.Form) dataplane.Link {
	most := t.hosts[f.Outer].UplinkMTU - driverOf(f).Overhead(f.Outer)
	pods := max(t.podMTU[dataplane.IPv4], t.podMTU[dataplane.IPv6])
	if have, ok := ownDevice(t.underlay, l.Name); ok && l.MTU < have.MTU {
		l.MTU = max(l.MTU, min(pods, most, have.MTU))
	}
	return l
}

// uplinks are the devices that hold this host's addresses.
func (t *table) uplinks() []dataplane.UnderlayLink {
	var out []dataplane.UnderlayLink
	for _, f := range families() {
		if l, ok := ownDevice(t.underlay, t.hosts[f].Uplink); ok && !slices.Contains(out, l) {
			out = append(out, l)
		}
	}
	return out
}

// looseUplinks are the settings without which a strict uplink drops plain
// packets whose answer leaves through a tunnel. An uplink that is not strict is
// left as it is.
func (t *table) looseUplinks() []dataplane.Object {
	var out []dataplane.Object
	for _, l := range t.uplinks() {
		if l.RPFilter == 1 {
			out = append(out, dataplane.LooseSource(l.Name))
		}
	}
	return out
}

// routeFromRA is the kernel's mark of routes that router advertisements made
// (RTPROT_RA).
const routeFromRA = 9

// forwarding makes the host a router, for IPv4 always, for IPv6 where a pool
// asks for it. An uplink takes in plain packets of workloads, and answers from
// outside the cluster whatever the form: so it forwards in any case. For IPv6
// the setting of all devices alone decides (ip6_forward).
//
// A host that forwards IPv6 ignores router advertisements, and loses the
// default route that it has from one, except on devices whose accept_ra is 2;
// so these are set first.
func (t *table) forwarding() []dataplane.Object {
	out := []dataplane.Object{dataplane.Sysctl{Name: "net/ipv4/ip_forward", Value: "1"}}
	for _, l := range t.uplinks() {
		out = append(out, dataplane.Forwarding(l.Name))
	}
	six := false
	for _, p := range t.pools {
		six = six || p.family() == dataplane.IPv6
	}
	if !six {
		return out
	}
	if deaf := t.deafLinks(); len(deaf) > 0 {
		return append(out, deaf...)
	}
	return append(out, dataplane.Sysctl{Name: "net/ipv6/conf/all/forwarding", Value: "1"})
}

// deafLinks are the settings of devices that would no longer hear router
// advertisements if the host forwarded IPv6.
func (t *table) deafLinks() []dataplane.Object {
	links := set[string]{}
	if h, ok := t.hosts[dataplane.IPv6]; ok {
		links[h.Uplink] = struct{}{}
	}
	for _, r := range t.underlay.Routes {
		if r.Protocol == routeFromRA && r.Prefix.Addr().Is6() {
			links[r.Link] = struct{}{}
		}
	}
	var out []dataplane.Object
	for _, name := range slices.Sorted(maps.Keys(links)) {
		if l, ok := ownDevice(t.underlay, name); ok && l.AcceptRA == 1 {
			out = append(out, dataplane.Sysctl{Name: "net/ipv6/conf/" + name + "/accept_ra", Value: "2"})
		}
	}
	return out
}

// lacksAddress reports whether a device is to get an IPv4 address and has none
// yet. On a device without any the kernel's source check drops everything, in
// its loose mode too (fib_validate_source), so until then nothing is taken in.
// A host whose workloads are in other pools gets none: nobody sends to it.
func (t *table) lacksAddress(f dataplane.Form, objs []dataplane.Object) (device string, lacks bool) {
	for _, o := range objs {
		switch o := o.(type) {
		case dataplane.Link:
			device = o.Name
		case dataplane.Address:
			if o.Prefix.Addr().Is4() {
				return "", false
			}
		}
	}
	for _, p := range t.pools {
		if p.family() != dataplane.IPv4 || !p.tunnels || !p.selects(t.nodes[t.self].labels) {
			continue
		}
		if slices.Contains(t.formsOf(t.modeOf(p), dataplane.IPv4), f) {
			return device, true
		}
	}
	return "", false
}
