package kube

import (
	"io"
	"net"
	"strconv"
	"sync"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Forward has a server of this namespace answer, under its own address, in another network
// namespace. Make one with [Server.Forward] or [NewForward].
type Forward struct {
	listener net.Listener
	target   string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
	done  sync.WaitGroup
}

// Forward starts a forwarder into a namespace. [Forward.Close] ends it.
func (s *Server) Forward(space string) (*Forward, error) {
	return NewForward(space, "127.0.0.1:"+strconv.Itoa(s.port))
}

// NewForward starts a forwarder for a server at a loopback address. [Forward.Close] ends it.
func NewForward(space, target string) (*Forward, error) {
	f := &Forward{target: target, conns: map[net.Conn]bool{}}
	err := ns.Do(space, func() (err error) {
		f.listener, err = net.Listen("tcp", f.target)
		return err
	})
	if err != nil {
		return nil, err
	}
	f.done.Go(func() {
		for {
			c, err := f.listener.Accept()
			if err != nil {
				return
			}
			f.done.Go(func() { f.pass(c) })
		}
	})
	return f, nil
}

// hold notes a connection, unless none is to be.
func (f *Forward) hold(c net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conns[c] = !f.cut
	if f.cut {
		delete(f.conns, c)
	}
	return !f.cut
}

func (f *Forward) drop(c net.Conn) {
	f.mu.Lock()
	delete(f.conns, c)
	f.mu.Unlock()
	c.Close()
}

func (f *Forward) pass(c net.Conn) {
	defer f.drop(c)
	if !f.hold(c) {
		return
	}
	up, err := net.Dial("tcp", f.target)
	if err != nil {
		return
	}
	defer f.drop(up)
	if !f.hold(up) {
		return
	}
	var ways sync.WaitGroup
	for _, w := range [][2]net.Conn{{c, up}, {up, c}} {
		ways.Go(func() {
			_, _ = io.Copy(w[0], w[1]) // it ends with either side
			w[0].Close()
			w[1].Close()
		})
	}
	ways.Wait()
}

// Cut ends every connection and takes no other until heal is called.
func (f *Forward) Cut() (heal func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut = true
	for c := range f.conns {
		c.Close()
	}
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.cut = false
	}
}

// Close ends it.
func (f *Forward) Close() {
	f.listener.Close()
	f.Cut()
	f.done.Wait()
}
