package attrs

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Edit is what a policy changes of a path. It is not changed once it is in use.
type Edit struct {
	LocalPref   *uint32  // nil: as it is
	Communities []uint32 // added
	Large       []Large  // added
	Prepend     []uint32 // in front of the AS path, the first one leftmost
	NextHop     NextHopMode
}

// NextHopMode is what becomes of the next hop when a path is advertised.
type NextHopMode uint8

// The modes.
const (
	NextHopAuto NextHopMode = iota // by BGP's own rules (RFC 4271 section 5.1.3)
	NextHopSelf                    // the session's own address
	NextHopKeep                    // as it was received or originated
)

// DefaultLocalPref is that of a path without LOCAL_PREF.
const DefaultLocalPref = 100

// Change is all that can become of a set on its way, in the order of the fields.
type Change struct {
	Edit        *Edit // but for its NextHop; nil: none
	Drop        []uint8
	External    bool   // to another AS: without extended communities that end with this one (RFC 4360 section 6)
	LocalPref   bool   // sets the default one if there is none
	PrependAS   uint32 // 0: none
	Originator  uint32 // ORIGINATOR_ID if there is none (RFC 4456); 0: not
	Cluster     uint32 // in front of CLUSTER_LIST; 0: not
	Communities []uint32
	NextHop     []byte // nil: as it is
	TwoOctet    bool   // the peer has AS numbers of two octets (RFC 6793 section 4.2.2)
}

// Attributes that mean nothing beyond an AS (RFC 4271 sections 5.1.4 and 5.1.5, RFC
// 4456), for Change.Drop.
var (
	InternalAttributes = []uint8{localPref, originatorID, clusterList}
	MED                = []uint8{med}
)

// Derive returns the set that a change makes of another. It keeps that one, as its
// [Table.Base]. The caller has to release it.
func (t *Table) Derive(h Handle, c *Change) Handle {
	hop, attrs := t.changed(h, c)
	t.key = append(t.key[:0], derived)
	t.key = binary.BigEndian.AppendUint32(t.key, uint32(h))
	return t.put(hop, attrs, h)
}

// Advertise returns what a change makes of a set, for messages: whatever it was made
// of, equal ones have one handle. The caller has to release it.
func (t *Table) Advertise(h Handle, c *Change) Handle {
	hop, attrs := t.changed(h, c)
	return t.Put(hop, attrs)
}

// Put returns the set of a path that originates here: attributes without fault, in
// ascending order, AS numbers of four octets, without NEXT_HOP. An unspecified next
// hop stands for that of each session. The caller has to release it.
func (t *Table) Put(hop, attrs []byte) Handle {
	t.key = append(t.key[:0], made)
	return t.put(hop, attrs, 0)
}

// What a key begins with in place of a context's bits.
const (
	made    = 0x40
	derived = 0x80
)

// put interns a set whose key has begun.
func (t *Table) put(hop, attrs []byte, base Handle) Handle {
	t.key = append(append(append(t.key, byte(len(hop))), hop...), attrs...)
	hash := t.hash()
	slot, h := t.find(hash)
	if h != 0 {
		t.set(h).refs++
		return h
	}
	j := judge(Context{AS4: true}, attrs, hop)
	j.Result, j.hop, j.out = Result{}, hop, attrs
	h = t.insert(slot, hash, j)
	if base != 0 {
		t.set(h).base = base
		t.Retain(base)
	}
	return h
}

// Base returns the set that another was derived from, after however many steps;
// itself: from none.
func (t *Table) Base(h Handle) Handle {
	for t.set(h).base != 0 {
		h = t.set(h).base
	}
	return h
}

// one is an attribute.
type one struct {
	flags, typ uint8
	value      []byte
}

// list is attributes that are being changed.
type list []one

func (l list) find(t uint8) int { return slices.IndexFunc(l, func(a one) bool { return a.typ == t }) }

// set replaces the value of an attribute, or adds it with the flags.
func (l *list) set(flags, t uint8, value []byte) {
	if i := l.find(t); i >= 0 {
		(*l)[i].value = value
		return
	}
	*l = append(*l, one{flags, t, value})
}

func (l list) value(t uint8) []byte {
	if i := l.find(t); i >= 0 {
		return l[i].value
	}
	return nil
}

func (l *list) drop(types ...uint8) {
	*l = slices.DeleteFunc(*l, func(a one) bool { return slices.Contains(types, a.typ) })
}

