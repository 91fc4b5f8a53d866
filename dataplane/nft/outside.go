package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// outside has what looks like a tunnel's packet judged by its outer source, before
// connection tracking has a word: who was a host of the cluster keeps its connections.
func (c *chainWriter) outside() {
	if c.w.members[filter.TunnelSources] == nil {
		return
	}
	for _, t := range c.w.settings.Tunnels {
		m := new(matcher)
		if !t.Over(dataplane.IPv4) {
			m.family(dataplane.IPv6)
		}
		m.tunnel(t)
		s := tunnelSource{t.Protocol}
		m.do(unix.NFT_JUMP, s.name())
		c.jumps = append(c.jumps, s)
		c.add(m, Counter{})
	}
}

// tunnelSource drops tunnel packets of an IP protocol that come from outside the cluster.
type tunnelSource struct{ protocol uint8 }

func (s tunnelSource) name() string  { return fmt.Sprintf("tunnel-source-%d", s.protocol) }
func (tunnelSource) comment() string { return "" }

func (s tunnelSource) rules(c *chainWriter) {
	for _, f := range dataplane.Families() {
		if !(filter.Tunnel{Protocol: s.protocol}).Over(f) {
			continue
		}
		m := new(matcher)
		m.family(f)
		m.member(source, filter.TunnelSources, false, f, c)
		m.do(unix.NFT_RETURN, "")
		c.add(m, Counter{})
	}
	m := new(matcher)
	if m.probe(s.protocol) {
		m.do(unix.NFT_RETURN, "")
		c.add(m, Counter{})
	}
	c.drop(new(matcher), filter.ByOutside)
}

// The destination of the packet in a probe in IPIP, a multicast group that nobody joins
// (233.252.0.0/24, RFC 6676), and where that stands in the packet; VXLAN's flag that says
// that there is a VNI, which probes have not (RFC 7348, section 5).
const (
	probeGroup    = "\xe9\xfc\x00\x4d"
	innerDst      = 16
	vxlanFlags    = 8 // behind the UDP header
	vxlanVNIValid = 0x08
)

// probe matches what hosts whose addresses are not known yet measure the underlay with,
// and which no tunnel's device decapsulates; false: the protocol has no probes.
func (m *matcher) probe(protocol uint8) bool {
	switch protocol {
	case unix.IPPROTO_UDP:
		m.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, vxlanFlags, 1, reg1)
		m.bits([]byte{vxlanVNIValid}, []byte{0})
		m.cmp(unix.NFT_CMP_EQ, []byte{0})
	case unix.IPPROTO_IPIP:
		m.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, innerDst, uint32(len(probeGroup)), reg1)
		m.cmp(unix.NFT_CMP_EQ, []byte(probeGroup))
	default:
		return false
	}
	return true
}
