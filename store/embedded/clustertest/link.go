package clustertest

import (
	"net"
	"sync"
)

// link passes connections on from one unix socket to another, until it is cut: then
// what is sent waits, as it does behind a network that drops packets.
type link struct {
	to string
	l  net.Listener

	mu    sync.Mutex
	open  chan struct{} // closed while packets pass
	conns map[net.Conn]bool
	ended bool
	wg    sync.WaitGroup
}

func newLink(from, to string) (*link, error) {
	l, err := net.Listen("unix", from)
	if err != nil {
		return nil, err
	}
	k := &link{to: to, l: l, open: make(chan struct{}), conns: map[net.Conn]bool{}}
	close(k.open)
	k.wg.Go(k.accept)
	return k, nil
}

func (k *link) accept() {
	for {
		from, err := k.l.Accept()
		if err != nil {
			return // it is closed
		}
		k.wg.Go(func() { k.serve(from) })
	}
}

func (k *link) serve(from net.Conn) {
	defer from.Close()
	if !k.pass() {
		return
	}
	to, err := net.Dial("unix", k.to)
	if err != nil {
		return // nobody listens: the other end sees its connection closed
	}
	defer to.Close()
	if !k.keep(from, to) {
		return
	}
	defer k.drop(from, to)
	var back sync.WaitGroup
	back.Go(func() { k.copy(from, to) })
	k.copy(to, from)
	back.Wait()
}

// copy passes on what comes until one end closes.
func (k *link) copy(dst, src net.Conn) {
	// The other direction ends too.
	defer dst.Close()
	defer src.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := src.Read(b)
		if !k.pass() {
			return
		}
		if n > 0 {
			if _, err := dst.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass waits while the link is cut. It reports false when the link has ended.
func (k *link) pass() bool {
	k.mu.Lock()
	open := k.open
	k.mu.Unlock()
	<-open
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.ended
}

func (k *link) keep(conns ...net.Conn) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range conns {
		k.conns[c] = true
	}
	return !k.ended
}

func (k *link) drop(conns ...net.Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range conns {
		delete(k.conns, c)
	}
}

func (k *link) cut() {
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case <-k.open:
		k.open = make(chan struct{})
	default:
	}
}

func (k *link) join() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.opened()
}

func (k *link) opened() {
	select {
	case <-k.open:
	default:
		close(k.open)
	}
}

// close ends the link and its connections.
func (k *link) close() {
	k.l.Close()
	k.mu.Lock()
	k.ended = true
	k.opened()
	for c := range k.conns {
		c.Close()
	}
	k.mu.Unlock()
	k.wg.Wait()
}
