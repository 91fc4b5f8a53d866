package bfd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
)

// Descriptor is where the process finds its end of the connection to the daemon.
const Descriptor = 3

// endTime bounds how long the process may take to tell its peers that the sessions go.
const endTime = 2 * time.Second

// Supervisor runs the process that serves sessions, while there are any. Its methods may be called by any goroutine.
type Supervisor struct {
	log     *slog.Logger
	command func() *exec.Cmd
	notify  func(Status)
	changed async.Signal

	mu   sync.Mutex
	want []Session
	conn *net.UnixConn // to the process; nil while there is none
	asks []chan<- []Status
	err  error // why there is no process
}

// NewSupervisor returns a supervisor without sessions. command returns the process's command line, ready to start, which
// calls [Serve] with the connection at [Descriptor]. notify is called with each session whose state has changed, one
// at a time.
func NewSupervisor(log *slog.Logger, command func() *exec.Cmd, notify func(Status)) *Supervisor {
	return &Supervisor{log: log, command: command, notify: notify, changed: async.NewSignal()}
}

// Set makes the sessions those of want. It does not wait for the process.
func (s *Supervisor) Set(want []Session) {
	s.mu.Lock()
	s.want = want
	s.mu.Unlock()
	s.changed.Set()
}

// Status returns the sessions as the process knows them. It fails if there is none although there should be, or when
// ctx ends.
func (s *Supervisor) Status(ctx context.Context) ([]Status, error) {
	c := make(chan []Status, 1)
	s.mu.Lock()
	conn, err := s.conn, s.err
	idle := len(s.want) == 0
	if conn != nil {
		s.asks = append(s.asks, c)
		err = json.NewEncoder(conn).Encode(request{})
	}
	s.mu.Unlock()
	switch {
	case err != nil:
		return nil, fmt.Errorf("ask the process of BFD: %w", err)
	case conn == nil && idle:
		return nil, nil
	case conn == nil:
		return nil, errors.New("the process of BFD is not started yet")
	}
	select {
	case all, ok := <-c:
		if !ok {
			return nil, errors.New("the process of BFD ended")
		}
		return all, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("ask the process of BFD: %w", ctx.Err())
	}
}

// Run starts the process when there are sessions, again when it ends, and ends it with ctx: its peers are told that the
// sessions are down administratively.
func (s *Supervisor) Run(ctx context.Context) {
	backoff := async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}
	for ctx.Err() == nil {
		if !s.wanted() {
			select {
			case <-ctx.Done():
				return
			case <-s.changed:
			}
			continue
		}
		start := time.Now()
		err := s.runOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			continue // no session is left
		}
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
		s.log.Error("BFD's process ended; it is started again", "err", err)
		if time.Since(start) > time.Minute {
			backoff.Reset()
		}
		if backoff.Wait(ctx) != nil {
			return
		}
	}
}

func (s *Supervisor) wanted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.want) > 0
}

// runOnce starts the process and serves it until ctx ends, no session is left, or it ends by itself, which is an error.
func (s *Supervisor) runOnce(ctx context.Context) error {
	ours, theirs, err := pair()
	if err != nil {
		return err
	}
	cmd := s.command()
	cmd.ExtraFiles = []*os.File{theirs}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		ours.Close()
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		s.read(ours)
	}()
	s.mu.Lock()
	s.conn, s.err = ours, nil
	s.mu.Unlock()
	s.changed.Set() // it is to have the sessions
	err = s.write(ctx, ours, gone)
	s.mu.Lock()
	s.conn = nil
	s.mu.Unlock()
	// Half closed: what it still says is read until it ends.
	if cerr := ours.CloseWrite(); cerr != nil && err == nil {
		err = cerr
	}
	kill := time.AfterFunc(endTime, func() {
		if cmd.Process.Kill() == nil {
			s.log.Warn("BFD's process did not end and was killed")
		}
	})
	werr := cmd.Wait()
	kill.Stop()
	ours.Close()
	<-gone
	if err != nil {
		return errors.Join(err, werr)
	}
	return nil
}

// write sends the sessions whenever they change.
func (s *Supervisor) write(ctx context.Context, c *net.UnixConn, gone <-chan struct{}) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-gone:
			return errors.New("it closed the connection")
		case <-s.changed:
		}
		s.mu.Lock()
		want := s.want
		var err error
		if len(want) > 0 {
			err = json.NewEncoder(c).Encode(request{Set: true, Sessions: want})
		}
		s.mu.Unlock()
		if err != nil {
			return fmt.Errorf("send the sessions: %w", err)
		}
		if len(want) == 0 {
			return nil
		}
	}
}

// read hands over what the process says until it ends.
func (s *Supervisor) read(c *net.UnixConn) {
	in := json.NewDecoder(c)
	for {
		var r reply
		if err := in.Decode(&r); err != nil {
			break
		}
		if r.Warning != "" {
			s.log.Warn("BFD is scheduled like other processes, so that short intervals may end sessions on a busy host", "reason", r.Warning)
		}
		if r.Changed != nil {
			s.notify(*r.Changed)
		}
		if r.Answer {
			s.mu.Lock()
			if len(s.asks) > 0 {
				s.asks[0] <- r.Sessions
				s.asks = s.asks[1:]
			}
			s.mu.Unlock()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.asks {
		close(c)
	}
	s.asks = nil
}

// pair returns a connection and the file of its other end.
func pair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "bfd"), os.NewFile(uintptr(fds[1]), "bfd")
	c, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("use a socket pair: %w", err)
	}
	return c.(*net.UnixConn), theirs, nil
}
