package nft

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// baseSource is a chain that the kernel calls, or one that those share.
type baseSource struct {
	id   string
	hook hook
}

func (s baseSource) name() string    { return s.id }
func (s baseSource) comment() string { return "" }

// The base chains. Two at one hook, of which the first judges by the interface
// that a packet comes from and the second by the one that it goes to: accept
// in a base chain ends that one only.
const (
	rawIn       = "raw-in"
	rawOut      = "raw-out"
	preDNATIn   = "pre-dnat-in"
	dnatIn      = "dnat-in"
	dnatOut     = "dnat-out"
	inputFrom   = "input-from"
	inputTo     = "input-to"
	forwardFrom = "forward-from"
	forwardTo   = "forward-to"
	outputTo    = "output-to"
	virtualTo   = "virtual-to"
	snatOut     = "snat-out"
	limitIn     = "limit-in"
	limitOut    = "limit-out"
	dscpForward = "dscp-forward"
	dscpOutput  = "dscp-output"
)

// The priorities (linux/netfilter_ipv4.h): raw and mangle where they always
// are; the rest just before those of others, so that what is denied here costs
// nobody else anything and translations here come first.
const (
	prioRaw    = -300
	prioMangle = -150
	prioLimit  = -140
	prioDNAT   = -105
	prioFrom   = -6
	prioTo     = -5
	prioSNAT   = 95
)

// bases lists the base chains that are needed: each costs every packet, and one for
// translations every connection.
func (w *desired) bases() []baseSource {
	list := []baseSource{
		{rawIn, hook{"filter", unix.NF_INET_PRE_ROUTING, prioRaw}},
		{inputFrom, hook{"filter", unix.NF_INET_LOCAL_IN, prioFrom}},
		{forwardFrom, hook{"filter", unix.NF_INET_FORWARD, prioFrom}},
		{forwardTo, hook{"filter", unix.NF_INET_FORWARD, prioTo}},
	}
	add := func(wanted bool, s ...baseSource) {
		if wanted {
			list = append(list, s...)
		}
	}
	add(w.settings.WorkloadToHost == filter.HostDrop, baseSource{inputTo, hook{"filter", unix.NF_INET_LOCAL_IN, prioTo}})
	add(w.tally.hosts > 0, baseSource{outputTo, hook{"filter", unix.NF_INET_LOCAL_OUT, prioTo}})
	add(w.settings.Virtual, baseSource{virtualTo, hook{"filter", unix.NF_INET_LOCAL_OUT, prioTo}})
	add(w.tally.untracked > 0, baseSource{rawOut, hook{"filter", unix.NF_INET_LOCAL_OUT, prioRaw}})
	add(w.tally.preDNAT > 0, baseSource{preDNATIn, hook{"filter", unix.NF_INET_PRE_ROUTING, prioMangle}})
	add(w.tally.floating > 0, baseSource{dnatIn, hook{"nat", unix.NF_INET_PRE_ROUTING, prioDNAT}},
		baseSource{dnatOut, hook{"nat", unix.NF_INET_LOCAL_OUT, prioDNAT}})
	add(w.tally.limited > 0, baseSource{limitIn, hook{"filter", unix.NF_INET_PRE_ROUTING, prioLimit}},
		baseSource{limitOut, hook{"filter", unix.NF_INET_POST_ROUTING, prioLimit}})
	add(w.tally.dscp > 0, baseSource{dscpForward, hook{"filter", unix.NF_INET_FORWARD, prioMangle}},
		baseSource{dscpOutput, hook{"filter", unix.NF_INET_LOCAL_OUT, prioTo}})
	add(w.tally.floating > 0 || w.translates(), baseSource{snatOut, hook{"nat", unix.NF_INET_POST_ROUTING, prioSNAT}})
	return list
}

// translates reports whether something leaves the cluster with another source.
func (w *desired) translates() bool {
	return w.members[filter.NATSources] != nil && w.members[filter.NATExempt] != nil
}

