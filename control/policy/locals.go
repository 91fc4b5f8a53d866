package policy

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"reflect"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// locals are the endpoints of this host.
type locals struct {
	ids   map[store.Key]itemID
	list  []*local // by id; nil: free
	free  []itemID
	dirty map[itemID]struct{} // whose labels may have changed

	named   map[string][]itemID // by the interface that they name
	unnamed map[itemID]struct{} // host endpoints that are found by addresses
	addrs   map[string][]netip.Addr

	links     interfaces      // which can be workloads'
	hostLinks map[string]bool // as [Calculator.SetHostLinks] said

	matcher   *matcher // which policies are for whom
	stale     map[string]struct{}
	published map[string]publishedEndpoint // by interface

	stored map[string]bool             // names of host endpoints in the store
	auto   map[string]*v3.HostEndpoint // those that follow from nodes, by name
}

type publishedEndpoint struct {
	filter.Endpoint
	policies []filter.PolicyID
}

// local is an endpoint of this host.
type local struct {
	key      store.Key
	host     bool
	iface    string // "": found by expected
	created  metav1.Time
	own      map[string]string
	implied  []label
	profiles []string
	expected []netip.Addr
	addrs    []netip.Prefix
	spoof    []netip.Prefix
	nat      []filter.Translation
	limits   filter.Limits
	dscp     filter.DSCP
}

func (l *locals) init() {
	l.ids = make(map[store.Key]itemID)
	l.dirty = make(map[itemID]struct{})
	l.named = make(map[string][]itemID)
	l.unnamed = make(map[itemID]struct{})
	l.matcher = newMatcher(func(_ queryID, id itemID, _ bool) { l.touch(id) })
	l.stale = make(map[string]struct{})
	l.published = make(map[string]publishedEndpoint)
	l.stored = make(map[string]bool)
	l.auto = make(map[string]*v3.HostEndpoint)
}

// touch has an endpoint built anew.
func (l *locals) touch(id itemID) {
	e := l.list[id]
	switch {
	case e == nil:
	case e.iface != "":
		l.stale[e.iface] = struct{}{}
	default:
		for name := range l.addrs {
			l.stale[name] = struct{}{}
		}
	}
}

func (l *locals) touchAll() {
	for _, id := range l.ids {
		l.touch(id)
	}
}

// touchNamed has the endpoints of all interfaces that some endpoint names built anew.
func (l *locals) touchNamed() {
	for name := range l.named {
		l.stale[name] = struct{}{}
	}
}

// setPrefixes applies the configured prefixes of workloads' interfaces and returns
// those that are used, and why the others are not.
func (l *locals) setPrefixes(configured []string) (used, refused []string) {
	used, refused = l.links.usable(configured)
	if !slices.Equal(used, l.links.prefixes) {
		l.links.prefixes = used
		l.touchNamed()
	}
	return used, refused
}

// putProfile takes note that a profile may lend other labels.
func (l *locals) putProfile(name string, _ *v3.Profile) {
	for _, id := range l.ids {
		if slices.Contains(l.list[id].profiles, name) {
			l.dirty[id] = struct{}{}
		}
	}
}

func (l *locals) setInterfaces(addrs map[string][]netip.Addr) {
	for name, was := range l.addrs {
		if !slices.Equal(was, addrs[name]) {
			l.stale[name] = struct{}{}
		}
	}
	for name, now := range addrs {
		if !slices.Equal(l.addrs[name], now) {
			l.stale[name] = struct{}{}
		}
	}
	l.addrs = make(map[string][]netip.Addr, len(addrs))
	for name, list := range addrs {
		l.addrs[name] = slices.Clone(list)
	}
}

