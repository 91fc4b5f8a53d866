package wire

import (
	"encoding/binary"
	"fmt"
)

// Packer packs prefixes into UPDATEs, one message after the other in one buffer.
// Its caller says what the next prefixes have in common (Announce, Withdraw),
// then each of them (Add), and takes what has come together (Bytes). The zero
// Packer packs messages of [MaxLen] without path identifiers.
type Packer struct {
	// Longest is the size of a message: 0 for MaxLen, MaxExtended when the peers
	// accept it (RFC 8654).
	Longest int
	// AddPath says that the peers accept path identifiers of a family (RFC 7911).
	AddPath [Families]bool

	buf    []byte
	head   []byte // the message's body before its prefixes
	tail   []byte // and behind them
	family Family
	open   bool // buf ends with a message that has room
	start  int  // of that message in buf
	fields []lengthField
}

// lengthField is a length of two bytes that counts the prefixes too.
type lengthField struct {
	at   int // in head
	base int // without the prefixes
}

// Announce begins messages that announce prefixes of a family with one set of path
// attributes, which are in ascending order and without NEXT_HOP and the two that
// hold prefixes. A next hop of 4 bytes with IPv4 becomes NEXT_HOP, any other goes
// into MP_REACH_NLRI. It fails if there is no room for a prefix.
func (p *Packer) Announce(f Family, nextHop, attrs []byte) error {
	p.close()
	p.family = f
	p.head = append(p.head[:0], 0, 0, 0, 0) // no Withdrawn Routes; length of the attributes
	p.tail = p.tail[:0]
	if f == IPv4 && len(nextHop) == 4 {
		before := lower(attrs, attrNextHop)
		p.head = append(p.head, attrs[:before]...)
		p.head = append(p.head, flagTransit, attrNextHop, 4)
		p.head = append(p.head, nextHop...)
		p.head = append(p.head, attrs[before:]...)
		p.fields = p.fields[:0]
		binary.BigEndian.PutUint16(p.head[2:], uint16(len(p.head)-4))
	} else {
		// First, so that a receiver finds it whatever is wrong with the others (RFC 7606
		// section 5.1).
		p.head = append(p.head, flagOptional|flagExtended, attrReach, 0, 0, 0, byte(f.AFI()), safiUnicast, byte(len(nextHop)))
		p.head = append(append(p.head, nextHop...), 0)
		p.tail = append(p.tail, attrs...)
		p.fields = append(p.fields[:0], lengthField{2, len(p.head) - 4 + len(attrs)}, lengthField{6, len(p.head) - 8})
	}
	if room := p.longest() - HeaderLen - len(p.head) - len(p.tail); room < p.largest() {
		return fmt.Errorf("path attributes of %d bytes leave %d of %d for prefixes", len(attrs), max(room, 0), p.longest())
	}
	return nil
}

// Withdraw begins messages that withdraw prefixes of a family.
func (p *Packer) Withdraw(f Family) {
	p.close()
	p.family, p.head, p.tail = f, p.head[:0], p.tail[:0]
	if f == IPv4 {
		p.head = append(p.head, 0, 0)
		p.tail = append(p.tail, 0, 0) // no path attributes
		p.fields = append(p.fields[:0], lengthField{})
		return
	}
	p.head = append(p.head, 0, 0, 0, 0, flagOptional|flagExtended, attrUnreach, 0, 0, 0, byte(f.AFI()), safiUnicast)
	p.fields = append(p.fields[:0], lengthField{2, 7}, lengthField{6, 3})
}

// Add packs one more prefix, of the family that was begun.
func (p *Packer) Add(prefix Prefix) {
	size := 1 + (int(prefix.Bits)+7)/8
	if p.AddPath[p.family] {
		size += 4
	}
	if p.open && len(p.buf)-p.start+size+len(p.tail) > p.longest() {
		p.close()
	}
	if !p.open {
		p.open, p.start = true, len(p.buf)
		p.buf = append(appendHeader(p.buf, UpdateMessage), p.head...)
	}
	p.buf = appendPrefix(p.buf, prefix, p.AddPath[p.family])
}

// EndOfRIB packs the mark that a family's table was sent whole (RFC 4724 section 2).
func (p *Packer) EndOfRIB(f Family) {
	p.Withdraw(f)
	p.start, p.open = len(p.buf), true
	p.buf = append(appendHeader(p.buf, UpdateMessage), p.head...)
	p.close()
}

// Bytes ends the last message and returns all since Reset.
func (p *Packer) Bytes() []byte {
	p.close()
	return p.buf
}

// Len is the size of what was packed since Reset.
func (p *Packer) Len() int { return len(p.buf) + len(p.tail) }

// Reset makes room: what Bytes returned is overwritten.
func (p *Packer) Reset() {
	p.close()
	p.buf = p.buf[:0]
}

// close ends the open message.
func (p *Packer) close() {
	if !p.open {
		return
	}
	p.open = false
	body := p.start + HeaderLen
	prefixes := len(p.buf) - body - len(p.head)
	for _, f := range p.fields {
		binary.BigEndian.PutUint16(p.buf[body+f.at:], uint16(f.base+prefixes))
	}
	p.buf = append(p.buf, p.tail...)
	finish(p.buf, p.start)
}

func (p *Packer) longest() int {
	if p.Longest == 0 {
		return MaxLen
	}
	return p.Longest
}

// largest is the most that one prefix of the family needs.
func (p *Packer) largest() int {
	size := 1 + p.family.MaxBits()/8
	if p.AddPath[p.family] {
		size += 4
	}
	return size
}

// lower returns where in a list the attributes of types below t end.
func lower(attrs []byte, t uint8) int {
	at := 0
	for at < len(attrs) && attrs[min(at+1, len(attrs)-1)] < t {
		_, size := attribute(attrs[at:])
		if size == 0 {
			break
		}
		at += size
	}
	return at
}
