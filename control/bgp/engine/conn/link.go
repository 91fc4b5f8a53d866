package conn

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

const (
	bufferSize = 64 << 10 // holds the longest message

	// lingerTime is how long a peer has to read the last messages.
	lingerTime = 2 * time.Second

	// answerTime is how long a peer that may have another password or key has to answer: it is
	// asked three times meanwhile, after 1 and 3 s again.
	answerTime = 4 * time.Second
)

// Link is one connection: a goroutine reads it, one writes, and one has the handler
// asked for UPDATEs, so that KEEPALIVEs do not wait for a handler that is busy.
type Link struct {
	peer   *Peer
	id     fsm.ID
	ctx    context.Context // of dialling
	cancel context.CancelFunc
	busy   atomic.Bool // what was read is being handled
	dialed bool        // this side opened it

	mu      sync.Mutex
	keys    signing // that it has
	tried   int     // which password it has, as [Options.auth] counts
	heard   int     // with which the peer acknowledged last
	seen    uint8   // how many retransmissions in a row there were last, and
	from    uint8   // when it got Options.Password
	wake    *sync.Cond
	session *fsm.Session // nil: it is not up
	conn    *net.TCPConn // nil: not yet
	pending net.Buffers
	updates *fsm.Session // whose UPDATEs are to be asked for; nil: there are none
	ready   net.Buffers  // UPDATEs that are to be written
	ended   bool         // nothing more is sent
}

func newLink(p *Peer, id fsm.ID) *Link {
	l := &Link{peer: p, id: id}
	l.wake = sync.NewCond(&l.mu)
	l.ctx, l.cancel = context.WithCancel(p.ctx)
	return l
}

func (l *Link) dial() {
	o, tries, auth := l.peer.next()
	ctx := l.ctx
	if o.ways() > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, answerTime)
		defer cancel()
	}
	c, err := o.dial(ctx, auth)
	l.peer.dialled(tries, auth, err)
	if err != nil {
		l.peer.step(func(now time.Time) []fsm.Action { return l.peer.machine.NotConnected(now, l.id, err) })
		return
	}
	used := false
	l.peer.step(func(now time.Time) []fsm.Action {
		if used = l.peer.links[l.id] == l; used {
			l.dialed, l.tried, l.heard = true, tries, tries
			l.start(c)
			l.keys.keys = slices.Clone(auth.Keys.all())
			if now := &l.peer.options; now.auth(tries) != auth || now.Auth.Keys.N > 0 {
				_ = l.sign(now) // it changed meanwhile, or another key is to be asked for; the peer is not heard if it cannot
			}
		}
		return l.peer.machine.Connected(now, l.id)
	})
	if !used {
		c.Close()
	}
}

// start begins to read and write. The peer's lock is held.
func (l *Link) start(c *net.TCPConn) {
	l.mu.Lock()
	l.conn = c
	l.mu.Unlock()
	read := make(chan struct{})
	l.peer.wg.Go(func() {
		defer close(read)
		l.read(c)
	})
	l.peer.wg.Go(l.pull)
	l.peer.wg.Go(func() {
		defer l.cancel()
		defer c.Close()
		l.write(c)
		// What the peer still sends is read, for a close with bytes unread is a reset,
		// which can overtake the NOTIFICATION.
		if c.CloseWrite() == nil && c.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
			<-read
		}
	})
}

// send has a message written. It never waits.
func (l *Link) send(m []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, m)
	l.wake.Broadcast()
}

// Wake has the handler asked for messages of the session. It never waits.
func (l *Link) Wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.updates = l.session; l.updates != nil {
		l.wake.Broadcast()
	}
}

// Local is this side's address of the connection, with the zone of a link-local one.
func (l *Link) Local() netip.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return netip.Addr{}
	}
	return l.conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
}

// Ports are those of the connection on this side and on the peer's.
func (l *Link) Ports() (local, remote uint16) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return 0, 0
	}
	return l.conn.LocalAddr().(*net.TCPAddr).AddrPort().Port(), l.conn.RemoteAddr().(*net.TCPAddr).AddrPort().Port()
}

// sign has the connection, if it stands, signed as the options say. The peer's lock is held.
func (l *Link) sign(o *Options) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.ended {
		return nil
	}
	raw, err := l.conn.SyscallConn()
	if err != nil {
		return err
	}
	if o.Auth.Keys.N > 0 {
		return control(raw, func(fd int) error { return l.keys.setKeys(fd, alone(o.Peer.Addr()), o.Auth.Keys) })
	}
	l.tried, l.heard = 0, 0
	return control(raw, func(fd int) error {
		l.from, l.seen = 0, 0
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			l.from, l.seen = info.Retransmits, info.Retransmits
		}
		return SetPassword(fd, o.Peer.Addr(), o.Auth.Password)
	})
}

// keyUse says which keys the connection uses.
func (l *Link) keyUse() (u KeyUse) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || len(l.keys.keys) == 0 {
		return KeyUse{}
	}
	raw, err := l.conn.SyscallConn()
	if err == nil {
		err = control(raw, func(fd int) (err error) { u, err = useOf(fd); return err })
	}
	if err != nil {
		return KeyUse{} // it is closed
	}
	return u
}

