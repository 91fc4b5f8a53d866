package nft

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// The verdicts that are no jumps (linux/netfilter.h).
const (
	nfDrop   = 0
	nfAccept = 1
)

// Registers: the first two of 16 bytes, and the place of a 32-bit one after a
// number of bytes (linux/netfilter/nf_tables.h).
const (
	reg1 = unix.NFT_REG_1
	reg2 = unix.NFT_REG_2
)

func regAfter(bytes uint32) uint32 {
	switch bytes {
	case 0:
		return reg1
	case 16:
		return reg2
	}
	return unix.NFT_REG32_00 + bytes/4
}

// matcher builds the expressions of a rule.
type matcher struct{ nl.Attrs }

func (m *matcher) clone() *matcher {
	return &matcher{nl.Attrs{B: bytes.Clone(m.B)}}
}

// expr appends an expression. Each is an element of a list.
func (m *matcher) expr(name string, fn func()) {
	m.Nest(unix.NFTA_LIST_ELEM, func() {
		m.Text(unix.NFTA_EXPR_NAME, name)
		m.Nest(unix.NFTA_EXPR_DATA, fn)
	})
}

func (m *matcher) meta(key, reg uint32) {
	m.expr("meta", func() {
		m.Net32(unix.NFTA_META_KEY, key)
		m.Net32(unix.NFTA_META_DREG, reg)
	})
}

func (m *matcher) value(kind uint16, v []byte) {
	m.Nest(kind, func() { m.Bytes(unix.NFTA_DATA_VALUE, v...) })
}

func (m *matcher) cmp(op uint32, v []byte) {
	m.expr("cmp", func() {
		m.Net32(unix.NFTA_CMP_SREG, reg1)
		m.Net32(unix.NFTA_CMP_OP, op)
		m.value(unix.NFTA_CMP_DATA, v)
	})
}

func (m *matcher) payload(base, offset, length, reg uint32) {
	m.expr("payload", func() {
		m.Net32(unix.NFTA_PAYLOAD_DREG, reg)
		m.Net32(unix.NFTA_PAYLOAD_BASE, base)
		m.Net32(unix.NFTA_PAYLOAD_OFFSET, offset)
		m.Net32(unix.NFTA_PAYLOAD_LEN, length)
	})
}

// bits keeps the bits of a mask and turns those of xor.
func (m *matcher) bits(mask, xor []byte) {
	m.expr("bitwise", func() {
		m.Net32(unix.NFTA_BITWISE_SREG, reg1)
		m.Net32(unix.NFTA_BITWISE_DREG, reg1)
		m.Net32(unix.NFTA_BITWISE_LEN, uint32(len(mask))) //nolint:gosec // 16 at most
		m.value(unix.NFTA_BITWISE_MASK, mask)
		m.value(unix.NFTA_BITWISE_XOR, xor)
	})
}

func eq(not bool) uint32 {
	if not {
		return unix.NFT_CMP_NEQ
	}
	return unix.NFT_CMP_EQ
}

