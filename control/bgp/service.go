package bgp

import (
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// excludeLabel on a node keeps service addresses off it (Kubernetes' well-known
// label).
const excludeLabel = "node.kubernetes.io/exclude-from-external-load-balancers"

// services returns the ranges of service addresses that every node announces,
// but for those with excludeLabel. With serviceLoadBalancerAggregation Disabled the range of load balancers is
// not announced as a whole.
func (d *derivation) services() []netip.Prefix {
	s := d.v.defaults()
	var cidrs []string
	for _, b := range s.ServiceClusterIPs {
		cidrs = append(cidrs, b.CIDR)
	}
	for _, b := range s.ServiceExternalIPs {
		cidrs = append(cidrs, b.CIDR)
	}
	if a := s.ServiceLoadBalancerAggregation; a == nil || *a != v3.ServiceLoadBalancerAggregationDisabled {
		for _, b := range s.ServiceLoadBalancerIPs {
			cidrs = append(cidrs, b.CIDR)
		}
	}
	set := map[netip.Prefix]bool{}
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(c); err == nil { // validation refuses others
			set[p.Masked()] = true
		}
	}
	return sorted(set)
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
