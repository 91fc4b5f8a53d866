package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// The sets and maps that the table always has, all keyed by interface except
// those of floating addresses.
const (
	fromMap         = "workload-from"     // what a workload sends: its egress path
	toMap           = "workload-to"       // what it receives: its ingress path
	otherSet        = "workload-odd"      // workloads' interfaces without one of the prefixes
	netsMap         = "workload-sources"  // chains for workloads with prefixes as sources
	errorsMap       = "workload-errors"   // and for their ICMP errors
	hostInMap       = "host-in"           // host endpoints, by path
	hostOutMap      = "host-out"          //
	forwardInMap    = "host-forward-in"   //
	forwardOutMap   = "host-forward-out"  //
	untrackedInMap  = "host-untracked-in" //
	untrackedOutMap = "host-untracked-out"
	preDNATMap      = "host-pre-dnat"
	limitFromMap    = "limit-from" // workloads with limits, by what they send
	limitToMap      = "limit-to"   // and by what they receive
	dscpFromMap     = "dscp-from"  // workloads whose packets get a code point
	dscpToMap       = "dscp-to"    // host endpoints, by whether what the host sends gets one
)

func sourcesSet(f dataplane.Family) string  { return nameOf("workload-addresses", f) }
func externalMap(f dataplane.Family) string { return nameOf("floating-in", f) }
func internalMap(f dataplane.Family) string { return nameOf("floating-out", f) }
func hairpinMap(f dataplane.Family) string  { return nameOf("floating-hairpin", f) }

// nameOf is the name of what there is once for each family.
func nameOf(what string, f dataplane.Family) string {
	if f == dataplane.IPv4 {
		return what + "-4"
	}
	return what + "-6"
}

func fixedSets() map[string]*set {
	all := map[string]*set{
		otherSet: {spec: setSpec{keyType: typeIfname, keyLen: unix.IFNAMSIZ}},
	}
	for _, name := range []string{
		fromMap, toMap, netsMap, errorsMap, hostInMap, hostOutMap, forwardInMap, forwardOutMap, untrackedInMap, untrackedOutMap, preDNATMap,
		limitFromMap, limitToMap, dscpFromMap, dscpToMap,
	} {
		all[name] = &set{spec: mapSpec(typeIfname, unix.IFNAMSIZ)}
	}
	for _, f := range dataplane.Families() {
		t, length := uint32(typeIPv4), uint32(4)
		if f == dataplane.IPv6 {
			t, length = typeIPv6, 16
		}
		all[sourcesSet(f)] = &set{spec: sourcesSpec(t, length)}
		all[externalMap(f)] = &set{spec: mapSpec(t, length), data: t}
		all[internalMap(f)] = &set{spec: mapSpec(t, length), data: t}
		all[hairpinMap(f)] = &set{spec: mapSpec(concat(t, t), 2*length), data: t}
	}
	for _, s := range all {
		s.elems = make(map[string]string)
	}
	return all
}

// sourcesSpec is that of a set of workloads' interfaces with their addresses.
func sourcesSpec(keyType, keyLen uint32) setSpec {
	return setSpec{keyType: concat(typeIfname, keyType), keyLen: unix.IFNAMSIZ + keyLen}
}

// place says what an endpoint has in the table.
func (w *desired) place(e *filter.Endpoint) *placed {
	p := &placed{Endpoint: *e}
	if e.Host {
		w.placeHost(p)
	} else {
		w.placeWorkload(p)
	}
	return p
}

func (p *placed) elem(set, key, data string) {
	p.elems = append(p.elems, placedElem{elemID{set, key}, data})
}

// path places a path: an element of a map leads to it. The endpoint for all
// other interfaces has no elements; the base chains jump to its paths.
func (p *placed) path(set string, s pathSource) {
	switch {
	case p.Interface == filter.AnyInterface:
	case s.idle():
		p.elem(set, ifname(p.Interface), elemAccept)
	default:
		root := named(s)
		p.elem(set, ifname(p.Interface), root.id)
		p.roots = append(p.roots, root)
	}
}

func (w *desired) placeHost(p *placed) {
	p.needs.hosts = 1
	w.placeDSCP(p)
	for _, hp := range hostPaths(&p.Endpoint) {
		p.path(hp.set, hp.pathSource)
		if hp.idle() {
			continue
		}
		switch hp.stage {
		case untrackedStage:
			p.needs.untracked = 1
		case preDNATStage:
			p.needs.preDNAT = 1
		default:
		}
	}
}

type mappedPath struct {
	set string
	pathSource
}

func hostPaths(e *filter.Endpoint) []mappedPath {
	return []mappedPath{
		{hostInMap, pathSource{e.Ingress, filter.Ingress, filterStage, hostPath}},
		{hostOutMap, pathSource{e.Egress, filter.Egress, filterStage, hostPath}},
		{forwardInMap, pathSource{e.ForwardIngress, filter.Ingress, filterStage, forwardPath}},
		{forwardOutMap, pathSource{e.ForwardEgress, filter.Egress, filterStage, forwardPath}},
		{untrackedInMap, pathSource{e.UntrackedIngress, filter.Ingress, untrackedStage, hostPath}},
		{untrackedOutMap, pathSource{e.UntrackedEgress, filter.Egress, untrackedStage, hostPath}},
		{preDNATMap, pathSource{e.PreDNATIngress, filter.Ingress, preDNATStage, hostPath}},
	}
}

