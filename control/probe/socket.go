package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// onDevice binds a socket to a device, so that packets take it whatever the
// routes say, and come in by no other (socket(7), SO_BINDTODEVICE). Packets
// keep their size: DF is set and what the kernel believes of the path's MTU is
// not heeded (ip(7), IP_PMTUDISC_PROBE). An empty name binds to none. A UDP socket
// shares its address with others of the daemon, which are bound to other devices or to
// none; the kernel prefers the one whose device a packet came by. mss bounds TCP's segments; 0: no
// bound.
func onDevice(link string, f dataplane.Family, tcp bool, mss int) func(string, string, syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) { err = setOptions(int(fd), link, f, tcp, mss) }); cerr != nil {
			return cerr
		}
		return err
	}
}

func setOptions(fd int, link string, f dataplane.Family, tcp bool, mss int) error {
	if err := unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, link); err != nil {
		return fmt.Errorf("bind to device %s: %w", link, err)
	}
	if !tcp {
		// Not SO_REUSEPORT, with which the kernel takes the first that fits
		// (udp4_lib_lookup2).
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return os.NewSyscallError("setsockopt SO_REUSEADDR", err)
		}
	}
	if tcp {
		if mss == 0 {
			return nil
		}
		return os.NewSyscallError("setsockopt TCP_MAXSEG", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, mss))
	}
	if f == dataplane.IPv6 {
		return os.NewSyscallError("setsockopt IPV6_MTU_DISCOVER", unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE))
	}
	return os.NewSyscallError("setsockopt IP_MTU_DISCOVER", unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE))
}

// network is Go's name of a transport in one family.
func network(transport string, f dataplane.Family) string {
	if f == dataplane.IPv6 {
		return transport + "6"
	}
	return transport + "4"
}

// listenUDP opens a UDP socket on a device.
func listenUDP(ctx context.Context, link string, at netip.AddrPort) (*net.UDPConn, error) {
	f := dataplane.FamilyOf(at.Addr())
	lc := net.ListenConfig{Control: onDevice(link, f, false, 0)}
	c, err := lc.ListenPacket(ctx, network("udp", f), at.String())
	if err != nil {
		return nil, err
	}
	udp, ok := c.(*net.UDPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("listen on %s: unexpected %T", at, c), c.Close())
	}
	return udp, nil
}

// dialUDP opens a connected UDP socket, which hears of ICMP errors.
func dialUDP(ctx context.Context, link string, local, remote netip.AddrPort) (*net.UDPConn, error) {
	f := dataplane.FamilyOf(remote.Addr())
	d := net.Dialer{Control: onDevice(link, f, false, 0), LocalAddr: net.UDPAddrFromAddrPort(local)}
	c, err := d.DialContext(ctx, network("udp", f), remote.String())
	if err != nil {
		return nil, err
	}
	udp, ok := c.(*net.UDPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("connect to %s: unexpected %T", remote, c), c.Close())
	}
	return udp, nil
}

// cork holds back what is sent, or lets it go as one packet. The kernel
// computes the checksum of a packet that was held back itself, before any
// device sees it (__ip_append_data: no CHECKSUM_PARTIAL with MSG_MORE): such a
// packet tells whether the path is well apart from all offloads.
func cork(c *net.UDPConn, on bool) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	v := 0
	if on {
		v = 1
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_CORK, v) }); cerr != nil {
		return cerr
	}
	// Letting go sends: its errors are those of send(2).
	return os.NewSyscallError("setsockopt UDP_CORK", err)
}

// software sends one packet whose checksum the kernel computes; see [cork].
func software(c *net.UDPConn, send func() error) error {
	if err := cork(c, true); err != nil {
		return err
	}
	// The cork must go in any case: it would hold back what comes later.
	return errors.Join(send(), cork(c, false))
}

// segmentControl is the control message that has the kernel, or the hardware,
// cut what is sent into datagrams of size bytes (udp(7), UDP_SEGMENT).
func segmentControl(size uint16) []byte {
	b := make([]byte, unix.CmsgSpace(2))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = unix.SOL_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	*(*uint16)(unsafe.Pointer(&b[unix.CmsgLen(0)])) = size
	return b
}

// tcpInfo asks the kernel how a connection fares.
func tcpInfo(c *net.TCPConn) (*unix.TCPInfo, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var info *unix.TCPInfo
	if cerr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, fmt.Errorf("ask about a TCP connection: %w", err)
	}
	return info, nil
}

// DriverOf returns the name of the kernel driver of a device, with its version
// where that is not the kernel's own, or "" where the device has none
// (ETHTOOL_GDRVINFO).
func DriverOf(link string) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	info, err := unix.IoctlGetEthtoolDrvinfo(fd, link)
	if err != nil {
		return ""
	}
	name := unix.ByteSliceToString(info.Driver[:])
	if fw := unix.ByteSliceToString(info.Fw_version[:]); fw != "" && fw != "N/A" {
		name += " firmware " + fw
	}
	return name
}

// KernelRelease is what uname -r says.
func KernelRelease() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("ask for the kernel's release: %w", err)
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}
