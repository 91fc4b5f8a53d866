package wire

import (
	"encoding/binary"
	"fmt"
)

// Session is what two speakers agreed on, as far as reading UPDATE depends on it.
type Session struct {
	Family [Families]struct {
		Enabled bool // RFC 4760
		AddPath bool // the peer sends path identifiers (RFC 7911)
	}
	// IPv4 prefixes may have IPv6 next hops (RFC 8950).
	ExtendedNextHop bool
}

// Update is an UPDATE taken apart. It aliases the message and its [Decoder], and is
// valid until either is used again.
//
// What is withdrawn goes before what is announced: a prefix in both is announced
// (RFC 4271 section 4.3).
type Update struct {
	// Withdrawn are prefixes of the field Withdrawn Routes, which is IPv4's, and
	// Unreach those of MP_UNREACH_NLRI.
	Withdrawn, Unreach NLRI
	// Announced are prefixes of IPv4 whose next hop is the attribute NEXT_HOP.
	Announced NLRI
	// Reach are announced prefixes of MP_REACH_NLRI, and NextHop is theirs: 4, 16, or
	// 32 bytes (a global and a link-local address, RFC 2545).
	Reach   NLRI
	NextHop []byte
	// Attrs are all path attributes but MP_REACH_NLRI and MP_UNREACH_NLRI. They may
	// end within one: what that means is for whoever judges them (RFC 7606 section 4).
	Attrs []byte
	// Ignored says that there are prefixes of families that the session does not have.
	Ignored bool

	end       Family
	endOfRIB  bool
	reachable bool
}

// EndOfRIB returns the family of whose table the message says that it was sent
// whole (RFC 4724 section 2).
func (u *Update) EndOfRIB() (Family, bool) { return u.end, u.endOfRIB }

// Reachable reports whether the message announces prefixes, of whatever family. A
// message that announces none has no use for path attributes, so a fault in them
// may have hidden prefixes (RFC 7606 section 5.2).
func (u *Update) Reachable() bool { return u.reachable }

// Decoder takes UPDATEs of one session apart.
type Decoder struct {
	Session Session
	scratch []byte
}

// Decode reads the body of an UPDATE into u. An error, always an [*Error], ends the
// session: the message cannot be taken apart, not even to withdraw what it is about.
func (d *Decoder) Decode(body []byte, u *Update) error {
	*u = Update{}
	withdrawn, rest, ok := field(body)
	if !ok {
		return malformed("Withdrawn Routes are longer than their message")
	}
	attrs, announced, ok := field(rest)
	if !ok {
		return malformed("path attributes are longer than their message")
	}
	s := d.Session.Family[IPv4]
	var err error
	if u.Withdrawn, err = checked(withdrawn, IPv4, s.AddPath); err != nil {
		return invalidNetwork("Withdrawn Routes", err)
	}
	if u.Announced, err = checked(announced, IPv4, s.AddPath); err != nil {
		return invalidNetwork("NLRI", err)
	}
	u.reachable = len(announced) > 0
	if err := d.attributes(attrs, u); err != nil {
		return err
	}
	if len(body) == 4 {
		u.endOfRIB = s.Enabled
	}
	if !s.Enabled {
		u.Ignored = u.Ignored || len(withdrawn)+len(announced) > 0
		u.Withdrawn, u.Announced = NLRI{}, NLRI{}
	}
	return nil
}

// attributes finds the two attributes that hold prefixes and leaves the others.
func (d *Decoder) attributes(attrs []byte, u *Update) error {
	var seen [2]bool
	kept, peeled := 0, false // where what is kept and not yet copied begins
	d.scratch = d.scratch[:0]
	for at := 0; at < len(attrs); {
		a, size := attribute(attrs[at:])
		t := attrs[min(at+1, len(attrs)-1)]
		if holds := len(attrs)-at > 1 && (t == attrReach || t == attrUnreach); !holds {
			if size == 0 {
				break
			}
			at += size
			continue
		}
		whole := attrs[at : at+size]
		fault := func(reason string) error {
			return &Error{Code: CodeUpdate, Subcode: UpdateOptionalAttribute, Data: whole, Reason: name(t) + ": " + reason}
		}
		switch {
		case size == 0:
			return malformed(name(t) + " is longer than the path attributes")
		case seen[t-attrReach]:
			return malformed(name(t) + " is there twice")
		case attrs[at]&(flagOptional|flagTransit) != flagOptional:
			return fault("wrong flags")
		}
		seen[t-attrReach] = true
		d.scratch = append(d.scratch, attrs[kept:at]...)
		peeled = true
		at += size
		kept = at
		var err error
		if t == attrReach {
			err = d.reach(a, u)
		} else {
			err = d.unreach(a, u, len(whole) == len(attrs))
		}
		if err != nil {
			return fault(err.Error())
		}
	}
	u.Attrs = attrs
	if peeled {
		d.scratch = append(d.scratch, attrs[kept:]...)
		u.Attrs = d.scratch
	}
	return nil
}

