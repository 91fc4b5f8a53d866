package encap

import (
	"fmt"
	"maps"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// receiver is what this host accepts, and the devices for it.
type receiver struct {
	*ends
	*publishing
	objects *desired.Objects

	// What it depends on.
	peerUses    map[dataplane.Encap]int   // other nodes that say they send it
	peerSends   map[poolMode]int          // other nodes that have moved to it
	podMTU      map[dataplane.Family]int  // the largest of a workload, bytes; 0: not known
	unsupported map[dataplane.Encap]error // drivers and families that this kernel has no device for; nil: not known
	kernel      map[dataplane.Encap]State // how far the kernel is

	// What follows from it.
	devicesDirty bool
	devices      map[dataplane.Encap]Devices
	deviceObjs   map[dataplane.Key]dataplane.Object
}

func newReceiver(e *ends, p *publishing, o *desired.Objects) *receiver {
	return &receiver{
		ends: e, publishing: p, objects: o,
		peerUses: map[dataplane.Encap]int{}, peerSends: map[poolMode]int{},
		podMTU: map[dataplane.Family]int{}, kernel: map[dataplane.Encap]State{},
		devices: map[dataplane.Encap]Devices{}, deviceObjs: map[dataplane.Key]dataplane.Object{},
	}
}

// accepts reports whether this host accepts an encapsulation. What it published
// stands until the kernel refuses: a device that another program deleted is put back
// sooner than the others would have changed.
func (r *receiver) accepts(f dataplane.Encap) bool {
	st := r.kernel[f]
	if st.Err != nil {
		return false
	}
	if st.Done || !r.published() {
		return true
	}
	_, ok := r.nodes.Own().Encaps.Accept[f]
	return ok
}

// State is how far the kernel is with what accepts an encapsulation.
type State struct {
	Done bool
	Err  error // the kernel refused
}

// Devices are what accepts an encapsulation.
type Devices struct {
	Keys []dataplane.Key
	Err  error // why there is no device
}

// add adds objects, to all that there are too.
func (d *Devices) add(all map[dataplane.Key]dataplane.Object, objs []dataplane.Object) {
	for _, o := range objs {
		all[o.Key()] = o
		d.Keys = append(d.Keys, o.Key())
	}
}

// countPeer counts what other nodes say that they send, and in which families
// they have addresses: both decide what this host has to accept.
func (r *receiver) countPeer(old, n *cluster.Node) {
	for _, x := range []struct {
		node *cluster.Node
		n    int
	}{{n, 1}, {old, -1}} {
		if x.node == nil {
			continue
		}
		changed := false
		for f := range x.node.Encaps.Use {
			changed = tally(r.peerUses, f, x.n) || changed
		}
		for pool, m := range x.node.Encaps.Send {
			changed = tally(r.peerSends, poolMode{pool, m}, x.n) || changed
		}
		if tally(r.nodesWith, familiesOf(x.node), x.n) || changed {
			r.devicesDirty = true
		}
	}
}

// tally adds n to a count, and reports whether the key came or went.
func tally[K comparable](counts map[K]int, k K, n int) bool {
	_, had := counts[k]
	counts[k] += n
	if counts[k] == 0 {
		delete(counts, k)
	}
	_, has := counts[k]
	return had != has
}

// poolMode is a mode in which a node sends the packets of a pool.
type poolMode struct {
	pool string
	mode store.Mode
}

// neededEncaps is the receiver's rule: this host accepts what its pools ask for,
// what any other node says that it sends or could send by the mode that it has
// moved to, and the same for itself. So a sender that has to fall back falls on
// what is accepted whether it does or not; else two hosts could follow each other
// without end.
//
// What others say is believed of what this host itself saw: during a change the
// encapsulation that the pools asked for until then. Of anything else a record in the
// datastore would open devices here, and take a port from what serves there and from all
// pods; a host that comes during a change accepts what the pools ask for now, to which
// the others can send as they all have it. VXLAN at a system port that this host is not
// configured with is never believed. Nor is what this host's own record says and this host
// did not write there.
func (r *receiver) neededEncaps() set[dataplane.Encap] {
	out := r.WantedEncaps()
	accepts, uses := r.own()
	believe := func(f dataplane.Encap) {
		if f.Driver == dataplane.DriverVXLAN && store.IsSystemPort(f.Port) {
			return
		}
		if r.saw(f, accepts, uses) {
			out[f] = struct{}{}
		}
	}
	add := func(pool string, m store.Mode) {
		if p, ok := r.pools.ByName[pool]; ok {
			for _, f := range r.encapsOf(m, p.Family()) {
				believe(f)
			}
		}
	}
	for pm := range r.peerSends {
		add(pm.pool, pm.mode)
	}
	for pool, m := range r.nodes.Own().Encaps.Send {
		add(pool, m)
	}
	for f := range r.peerUses {
		believe(f)
	}
	maps.Copy(out, uses)
	for f := range r.sending {
		if !r.published() {
			out[f] = struct{}{}
		}
	}
	maps.DeleteFunc(out, func(f dataplane.Encap, _ struct{}) bool { return f.Outer != 0 && !r.hasHost(f.Outer) })
	return out
}

// saw reports whether this host itself saw that the cluster uses an encapsulation: it
// has set it up, accepts or sends it, or has the device from a previous run. What it has
// set up counts also while it publishes that it does not accept it: that may have been
// begun before the pools asked for it anew, and a peer may have gone by what was published
// before. What the kernel refuses is not set up: it would be wanted for no other reason than
// that it is.
func (r *receiver) saw(f dataplane.Encap, accepts, uses set[dataplane.Encap]) bool {
	if f.Driver == dataplane.DriverDirect {
		return true
	}
	if d, ok := r.devices[f]; ok && d.Err == nil && r.kernel[f].Err == nil {
		return true
	}
	if _, ok := accepts[f]; ok {
		return true
	}
	if _, ok := uses[f]; ok {
		return true
	}
	return r.left(f)
}

// left reports whether the previous run left the device of a tunnel. That of ipip is
// there in any case, and down when no pool wants it.
func (e *ends) left(f dataplane.Encap) bool {
	if f.Driver == dataplane.DriverVXLAN {
		_, ok := e.deviceOf(f)
		return ok
	}
	name := ipip.Device
	if f.Outer == dataplane.IPv6 {
		name = ipip.DeviceV6
	}
	l, ok := e.network.Device(name)
	return ok && l.Up
}

// keptEncaps are the needed ones and those that this host still says that it
// accepts: others rely on it until they have seen that it no longer does.
func (r *receiver) keptEncaps() set[dataplane.Encap] {
	out := r.neededEncaps()
	accepts, _ := r.own()
	for f := range accepts {
		if f.Outer == 0 || r.hasHost(f.Outer) {
			out[f] = struct{}{}
		}
	}
	return out
}

// assignSlots gives each VXLAN network a device. One that has a device keeps
// it, also from the previous run; a new one gets the first that is free.
func (r *receiver) assignSlots(kept []dataplane.Encap) {
	for f := range r.slots {
		_, made := r.deviceOf(f)
		if !slices.Contains(kept, f) || !made && r.kernel[f].Err != nil {
			delete(r.slots, f)
		}
	}
	taken := func(outer dataplane.Family, slot int) bool {
		for f, s := range r.slots {
			if f.Outer == outer && s == slot {
				return true
			}
		}
		return false
	}
	var fresh []dataplane.Encap
	for _, f := range kept {
		if _, ok := r.slots[f]; ok || f.Driver != dataplane.DriverVXLAN {
			continue
		}
		if slot, ok := r.deviceOf(f); ok && !taken(f.Outer, slot) {
			r.slots[f] = slot
		} else {
			fresh = append(fresh, f)
		}
	}
	// What the pools ask for goes first: it stays.
	wanted := r.WantedEncaps()
	slices.SortStableFunc(fresh, func(a, b dataplane.Encap) int {
		_, x := wanted[a]
		_, y := wanted[b]
		return boolCompare(y, x)
	})
	for _, f := range fresh {
		for slot := 0; ; slot++ {
			if !taken(f.Outer, slot) {
				r.slots[f] = slot
				break
			}
		}
	}
}

// deviceOf finds the device that the previous run made for a VXLAN network.
func (e *ends) deviceOf(f dataplane.Encap) (int, bool) {
	for slot := range vxlan.MaxDevices {
		l, ok := e.network.Device(vxlan.DeviceName(f.Outer, slot))
		if ok && l.Type == string(dataplane.LinkVXLAN) && l.VNI == f.VNI && l.Port == f.Port {
			return slot, true
		}
	}
	return 0, false
}

// rebuildDevices derives what accepts packets on this host: forwarding, and the
// devices of all encapsulations that are kept. It reports whether a VXLAN network
// has another device than before.
func (r *receiver) rebuildDevices() bool {
	r.devicesDirty = false
	if len(r.hosts) == 0 || r.nodes.Own() == nil {
		return false
	}
	kept := sortedEncaps(r.keptEncaps())
	before := maps.Clone(r.slots)
	r.assignSlots(kept)
	now := map[dataplane.Key]dataplane.Object{}
	r.devices = map[dataplane.Encap]Devices{}
	forwarding := r.forwarding()
	for _, o := range forwarding {
		now[o.Key()] = o
	}
	for _, o := range r.forOtherPods() {
		now[o.Key()] = o
	}
	for _, f := range kept {
		var d Devices
		d.add(now, forwarding)
		if f.Driver == dataplane.DriverDirect {
			d.add(now, r.looseUplinks())
		} else if objs, err := r.deviceObjects(f); err != nil {
			d.Err = err
		} else {
			d.add(now, objs)
			if name, ok := r.lacksAddress(f, objs); ok {
				d.Keys = append(d.Keys, dataplane.AddressKey{Link: name})
			}
		}
		r.devices[f] = d
	}
	for _, o := range now {
		r.objects.Acquire(o)
	}
	for _, o := range r.deviceObjs {
		r.objects.Release(o)
	}
	r.deviceObjs = now
	for f := range r.kernel {
		if _, ok := r.devices[f]; !ok {
			delete(r.kernel, f)
		}
	}
	return !maps.Equal(before, r.slots)
}

// deviceObjects is what decapsulates a tunnel's packets: a device with the
// addresses of the families that travel through it.
func (r *receiver) deviceObjects(f dataplane.Encap) ([]dataplane.Object, error) {
	if f.Driver == dataplane.DriverVXLAN && r.slots[f] >= vxlan.MaxDevices {
		return nil, fmt.Errorf("%s: there are %d other VXLAN networks in use: wait until the change before is complete", f, vxlan.MaxDevices)
	}
	var out []dataplane.Object
	for _, inner := range families() {
		if inner != f.Outer && !slices.Contains(r.outers(inner), f.Outer) {
			continue
		}
		objs, err := driverOf(f).Host(r.hostFor(inner, f.Outer, f.VNI, f.Port))
		if err != nil && inner != f.Outer {
			continue // IPIP over IPv4 carries no IPv6
		}
		if err != nil {
			return nil, err
		}
		for _, o := range objs {
			if l, ok := o.(dataplane.Link); ok {
				o = r.fitToWorkloads(l, f)
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
func (r *receiver) fitToWorkloads(l dataplane.Link, f dataplane.Encap) dataplane.Link {
	most := r.hosts[f.Outer].UplinkMTU - driverOf(f).Overhead(f.Outer)
	pods := max(r.podMTU[dataplane.IPv4], r.podMTU[dataplane.IPv6])
	if have, ok := r.network.Device(l.Name); ok && l.MTU < have.MTU {
		l.MTU = max(l.MTU, min(pods, most, have.MTU))
	}
	return l
}

// uplinks are the devices that hold this host's addresses.
func (e *ends) uplinks() []dataplane.UnderlayLink {
	var out []dataplane.UnderlayLink
	for _, f := range families() {
		if l, ok := e.network.Device(e.hosts[f].Uplink); ok && !slices.Contains(out, l) {
			out = append(out, l)
		}
	}
	return out
}

// looseUplinks are the settings without which a strict uplink drops plain
// packets whose answer leaves through a tunnel. An uplink that is not strict is
// left as it is.
func (e *ends) looseUplinks() []dataplane.Object {
	var out []dataplane.Object
	for _, l := range e.uplinks() {
		if l.RPFilter == 1 {
			out = append(out, dataplane.LooseSource(l.Name))
		}
	}
	return out
}

// otherPods are the addresses by which another network of pods is on this host.
func (e *ends) otherPods() []dataplane.UnderlayAddress {
	return e.network.OtherPods(e.blocks.PodCIDRs(e.nodes.Self))
}

// looseOthers are the settings without which the strict tunnel of another network of pods,
// flannel's, drops what peers still send through it when the answer leaves through
// one of ours.
func (e *ends) looseOthers() []dataplane.Object {
	var out []dataplane.Object
	for _, a := range e.otherPods() {
		if l, ok := e.network.Device(a.Link); ok && a.Prefix.IsSingleIP() && a.Prefix.Addr().Is4() && l.RPFilter == 1 {
			out = append(out, dataplane.LooseSource(l.Name))
		}
	}
	return out
}

// forOtherPods are the settings by which pods behind the bridge of another network reach
// workloads of this host: these have addresses of the bridge's subnet, where such a pod
// looks for them by ARP, and the host answers for them (RFC 1027), without the delay that the
// kernel has for what others may answer. For IPv6 the kernel answers for single
// addresses alone.
func (e *ends) forOtherPods() []dataplane.Object {
	var out []dataplane.Object
	for _, a := range e.otherPods() {
		if a.Prefix.IsSingleIP() || !a.Prefix.Addr().Is4() {
			continue
		}
		out = append(out, dataplane.Forwarding(a.Link),
			dataplane.Sysctl{Name: "net/ipv4/conf/" + a.Link + "/proxy_arp", Value: "1"},
			dataplane.Sysctl{Name: "net/ipv4/neigh/" + a.Link + "/proxy_delay", Value: "0"})
	}
	return out
}

// routeFromRA is the kernel's mark of routes that router advertisements made
// (RTPROT_RA).
const routeFromRA = 9

// forwarding makes the host a router, for IPv4 always, for IPv6 where a pool
// asks for it. An uplink gets plain packets of workloads, and answers from
// outside the cluster whatever the encapsulation: so it forwards in any case. For IPv6
// the setting of all devices alone decides (ip6_forward).
//
// A host that forwards IPv6 ignores router advertisements, and loses the
// default route that it has from one, except on devices whose accept_ra is 2;
// so these are set first.
func (e *ends) forwarding() []dataplane.Object {
	out := []dataplane.Object{dataplane.Sysctl{Name: "net/ipv4/ip_forward", Value: "1"}}
	for _, l := range e.uplinks() {
		out = append(out, dataplane.Forwarding(l.Name))
	}
	out = append(out, e.looseOthers()...)
	six := false
	for _, p := range e.pools.ByName {
		six = six || p.Family() == dataplane.IPv6
	}
	if !six {
		return out
	}
	if deaf := e.deafLinks(); len(deaf) > 0 {
		return append(out, deaf...)
	}
	return append(out, dataplane.Sysctl{Name: "net/ipv6/conf/all/forwarding", Value: "1"})
}

// deafLinks are the settings of devices that would no longer hear router
// advertisements if the host forwarded IPv6.
func (e *ends) deafLinks() []dataplane.Object {
	links := set[string]{}
	if h, ok := e.hosts[dataplane.IPv6]; ok {
		links[h.Uplink] = struct{}{}
	}
	for _, r := range e.network.Underlay.Routes {
		if r.Protocol == routeFromRA && r.Prefix.Addr().Is6() {
			links[r.Link] = struct{}{}
		}
	}
	var out []dataplane.Object
	for _, name := range slices.Sorted(maps.Keys(links)) {
		if l, ok := e.network.Device(name); ok && l.AcceptRA == 1 {
			out = append(out, dataplane.Sysctl{Name: "net/ipv6/conf/" + name + "/accept_ra", Value: "2"})
		}
	}
	return out
}

// lacksAddress reports whether a device is to get an IPv4 address and has none
// yet. On a device without any the kernel's source check drops everything, in
// its loose mode too (fib_validate_source), so until then nothing is accepted.
// A host whose workloads are in other pools gets none: no peer sends to it.
func (r *receiver) lacksAddress(f dataplane.Encap, objs []dataplane.Object) (device string, lacks bool) {
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
	for _, p := range r.pools.ByName {
		if p.Family() != dataplane.IPv4 || !p.Tunnels || !selects(p, r.nodes.Own().Labels) {
			continue
		}
		if slices.Contains(r.encapsOf(r.pools.Mode(p), dataplane.IPv4), f) {
			return device, true
		}
	}
	return "", false
}

// selects reports whether nodes with these labels have workloads in a pool.
func selects(p *cluster.Pool, labels map[string]string) bool {
	return p.Nodes != nil && p.Nodes.Matches(selector.Map(labels))
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}
