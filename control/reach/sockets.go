package reach

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/outer"
)

// endpoint is a socket of package outer.
type endpoint interface {
	Send(to netip.AddrPort, payload []byte, size int) error
	Receive() (payload []byte, from netip.AddrPort, err error)
	Close() error
}

// pair is what one local end needs: the tunnel's own port and, in VXLAN, any
// other.
type pair struct {
	own endpoint
	any endpoint // nil: the form has no ports
}

// sockets holds the open sockets. One goroutine uses it.
type sockets struct {
	p       *Prober
	wanted  map[local]bool
	open    map[local]*pair
	readers sync.WaitGroup
	done    chan struct{}
	failed  string // the last error, so that it is logged once
}

// want takes in which local ends are needed.
func (s *sockets) want(targets []Target) {
	s.wanted = map[local]bool{}
	for _, t := range targets {
		if t.tunnelled() && t.Local.IsValid() {
			s.wanted[t.local()] = true
		}
	}
}

// ensure opens what is wanted and closes the rest. It reports false when
// something could not be opened: the address is not on a device, say.
func (s *sockets) ensure(log *slog.Logger) bool {
	for l, p := range s.open {
		if !s.wanted[l] {
			p.close()
			delete(s.open, l)
		}
	}
	var errs []error
	for l := range s.wanted {
		if s.open[l] == nil {
			p, err := s.openPair(l)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			s.open[l] = p
		}
	}
	err := errors.Join(errs...)
	if err == nil {
		s.failed = ""
		return true
	}
	if s.failed != err.Error() {
		s.failed = err.Error()
		log.Warn("probes cannot be sent; will try again", "error", err)
	}
	return false
}

func (s *sockets) openPair(l local) (*pair, error) {
	if l.form.Driver == dataplane.DriverIPIP {
		own, err := outer.OpenIPIP(l.addr, magic)
		if err != nil {
			return nil, err
		}
		s.read(l, own, false)
		return &pair{own: own}, nil
	}
	own, err := outer.OpenVXLAN(l.addr, l.form.Port, magic)
	if err != nil {
		return nil, err
	}
	any, err := outer.OpenAnyPort(l.addr)
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}
	s.read(l, own, false)
	s.read(l, any, true)
	return &pair{own: own, any: any}, nil
}

// read takes in what arrives at a socket until it is closed.
func (s *sockets) read(l local, e endpoint, answersOnly bool) {
	s.readers.Go(func() {
		for {
			b, from, err := e.Receive()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				// Errors of a socket are of one packet; a pause, should one be
				// of the socket itself.
				s.p.cfg.Log.Debug("receive probes", "local", fmt.Sprint(l.addr), "error", err)
				select {
				case <-s.done:
				case <-time.After(10 * time.Millisecond):
				}
				continue
			}
			s.p.received(l, from, b, answersOnly)
		}
	})
}

// received checks what arrived and hands it to the loop.
func (p *Prober) received(l local, from netip.AddrPort, b []byte, answersOnly bool) {
	key := p.key.Load()
	if key == nil {
		return
	}
	m, err := decode(b, *key)
	switch {
	case errors.Is(err, errMAC):
		p.counts[forged].Add(1)
		signal(p.doubt)
		return
	case err != nil:
		p.counts[garbage].Add(1)
		return
	case answersOnly && !m.answer:
		return
	}
	select {
	case p.events <- event{l, from, m}:
	default:
		p.counts[overflow].Add(1)
	}
}

// send sends a packet. One that cannot leave is one that gets no answer.
func (s *sockets) send(o packet, key []byte) {
	p := s.open[o.local]
	if p == nil {
		return
	}
	e := p.own
	if o.msg.anyPort && p.any != nil {
		e = p.any
	}
	if err := e.Send(o.to, appendMessage(nil, o.msg, key), o.size); err != nil {
		s.p.cfg.Log.Debug("send a probe", "peer", o.msg.to, "error", err)
	}
}

func (p *pair) close() {
	_ = p.own.Close()
	if p.any != nil {
		_ = p.any.Close()
	}
}

// close closes all and waits for their readers.
func (s *sockets) close() {
	close(s.done)
	for _, p := range s.open {
		p.close()
	}
	s.readers.Wait()
}
