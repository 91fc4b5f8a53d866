package probe

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// kind says what a message is for.
type kind uint8

// The kinds of message.
const (
	kindEcho     kind = iota + 1 // answered by kindReply
	kindReply                    // the nonce and the index of an echo that came through whole
	kindTransfer                 // opens a TCP transfer of Size bytes
	kindReceipt                  // ends it: Size bytes arrived, with their hash in the nonce
)

// message is what travels between two hosts' probes. Every one is signed with
// the cluster's key over its whole length, so that a packet which was spoilt
// on the way does not count as delivered and strangers get no answer.
type message struct {
	Kind  kind
	Nonce uint64 // of the question; an answer repeats it
	Index uint32 // of the packet within the question
	Size  uint32 // of a transfer, in bytes
}

// The layout: magic 4, version 1, kind 1, zero 2, nonce 8, index 4, size 4,
// signature 16; what follows is padding that depends on the nonce.
const (
	headerLen    = 24
	signatureLen = 16
	messageLen   = headerLen + signatureLen
	wireVersion  = 1
)

const magic = "rdpb"

// errForeign says that a packet is not a message of this cluster.
var errForeign = errors.New("not a probe of this cluster")

// encode writes the message into b, which it fills to its whole length: at
// least messageLen bytes.
func (m message) encode(b, key []byte) {
	clear(b[:messageLen])
	copy(b, magic)
	b[4], b[5] = wireVersion, byte(m.Kind)
	binary.BigEndian.PutUint64(b[8:], m.Nonce)
	binary.BigEndian.PutUint32(b[16:], m.Index)
	binary.BigEndian.PutUint32(b[20:], m.Size)
	fill(b[messageLen:], m.Nonce+uint64(m.Index))
	copy(b[headerLen:messageLen], sign(b, key))
}

// decode reads a message that was encoded with the same key.
func decode(b, key []byte) (message, error) {
	if len(b) < messageLen || string(b[:4]) != magic || b[4] != wireVersion {
		return message{}, errForeign
	}
	if !hmac.Equal(b[headerLen:messageLen], sign(b, key)) {
		return message{}, errForeign
	}
	return message{
		Kind: kind(b[5]), Nonce: binary.BigEndian.Uint64(b[8:]),
		Index: binary.BigEndian.Uint32(b[16:]), Size: binary.BigEndian.Uint32(b[20:]),
	}, nil
}

// sign covers all but the signature itself.
func sign(b, key []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(b[:headerLen])
	h.Write(b[messageLen:])
	return h.Sum(nil)[:signatureLen]
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
