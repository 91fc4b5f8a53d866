package bmp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
)

// TestNeverReads: what waits for a collector that does not read is bounded. It is
// disconnected, and told all again once it is back.
func TestNeverReads(t *testing.T) {
	t.Parallel()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const limit = 1 << 20
	begun := make(chan struct{}, 10)
	var s *Station
	s = NewStation(Options{
		Log: slog.New(slog.DiscardHandler), Addr: l.Addr().(*net.TCPAddr).AddrPort(), Retry: time.Millisecond, Longest: time.Millisecond, Limit: limit,
		Begin: func(send func([]byte) error) error {
			s.Open()
			begun <- struct{}{}
			return send(Initiation(nil, "node", "routerd"))
		},
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.Run(ctx) })
	defer wg.Wait()
	defer cancel(errors.New("the test ends"))
	for range 2 {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		<-begun
	put: // until it is disconnected: the kernel takes some of it
		for {
			select {
			case <-begun: // of the next connection, which waits for it too
				begun <- struct{}{}
				break put
			default:
			}
			s.Put(make([]byte, 4096))
			s.mu.Lock()
			size := s.size
			s.mu.Unlock()
			if size > limit {
				t.Fatalf("%d bytes wait, where %d may", size, limit)
			}
			if st := s.Status(); errors.Is(st.Err, errSlow) {
				break put
			}
		}
	}
	await.Until(t, "a connection after the last", func() error {
		if st := s.Status(); !st.Up {
			return errors.New("not connected")
		}
		return nil
	})
}

// TestNotOpen: before a connection stands nothing is kept for it.
func TestNotOpen(t *testing.T) {
	t.Parallel()
	s := NewStation(Options{Log: slog.New(slog.DiscardHandler), Limit: 1})
	s.Open()
	s.Put(make([]byte, 100))
	if s.size != 0 || len(s.waiting) != 0 || s.Status().Sent != 0 || s.Status().Up {
		t.Errorf("%d bytes wait; %+v", s.size, s.Status())
	}
}
