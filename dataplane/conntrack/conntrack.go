// Package conntrack reads the kernel's table of tracked connections, and cuts
// single connections (linux/netfilter/nfnetlink_conntrack.h).
//
// A connection that is cut stays in the table and is marked; rules drop what is
// marked, in both directions. To take it out would not do: its next packet
// would be judged as a first one, and where that is an answer, the connection
// would be tracked anew in the other direction, which no rule may forbid.
package conntrack

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Flow is a tracked connection.
type Flow struct {
	Protocol uint8 // IP protocol number

	// Orig is the first packet as it was before any translation; Reply is an
	// answer as it arrives before the translation is undone. So Reply.Src is
	// where the connection really goes.
	Orig, Reply Tuple

	ICMPType, ICMPCode uint8  // of Orig, for ICMP and ICMPv6
	ICMPID             uint16 // of Orig, for echo requests and the like

	Mark uint32
}

// Cut reports whether the connection is cut.
func (f Flow) Cut() bool { return f.Mark&filter.CutMark != 0 }

// Tuple is a direction of a connection.
type Tuple struct {
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16 // of protocols that have ports
}

func (f Flow) String() string {
	return fmt.Sprintf("protocol %d %s → %s", f.Protocol, netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort))
}

// Table is the table of one network namespace. It is safe for concurrent use.
type Table struct{ c *nl.Conn }

// Open returns the table of the calling thread's network namespace.
func Open() (*Table, error) {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("open the table of connections: %w", err)
	}
	return &Table{c}, nil
}

// Close ends the use of the table.
func (t *Table) Close() error { return t.c.Close() }

// The kernel's numbers (nfnetlink_conntrack.h).
const (
	msgNew    = unix.NFNL_SUBSYS_CTNETLINK << 8   // IPCTNL_MSG_CT_NEW
	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE

	attrOrig  = 1  // CTA_TUPLE_ORIG
	attrReply = 2  // CTA_TUPLE_REPLY
	attrMark  = 8  // CTA_MARK
	attrID    = 12 // CTA_ID
	attrZone  = 18 // CTA_ZONE
	attrMask  = 21 // CTA_MARK_MASK

	attrFilter   = 25 // CTA_FILTER
	filterOrig   = 1  // CTA_FILTER_ORIG_FLAGS
	filterReply  = 2  // CTA_FILTER_REPLY_FLAGS
	filterSource = 1  // CTA_FILTER_F_CTA_IP_SRC, in the host's order

	attrTupleIP    = 1 // CTA_TUPLE_IP
	attrTupleProto = 2 // CTA_TUPLE_PROTO
	attrIPv4Source = 1 // CTA_IP_V4_SRC
	attrIPv6Source = 3 // CTA_IP_V6_SRC
)

// entry is a connection with what the kernel needs to find it again.
type entry struct {
	Flow
	family byte
	orig   []byte // CTA_TUPLE_ORIG
	id     []byte
	zone   []byte
}

// Verdict is what becomes of a connection.
type Verdict uint8

// The verdicts.
const (
	Keep  Verdict = iota // as it is
	Cut                  // it carries nothing more
	Renew                // if it was cut, it is forgotten: its next packet is judged as a first one
)

// Judge looks at the connections that one of the addresses began or that really
// go to it, and does what judge says. The kernel walks its table for each of
// few addresses and hands all of it over for many, so callers bring several
// changes together; of no address nothing is looked at. Judge returns how many
// connections were cut that were not, and how many renewed. One that ended
// meanwhile is no error.
func (t *Table) Judge(ctx context.Context, of []netip.Addr, judge func(Flow) Verdict) (cut, renewed int, err error) {
	list, err := t.listOf(of)
	if err != nil {
		return 0, 0, err
	}
	var errs []error
	for _, e := range list {
		if ctx.Err() != nil {
			return cut, renewed, errors.Join(append(errs, ctx.Err())...)
		}
		var err error
		switch v := judge(e.Flow); {
		case v == Cut && !e.Cut():
			if err = t.change(e, msgNew, filter.CutMark); err == nil {
				cut++
			}
		case v == Renew && e.Cut():
			if err = t.change(e, msgDelete, 0); err == nil {
				renewed++
			}
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("change %s: %w", e.Flow, err))
		}
	}
	return cut, renewed, errors.Join(errs...)
}

