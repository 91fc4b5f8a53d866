package probe

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// rawSocket sends and receives messages in one encapsulation from one address of
// this host; see raw(7). A filter in the kernel passes packets with the magic
// number alone, so data traffic costs no work in user space. send may be called
// from any goroutine, receive from one; Close ends both.
type rawSocket struct {
	wrapping
	local netip.Addr
	f     *os.File
	raw   syscall.RawConn
	buf   []byte
}

// buffer is how much of a packet is read: payloads are short, and what follows
// is padding.
const buffer = 2048

// openVXLAN returns a socket for UDP packets from and to VXLAN's port, bound to
// an address of this host.
func openVXLAN(local netip.Addr, port uint16) (*rawSocket, error) {
	if port == 0 {
		return nil, errors.New("open a socket for probes in VXLAN: the port is 0")
	}
	return openRaw(wrapping{protoUDP, port}, local)
}

// openIPIP is [openVXLAN] for IPv4 in IPv4 or IPv6. The ports of what it sends
// and receives are 0.
func openIPIP(local netip.Addr) (*rawSocket, error) {
	return openRaw(wrapping{proto: protoIPIP}, local)
}

func openRaw(w wrapping, local netip.Addr) (*rawSocket, error) {
	s := &rawSocket{wrapping: w, local: local, buf: make([]byte, buffer)}
	domain, level, opt := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
	if local.Is6() {
		domain, level, opt = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, w.proto)
	if err != nil {
		return nil, fmt.Errorf("open a raw socket of protocol %d: %w", w.proto, err)
	}
	s.f = os.NewFile(uintptr(fd), "probes")
	// Between its making and the filter the socket receives everything: what came
	// by then is dropped below.
	if err := attach(fd, w.filter(local.Is4())); err != nil {
		return nil, errors.Join(err, s.f.Close())
	}
	for {
		if _, _, err := unix.Recvfrom(fd, s.buf, unix.MSG_DONTWAIT); err != nil {
			break
		}
	}
	// DF always, whatever the kernel believes of the path (PMTUDISC_PROBE is
	// 3 in both families): to measure the path is the point.
	err = unix.SetsockoptInt(fd, level, opt, unix.IP_PMTUDISC_PROBE)
	if err == nil {
		err = unix.Bind(fd, sockaddr(local))
	}
	if err == nil {
		s.raw, err = s.f.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up a raw socket of protocol %d at %s: %w", w.proto, local, err), s.f.Close())
	}
	return s, nil
}

func sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}

// filter passes packets that have no valid VNI and carry the magic number. The kernel gives a raw IPv4 socket the packet from the outer header,
// an IPv6 one from what follows it.
func (w wrapping) filter(v4 bool) []bpf.Instruction {
	drop := bpf.RetConstant{}
	var prog []bpf.Instruction
	load := func(off uint32) bpf.Instruction { return bpf.LoadAbsolute{Off: off, Size: 4} }
	if v4 {
		prog = append(prog, bpf.LoadMemShift{Off: 0}) // X: the outer header's length
		load = func(off uint32) bpf.Instruction { return bpf.LoadIndirect{Off: off, Size: 4} }
	}
	// The word that tells our packets from data: VXLAN's flags, or the
	// destination of the packet inside.
	off, word := uint32(udpLen), uint32(0)
	if w.port == 0 {
		off, word = 16, innerDst
	}
	return append(prog,
		load(off),
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: word, SkipTrue: 3},
		load(uint32(w.header())),
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: underlayMagic, SkipTrue: 1},
		bpf.RetConstant{Val: buffer},
		drop,
	)
}

func attach(fd int, prog []bpf.Instruction) error {
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return fmt.Errorf("assemble the packet filter: %w", err)
	}
	code := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		code[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]})
	if err != nil {
		return fmt.Errorf("attach the packet filter: %w", err)
	}
	return nil
}

// errTooBig says that a packet is larger than the device or the kernel takes.
var errTooBig = errors.New("larger than the device's MTU")

// send sends a payload with the don't-fragment bit set, from the tunnel's own
// port. The outer packet is padded to size bytes; with a smaller size, 0 say,
// it is as long as the payload makes it. The error matches errTooBig where the
// packet cannot leave this host.
func (s *rawSocket) send(to netip.AddrPort, payload []byte, size int) error {
	b := s.wrap(nil, s.local, to, payload, size)
	dst := sockaddr(to.Addr())
	var err error
	cerr := s.raw.Control(func(fd uintptr) {
		for {
			// Not waiting: a probe that cannot leave now is a probe lost.
			if err = unix.Sendto(int(fd), b, unix.MSG_DONTWAIT, dst); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	switch err = errors.Join(cerr, err); {
	case errors.Is(err, unix.EMSGSIZE):
		return fmt.Errorf("send %d bytes to %s: %w", size, to, errTooBig)
	case err != nil:
		return fmt.Errorf("send to %s: %w", to, err)
	}
	return nil
}

// receive waits for a payload. It is valid until the next call. The error
// matches [net.ErrClosed] after Close.
func (s *rawSocket) receive() (payload []byte, from netip.AddrPort, err error) {
	for {
		n, sa, err := s.recv()
		if err != nil {
			return nil, netip.AddrPort{}, err
		}
		payload, port, ok := s.unwrap(s.buf[:n], s.local.Is4())
		if !ok {
			continue
		}
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			return payload, netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), port), nil
		case *unix.SockaddrInet6:
			return payload, netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), port), nil
		}
	}
}

func (s *rawSocket) recv() (n int, from unix.Sockaddr, err error) {
	rerr := s.raw.Read(func(fd uintptr) bool {
		n, from, err = unix.Recvfrom(int(fd), s.buf, unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	switch {
	case rerr != nil: // there is no other reason not to wait
		return 0, nil, net.ErrClosed
	case err != nil:
		return 0, nil, os.NewSyscallError("recvfrom", err)
	}
	return n, from, nil
}

// Close ends the socket; calls that wait return.
func (s *rawSocket) Close() error { return s.f.Close() }

// anyPort sends payloads in VXLAN from a UDP port that the kernel chose, as VXLAN
// itself sends data, and receives the answers to that port. Its methods are as
// those of [rawSocket].
type anyPort struct {
	c   *net.UDPConn
	buf []byte
}

// openAnyPort returns an anyPort bound to an address of this host.
func openAnyPort(local netip.Addr) (*anyPort, error) {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0)))
	if err != nil {
		return nil, fmt.Errorf("open a UDP socket: %w", err)
	}
	return &anyPort{c: c, buf: make([]byte, buffer)}, nil
}

// send is as [rawSocket.send], without padding.
func (a *anyPort) send(to netip.AddrPort, payload []byte, _ int) error {
	_, err := a.c.WriteToUDPAddrPort(append(make([]byte, vxlanLen), payload...), to)
	return err
}

// receive is as [rawSocket.receive].
func (a *anyPort) receive() (payload []byte, from netip.AddrPort, err error) {
	for {
		n, from, err := a.c.ReadFromUDPAddrPort(a.buf)
		if err != nil {
			return nil, netip.AddrPort{}, err
		}
		if n >= vxlanLen {
			return a.buf[vxlanLen:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), nil
		}
	}
}

// Close is as [rawSocket.Close].
func (a *anyPort) Close() error { return a.c.Close() }
