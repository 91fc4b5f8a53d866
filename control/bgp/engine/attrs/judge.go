package attrs

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// The attributes that are known here.
const (
	origin           = 1
	asPath           = 2
	nextHop          = 3
	med              = 4
	localPref        = 5
	atomicAggregate  = 6
	aggregator       = 7
	communities      = 8
	originatorID     = 9
	clusterList      = 10
	extended         = 16
	as4Path          = 17
	as4Aggregator    = 18
	extended6        = 25
	largeCommunities = 32
	onlyToCustomer   = 35
)

// The flags of an attribute (RFC 4271 section 4.3).
const (
	optional       = 0x80
	transitive     = 0x40
	partial        = 0x20
	extendedLength = 0x10
	unusedFlags    = 0x0f // ignored when received, and 0 when sent
)

const asTrans = 23456 // RFC 6793

// rule is what the RFCs say of an attribute.
type rule struct {
	flags     uint8   // those of Optional and Transitive
	size      int     // of the value; -1: see unit
	unit      int     // the size is a multiple of it and not 0; 0: any size
	malformed Verdict // what a wrong size or value leads to; wrong flags lead to Withdraw
	internal  bool    // discarded when it comes from another AS
	subcode   uint8   // of the NOTIFICATION, where a wrong value ends the session
}

// ruleOf returns the rule of a type (RFC 7606 section 7 where no other is named).
func ruleOf(t uint8, c Context) (r rule, known bool) {
	const wellKnown, both = transitive, optional | transitive
	switch t {
	case origin:
		return rule{flags: wellKnown, size: 1, malformed: Withdraw, subcode: wire.UpdateInvalidOrigin}, true
	case asPath:
		return rule{flags: wellKnown, size: -1, malformed: Withdraw, subcode: wire.UpdateMalformedASPath}, true
	case nextHop:
		return rule{flags: wellKnown, size: 4, malformed: Withdraw, subcode: wire.UpdateInvalidNextHop}, true
	case med:
		return rule{flags: optional, size: 4, malformed: Withdraw}, true
	case localPref:
		return rule{flags: wellKnown, size: 4, malformed: Withdraw, internal: true}, true
	case atomicAggregate:
		return rule{flags: wellKnown, size: 0, malformed: Discard}, true
	case aggregator:
		size := 6
		if c.AS4 {
			size = 8
		}
		return rule{flags: both, size: size, malformed: Discard}, true
	case communities: // RFC 1997
		return rule{flags: both, size: -1, unit: 4, malformed: Withdraw}, true
	case originatorID: // RFC 4456
		return rule{flags: optional, size: 4, malformed: Withdraw, internal: true}, true
	case clusterList:
		return rule{flags: optional, size: -1, unit: 4, malformed: Withdraw, internal: true}, true
	case extended: // RFC 4360; a type of community that is not known is no fault
		return rule{flags: both, size: -1, unit: 8, malformed: Withdraw}, true
	case as4Path: // RFC 6793 section 6
		return rule{flags: both, size: -1, malformed: Discard}, true
	case as4Aggregator:
		return rule{flags: both, size: 8, malformed: Discard}, true
	case extended6: // RFC 5701
		return rule{flags: both, size: -1, unit: 20, malformed: Withdraw}, true
	case largeCommunities: // RFC 8092 section 6
		return rule{flags: both, size: -1, unit: 12, malformed: Withdraw}, true
	case onlyToCustomer: // RFC 9234 section 5
		return rule{flags: both, size: 4, malformed: Withdraw}, true
	}
	return rule{}, false
}

func (r rule) fits(n int) bool {
	if r.size >= 0 {
		return n == r.size
	}
	return r.unit == 0 || n > 0 && n%r.unit == 0
}

// judgement judges one set and makes its canonical form: AS numbers of four
// octets, without NEXT_HOP and without what is discarded.
type judgement struct {
	Result
	context  Context
	hop      []byte
	out      []byte
	sum      Summary
	seen     [256]bool
	notified *wire.Error // what a Reset says

	path       []packet.AsPathParamInterface
	path4      []packet.AsPathParamInterface
	pathFlags  uint8
	pathAt     int // in out
	aggregator uint32
	replaced   []byte // value of AS4_AGGREGATOR
}

