package rib

import (
	"net/netip"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/dense"
)

// ref names a record; 0: none.
type ref = dense.Ref

// prefixKey is a prefix without a pointer.
type prefixKey struct {
	addr   [16]byte // the first four of IPv4
	bits   uint8
	family dataplane.Family
}

func keyOf(p netip.Prefix) prefixKey {
	a := p.Addr()
	k := prefixKey{bits: uint8(p.Bits()), family: dataplane.IPv6}
	if a.Is4() {
		four := a.As4()
		copy(k.addr[:], four[:])
		k.family = dataplane.IPv4
	} else {
		k.addr = a.As16()
	}
	return k
}

// record is all that is kept of a prefix. There may be a million, so it has no
// pointers, which the collector would follow, and what prefixes share stands elsewhere
// and is named by its number.
type record struct {
	prefixKey
	flags flags
	path  uint32 // what BGP says of it, in learnedPaths.said; 0: nothing
	route uint32 // the route in use, in nextHops.choices; 0: none

	// The prefixes for which BGP names the same next hops.
	next, prev ref
}

type flags uint8

const (
	isDirty flags = 1 << iota // in RIB.dirty
	isMoved                   // in RIB.moved
	isKept                    // of a Reset of the paths
)

func (k *prefixKey) prefix() netip.Prefix {
	if k.family == dataplane.IPv6 {
		return netip.PrefixFrom(netip.AddrFrom16(k.addr), int(k.bits))
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(k.addr[:4])), int(k.bits))
}

// prefixTable has a record for each prefix of which something is known.
type prefixTable struct {
	*dense.Table[prefixKey, record]
}

func newPrefixTable() *prefixTable {
	return &prefixTable{dense.New(func(r *record) *prefixKey { return &r.prefixKey })}
}

// find returns the record of a prefix; 0: there is none.
func (t *prefixTable) find(p netip.Prefix) ref { return t.Find(keyOf(p)) }

// make returns the record of a prefix, a new one if there is none.
func (t *prefixTable) make(p netip.Prefix) ref {
	at, _ := t.Make(keyOf(p))
	return at
}

// tidy drops the record of a prefix of which nothing is known and with which nothing is
// to be done.
func (t *prefixTable) tidy(at ref) {
	if rec := t.At(at); rec.path == 0 && rec.route == 0 && rec.flags == 0 {
		t.Drop(at)
	}
}
