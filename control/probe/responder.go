package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
)

// What a responder does at most, so that probes of a confused peer cost little.
const (
	echoRate       = 400  // echoes a second for one asker
	echoBurst      = 1000 // three whole measurements
	maxTransfers   = 8    // at once
	transferWithin = 6 * time.Second
	receiveBuffer  = 2 << 20 // bytes: bursts of several peers
	reopen         = time.Second
)

// asking says who may ask and how their questions are signed. Its methods may be
// called from any goroutine.
type asking struct {
	mu    sync.RWMutex
	key   []byte             // empty: not known yet
	peers map[netip.Addr]int // in how many nodes' name, inside tunnels
	// last is when an echo of a peer came in last, by device. Nobody is in it who is not in peers.
	last map[netip.Addr]map[string]time.Time
}

func newAsking() *asking {
	return &asking{peers: map[netip.Addr]int{}, last: map[netip.Addr]map[string]time.Time{}}
}

// heard notes that an echo of a peer came in by a device.
func (a *asking) heard(peer netip.Addr, device string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.peers[peer] == 0 {
		return // it left meanwhile
	}
	if a.last[peer] == nil {
		a.last[peer] = map[string]time.Time{}
	}
	a.last[peer][device] = now
}

// lastHeard returns when an echo of a peer came in last by a device; the zero Time: never.
func (a *asking) lastHeard(peer netip.Addr, device string) time.Time {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.last[peer][device]
}

func (a *asking) setKey(key []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.key = key
}

// replace replaces the addresses of a node.
func (a *asking) replace(old, now []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range old {
		if a.peers[p]--; a.peers[p] == 0 {
			delete(a.peers, p)
			delete(a.last, p)
		}
	}
	for _, p := range now {
		a.peers[p]++
	}
}

// may returns the key of a peer's questions; false: it may not ask.
func (a *asking) may(peer netip.Addr) (key []byte, ok bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.key, len(a.key) > 0 && a.peers[peer] > 0
}

// answers runs a responder on each endpoint.
type answers struct {
	port    uint16
	log     *slog.Logger
	allow   *asking
	running map[endpoint]context.CancelFunc
	outside outside
	wg      sync.WaitGroup
}

// set starts and stops responders so that there is one for each endpoint. It is
// for one goroutine. Plain packets are heard that came by the devices of outside.
func (a *answers) set(ctx context.Context, endpoints []endpoint, outside map[int]bool) {
	a.outside.set(outside)
	wanted := map[endpoint]bool{}
	for _, e := range endpoints {
		wanted[e] = true
		if a.running[e] != nil {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		a.running[e] = cancel
		if e.plain() {
			a.wg.Go(func() {
				(&plainResponder{at: netip.AddrPortFrom(e.addr, a.port), log: a.log, allow: a.allow, outside: &a.outside}).keep(ctx)
			})
			continue
		}
		a.wg.Go(func() { (&responder{at: e, port: a.port, log: a.log, allow: a.allow}).keep(ctx) })
	}
	for e, cancel := range a.running {
		if !wanted[e] {
			cancel()
			delete(a.running, e)
		}
	}
}

// stop ends all responders and waits for them.
func (a *answers) stop() {
	for _, cancel := range a.running {
		cancel()
	}
	a.wg.Wait()
}

// responder answers probes that come in by one device. Its address is one of
// this host's on that device or, where the tunnel has no addresses of its own,
// on the underlay; what comes in by another device is not heard.
type responder struct {
	at    endpoint
	port  uint16
	log   *slog.Logger
	allow *asking

	rates rates // of the echo loop alone
}

// keep runs the responder until ctx ends. The device's address may not be there
// yet.
func (r *responder) keep(ctx context.Context) {
	said := ""
	for ctx.Err() == nil {
		err := r.run(ctx)
		if ctx.Err() != nil {
			return
		}
		if s := fmt.Sprint(err); s != said {
			r.log.Debug("cannot answer probes yet", "link", r.at.link, "error", err)
			said = s
		}
		_ = async.Sleep(ctx, reopen)
	}
}

// run answers until ctx ends. It returns at once when the sockets cannot be
// opened.
func (r *responder) run(ctx context.Context) error {
	at := netip.AddrPortFrom(r.at.addr, r.port)
	udp, err := listenUDP(ctx, r.at.link, at)
	if err != nil {
		return fmt.Errorf("answer probes on %s: %w", r.at.link, err)
	}
	defer udp.Close()
	// Without the permission the default has to do.
	if raw, err := udp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) })
	}
	f := dataplane.FamilyOf(at.Addr())
	lc := net.ListenConfig{Control: onDevice(r.at.link, f, true, 0), KeepAlive: -1}
	tcp, err := lc.Listen(ctx, network("tcp", f), at.String())
	if err != nil {
		return fmt.Errorf("answer probes on %s: %w", r.at.link, err)
	}
	defer tcp.Close()
	stop := context.AfterFunc(ctx, func() { udp.Close(); tcp.Close() })
	defer stop()
	r.log.Debug("answering probes", "link", r.at.link, "address", at)
	var wg sync.WaitGroup
	wg.Go(func() { r.echo(udp) })
	wg.Go(func() { r.accept(ctx, tcp) })
	wg.Wait()
	return ctx.Err()
}

