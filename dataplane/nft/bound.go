package nft

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// What one workload may take of tables that all share.
const (
	// discoveryRate is how many neighbour solicitations a second may come from link-local
	// addresses, of which a workload can make up as many as it likes; the kernel keeps an
	// entry for each for at least five seconds, of 1,024 in all by default (gc_thresh3).
	discoveryRate = 4
	// discoveryFor is how long the rate of a workload that sends none is kept.
	discoveryFor = time.Minute
	// maxDynamic is the size of a set that packets fill, by interface.
	maxDynamic = 1 << 16
)

// byInterface returns an empty set of interfaces that packets fill, whose elements the
// kernel keeps for a time; 0: as long as what they count.
func byInterface(keep time.Duration) *set {
	s := &set{spec: setSpec{keyType: typeIfname, keyLen: unix.IFNAMSIZ, flags: unix.NFT_SET_EVAL}, keep: keep, elems: make(map[string]string)}
	if keep > 0 {
		s.spec.flags |= unix.NFT_SET_TIMEOUT
	}
	return s
}

// connections drops what would open more connections than a workload may have.
func (c *chainWriter) connections() {
	most := c.w.settings.MaxConnections
	if most == 0 {
		return
	}
	set := c.literal(fmt.Sprint("connections-", most), byInterface(0))
	c.workloadRules(unix.NFT_META_IIFNAME, func(iface func(*matcher)) {
		m := new(matcher)
		m.state(stateNew)
		iface(m)
		m.dynamic(set, unix.NFT_DYNSET_OP_ADD, "connlimit", func() {
			m.connectionLimit(most)
		})
		c.drop(m, filter.ByMany)
	})
}

// solicitations bounds how many neighbours of the host a workload can claim to be by
// link-local addresses: the others are its own.
func (c *chainWriter) solicitations() {
	set := c.literal("discovery", byInterface(discoveryFor))
	c.workloadRules(unix.NFT_META_IIFNAME, func(iface func(*matcher)) {
		m := new(matcher)
		m.family(dataplane.IPv6)
		m.protocol(unix.IPPROTO_ICMPV6, false)
		m.icmpTypes(dataplane.IPv6, []filter.PortRange{{Low: 133, High: 133}, {Low: 135, High: 135}}, c)
		m.net(source, netip.MustParsePrefix("fe80::/10"), false)
		iface(m)
		m.dynamic(set, unix.NFT_DYNSET_OP_UPDATE, "limit", func() {
			m.limit(unix.NFT_LIMIT_PKTS, discoveryRate, discoveryRate*burstSeconds, true)
		})
		c.drop(m, filter.ByMany)
	})
}

// The attributes of the expression that counts connections (linux/netfilter/nf_tables.h).
const (
	connLimitCount = 1
	connLimitFlags = 2
	connLimitOver  = 1
)

// connectionLimit has the attributes of a count of connections that is beyond a number.
func (m *matcher) connectionLimit(most uint32) {
	m.Net32(connLimitCount, most)
	m.Net32(connLimitFlags, connLimitOver)
}

// dynamic puts the interface in the first register into a set, with an expression of its
// own that goes on where it matches.
func (m *matcher) dynamic(set string, op uint32, name string, attributes func()) {
	m.expr("dynset", func() {
		m.Text(unix.NFTA_DYNSET_SET_NAME, set)
		m.Net32(unix.NFTA_DYNSET_OP, op)
		m.Net32(unix.NFTA_DYNSET_SREG_KEY, reg1)
		m.Nest(unix.NFTA_DYNSET_EXPR, func() {
			m.Text(unix.NFTA_EXPR_NAME, name)
			m.Nest(unix.NFTA_EXPR_DATA, attributes)
		})
	})
}

// describe adds what sets need that packets fill.
func (s *set) describe(b *nl.Attrs) {
	if s.spec.flags&unix.NFT_SET_EVAL == 0 {
		return
	}
	b.Nest(unix.NFTA_SET_DESC, func() { b.Net32(unix.NFTA_SET_DESC_SIZE, maxDynamic) })
	if s.keep > 0 {
		b.Net64(unix.NFTA_SET_TIMEOUT, uint64(s.keep.Milliseconds())) //nolint:gosec // not negative
	}
}