// judge reads a set. hop is the next hop of MP_REACH_NLRI, or of a NEXT_HOP without
// fault; empty: it has to be among the attributes.
func judge(c Context, attrs, hop []byte) *judgement {
	j := &judgement{context: c, hop: hop, pathAt: -1}
	for list := attrs; len(list) > 0; {
		flags, t, value, rest, ok := wire.Attribute(list)
		if !ok {
			var typ uint8
			if len(list) > 1 {
				typ = list[1]
			}
			j.fault(Withdraw, typ, Truncated, wire.UpdateMalformedAttributes, nil)
			break
		}
		j.attribute(flags, t, value, list[:len(list)-len(rest)])
		list = rest
	}
	for _, t := range []uint8{origin, asPath, nextHop} {
		if c.Reachable && !j.seen[t] && (t != nextHop || len(hop) == 0) {
			j.fault(Withdraw, t, Missing, wire.UpdateMissingWellKnown, []byte{t})
		}
	}
	if len(j.hop) > 0 && !hostAddress(j.hop) && !(c.Local && loopback(j.hop)) {
		j.fault(Withdraw, nextHop, WrongValue, wire.UpdateInvalidNextHop, j.hop)
	}
	j.sum.setNextHop(j.hop)
	j.mergePath()
	return j
}

// fault notes the severest fault.
func (j *judgement) fault(v Verdict, t uint8, f Fault, subcode uint8, data []byte) {
	if v == Withdraw && !j.context.Reachable {
		v = Reset
	}
	if v <= j.Verdict {
		return
	}
	j.Result = Result{v, t, f}
	if v == Reset {
		j.notified = &wire.Error{Code: wire.CodeUpdate, Subcode: subcode, Data: slices.Clone(data), Reason: name(t) + " " + f.String()}
	}
}

// attribute judges one; whole is it with its header.
func (j *judgement) attribute(flags, t uint8, value, whole []byte) {
	r, known := ruleOf(t, j.context)
	switch {
	case t == nextHop && len(j.hop) > 0 && !j.seen[t]:
		return // MP_REACH_NLRI has the next hop (RFC 4760 section 3)
	case j.seen[t]:
		j.fault(Discard, t, Duplicate, 0, nil)
		return
	case !known && flags&optional == 0:
		j.fault(Reset, t, Unrecognized, wire.UpdateUnknownWellKnown, whole)
		return
	case !known && flags&transitive == 0:
		return // RFC 4271 section 5: ignored, and not passed on
	}
	j.seen[t] = true
	switch {
	case !known:
		j.add(flags&^unusedFlags|partial, t, value)
		return
	case flags&(optional|transitive) != r.flags:
		j.fault(Withdraw, t, WrongFlags, wire.UpdateAttributeFlags, whole)
		return
	case r.internal && j.context.External:
		j.fault(Discard, t, External, 0, nil)
		return
	case j.context.AS4 && (t == as4Path || t == as4Aggregator):
		j.fault(Discard, t, Unneeded, 0, nil) // RFC 6793 section 4.1
		return
	case !r.fits(len(value)):
		j.fault(r.malformed, t, WrongLength, wire.UpdateAttributeLength, whole)
		return
	}
	flags &^= unusedFlags
	if r.flags != optional|transitive {
		flags &^= partial // others do count it as a fault
	}
	if !j.read(flags, t, value) {
		subcode := r.subcode
		if subcode == 0 {
			subcode = wire.UpdateOptionalAttribute
		}
		j.fault(r.malformed, t, WrongValue, subcode, whole)
	}
}