// echo answers each packet with a small one. Answers have the kernel's
// checksum: this host's own offload must not be taken for the asker's.
func (r *responder) echo(c *net.UDPConn) {
	r.rates = rates{allow: r.allow}
	b := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		peer := from.Addr().Unmap()
		key, ok := r.allow.may(peer)
		if !ok || !r.rates.take(peer) {
			continue
		}
		m, err := decode(b[:n], key)
		if err != nil || m.kind != kindEcho {
			continue
		}
		r.allow.heard(peer, r.at.link, time.Now())
		out := appendMessage(nil, message{kind: kindReply, nonce: m.nonce, index: m.index}, key, 0)
		err = software(c, func() error { _, err := c.WriteToUDPAddrPort(out, from); return err })
		if err != nil && !errors.Is(err, net.ErrClosed) {
			r.log.Debug("answer to a probe", "link", r.at.link, "peer", peer, "error", err)
		}
	}
}

// accept serves transfers until the listener is closed, and waits for them.
func (r *responder) accept(ctx context.Context, l net.Listener) {
	var transfers errgroup.Group
	defer func() { _ = transfers.Wait() }() // none returns an error
	transfers.SetLimit(maxTransfers)
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, say: the backlog keeps the connection.
			if async.Sleep(ctx, 100*time.Millisecond) != nil {
				return
			}
			continue
		}
		if !transfers.TryGo(func() error { r.transfer(ctx, c); return nil }) {
			c.Close()
		}
	}
}

// transfer reads the data and writes the receipt.
func (r *responder) transfer(ctx context.Context, c net.Conn) {
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	from, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return
	}
	key, ok := r.allow.may(from.AddrPort().Addr().Unmap())
	if !ok {
		return
	}
	if err := c.SetDeadline(time.Now().Add(transferWithin)); err != nil {
		return
	}
	head := make([]byte, messageLen)
	if _, err := io.ReadFull(c, head); err != nil {
		return
	}
	m, err := decode(head, key)
	if err != nil || m.kind != kindTransfer || m.size > transferSize {
		return
	}
	data := make([]byte, m.size)
	if _, err := io.ReadFull(c, data); err != nil {
		return
	}
	_, _ = c.Write(appendMessage(nil, message{kind: kindReceipt, nonce: digest(data), size: m.size}, key, 0)) // the asker sees what is missing
	// The asker closes first, so that this side keeps no waiting state.
	_, _ = io.Copy(io.Discard, c)
}
