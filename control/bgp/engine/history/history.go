package history

import (
	"encoding/binary"
	"fmt"
	"iter"
	"maps"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Peer is who is sent the messages.
type Peer struct {
	AS       uint32
	ID       uint32 // router id
	External bool   // the speaker is in another AS
	AS4      bool   // the session has AS numbers of four octets
	Ends     bool   // it is sent End-of-RIB, for it has graceful restart (RFC 4724)
	Session  wire.Session
}

// History is what a peer was sent in one session. Not safe for concurrent use.
type History struct {
	peer    Peer
	decoder wire.Decoder
	sets    *attrs.Table
	has     map[wire.Prefix]attrs.Handle
	family  [wire.Families]family

	// Needless is how many withdrawals were of what the peer did not have. RFC 4271 has
	// them do nothing.
	Needless int
}

type family struct {
	ended  bool
	demand map[wire.Prefix]bool // during a refresh (RFC 7313): what has not come again; nil: none is under way
}

// New returns the history of a session that has just begun.
func New(p Peer) *History {
	return &History{peer: p, decoder: wire.Decoder{Session: p.Session}, sets: attrs.NewTable(), has: map[wire.Prefix]attrs.Handle{}}
}

// Bytes takes whole messages, one after the other.
func (h *History) Bytes(b []byte) error {
	for len(b) > 0 {
		t, body, n, err := wire.Frame(b, wire.MaxExtended)
		if err != nil {
			return fmt.Errorf("frame: %w", err)
		}
		if n == 0 {
			return fmt.Errorf("%d bytes are no whole message: %x", len(b), b)
		}
		if err := h.Message(t, body); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// Message takes a message. An error says which rule it breaks.
func (h *History) Message(t wire.Type, body []byte) error {
	switch t {
	case wire.RouteRefresh:
		return h.demarcation(body)
	case wire.UpdateMessage:
		return h.update(body)
	case wire.Keepalive:
		return nil
	default:
		return fmt.Errorf("message of type %d in an established session", t)
	}
}

// demarcation is where a refresh begins or ends; what has not come in between is gone.
func (h *History) demarcation(body []byte) error {
	if len(body) != 4 {
		return fmt.Errorf("ROUTE-REFRESH of %d bytes", len(body))
	}
	f := wire.Family(binary.BigEndian.Uint16(body) - 1)
	if f >= wire.Families {
		return fmt.Errorf("ROUTE-REFRESH of AFI %d", binary.BigEndian.Uint16(body))
	}
	s := &h.family[f]
	switch body[2] {
	case 0: // a request
	case 1:
		if s.demand != nil {
			return fmt.Errorf("a refresh of %s begins in another", f)
		}
		if h.peer.Ends && !s.ended { // RFC 7313 section 4
			return fmt.Errorf("a refresh of %s begins before End-of-RIB", f)
		}
		s.demand = map[wire.Prefix]bool{}
		for p := range h.has {
			if p.Family == f {
				s.demand[p] = true
			}
		}
	case 2:
		if s.demand == nil {
			return fmt.Errorf("a refresh of %s ends that did not begin", f)
		}
		for p := range s.demand {
			h.lose(p)
		}
		s.demand = nil
	default:
		return fmt.Errorf("ROUTE-REFRESH of subtype %d", body[2])
	}
	return nil
}

func (h *History) update(body []byte) error {
	var u wire.Update
	if err := h.decoder.Decode(body, &u); err != nil {
		return fmt.Errorf("UPDATE %x: %w", body, err)
	}
	if f, ok := u.EndOfRIB(); ok {
		if h.family[f].ended {
			return fmt.Errorf("a second End-of-RIB of %s", f)
		}
		h.family[f].ended = true
		return nil
	}
	withdrawn := map[wire.Prefix]bool{}
	for _, list := range []wire.NLRI{u.Withdrawn, u.Unreach} {
		for p, ok := list.Next(); ok; p, ok = list.Next() {
			if withdrawn[p] = true; !h.lose(p) {
				h.Needless++
			}
		}
	}
	if err := h.announced(u.Announced, u.Attrs, nil, withdrawn); err != nil {
		return err
	}
	return h.announced(u.Reach, u.Attrs, u.NextHop, withdrawn)
}

// announced takes prefixes with one set of attributes.
func (h *History) announced(list wire.NLRI, attributes, hop []byte, withdrawn map[wire.Prefix]bool) error {
	if list.Empty() {
		return nil
	}
	set, result, err := h.sets.Intern(attrs.Context{External: h.peer.External, AS4: h.peer.AS4, Reachable: true}, attributes, hop)
	if err != nil || result.Verdict != attrs.Accept {
		return fmt.Errorf("attributes %x: %v, %w", attributes, result, err)
	}
	defer h.sets.Release(set)
	if err := h.looped(set); err != nil {
		return fmt.Errorf("attributes %x: %w", attributes, err)
	}
	for p, ok := list.Next(); ok; p, ok = list.Next() {
		if withdrawn[p] {
			return fmt.Errorf("%s is withdrawn and announced in one UPDATE", p.Netip())
		}
		h.lose(p)
		h.sets.Retain(set)
		h.has[p] = set
	}
	return nil
}

// looped says why a path must not have been sent to the peer: it has been there.
func (h *History) looped(set attrs.Handle) error {
	v := h.sets.View(set)
	if v.PathLen > 0 && v.CountAS(h.peer.AS) > 0 {
		return fmt.Errorf("the peer's AS %d is in AS_PATH %s", h.peer.AS, v.PathText())
	}
	if v.Flags&attrs.HasOriginator != 0 && v.Originator == h.peer.ID {
		return fmt.Errorf("the peer is the ORIGINATOR_ID, %d", v.Originator)
	}
	if h.peer.External && v.Flags&(attrs.HasLocalPref|attrs.HasOriginator) != 0 {
		return fmt.Errorf("LOCAL_PREF or ORIGINATOR_ID goes to another AS")
	}
	return nil
}

// lose forgets what the peer has of a prefix, and reports whether it had anything.
func (h *History) lose(p wire.Prefix) bool {
	delete(h.family[p.Family].demand, p)
	set, ok := h.has[p]
	if ok {
		h.sets.Release(set)
		delete(h.has, p)
	}
	return ok
}

// Ended reports whether End-of-RIB of a family came.
func (h *History) Ended(f wire.Family) bool { return h.family[f].ended }

// Len is how many prefixes the peer has.
func (h *History) Len() int { return len(h.has) }

// All yields what the peer has.
func (h *History) All() iter.Seq2[wire.Prefix, attrs.View] {
	return func(yield func(wire.Prefix, attrs.View) bool) {
		for p, set := range maps.All(h.has) {
			if !yield(p, h.sets.View(set)) {
				return
			}
		}
	}
}
