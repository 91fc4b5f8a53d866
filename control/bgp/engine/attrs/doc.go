// Package attrs keeps sets of path attributes: each distinct one once, as bytes in
// an arena, with what the choice of a path needs of it decoded, and judged once for
// all prefixes and messages that have it (RFC 7606).
//
// AS paths are decoded by GoBGP's codec. What follows from a fault is decided by
// [ruleOf], for the codec's opinion differs from the RFCs in places.
package attrs

import (
	"fmt"
	"strings"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// Context is what a set's meaning depends on beside its bytes.
type Context struct {
	External bool // from a peer of another AS
	AS4      bool // the session has four-octet AS numbers (RFC 6793)
	// The message announces prefixes. Where it does not, a fault may have hidden
	// them, and the session has to end (RFC 7606 section 5.2).
	Reachable bool
	Local     bool // from a program on this host: next hops are loopback addresses
}

func (c Context) bits() (b byte) {
	for i, set := range []bool{c.External, c.AS4, c.Reachable, c.Local} {
		if set {
			b |= 1 << i
		}
	}
	return b
}

// Verdict is what becomes of a message for its path attributes, in ascending
// severity (RFC 7606 section 2).
type Verdict uint8

// The verdicts.
const (
	Accept   Verdict = iota
	Discard          // without the attributes at fault
	Withdraw         // the prefixes that it announces are withdrawn
	Reset            // the session ends
)

func (v Verdict) String() string {
	return [...]string{"accept", "attribute discard", "treat as withdraw", "session reset"}[v]
}

// Fault is what is wrong with an attribute.
type Fault uint8

// The faults.
const (
	None Fault = iota
	Truncated
	Duplicate
	WrongFlags
	WrongLength
	WrongValue
	Missing
	Unrecognized
	External // it means nothing in a message from another AS
	Unneeded // the session has four-octet AS numbers without it
)

func (f Fault) String() string {
	return [...]string{
		"no fault", "is longer than the path attributes", "is there twice", "has the wrong flags", "has the wrong length", "has a wrong value",
		"is missing", "is well-known, and not known here", "comes from another AS", "is not needed with four-octet AS numbers",
	}[f]
}

// Result is a verdict and the first attribute among those that led to it.
type Result struct {
	Verdict Verdict
	Type    uint8
	Fault   Fault
}

func (r Result) String() string {
	if r.Fault == None {
		return r.Verdict.String()
	}
	return fmt.Sprintf("%s: %s %s", r.Verdict, name(r.Type), r.Fault)
}

// name is an attribute's name as the RFCs have it.
func name(t uint8) string {
	return strings.TrimPrefix(packet.BGPAttrType(t).String(), "BGP_ATTR_TYPE_")
}
