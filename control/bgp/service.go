package bgp

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// excludeLabel on a node keeps service addresses off it (Kubernetes' well-known
// label).
const excludeLabel = "node.kubernetes.io/exclude-from-external-load-balancers"

// ServiceKinds lists what a [View] follows besides where the datastore has Services.
func ServiceKinds() []store.Kind {
	return []store.Kind{store.KindService, store.KindEndpointSlice, store.KindServiceCIDR}
}

// ranges returns those of service addresses.
func (v *View) ranges() service.Ranges {
	s, notes := v.defaults(), v.defaultNotes()
	r := service.Ranges{
		Single:       s.ServiceLoadBalancerAggregation != nil && *s.ServiceLoadBalancerAggregation == v3.ServiceLoadBalancerAggregationDisabled,
		NeedEndpoint: notes[store.AnnotationServicesNeedEndpoints] == "true",
	}
	add := func(to *[]netip.Prefix, cidr string) {
		if p, err := netip.ParsePrefix(cidr); err == nil && !slices.Contains(*to, p.Masked()) { // validation refuses others
			*to = append(*to, p.Masked())
		}
	}
	for _, b := range s.ServiceClusterIPs {
		add(&r.Cluster, b.CIDR)
	}
	if notes[store.AnnotationServiceCIDRs] == "true" {
		for _, name := range slices.Sorted(maps.Keys(v.cidrs)) {
			for _, cidr := range v.cidrs[name] {
				add(&r.Cluster, cidr)
			}
		}
	}
	for _, b := range s.ServiceExternalIPs {
		add(&r.External, b.CIDR)
	}
	for _, b := range s.ServiceLoadBalancerIPs {
		add(&r.LoadBalancer, b.CIDR)
	}
	return r
}

// services returns the ranges of service addresses that every node announces,
// but for those with excludeLabel. With serviceLoadBalancerAggregation Disabled the range of load balancers is
// not announced as a whole, nor, where Services are known, one of a single address.
func (d *derivation) services() []netip.Prefix {
	r := d.v.services.Ranges()
	if d.v.hasServices {
		return r.Wide()
	}
	out := slices.Concat(r.Cluster, r.External)
	if !r.Single {
		out = append(out, r.LoadBalancer...)
	}
	return out
}

// single adds the addresses of Services that the node announces by themselves, as far as
// they may be.
func (d *derivation) single(may func(netip.Prefix)) {
	d.of, d.leaving = d.v.services.Announced(d.node), map[netip.Prefix]bool{}
	if d.node == d.v.self && len(d.v.held) > 0 {
		d.of = maps.Clone(d.of)
		maps.DeleteFunc(d.of, func(a netip.Addr, _ service.Announcement) bool { return d.v.held[a] })
	}
	for a, n := range d.of {
		p := hostRoute(a)
		may(p)
		if n.State == service.Leaving {
			d.leaving[p] = true
		}
	}
}

// serviceOf names the Service for which a prefix is announced by itself; empty: it is for none.
func (c *Config) serviceOf(p netip.Prefix) string {
	n, ok := c.Services[p.Addr()]
	if !ok || !p.IsSingleIP() {
		return ""
	}
	return "Service " + n.Service.Namespace + "/" + n.Service.Name
}

// damp holds back addresses of Services that come and go, and returns for how long that
// holds if nothing else happens; 0: forever. What is announced without it does not
// change.
func (v *View) damp(now time.Time) time.Duration {
	if v.nodes == nil || !v.synced && !v.fromDisk {
		return 0 // what is not reported yet was not lost
	}
	changes := v.services.Changes()
	held, again := v.damper.Damp(now, v.services.Announcement, changes)
	if v.touched == nil {
		v.touched = map[netip.Addr]bool{}
	}
	for a := range changes {
		v.touched[a] = true
	}
	for _, l := range []map[netip.Addr]bool{v.held, held} {
		for a := range l {
			if v.held[a] != held[a] {
				v.touched[a] = true
			}
		}
	}
	v.held = held
	return again
}

// takeTouched takes the addresses of Services that may be announced otherwise than before.
func (v *View) takeTouched() map[netip.Addr]bool {
	out := v.touched
	v.touched = nil
	return out
}