// putBases makes the base chains those that are needed, and writes them anew.
func (w *desired) putBases() {
	wanted := make(map[string]bool)
	for _, s := range w.bases() {
		wanted[s.id] = true
		if w.nodes[s.id] == nil {
			w.acquire(s)
		}
	}
	for _, id := range []string{inputTo, outputTo, virtualTo, rawOut, preDNATIn, dnatIn, dnatOut, snatOut, limitIn, limitOut, dscpForward, dscpOutput} {
		if n := w.nodes[id]; n != nil && !wanted[id] {
			w.release(n.source)
		}
	}
	w.markBases()
}

func (w *desired) markBases() {
	for _, s := range w.bases() {
		w.stale[s.id] = struct{}{}
	}
}

func (s baseSource) rules(c *chainWriter) {
	switch s.id {
	case rawIn:
		c.rawIn()
	case rawOut:
		c.unmark()
		c.workloads(unix.NFT_META_OIFNAME, nfAccept, "")
		c.discovery(false)
		c.host(unix.NFT_META_OIFNAME, untrackedOutMap)
	case preDNATIn:
		c.established()
		c.marked()
		c.workloads(unix.NFT_META_IIFNAME, nfAccept, "")
		c.discovery(false)
		c.host(unix.NFT_META_IIFNAME, preDNATMap)
	case dnatIn, dnatOut:
		c.floatingIn()
	case inputFrom:
		c.inputFrom()
	case inputTo:
		c.uncut()
		c.discovery(true)
		c.workloads(unix.NFT_META_IIFNAME, nfDrop, filter.ByToHost)
	case forwardFrom:
		c.establishedFrom()
		c.workloadVmap(unix.NFT_META_IIFNAME, fromMap)
		c.workloads(unix.NFT_META_IIFNAME, nfDrop, filter.ByNoEndpoint)
		c.marked()
		c.host(unix.NFT_META_IIFNAME, forwardInMap)
	case forwardTo:
		c.uncut()
		c.workloadVmap(unix.NFT_META_OIFNAME, toMap)
		c.workloads(unix.NFT_META_OIFNAME, nfDrop, filter.ByNoEndpoint)
		c.host(unix.NFT_META_OIFNAME, forwardOutMap)
	case outputTo:
		c.established()
		c.marked()
		c.workloads(unix.NFT_META_OIFNAME, nfAccept, "")
		c.discovery(false)
		c.host(unix.NFT_META_OIFNAME, hostOutMap)
	case virtualTo:
		c.virtualTo()
	case snatOut:
		c.snatOut()
	case limitIn:
		c.workloadVmap(unix.NFT_META_IIFNAME, limitFromMap)
	case dscpForward:
		c.workloadVmap(unix.NFT_META_IIFNAME, dscpFromMap)
	case dscpOutput:
		c.dscpOut()
	case limitOut:
		c.workloadVmap(unix.NFT_META_OIFNAME, limitToMap)
	}
}

// virtualTo judges what IPVS passes on to a workload: it takes a packet at local input and sends it
// from local output, with the source that it came with. What the host sends itself is let be.
func (c *chainWriter) virtualTo() {
	m := new(matcher)
	m.expr("fib", func() {
		m.Net32(unix.NFTA_FIB_DREG, reg1)
		m.Net32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
		m.Net32(unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_F_SADDR)
	})
	m.cmp(unix.NFT_CMP_EQ, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL))
	m.do(nfAccept, "")
	c.add(m, Counter{})
	c.uncut()
	c.workloadVmap(unix.NFT_META_OIFNAME, toMap)
	c.workloads(unix.NFT_META_OIFNAME, nfDrop, filter.ByNoEndpoint)
}

