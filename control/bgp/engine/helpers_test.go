package engine

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Refresh asks a peer to send all of a family again (RFC 2918).
func (e *Engine) Refresh(peer netip.Addr, f wire.Family) (err error) {
	e.locked(func(c *core) {
		p := c.peers[peer]
		switch {
		case p == nil || p.member == nil:
			err = fmt.Errorf("ask %s for its routes: no session", peer)
		case !p.session.Refresh || !p.session.Wire.Family[f].Enabled:
			err = fmt.Errorf("ask %s for its %s routes: the session has no route refresh for them", peer, f)
		default:
			body := binary.BigEndian.AppendUint16(nil, f.AFI())
			p.member.Send(wire.AppendMessage(nil, wire.RouteRefresh, append(body, 0, 1)))
		}
	})
	return err
}

// Listening returns where the engine listens: the ports that the kernel chose, too.
func (e *Engine) Listening() (out []netip.AddrPort) {
	e.setup.Lock()
	defer e.setup.Unlock()
	for _, l := range e.listeners {
		out = append(out, l.Addr())
	}
	return out
}
