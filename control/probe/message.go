package probe

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"net/netip"
)

// kind says what a message is for.
type kind uint8

// The kinds of message: over the underlay, and from kindEcho on through tunnels.
// The lower four bits are the number on the wire.
const (
	kindRequest  kind = 0x01 // answered by kindAnswer
	kindAnswer   kind = 0x02
	kindAnyPort  kind = 0x03 // a request from a port that says nothing of the host's mapping
	kindEcho     kind = 0x11 // answered by kindReply
	kindReply    kind = 0x12 // the nonce and the index of an echo that arrived whole
	kindTransfer kind = 0x13 // opens a TCP transfer of size bytes
	kindReceipt  kind = 0x14 // ends it: size bytes arrived, with their hash in the nonce
	// The same layout, outside of tunnels. Hosts of earlier versions do not answer.
	kindPlain      kind = 0x15 // answered by kindPlainReply
	kindPlainReply kind = 0x16
)

func (k kind) tunnel() bool { return k >= kindEcho }

// message is what two probers send each other.
type message struct {
	kind  kind
	nonce uint64 // of the request; an answer repeats it

	// Over the underlay.
	from, to string // names of nodes
	time     int64  // Unix nanoseconds of the sender's clock
	// seen is where a request came from, as the answering host saw it: the
	// prober's address after all translation. The port is 0 where the
	// encapsulation has none. Not valid in a request.
	seen netip.AddrPort

	// Through a tunnel.
	index uint32 // of the packet within the request
	size  uint32 // of a transfer, in bytes
}

// The wire format, in network byte order: magic (4 bytes), version, kind, length
// of from, length of to, nonce (8). Over the underlay: time (8), port seen (2),
// length of the address seen, zero, from, to, address seen, MAC; what follows is
// padding without meaning. Through a tunnel, where the lengths are zero: index
// (4), size (4), MAC; what follows is padding that depends on the nonce, and the
// MAC covers it, so that a packet which was spoilt does not count as delivered.
const (
	underlayMagic = 0x72744452 // "rtDR"
	tunnelMagic   = 0x72647062 // "rdpb"
	version       = 1

	underlayLen = 28 // without names and address
	tunnelLen   = 24
	macLen      = 16 // of HMAC-SHA256, truncated (RFC 2104, section 5)
	// messageLen is the length of a message through a tunnel, without padding.
	messageLen = tunnelLen + macLen

	maxName = 253
	// maxMessage is the longest message over the underlay, without padding.
	maxMessage = underlayLen + 2*maxName + 16 + macLen
)

// The errors of [decode].
var (
	errGarbage = errors.New("not a probe")
	errMAC     = errors.New("the message authentication code is wrong")
)

// newNonce returns a number that nobody can guess.
func newNonce() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.BigEndian.Uint64(b[:])
}

// appendMessage appends the encoding of m to b, padded to length bytes where that
// is more. Names longer than a node's may be are a programmer's error and give a
// message that nobody can read.
func appendMessage(b []byte, m message, key []byte, length int) []byte {
	return new(authenticator).appendMessage(b, m, key, length)
}

// appendMessage is [appendMessage].
func (a *authenticator) appendMessage(b []byte, m message, key []byte, length int) []byte {
	start := len(b)
	magic := uint32(underlayMagic)
	if m.kind.tunnel() {
		magic = tunnelMagic
	}
	b = binary.BigEndian.AppendUint32(b, magic)
	b = append(b, version, byte(m.kind&0xf), byte(len(m.from)), byte(len(m.to)))
	b = binary.BigEndian.AppendUint64(b, m.nonce)
	if m.kind.tunnel() {
		b = binary.BigEndian.AppendUint32(b, m.index)
		b = binary.BigEndian.AppendUint32(b, m.size)
	} else {
		var addr []byte
		if m.seen.IsValid() {
			addr = m.seen.Addr().AsSlice()
		}
		b = binary.BigEndian.AppendUint64(b, uint64(m.time))
		b = binary.BigEndian.AppendUint16(b, m.seen.Port())
		b = append(b, byte(len(addr)), 0)
		b = append(append(append(b, m.from...), m.to...), addr...)
	}
	end := len(b)
	b = append(b, make([]byte, max(macLen, start+length-end))...)
	var padding []byte
	if m.kind.tunnel() {
		padding = b[end+macLen:]
		fill(padding, m.nonce+uint64(m.index))
	}
	copy(b[end:], a.sum(key, b[start:end], padding))
	return b
}

