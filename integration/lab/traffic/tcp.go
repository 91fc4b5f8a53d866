package traffic

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// StreamReport is what became of a [Stream].
type StreamReport struct {
	From, To   string
	Bytes      int           // that came back
	LongestGap time.Duration // between two moments at which something came back
	GapEnd     time.Time     // the end of that gap
	Resent     int           // segments that either end had to send again
	Err        error         // why it ended before it was stopped; nil: it did not
}

func (r StreamReport) String() string {
	s := fmt.Sprintf("TCP %s → %s: %d bytes, longest gap %v before %s, %d segments sent again",
		r.From, r.To, r.Bytes, r.LongestGap.Round(time.Millisecond), r.GapEnd.Format(logTime), r.Resent)
	if r.Err != nil {
		s += fmt.Sprintf(", ended: %v", r.Err)
	}
	return s
}

// PauseBeyond is the part of the longest gap in which another stream did not
// stand still in its own longest one: that of a stream which shares nothing with
// this one but the machine.
func (r StreamReport) PauseBeyond(other StreamReport) time.Duration {
	from, to := r.GapEnd.Add(-r.LongestGap), r.GapEnd
	if start := other.GapEnd.Add(-other.LongestGap); start.After(from) {
		from = start
	}
	if other.GapEnd.Before(to) {
		to = other.GapEnd
	}
	return r.LongestGap - max(0, to.Sub(from))
}

// Stream is a TCP connection on which a record goes there and back every ten
// milliseconds, or as [StreamOptions] says.
type Stream struct {
	client, server net.Conn
	cancel         context.CancelFunc
	workers        sync.WaitGroup

	mu     sync.Mutex
	report StreamReport // since the last call of Interval
	last   time.Time
	resent int // up to the last call of Interval
}

const (
	recordLen   = 1024
	recordEvery = 10 * time.Millisecond
)

// StreamOptions says how a [Stream] sends.
type StreamOptions struct {
	OneProcessor bool          // as in [LoadOptions]
	Every        time.Duration // between two records; 0: 10 ms
}

// StartStream connects two places. The caller stops the stream.
func StartStream(ctx context.Context, o StreamOptions, from, to Place) (*Stream, error) {
	client, server, err := connect(ctx, from, to)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Stream{client: client, server: server, cancel: cancel, last: time.Now(), report: StreamReport{From: from.Name, To: to.Name}}
	work := func(doing string, f func() error) {
		s.workers.Go(func() {
			if o.OneProcessor {
				if err := toOneProcessor(); err != nil {
					s.fail(ctx, doing, err)
					return
				}
			}
			s.fail(ctx, doing, f())
		})
	}
	work("at its far end", func() error {
		_, err := io.Copy(server, server)
		return err
	})
	work("sending", func() error { return s.send(ctx, cmp.Or(o.Every, recordEvery)) })
	work("receiving", s.receive)
	return s, nil
}

// connect makes a connection; the names of errors are those of the places.
func connect(ctx context.Context, from, to Place) (client, server net.Conn, err error) {
	var listener net.Listener
	err = ns.Do(to.Space, func() (err error) {
		var lc net.ListenConfig
		listener, err = lc.Listen(ctx, "tcp", netip.AddrPortFrom(to.Addr, 0).String())
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("listen at %s: %w", to.Name, err)
	}
	defer listener.Close()
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	err = ns.Do(from.Space, func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from.Addr, 0))}
		client, err = d.DialContext(ctx, "tcp", listener.Addr().String())
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("connect %s to %s: %w", from.Name, to.Name, err)
	}
	if server, err = listener.Accept(); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("accept %s at %s: %w", from.Name, to.Name, err), client.Close())
	}
	return client, server, nil
}

func (s *Stream) fail(ctx context.Context, where string, err error) {
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.report.Err == nil {
		s.report.Err = fmt.Errorf("%s, %s: %w", where, time.Now().Format(logTime), err)
	}
}

