package engine

import (
	"fmt"
	"net/netip"
	"strings"
)

// Identity is what a peer is known by, its [Peer.Addr], where another one has its address: the address with its port as the
// zone. Connections that come from an address with several peers cannot be told apart, so this side opens all their sessions.
func Identity(addr netip.Addr, port uint16) netip.Addr {
	return netip.AddrFrom16(addr.As16()).WithZone(fmt.Sprint(portMark, port))
}

// portMark begins such a zone; no device's name does.
const portMark = ":"

// Remote is the address of a peer that is known by an identity.
func Remote(id netip.Addr) netip.Addr {
	if strings.HasPrefix(id.Zone(), portMark) {
		return id.WithZone("").Unmap()
	}
	return id
}

// Name is an identity for people: the address, with its port where peers differ by it.
func Name(id netip.Addr) string {
	port, several := strings.CutPrefix(id.Zone(), portMark)
	switch a := Remote(id); {
	case !several:
		return id.String()
	case a.Is6():
		return fmt.Sprintf("[%s]:%s", a, port)
	default:
		return fmt.Sprintf("%s:%s", a, port)
	}
}

// hears reports whether a peer's connections can be told from another peer's.
func (p Peer) hears() bool { return Remote(p.Addr) == p.Addr }

// several reports whether an address has more than one peer. The caller holds e.mu.
func (e *Engine) several(addr netip.Addr) bool {
	for id := range e.sessions {
		if id != addr && Remote(id) == addr {
			return true
		}
	}
	return false
}