// read notes what a value of the right size says. It reports false when that is wrong.
func (j *judgement) read(flags, t uint8, value []byte) bool {
	s := &j.sum
	switch t {
	case origin:
		if s.Origin = value[0]; s.Origin > 2 {
			return false
		}
	case asPath:
		var ok bool
		if j.path, ok = segments(value, !j.context.AS4); !ok || j.context.External && confederation(j.path) {
			return false // RFC 5065 section 5
		}
		j.pathFlags, j.pathAt = flags, len(j.out)
		return true // mergePath adds it
	case as4Path:
		var ok bool
		j.path4, ok = segments(value, false)
		return ok && len(value) >= 6
	case nextHop:
		j.hop = value
		return true
	case med:
		s.MED = binary.BigEndian.Uint32(value)
		s.Flags |= HasMED
	case localPref:
		s.LocalPref = binary.BigEndian.Uint32(value)
		s.Flags |= HasLocalPref
	case originatorID:
		s.Originator = binary.BigEndian.Uint32(value)
		s.Flags |= HasOriginator
	case clusterList:
		s.ClusterLen = uint16(len(value) / 4)
	case communities:
		s.Flags |= wellKnownCommunities(value)
	case aggregator:
		j.aggregator = uint32(binary.BigEndian.Uint16(value))
		if j.context.AS4 {
			j.aggregator = binary.BigEndian.Uint32(value)
		}
		if j.aggregator == 0 { // RFC 7607
			return false
		}
		if !j.context.AS4 {
			value = slices.Concat([]byte{0, 0}, value)
		}
	case as4Aggregator:
		if binary.BigEndian.Uint32(value) == 0 {
			return false
		}
		j.replaced = value
		return true
	case largeCommunities:
		value = distinct(value, 12) // RFC 8092 section 5
	}
	j.add(flags, t, value)
	return true
}

// add appends an attribute to the canonical form.
func (j *judgement) add(flags, t uint8, value []byte) {
	j.out = appendAttribute(j.out, flags, t, value)
}

func appendAttribute(b []byte, flags, t uint8, value []byte) []byte {
	if flags&extendedLength != 0 || len(value) > 255 {
		b = append(b, flags|extendedLength, t)
		b = binary.BigEndian.AppendUint16(b, uint16(len(value)))
	} else {
		b = append(b, flags, t, uint8(len(value)))
	}
	return append(b, value...)
}

// mergePath adds the AS path, completed by what a speaker with four-octet AS
// numbers said past one without (RFC 6793 section 4.2.3).
func (j *judgement) mergePath() {
	if j.pathAt < 0 {
		return
	}
	path := j.path
	// An AGGREGATOR that is not AS_TRANS was set behind whoever wrote the AS4 attributes.
	trusted := j.replaced == nil || !j.seen[aggregator] || j.aggregator == asTrans
	if n, n4 := pathLen(path), pathLen(j.path4); trusted && n4 > 0 && n >= n4 {
		path = slices.Concat(leading(path, n-n4), withoutConfederation(j.path4))
	}
	if trusted && j.replaced != nil && j.seen[aggregator] {
		j.replaceAggregator()
	}
	var value []byte
	for _, s := range path {
		as := s.GetAS()
		value = append(value, s.GetType(), uint8(len(as)))
		for _, n := range as {
			value = binary.BigEndian.AppendUint32(value, n)
		}
	}
	if len(value) > math.MaxUint16 {
		j.fault(Withdraw, asPath, WrongLength, wire.UpdateMalformedASPath, nil)
		return
	}
	j.out = slices.Insert(j.out, j.pathAt, appendAttribute(nil, j.pathFlags, asPath, value)...)
	j.sum.PathLen = uint16(pathLen(path))
	if len(path) > 0 && path[0].GetType() == packet.BGP_ASPATH_ATTR_TYPE_SEQ {
		j.sum.FirstAS = path[0].GetAS()[0]
	}
}

// replaceAggregator puts the value of AS4_AGGREGATOR into AGGREGATOR.
func (j *judgement) replaceAggregator() {
	for at := 0; at < len(j.out); {
		_, t, value, rest, _ := wire.Attribute(j.out[at:])
		if t == aggregator {
			copy(value, j.replaced)
			return
		}
		at = len(j.out) - len(rest)
	}
}

// segments decodes an AS path. AS 0 is none (RFC 7607).
func segments(value []byte, short bool) (out []packet.AsPathParamInterface, ok bool) {
	a, err := decode(asPath, value, short)
	if err != nil {
		return nil, false
	}
	path, ok := a.(*packet.PathAttributeAsPath)
	if !ok {
		return nil, false
	}
	for _, s := range path.Value {
		if slices.Contains(s.GetAS(), 0) {
			return nil, false
		}
	}
	return path.Value, true
}