// decode reads a message and checks its authentication code. Anything may be
// in b; an error matches errGarbage or errMAC.
func decode(b, key []byte) (message, error) {
	if len(b) < messageLen || b[5] > 0xf {
		return message{}, errGarbage
	}
	m := message{kind: kind(b[5]), nonce: binary.BigEndian.Uint64(b[8:])}
	switch binary.BigEndian.Uint32(b) {
	case underlayMagic:
	case tunnelMagic:
		m.kind |= kindEcho &^ 0xf
	default:
		return message{}, errGarbage
	}
	if b[4] != version {
		return message{}, fmt.Errorf("%w: version %d, want %d", errGarbage, b[4], version)
	}
	n, ok := m.read(b)
	if !ok || len(b) < n+macLen {
		return message{}, errGarbage
	}
	var padding []byte
	if m.kind.tunnel() {
		padding = b[n+macLen:]
	}
	if !hmac.Equal(b[n:n+macLen], new(authenticator).sum(key, b[:n], padding)) {
		return message{}, errMAC
	}
	return m, nil
}

// read reads what follows the nonce, and returns how long the message is without
// its code.
func (m *message) read(b []byte) (n int, ok bool) {
	from, to := int(b[6]), int(b[7])
	if m.kind.tunnel() {
		m.index, m.size = binary.BigEndian.Uint32(b[16:]), binary.BigEndian.Uint32(b[20:])
		return tunnelLen, m.kind >= kindEcho && m.kind <= kindPlainReply && from+to == 0
	}
	addr := int(b[26])
	n = underlayLen + from + to + addr
	switch {
	case m.kind < kindRequest || m.kind > kindAnyPort, b[27] != 0, len(b) < n,
		from == 0, from > maxName, to == 0, to > maxName,
		m.kind != kindAnswer && addr != 0, m.kind == kindAnswer && addr != 4 && addr != 16:
		return 0, false
	}
	m.time = int64(binary.BigEndian.Uint64(b[16:]))
	m.from, m.to = string(b[underlayLen:underlayLen+from]), string(b[underlayLen+from:underlayLen+from+to])
	if a, ok := netip.AddrFromSlice(b[n-addr : n]); ok {
		m.seen = netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[24:]))
	}
	return n, true
}

// authenticator computes authentication codes. One that is used again needs no memory
// for the next code with the same key. One goroutine uses it; its zero value is ready.
type authenticator struct {
	key  []byte
	hash hash.Hash // nil: with no key yet
	code [sha256.Size]byte
}

// sum is the authentication code of a message and its padding, until the next call.
func (a *authenticator) sum(key, b, padding []byte) []byte {
	if a.hash == nil || !bytes.Equal(a.key, key) {
		a.key, a.hash = key, hmac.New(sha256.New, key)
	} else {
		a.hash.Reset()
	}
	a.hash.Write(b)
	a.hash.Write(padding)
	return a.hash.Sum(a.code[:0])[:macLen]
}

// fill writes bytes that differ from packet to packet, so that parts of two
// which were mixed up do not look whole (splitmix64).
func fill(b []byte, seed uint64) {
	for i := 0; i < len(b); i += 8 {
		seed += 0x9e3779b97f4a7c15
		z := (seed ^ seed>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], z^z>>31)
		copy(b[i:], w[:])
	}
}