// changed applies a change.
func (t *Table) changed(h Handle, c *Change) (hop, attrs []byte) {
	v := t.View(h)
	hop = v.hop
	if c.NextHop != nil {
		hop = c.NextHop
	}
	var l list
	for b := v.attrs; len(b) > 0; {
		flags, typ, value, rest, _ := wire.Attribute(b)
		l = append(l, one{flags &^ extendedLength, typ, value})
		b = rest
	}
	if c.Edit != nil {
		l.edit(c.Edit)
	}
	l.drop(c.Drop...)
	if c.External {
		l.keepTransitive(extended, 8)
		l.keepTransitive(extended6, 20)
	}
	if c.LocalPref && l.find(localPref) < 0 {
		l.set(transitive, localPref, binary.BigEndian.AppendUint32(nil, DefaultLocalPref))
	}
	if c.PrependAS != 0 {
		l.prepend([]uint32{c.PrependAS})
	}
	if c.Originator != 0 && l.find(originatorID) < 0 {
		l.set(optional, originatorID, binary.BigEndian.AppendUint32(nil, c.Originator))
	}
	if c.Cluster != 0 {
		l.set(optional, clusterList, append(binary.BigEndian.AppendUint32(nil, c.Cluster), l.value(clusterList)...))
	}
	l.tag(c.Communities)
	if c.TwoOctet {
		l.twoOctets()
	}
	slices.SortStableFunc(l, func(a, b one) int { return cmp.Compare(a.typ, b.typ) })
	for _, a := range l {
		attrs = appendAttribute(attrs, a.flags, a.typ, a.value)
	}
	return slices.Clone(hop), attrs
}

// keepTransitive leaves extended communities out, of so many bytes each, whose type says
// that they do not go from one AS to another.
func (l *list) keepTransitive(t uint8, size int) {
	const nonTransitive = 0x40
	var kept []byte
	for c := range slices.Chunk(l.value(t), size) {
		if c[0]&nonTransitive == 0 {
			kept = append(kept, c...)
		}
	}
	if len(kept) == 0 {
		l.drop(t)
		return
	}
	l.set(optional|transitive, t, kept)
}

// edit applies what a policy changes.
func (l *list) edit(e *Edit) {
	if e.LocalPref != nil {
		l.set(transitive, localPref, binary.BigEndian.AppendUint32(nil, *e.LocalPref))
	}
	if len(e.Prepend) > 0 {
		l.prepend(e.Prepend)
	}
	l.tag(e.Communities)
	large := slices.Clone(l.value(largeCommunities))
	for _, c := range e.Large {
		for _, n := range c {
			large = binary.BigEndian.AppendUint32(large, n)
		}
	}
	if len(e.Large) > 0 {
		l.set(optional|transitive, largeCommunities, distinct(large, 12))
	}
}

// tag adds standard communities.
func (l *list) tag(add []uint32) {
	if len(add) == 0 {
		return
	}
	value := slices.Clone(l.value(communities))
	for _, c := range add {
		value = binary.BigEndian.AppendUint32(value, c)
	}
	l.set(optional|transitive, communities, distinct(value, 4))
}

// prepend puts AS numbers in front of the path, into its first segment if that is a
// sequence and has room (RFC 4271 section 5.1.2). Segments of a confederation stay
// behind them.
func (l *list) prepend(as []uint32) {
	old := l.value(asPath)
	n := 0
	if len(old) >= 2 && old[0] == packet.BGP_ASPATH_ATTR_TYPE_SEQ && int(old[1])+len(as) <= math.MaxUint8 {
		n, old = int(old[1]), old[2:]
	}
	value := []byte{packet.BGP_ASPATH_ATTR_TYPE_SEQ, byte(n + len(as))}
	for _, a := range as {
		value = binary.BigEndian.AppendUint32(value, a)
	}
	l.set(transitive, asPath, append(value, old...))
}

// twoOctets gives AS_PATH and AGGREGATOR AS numbers of two octets, and adds what does
// not fit into them (RFC 6793 section 4.2.2).
func (l *list) twoOctets() {
	var short, long []byte
	wide := false
	for v := l.value(asPath); len(v) >= 2; {
		n := int(v[1])
		seg := v[:2+4*n]
		v = v[len(seg):]
		short = append(short, seg[:2]...)
		for i := range n {
			as := binary.BigEndian.Uint32(seg[2+4*i:])
			if as > math.MaxUint16 {
				as, wide = asTrans, true
			}
			short = binary.BigEndian.AppendUint16(short, uint16(as))
		}
		if k := seg[0]; k != packet.BGP_ASPATH_ATTR_TYPE_CONFED_SEQ && k != packet.BGP_ASPATH_ATTR_TYPE_CONFED_SET {
			long = append(long, seg...)
		}
	}
	l.set(transitive, asPath, short)
	if wide && len(long) > 0 {
		l.set(optional|transitive, as4Path, long)
	}
	a := l.value(aggregator)
	if len(a) != 8 {
		return
	}
	as := binary.BigEndian.Uint32(a)
	if as > math.MaxUint16 {
		l.set(optional|transitive, as4Aggregator, a)
		as = asTrans
	}
	l.set(optional|transitive, aggregator, append(binary.BigEndian.AppendUint16(nil, uint16(as)), a[4:]...))
}
