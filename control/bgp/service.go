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
	var again time.Duration
	v.held, again = v.damper.Damp(now, v.services.Announced(v.self))
	return again
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
