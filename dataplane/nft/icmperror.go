package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// The types of ICMP messages that quote the packet which they are about: RFC 792, and
// RFC 4443 section 2.1.
func icmpErrorTypes(f dataplane.Family) (protocol uint8, types []filter.PortRange) {
	if f == dataplane.IPv4 {
		return unix.IPPROTO_ICMP, []filter.PortRange{{Low: 3, High: 5}, {Low: 11, High: 12}}
	}
	return unix.IPPROTO_ICMPV6, []filter.PortRange{{Low: 1, High: 4}}
}

// establishedFrom is [chainWriter.established] where workloads' packets come in: their
// ICMP errors, which connection tracking relates to whatever connection they quote, are
// looked at before they count. Without host endpoints, what comes from elsewhere is
// nobody's to judge in these chains, and need not pass the rest.
func (c *chainWriter) establishedFrom() {
	accept := func(state uint32) {
		m := new(matcher)
		m.state(state)
		m.isCut(true)
		m.do(nfAccept, "")
		c.add(m, Counter{})
	}
	accept(stateEstablished)
	m := new(matcher)
	m.isCut(false)
	c.drop(m, filter.ByCut)
	if c.w.tally.hosts == 0 {
		c.elsewhere()
	}
	c.icmpErrors()
	accept(stateRelated)
	c.connections()
}

// icmpTypes matches types of ICMP messages of a family.
func (m *matcher) icmpTypes(f dataplane.Family, types []filter.PortRange, n names) {
	name, kind := "icmp", uint32(typeICMP)
	if f == dataplane.IPv6 {
		name, kind = "icmpv6", typeICMPv6
	}
	s := &set{spec: setSpec{keyType: kind, keyLen: 1, flags: unix.NFT_SET_CONSTANT}, elems: make(map[string]string)}
	for _, r := range types {
		for t := r.Low; t <= r.High; t++ {
			s.elems[string([]byte{byte(t)})] = elemNone //nolint:gosec // types have 8 bits
		}
	}
	m.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1, reg1)
	m.lookup(n.literal(name, s), false)
}

// icmpErrors has workloads' ICMP errors judged by whose connection they are about.
func (c *chainWriter) icmpErrors() {
	for _, f := range dataplane.Families() {
		protocol, types := icmpErrorTypes(f)
		s := icmpError{f}
		c.workloadRules(unix.NFT_META_IIFNAME, func(iface func(*matcher)) {
			m := new(matcher)
			m.protocol(protocol, false)
			m.icmpTypes(f, types, c)
			iface(m)
			m.do(unix.NFT_JUMP, s.name())
			c.jumps = append(c.jumps, s)
			c.add(m, Counter{})
		})
	}
}

// icmpError drops ICMP errors about connections that the workload which sends them takes
// no part in: it would set the path MTU between hosts, or end what others have open
// (RFC 5927).
type icmpError struct{ family dataplane.Family }

func (s icmpError) name() string  { return fmt.Sprintf("icmp-error-%d", s.family) }
func (icmpError) comment() string { return "" }

func (s icmpError) rules(c *chainWriter) {
	for _, direction := range []uint8{ctOriginal, ctReply} {
		m := new(matcher)
		m.meta(unix.NFT_META_IIFNAME, reg1)
		m.connectionSource(s.family, direction, reg2)
		m.lookup(sourcesSet(s.family), false)
		m.do(unix.NFT_RETURN, "")
		c.add(m, Counter{})
	}
	if c.w.tally.nets > 0 {
		c.vmap(unix.NFT_META_IIFNAME, errorsMap)
	}
	c.drop(new(matcher), filter.ByError)
}

// The directions of a connection (linux/netfilter/nf_conntrack_tuple_common.h), and the
// keys of its addresses in tables of both families (NFT_CT_SRC_IP and NFT_CT_SRC_IP6,
// Linux 4.17).
const (
	ctOriginal = 0
	ctReply    = 1
	ctSrcIP    = 19
	ctSrcIP6   = 21
)

// connectionSource loads the source of a connection's packets in a direction, behind all
// translations: who opened it, or who answers.
func (m *matcher) connectionSource(f dataplane.Family, direction uint8, reg uint32) {
	key := uint32(ctSrcIP)
	if f == dataplane.IPv6 {
		key = ctSrcIP6
	}
	m.expr("ct", func() {
		m.Net32(unix.NFTA_CT_KEY, key)
		m.Uint8(unix.NFTA_CT_DIRECTION, direction)
		m.Net32(unix.NFTA_CT_DREG, reg)
	})
}

// errorNets lets through errors about connections of one of several prefixes.
type errorNets struct{ sourceNets }

func (s errorNets) name() string { return "errors-" + hashName(s.text) }

func (s errorNets) rules(w *chainWriter) {
	for _, f := range dataplane.Families() {
		own := ofOne(s.nets, f)
		if len(own) == 0 {
			continue
		}
		set := netsSet(f, true)
		set.spec.flags |= unix.NFT_SET_CONSTANT
		for _, p := range own {
			set.putNet(p)
		}
		for _, direction := range []uint8{ctOriginal, ctReply} {
			m := new(matcher)
			m.family(f)
			m.connectionSource(f, direction, reg1)
			m.lookup(w.literal("nets", set), false)
			m.do(unix.NFT_RETURN, "")
			w.add(m, Counter{})
		}
	}
	w.drop(new(matcher), filter.ByError)
}