// put applies an endpoint, or its deletion. Those of other hosts
// are passed over.
func (l *locals) put(c *Calculator, key store.Key, v any) {
	e := localOf(c.cfg.Node, key, v)
	id, known := l.ids[key]
	if known {
		l.touch(id)
		l.unclaim(id)
		if e == nil {
			l.matcher.remove(id)
			l.list[id] = nil
			delete(l.ids, key)
			delete(l.dirty, id)
			l.free = append(l.free, id)
			return
		}
	}
	if e == nil {
		return
	}
	if !known {
		if n := len(l.free); n > 0 {
			id, l.free = l.free[n-1], l.free[:n-1]
		} else {
			id = itemID(len(l.list)) //nolint:gosec // a host has fewer
			l.list = append(l.list, nil)
		}
		l.ids[key] = id
	}
	l.list[id] = e
	if e.iface == "" {
		l.unnamed[id] = struct{}{}
	} else {
		l.named[e.iface] = append(l.named[e.iface], id)
	}
	l.dirty[id] = struct{}{}
	l.touch(id)
}

func (l *locals) unclaim(id itemID) {
	delete(l.unnamed, id)
	name := l.list[id].iface
	l.named[name] = slices.DeleteFunc(l.named[name], func(o itemID) bool { return o == id })
	if len(l.named[name]) == 0 {
		delete(l.named, name)
	}
}

// localOf returns an endpoint if it is one of node's, and nil for others.
func localOf(node string, key store.Key, v any) *local {
	switch o := v.(type) {
	case *store.WorkloadEndpoint:
		if o.Spec.Node != node || o.Spec.InterfaceName == "" {
			return nil
		}
		content, _ := workloadContent(&o.Spec)
		e := &local{
			key: key, iface: o.Spec.InterfaceName, created: o.CreationTimestamp,
			own: o.Labels, implied: workloadLabels(key, &o.Spec), profiles: o.Spec.Profiles, addrs: content.nets,
		}
		e.spoof, _ = setNets(o.Spec.AllowSpoofedSourcePrefixes)
		for _, n := range o.Spec.IPNATs {
			in, ok := parseAddr(n.InternalIP)
			out, ok2 := parseAddr(n.ExternalIP)
			if ok && ok2 {
				e.nat = append(e.nat, filter.Translation{External: out, Internal: in})
			}
		}
		if q, err := o.Spec.QoS(); err == nil { // validation refuses others
			e.limits, e.dscp = limitsOf(&q), dscpOf(q.DSCP)
		}
		return e
	case *v3.HostEndpoint:
		if o.Spec.Node != node {
			return nil
		}
		e := &local{
			key: key, host: true, iface: o.Spec.InterfaceName, created: o.CreationTimestamp,
			own: o.Labels, profiles: o.Spec.Profiles,
		}
		if text, ok := o.Annotations[store.AnnotationDSCP]; ok {
			if d, err := store.ParseDSCP(text); err == nil { // validation refuses others
				e.dscp = dscpOf(&d)
			}
		}
		for _, s := range o.Spec.ExpectedIPs {
			if a, ok := parseAddr(s); ok {
				e.expected = append(e.expected, a)
			}
		}
		return e
	}
	return nil
}

// packetBurst is how many packets beyond the rate may come at once where nothing is
// said, as in Calico.
const packetBurst = 5

// limitsOf returns what limits mean in the kernel's units. Without a burst a workload has
// what one second of its bandwidth is.
func limitsOf(q *store.QoSControls) filter.Limits {
	count := func(n uint64) uint32 { return uint32(min(n, math.MaxUint32)) } //nolint:gosec // bounded
	limit := func(bandwidth, burst, peak, peakBurst, packets, packetsAtOnce, connections uint64) filter.Limit {
		l := filter.Limit{
			Bandwidth: bandwidth / 8, Burst: count(burst / 8), Peak: peak / 8, PeakBurst: count(peakBurst),
			Packets: count(packets), PacketBurst: count(packetsAtOnce), Connections: count(connections),
		}
		if l.Packets > 0 && l.PacketBurst == 0 {
			l.PacketBurst = packetBurst
		}
		return l
	}
	return filter.Limits{
		Ingress: limit(q.IngressBandwidth, q.IngressBurst, q.IngressPeakrate, q.IngressMinburst, q.IngressPacketRate, q.IngressPacketBurst, q.IngressMaxConnections),
		Egress:  limit(q.EgressBandwidth, q.EgressBurst, q.EgressPeakrate, q.EgressMinburst, q.EgressPacketRate, q.EgressPacketBurst, q.EgressMaxConnections),
	}
}

