package reach

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// message is a probe or the answer to one.
type message struct {
	answer   bool
	anyPort  bool   // a request from a port that says nothing of the host's mapping
	from, to string // names of nodes
	nonce    uint64 // the prober's; the answer has the request's
	time     int64  // Unix nanoseconds of the sender's clock

	// seen is where the request came from, as the answering host saw it: the
	// prober's address after all translation. The port is 0 where the form has
	// none. Not valid in a request.
	seen netip.AddrPort
}

// The wire format, in network byte order: magic (4 bytes), version, kind,
// length of from, length of to, nonce (8), time (8), port seen (2), length of
// the address seen, zero, from, to, address seen, and the MAC of all that.
// What follows is padding, which a probe of a certain size has; it is not
// authenticated, for only its length says anything.
const (
	magic   = 0x72744452 // "rtDR"
	version = 1

	kindRequest = 1
	kindAnswer  = 2
	kindAnyPort = 3 // a request from a port that the kernel chose

	fixedLen = 28
	macLen   = 16 // of HMAC-SHA256, truncated (RFC 2104, section 5)

	maxName = 253
	// maxMessage is the longest message without padding.
	maxMessage = fixedLen + 2*maxName + 16 + macLen
)

// The errors of [decode].
var (
	errGarbage = errors.New("not a probe")
	errMAC     = errors.New("the message authentication code is wrong")
)

// appendMessage appends the encoding of m to b. Names longer than a node's may
// be are a programmer's error and give a message that nobody can read.
func appendMessage(b []byte, m message, key []byte) []byte {
	start := len(b)
	kind := byte(kindRequest)
	switch {
	case m.answer:
		kind = kindAnswer
	case m.anyPort:
		kind = kindAnyPort
	}
	var addr []byte
	if m.seen.IsValid() {
		addr = m.seen.Addr().AsSlice()
	}
	b = binary.BigEndian.AppendUint32(b, magic)
	b = append(b, version, kind, byte(len(m.from)), byte(len(m.to)))
	b = binary.BigEndian.AppendUint64(b, m.nonce)
	b = binary.BigEndian.AppendUint64(b, uint64(m.time))
	b = binary.BigEndian.AppendUint16(b, m.seen.Port())
	b = append(b, byte(len(addr)), 0)
	b = append(b, m.from...)
	b = append(b, m.to...)
	b = append(b, addr...)
	return append(b, sum(b[start:], key)...)
}

func sum(b, key []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(b) //nolint:errcheck // hash.Hash never returns an error
	return h.Sum(nil)[:macLen]
}

// decode reads a message and checks its authentication code. Anything may be
// in b; an error matches errGarbage or errMAC.
func decode(b, key []byte) (message, error) {
	if len(b) < fixedLen+macLen || binary.BigEndian.Uint32(b) != magic {
		return message{}, errGarbage
	}
	if b[4] != version {
		return message{}, fmt.Errorf("%w: version %d, want %d", errGarbage, b[4], version)
	}
	kind, from, to, addr := b[5], int(b[6]), int(b[7]), int(b[26])
	n := fixedLen + from + to + addr
	switch {
	case kind < kindRequest || kind > kindAnyPort, b[27] != 0,
		from == 0, from > maxName, to == 0, to > maxName,
		kind != kindAnswer && addr != 0, kind == kindAnswer && addr != 4 && addr != 16,
		len(b) < n+macLen:
		return message{}, errGarbage
	}
	if !hmac.Equal(b[n:n+macLen], sum(b[:n], key)) {
		return message{}, errMAC
	}
	m := message{
		answer: kind == kindAnswer, anyPort: kind == kindAnyPort,
		nonce: binary.BigEndian.Uint64(b[8:]), time: int64(binary.BigEndian.Uint64(b[16:])),
		from: string(b[fixedLen : fixedLen+from]), to: string(b[fixedLen+from : fixedLen+from+to]),
	}
	if a, ok := netip.AddrFromSlice(b[n-addr : n]); ok && addr > 0 {
		m.seen = netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[24:]))
	}
	return m, nil
}
