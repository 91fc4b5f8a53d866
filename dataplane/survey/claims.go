package survey

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// arpLen is the length of an ARP packet of Ethernet and IPv4 (RFC 826).
const arpLen = 28

// Claims asks on a device, of that MAC, for each IPv4 address who has it, and returns
// the MACs of those that answer within the wait, in order. It asks as one that has no
// address yet (an ARP probe, RFC 5227, section 2.1.1), so nobody's table of neighbours
// changes.
func Claims(ctx context.Context, link dataplane.UnderlayLink, addrs []netip.Addr, wait time.Duration) (map[netip.Addr][]dataplane.MAC, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	defer unix.Close(fd)
	proto := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ARP))
	all := &unix.SockaddrLinklayer{Protocol: proto, Ifindex: link.Index, Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: link.Index}); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", link.Name, err)
	}
	for _, a := range addrs {
		if err := unix.Sendto(fd, arpProbe(link.MAC, a), 0, all); err != nil {
			return nil, fmt.Errorf("ask for %s on %s: %w", a, link.Name, err)
		}
	}
	out := map[netip.Addr][]dataplane.MAC{}
	b := make([]byte, 128)
	end := time.Now().Add(wait)
	for ctx.Err() == nil {
		left, flags := time.Until(end), 0
		if left <= 0 {
			flags = unix.MSG_DONTWAIT // what has come while this process had no processor
		}
		tv := unix.NsecToTimeval(max(left, time.Millisecond).Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
			return nil, fmt.Errorf("listen on %s: %w", link.Name, err)
		}
		n, _, err := unix.Recvfrom(fd, b, flags)
		switch {
		case errors.Is(err, unix.EAGAIN) && left <= 0:
			return sorted(out), ctx.Err()
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, fmt.Errorf("listen on %s: %w", link.Name, err)
		}
		if addr, mac, ok := arpReply(b[:n]); ok && slices.Contains(addrs, addr) && !slices.Contains(out[addr], mac) {
			out[addr] = append(out[addr], mac)
		}
	}
	return sorted(out), ctx.Err()
}

func sorted(claims map[netip.Addr][]dataplane.MAC) map[netip.Addr][]dataplane.MAC {
	for _, macs := range claims {
		slices.SortFunc(macs, func(a, b dataplane.MAC) int { return slices.Compare(a[:], b[:]) })
	}
	return claims
}

// arpProbe asks who has an address, from none.
func arpProbe(mac dataplane.MAC, a netip.Addr) []byte {
	b := make([]byte, 0, arpLen)
	b = append(b, 0, 1, 8, 0, 6, 4, 0, 1) // Ethernet, IPv4, lengths of addresses, request
	b = append(b, mac[:]...)
	b = append(b, 0, 0, 0, 0)
	b = append(b, 0, 0, 0, 0, 0, 0)
	return append(b, a.AsSlice()...)
}

// arpReply reads who says to have which address.
func arpReply(b []byte) (a netip.Addr, mac dataplane.MAC, ok bool) {
	if len(b) < arpLen || [8]byte(b) != [8]byte{0, 1, 8, 0, 6, 4, 0, 2} {
		return a, mac, false
	}
	return netip.AddrFrom4([4]byte(b[14:])), dataplane.MAC(b[8:14]), true
}
