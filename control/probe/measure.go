package probe

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
)

// What one measurement costs and how long it may take.
const (
	transferSize  = 256 << 10 // bytes over TCP
	segmentsBytes = 60000     // bytes of datagrams in one packet; the limit is 65,535 with headers
	maxSegments   = 60        // datagrams in one packet; the kernel takes 64 (UDP_MAX_SEGMENTS)
	proofs        = 3         // losses, each beside a packet that got there, that count as one
	minGrace      = 100 * time.Millisecond
	maxGrace      = 500 * time.Millisecond
	transferStep  = time.Second // without which progress a transfer has stalled
	transferSteps = 4
)

// firstAnswer is how long each attempt waits for the first answer: a second in
// all.
func firstAnswer() []time.Duration {
	return []time.Duration{200 * time.Millisecond, 300 * time.Millisecond, 500 * time.Millisecond}
}

// Sockets measures with sockets that are bound to the tunnel's device, so that
// what it sends is what the kernel makes of any program's packets. Its methods
// are safe for concurrent use.
type Sockets struct{ Port uint16 }

var _ Measurer = Sockets{}

// Measure implements [Measurer].
func (m Sockets) Measure(ctx context.Context, t Target, key []byte) (Finding, error) {
	if len(key) == 0 {
		return Finding{}, errNoKey
	}
	if t.plain() {
		return m.plain(ctx, t, key)
	}
	f := Finding{Full: t.Tunnel.MTU}
	s, err := m.open(ctx, t, key)
	if err != nil {
		return f, fmt.Errorf("open a socket on %s: %w", t.Tunnel.Link, err)
	}
	defer s.close()
	if err := s.sizes(ctx, &f); err != nil || !f.Answered || f.Checksum == dataplane.No {
		return f, err
	}
	if err := s.segments(ctx, &f); err != nil {
		return f, err
	}
	f.Transfer, err = m.transfer(ctx, t, f, key)
	return f, err
}

// shape is a packet to send.
type shape struct {
	size     int // bytes of the IP packet, or of each that it is cut into
	software bool
	count    int // datagrams in it; 0: one, not cut
}

// session is a socket with its reader.
type session struct {
	conn     *net.UDPConn
	key      []byte
	nonce    uint64
	overhead int // bytes of IP and UDP headers
	full     int
	rtt      time.Duration
	next     uint32
	buf      []byte // of the packet that is being sent
	ask      kind
	answer   kind
	control  []byte // goes with each packet; nil: nothing

	mu      sync.Mutex
	got     map[uint32]time.Time
	refused bool
	wake    async.Signal
	done    chan struct{} // closed when the reader has ended
}

func (m Sockets) open(ctx context.Context, t Target, key []byte) (*session, error) {
	link, ask, answer := t.Tunnel.Link, kindEcho, kindReply
	if t.plain() {
		link, ask, answer = "", kindPlain, kindPlainReply // the answer comes as it may
	}
	conn, err := dialUDP(ctx, link, netip.AddrPortFrom(t.Tunnel.Local, 0), netip.AddrPortFrom(t.Peer, m.Port))
	if err != nil {
		return nil, err
	}
	s := &session{
		conn: conn, key: key, nonce: newNonce(), overhead: headerLen(t.Peer) + udpLen, full: t.Tunnel.MTU,
		ask: ask, answer: answer, got: map[uint32]time.Time{}, wake: async.NewSignal(), done: make(chan struct{}),
	}
	go s.read()
	return s, nil
}

// isRefused reports whether the peer's kernel has said that nobody listens.
func (s *session) isRefused() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
}

func (s *session) close() {
	s.conn.Close()
	<-s.done
}

// read collects answers until the socket is closed.
func (s *session) read() {
	defer close(s.done)
	b := make([]byte, 2048)
	for {
		n, err := s.conn.Read(b)
		switch {
		case errors.Is(err, unix.ECONNREFUSED):
			s.mu.Lock()
			s.refused = true
			s.mu.Unlock()
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			continue // an ICMP error of another sort: silence says the same
		default:
			if m, err := decode(b[:n], s.key); err != nil || m.kind != s.answer || m.nonce != s.nonce {
				continue
			} else {
				s.mu.Lock()
				s.got[m.index] = time.Now()
				s.mu.Unlock()
			}
		}
		s.wake.Set()
	}
}

// send sends a shape and returns the indices of its datagrams.
func (s *session) send(sh shape) ([]uint32, error) {
	payload := sh.size - s.overhead
	b := s.buf[:0]
	var indices []uint32
	for range max(sh.count, 1) {
		b = appendMessage(b, message{kind: s.ask, nonce: s.nonce, index: s.next}, s.key, payload)
		indices = append(indices, s.next)
		s.next++
	}
	s.buf = b
	write := func() error {
		if sh.count > 0 {
			_, _, err := s.conn.WriteMsgUDPAddrPort(b, segmentControl(uint16(payload)), netip.AddrPort{})
			return err
		}
		if s.control != nil {
			_, _, err := s.conn.WriteMsgUDPAddrPort(b, s.control, netip.AddrPort{})
			return err
		}
		_, err := s.conn.Write(b)
		return err
	}
	err := error(nil)
	if sh.software {
		err = software(s.conn, write)
	} else {
		err = write()
	}
	if errors.Is(err, unix.ECONNREFUSED) { // about an earlier packet: the reader does not hear of it any more
		s.mu.Lock()
		s.refused = true
		s.mu.Unlock()
	}
	return indices, err
}

