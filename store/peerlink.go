package store

import (
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// CheckPeerLink says what is wrong with the annotations of a BGPPeer that are
// about its link, [AnnotationPeerInterface] and [AnnotationExtendedNextHop], and
// with the fields that these concern. The error names the field and the cure.
func CheckPeerLink(annotations map[string]string, spec v3.BGPPeerSpec) error {
	c := &checker{}
	c.peerLink(annotations, &spec)
	return c.errs.Err()
}

func (c *checker) peerLink(annotations map[string]string, s *v3.BGPPeerSpec) {
	if v, ok := annotations[AnnotationExtendedNextHop]; ok && v != "true" && v != "false" {
		c.add(annotation(AnnotationExtendedNextHop), v, `must be "true" or "false"`)
	}
	device, ok := annotations[AnnotationPeerInterface]
	addr, hasAddr := peerAddress(s.PeerIP)
	switch {
	case !ok:
		if annotations[AnnotationExtendedNextHop] == "true" && hasAddr && addr.Is4() {
			c.add(annotation(AnnotationExtendedNextHop), "true", "is for sessions over IPv6, and spec.peerIP is IPv4; leave it out")
		}
		return
	case device == "":
		c.add(annotation(AnnotationPeerInterface), device, "must be the name of a network interface, such as eth1; leave it out for a peer with an address")
		return
	}
	c.interfaceName(annotation(AnnotationPeerInterface), device)
	if hasAddr && !(addr.Is6() && addr.IsLinkLocalUnicast()) {
		c.add("spec.peerIP", s.PeerIP, "is not link-local (fe80::/10), as it has to be with the annotation %s; leave one of the two out", AnnotationPeerInterface)
	}
	if s.ASNumber == 0 {
		c.add("spec.asNumber", nil, "required with the annotation %s: the AS number of the neighbour", AnnotationPeerInterface)
	}
	if s.PeerSelector != "" {
		c.add("spec.peerSelector", s.PeerSelector, "cannot be given together with the annotation %s; keep one of the two", AnnotationPeerInterface)
	}
	if s.ReachableBy != "" {
		c.add("spec.reachableBy", s.ReachableBy, "cannot be given together with the annotation %s: the neighbour is on the link", AnnotationPeerInterface)
	}
}

// peerAddress reads the address of a spec.peerIP with or without a port.
func peerAddress(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a, true
	}
	ap, err := netip.ParseAddrPort(s)
	return ap.Addr(), err == nil
}
