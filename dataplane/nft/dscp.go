package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// dscpSource gives packets that leave the cluster a code point (RFC 2474 section 3).
type dscpSource struct{ value uint8 }

func (s dscpSource) name() string  { return fmt.Sprintf("dscp-%d", s.value) }
func (dscpSource) comment() string { return "" }

func (s dscpSource) rules(c *chainWriter) {
	for _, f := range dataplane.Families() {
		m := new(matcher)
		m.family(f)
		for _, inside := range []filter.SetID{filter.NATExempt, filter.TunnelSources} {
			if c.w.members[inside] != nil {
				m.member(destination, inside, true, f, c)
			}
		}
		m.setDSCP(f, s.value)
		c.add(m, Counter{})
	}
}

// setDSCP writes the code point into the two bytes of the header that hold it, beside the
// bits of ECN and, in IPv4, the header's length or, in IPv6, the version and some of the
// flow label. The checksum of IPv4's header, at byte 10, follows.
func (m *matcher) setDSCP(f dataplane.Family, value uint8) {
	mask, set := []byte{0xff, 0x03}, []byte{0, value << 2}
	if f == dataplane.IPv6 {
		mask, set = []byte{0xf0, 0x3f}, []byte{value >> 2, value << 6}
	}
	m.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 0, 2, reg1)
	m.bits(mask, set)
	m.expr("payload", func() {
		m.Net32(unix.NFTA_PAYLOAD_SREG, reg1)
		m.Net32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
		m.Net32(unix.NFTA_PAYLOAD_OFFSET, 0)
		m.Net32(unix.NFTA_PAYLOAD_LEN, 2)
		if f == dataplane.IPv4 {
			m.Net32(unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFT_PAYLOAD_CSUM_INET)
			m.Net32(unix.NFTA_PAYLOAD_CSUM_OFFSET, 10)
		}
	})
}

// placeDSCP places what marks the packets that a workload sends, or the host by a host
// endpoint's interface. A host endpoint that marks none keeps its interface from the one
// for all other interfaces.
func (w *desired) placeDSCP(p *placed) {
	s := dscpSource{p.DSCP.Value}
	set := dscpFromMap
	if p.Host {
		set = dscpToMap
	}
	switch {
	case p.DSCP.Set:
		p.roots = append(p.roots, s)
		p.needs.dscp = 1
		if p.Interface != filter.AnyInterface {
			p.elem(set, ifname(p.Interface), s.name())
		}
	case p.Host && p.Interface != filter.AnyInterface:
		p.elem(set, ifname(p.Interface), elemAccept)
	}
}

// dscpOut marks what the host itself sends.
func (c *chainWriter) dscpOut() {
	c.vmap(unix.NFT_META_OIFNAME, dscpToMap)
	anyone := c.w.endpoints[filter.AnyInterface]
	if anyone == nil || !anyone.DSCP.Set {
		return
	}
	c.workloads(unix.NFT_META_OIFNAME, nfAccept, "")
	s := dscpSource{anyone.DSCP.Value}
	m := new(matcher)
	m.iface(unix.NFT_META_OIFNAME, "lo", false, true)
	m.do(unix.NFT_GOTO, s.name())
	c.jumps = append(c.jumps, s)
	c.add(m, Counter{})
}
