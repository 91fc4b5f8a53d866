package lab

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Capture is a running capture of the IP packets on one device. Methods are
// safe for concurrent use.
type Capture struct {
	f      *os.File
	filter func(Packet) bool
	reader sync.WaitGroup

	mu      sync.Mutex
	packets []Packet
	arrived chan struct{} // size one
}

// Capture begins to record what passes the device of HOST, HOST/POD or the
// spine in either direction, as far as filter, which may be nil, says yes. When
// it returns, everything that comes is seen. The caller stops it.
func (l *Lab) Capture(where, dev string, filter func(Packet) bool) (*Capture, error) {
	if err := l.checkWhere(where); err != nil {
		return nil, err
	}
	var fd int
	err := ns.Do(l.Space(where), func() (err error) {
		fd, err = packetSocket(dev)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("capture on %s of %s: %w", dev, where, err)
	}
	if filter == nil {
		filter = func(Packet) bool { return true }
	}
	c := &Capture{f: os.NewFile(uintptr(fd), "packets"), filter: filter, arrived: make(chan struct{}, 1)}
	c.reader.Go(c.read)
	return c, nil
}

// packetSocket opens a packet(7) socket on the device. It is bound before it
// gets a protocol: a packet of another device cannot slip in.
func packetSocket(dev string) (int, error) {
	link, err := net.InterfaceByName(dev)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
		unix.Close(fd)
		return -1, err
	}
	const networkOrder = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xff00 // all: a socket for one protocol does not see what leaves
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder, Ifindex: link.Index}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (c *Capture) read() {
	buf := make([]byte, 1<<16)
	for {
		n, err := c.f.Read(buf)
		if err != nil {
			return // ended by Stop
		}
		c.note(buf[:n])
	}
}

func (c *Capture) note(frame []byte) {
	p, ok := parseFrame(frame)
	if !ok || !c.filter(p) {
		return
	}
	p.Time = time.Now()
	c.mu.Lock()
	c.packets = append(c.packets, p)
	c.mu.Unlock()
	select {
	case c.arrived <- struct{}{}:
	default:
	}
}

// Packets returns what was seen up to now.
func (c *Capture) Packets() []Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.packets)
}

// WaitFor returns the packets once there are n of them, or what there is with
// ctx's error.
func (c *Capture) WaitFor(ctx context.Context, n int) ([]Packet, error) {
	for {
		p := c.Packets()
		if len(p) >= n {
			return p, nil
		}
		select {
		case <-ctx.Done():
			return p, fmt.Errorf("wait for %d packets, saw %d: %w", n, len(p), ctx.Err())
		case <-c.arrived:
		}
	}
}

// Stop ends the capture and returns what passed until it was called, also what nobody
// had read yet.
func (c *Capture) Stop() []Packet {
	_ = c.f.SetReadDeadline(time.Unix(0, 0)) // ends the reader
	c.reader.Wait()
	if raw, err := c.f.SyscallConn(); err == nil {
		_ = raw.Control(c.drain)
	}
	_ = c.f.Close()
	return c.Packets()
}

// drained bounds what is read of a device on which packets go on to pass.
const drained = 1 << 16

// drain notes what the socket holds.
func (c *Capture) drain(fd uintptr) {
	buf := make([]byte, 1<<16)
	for range drained {
		n, err := unix.Read(int(fd), buf)
		if err != nil {
			return
		}
		c.note(buf[:n])
	}
}