// rawIn lets workloads send from their own addresses only. Every packet that comes in
// passes it: one of somebody else's ends at the first rule, and one with a workload's own
// source at the next.
func (c *chainWriter) rawIn() {
	c.unmark()
	workload := func(rule func(name func(*matcher))) { c.eachWorkload(unix.NFT_META_IIFNAME, rule) }
	if c.w.tally.untracked == 0 {
		c.elsewhere()
		workload = func(rule func(name func(*matcher))) { rule(func(m *matcher) { m.meta(unix.NFT_META_IIFNAME, reg1) }) }
	}
	for _, own := range loopbacks() {
		f := dataplane.FamilyOf(own.Addr())
		workload(func(name func(*matcher)) {
			m := new(matcher)
			m.family(f)
			m.net(destination, own, true)
			name(m)
			m.loadAddr(f, source, reg2)
			m.lookup(sourcesSet(f), false)
			m.do(nfAccept, "")
			c.add(m, Counter{})
		})
	}
	c.loopback()
	c.solicitations()
	c.linkLocalDiscovery()
	if c.w.tally.nets > 0 {
		c.workloadVmap(unix.NFT_META_IIFNAME, netsMap)
	}
	c.workloads(unix.NFT_META_IIFNAME, nfDrop, filter.BySpoofing)
	if c.w.tally.untracked > 0 {
		c.discovery(false)
		c.host(unix.NFT_META_IIFNAME, untrackedInMap)
	}
}

// elsewhere accepts what comes by an interface that is no workload's.
func (c *chainWriter) elsewhere() {
	m := new(matcher)
	for _, p := range c.w.settings.WorkloadPrefixes {
		m.iface(unix.NFT_META_IIFNAME, p, true, true)
	}
	if c.w.tally.odd > 0 {
		m.meta(unix.NFT_META_IIFNAME, reg1)
		m.lookup(otherSet, true)
	}
	m.do(nfAccept, "")
	c.add(m, Counter{})
}

func (c *chainWriter) inputFrom() {
	c.outside()
	c.establishedFrom()
	c.discovery(true)
	for _, t := range c.w.settings.Guarded {
		c.fromWorkloads(filter.ByGuard, func(m *matcher) { m.tunnel(t) })
	}
	c.workloadVmap(unix.NFT_META_IIFNAME, fromMap)
	c.workloads(unix.NFT_META_IIFNAME, nfDrop, filter.ByNoEndpoint)
	if c.w.tally.hosts == 0 {
		return
	}
	c.marked()
	c.discovery(false)
	c.host(unix.NFT_META_IIFNAME, hostInMap)
}

// loopbacks are the host's addresses that none but itself reaches.
func loopbacks() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
}

// loopback keeps workloads from what the host's programs serve to the host alone: with
// route_localnet, which proxies of services set, the kernel takes packets for 127.0.0.0/8
// from any interface. It comes before the translations of destinations, whose own ones
// may lead there.
func (c *chainWriter) loopback() {
	for _, own := range loopbacks() {
		c.fromWorkloads(filter.ByLoopback, func(m *matcher) {
			m.family(dataplane.FamilyOf(own.Addr()))
			m.net(destination, own, false)
		})
	}
}

// fromWorkloads drops what comes from any workload's interface and what more a
// condition asks for.
func (c *chainWriter) fromWorkloads(why filter.Reason, condition func(*matcher)) {
	c.workloadRules(unix.NFT_META_IIFNAME, func(iface func(*matcher)) {
		m := new(matcher)
		condition(m) // first: few packets go on
		iface(m)
		c.drop(m, why)
	})
}

// snatOut translates what leaves the cluster.
func (c *chainWriter) snatOut() {
	if c.w.tally.floating > 0 {
		c.floatingOut()
	}
	if !c.w.translates() {
		return
	}
	nat := c.w.settings.NAT
	for _, f := range dataplane.Families() {
		side := filter.Side{Set: filter.NATSources}
		exempt := filter.Side{NotSet: filter.NATExempt}
		for _, m := range sidesAlternatives([]*matcher{new(matcher)}, side, exempt, 0, f, c) {
			if name, prefix := strings.CutSuffix(nat.OutInterface, "+"); name != "" {
				m.iface(unix.NFT_META_OIFNAME, name, prefix, false)
			}
			if nat.PortLow != 0 {
				for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
					one := m.clone()
					one.protocol(p, false)
					one.counter()
					one.translate(nat, f, true)
					c.add(one, Counter{Direction: filter.Egress, Rule: filter.NoRule, Reason: ByNAT})
				}
			}
			m.counter()
			m.translate(nat, f, false)
			c.add(m, Counter{Direction: filter.Egress, Rule: filter.NoRule, Reason: ByNAT})
		}
	}
}

