// Package nflog listens to what rules log: packets that the kernel hands over
// by group (linux/netfilter/nfnetlink_log.h).
package nflog

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Packet is a packet that a rule logged.
type Packet struct {
	Time    time.Time // when it was handed over
	Group   uint16
	Prefix  string // what the rule calls it
	In, Out int    // indexes of devices; 0: none

	Header
}

// Header is what the beginning of an IP packet says.
type Header struct {
	Src, Dst           netip.Addr
	Protocol           uint8
	SrcPort, DstPort   uint16 // of protocols that have ports
	ICMPType, ICMPCode uint8  // of ICMP and ICMPv6
}

// Listener listens to groups of one network namespace.
type Listener struct {
	c      *netlink.Conn
	next   map[uint16]uint32 // by group: the number of the next packet; of Run alone
	missed atomic.Uint64
}

// copied is how much of a packet is asked for: enough for the headers, with
// IPv6's extensions as far as they are usual.
const copied = 128

// bufferBytes is the size asked for of the socket's buffer: what comes in
// bursts beyond it, some two thousand packets, is lost, and counted.
const bufferBytes = 1 << 18

// Open listens to groups in the network namespace of the calling thread. A
// group has one listener at a time: EBUSY says that there is another.
func Open(groups ...uint16) (*Listener, error) {
	c, _, err := nl.Listen(unix.NETLINK_NETFILTER, bufferBytes)
	if err != nil {
		return nil, err
	}
	l := &Listener{c: c, next: make(map[uint16]uint32)}
	for _, g := range groups {
		if err := l.bind(g); err != nil {
			return nil, errors.Join(fmt.Errorf("listen to log group %d: %w", g, err), c.Close())
		}
	}
	return l, nil
}

// The kernel's numbers (nfnetlink_log.h).
const (
	msgPacket = unix.NFNL_SUBSYS_ULOG << 8   // NFULNL_MSG_PACKET
	msgConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1 // NFULNL_MSG_CONFIG
	nfgenLen  = 4                            // struct nfgenmsg
	ack       = netlink.Request | netlink.Acknowledge

	configCommand = 1 // NFULA_CFG_CMD
	configMode    = 2 // NFULA_CFG_MODE
	configTimeout = 4 // NFULA_CFG_TIMEOUT, in hundredths of a second
	configFlags   = 6 // NFULA_CFG_FLAGS
	commandBind   = 1 // NFULNL_CFG_CMD_BIND
	modePacket    = 2 // NFULNL_COPY_PACKET
	flagSeq       = 1 // NFULNL_CFG_F_SEQ

	attrIn      = 4  // NFULA_IFINDEX_INDEV
	attrOut     = 5  // NFULA_IFINDEX_OUTDEV
	attrPayload = 9  // NFULA_PAYLOAD
	attrPrefix  = 10 // NFULA_PREFIX
	attrSeq     = 12 // NFULA_SEQ
)

func (l *Listener) bind(group uint16) error {
	for _, attr := range []struct {
		kind  uint16
		value []byte
	}{
		{configCommand, []byte{commandBind}},
		{configMode, []byte{0, 0, 0, copied, modePacket, 0}},
		// Packets are handed over a hundred at a time, or after this long.
		{configTimeout, []byte{0, 0, 0, 10}},
		// They are numbered, so that what is lost can be counted.
		{configFlags, []byte{0, flagSeq}},
	} {
		b := nl.Attrs{B: []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, byte(group >> 8), byte(group)}}
		b.Bytes(attr.kind, attr.value...)
		if _, err := l.c.Execute(netlink.Message{Header: netlink.Header{Type: msgConfig, Flags: ack}, Data: b.B}); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the listener, and a Run in progress.
func (l *Listener) Close() error { return l.c.Close() }

// Missed returns how many packets were logged and not handed over, as the
// packets that came since tell.
func (l *Listener) Missed() uint64 { return l.missed.Load() }

// Run calls fn for each packet, of about most in a second: then it rests until
// the second is over, and what there is no room for meanwhile is lost at the
// kernel's cost alone. 0: as many as come. It returns when ctx ends, which
// closes the listener.
func (l *Listener) Run(ctx context.Context, most int, fn func(Packet)) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	began, taken := time.Now(), 0
	for {
		msgs, err := l.c.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !errors.Is(err, unix.ENOBUFS): // what was lost is known from the numbers
			return fmt.Errorf("receive logged packets: %w", err)
		}
		for _, m := range msgs {
			if p, seq, ok := decode(m); ok {
				l.count(p.Group, seq)
				p.Time = time.Now()
				fn(p)
			}
		}
		if since := time.Since(began); since >= time.Second {
			began, taken = time.Now(), 0
		}
		if taken += len(msgs); most == 0 || taken < most {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second - time.Since(began)):
		}
	}
}

// count takes note of a packet's number, and so of those that are missing
// before it.
func (l *Listener) count(group uint16, seq uint32) {
	l.missed.Add(uint64(seq - l.next[group]))
	l.next[group] = seq + 1
}

func decode(m netlink.Message) (p Packet, seq uint32, ok bool) {
	if m.Header.Type != msgPacket || len(m.Data) < nfgenLen {
		return p, 0, false
	}
	p = Packet{Group: binary.BigEndian.Uint16(m.Data[2:])}
	for kind, v := range nl.Attributes(m.Data[nfgenLen:]) {
		switch kind {
		case attrSeq:
			seq = v.Net32()
		case attrIn:
			p.In = int(v.Net32())
		case attrOut:
			p.Out = int(v.Net32())
		case attrPrefix:
			p.Prefix = v.Text()
		case attrPayload:
			p.Header = ParseHeader(v)
		}
	}
	return p, seq, true
}

// ParseHeader reads what it can of an IP packet's beginning; what is not there
// stays zero.
func ParseHeader(b []byte) Header {
	var h Header
	var rest []byte
	var first bool // fragment
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		h.Src, h.Dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		h.Protocol = b[9]
		first = binary.BigEndian.Uint16(b[6:])&0x1fff == 0
		rest = b[min(int(b[0]&15)*4, len(b)):]
	case len(b) >= 40 && b[0]>>4 == 6:
		h.Src, h.Dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		h.Protocol, rest, first = skipExtensions(b[6], b[40:])
	default:
		return h
	}
	if !first {
		return h
	}
	switch h.Protocol {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if len(rest) >= 2 {
			h.ICMPType, h.ICMPCode = rest[0], rest[1]
		}
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP:
		if len(rest) >= 4 {
			h.SrcPort, h.DstPort = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
		}
	}
	return h
}

// skipExtensions finds the protocol behind IPv6's extension headers (RFC 8200,
// section 4).
func skipExtensions(next uint8, b []byte) (protocol uint8, rest []byte, first bool) {
	first = true
	for {
		var n int
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			if len(b) < 8 {
				return next, nil, first
			}
			n = 8 + 8*int(b[1])
		case unix.IPPROTO_FRAGMENT:
			if len(b) < 8 {
				return next, nil, first
			}
			first = first && binary.BigEndian.Uint16(b[2:])&0xfff8 == 0
			n = 8
		default:
			return next, b, first
		}
		next, b = b[0], b[min(n, len(b)):]
	}
}