// reach reads the value of MP_REACH_NLRI (RFC 4760 section 3). Where its next hop
// has an unexpected length, prefixes cannot be found for sure (RFC 7606 section 7.11).
func (d *Decoder) reach(v []byte, u *Update) error {
	if len(v) < 5 || len(v) < 5+int(v[3]) {
		return fmt.Errorf("%d bytes do not hold a next hop", len(v))
	}
	hop, rest := v[4:4+int(v[3])], v[5+int(v[3]):]
	f, ok := unicast(binary.BigEndian.Uint16(v), v[2])
	if !ok || !d.Session.Family[f].Enabled {
		u.Ignored, u.reachable = true, u.reachable || len(rest) > 0
		return nil
	}
	switch n := len(hop); {
	case (n == 16 || n == 32) && (f == IPv6 || d.Session.ExtendedNextHop):
	case n == 4 && f == IPv4:
	default:
		return fmt.Errorf("next hop of %d bytes for %s", n, f)
	}
	var err error
	u.Reach, err = checked(rest, f, d.Session.Family[f].AddPath)
	u.NextHop, u.reachable = hop, u.reachable || len(rest) > 0
	return err
}

// unreach reads the value of MP_UNREACH_NLRI (RFC 4760 section 4).
func (d *Decoder) unreach(v []byte, u *Update, alone bool) error {
	if len(v) < 3 {
		return fmt.Errorf("%d bytes do not hold a family", len(v))
	}
	f, ok := unicast(binary.BigEndian.Uint16(v), v[2])
	if !ok || !d.Session.Family[f].Enabled {
		u.Ignored = true
		return nil
	}
	list, err := checked(v[3:], f, d.Session.Family[f].AddPath)
	if err != nil {
		return err
	}
	if alone && list.Empty() && u.Withdrawn.Empty() && !u.reachable {
		u.end, u.endOfRIB = f, true
	}
	u.Unreach = list
	return nil
}

// field splits off what stands behind a length of two bytes.
func field(b []byte) (value, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, nil, false
	}
	n := 2 + int(binary.BigEndian.Uint16(b))
	if len(b) < n {
		return nil, nil, false
	}
	return b[2:n], b[n:], true
}

// attribute returns the value of the path attribute that b begins with, and its
// length with the header; 0 if b ends within it.
func attribute(b []byte) (value []byte, size int) {
	head := attrHeader
	if len(b) > 0 && b[0]&flagExtended != 0 {
		head = attrHeaderLong
	}
	if len(b) < head {
		return nil, 0
	}
	size = head + int(b[2])
	if head == attrHeaderLong {
		size = head + int(binary.BigEndian.Uint16(b[2:]))
	}
	if len(b) < size {
		return nil, 0
	}
	return b[head:size], size
}

// Attribute splits off the first of a list of path attributes. It reports false
// when the list ends within it (RFC 7606 section 4).
func Attribute(list []byte) (flags, typ uint8, value, rest []byte, ok bool) {
	value, size := attribute(list)
	if size == 0 {
		return 0, 0, nil, nil, false
	}
	return list[0], list[1], value, list[size:], true
}

func name(t byte) string {
	if t == attrReach {
		return "MP_REACH_NLRI"
	}
	return "MP_UNREACH_NLRI"
}

func malformed(reason string) *Error {
	return &Error{Code: CodeUpdate, Subcode: UpdateMalformedAttributes, Reason: reason}
}

func invalidNetwork(field string, err error) *Error {
	return &Error{Code: CodeUpdate, Subcode: UpdateInvalidNetwork, Reason: field + ": " + err.Error()}
}