// ListOf returns the connections that an address began or that really go to it.
func (t *Table) ListOf(a netip.Addr) ([]Flow, error) {
	list, err := t.listOf([]netip.Addr{a})
	return flows(list), err
}

func flows(list []entry) []Flow {
	out := make([]Flow, 0, len(list))
	for _, e := range list {
		out = append(out, e.Flow)
	}
	return out
}

// change sends a message about a connection; the bits of mark are set in its
// mark.
func (t *Table) change(e entry, message uint16, mark uint32) error {
	var b nl.Batch
	begin(&b, message, e.family)
	b.Bytes(unix.NLA_F_NESTED|attrOrig, e.orig...)
	if e.id != nil {
		// Without it a new connection with the same ends might be met.
		b.Bytes(attrID, e.id...)
	}
	if e.zone != nil {
		b.Bytes(attrZone, e.zone...)
	}
	if mark != 0 {
		b.Net32(attrMark, mark)
		b.Net32(attrMask, mark)
	}
	return t.c.Do(&b, nil)
}

const nfgenLen = 4 // struct nfgenmsg

func begin(b *nl.Batch, message uint16, family byte) {
	b.Begin(message, 0, family, unix.NFNETLINK_V0, 0, 0)
}

// decode reads the attributes of a connection.
func decode(b []byte) (entry, error) {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return entry{}, err
	}
	ad.ByteOrder = binary.BigEndian
	var e entry
	for ad.Next() {
		switch ad.Type() {
		case attrMark:
			e.Mark = ad.Uint32()
		case attrOrig:
			e.orig = bytes.Clone(ad.Bytes())
			ad.Do(func(b []byte) error {
				return e.decodeTuple(b, &e.Orig)
			})
		case attrReply:
			ad.Do(func(b []byte) error {
				var reply Flow
				return reply.decodeTuple(b, &e.Reply)
			})
		case attrID:
			e.id = bytes.Clone(ad.Bytes())
		case attrZone:
			e.zone = bytes.Clone(ad.Bytes())
		}
	}
	return e, ad.Err()
}

// decodeTuple reads a direction of a connection into t, and what belongs to it
// into f.
func (f *Flow) decodeTuple(b []byte, t *Tuple) error {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return err
	}
	for ad.Next() {
		switch ad.Type() {
		case attrTupleIP:
			ad.Nested(func(ip *netlink.AttributeDecoder) error {
				for ip.Next() {
					a, ok := netip.AddrFromSlice(ip.Bytes())
					switch {
					case !ok:
					case ip.Type() == 1 || ip.Type() == 3: // CTA_IP_V4_SRC, CTA_IP_V6_SRC
						t.Src = a
					case ip.Type() == 2 || ip.Type() == 4: // CTA_IP_V4_DST, CTA_IP_V6_DST
						t.Dst = a
					}
				}
				return ip.Err()
			})
		case attrTupleProto:
			ad.Nested(func(p *netlink.AttributeDecoder) error {
				p.ByteOrder = binary.BigEndian
				for p.Next() {
					switch p.Type() {
					case 1: // CTA_PROTO_NUM
						f.Protocol = p.Uint8()
					case 2: // CTA_PROTO_SRC_PORT
						t.SrcPort = p.Uint16()
					case 3: // CTA_PROTO_DST_PORT
						t.DstPort = p.Uint16()
					case 4, 7: // CTA_PROTO_ICMP_ID, CTA_PROTO_ICMPV6_ID
						f.ICMPID = p.Uint16()
					case 5, 8: // CTA_PROTO_ICMP_TYPE, CTA_PROTO_ICMPV6_TYPE
						f.ICMPType = p.Uint8()
					case 6, 9: // CTA_PROTO_ICMP_CODE, CTA_PROTO_ICMPV6_CODE
						f.ICMPCode = p.Uint8()
					}
				}
				return p.Err()
			})
		}
	}
	return ad.Err()
}
