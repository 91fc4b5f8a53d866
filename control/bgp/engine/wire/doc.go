// Package wire reads and writes BGP's messages as far as their number matters:
// the framing, the fields of UPDATE, and prefixes, which are walked in the buffer
// where they are. OPEN, NOTIFICATION and ROUTE-REFRESH, which are rare, and what
// path attributes mean are left to GoBGP's codec and package attrs.
//
// Nothing here keeps what it was handed, and reading allocates only for errors. No
// value may be used by two goroutines at once.
package wire

import "fmt"

// Error is a fault that ends the session: what its NOTIFICATION says (RFC 4271
// section 4.5), and why, for people.
type Error struct {
	Code, Subcode uint8
	Data          []byte
	Reason        string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s (NOTIFICATION %d/%d)", e.Reason, e.Code, e.Subcode)
}

// Codes and subcodes of NOTIFICATION that UPDATE and the header lead to (RFC 4271
// sections 6.1 and 6.3).
const (
	CodeHeader = 1
	CodeUpdate = 3

	HeaderNotSynchronized = 1
	HeaderBadLength       = 2
	HeaderBadType         = 3

	UpdateMalformedAttributes  = 1
	UpdateUnknownWellKnown     = 2
	UpdateMissingWellKnown     = 3
	UpdateAttributeFlags       = 4
	UpdateAttributeLength      = 5
	UpdateInvalidOrigin        = 6
	UpdateInvalidNextHop       = 8
	UpdateOptionalAttribute    = 9
	UpdateInvalidNetwork       = 10
	UpdateMalformedASPath      = 11
	attrNextHop                = 3
	attrReach, attrUnreach     = 14, 15
	flagOptional, flagTransit  = 0x80, 0x40
	flagExtended               = 0x10
	attrHeader, attrHeaderLong = 3, 4
)

// Family is an address family whose unicast prefixes are exchanged.
type Family uint8

// The families, which also index arrays of [Families].
const (
	IPv4 Family = iota
	IPv6
	Families = 2
)

const safiUnicast = 1

// AFI is the family's number on the wire (RFC 4760).
func (f Family) AFI() uint16 { return uint16(f) + 1 }

// MaxBits is the length of the family's addresses.
func (f Family) MaxBits() int {
	if f == IPv4 {
		return 32
	}
	return 128
}

func (f Family) String() string {
	if f == IPv4 {
		return "IPv4"
	}
	return "IPv6"
}

// unicast returns the family that an AFI and SAFI stand for, if it is one of ours.
func unicast(afi uint16, safi uint8) (Family, bool) {
	return Family(afi - 1), safi == safiUnicast && (afi == 1 || afi == 2)
}
