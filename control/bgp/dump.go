package bgp

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/mrt"
)

// dumpPart is about how many bytes of a dump are handed over at once.
const dumpPart = 256 << 10

// Dump hands over the table in MRT's format (RFC 6396), in parts: every path that was let in
// and what this node originates, or what all peers sent, before import judged it. A part is
// valid until write returns.
func (s *Speaker) Dump(ctx context.Context, received bool, write func([]byte) error) error {
	s.mu.Lock()
	e, p := s.engine, s.policy
	s.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.dump(ctx, p, received, write)
}

// Dump hands over the table as [Speaker.Dump] does.
func (c *Controller) Dump(ctx context.Context, received bool, write func([]byte) error) error {
	return c.speaker.Dump(ctx, received, write)
}

func (b *backend) dump(ctx context.Context, by *policy, received bool, write func([]byte) error) error {
	router := by.c.RouterID.As4()
	id := binary.BigEndian.Uint32(router[:])
	list := []mrt.Peer{{ID: id, Addr: netip.IPv4Unspecified(), AS: by.c.ASN}} // what begins here
	number := map[netip.Addr]int{{}: 0}
	for _, p := range b.Peers() {
		number[p.Addr] = len(list)
		list = append(list, mrt.Peer{ID: p.RouterID, Addr: engine.Remote(p.Addr).WithZone(""), AS: by.peer(p.Addr).ASN})
	}
	d := mrt.NewDump(time.Now())
	out, err := d.Peers(nil, id, "", list)
	if err != nil {
		return err
	}
	var prefix netip.Prefix
	var paths []mrt.Entry
	flush := func() {
		if len(paths) > 0 {
			out = d.Prefix(out, prefix, paths)
		}
		paths = paths[:0]
	}
	hand := func() error {
		for part := range slices.Chunk(out, dumpPart) {
			if err := write(part); err != nil {
				return err
			}
		}
		out = out[:0]
		return nil
	}
	q := engine.Query{Table: engine.Best, Pause: func() error {
		flush() // the paths of a prefix are valid until the lock is let go of
		return hand()
	}}
	if received {
		q.Table = engine.Received
	}
	return b.Query(ctx, q, func(p *engine.Path) bool {
		if p.Prefix != prefix {
			flush()
			prefix = p.Prefix
		}
		n, known := number[p.Peer]
		if known && (received || p.Accepted || p.Best) { // one that is new since the list was made has no number
			hop, attributes := p.Raw()
			paths = append(paths, mrt.Entry{Peer: n, Originated: p.Since, NextHop: hop, Attributes: attributes})
		}
		return true
	})
}
