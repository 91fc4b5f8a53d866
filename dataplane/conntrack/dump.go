package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// dumper lists connections one by one as the kernel hands them over: a table
// can have millions. It is safe for concurrent use.
type dumper struct {
	mu  sync.Mutex
	fd  int
	seq uint32
	buf []byte
}

// receiveSeconds is for a kernel that does not answer at all.
const receiveSeconds = 10

func openDumper() (*dumper, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: receiveSeconds}),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	// The kernel fills up to 32 KiB at a time (netlink_dump).
	return &dumper{fd: fd, buf: make([]byte, 64<<10)}, nil
}

func (d *dumper) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return unix.Close(d.fd)
}

// dump calls fn with the attributes of each connection of a family that the
// attributes ask for; they are the dumper's again after fn returns. EINTR says
// that the table changed meanwhile.
func (d *dumper) dump(family byte, attrs []byte, fn func([]byte) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seq++
	m := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+nfgenLen+len(attrs))
	m = append(append(m, nfgen(family)...), attrs...)
	binary.NativeEndian.PutUint32(m, uint32(len(m))) //nolint:gosec // a hundred bytes
	binary.NativeEndian.PutUint16(m[4:], uint16(msgGet))
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	binary.NativeEndian.PutUint32(m[8:], d.seq)
	if err := unix.Sendto(d.fd, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	var failed error
	for interrupted := false; ; {
		n, _, err := unix.Recvfrom(d.fd, d.buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		}
		for b := d.buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.SizeofNlMsghdr || length > len(b) {
				return errors.New("a message of the kernel is cut off")
			}
			kind, flags, seq := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:])
			data := b[unix.SizeofNlMsghdr:length]
			b = b[min(align(length), len(b)):]
			if seq != d.seq {
				continue // of a listing that was given up
			}
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case kind == unix.NLMSG_DONE, kind == unix.NLMSG_ERROR:
				switch {
				case failed != nil:
				case len(data) >= 4 && binary.NativeEndian.Uint32(data) != 0:
					failed = unix.Errno(-int32(binary.NativeEndian.Uint32(data))) //nolint:gosec // two's complement
				case interrupted:
					failed = unix.EINTR
				}
				return failed
			case len(data) >= nfgenLen && failed == nil:
				failed = fn(data[nfgenLen:])
			}
		}
	}
}

func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// attribute returns the value of the first attribute of a kind.
func attribute(b []byte, kind uint16) []byte {
	for len(b) >= unix.SizeofNlAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofNlAttr || n > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER) == kind {
			return b[unix.SizeofNlAttr:n]
		}
		b = b[min(align(n), len(b)):]
	}
	return nil
}

// sourceOf returns the source address of a direction of a connection.
func sourceOf(connection []byte, direction uint16) netip.Addr {
	ip := attribute(attribute(connection, direction), attrTupleIP)
	a, ok := netip.AddrFromSlice(attribute(ip, attrIPv4Source))
	if !ok {
		a, _ = netip.AddrFromSlice(attribute(ip, attrIPv6Source))
	}
	return a
}

// fewAddresses is how many addresses of IPv4 are asked for one by one: the
// kernel walks its table twice for each, which takes a tenth to a twentieth of
// the time of handing all of it over.
const fewAddresses = 5

// listOf lists the connections that one of the addresses began or that really
// go to it.
func (t *Table) listOf(of []netip.Addr) ([]entry, error) {
	wanted := make(map[netip.Addr]bool, len(of))
	var four, six []netip.Addr
	for _, a := range of {
		switch a = a.Unmap(); {
		case wanted[a]:
			continue
		case a.Is4():
			four = append(four, a)
		default:
			six = append(six, a)
		}
		wanted[a] = true
	}
	party := func(b []byte) bool { return wanted[sourceOf(b, attrOrig)] || wanted[sourceOf(b, attrReply)] }
	var list []entry
	add := func(family byte, ask func(*netlink.AttributeEncoder), wanted func([]byte) bool) error {
		part, err := t.list(family, ask, wanted)
		list = append(list, part...)
		return err
	}
	if len(four) > fewAddresses {
		if err := add(unix.AF_INET, nil, party); err != nil {
			return nil, err
		}
		four = nil
	}
	for i, a := range four {
		// A connection is handed over for the first address that it is of.
		earlier := make(map[netip.Addr]bool, i)
		for _, e := range four[:i] {
			earlier[e] = true
		}
		first := func(b []byte) bool { return !earlier[sourceOf(b, attrOrig)] && !earlier[sourceOf(b, attrReply)] }
		if err := add(unix.AF_INET, sourceFilter(attrOrig, a), first); err != nil {
			return nil, err
		}
		if err := add(unix.AF_INET, sourceFilter(attrReply, a), func(b []byte) bool { return first(b) && sourceOf(b, attrOrig) != a }); err != nil {
			return nil, err
		}
	}
	// The kernel's filter takes IPv6 addresses the wrong way round: what is equal
	// is left out (ctnetlink_filter_match_tuple, seen with 6.18).
	if len(six) > 0 {
		return list, add(unix.AF_INET6, nil, party)
	}
	return list, nil
}

// sourceFilter asks for the connections with an address of IPv4 as source of a
// direction (CTA_FILTER, Linux 5.8).
func sourceFilter(direction uint16, a netip.Addr) func(*netlink.AttributeEncoder) {
	flags := uint16(filterOrig)
	if direction == attrReply {
		flags = filterReply
	}
	return func(ae *netlink.AttributeEncoder) {
		ae.Nested(attrFilter, func(ae *netlink.AttributeEncoder) error {
			ae.ByteOrder = binary.NativeEndian
			ae.Uint32(flags, filterSource)
			return nil
		})
		ae.Nested(direction, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(attrTupleIP, func(ae *netlink.AttributeEncoder) error {
				ae.Bytes(attrIPv4Source, a.AsSlice())
				return nil
			})
			return nil
		})
	}
}

// interruptions is how often a listing is begun anew because the table changed
// while it was read. It always does on a busy host; what an incomplete one
// leaves out was made or moved in that moment, and is asked for again then.
const interruptions = 3

// list lists the connections of a family that ask asks the kernel for, nil: for
// all, and that are wanted; nil: all.
func (t *Table) list(family byte, ask func(*netlink.AttributeEncoder), wanted func([]byte) bool) ([]entry, error) {
	ae := netlink.NewAttributeEncoder()
	if ask != nil {
		ask(ae)
	}
	attrs, err := ae.Encode()
	if err != nil {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	var list []entry
	for range interruptions {
		list = list[:0]
		err = t.dumps.dump(family, attrs, func(b []byte) error {
			if wanted != nil && !wanted(b) {
				return nil
			}
			e, err := decode(b)
			e.family = family
			list = append(list, e)
			return err
		})
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil && !errors.Is(err, unix.EINTR) {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	return list, nil
}
