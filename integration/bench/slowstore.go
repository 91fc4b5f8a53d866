package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store/embedded"
)

// slowStore is an etcd in this process and a socket in front of it that delays
// what passes.
type slowStore struct {
	dir    string
	server *embedded.Server
	client *clientv3.Client // without delay
	listen net.Listener
	delay  atomic.Int64 // nanoseconds, of a request and its answer together

	ctx  context.Context //nolint:containedctx // ends the connections' goroutines
	stop context.CancelFunc
	work sync.WaitGroup
}

func startSlowStore(ctx context.Context) (s *slowStore, err error) {
	dir, err := os.MkdirTemp("", "rdbench-")
	if err != nil {
		return nil, err
	}
	s = &slowStore{dir: dir}
	s.ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	s.server, err = embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(dir, "etcd"), PKIDir: filepath.Join(dir, "pki"), Socket: filepath.Join(dir, "etcd.sock"),
	})
	if err != nil {
		return nil, err
	}
	s.client, err = clientv3.New(clientv3.Config{Endpoints: []string{s.server.Endpoint()}, DialTimeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	if s.listen, err = new(net.ListenConfig).Listen(ctx, "unix", s.socket()); err != nil {
		return nil, err
	}
	s.work.Go(s.serve)
	return s, nil
}

func (s *slowStore) socket() string { return filepath.Join(s.dir, "slow.sock") }

// endpoint is where clients find the etcd behind the delay.
func (s *slowStore) endpoint() string { return "unix://" + s.socket() }

// setDelay makes each request take that much longer.
func (s *slowStore) setDelay(d time.Duration) { s.delay.Store(int64(d)) }

// revision counts the transactions that wrote something since etcd was made:
// each is one revision.
func (s *slowStore) revision(ctx context.Context) (int64, error) {
	r, err := s.client.Get(ctx, "none", clientv3.WithCountOnly())
	if err != nil {
		return 0, err
	}
	return r.Header.Revision, nil
}

// How long nothing must have been written for the daemon to be through with
// what it leaves for afterwards, with two round trips more, and how long that
// may take.
const (
	quietFor    = 200 * time.Millisecond
	quietWithin = time.Minute
)

// quiet waits until the daemon has told the datastore what it had to tell.
func (s *slowStore) quiet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quietWithin)
	defer cancel()
	tick := time.NewTicker(quietFor / 10)
	defer tick.Stop()
	last, since := int64(-1), time.Now()
	for {
		rev, err := s.revision(ctx)
		if err != nil {
			return fmt.Errorf("wait until nothing is written: %w", err)
		}
		if rev != last {
			last, since = rev, time.Now()
		}
		if time.Since(since) > quietFor+2*time.Duration(s.delay.Load()) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until nothing is written: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

func (s *slowStore) serve() {
	for {
		c, err := s.listen.Accept()
		if err != nil {
			return
		}
		s.work.Go(func() { s.pass(c) })
	}
}

// pass carries one connection until either side ends it.
func (s *slowStore) pass(c net.Conn) {
	etcd, err := new(net.Dialer).DialContext(s.ctx, "unix", filepath.Join(s.dir, "etcd.sock"))
	if err != nil {
		_ = c.Close()
		return
	}
	ctx, done := context.WithCancel(s.ctx)
	context.AfterFunc(ctx, func() { _, _ = c.Close(), etcd.Close() })
	var both sync.WaitGroup
	both.Go(func() { defer done(); s.carry(etcd, c) })
	both.Go(func() { defer done(); s.carry(c, etcd) })
	both.Wait()
}

// chunk is what was read at once, and when it is to go on.
type chunk struct {
	data []byte
	at   time.Time
}

// carry hands on what it reads, each half of the delay later.
func (s *slowStore) carry(to io.Writer, from io.Reader) {
	// What is under way: the kernel's buffer is far smaller than this holds.
	way := make(chan chunk, 1024)
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(way)
		for {
			buf := make([]byte, 32<<10)
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			select {
			case way <- chunk{buf[:n], time.Now().Add(time.Duration(s.delay.Load() / 2))}:
			case <-s.ctx.Done():
				return
			}
		}
	})
	for c := range way {
		if wait := time.Until(c.at); wait > 0 {
			select {
			case <-time.After(wait):
			case <-s.ctx.Done():
			}
		}
		if _, err := to.Write(c.data); err != nil {
			break
		}
	}
	// Its reader ends when the other direction's end closes the connection.
	for range way {
	}
	reader.Wait()
}

func (s *slowStore) close() error {
	s.stop()
	var errs []error
	if s.listen != nil {
		errs = append(errs, s.listen.Close())
	}
	s.work.Wait()
	if s.client != nil {
		errs = append(errs, s.client.Close())
	}
	if s.server != nil {
		s.server.Close()
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}