// decode has GoBGP's codec decode one value. What makes it panic is malformed.
func decode(t uint8, value []byte, short bool) (a packet.PathAttributeInterface, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("decode attribute %d: %v", t, r)
		}
	}()
	b := binary.BigEndian.AppendUint16([]byte{transitive | extendedLength, t}, uint16(len(value)))
	b = append(b, value...)
	a, err = packet.GetPathAttribute(b)
	if err != nil {
		return nil, err
	}
	return a, a.DecodeFromBytes(b, &packet.MarshallingOption{Use2ByteAS: short})
}

func inConfederation(s packet.AsPathParamInterface) bool {
	return s.GetType() == packet.BGP_ASPATH_ATTR_TYPE_CONFED_SEQ || s.GetType() == packet.BGP_ASPATH_ATTR_TYPE_CONFED_SET
}

func confederation(path []packet.AsPathParamInterface) bool {
	return slices.ContainsFunc(path, inConfederation)
}

func withoutConfederation(path []packet.AsPathParamInterface) []packet.AsPathParamInterface {
	return slices.DeleteFunc(slices.Clone(path), inConfederation)
}

// pathLen counts the AS numbers of a path. A set counts one (RFC 4271 section
// 9.1.2.2), segments of a confederation none (RFC 5065).
func pathLen(path []packet.AsPathParamInterface) (n int) {
	for _, s := range path {
		switch s.GetType() {
		case packet.BGP_ASPATH_ATTR_TYPE_SEQ:
			n += len(s.GetAS())
		case packet.BGP_ASPATH_ATTR_TYPE_SET:
			n++
		}
	}
	return n
}

// leading returns the segments of a path up to n AS numbers by [pathLen].
func leading(path []packet.AsPathParamInterface, n int) (out []packet.AsPathParamInterface) {
	for _, s := range path {
		as := s.GetAS()
		switch {
		case inConfederation(s):
		case n == 0:
			return out
		case s.GetType() == packet.BGP_ASPATH_ATTR_TYPE_SET:
			n--
		case len(as) > n:
			as, n = as[:n], 0
		default:
			n -= len(as)
		}
		out = append(out, packet.NewAs4PathParam(s.GetType(), as))
	}
	return out
}

// distinct returns the units of a value without those that are there again.
func distinct(value []byte, unit int) []byte {
	out := make([]byte, 0, len(value))
	seen := make(map[string]bool, len(value)/unit)
	for u := range slices.Chunk(value, unit) {
		if !seen[string(u)] {
			seen[string(u)] = true
			out = append(out, u...)
		}
	}
	return out
}

// wellKnownCommunities returns the flags of those that change what becomes of a path.
func wellKnownCommunities(value []byte) (f Flags) {
	for u := range slices.Chunk(value, 4) {
		switch packet.WellKnownCommunity(binary.BigEndian.Uint32(u)) {
		case packet.COMMUNITY_NO_EXPORT:
			f |= NoExport
		case packet.COMMUNITY_NO_ADVERTISE:
			f |= NoAdvertise
		case packet.COMMUNITY_NO_EXPORT_SUBCONFED:
			f |= NoExportSubconfed
		case packet.COMMUNITY_LLGR_STALE:
			f |= LLGRStale
		case packet.COMMUNITY_NO_LLGR:
			f |= NoLLGR
		case packet.COMMUNITY_PLANNED_SHUT:
			f |= GracefulShutdown
		}
	}
	return f
}

// loopback reports whether a next hop is an address of the loopback.
func loopback(hop []byte) bool {
	a, ok := netip.AddrFromSlice(hop)
	return ok && a.IsLoopback()
}

// hostAddress reports whether a next hop can be a host (RFC 4271 section 6.3). Of two
// it is enough if the second, link-local one can: a peer that has only that fills up
// with an unspecified one.
func hostAddress(hop []byte) bool {
	if len(hop) == 32 && netip.AddrFrom16([16]byte(hop)).IsUnspecified() {
		return netip.AddrFrom16([16]byte(hop[16:])).IsLinkLocalUnicast()
	}
	a, ok := netip.AddrFromSlice(hop[:min(len(hop), 16)])
	return ok && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.Is4In6() && (a.Is6() || hop[0] != 0 && hop[0] < 240)
}
