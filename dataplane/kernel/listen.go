package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// maxEvents bounds the notifications kept for the loop. A listing is cheaper
// than reading more.
const maxEvents = 1 << 17

// notification is a message that is no answer, and when it was read.
type notification struct {
	nl.Message
	at time.Time
}

// listener receives the kernel's notifications. A goroutine ([listener.run])
// empties the socket while the loop is busy; the loop itself can take all that
// the kernel has said so far, which includes the consequences of every request
// it has answered.
type listener struct {
	c   *netlink.Conn
	raw syscall.RawConn

	mu      sync.Mutex
	buf     []byte
	events  []notification
	overrun bool
	err     error
}

// listen opens a listener for what rtnetlink notifies of.
func listen(buffer int) (*listener, error) {
	return listenTo(unix.NETLINK_ROUTE, buffer,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_NEXTHOP, unix.RTNLGRP_NEIGH,
		unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
}

// listenTo opens a listener for groups of a netlink protocol in the calling
// thread's network namespace.
func listenTo(protocol, buffer int, groups ...uint32) (*listener, error) {
	c, raw, err := nl.Listen(protocol, buffer, groups...)
	if err != nil {
		return nil, err
	}
	return &listener{c: c, raw: raw, buf: make([]byte, 1<<16)}, nil
}

func (l *listener) Close() error { return l.c.Close() }

// ignore makes the kernel drop the echoes of requests from port about routes,
// next hops and neighbours, which would double the cost of each. Those about
// devices and addresses say what became of them and are kept.
func (l *listener) ignore(port uint32) error {
	// Classic BPF loads in network order what the kernel wrote in the host's.
	word := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	types := []uint16{
		unix.RTM_NEWROUTE, unix.RTM_DELROUTE, unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH, unix.RTM_NEWNEXTHOP, rtmDelNextHop,
	}
	n := uint8(len(types))
	list := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4}, // nlmsg_pid
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: word, SkipFalse: n + 1},
		bpf.LoadAbsolute{Off: 4, Size: 2}, // nlmsg_type
	}
	for i, t := range types {
		half := uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, t)))
		list = append(list, bpf.JumpIf{Cond: bpf.JumpEqual, Val: half, SkipTrue: n - uint8(i)})
	}
	prog, err := bpf.Assemble(append(list, bpf.RetConstant{Val: 1<<32 - 1}, bpf.RetConstant{}))
	if err != nil {
		return fmt.Errorf("filter notifications: %w", err)
	}
	if err := l.c.SetBPF(prog); err != nil {
		return fmt.Errorf("filter notifications: %w", err)
	}
	return nil
}

// run collects notifications and calls arrived after each burst, until the
// listener is closed.
func (l *listener) run(arrived func()) {
	for {
		err := l.raw.Read(func(fd uintptr) bool {
			var b [1]byte
			_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
			if errors.Is(err, unix.ENOBUFS) {
				l.mu.Lock()
				l.overrun = true // reading the error cleared it
				l.mu.Unlock()
			}
			return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
		})
		l.mu.Lock()
		if err != nil {
			l.err = err
		} else {
			l.fill()
		}
		stop := l.err != nil
		l.mu.Unlock()
		arrived()
		if stop {
			return
		}
	}
}

// take returns all that the kernel has said so far and was not taken. With
// overrun some of it was lost. The error is one of the socket.
func (l *listener) take() (events []notification, overrun bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fill()
	events, overrun, err = l.events, l.overrun, l.err
	l.events, l.overrun = nil, false
	return events, overrun, err
}

// fill reads until the socket is empty. The lock is held.
func (l *listener) fill() {
	if l.err != nil {
		return
	}
	cerr := l.raw.Control(func(fd uintptr) {
		for {
			n, from, err := unix.Recvfrom(int(fd), l.buf, unix.MSG_DONTWAIT)
			switch {
			case errors.Is(err, unix.EAGAIN):
				return
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.ENOBUFS):
				l.overrun = true
			case err != nil:
				l.err = os.NewSyscallError("recvfrom", err)
				return
			default:
				if sa, ok := from.(*unix.SockaddrNetlink); ok && sa.Pid == 0 {
					l.keep(l.buf[:n])
				}
			}
		}
	})
	if cerr != nil {
		l.err = cerr
	}
}

func (l *listener) keep(b []byte) {
	if len(l.events) >= maxEvents {
		l.events, l.overrun = nil, true
	}
	now := time.Now()
	for m := range nl.Messages(bytes.Clone(b)) {
		l.events = append(l.events, notification{m, now})
	}
}
