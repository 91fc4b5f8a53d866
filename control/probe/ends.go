package probe

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// packetSocket is a [rawSocket] or an [anyPort].
type packetSocket interface {
	send(to netip.AddrPort, payload []byte, size int) error
	receive() (payload []byte, from netip.AddrPort, err error)
	Close() error
}

// openEnd is what one local end needs: the tunnel's own port and, in VXLAN, any
// other.
type openEnd struct {
	own packetSocket
	any packetSocket // nil: the encapsulation has no ports
}

// ends holds the open sockets on the underlay. One goroutine uses it.
type ends struct {
	secret *secret
	log    *slog.Logger
	events chan event

	wanted  map[localEnd]bool
	open    map[localEnd]*openEnd
	readers sync.WaitGroup
	done    chan struct{}
	failed  string // the last error, so that it is logged once
	counts  *counts

	sender authenticator
	buf    []byte // of what was sent last

	refusals int       // probes that the kernel has not sent since that was logged last
	refused  time.Time // when that was
}

// refusalsEvery is how often it is logged that the kernel does not send probes. Where a
// thousand hosts of one link are silent its table of neighbours is full (arp(7), gc_thresh3), and
// it refuses one for each of them.
const refusalsEvery = time.Minute

// event is a message that arrived.
type event struct {
	local localEnd
	from  netip.AddrPort
	msg   message
}

// want sets which local ends are needed.
func (s *ends) want(targets []dataplane.ProbeTarget) {
	s.wanted = map[localEnd]bool{}
	var path *dataplane.ProbePath // of the one before: nearly all have the same
	for i := range targets {
		t := &targets[i]
		if t.Tunnel != (dataplane.ProbeTunnel{}) || t.ProbePath == path {
			continue
		}
		if path = t.ProbePath; probed(t) && t.Local.IsValid() {
			s.wanted[localOf(t)] = true
		}
	}
}

// ensure opens what is wanted and closes the rest. It reports false when
// something could not be opened: the address is not on a device, say.
func (s *ends) ensure() bool {
	for l, o := range s.open {
		if !s.wanted[l] {
			o.close()
			delete(s.open, l)
		}
	}
	var errs []error
	for l := range s.wanted {
		if s.open[l] == nil {
			o, err := s.openEnd(l)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			s.open[l] = o
		}
	}
	err := errors.Join(errs...)
	if err == nil {
		s.failed = ""
		return true
	}
	if s.failed != err.Error() {
		s.failed = err.Error()
		s.log.Warn("probes cannot be sent; will try again", "error", err)
	}
	return false
}

func (s *ends) openEnd(l localEnd) (*openEnd, error) {
	if l.encap.Driver == dataplane.DriverIPIP {
		own, err := openIPIP(l.addr)
		if err != nil {
			return nil, err
		}
		s.read(l, own, false)
		return &openEnd{own: own}, nil
	}
	own, err := openVXLAN(l.addr, l.encap.Port)
	if err != nil {
		return nil, err
	}
	any, err := openAnyPort(l.addr)
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}
	s.read(l, own, false)
	s.read(l, any, true)
	return &openEnd{own: own, any: any}, nil
}

// read hands over what arrives at a socket until it is closed.
func (s *ends) read(l localEnd, from packetSocket, answersOnly bool) {
	s.readers.Go(func() {
		for {
			b, peer, err := from.receive()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				// Errors of a socket are of one packet; a pause, should one be
				// of the socket itself.
				s.log.Debug("receive probes", "local", fmt.Sprint(l.addr), "error", err)
				select {
				case <-s.done:
				case <-time.After(10 * time.Millisecond):
				}
				continue
			}
			s.received(l, peer, b, answersOnly)
		}
	})
}

// received checks what arrived and hands it to the loop.
func (s *ends) received(l localEnd, from netip.AddrPort, b []byte, answersOnly bool) {
	key := s.secret.get()
	if key == nil {
		return
	}
	m, err := decode(b, key)
	switch {
	case errors.Is(err, errMAC):
		s.counts.forged.Add(1)
		s.secret.doubt.Set()
		return
	case err != nil || m.kind.tunnel():
		s.counts.garbage.Add(1)
		return
	case answersOnly && m.kind != kindAnswer:
		return
	}
	select {
	case s.events <- event{l, from, m}:
	default:
		s.counts.overflow.Add(1)
	}
}

// send sends a packet. One that cannot leave is one that gets no answer.
func (s *ends) send(o packet, key []byte) {
	end := s.open[o.local]
	if end == nil {
		return
	}
	from := end.own
	if o.msg.kind == kindAnyPort && end.any != nil {
		from = end.any
	}
	s.buf = s.sender.appendMessage(s.buf[:0], o.msg, key, 0)
	if err := from.send(o.to, s.buf, o.size); err != nil {
		s.refusals++
		if now := time.Now(); now.Sub(s.refused) >= refusalsEvery {
			s.log.Debug("probes were not sent", "probes", s.refusals, "last_peer", o.msg.to, "error", err)
			s.refusals, s.refused = 0, now
		}
	}
}

func (o *openEnd) close() {
	_ = o.own.Close()
	if o.any != nil {
		_ = o.any.Close()
	}
}

// close closes all and waits for their readers.
func (s *ends) close() {
	close(s.done)
	for _, o := range s.open {
		o.close()
	}
	s.readers.Wait()
}
