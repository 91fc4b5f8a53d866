// Package mrt writes a BGP table in MRT's format TABLE_DUMP_V2 (RFC 6396 section 4.3),
// which bgpdump and the tools of route collectors read.
package mrt

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"time"
)

// Types and subtypes (RFC 6396 section 4.3).
const (
	tableDumpV2    = 13
	peerIndexTable = 1
	ribIPv4Unicast = 2
	ribIPv6Unicast = 4
)

// Bits of a peer's type (RFC 6396 section 4.3.1).
const (
	peerIPv6 = 1 << iota
	peerAS4
)

// Path attributes that an entry's next hop is in.
const (
	optional, transitive = 0x80, 0x40
	nextHop, reach       = 3, 14
)

// Peer is one whose paths are in the table.
type Peer struct {
	ID   uint32 // BGP identifier; 0: not known
	Addr netip.Addr
	AS   uint32
}

// Entry is a path of a prefix.
type Entry struct {
	Peer       int // in the list of peers
	Originated time.Time
	NextHop    []byte // of 4, 16 or 32 bytes
	Attributes []byte // without a next hop, AS numbers of four octets
}

// Dump is a table that is being written. Each method appends a record to a buffer.
type Dump struct {
	at       time.Time
	sequence uint32
}

// NewDump returns the dump of a table as it is at a time.
func NewDump(at time.Time) *Dump { return &Dump{at: at} }

// Peers is the record that begins a dump: who speaks, and the peers that entries refer to.
func (d *Dump) Peers(b []byte, id uint32, view string, peers []Peer) ([]byte, error) {
	if len(peers) > math.MaxUint16 {
		return b, fmt.Errorf("%d peers: a table of MRT has room for %d", len(peers), math.MaxUint16)
	}
	return d.record(b, peerIndexTable, func(b []byte) []byte {
		b = binary.BigEndian.AppendUint32(b, id)
		b = append(binary.BigEndian.AppendUint16(b, uint16(len(view))), view...)
		b = binary.BigEndian.AppendUint16(b, uint16(len(peers)))
		for _, p := range peers {
			kind := byte(peerAS4)
			if p.Addr.Is6() {
				kind |= peerIPv6
			}
			b = binary.BigEndian.AppendUint32(append(b, kind), p.ID)
			b = append(b, p.Addr.AsSlice()...)
			b = binary.BigEndian.AppendUint32(b, p.AS)
		}
		return b
	}), nil
}

// Prefix is the record of a prefix and its paths.
func (d *Dump) Prefix(b []byte, p netip.Prefix, paths []Entry) []byte {
	subtype := uint16(ribIPv4Unicast)
	if p.Addr().Is6() {
		subtype = ribIPv6Unicast
	}
	return d.record(b, subtype, func(b []byte) []byte {
		b = binary.BigEndian.AppendUint32(b, d.sequence)
		d.sequence++
		b = append(b, byte(p.Bits()))
		b = append(b, p.Addr().AsSlice()[:(p.Bits()+7)/8]...)
		b = binary.BigEndian.AppendUint16(b, uint16(len(paths)))
		for _, e := range paths {
			b = binary.BigEndian.AppendUint16(b, uint16(e.Peer))
			b = binary.BigEndian.AppendUint32(b, uint32(e.Originated.Unix()))
			at := len(b)
			b = append(b, 0, 0)
			if len(e.NextHop) == 4 && p.Addr().Is4() {
				b = append(b, transitive, nextHop, 4)
			} else {
				// Without family and prefixes, which the record has (section 4.3.4).
				b = append(b, optional, reach, byte(1+len(e.NextHop)), byte(len(e.NextHop)))
			}
			b = append(append(b, e.NextHop...), e.Attributes...)
			binary.BigEndian.PutUint16(b[at:], uint16(len(b)-at-2))
		}
		return b
	})
}

// record appends a record with the common header (RFC 6396 section 2).
func (d *Dump) record(b []byte, subtype uint16, body func([]byte) []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(d.at.Unix()))
	b = binary.BigEndian.AppendUint16(b, tableDumpV2)
	b = binary.BigEndian.AppendUint16(b, subtype)
	at := len(b)
	b = body(append(b, 0, 0, 0, 0))
	binary.BigEndian.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}
