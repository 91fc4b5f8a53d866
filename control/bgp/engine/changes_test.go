package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/history"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// player is a peer that is there as soon as it is configured, again and again: it announces
// a prefix and End-of-RIB, and reads what it is sent.
type player struct {
	e      *Engine
	config Peer
	number int
	stop   chan struct{}
	done   atomic.Bool // End-of-RIB came in its last session, or something is wrong

	at   *session
	s    *fsm.Session
	had  *history.History
	held bool // the session came up before a restart was over
	fail error
}

func prefixOf(number int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(number), 0}), 24)
}

// play plays until it is stopped. all is how many players there are.
func (p *player) play(all int) {
	for {
		select {
		case <-p.stop:
			return
		default:
		}
		p.e.mu.Lock()
		now := p.e.sessions[p.config.Addr]
		p.e.mu.Unlock()
		if now != nil && now != p.at {
			p.begin(now)
		}
		p.read(all)
		runtime.Gosched()
	}
}

// begin has a session come up.
func (p *player) begin(at *session) {
	s := &fsm.Session{AS4: true, Refresh: true, EnhancedRefresh: true, GracefulRestart: true, LongestSent: wire.MaxLen}
	s.Peer = fsm.Open{AS: p.config.AS, ID: uint32(p.number + 1)}
	s.Peer.GracefulRestart, s.Peer.RestartTime = true, time.Minute
	s.Peer.Family[wire.IPv4] = fsm.FamilyCapabilities{Enabled: true, Restart: true, Forwarding: true}
	s.Wire.Family[wire.IPv4].Enabled = true
	p.at, p.s = at, s
	p.done.Store(false)
	// Without an ID: what it announced before it was configured anew goes in steps.
	p.had = history.New(history.Peer{AS: p.config.AS, AS4: true, Ends: true, Session: s.Wire})
	at.Up(s, &conn.Link{})
	p.e.locked(func(c *core) { p.held = c.starting.on })
	var pack wire.Packer
	if err := pack.Announce(wire.IPv4, []byte{192, 0, 2, byte(p.number)}, []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0x40, 5, 4, 0, 0, 0, 100}); err != nil {
		p.fail = err
		return
	}
	pack.Add(wire.FromNetip(prefixOf(p.number)))
	p.receive(pack.Bytes())
	pack.Reset()
	pack.EndOfRIB(wire.IPv4)
	p.receive(pack.Bytes())
}

func (p *player) receive(message []byte) {
	if fault := p.at.Receive(p.s, wire.UpdateMessage, message[wire.HeaderLen:]); fault != nil {
		p.fail = fault
	}
}

// read reads all that there is.
func (p *player) read(all int) {
	defer func() { p.done.Store(p.fail != nil || p.had != nil && p.had.Ended(wire.IPv4)) }()
	for p.fail == nil && p.at != nil {
		out := p.at.Updates(p.s)
		if len(out) == 0 {
			return
		}
		for _, b := range out {
			ended := p.had.Ended(wire.IPv4)
			p.fail = errors.Join(p.fail, p.had.Bytes(b))
			if n := p.others(); !ended && p.had.Ended(wire.IPv4) && p.held && n < all-1 {
				p.fail = errors.Join(p.fail, fmt.Errorf("it is sent End-of-RIB when it has %d prefixes of %d", n, all-1))
			}
		}
	}
}

// others is how many prefixes of others it has.
func (p *player) others() (n int) {
	for prefix := range p.had.All() {
		if prefix.Netip() != prefixOf(p.number) {
			n++
		}
	}
	return n
}

// hesitant is a policy that takes its time for each peer: whoever waits for the engine has it next.
type hesitant struct{ openPolicy }

func (hesitant) Import(Peer) Judge {
	for end := time.Now().Add(2 * time.Millisecond); time.Now().Before(end); {
		runtime.Gosched()
	}
	return nil
}

// TestPeersChangeDuringRestart: by whatever part of the peers is configured already, and has announced
// all it has, a restart is not over. By its End-of-RIB every peer has what each other one announced, also where peers are
// configured anew meanwhile.
func TestPeersChangeDuringRestart(t *testing.T) {
	t.Parallel()
	const all = 12
	for name, change := range map[string]func(t *testing.T, e *Engine, peers []Peer){
		"one call": func(t *testing.T, e *Engine, peers []Peer) {
			t.Helper()
			set(t, &node{Engine: e}, peers...)
		},
		"several calls": func(t *testing.T, e *Engine, peers []Peer) {
			t.Helper()
			defer e.Incomplete()()
			set(t, &node{Engine: e}, peers[:all/2]...)
			for i := range 3 {
				peers[3*i].HoldTime -= time.Second
				set(t, &node{Engine: e}, peers...)
			}
		},
		"one that is not there is changed": func(t *testing.T, e *Engine, peers []Peer) {
			t.Helper()
			set(t, &node{Engine: e}, peers...)
			await.True(t, "all others", func() bool {
				n := 0
				e.locked(func(c *core) {
					for _, p := range c.peers {
						if p.complete {
							n++
						}
					}
				})
				return n == all-1
			})
			peers[all-1].HoldTime -= time.Second
			for i := range peers[:all-1] { // whose sessions stay: it takes time
				peers[i].Families[wire.IPv4].Limit = 1000
			}
			set(t, &node{Engine: e}, peers...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, err := New(Options{
				Log: slog.New(slog.DiscardHandler), AS: 65000, RouterID: netip.MustParseAddr("10.0.0.99"), Restarting: true, Deferral: time.Hour, Policy: hesitant{},
			})
			if err != nil {
				t.Fatal(err)
			}
			stop := make(chan struct{})
			var peers []Peer
			var players []*player
			var wg sync.WaitGroup
			for i := range all {
				p := Peer{
					Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), AS: 65000, Passive: true, HoldTime: 90 * time.Second, RestartTime: time.Minute,
					ClusterID: netip.MustParseAddr("10.0.0.99"), Families: [wire.Families]Family{{Enabled: true}},
				}
				peers = append(peers, p)
				players = append(players, &player{e: e, config: p, number: i, stop: stop})
			}
			for _, p := range players[:all-1] {
				wg.Go(func() { p.play(all) })
			}
			change(t, e, peers)
			wg.Go(func() { players[all-1].play(all) })
			await.True(t, "the end of the restart", func() bool {
				over := false
				e.locked(func(c *core) { over = !c.starting.on && c.agenda.idle() })
				return over && !slices.ContainsFunc(players, func(p *player) bool { return !p.done.Load() })
			})
			close(stop)
			wg.Wait()
			for _, p := range players {
				if p.fail != nil || p.others() != all-1 {
					t.Errorf("%s: %v; it has %d prefixes", p.config.Addr, p.fail, p.others())
				}
			}
			if err := e.Stop(context.WithoutCancel(t.Context()), nil); err != nil {
				t.Error(err)
			}
		})
	}
}
