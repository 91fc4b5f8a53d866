package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// speaker is a peer made by hand.
type speaker struct {
	conn net.Conn
	got  int // prefixes
}

// speak opens a session to an engine from an address.
func speak(ctx context.Context, from netip.Addr, to netip.AddrPort, as uint32) (*speaker, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	b := from.As4()
	o := fsm.Open{AS: as, ID: binary.BigEndian.Uint32(b[:]), HoldTime: 240 * time.Second}
	o.AS4, o.Refresh = true, true
	o.Family[wire.IPv4].Enabled = true
	msg, err := o.Append(nil)
	if err == nil {
		_, err = c.Write(wire.AppendMessage(msg, wire.Keepalive, nil))
	}
	return &speaker{conn: c}, errors.Join(err)
}

// read reads until so many prefixes came.
func (s *speaker) read(want int) error {
	b := make([]byte, 1<<17)
	held := 0
	d := wire.Decoder{}
	d.Session.Family[wire.IPv4].Enabled = true
	for s.got < want {
		n, err := s.conn.Read(b[held:])
		if err != nil {
			return fmt.Errorf("after %d of %d prefixes: %w", s.got, want, err)
		}
		held += n
		used := 0
		for {
			t, body, n, err := wire.Frame(b[used:held], wire.MaxLen)
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
			used += n
			if t == wire.Notification {
				return errors.New(fsm.ParseNotification(body).String())
			}
			var u wire.Update
			if t != wire.UpdateMessage {
				continue
			}
			if err := d.Decode(body, &u); err != nil {
				return err
			}
			for _, ok := u.Announced.Next(); ok; _, ok = u.Announced.Next() {
				s.got++
			}
		}
		held = copy(b, b[used:held])
	}
	return nil
}

// announcements is a client's announcements: n prefixes with attributes of its own.
func announcements(client, n int) []byte {
	var p wire.Packer
	list := []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0x40, 5, 4, 0, 0, 0, 100}
	if p.Announce(wire.IPv4, []byte{192, 0, byte(client >> 8), byte(client)}, list) != nil {
		return nil
	}
	for i := range n {
		p.Add(wire.Prefix{Hi: uint64(client*n+i) << 38, Bits: 26})
	}
	return p.Bytes()
}

func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// drain reads what the engine says and throws it away.
func drain(e *Engine, done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		case <-e.Changed():
		}
		for e.Take(8192, func(Event) {}, func(_ wire.Prefix, chosen iter.Seq[*Path]) {
			for range chosen {
			}
		}) {
		}
	}
}

// BenchmarkReflect is a route reflector whose clients announce at once, until each has
// what all others announced. Clients and reflector are one process.
func BenchmarkReflect(b *testing.B) {
	for _, c := range []struct{ clients, prefixes int }{{100, 100}, {100, 1000}, {1000, 100}} {
		b.Run(fmt.Sprintf("%dx%d", c.clients, c.prefixes), func(b *testing.B) {
			var used time.Duration
			for b.Loop() {
				b.StopTimer()
				e, err := New(Options{AS: 65000, RouterID: netip.MustParseAddr("10.0.0.1")})
				if err != nil {
					b.Fatal(err)
				}
				if err := e.Listen(b.Context(), []netip.AddrPort{netip.MustParseAddrPort("127.0.83.1:0")}); err != nil {
					b.Fatal(err)
				}
				done := make(chan struct{})
				var wg sync.WaitGroup
				wg.Go(func() { drain(e, done) })
				var peers []Peer
				for i := range c.clients {
					p := Peer{
						Addr: netip.AddrFrom4([4]byte{127, 2, byte(i >> 8), byte(i)}), Port: 179, AS: 65000, Passive: true, HoldTime: 240 * time.Second,
						ConnectRetry: time.Second, ClusterID: netip.MustParseAddr("10.0.0.1"),
					}
					p.Families[wire.IPv4].Enabled = true
					peers = append(peers, p)
				}
				if err := e.SetPeers(peers); err != nil {
					b.Fatal(err)
				}
				speakers := make([]*speaker, c.clients)
				for i := range speakers {
					if speakers[i], err = speak(b.Context(), peers[i].Addr, e.Listening()[0], 65000); err != nil {
						b.Fatal(err)
					}
				}
				for _, p := range peers {
					for s, _ := e.Peer(p.Addr); s.State != fsm.Established; s, _ = e.Peer(p.Addr) {
						runtime.Gosched()
					}
				}
				before := cpu()
				b.StartTimer()
				var clients sync.WaitGroup
				for i, s := range speakers {
					clients.Go(func() {
						if _, err := s.conn.Write(announcements(i, c.prefixes)); err != nil {
							b.Error(err)
						}
					})
					clients.Go(func() {
						if err := s.read((c.clients - 1) * c.prefixes); err != nil {
							b.Error(err)
						}
					})
				}
				clients.Wait()
				b.StopTimer()
				used += cpu() - before
				for _, s := range speakers {
					s.conn.Close()
				}
				if err := e.Stop(b.Context(), nil); err != nil {
					b.Fatal(err)
				}
				close(done)
				wg.Wait()
				b.StartTimer()
			}
			b.ReportMetric(float64(used.Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}

// BenchmarkReceive is 500,000 prefixes of one peer, until the engine's caller has them.
func BenchmarkReceive(b *testing.B) {
	const n = 500_000
	messages := announcements(0, n)
	for b.Loop() {
		b.StopTimer()
		e, err := New(Options{AS: 65000, RouterID: netip.MustParseAddr("10.0.0.1")})
		if err != nil {
			b.Fatal(err)
		}
		if err := e.Listen(b.Context(), []netip.AddrPort{netip.MustParseAddrPort("127.0.84.1:0")}); err != nil {
			b.Fatal(err)
		}
		p := Peer{Addr: netip.MustParseAddr("127.0.84.2"), Port: 179, AS: 65000, Passive: true, HoldTime: 90 * time.Second, ConnectRetry: time.Second}
		p.Families[wire.IPv4].Enabled = true
		if err := e.SetPeers([]Peer{p}); err != nil {
			b.Fatal(err)
		}
		s, err := speak(b.Context(), p.Addr, e.Listening()[0], 65000)
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := s.conn.Write(messages); err != nil {
				b.Error(err)
			}
		})
		for got := 0; got < n; {
			<-e.Changed()
			for e.Take(8192, func(Event) {}, func(wire.Prefix, iter.Seq[*Path]) { got++ }) {
			}
		}
		wg.Wait()
		b.StopTimer()
		s.conn.Close()
		if err := e.Stop(b.Context(), nil); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/prefix")
}
