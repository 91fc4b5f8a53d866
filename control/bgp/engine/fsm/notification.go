package fsm

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Notification is what a NOTIFICATION says (RFC 4271 section 4.5).
type Notification struct {
	Code, Subcode uint8
	Data          []byte
}

// Cease returns the NOTIFICATION that ends a session deliberately. What it says to
// people is text, of which 255 bytes are sent with CeaseShutdown and CeaseReset (RFC
// 9003), and nothing otherwise.
func Cease(subcode uint8, text string) Notification {
	n := Notification{Code: CodeCease, Subcode: subcode}
	if text == "" || subcode != CeaseShutdown && subcode != CeaseReset {
		return n
	}
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > 255 {
		end := 255
		for !utf8.RuneStart(text[end]) {
			end--
		}
		text = text[:end]
	}
	n.Data = append([]byte{byte(len(text))}, text...)
	return n
}

// fault is the NOTIFICATION that a fault leads to.
func fault(e *wire.Error) Notification {
	return Notification{Code: e.Code, Subcode: e.Subcode, Data: e.Data}
}

// Append appends the message. Data that does not fit is cut.
func (n Notification) Append(b []byte) []byte {
	body := append([]byte{n.Code, n.Subcode}, n.Data[:min(len(n.Data), wire.MaxLen-wire.HeaderLen-2)]...)
	return wire.AppendMessage(b, wire.Notification, body)
}

// ParseNotification reads the body of a NOTIFICATION, of at least two bytes, which
// [wire.Frame] has made sure of. The result does not alias it.
func ParseNotification(body []byte) Notification {
	return Notification{Code: body[0], Subcode: body[1], Data: append([]byte(nil), body[2:]...)}
}

// final reports whether a Cease means that the routes are to go, so that it has to be
// a hard reset where both sides have RFC 8538.
func (n Notification) final() bool {
	return n.Code == CodeCease && (n.Subcode == CeaseMaxPrefixes || n.Subcode == CeaseShutdown || n.Subcode == CeaseDeconfigured || n.Subcode == CeaseBFDDown)
}

// harden wraps n into a hard reset (RFC 8538 section 3.1).
func (n Notification) harden() Notification {
	return Notification{Code: CodeCease, Subcode: CeaseHardReset, Data: append([]byte{n.Code, n.Subcode}, n.Data...)}
}

// HardReset returns what a hard reset was sent for, and true; n itself otherwise.
func (n Notification) HardReset() (inner Notification, hard bool) {
	switch {
	case n.Code != CodeCease || n.Subcode != CeaseHardReset:
		return n, false
	case len(n.Data) < 2:
		return Notification{Code: CodeCease}, true
	}
	return Notification{Code: n.Data[0], Subcode: n.Data[1], Data: n.Data[2:]}, true
}

// Communication is what the other side says to people about its shutdown (RFC
// 9003); empty: nothing, or nothing that is text. Control characters are replaced,
// for it goes to logs and terminals.
func (n Notification) Communication() string {
	n, _ = n.HardReset()
	if n.Code != CodeCease || n.Subcode != CeaseShutdown && n.Subcode != CeaseReset || len(n.Data) == 0 || int(n.Data[0]) > len(n.Data)-1 {
		return ""
	}
	text := string(n.Data[1 : 1+n.Data[0]])
	if !utf8.ValidString(text) {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 { // C0, C1, and what turns the direction of text
			return ' '
		}
		return r
	}, text)
}

func (n Notification) String() string {
	inner, hard := n.HardReset()
	text := fmt.Sprintf("NOTIFICATION %d/%d", inner.Code, inner.Subcode)
	if hard {
		text += ", hard reset"
	}
	if c := n.Communication(); c != "" {
		text += fmt.Sprintf(": %q", c)
	}
	return text
}
