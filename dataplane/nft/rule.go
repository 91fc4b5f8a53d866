package nft

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// names gives rules the kernel's sets for what they look up.
type names interface {
	// setOf returns the set that holds a filter set's members of a family.
	setOf(id filter.SetID, f dataplane.Family) (name string, kind filter.SetType)
	// literal returns the set of this content, which it makes if there is none.
	literal(prefix string, s *set) string
}

// portful lists the protocols that have ports where TCP has them.
var portful = []uint8{6, 17, 33, 132, 136} //nolint:gochecknoglobals // a constant

func hasPorts(p uint8) bool { return slices.Contains(portful, p) }

// alternatives returns the matchers of a filter rule: a packet that the rule
// matches is matched by exactly one of them. There is one per family where
// addresses are looked at, and more where a part is a disjunction that a rule
// of the kernel cannot say.
func alternatives(r *filter.Rule, n names) []*matcher {
	families := []dataplane.Family{r.Family}
	if r.Family == 0 && (looksAtAddresses(&r.Source) || looksAtAddresses(&r.Destination)) {
		families = dataplane.Families()
	}
	var all []*matcher
	for _, f := range families {
		if !ofFamily(&r.Source, f) || !ofFamily(&r.Destination, f) {
			continue
		}
		m := new(matcher)
		to := m.portFirst(r)
		m.head(r)
		all = append(all, sidesAlternatives([]*matcher{m}, r.Source, to, r.Protocol, f, n)...)
	}
	return all
}

// portFirst matches a rule's destination port if it is one number or range, and returns
// what else is asked of the destination. It comes before the protocol, which most rules of
// a policy have in common: what is not for the port ends after two expressions and not
// four. What has no ports fails at the protocol then, whatever was read in their place.
func (m *matcher) portFirst(r *filter.Rule) filter.Side {
	to := r.Destination
	if !hasPorts(r.Protocol) || to.PortSet != "" {
		return to
	}
	if own := joined(to.Ports); len(own) == 1 {
		m.port(destination, own[0], false)
		to.Ports = nil
	}
	return to
}

func looksAtAddresses(s *filter.Side) bool {
	return s.Nets != nil || s.NotNets != nil || s.Set != "" || s.NotSet != "" || s.PortSet != "" || s.NotPortSet != ""
}

// ofFamily reports whether a side can match packets of a family: a list of
// nets without one of the family matches none.
func ofFamily(s *filter.Side, f dataplane.Family) bool {
	has := func(p netip.Prefix) bool { return dataplane.FamilyOf(p.Addr()) == f }
	return (s.Nets == nil || slices.ContainsFunc(s.Nets, has)) && (s.NotNets == nil || slices.ContainsFunc(s.NotNets, has))
}

// head matches protocols and ICMP.
func (m *matcher) head(r *filter.Rule) {
	if r.Protocol != 0 {
		m.protocol(r.Protocol, false)
	}
	if r.NotProtocol != 0 {
		m.protocol(r.NotProtocol, true)
	}
	if r.ICMP.Set {
		m.icmp(r.ICMP, false)
	}
	if r.NotICMP.Set {
		m.icmp(r.NotICMP, true)
	}
}

func (m *matcher) icmp(f filter.ICMP, not bool) {
	want := []byte{f.Type}
	if f.CodeSet {
		want = append(want, f.Code)
	}
	m.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, uint32(len(want)), reg1) //nolint:gosec // 1 or 2
	m.cmp(eq(not), want)
}

// portless returns a side for a protocol without ports, which no member of a
// set of ports has; false: it matches nothing. (nft(8) 1.0.6 ends with an
// assertion when it lists a port beside such a protocol.)
func portless(s filter.Side, kind func(filter.SetID) filter.SetType) (filter.Side, bool) {
	if s.Set != "" && kind(s.Set) == filter.Ports || s.PortSet != "" && !inRanges(s.Ports, 0) {
		return s, false
	}
	if s.NotSet != "" && kind(s.NotSet) == filter.Ports {
		s.NotSet = ""
	}
	s.PortSet, s.NotPortSet = "", ""
	return s, true
}

// sidesAlternatives appends what both sides ask for to each of the matchers, and the
// family, unless that is 0: first ports, which are compared and of which a policy's rules
// have different ones, then what is looked up, for that takes ten times as long.
func sidesAlternatives(list []*matcher, from, to filter.Side, protocol uint8, f dataplane.Family, n names) []*matcher {
	sides := []*filter.Side{source: &from, destination: &to}
	if protocol != 0 && !hasPorts(protocol) {
		for _, s := range sides {
			without, ok := portless(*s, func(id filter.SetID) filter.SetType { _, kind := n.setOf(id, f); return kind })
			if !ok {
				return nil
			}
			*s = without
		}
	}
	family := func() {
		for _, m := range list {
			if f != 0 {
				m.family(f)
			}
		}
	}
	byAddress := from.PortSet != "" || to.PortSet != "" // where an address is depends on the family
	if byAddress {
		family()
	}
	for e, s := range sides {
		list = withoutPorts(list, s, end(e), protocol, n)
		list = withPorts(list, s, end(e), protocol, f, n)
	}
	if !byAddress {
		family()
	}
	for e, s := range sides {
		for _, m := range list {
			m.addresses(s, end(e), f, n)
		}
	}
	return list
}

