// Package bmp reports to collectors what a BGP speaker receives and chooses (BMP, RFC 7854, RFC 9069):
// the messages, and the connections to the collectors. What is in the tables is its caller's.
package bmp

import (
	"encoding/binary"
	"net/netip"
	"time"
)

const (
	version      = 3
	headerLen    = 6
	bgpHeaderLen = 19
)

// Types of messages (RFC 7854 section 4.1).
const (
	routeMonitoring byte = iota
	statisticsReport
	peerDown
	peerUp
	initiation
	termination
)

// View is which table a message is about.
type View uint8

// The views.
const (
	PrePolicy  View = iota // what a peer announced
	PostPolicy             // what import lets in of it, as that has changed it
	LocRIB                 // what was chosen (RFC 9069)
)

// Bits of the per-peer header's flags (RFC 7854 section 4.2).
const (
	flagIPv6       = 0x80
	flagPostPolicy = 0x40
	peerLocRIB     = 3 // a type of peer (RFC 9069 section 4.1)
)

// Peer is whom a message is about; of LocRIB it is the speaker itself.
type Peer struct {
	Addr netip.Addr
	AS   uint32
	ID   uint32 // BGP identifier
}

// begin appends the common header of a message, whose length finish fills in.
func begin(b []byte, kind byte) []byte { return append(b, version, 0, 0, 0, 0, kind) }

func finish(b []byte, start int) []byte {
	binary.BigEndian.PutUint32(b[start+1:], uint32(len(b)-start))
	return b
}

// header appends the per-peer header (RFC 7854 section 4.2, RFC 9069 section 4.1).
func (p Peer) header(b []byte, v View, at time.Time) []byte {
	kind, flags := byte(0), byte(0)
	addr := make([]byte, 16)
	switch {
	case v == LocRIB:
		kind = peerLocRIB
	case p.Addr.Is6():
		flags = flagIPv6
		copy(addr, p.Addr.AsSlice())
	default:
		copy(addr[12:], p.Addr.AsSlice())
	}
	if v == PostPolicy {
		flags |= flagPostPolicy
	}
	b = append(append(b, kind, flags, 0, 0, 0, 0, 0, 0, 0, 0), addr...)
	b = binary.BigEndian.AppendUint32(b, p.AS)
	b = binary.BigEndian.AppendUint32(b, p.ID)
	b = binary.BigEndian.AppendUint32(b, uint32(at.Unix()))
	return binary.BigEndian.AppendUint32(b, uint32(at.Nanosecond()/1000))
}

func text(b []byte, kind uint16, s string) []byte {
	b = binary.BigEndian.AppendUint16(b, kind)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

// Initiation appends the message that begins a connection: who speaks (RFC 7854 section 4.3).
func Initiation(b []byte, name, description string) []byte {
	start := len(b)
	b = text(begin(b, initiation), 1, description)
	return finish(text(b, 2, name), start)
}

// Why a connection is ended (RFC 7854 section 4.5).
const (
	ClosedByConfiguration uint16 = iota
	Unspecified
	OutOfResources
)

// Termination appends the message that ends a connection.
func Termination(b []byte, reason uint16, says string) []byte {
	start := len(b)
	b = text(begin(b, termination), 0, says)
	b = append(b, 0, 1, 0, 2)
	return finish(binary.BigEndian.AppendUint16(b, reason), start)
}

// Up appends a Peer Up: a session of the peer is established, with the OPENs of both sides,
// which are whole messages (RFC 7854 section 4.10). Of LocRIB name is that of the table.
func (p Peer) Up(b []byte, v View, at time.Time, local netip.AddrPort, remotePort uint16, sent, received []byte, name string) []byte {
	start := len(b)
	b = p.header(begin(b, peerUp), v, at)
	addr := make([]byte, 16)
	switch {
	case v == LocRIB: // section 5.1 of RFC 9069: zero
	case local.Addr().Is4():
		copy(addr[12:], local.Addr().AsSlice())
	default:
		copy(addr, local.Addr().AsSlice())
	}
	b = append(b, addr...)
	b = binary.BigEndian.AppendUint16(b, local.Port())
	b = binary.BigEndian.AppendUint16(b, remotePort)
	b = append(append(b, sent...), received...)
	if name != "" {
		b = text(b, 3, name)
	}
	return finish(b, start)
}

// Why a session ended (RFC 7854 section 4.9).
const (
	SentNotification     byte = iota + 1 // data is the message
	LocalEvent                           // data is the event of the state machine, two bytes
	ReceivedNotification                 // data is the message
	RemoteEvent
	Deconfigured
)

// Down appends a Peer Down.
func (p Peer) Down(b []byte, v View, at time.Time, reason byte, data []byte) []byte {
	start := len(b)
	b = append(p.header(begin(b, peerDown), v, at), reason)
	return finish(append(b, data...), start)
}

// Routes appends a Route Monitoring for each of the UPDATEs of a buffer (RFC 7854 section 4.6),
// with AS numbers of four octets.
func (p Peer) Routes(b []byte, v View, at time.Time, updates []byte) []byte {
	for len(updates) >= bgpHeaderLen {
		n := int(binary.BigEndian.Uint16(updates[bgpHeaderLen-3:]))
		start := len(b)
		b = finish(append(p.header(begin(b, routeMonitoring), v, at), updates[:n]...), start)
		updates = updates[n:]
	}
	return b
}

// Types of statistics (RFC 7854 section 4.8, RFC 8671 section 6.1).
const (
	AdjRIBIn        = 7 // gauges of all families
	LocRIBRoutes    = 8
	AdjRIBInOf      = 9 // and of one
	LocRIBRoutesOf  = 10
	AdjRIBOutPost   = 15
	AdjRIBOutPostOf = 17
)

// Stat is a gauge; that of one family has its AFI, the others 0.
type Stat struct {
	Type  uint16
	AFI   uint16
	Value uint64
}

// Statistics appends a Statistics Report.
func (p Peer) Statistics(b []byte, v View, at time.Time, stats []Stat) []byte {
	start := len(b)
	b = p.header(begin(b, statisticsReport), v, at)
	b = binary.BigEndian.AppendUint32(b, uint32(len(stats)))
	for _, s := range stats {
		b = binary.BigEndian.AppendUint16(b, s.Type)
		if s.AFI == 0 {
			b = append(b, 0, 8)
		} else {
			b = append(b, 0, 11)
			b = append(binary.BigEndian.AppendUint16(b, s.AFI), 1)
		}
		b = binary.BigEndian.AppendUint64(b, s.Value)
	}
	return finish(b, start)
}