func (s *Stream) send(ctx context.Context, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	buf := make([]byte, recordLen)
	for n := uint64(0); ; n++ {
		binary.BigEndian.PutUint64(buf, n)
		if _, err := s.client.Write(buf); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (s *Stream) receive() error {
	buf := make([]byte, recordLen)
	for n := uint64(0); ; n++ {
		if _, err := io.ReadFull(s.client, buf); err != nil {
			return err
		}
		if got := binary.BigEndian.Uint64(buf); got != n {
			return fmt.Errorf("record %d came instead of %d", got, n)
		}
		now := time.Now()
		s.mu.Lock()
		s.report.Bytes += recordLen
		s.gap(now)
		s.last = now
		s.mu.Unlock()
	}
}

func (s *Stream) gap(now time.Time) {
	if gap := now.Sub(s.last); gap > s.report.LongestGap {
		s.report.LongestGap, s.report.GapEnd = gap, now
	}
}

// Report tells what the stream saw since the last call of Interval, or since
// the start, up to now.
func (s *Stream) Report() StreamReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.soFar()
}

// Interval is Report, and begins anew. A gap that is not over counts in both.
// Like that of a [Load] it waits for the first record to come back, for no longer
// than three seconds: two calls in a quick row leave no time for any.
func (s *Stream) Interval() StreamReport {
	deadline := time.Now().Add(settleWithin)
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for r := s.Report(); r.Bytes == 0 && r.Err == nil && time.Now().Before(deadline); r = s.Report() {
		<-tick.C
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.soFar()
	s.resent += r.Resent
	s.report = StreamReport{From: r.From, To: r.To, Err: r.Err}
	return r
}

// soFar is Report with the lock held.
func (s *Stream) soFar() StreamReport {
	s.gap(time.Now())
	s.report.Resent = resent(s.client) + resent(s.server) - s.resent
	return s.report
}

// Stop ends the stream and is its last Report. It may be called once.
func (s *Stream) Stop() StreamReport {
	r := s.Report()
	s.cancel()
	_, _ = s.client.Close(), s.server.Close()
	s.workers.Wait()
	return r
}

// resent is how many segments a connection's end sent again.
func resent(c net.Conn) int {
	info, err := tcpInfo(c)
	if err != nil {
		return 0
	}
	return int(info.Total_retrans)
}

func tcpInfo(c net.Conn) (info *unix.TCPInfo, err error) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	ctlErr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	return info, errors.Join(err, ctlErr)
}

// Transfer is what came of [Send].
type Transfer struct {
	Bytes  int
	Took   time.Duration
	Resent int // segments sent again
	MSS    int // the sender's segment size at the end, in bytes, without headers
	PMTU   int // what the sender's kernel knows of the path at the end, in bytes
}

func (t Transfer) String() string {
	return fmt.Sprintf("%d bytes in %v (%.1f MB/s), %d segments sent again, MSS %d, path MTU %d",
		t.Bytes, t.Took.Round(time.Millisecond), float64(t.Bytes)/1e6/t.Took.Seconds(), t.Resent, t.MSS, t.PMTU)
}

// Send sends n bytes over a TCP connection as fast as it takes them, and
// returns when all have arrived. On an error, also when ctx ends, the transfer
// says how far it came.
func Send(ctx context.Context, from, to Place, n int) (Transfer, error) {
	client, server, err := connect(ctx, from, to)
	if err != nil {
		return Transfer{}, err
	}
	defer func() { _, _ = client.Close(), server.Close() }()
	stop := context.AfterFunc(ctx, func() {
		_, _ = client.SetDeadline(time.Unix(1, 0)), server.SetDeadline(time.Unix(1, 0))
	})
	defer stop()
	start := time.Now()
	sent := make(chan error, 1)
	go func() {
		buf := make([]byte, 64<<10)
		var err error
		for left := n; left > 0 && err == nil; left -= min(left, len(buf)) {
			_, err = client.Write(buf[:min(left, len(buf))])
		}
		sent <- err
	}()
	got, err := io.CopyN(io.Discard, server, int64(n))
	t := Transfer{Bytes: int(got), Took: time.Since(start)}
	if info, infoErr := tcpInfo(client); infoErr == nil {
		t.Resent, t.MSS, t.PMTU = int(info.Total_retrans), int(info.Snd_mss), int(info.Pmtu)
	}
	if err != nil {
		_ = client.Close() // ends the sender
	}
	if err = errors.Join(err, <-sent); errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("%w (%s)", ctx.Err(), t)
	}
	if err != nil {
		return t, fmt.Errorf("send %d bytes from %s to %s: %w", n, from.Name, to.Name, err)
	}
	return t, nil
}