// addresses matches the prefixes and sets that a side names, apart from one of ports
// that may be there instead of a number.
func (m *matcher) addresses(s *filter.Side, e end, f dataplane.Family, n names) {
	m.nets(e, s.Nets, false, f, n)
	m.nets(e, s.NotNets, true, f, n)
	if s.Set != "" {
		m.member(e, s.Set, false, f, n)
	}
	if s.NotSet != "" {
		m.member(e, s.NotSet, true, f, n)
	}
	if s.NotPortSet != "" {
		m.member(e, s.NotPortSet, true, f, n)
	}
}

func inRanges(ranges []filter.PortRange, port uint16) bool {
	return slices.ContainsFunc(ranges, func(r filter.PortRange) bool { return r.Low <= port && port <= r.High })
}

// withoutPorts keeps out the ports in s.NotPorts. What has no ports has port 0
// (see [filter.Packet]).
func withoutPorts(list []*matcher, s *filter.Side, e end, protocol uint8, n names) []*matcher {
	switch {
	case len(s.NotPorts) == 0:
		return list
	case protocol != 0 && !hasPorts(protocol):
		if inRanges(s.NotPorts, 0) {
			return nil
		}
		return list
	}
	var out []*matcher
	for _, m := range list {
		if protocol == 0 {
			if !inRanges(s.NotPorts, 0) {
				other := m.clone()
				other.portfulOnly(true, n)
				out = append(out, other)
			}
			m.portfulOnly(false, n)
		}
		m.ranges(e, s.NotPorts, true, n)
		out = append(out, m)
	}
	return out
}

// withPorts asks for one of s.Ports or a member of s.PortSet.
func withPorts(list []*matcher, s *filter.Side, e end, protocol uint8, f dataplane.Family, n names) []*matcher {
	if s.Ports == nil && s.PortSet == "" {
		return list
	}
	known := protocol != 0 && !hasPorts(protocol)
	if known && inRanges(s.Ports, 0) {
		return list
	}
	var out []*matcher
	for _, m := range list {
		byNumber := len(s.Ports) > 0 && !known
		if s.PortSet != "" {
			set := m
			if byNumber {
				set = m.clone()
			}
			set.member(e, s.PortSet, false, f, n)
			// A packet that both would match is counted once. Members have ports, so
			// the others need not be looked at.
			if byNumber {
				set.ranges(e, s.Ports, true, n)
			}
			out = append(out, set)
		}
		if byNumber {
			if protocol == 0 {
				if inRanges(s.Ports, 0) {
					other := m.clone()
					other.portfulOnly(true, n)
					out = append(out, other)
				}
				m.portfulOnly(false, n)
			}
			m.ranges(e, s.Ports, false, n)
			out = append(out, m)
		}
	}
	return out
}

func (m *matcher) portfulOnly(not bool, n names) {
	s := &set{spec: setSpec{keyType: typeProto, keyLen: 1, flags: unix.NFT_SET_CONSTANT}, elems: make(map[string]string)}
	for _, p := range portful {
		s.elems[string([]byte{p})] = elemNone
	}
	m.meta(unix.NFT_META_L4PROTO, reg1)
	m.lookup(n.literal("protocols", s), not)
}

// nets matches an address in one of some prefixes, or in none; nil: any address.
func (m *matcher) nets(e end, nets []netip.Prefix, not bool, f dataplane.Family, n names) {
	if nets == nil {
		return
	}
	own := ofOne(nets, f)
	if len(own) == 1 {
		m.net(e, own[0], not)
		return
	}
	s := netsSet(f, true)
	s.spec.flags |= unix.NFT_SET_CONSTANT
	for _, p := range own {
		s.putNet(p)
	}
	m.loadAddr(f, e, reg1)
	m.lookup(n.literal("nets", s), not)
}

// ofOne returns those prefixes of a family that are not within others.
func ofOne(nets []netip.Prefix, f dataplane.Family) []netip.Prefix {
	return disjoint(slices.DeleteFunc(slices.Clone(nets), func(p netip.Prefix) bool { return dataplane.FamilyOf(p.Addr()) != f }))
}