// ByNAT is the reason for what leaves with another source address.
const ByNAT filter.Reason = "translated on its way out"

// translate gives the packet another source.
func (m *matcher) translate(nat filter.NAT, f dataplane.Family, ports bool) {
	flags := uint32(0)
	if !nat.KeepPorts {
		flags |= unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
	}
	snat := nat.Address.IsValid() && dataplane.FamilyOf(nat.Address) == f
	const low, high = unix.NFT_REG_2, unix.NFT_REG_3
	if ports {
		m.immediate(low, binary.BigEndian.AppendUint16(nil, nat.PortLow))
		m.immediate(high, binary.BigEndian.AppendUint16(nil, nat.PortHigh))
		flags |= unix.NF_NAT_RANGE_PROTO_SPECIFIED
	}
	if !snat {
		m.expr("masq", func() {
			m.Net32(unix.NFTA_MASQ_FLAGS, flags)
			if ports {
				m.Net32(unix.NFTA_MASQ_REG_PROTO_MIN, low)
				m.Net32(unix.NFTA_MASQ_REG_PROTO_MAX, high)
			}
		})
		return
	}
	m.immediate(reg1, nat.Address.AsSlice())
	m.expr("nat", func() {
		m.Net32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		m.Net32(unix.NFTA_NAT_FAMILY, uint32(nfproto(f)))
		m.Net32(unix.NFTA_NAT_REG_ADDR_MIN, reg1)
		if ports {
			m.Net32(unix.NFTA_NAT_REG_PROTO_MIN, low)
			m.Net32(unix.NFTA_NAT_REG_PROTO_MAX, high)
		}
		m.Net32(unix.NFTA_NAT_FLAGS, flags|unix.NF_NAT_RANGE_MAP_IPS)
	})
}

// mapped translates the source or the destination to what a map has for the
// key in the first register.
func (m *matcher) mapped(set string, kind uint32, f dataplane.Family) {
	m.expr("lookup", func() {
		m.Text(unix.NFTA_LOOKUP_SET, set)
		m.Net32(unix.NFTA_LOOKUP_SREG, reg1)
		m.Net32(unix.NFTA_LOOKUP_DREG, reg1)
	})
	m.expr("nat", func() {
		m.Net32(unix.NFTA_NAT_TYPE, kind)
		m.Net32(unix.NFTA_NAT_FAMILY, uint32(nfproto(f)))
		m.Net32(unix.NFTA_NAT_REG_ADDR_MIN, reg1)
	})
}

func (c *chainWriter) floatingIn() {
	for _, f := range dataplane.Families() {
		m := new(matcher)
		m.family(f)
		m.loadAddr(f, destination, reg1)
		m.mapped(externalMap(f), unix.NFT_NAT_DNAT, f)
		c.add(m, Counter{})
	}
}

// floatingOut gives workloads their floating addresses outside the pools, and
// where one speaks to itself by it.
func (c *chainWriter) floatingOut() {
	for _, f := range dataplane.Families() {
		m := new(matcher)
		m.family(f)
		m.loadAddr(f, source, reg1)
		m.loadAddr(f, destination, regAfter(uint32(f.Bits()/8))) //nolint:gosec // 4 or 16
		m.mapped(hairpinMap(f), unix.NFT_NAT_SNAT, f)
		c.add(m, Counter{})
		m = new(matcher)
		m.family(f)
		if c.w.members[filter.NATExempt] != nil {
			m.member(destination, filter.NATExempt, true, f, c)
		}
		m.loadAddr(f, source, reg1)
		m.mapped(internalMap(f), unix.NFT_NAT_SNAT, f)
		c.add(m, Counter{})
	}
}

// Parts that base chains share.