// tryOther has a connection that this side opened try the other passwords of the peer while
// it acknowledges nothing. The peer's lock is held.
func (l *Link) tryOther(o *Options) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.ended || !l.dialed {
		return
	}
	raw, err := l.conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = control(raw, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return err
		}
		if info.Retransmits < l.seen { // something was acknowledged
			l.from, l.heard = 0, l.tried
		}
		l.seen = info.Retransmits
		n := l.heard + otherAt(int(info.Retransmits-l.from), o.Others.N)
		if n == l.tried {
			return nil
		}
		l.tried = n
		return SetPassword(fd, o.Peer.Addr(), o.auth(n).Password)
	})
}

// otherAt says which password after the one that was heard last a segment is sent with that
// was sent unheard so often already, where there are so many others. Each other one has two
// turns among the first seconds. After that it is more likely that packets are lost than
// that the peer has another password, and the last one that it had must be there when they
// are not: retransmissions are rare by then (RFC 6298, section 5.5).
func otherAt(unheard, others int) int {
	if unheard < 2 || unheard > 2+2*others {
		return 0
	}
	return (unheard - 1) % (others + 1)
}

// finish closes the connection, or gives up dialling: at once, or once what was sent is
// written.
func (l *Link) finish(abort bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.wake.Broadcast()
	switch {
	case l.conn == nil:
		l.cancel()
	case abort:
		// Errors are those of a connection that is gone already.
		_ = l.conn.SetLinger(0)
		_ = l.conn.Close()
	default:
		_ = l.conn.SetWriteDeadline(time.Now().Add(lingerTime))
	}
}

// write writes what was sent, and UPDATEs, until the link has ended.
func (l *Link) write(c *net.TCPConn) {
	for {
		l.mu.Lock()
		for len(l.pending)+len(l.ready) == 0 && !l.ended {
			l.wake.Wait()
		}
		batch := l.pending
		if l.pending = nil; len(batch) == 0 && !l.ended {
			batch, l.ready = l.ready, nil
			l.wake.Broadcast()
		}
		l.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		l.peer.count(&l.peer.out, batch)
		if _, err := batch.WriteTo(c); err != nil {
			l.lost(err)
			return
		}
		l.peer.step(func(now time.Time) []fsm.Action { l.peer.machine.Wrote(now, l.id); return nil })
	}
}

// pull asks for UPDATEs, after a wake and as long as there are some, until the link has
// ended.
func (l *Link) pull() {
	for {
		l.mu.Lock()
		for (l.updates == nil || len(l.ready) > 0) && !l.ended {
			l.wake.Wait()
		}
		session, ended := l.updates, l.ended
		l.updates = nil // what comes from now on wakes anew
		l.mu.Unlock()
		if ended {
			return
		}
		batch := l.peer.handler.Updates(session)
		if len(batch) == 0 {
			continue
		}
		l.mu.Lock()
		l.ready, l.updates = batch, session
		l.wake.Broadcast()
		l.mu.Unlock()
	}
}

// read reads messages until the connection ends.
func (l *Link) read(c *net.TCPConn) {
	b := make([]byte, bufferSize)
	held := 0
	for {
		n, err := c.Read(b[held:])
		if n > 0 {
			l.busy.Store(true)
			used, fault := l.messages(b[:held+n])
			l.busy.Store(false)
			if fault != nil {
				l.fault(fault)
				_, _ = io.Copy(io.Discard, c) // until the writer closes it
				return
			}
			held = copy(b, b[used:held+n])
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			l.lost(err)
			return
		}
	}
}

// messages handles the whole messages of what was read and returns their length. The
// machine sees one UPDATE of them, which is what its hold timer needs.
func (l *Link) messages(b []byte) (used int, fault *wire.Error) {
	var session *fsm.Session
	for {
		t, body, n, err := wire.Frame(b[used:], l.peer.longest)
		if err != nil {
			errors.As(err, &fault)
			return used, fault
		}
		if n == 0 {
			return used, nil
		}
		used += n
		l.peer.in[t-1].Add(1)
		update := t == wire.UpdateMessage || t == wire.RouteRefresh
		if session == nil || !update {
			l.peer.step(func(now time.Time) []fsm.Action { return l.peer.machine.Message(now, l.id, t, body) })
			session = l.established()
		}
		if update && session != nil {
			if fault := l.peer.handler.Receive(session, t, body); fault != nil {
				return used, fault
			}
		}
	}
}

func (l *Link) established() *fsm.Session {
	l.peer.mu.Lock()
	defer l.peer.mu.Unlock()
	return l.peer.machine.Session(l.id)
}

func (l *Link) lost(err error) {
	l.peer.step(func(now time.Time) []fsm.Action { return l.peer.machine.Closed(now, l.id, err) })
}

func (l *Link) fault(e *wire.Error) {
	l.peer.step(func(now time.Time) []fsm.Action { return l.peer.machine.Fault(now, l.id, e) })
}

// unread reports whether bytes wait to be read or handled.
func (l *Link) unread() bool {
	if l.busy.Load() {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return false
	}
	raw, err := l.conn.SyscallConn()
	if err != nil {
		return false
	}
	waiting := 0
	err = control(raw, func(fd int) (err error) {
		waiting, err = unix.IoctlGetInt(fd, unix.SIOCINQ)
		return err
	})
	return err == nil && waiting > 0
}