// disjoint sorts prefixes and leaves out what lies within others.
func disjoint(nets []netip.Prefix) []netip.Prefix {
	slices.SortFunc(nets, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := nets[:0]
	for _, p := range nets {
		if len(out) == 0 || !out[len(out)-1].Overlaps(p) {
			out = append(out, p)
		}
	}
	return out
}

func (m *matcher) ranges(e end, ranges []filter.PortRange, not bool, n names) {
	own := joined(ranges)
	if len(own) == 1 {
		m.port(e, own[0], not)
		return
	}
	s := &set{spec: setSpec{keyType: typeService, keyLen: 2, flags: unix.NFT_SET_INTERVAL | unix.NFT_SET_CONSTANT}, elems: make(map[string]string)}
	for _, r := range own {
		s.putInterval(string(binary.BigEndian.AppendUint16(nil, r.Low)), string(binary.BigEndian.AppendUint16(nil, r.High)))
	}
	m.loadPort(e, reg1)
	m.lookup(n.literal("ports", s), not)
}

// joined sorts ranges and makes one of those that touch.
func joined(ranges []filter.PortRange) []filter.PortRange {
	sorted := slices.SortedFunc(slices.Values(ranges), func(a, b filter.PortRange) int { return cmp.Compare(a.Low, b.Low) })
	var out []filter.PortRange
	for _, r := range sorted {
		if last := len(out) - 1; last >= 0 && uint32(r.Low) <= uint32(out[last].High)+1 {
			out[last].High = max(out[last].High, r.High)
			continue
		}
		out = append(out, r)
	}
	return out
}

// member matches the members of a set, or what is none of them.
func (m *matcher) member(e end, id filter.SetID, not bool, f dataplane.Family, n names) {
	name, kind := n.setOf(id, f)
	m.loadAddr(f, e, reg1)
	if kind == filter.Ports {
		length := uint32(f.Bits() / 8) //nolint:gosec // 4 or 16
		m.meta(unix.NFT_META_L4PROTO, regAfter(length))
		m.loadPort(e, regAfter(length+4))
	}
	m.lookup(name, not)
}

// netsSet returns an empty set of addresses, or of prefixes.
func netsSet(f dataplane.Family, intervals bool) *set {
	s := &set{spec: setSpec{keyType: typeIPv4, keyLen: 4}, elems: make(map[string]string)}
	if f == dataplane.IPv6 {
		s.spec = setSpec{keyType: typeIPv6, keyLen: 16}
	}
	if intervals {
		s.spec.flags = unix.NFT_SET_INTERVAL
	}
	return s
}

// portsSet returns an empty set of address, protocol and port.
func portsSet(f dataplane.Family) *set {
	s := netsSet(f, false)
	s.spec.keyType = concat(s.spec.keyType, typeProto, typeService)
	s.spec.keyLen += 8
	return s
}

// putInterval adds what is from low to high, both included.
func (s *set) putInterval(low, high string) {
	for _, key := range interval(low, high) {
		s.elems[key] = elemNone
	}
}

func (s *set) putNet(p netip.Prefix) {
	for _, key := range netKeys(p) {
		s.elems[key] = elemNone
	}
}

// What is behind the key of an element of an interval. Where one ends and the
// next starts, the end is sorted first: so the kernel wants them added.
const (
	endOf   = "\x00"
	startOf = "\x01"
)

// interval returns the elements of an interval: where it starts, and unless it
// goes to the highest value the first that is not in it.
func interval(low, high string) []string {
	next := []byte(high)
	for i := len(next) - 1; i >= 0; i-- {
		next[i]++
		if next[i] != 0 {
			return []string{low + startOf, string(next) + endOf}
		}
	}
	return []string{low + startOf}
}

func netKeys(p netip.Prefix) []string {
	low := p.Masked().Addr().AsSlice()
	high := slices.Clone(low)
	for i := p.Bits(); i < len(high)*8; i++ {
		high[i/8] |= 0x80 >> (i % 8)
	}
	return interval(string(low), string(high))
}

// memberKeys returns the elements of a member in a set of the kernel.
func memberKeys(m filter.Member, kind filter.SetType, intervals bool) []string {
	switch {
	case kind == filter.Ports:
		key := append(m.Prefix.Addr().AsSlice(), m.Protocol, 0, 0, 0)
		key = binary.BigEndian.AppendUint16(key, m.Port)
		return []string{string(append(key, 0, 0))}
	case intervals:
		return netKeys(m.Prefix)
	}
	return []string{string(m.Prefix.Addr().AsSlice())}
}

// literalName names a set by its content.
func literalName(prefix string, s *set) string {
	keys := make([]string, 0, len(s.elems))
	for k := range s.elems {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	var b strings.Builder
	b.WriteString(string([]byte{byte(s.spec.keyType), byte(s.spec.keyLen)})) //nolint:gosec // small numbers
	for _, k := range keys {
		b.WriteString(k)
	}
	return prefix + "-" + hashName(b.String())
}
