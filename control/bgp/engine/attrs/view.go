package attrs

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"strings"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Large is a large community (RFC 8092).
type Large [3]uint32

// View is a set of path attributes as it is kept, to be read. It is valid until its
// table changes.
type View struct {
	*Summary
	hop, attrs []byte
}

// View returns what a set says.
func (t *Table) View(h Handle) View {
	hop, attrs := t.Canonical(h)
	return View{&t.set(h).sum, hop, attrs}
}

// NextHopAddr is the next hop: where there are two, the global one. Invalid: none.
func (v View) NextHopAddr() netip.Addr {
	a, _ := netip.AddrFromSlice(v.hop[:min(len(v.hop), 16)])
	return a
}

// Raw returns the next hop, of 4, 16 or 32 bytes, and the attributes as they are kept; see
// [Table.Canonical].
func (v View) Raw() (hop, attrs []byte) { return v.hop, v.attrs }

// value returns the value of an attribute; nil: it is not there, or empty.
func (v View) value(t uint8) []byte {
	for list := v.attrs; len(list) > 0; {
		_, typ, value, rest, ok := wire.Attribute(list)
		if !ok {
			return nil
		}
		if typ == t {
			return value
		}
		list = rest
	}
	return nil
}

// segment is one of an AS path: AS numbers of four octets.
type segment struct {
	kind uint8
	list []byte
}

func (v View) segments() iter.Seq[segment] {
	return func(yield func(segment) bool) {
		for b := v.value(asPath); len(b) >= 2 && len(b) >= 2+4*int(b[1]); {
			n := 2 + 4*int(b[1])
			if !yield(segment{b[0], b[2:n]}) {
				return
			}
			b = b[n:]
		}
	}
}

// ASPath is an iterator over all AS numbers of the path, whatever their segments.
func (v View) ASPath() iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for s := range v.segments() {
			for b := s.list; len(b) >= 4; b = b[4:] {
				if !yield(binary.BigEndian.Uint32(b)) {
					return
				}
			}
		}
	}
}

// PathText is the AS path as people write it: "64999 65001 {65010,65011}".
func (v View) PathText() string {
	var b strings.Builder
	for s := range v.segments() {
		open, sep, end := "", " ", ""
		switch s.kind {
		case packet.BGP_ASPATH_ATTR_TYPE_SET:
			open, sep, end = "{", ",", "}"
		case packet.BGP_ASPATH_ATTR_TYPE_CONFED_SEQ:
			open, end = "(", ")"
		case packet.BGP_ASPATH_ATTR_TYPE_CONFED_SET:
			open, sep, end = "[", ",", "]"
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(open)
		for i := 0; i+4 <= len(s.list); i += 4 {
			if i > 0 {
				b.WriteString(sep)
			}
			fmt.Fprint(&b, binary.BigEndian.Uint32(s.list[i:]))
		}
		b.WriteString(end)
	}
	return b.String()
}

// Communities is an iterator over standard communities (RFC 1997).
func (v View) Communities() iter.Seq[uint32] { return words(v.value(communities)) }

// Clusters is an iterator over CLUSTER_LIST (RFC 4456).
func (v View) Clusters() iter.Seq[uint32] { return words(v.value(clusterList)) }

// LargeCommunities is an iterator over those of RFC 8092.
func (v View) LargeCommunities() iter.Seq[Large] {
	return func(yield func(Large) bool) {
		for b := v.value(largeCommunities); len(b) >= 12; b = b[12:] {
			if !yield(largeOf(b)) {
				return
			}
		}
	}
}

func largeOf(b []byte) Large {
	return Large{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])}
}

// HasCommunity reports whether a standard community is among the path's.
func (v View) HasCommunity(c uint32) bool {
	for x := range v.Communities() {
		if x == c {
			return true
		}
	}
	return false
}

// HasLarge reports whether a large community is among the path's.
func (v View) HasLarge(c Large) bool {
	for x := range v.LargeCommunities() {
		if x == c {
			return true
		}
	}
	return false
}

// CountAS returns how often an AS number is in the path.
func (v View) CountAS(as uint32) (n int) {
	for x := range v.ASPath() {
		if x == as {
			n++
		}
	}
	return n
}

// BeginsWith reports whether a list of AS numbers is the leftmost part of the path.
func (v View) BeginsWith(list []uint32) bool {
	i := 0
	for as := range v.ASPath() {
		if i == len(list) || as != list[i] {
			break
		}
		i++
	}
	return i == len(list)
}

func words(b []byte) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for ; len(b) >= 4; b = b[4:] {
			if !yield(binary.BigEndian.Uint32(b)) {
				return
			}
		}
	}
}
