package bfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// Packet is a control packet (RFC 5880 section 4.1) without authentication.
type Packet struct {
	Diagnostic  Diagnostic
	State       State
	Poll, Final bool
	Independent bool // C
	Demand      bool
	Multiplier  uint8
	My, Your    uint32 // discriminators
	MinTx       time.Duration
	MinRx       time.Duration
}

// Length of a packet on the wire.
const Length = 24

// Bits of the second octet.
const (
	bitPoll        = 1 << 5
	bitFinal       = 1 << 4
	bitIndependent = 1 << 3
	bitAuth        = 1 << 2
	bitDemand      = 1 << 1
	bitMultipoint  = 1 << 0
)

// Append adds p's wire form to b. Intervals are cut to whole microseconds.
func (p *Packet) Append(b []byte) []byte {
	flags := byte(p.State)<<6 | bit(p.Poll, bitPoll) | bit(p.Final, bitFinal) | bit(p.Independent, bitIndependent) | bit(p.Demand, bitDemand)
	b = append(b, 1<<5|byte(p.Diagnostic)&0x1f, flags, p.Multiplier, Length)
	b = binary.BigEndian.AppendUint32(b, p.My)
	b = binary.BigEndian.AppendUint32(b, p.Your)
	b = binary.BigEndian.AppendUint32(b, uint32(p.MinTx/time.Microsecond))
	b = binary.BigEndian.AppendUint32(b, uint32(p.MinRx/time.Microsecond))
	return binary.BigEndian.AppendUint32(b, 0) // Required Min Echo RX Interval: no echo
}

func bit(set bool, b byte) byte {
	if set {
		return b
	}
	return 0
}

// Parse reads a packet and makes the checks of RFC 5880 section 6.8.6 that need no session.
func Parse(b []byte) (p Packet, err error) {
	if len(b) < Length {
		return p, fmt.Errorf("%d bytes: shorter than a control packet", len(b))
	}
	if v := b[0] >> 5; v != 1 {
		return p, fmt.Errorf("version %d: only 1 is known", v)
	}
	if n := int(b[3]); n < Length || n > len(b) {
		return p, fmt.Errorf("length field %d in a packet of %d bytes", n, len(b))
	}
	flags := b[1]
	if flags&bitAuth != 0 {
		return p, errors.New("authenticated: no authentication is in use")
	}
	if flags&bitMultipoint != 0 {
		return p, errors.New("the bit Multipoint is set")
	}
	p = Packet{
		Diagnostic: Diagnostic(b[0] & 0x1f), State: State(flags >> 6),
		Poll: flags&bitPoll != 0, Final: flags&bitFinal != 0,
		Independent: flags&bitIndependent != 0, Demand: flags&bitDemand != 0,
		Multiplier: b[2],
		My:         binary.BigEndian.Uint32(b[4:]), Your: binary.BigEndian.Uint32(b[8:]),
		MinTx: time.Duration(binary.BigEndian.Uint32(b[12:])) * time.Microsecond,
		MinRx: time.Duration(binary.BigEndian.Uint32(b[16:])) * time.Microsecond,
	}
	if p.Multiplier == 0 {
		return p, errors.New("detect multiplier 0")
	}
	if p.My == 0 {
		return p, errors.New("its discriminator is 0")
	}
	if p.Your == 0 && p.State != Down && p.State != AdminDown {
		return p, fmt.Errorf("state %v without our discriminator", p.State)
	}
	return p, nil
}