// announced is what a node originates for an address of a Service, or that it does no more.
type announced struct {
	netip.Prefix
	Service *service.Announcement // nil: it is originated no more
	Tags    string
}

// touchedOf says what is originated for some addresses of Services, at the cost of these alone.
// It is false where more than these may depend on it: then desired is to be asked.
func (m *memo) touchedOf(v *View, node string, touched map[netip.Addr]bool) ([]announced, bool) {
	d := newDerivation(v, node)
	if !m.fits(v, node) || !v.synced || v.leaving || d.self.drain != "" || d.self.labels[excludeLabel] == "true" || len(v.injection.routes) > 0 {
		return nil, false
	}
	d.leaving = map[netip.Prefix]bool{}
	wide := d.services()
	if len(touched) == 0 {
		return nil, true
	}
	out := make([]announced, 0, len(touched))
	var there []netip.Prefix
	for a := range touched {
		p := hostRoute(a)
		if d.hidden(p) || v.affinities[node][p] || v.borrowed[node][a] || slices.Contains(wide, p) {
			return nil, false // it is announced for another reason, or not to all
		}
		to := announced{Prefix: p}
		if n, ok := v.services.Announcement(a); ok && !v.held[a] && d.carries(p, m.config.Peers) {
			to.Service, d.leaving[p] = &n, n.State == service.Leaving
			there = append(there, p)
		}
		out = append(out, to)
	}
	tags := d.tags(there)
	for i := range out {
		out[i].Tags = tags[out[i].Prefix]
	}
	return out, true
}

// service takes what the datastore says of Services, and reports whether what is
// announced for them is different.
func (v *View) service(e *cluster.Change) (bool, error) {
	switch val := e.Value.(type) {
	case nil:
		switch e.Key.Kind {
		case store.KindService:
			return v.services.SetService(e.Key, nil), nil
		case store.KindEndpointSlice:
			return v.services.SetSlice(e.Key, nil), nil
		}
		delete(v.cidrs, e.Key.Name)
	case *store.Service:
		return v.services.SetService(e.Key, val), nil
	case *store.EndpointSlice:
		return v.services.SetSlice(e.Key, val), nil
	case *store.ServiceCIDR:
		v.cidrs[e.Key.Name] = val.CIDRs
	default:
		return false, fmt.Errorf("value is a %T", e.Value)
	}
	return v.rangesChanged(), nil
}

// rangesChanged goes by the ranges as they are now, and reports whether they are others.
// What an operator takes away was not lost.
func (v *View) rangesChanged() bool {
	if !v.services.SetRanges(v.ranges()) {
		return false
	}
	v.damper = service.Damper{}
	return true
}

// tags returns the communities of what is announced: those of every
// prefixAdvertisement that holds the prefix. A list on the node's own
// BGPConfiguration replaces the default one.
func (d *derivation) tags(announce []netip.Prefix) map[netip.Prefix]string {
	conf := d.v.defaults()
	if c, ok := d.v.confs["node."+d.node]; ok && len(c.Spec.PrefixAdvertisements) > 0 {
		conf.PrefixAdvertisements = c.Spec.PrefixAdvertisements
		conf.Communities = slices.Concat(c.Spec.Communities, conf.Communities)
	}
	out := map[netip.Prefix]string{}
	for _, p := range announce {
		var l []string
		for _, a := range conf.PrefixAdvertisements {
			cidr, err := netip.ParsePrefix(a.CIDR)
			if err != nil || cidr.Bits() > p.Bits() || !cidr.Masked().Contains(p.Addr()) {
				continue
			}
			for _, c := range a.Communities {
				if c = communityValue(conf.Communities, c); c != "" && !slices.Contains(l, c) {
					l = append(l, c)
				}
			}
		}
		if d.leaving[p] {
			l = append(l, gracefulShutdownText)
		}
		if len(l) > 0 {
			slices.Sort(l)
			out[p] = strings.Join(l, " ")
		}
	}
	return out
}

// communityValue resolves a name; empty: it is neither that nor a value.
func communityValue(list []v3.Community, s string) string {
	for _, c := range list {
		if c.Name == s {
			s = c.Value
			break
		}
	}
	if _, err := parseCommunity(s); err != nil {
		return ""
	}
	return s
}