func (w *desired) placeWorkload(p *placed) {
	key := ifname(p.Interface)
	egress := named(pathSource{p.Egress, filter.Egress, filterStage, workloadPath})
	ingress := named(pathSource{p.Ingress, filter.Ingress, filterStage, workloadPath})
	p.roots = append(p.roots, egress, ingress)
	p.elem(fromMap, key, egress.id)
	p.elem(toMap, key, ingress.id)
	p.elem(otherSet, key, elemNone)
	p.needs.odd = 1
	wide := false
	for _, net := range p.Sources {
		if !net.IsSingleIP() {
			wide = true
			continue
		}
		p.elem(sourcesSet(dataplane.FamilyOf(net.Addr())), key+string(net.Addr().AsSlice()), elemNone)
	}
	if wide {
		s := sourceNets{fmt.Sprint(p.Sources), p.Sources}
		p.roots = append(p.roots, s)
		p.elem(netsMap, key, s.name())
		errs := errorNets{s}
		p.roots = append(p.roots, errs)
		p.elem(errorsMap, key, errs.name())
		p.needs.nets = 1
	}
	w.placeLimits(p)
	w.placeDSCP(p)
	for _, t := range p.NAT {
		f := dataplane.FamilyOf(t.Internal)
		if f != dataplane.FamilyOf(t.External) {
			continue
		}
		in, out := string(t.Internal.AsSlice()), string(t.External.AsSlice())
		p.elem(externalMap(f), out, in)
		p.elem(internalMap(f), in, out)
		p.elem(hairpinMap(f), in+in, out)
		p.needs.floating = 1
	}
}

// sourceNets lets through what comes from one of several prefixes.
type sourceNets struct {
	text string
	nets []netip.Prefix
}

func (s sourceNets) name() string    { return "sources-" + hashName(s.text) }
func (s sourceNets) comment() string { return "" }

func (s sourceNets) rules(w *chainWriter) {
	for _, f := range dataplane.Families() {
		side := filter.Side{Nets: s.nets}
		if !ofFamily(&side, f) {
			continue
		}
		m := new(matcher)
		m.family(f)
		m.nets(source, s.nets, false, f, w)
		m.do(nfAccept, "")
		w.add(m, Counter{})
	}
	w.drop(new(matcher), filter.BySpoofing)
}

func (w *desired) putEndpoint(e *filter.Endpoint) {
	now, old := w.place(e), w.endpoints[e.Interface]
	if w.usual(e.Interface) {
		now.elems = slices.DeleteFunc(now.elems, func(el placedElem) bool { return el.set == otherSet })
		now.needs.odd = 0
	}
	for _, s := range now.roots {
		w.acquire(s)
	}
	if old != nil {
		w.unplace(old, now)
	}
	for _, el := range now.elems {
		if strings.HasPrefix(el.set, "floating") {
			w.claim(el, e.Interface)
			continue
		}
		if data, ok := w.sets[el.set].elems[el.key]; !ok || data != el.data {
			w.putElem(el.elemID, el.data)
		}
	}
	w.endpoints[e.Interface] = now
	w.tally.add(now.needs, 1)
}

// usual reports whether an interface has one of the workloads' prefixes.
func (w *desired) usual(name string) bool {
	return slices.ContainsFunc(w.settings.WorkloadPrefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

func (w *desired) delEndpoint(name string) {
	w.unplace(w.endpoints[name], &placed{})
	delete(w.endpoints, name)
}

// unplace takes away what an endpoint had and has no more.
func (w *desired) unplace(old, now *placed) {
	kept := make(map[elemID]bool, len(now.elems))
	for _, el := range now.elems {
		kept[el.elemID] = true
	}
	for _, el := range old.elems {
		switch {
		case strings.HasPrefix(el.set, "floating"):
			w.unclaim(el.elemID, old.Interface)
		case !kept[el.elemID]:
			w.delElem(el.elemID)
		}
	}
	for _, s := range old.roots {
		w.release(s)
	}
	w.tally.add(old.needs, -1)
}

// claim gives an element to the endpoint that asked last.
func (w *desired) claim(el placedElem, owner string) {
	w.floating[el.elemID] = append(w.floating[el.elemID], claim{owner, el.data})
	w.settle(el.elemID)
}

func (w *desired) unclaim(id elemID, owner string) {
	w.floating[id] = slices.DeleteFunc(w.floating[id], func(c claim) bool { return c.owner == owner })
	w.settle(id)
}

func (w *desired) settle(id elemID) {
	list := w.floating[id]
	data, there := w.sets[id.set].elems[id.key]
	switch {
	case len(list) == 0:
		delete(w.floating, id)
		if there {
			w.delElem(id)
		}
	case !there || data != list[len(list)-1].data:
		w.putElem(id, list[len(list)-1].data)
	}
}
