package bmp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
)

// Options are those of a connection to a collector.
type Options struct {
	Log  *slog.Logger
	Addr netip.AddrPort

	// Retry is the pause after an attempt, which grows up to Longest (RFC 7854 section 3.2).
	Retry, Longest time.Duration

	// Limit bounds what waits to be read by the collector, in bytes: who has fallen behind by
	// more is disconnected, and begins anew.
	Limit int

	// Begin is called when a connection stands, on the station's goroutine. It has to call
	// [Station.Open], and then writes what there is already with send, which returns an error when
	// the connection has ended. What is put meanwhile is sent after it.
	Begin func(send func([]byte) error) error
}

// Station is the connection to a collector, and what waits for it. Its methods may be called by
// any goroutine and never wait.
type Station struct {
	o Options

	mu      sync.Mutex
	open    bool // what is put is for the connection that stands
	waiting [][]byte
	size    int
	wake    chan struct{}
	cancel  context.CancelCauseFunc // of the connection; nil: none stands
	up      bool
	since   time.Time
	last    error  // why the connection before ended; nil: there was none
	sent    uint64 // bytes since the station began
}

// Defaults of [Options].
const (
	DefaultRetry   = 30 * time.Second
	DefaultLongest = 720 * time.Second
	DefaultLimit   = 16 << 20
)

// slowTime is how long a collector may take to read what is written at once.
const slowTime = time.Minute

var errSlow = errors.New("the collector reads too slowly")

// NewStation returns a station that connects in [Station.Run].
func NewStation(o Options) *Station {
	return &Station{o: o, wake: make(chan struct{}, 1), since: time.Now()}
}

// Status is how a station is.
type Status struct {
	Addr  netip.AddrPort
	Up    bool
	Since time.Time
	Sent  uint64 // bytes
	Err   error  // why it is not up; nil: it has not been tried yet
}

// Status returns the present state.
func (s *Station) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Addr: s.o.Addr, Up: s.up, Since: s.since, Sent: s.sent}
	if !s.up {
		st.Err = s.last
	}
	return st
}

// Open has what is put from now on sent.
func (s *Station) Open() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = s.cancel != nil
}

// Put has messages sent, which are not changed any more. Where there is no connection they
// are dropped.
func (s *Station) Put(messages []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return
	}
	if s.size += len(messages); s.size > s.o.Limit {
		s.open, s.waiting, s.size = false, nil, 0
		s.cancel(errSlow)
		return
	}
	s.waiting = append(s.waiting, messages)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run connects, again and again, until ctx ends; its cause is sent to the collector.
func (s *Station) Run(ctx context.Context) {
	retry := async.Backoff{Min: s.o.Retry, Max: s.o.Longest}
	for ctx.Err() == nil {
		stood, err := s.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		if stood {
			retry.Reset()
		}
		s.mu.Lock()
		if s.last == nil || s.last.Error() != err.Error() || stood {
			s.o.Log.Warn("bmp collector not connected", "collector", s.o.Addr, "error", err)
		}
		s.last = err
		s.mu.Unlock()
		if retry.Wait(ctx) != nil {
			return
		}
	}
}

// connect has one connection, and returns why it ended and whether the collector took the
// whole table.
func (s *Station) connect(ctx context.Context) (stood bool, err error) {
	var d net.Dialer
	dialing, cancel := context.WithTimeout(ctx, slowTime)
	defer cancel()
	c, err := d.DialContext(dialing, "tcp", s.o.Addr.String())
	if err != nil {
		return false, fmt.Errorf("connect: %w", err)
	}
	defer c.Close()
	conn, end := context.WithCancelCause(ctx)
	defer end(nil)
	s.mu.Lock()
	s.cancel = end
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.up {
			s.since = time.Now()
		}
		s.open, s.up, s.cancel, s.waiting, s.size = false, false, nil, nil, 0
	}()
	var closed sync.WaitGroup
	defer closed.Wait()
	defer end(nil)
	closed.Go(func() { // a collector says nothing: what it sends is dropped, until it closes
		var b [512]byte
		for {
			if _, err := c.Read(b[:]); err != nil {
				end(errors.New("the collector closed the connection"))
				return
			}
		}
	})
	closed.Go(func() {
		<-conn.Done()
		if ctx.Err() == nil { // otherwise the last word is still to be written
			c.Close()
			return
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
	})
	send := func(b []byte) error {
		if err := context.Cause(conn); err != nil {
			return err
		}
		if err := c.SetWriteDeadline(time.Now().Add(slowTime)); err != nil {
			return err
		}
		n, err := c.Write(b)
		s.mu.Lock()
		s.sent += uint64(n)
		s.mu.Unlock()
		if cause := context.Cause(conn); err != nil && cause != nil {
			err = cause
		}
		return err
	}
	if err = s.o.Begin(send); err == nil {
		s.mu.Lock()
		s.up, s.since, s.last, stood = true, time.Now(), nil, true
		s.mu.Unlock()
		s.o.Log.Info("bmp collector connected", "collector", s.o.Addr)
		err = s.pass(conn, send)
	}
	if ctx.Err() != nil {
		_, _ = c.Write(Termination(nil, ClosedByConfiguration, context.Cause(ctx).Error()))
	}
	return stood, err
}

// pass sends what is put until the connection ends.
func (s *Station) pass(ctx context.Context, send func([]byte) error) error {
	for {
		s.mu.Lock()
		list := s.waiting
		s.waiting = nil
		s.mu.Unlock()
		for _, b := range list {
			if err := send(b); err != nil {
				return err
			}
			s.mu.Lock()
			s.size -= len(b)
			s.mu.Unlock()
		}
		if len(list) > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.wake:
		}
	}
}
