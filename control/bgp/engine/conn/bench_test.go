package conn

import (
	"net/netip"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// table is a handler that keeps what a session brings.
type table struct {
	record
	sets *attrs.Table
	rib  *rib.RIB
	peer rib.Peer
	ends chan struct{} // End-of-RIB
}

func (h *table) Receive(s *fsm.Session, _ wire.Type, body []byte) *wire.Error {
	d := wire.Decoder{Session: s.Wire}
	var u wire.Update
	if err := d.Decode(body, &u); err != nil {
		return &wire.Error{Code: wire.CodeUpdate, Reason: err.Error()}
	}
	if _, end := u.EndOfRIB(); end {
		close(h.ends)
		return nil
	}
	set, result, err := h.sets.Intern(attrs.Context{External: true, AS4: s.AS4, Reachable: u.Reachable()}, u.Attrs, u.NextHop)
	if err != nil || set == 0 {
		return &wire.Error{Code: wire.CodeUpdate, Reason: result.String()}
	}
	defer h.sets.Release(set)
	for p, ok := u.Announced.Next(); ok; p, ok = u.Announced.Next() {
		h.rib.Announce(h.peer, p, set, true)
	}
	for h.rib.Changes(0, 4096, func(wire.Prefix, rib.Paths) {}) {
	}
	return nil
}

// BenchmarkReceive is 500,000 prefixes of one session, over TCP into a table with a
// reader of its changes.
func BenchmarkReceive(b *testing.B) {
	const n = 500_000
	var pack wire.Packer
	path := []byte{0x40, 1, 1, 0, 0x40, 2, 6, 2, 1, 0, 0, 0xfd, 0xe8}
	if err := pack.Announce(wire.IPv4, []byte{10, 0, 0, 1}, path); err != nil {
		b.Fatal(err)
	}
	for i := range n {
		pack.Add(wire.Prefix{Hi: uint64(i) << 38, Bits: 26, Family: wire.IPv4})
	}
	pack.EndOfRIB(wire.IPv4)
	l, err := Listen(b.Context(), netip.MustParseAddrPort("127.0.98.2:0"))
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	from := addr("127.0.98.1")
	local := config(65000, 65001, 1, false).Local
	hello, err := local.Append(nil)
	if err != nil {
		b.Fatal(err)
	}
	hello = wire.AppendMessage(hello, wire.Keepalive, nil)
	b.ReportAllocs()
	for b.Loop() {
		sets := attrs.NewTable()
		h := &table{sets: sets, rib: rib.New(sets), ends: make(chan struct{})}
		h.peer = h.rib.AddPeer(rib.PeerInfo{RouterID: 1, External: true, Addr: from})
		p := NewPeer(Options{Peer: netip.AddrPortFrom(from, 179)}, config(65001, 65000, 2, true), h)
		p.Start()
		o := Options{Peer: l.Addr(), Source: from}
		c, err := o.dial(b.Context(), o.Auth)
		if err != nil {
			b.Fatal(err)
		}
		accepted, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		if err := p.Accept(accepted); err != nil {
			b.Fatal(err)
		}
		for _, m := range [][]byte{hello, pack.Bytes()} {
			if _, err := c.Write(m); err != nil {
				b.Fatal(err)
			}
		}
		select {
		case <-h.ends:
		case <-time.After(time.Minute):
			b.Fatalf("%d prefixes, ends %q", h.rib.Len(wire.IPv4), h.record.ends)
		}
		if got := h.rib.Len(wire.IPv4); got != n {
			b.Fatalf("%d prefixes", got)
		}
		b.StopTimer()
		c.Close()
		p.Close()
		b.StartTimer()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/prefix")
}