func (m *matcher) lookup(set string, not bool) {
	m.expr("lookup", func() {
		m.Text(unix.NFTA_LOOKUP_SET, set)
		m.Net32(unix.NFTA_LOOKUP_SREG, reg1)
		if not {
			m.Net32(unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
		}
	})
}

// lookupVerdict does what the map says for the key.
func (m *matcher) lookupVerdict(set string) {
	m.expr("lookup", func() {
		m.Text(unix.NFTA_LOOKUP_SET, set)
		m.Net32(unix.NFTA_LOOKUP_SREG, reg1)
		m.Net32(unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT)
	})
}

// family matches packets of one IP family.
func (m *matcher) family(f dataplane.Family) {
	m.meta(unix.NFT_META_NFPROTO, reg1)
	m.cmp(unix.NFT_CMP_EQ, []byte{nfproto(f)})
}

func nfproto(f dataplane.Family) byte {
	if f == dataplane.IPv4 {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

func (m *matcher) protocol(p uint8, not bool) {
	m.meta(unix.NFT_META_L4PROTO, reg1)
	m.cmp(eq(not), []byte{p})
}

// iface matches the name of the interface that the packet came in by, or goes
// out by; of a prefix, its beginning.
func (m *matcher) iface(key uint32, name string, prefix, not bool) {
	m.meta(key, reg1)
	if prefix {
		m.cmp(eq(not), []byte(name))
		return
	}
	m.cmp(eq(not), []byte(ifname(name)))
}

// end is an end of a packet: its source or its destination.
type end uint8

const (
	source end = iota
	destination
)

// loadAddr loads an address of a packet of family f.
func (m *matcher) loadAddr(f dataplane.Family, e end, reg uint32) {
	m.loadBytes(f, e, uint32(f.Bits()/8), reg) //nolint:gosec // 4 or 16
}

// loadBytes loads the first bytes of an address.
func (m *matcher) loadBytes(f dataplane.Family, e end, n, reg uint32) {
	offset, length := uint32(12), uint32(4)
	if f == dataplane.IPv6 {
		offset, length = 8, 16
	}
	if e == destination {
		offset += length
	}
	m.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, n, reg)
}

func (m *matcher) loadPort(e end, reg uint32) {
	m.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(e)*2, 2, reg)
}

// net matches an address in a prefix, or not in it.
func (m *matcher) net(e end, p netip.Prefix, not bool) {
	f := dataplane.FamilyOf(p.Addr())
	if p.Bits() == 8 || p.Bits() == 16 {
		// The kernel has a faster way for these, without a mask.
		m.loadBytes(f, e, uint32(p.Bits()/8), reg1) //nolint:gosec // 1 or 2
		m.cmp(eq(not), p.Addr().AsSlice()[:p.Bits()/8])
		return
	}
	m.loadAddr(f, e, reg1)
	if !p.IsSingleIP() {
		mask := make([]byte, p.Addr().BitLen()/8)
		for i := range p.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		m.bits(mask, make([]byte, len(mask)))
	}
	m.cmp(eq(not), p.Masked().Addr().AsSlice())
}

func (m *matcher) port(e end, r filter.PortRange, not bool) {
	m.loadPort(e, reg1)
	low, high := binary.BigEndian.AppendUint16(nil, r.Low), binary.BigEndian.AppendUint16(nil, r.High)
	switch {
	case r.Low == r.High:
		m.cmp(eq(not), low)
	case not:
		m.expr("range", func() {
			m.Net32(unix.NFTA_RANGE_SREG, reg1)
			m.Net32(unix.NFTA_RANGE_OP, unix.NFT_RANGE_NEQ)
			m.value(unix.NFTA_RANGE_FROM_DATA, low)
			m.value(unix.NFTA_RANGE_TO_DATA, high)
		})
	default:
		m.cmp(unix.NFT_CMP_GTE, low)
		m.cmp(unix.NFT_CMP_LTE, high)
	}
}

// state matches packets in one of the states of connection tracking.
func (m *matcher) state(bits uint32) {
	m.expr("ct", func() {
		m.Net32(unix.NFTA_CT_KEY, unix.NFT_CT_STATE)
		m.Net32(unix.NFTA_CT_DREG, reg1)
	})
	m.bits(binary.NativeEndian.AppendUint32(nil, bits), make([]byte, 4))
	m.cmp(unix.NFT_CMP_NEQ, make([]byte, 4))
}

// Bits of NFT_CT_STATE (linux/netfilter/nf_conntrack_common.h).
const (
	stateInvalid     = 1
	stateNew         = 1 << 3
	stateEstablished = 1 << 1
	stateRelated     = 1 << 2
)

func (m *matcher) mark(bit uint32) {
	m.meta(unix.NFT_META_MARK, reg1)
	m.bits(binary.NativeEndian.AppendUint32(nil, bit), make([]byte, 4))
	m.cmp(unix.NFT_CMP_NEQ, make([]byte, 4))
}

// isCut matches connections that are cut, or are not.
func (m *matcher) isCut(not bool) {
	m.expr("ct", func() {
		m.Net32(unix.NFTA_CT_KEY, unix.NFT_CT_MARK)
		m.Net32(unix.NFTA_CT_DREG, reg1)
	})
	m.bits(binary.NativeEndian.AppendUint32(nil, filter.CutMark), make([]byte, 4))
	m.cmp(eq(!not), make([]byte, 4))
}

// setMark sets a bit of the packet's mark, or clears it.
func (m *matcher) setMark(bit uint32, on bool) {
	xor := uint32(0)
	if on {
		xor = bit
	}
	m.meta(unix.NFT_META_MARK, reg1)
	m.bits(binary.NativeEndian.AppendUint32(nil, ^bit), binary.NativeEndian.AppendUint32(nil, xor))
	m.expr("meta", func() {
		m.Net32(unix.NFTA_META_KEY, unix.NFT_META_MARK)
		m.Net32(unix.NFTA_META_SREG, reg1)
	})
}

func (m *matcher) counter() { m.expr("counter", func() {}) }

func (m *matcher) notrack() { m.expr("notrack", func() {}) }

func verdict(a *nl.Attrs, code int32, chain string) {
	a.Nest(unix.NFTA_DATA_VERDICT, func() {
		a.Net32(unix.NFTA_VERDICT_CODE, uint32(code))
		if chain != "" {
			a.Text(unix.NFTA_VERDICT_CHAIN, chain)
		}
	})
}

// do ends a rule with a verdict.
func (m *matcher) do(code int32, chain string) {
	m.expr("immediate", func() {
		m.Net32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		m.Nest(unix.NFTA_IMMEDIATE_DATA, func() { verdict(&m.Attrs, code, chain) })
	})
}

// deny drops the packet, or answers it as "reject" of nft(8) does.
func (m *matcher) deny(reject bool) {
	if !reject {
		m.do(nfDrop, "")
		return
	}
	m.expr("reject", func() {
		m.Net32(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_ICMPX_UNREACH)
		m.Uint8(unix.NFTA_REJECT_ICMP_CODE, unix.NFT_REJECT_ICMPX_PORT_UNREACH)
	})
}

// mostPrefix is what the kernel takes as a log's prefix (NF_LOG_PREFIXLEN).
const mostPrefix = 127

// log logs to the kernel's log, or to those who listen to a group of
// nfnetlink_log.
func (m *matcher) log(prefix string, group uint16) {
	m.expr("log", func() {
		m.Text(unix.NFTA_LOG_PREFIX, prefix[:min(len(prefix), mostPrefix)])
		if group != 0 {
			m.Net16(unix.NFTA_LOG_GROUP, group)
			return
		}
		m.Net32(unix.NFTA_LOG_LEVEL, 5) // notice, as Felix has it
	})
}

// burstSeconds is how much may be logged at once, in seconds of the rate.
const burstSeconds = 5

// rate matches packets up to a number a second, or what is beyond.
func (m *matcher) rate(perSecond uint32, beyond bool) {
	m.expr("limit", func() { m.limit(unix.NFT_LIMIT_PKTS, uint64(perSecond), perSecond*burstSeconds, beyond) })
}

// limit has the attributes of a bucket of packets or bytes.
func (m *matcher) limit(of uint32, perSecond uint64, burst uint32, beyond bool) {
	m.Net64(unix.NFTA_LIMIT_RATE, perSecond)
	m.Net64(unix.NFTA_LIMIT_UNIT, 1)
	m.Net32(unix.NFTA_LIMIT_BURST, burst)
	m.Net32(unix.NFTA_LIMIT_TYPE, of)
	if beyond {
		m.Net32(unix.NFTA_LIMIT_FLAGS, unix.NFT_LIMIT_F_INV)
	}
}

// immediate loads a value.
func (m *matcher) immediate(reg uint32, v []byte) {
	m.expr("immediate", func() {
		m.Net32(unix.NFTA_IMMEDIATE_DREG, reg)
		m.value(unix.NFTA_IMMEDIATE_DATA, v)
	})
}
