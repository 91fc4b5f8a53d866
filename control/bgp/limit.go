package bgp

import (
	"time"

	"github.com/routerd/routerd/control/async"
)

// limitPause is for how long a peer that announced too much is left alone.
const limitPause = 5 * time.Minute

// settle takes a peer that announced too much out of GoBGP, after a while, and
// puts it back when its time has come, in the background. GoBGP itself would keep
// what the peer sent for the restart time. The caller holds e.mu.
func (e *gobgp) settle(p *gobgpPeer, after time.Duration) {
	const again = time.Second // what failed is tried
	e.wg.Go(func() {
		if async.Sleep(e.ctx, after) != nil {
			return
		}
		e.change.Lock()
		defer e.change.Unlock()
		e.mu.Lock()
		known, cfg, peer, back := e.peers[p.Addr] == p, e.policy.c, p.Peer, p.removed
		e.mu.Unlock()
		if !known || e.ctx.Err() != nil {
			return // changed meanwhile
		}
		var err error
		if back {
			err = e.add(e.ctx, cfg, peer, false)
		} else {
			err = e.remove(e.ctx, peer)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if err != nil {
			e.log.Warn("bgp peer beyond its prefix limit", "address", peer.Addr, "error", err)
			e.settle(p, again)
			return
		}
		p.removed = !back
		if back {
			p.limited, p.state = false, 0
			e.emit(event{kind: eventResumed, peer: peer.Addr})
			return
		}
		e.emit(event{kind: eventSwept, peer: peer.Addr})
		e.settle(p, limitPause)
	})
}
