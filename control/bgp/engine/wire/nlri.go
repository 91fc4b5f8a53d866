package wire

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Prefix is a prefix as integers, with the path identifier that came with it (RFC
// 7911; 0 without). Address bits stand at the left: an IPv4 address is the upper
// half of Hi. Bits beyond the length are zero, so equal prefixes compare equal.
type Prefix struct {
	Hi, Lo uint64
	ID     uint32
	Bits   uint8
	Family Family
}

// FromNetip returns p masked. p has to be valid, and not IPv4 mapped to IPv6.
func FromNetip(p netip.Prefix) Prefix {
	if p.Addr().Is4() {
		a := p.Masked().Addr().As4()
		return Prefix{Hi: uint64(binary.BigEndian.Uint32(a[:])) << 32, Bits: uint8(p.Bits()), Family: IPv4}
	}
	a := p.Masked().Addr().As16()
	return Prefix{Hi: binary.BigEndian.Uint64(a[:8]), Lo: binary.BigEndian.Uint64(a[8:]), Bits: uint8(p.Bits()), Family: IPv6}
}

// Netip returns the prefix without its path identifier.
func (p Prefix) Netip() netip.Prefix {
	if p.Family == IPv4 {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], uint32(p.Hi>>32))
		return netip.PrefixFrom(netip.AddrFrom4(a), int(p.Bits))
	}
	var a [16]byte
	binary.BigEndian.PutUint64(a[:8], p.Hi)
	binary.BigEndian.PutUint64(a[8:], p.Lo)
	return netip.PrefixFrom(netip.AddrFrom16(a), int(p.Bits))
}

// NLRI is a list of prefixes in a message, found to be whole. [NLRI.Next] uses it
// up; a copy walks again.
type NLRI struct {
	data    []byte
	family  Family
	addPath bool
}

// Empty reports whether no prefix is left.
func (n *NLRI) Empty() bool { return len(n.data) == 0 }

// Next returns the next prefix, and false after the last.
func (n *NLRI) Next() (p Prefix, ok bool) {
	d := n.data
	if len(d) == 0 {
		return Prefix{}, false
	}
	if n.addPath {
		p.ID = binary.BigEndian.Uint32(d)
		d = d[4:]
	}
	p.Bits, p.Family = d[0], n.family
	size := 1 + (int(d[0])+7)/8
	switch {
	case n.family == IPv4 && len(d) >= 5:
		p.Hi = uint64(binary.BigEndian.Uint32(d[1:])) << 32
	case len(d) >= 17:
		p.Hi, p.Lo = binary.BigEndian.Uint64(d[1:]), binary.BigEndian.Uint64(d[9:])
	default: // the last of the message
		var tail [16]byte
		copy(tail[:], d[1:])
		p.Hi, p.Lo = binary.BigEndian.Uint64(tail[:]), binary.BigEndian.Uint64(tail[8:])
	}
	// What is beyond the prefix belongs to the next one; a shift by 64 or more is 0.
	p.Hi &^= ^uint64(0) >> p.Bits
	if p.Bits > 64 {
		p.Lo &^= ^uint64(0) >> (p.Bits - 64)
	} else {
		p.Lo = 0
	}
	n.data = d[size:]
	return p, true
}

// checked returns the prefixes of data. What cannot be told apart cannot be
// withdrawn either, so a fault ends the session (RFC 7606 section 5.3); the message
// is put into words by the caller, who knows the field.
func checked(data []byte, f Family, addPath bool) (NLRI, error) {
	longest := f.MaxBits()
	for d := data; len(d) > 0; {
		if addPath {
			if len(d) < 5 {
				return NLRI{}, fmt.Errorf("%d bytes where a path identifier and a prefix should be", len(d))
			}
			d = d[4:]
		}
		bits := int(d[0])
		size := 1 + (bits+7)/8
		if bits > longest {
			return NLRI{}, fmt.Errorf("%s prefix of %d bits", f, bits)
		}
		if size > len(d) {
			return NLRI{}, fmt.Errorf("prefix of %d bits in %d bytes", bits, len(d)-1)
		}
		d = d[size:]
	}
	return NLRI{data: data, family: f, addPath: addPath}, nil
}

// appendPrefix appends p as it stands in an NLRI field.
func appendPrefix(b []byte, p Prefix, addPath bool) []byte {
	if addPath {
		b = binary.BigEndian.AppendUint32(b, p.ID)
	}
	var a [16]byte
	binary.BigEndian.PutUint64(a[:8], p.Hi)
	binary.BigEndian.PutUint64(a[8:], p.Lo)
	return append(append(b, p.Bits), a[:(p.Bits+7)/8]...)
}