// reference is the packet that tells whether the path is well at all.
func (s *session) reference() shape { return shape{size: s.overhead + messageLen, software: true} }

// round sends the shapes and after them the reference. Packets stay in order,
// near enough: once the reference has been answered, and a moment has passed,
// what was not answered is lost. It returns how many of each got there; ok says
// whether the reference did.
func (s *session) round(ctx context.Context, wait time.Duration, shapes ...shape) (got []int, ok bool, err error) {
	var sent [][]uint32
	for _, sh := range shapes {
		idx, err := s.send(sh)
		if err != nil && !tolerable(err) {
			return nil, false, fmt.Errorf("send a packet of %d bytes: %w", sh.size, err)
		}
		sent = append(sent, idx)
	}
	start := time.Now()
	ref, err := s.send(s.reference())
	if err != nil && !tolerable(err) {
		return nil, false, fmt.Errorf("send a packet: %w", err)
	}
	if s.await(ctx, start.Add(wait), ref) {
		ok = true
		s.mu.Lock()
		s.rtt = s.got[ref[0]].Sub(start)
		s.mu.Unlock()
		s.await(ctx, time.Now().Add(s.grace()), slices.Concat(sent...))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, idx := range sent {
		n := 0
		for _, i := range idx {
			if _, there := s.got[i]; there {
				n++
			}
		}
		got = append(got, n)
	}
	return got, ok, ctx.Err()
}

func (s *session) grace() time.Duration { return min(max(minGrace, 3*s.rtt), maxGrace) }

// tolerable are errors of sending that mean the same as a loss: the device
// takes less than it did, or the error is about an earlier packet.
func tolerable(err error) bool {
	return errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EHOSTUNREACH)
}