// established accepts what belongs to an allowed connection, unless that was
// cut since. Nearly every packet ends at the first rule.
func (c *chainWriter) established() {
	m := new(matcher)
	m.state(stateEstablished | stateRelated)
	m.isCut(true)
	m.do(nfAccept, "")
	c.add(m, Counter{})
	m = new(matcher)
	m.isCut(false)
	c.drop(m, filter.ByCut)
}

// uncut accepts what belongs to an allowed connection, behind a chain at the same
// hook which has dropped what was cut.
func (c *chainWriter) uncut() {
	m := new(matcher)
	m.state(stateEstablished | stateRelated)
	m.do(nfAccept, "")
	c.add(m, Counter{})
}

// early reports whether some policies come before connection tracking or
// destination NAT. What they allow is marked. (That a packet is untracked says
// nothing: neighbour discovery is too, and so is what others exempt.)
func (c *chainWriter) early() bool { return c.w.tally.preDNAT+c.w.tally.untracked > 0 }

// unmark keeps a mark that somebody else gave from meaning anything.
func (c *chainWriter) unmark() {
	if !c.early() {
		return
	}
	m := new(matcher)
	m.mark(c.w.cfg.Mark)
	m.setMark(c.w.cfg.Mark, false)
	c.add(m, Counter{})
}

// marked lets pass what was allowed before connection tracking or before
// destination NAT.
func (c *chainWriter) marked() {
	if !c.early() {
		return
	}
	m := new(matcher)
	m.mark(c.w.cfg.Mark)
	m.do(nfAccept, "")
	c.add(m, Counter{})
}

func (c *chainWriter) vmap(key uint32, set string) {
	m := new(matcher)
	m.meta(key, reg1)
	m.lookupVerdict(set)
	c.add(m, Counter{})
}

// eachWorkload calls rule once for each of the workloads' prefixes, and once more
// where workloads have interfaces without one. What it gets loads the interface's
// name into the first register, and matches the prefix: comparing some bytes keeps
// what comes from elsewhere from a lookup.
func (c *chainWriter) eachWorkload(key uint32, rule func(name func(*matcher))) {
	for _, p := range c.w.settings.WorkloadPrefixes {
		rule(func(m *matcher) { m.iface(key, p, true, false) })
	}
	if c.w.tally.odd > 0 {
		rule(func(m *matcher) { m.meta(key, reg1) })
	}
}

// workloadVmap does what a map has for a workload's interface.
func (c *chainWriter) workloadVmap(key uint32, set string) {
	c.eachWorkload(key, func(name func(*matcher)) {
		m := new(matcher)
		name(m)
		m.lookupVerdict(set)
		c.add(m, Counter{})
	})
}

// workloadRules calls rule once for each of the workloads' prefixes, and once more
// where workloads have interfaces without one, which what it gets matches.
func (c *chainWriter) workloadRules(key uint32, rule func(iface func(*matcher))) {
	for _, p := range c.w.settings.WorkloadPrefixes {
		rule(func(m *matcher) { m.iface(key, p, true, false) })
	}
	if c.w.tally.odd > 0 {
		rule(func(m *matcher) {
			m.meta(key, reg1)
			m.lookup(otherSet, false)
		})
	}
}

func (c *chainWriter) drop(m *matcher, why filter.Reason) {
	m.counter()
	m.do(nfDrop, "")
	c.add(m, Counter{Rule: filter.NoRule, Action: filter.Deny, Reason: why})
}

// workloads ends the way of packets of all workloads' interfaces.
func (c *chainWriter) workloads(key uint32, verdict int32, why filter.Reason) {
	c.workloadRules(key, func(iface func(*matcher)) {
		m := new(matcher)
		iface(m)
		if verdict == nfDrop {
			c.drop(m, why)
			return
		}
		m.do(verdict, "")
		c.add(m, Counter{})
	})
}