func dscpOf(d *numorstring.DSCP) filter.DSCP {
	if d == nil || d.Validate() != nil {
		return filter.DSCP{}
	}
	return filter.DSCP{Set: true, Value: d.ToUint8()}
}

// settle brings changed labels into the index.
func (l *locals) settle(c *Calculator) {
	for _, id := range sortedKeys(l.dirty, cmp.Compare[itemID]) {
		e := l.list[id]
		l.matcher.put(id, c.members.labelsOf(e.own, e.implied, e.profiles))
	}
}

// owner returns who an interface belongs to: a workload before a host
// endpoint; of two workloads the younger, for its interface was made later; of
// two host endpoints the first by name, as in Felix.
//
// An endpoint that names an interface which cannot be its own belongs to no host: the
// rules of a workload on the host's uplink would cut the host off.
func (l *locals) owner(name string) (itemID, bool) {
	candidates := slices.DeleteFunc(slices.Clone(l.named[name]), func(id itemID) bool { return l.refuses(id) != "" })
	for id := range l.unnamed {
		if slices.ContainsFunc(l.list[id].expected, func(a netip.Addr) bool { return slices.Contains(l.addrs[name], a) }) {
			candidates = append(candidates, id)
		}
	}
	if len(candidates) == 0 {
		return 0, false
	}
	return slices.MinFunc(candidates, func(a, b itemID) int {
		x, y := l.list[a], l.list[b]
		if x.host != y.host {
			if x.host {
				return 1
			}
			return -1
		}
		if !x.host && !x.created.Equal(&y.created) {
			return y.created.Compare(x.created.Time)
		}
		return compareKeys(x.key, y.key)
	}), true
}

// refuses says why an endpoint does not count at the interface that it names, "" if
// it does.
func (l *locals) refuses(id itemID) string {
	e := l.list[id]
	switch {
	case len(e.iface) > store.MaxInterfaceName:
		// Cut off, the name would be that of another interface.
		return fmt.Sprintf("no interface is called %q: a name has at most %d bytes", e.iface, store.MaxInterfaceName)
	case e.host:
		return ""
	}
	return l.links.refuses(e.iface)
}

// emit reports the endpoints that came, went or changed.
func (l *locals) emit(c *Calculator) (put []filter.Endpoint, del []string) {
	for _, name := range sortedKeys(l.stale, cmp.Compare[string]) {
		was, published := l.published[name]
		id, ok := l.owner(name)
		if !ok {
			if published {
				del = append(del, name)
				delete(l.published, name)
				for _, p := range was.policies {
					c.policies.refer(p, -1)
				}
			}
			continue
		}
		e := c.build(name, id)
		if published && reflect.DeepEqual(was.Endpoint, e) {
			continue
		}
		if c.holds(&e) {
			l.stale[name] = struct{}{}
			continue
		}
		now := publishedEndpoint{Endpoint: e, policies: e.Policies()}
		for _, p := range now.policies {
			c.policies.refer(p, 1)
		}
		for _, p := range was.policies {
			c.policies.refer(p, -1)
		}
		l.published[name] = now
		put = append(put, e)
	}
	return put, del
}

// clashes adds the endpoints that do not count, and those that stand back behind
// another one.
func (l *locals) clashes(add func(store.Key, string)) {
	for _, name := range slices.Sorted(maps.Keys(l.named)) {
		owner, _ := l.owner(name)
		for _, id := range l.named[name] {
			if reason := l.refuses(id); reason != "" {
				add(l.list[id].key, reason)
			} else if id != owner {
				add(l.list[id].key, fmt.Sprintf("interface %s belongs to %s", name, l.list[owner].key))
			}
		}
	}
}
