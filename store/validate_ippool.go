package store

import (
	"maps"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// Legal block sizes. Calico's block keeps one entry for each address, so that
// a block larger than a /20 would make its records unwieldy.
const (
	minBlockSizeV4, maxBlockSizeV4, defaultBlockSizeV4 = 20, 32, 26
	minBlockSizeV6, maxBlockSizeV6, defaultBlockSizeV6 = 116, 128, 122
)

// unroutables are the ranges where no pool can be and no dynamic neighbour, with what each
// is (RFC 6890, RFC 5771, RFC 4291).
func unroutables() map[string]netip.Prefix {
	return map[string]netip.Prefix{
		// Workloads' gateway is in the first of the two, and every interface
		// has an address of its own in the second.
		"link-local range 169.254.0.0/16":  netip.MustParsePrefix("169.254.0.0/16"),
		"link-local range fe80::/10":       netip.MustParsePrefix("fe80::/10"),
		"loopback range 127.0.0.0/8":       netip.MustParsePrefix("127.0.0.0/8"),
		"loopback address ::1":             netip.MustParsePrefix("::1/128"),
		"multicast range 224.0.0.0/4":      netip.MustParsePrefix("224.0.0.0/4"),
		"multicast range ff00::/8":         netip.MustParsePrefix("ff00::/8"),
		"range 0.0.0.0/8 of \"this host\"": netip.MustParsePrefix("0.0.0.0/8"),
		"broadcast address":                netip.MustParsePrefix("255.255.255.255/32"),
	}
}

// maxCIDRLength is the CRD's limit on the text of a pool's CIDR.
const maxCIDRLength = 48

func (c *checker) ipPool(s *v3.IPPoolSpec) {
	c.poolCIDR(s)
	c.poolModes(s)
	c.selector("spec.nodeSelector", s.NodeSelector, noGlobal)
	c.selector("spec.namespaceSelector", s.NamespaceSelector, noGlobal)
	if s.AssignmentMode != nil {
		c.oneOf("spec.assignmentMode", string(*s.AssignmentMode), string(v3.Automatic), string(v3.Manual))
	}
	c.poolUses(s)
	c.reject(s.IPIP != nil, "spec.ipip", nil, "is a field of the v1 API; use spec.ipipMode")
	c.reject(s.NATOutgoingV1, "spec.nat-outgoing", true, "is a field of the v1 API; use spec.natOutgoing")
}

// poolCIDR checks the CIDR and the block size.
func (c *checker) poolCIDR(s *v3.IPPoolSpec) {
	p := c.cidr("spec.cidr", s.CIDR)
	c.reject(len(s.CIDR) > maxCIDRLength, "spec.cidr", s.CIDR, "must be at most %d characters long", maxCIDRLength)
	if !p.IsValid() {
		return
	}
	ranges := unroutables()
	for _, what := range slices.Sorted(maps.Keys(ranges)) {
		c.reject(p.Overlaps(ranges[what]), "spec.cidr", s.CIDR, "overlaps the %s, which is not routed; choose another range", what)
	}
	low, high, def := minBlockSizeV4, maxBlockSizeV4, defaultBlockSizeV4
	if !p.Addr().Is4() {
		low, high, def = minBlockSizeV6, maxBlockSizeV6, defaultBlockSizeV6
	}
	if s.BlockSize < low || s.BlockSize > high {
		c.add("spec.blockSize", s.BlockSize, "must be a number from %d to %d for an %s pool; leave it out for %d", low, high, familyName(p.Addr()), def)
		return
	}
	if p.Bits() > s.BlockSize && !s.Disabled {
		c.add("spec.cidr", s.CIDR, "is smaller than one block of /%d; use a prefix length of at most %d, or a blockSize from %d to %d",
			s.BlockSize, s.BlockSize, max(low, p.Bits()), high)
	}
}

func (c *checker) poolModes(s *v3.IPPoolSpec) {
	modes := []string{string(v3.IPIPModeNever), string(v3.IPIPModeAlways), string(v3.IPIPModeCrossSubnet)}
	c.oneOf("spec.ipipMode", string(s.IPIPMode), modes...)
	c.oneOf("spec.vxlanMode", string(s.VXLANMode), modes...)
	ipip, vxlan := encapsulates(string(s.IPIPMode)), encapsulates(string(s.VXLANMode))
	c.reject(ipip && vxlan, "spec.vxlanMode", string(s.VXLANMode), "cannot be used together with ipipMode %s; set one of the two to Never", s.IPIPMode)
}

func encapsulates(mode string) bool { return mode != "" && mode != string(v3.IPIPModeNever) }

func (c *checker) poolUses(s *v3.IPPoolSpec) {
	const field = "spec.allowedUses"
	for i, u := range s.AllowedUses {
		switch u {
		case v3.IPPoolAllowedUseWorkload, v3.IPPoolAllowedUseTunnel, v3.IPPoolAllowedUseLoadBalancer:
		default:
			c.add(index(field, i), string(u), "must be one of Workload, Tunnel, LoadBalancer")
		}
	}
	c.reject(s.NamespaceSelector != "" && slices.Contains(s.AllowedUses, v3.IPPoolAllowedUseTunnel),
		"spec.namespaceSelector", s.NamespaceSelector, "cannot be used in a pool for tunnel addresses, which belong to no namespace; set allowedUses: [Workload]")
	if !slices.Contains(s.AllowedUses, v3.IPPoolAllowedUseLoadBalancer) {
		return
	}
	c.reject(len(s.AllowedUses) > 1, field, s.AllowedUses, "LoadBalancer must stand alone; make a pool of its own for it")
	c.reject(encapsulates(string(s.IPIPMode)) || encapsulates(string(s.VXLANMode)), field, s.AllowedUses, "a LoadBalancer pool has no encapsulation; set ipipMode and vxlanMode to Never")
	c.reject(s.DisableBGPExport, "spec.disableBGPExport", true, "a LoadBalancer pool is reached by BGP only; leave this field out")
	c.reject(s.NodeSelector != allSelector, "spec.nodeSelector", s.NodeSelector, "must be all() in a LoadBalancer pool")
}

func (c *checker) ipReservation(s *v3.IPReservationSpec) {
	for i, r := range s.ReservedCIDRs {
		c.anyCIDR(index("spec.reservedCIDRs", i), r)
	}
}