// host judges by the host endpoints.
func (c *chainWriter) host(key uint32, set string) {
	if c.w.tally.hosts == 0 {
		return
	}
	c.vmap(key, set)
	anyone := c.w.endpoints[filter.AnyInterface]
	if anyone == nil {
		return
	}
	for _, hp := range hostPaths(&anyone.Endpoint) {
		if hp.set != set || hp.idle() {
			continue
		}
		m := new(matcher)
		m.iface(key, "lo", false, true)
		m.do(unix.NFT_GOTO, hp.name())
		c.jumps = append(c.jumps, hp.pathSource)
		c.add(m, Counter{})
	}
}

// discovery lets pass what IPv6 needs between the host and its links.
func (c *chainWriter) discovery(workload bool) {
	m := new(matcher)
	m.protocol(unix.IPPROTO_ICMPV6, false)
	m.icmpTypes(dataplane.IPv6, filter.Discovery(workload), c)
	m.do(nfAccept, "")
	c.add(m, Counter{})
}

// linkLocalDiscovery is discovery before it is known whether a packet is for
// the host: addresses that are never forwarded (RFC 4291, sections 2.5.2 and
// 2.5.6).
func (c *chainWriter) linkLocalDiscovery() {
	m := new(matcher)
	m.family(dataplane.IPv6)
	m.protocol(unix.IPPROTO_ICMPV6, false)
	m.icmpTypes(dataplane.IPv6, filter.Discovery(true), c)
	local := []netip.Prefix{netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("::/128")}
	m.nets(source, local, false, dataplane.IPv6, c)
	m.do(nfAccept, "")
	c.add(m, Counter{})
}

// failsafeSource lets pass what keeps an operator from locking himself out.
type failsafeSource struct {
	dir filter.Direction
	raw bool // before connection tracking, where answers are to be told by their source
}

func (s failsafeSource) name() string {
	name := "failsafe-" + s.dir.String()
	if s.raw {
		name += "-raw"
	}
	return name
}

func (failsafeSource) comment() string { return "" }

// markFailsafes has the failsafe chains written anew, those that there are.
func (w *desired) markFailsafes() {
	for _, d := range []filter.Direction{filter.Ingress, filter.Egress} {
		for _, raw := range []bool{false, true} {
			w.stale[failsafeSource{d, raw}.name()] = struct{}{}
		}
	}
}

func (s failsafeSource) rules(c *chainWriter) {
	here, there := c.w.settings.FailsafeIn, c.w.settings.FailsafeOut
	far := source
	if s.dir == filter.Egress {
		here, there, far = there, here, destination
	}
	add := func(list []filter.Failsafe, port end) {
		for _, f := range list {
			m := new(matcher)
			if f.Net.IsValid() {
				m.family(dataplane.FamilyOf(f.Net.Addr()))
				m.net(far, f.Net, false)
			}
			m.port(port, filter.PortRange{Low: f.Port, High: f.Port}, false)
			m.protocol(f.Protocol, false)
			m.counter()
			m.do(nfAccept, "")
			c.add(m, Counter{Direction: s.dir, Rule: filter.NoRule, Action: filter.Allow, Reason: filter.ByFailsafe})
		}
	}
	add(here, destination)
	if s.raw {
		add(there, source)
	}
	s.betweenHosts(c, far)
}

// betweenHosts lets pass what hosts of the cluster send each other.
func (s failsafeSource) betweenHosts(c *chainWriter, far end) {
	if c.w.members[filter.TunnelSources] == nil {
		return
	}
	add := func(t filter.Tunnel, port end) {
		for _, f := range dataplane.Families() {
			m := new(matcher)
			m.family(f)
			m.protocol(t.Protocol, false)
			if t.Port != 0 {
				m.port(port, filter.PortRange{Low: t.Port, High: t.Port}, false)
			}
			m.member(far, filter.TunnelSources, false, f, c)
			m.counter()
			m.do(nfAccept, "")
			c.add(m, Counter{Direction: s.dir, Rule: filter.NoRule, Action: filter.Allow, Reason: filter.ByHosts})
		}
	}
	for _, t := range c.w.settings.HostTraffic {
		add(t, destination)
		if s.raw && t.Port != 0 {
			add(t, source)
		}
	}
}