// await waits until all are answered. It reports whether they were in time.
func (s *session) await(ctx context.Context, end time.Time, indices []uint32) bool {
	timer := time.NewTimer(time.Until(end))
	defer timer.Stop()
	for {
		s.mu.Lock()
		missing := slices.ContainsFunc(indices, func(i uint32) bool { _, ok := s.got[i]; return !ok })
		refused := s.refused
		s.mu.Unlock()
		if !missing {
			return true
		}
		if refused {
			return false
		}
		select {
		case <-s.wake:
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// sizes finds out whether packets get there, of which size, and with whose
// checksum.
func (s *session) sizes(ctx context.Context, f *Finding) error {
	small := shape{size: s.overhead + messageLen}
	fullSoft, full := shape{size: s.full, software: true}, shape{size: s.full}
	t, err := s.tally(ctx, small, fullSoft, full)
	f.Refused = s.isRefused()
	f.Answered, f.RTT = t.answered, s.rtt
	if err != nil || !t.answered {
		return err
	}
	f.Checksum = t.answer(0)
	f.Size = s.full
	checked := t.answer(2)
	if t.answer(1) != dataplane.Yes && checked != dataplane.Yes {
		if f.Size, err = s.search(ctx); err != nil {
			return err
		}
		t, err := s.tally(ctx, shape{size: f.Size})
		if err != nil {
			return err
		}
		checked = t.answer(0)
	}
	if f.Checksum == dataplane.Yes {
		f.Checksum = checked
	}
	return nil
}

// tally is what rounds found of some shapes.
type tally struct {
	answered bool
	got      []bool
	lost     []int // rounds in which the reference got there and this did not
}

func (t tally) answer(i int) dataplane.Answer {
	switch {
	case t.got[i]:
		return dataplane.Yes
	case t.lost[i] >= proofs:
		return dataplane.No
	}
	return dataplane.Unknown
}

// tally sends rounds until each shape got there once or was lost often enough
// beside a reference that got there, or nothing was answered at all.
func (s *session) tally(ctx context.Context, shapes ...shape) (tally, error) {
	t := tally{got: make([]bool, len(shapes)), lost: make([]int, len(shapes))}
	waits := firstAnswer()
	silent := 0
	for range proofs + len(waits) {
		var open []int
		for i := range shapes {
			if t.answer(i) == dataplane.Unknown {
				open = append(open, i)
			}
		}
		if len(open) == 0 || silent == len(waits) {
			break
		}
		var now []shape
		for _, i := range open {
			now = append(now, shapes[i])
		}
		got, ok, err := s.round(ctx, waits[silent], now...)
		if err != nil {
			return t, err
		}
		for k, i := range open {
			switch {
			case got[k] > 0:
				t.got[i] = true
			case ok:
				t.lost[i]++
			}
		}
		t.answered = t.answered || ok
		if !ok {
			silent++
		}
		if s.isRefused() && !t.answered {
			break
		}
	}
	return t, nil
}

// search finds the largest packet that gets there, below the full size, which was
// lost often enough.
func (s *session) search(ctx context.Context) (int, error) {
	now := time.Time{} // tally waits; the search does not
	least := s.overhead + messageLen
	find := search{full: s.full, active: true, raising: true, sure: true, lo: least, hi: s.full}
	find.ask(between(least, s.full)...)
	for find.active && find.hi-find.lo > 1 {
		var shapes []shape
		sizes := find.due(now)
		for _, n := range sizes {
			shapes = append(shapes, shape{size: n, software: true})
		}
		t, err := s.tally(ctx, shapes...)
		if err != nil {
			return 0, err
		}
		for i, n := range sizes {
			if t.got[i] {
				find.got(n)
			}
		}
		if !t.answered {
			return max(find.lo, find.largest()), nil // the path is gone: what was seen so far is what is known
		}
		find.tries = sizeTries
		find.advance(now, least, 0)
	}
	return find.lo, nil
}

// segments sends datagrams as one packet, twice if the first time most are
// lost.
func (s *session) segments(ctx context.Context, f *Finding) error {
	n := min(maxSegments, segmentsBytes/f.Size)
	if n < 2 {
		return nil
	}
	for range 2 {
		got, ok, err := s.round(ctx, maxGrace, shape{size: f.Size, count: n})
		if errors.Is(err, unix.EIO) || errors.Is(err, unix.EINVAL) {
			return nil // a kernel that does not cut UDP for this device
		}
		if err != nil {
			return err
		}
		if !ok && got[0] == 0 {
			continue // nothing can be said
		}
		f.Segments = Count{Sent: n, Got: got[0]}
		if !f.Segments.bad() {
			return nil
		}
	}
	return nil
}

// transfer sends some bytes over TCP and waits for the receipt.
func (m Sockets) transfer(ctx context.Context, t Target, f Finding, key []byte) (Transfer, error) {
	mss := 0
	if f.Size < f.Full {
		mss = f.Size - headerLen(t.Peer) - 20
	}
	fam := dataplane.FamilyOf(t.Peer)
	d := net.Dialer{
		Control: onDevice(t.Tunnel.Link, fam, true, mss), LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.Tunnel.Local, 0)),
		Timeout: time.Second + 4*f.RTT, KeepAlive: -1,
	}
	start := time.Now()
	c, err := d.DialContext(ctx, network("tcp", fam), netip.AddrPortFrom(t.Peer, m.Port).String())
	if err != nil {
		return Transfer{}, ctx.Err() // the handshake's fate is a finding
	}
	defer c.Close()
	conn, ok := c.(*net.TCPConn)
	if !ok {
		return Transfer{}, fmt.Errorf("connect to %s: unexpected %T", t.Peer, c)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	out := Transfer{Connected: true}
	done := make(chan bool, 1)
	go func() { done <- exchange(conn, key) }()
	confirmed := int64(-1)
	for range transferSteps {
		timer := time.NewTimer(transferStep)
		select {
		case out.Done = <-done:
			timer.Stop()
			out.Elapsed = time.Since(start)
			return out, errors.Join(out.count(conn), ctx.Err())
		case <-timer.C:
		}
		out.Elapsed = time.Since(start)
		if err := out.count(conn); err != nil {
			break
		}
		// A quarter of it in a step is progress worth waiting for.
		if out.Bytes-confirmed < transferSize/transferSteps && out.bad() {
			break
		}
		confirmed = out.Bytes
	}
	_ = conn.SetLinger(0) // what is left of it is of no use to anybody
	conn.Close()
	<-done
	return out, ctx.Err()
}

// count takes down what the kernel says of the connection.
func (t *Transfer) count(c *net.TCPConn) error {
	info, err := tcpInfo(c)
	if err != nil {
		return err
	}
	t.Bytes = int64(min(info.Bytes_acked, math.MaxInt64))
	t.Sent, t.Retransmits = int64(info.Segs_out), int64(info.Total_retrans)
	return nil
}

// exchange sends the data and reads the receipt. It reports whether all
// arrived as it was.
func exchange(c *net.TCPConn, key []byte) bool {
	id := newNonce()
	b := append(appendMessage(nil, message{kind: kindTransfer, nonce: id, size: transferSize}, key, 0), make([]byte, transferSize)...)
	fill(b[messageLen:], id)
	if _, err := c.Write(b); err != nil {
		return false
	}
	answer := make([]byte, messageLen)
	if _, err := io.ReadFull(c, answer); err != nil {
		return false
	}
	m, err := decode(answer, key)
	return err == nil && m.kind == kindReceipt && m.size == transferSize && m.nonce == digest(b[messageLen:])
}

// digest is what a receipt says of the data.
func digest(b []byte) uint64 {
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:8])
}
