package store

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// Refused says which nodes cannot carry the packets of a pool in a mode, and
// why, by what the nodes publish. With such a node a change to the mode would
// stop half-way: the node is left where it is.
func Refused(p *v3.IPPool, m Mode, nodes []*Node) []error {
	var errs []error
	for _, n := range nodes {
		refuses := NodeEncapsOf(n).Refuses
		for _, f := range m.EncapsAt(n, p) {
			if why, ok := refuses[f]; ok {
				errs = append(errs, fmt.Errorf("node %s cannot take in %s packets, which %s asks for: %s", n.Name, f, m.Encapsulation, why))
			}
		}
	}
	return errs
}

// EncapsAt lists the encapsulations that a node has to accept for a pool in a mode: over
// the family of the pool where the node has an address of it, else over the
// other.
func (m Mode) EncapsAt(n *Node, p *v3.IPPool) []string {
	cidr, err := netip.ParsePrefix(p.Spec.CIDR)
	if err != nil || n.Spec.BGP == nil {
		return nil
	}
	six := cidr.Addr().Is6()
	if six && n.Spec.BGP.IPv6Address == "" || !six && n.Spec.BGP.IPv4Address == "" {
		six = !six
	}
	return slices.DeleteFunc(m.Encaps(), func(f string) bool {
		return f != "direct" && six != (f == "ip6tnl" || strings.HasPrefix(f, "vxlan6/"))
	})
}
