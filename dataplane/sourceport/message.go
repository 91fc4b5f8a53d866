package sourceport

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// TableName is the name of the table, of family inet, in "nft list ruleset".
const TableName = "routerd-sourceport"

// The names of what is in it.
const (
	chainName = "output"
	set4Name  = "peers4"
	set6Name  = "peers6"
)

// priority of the chain: before connection tracking, so that what leaves is
// one flow to it, the one that the probes opened.
const priority = -350

// The kernel's numbers of data types in sets are nft(8)'s own, for listings: a
// concatenation is its parts, six bits each.
const (
	typeIPv4    = 7
	typeIPv6    = 8
	typeService = 13
)

// reg is the first of the kernel's 32-bit registers (NFT_REG32_00).
const reg = 8

// batch collects the messages of one transaction.
type batch struct{ nl.Batch }

// begin begins a request about the table's contents, in the family of both IPv4
// and IPv6. The table's name is the first attribute of all of them, with the
// same number.
func (b *batch) begin(kind, flags uint16) {
	b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0)
	b.Text(unix.NFTA_TABLE_NAME, TableName)
}

// replace returns the transaction that makes the table what it should be,
// whatever was there: for no peers, nothing.
func replace(port uint16, peers []netip.AddrPort) *batch {
	b := new(batch)
	// Made first, so that its removal does not fail where there is none.
	b.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	b.begin(unix.NFT_MSG_DELTABLE, 0)
	if len(peers) == 0 {
		return b
	}
	b.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	b.addSet(set4Name, 1, typeIPv4<<6|typeService, 8)
	b.addSet(set6Name, 2, typeIPv6<<6|typeService, 20)
	b.addElements(set4Name, 1, peers, netip.Addr.Is4)
	b.addElements(set6Name, 2, peers, netip.Addr.Is6)
	b.addChain()
	b.addRule(unix.NFPROTO_IPV4, 16, 4, set4Name, 1, port)
	b.addRule(unix.NFPROTO_IPV6, 24, 16, set6Name, 2, port)
	return b
}

func (b *batch) addSet(name string, id, keyType, keyLen uint32) {
	b.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
	b.Text(unix.NFTA_SET_NAME, name)
	b.Net32(unix.NFTA_SET_ID, id)
	b.Net32(unix.NFTA_SET_FLAGS, 0)
	b.Net32(unix.NFTA_SET_KEY_TYPE, keyType)
	b.Net32(unix.NFTA_SET_KEY_LEN, keyLen)
}

func (b *batch) addElements(set string, id uint32, peers []netip.AddrPort, family func(netip.Addr) bool) {
	// An attribute holds 64 KiB, so the elements go in several messages.
	const most = 1000
	var keys [][]byte
	for _, p := range peers {
		if family(p.Addr()) {
			k := binary.BigEndian.AppendUint16(p.Addr().AsSlice(), p.Port())
			keys = append(keys, append(k, 0, 0))
		}
	}
	for now := range slices.Chunk(keys, most) {
		b.begin(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE)
		b.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
		b.Net32(unix.NFTA_SET_ELEM_LIST_SET_ID, id)
		b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for _, k := range now {
				b.Nest(unix.NFTA_LIST_ELEM, func() { b.value(unix.NFTA_SET_ELEM_KEY, k) })
			}
		})
	}
}

func (b *batch) addChain() {
	b.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	b.Text(unix.NFTA_CHAIN_NAME, chainName)
	b.Text(unix.NFTA_CHAIN_TYPE, "filter")
	b.Nest(unix.NFTA_CHAIN_HOOK, func() {
		b.Net32(unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_LOCAL_OUT)
		hook := int32(priority)
		b.Net32(unix.NFTA_HOOK_PRIORITY, uint32(hook))
	})
}

// VXLAN's valid-VNI flag, the first byte after the UDP header (RFC 7348).
const flagI = 0x08

// addRule adds: family, UDP, destination in the set, VXLAN data → source port.
func (b *batch) addRule(family byte, addrOffset, addrLen uint32, set string, id uint32, port uint16) {
	expr := func(name string, attrs func()) {
		b.Nest(unix.NFTA_LIST_ELEM, func() {
			b.Text(unix.NFTA_EXPR_NAME, name)
			b.Nest(unix.NFTA_EXPR_DATA, attrs)
		})
	}
	meta := func(key uint32, want byte) {
		expr("meta", func() {
			b.Net32(unix.NFTA_META_KEY, key)
			b.Net32(unix.NFTA_META_DREG, reg)
		})
		b.equal(expr, want)
	}
	load := func(base, offset, length, dreg uint32) {
		expr("payload", func() {
			b.Net32(unix.NFTA_PAYLOAD_DREG, dreg)
			b.Net32(unix.NFTA_PAYLOAD_BASE, base)
			b.Net32(unix.NFTA_PAYLOAD_OFFSET, offset)
			b.Net32(unix.NFTA_PAYLOAD_LEN, length)
		})
	}
	b.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
	b.Text(unix.NFTA_RULE_CHAIN, chainName)
	b.Nest(unix.NFTA_RULE_EXPRESSIONS, func() {
		meta(unix.NFT_META_NFPROTO, family)
		meta(unix.NFT_META_L4PROTO, unix.IPPROTO_UDP)
		load(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 8, 1, reg)
		b.equal(expr, flagI)
		load(unix.NFT_PAYLOAD_NETWORK_HEADER, addrOffset, addrLen, reg)
		load(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, reg+addrLen/4)
		expr("lookup", func() {
			b.Text(unix.NFTA_LOOKUP_SET, set)
			b.Net32(unix.NFTA_LOOKUP_SET_ID, id)
			b.Net32(unix.NFTA_LOOKUP_SREG, reg)
		})
		expr("immediate", func() {
			b.Net32(unix.NFTA_IMMEDIATE_DREG, reg)
			b.value(unix.NFTA_IMMEDIATE_DATA, binary.BigEndian.AppendUint16(nil, port))
		})
		expr("payload", func() {
			b.Net32(unix.NFTA_PAYLOAD_SREG, reg)
			b.Net32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_TRANSPORT_HEADER)
			b.Net32(unix.NFTA_PAYLOAD_OFFSET, 0)
			b.Net32(unix.NFTA_PAYLOAD_LEN, 2)
			b.Net32(unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFT_PAYLOAD_CSUM_INET)
			b.Net32(unix.NFTA_PAYLOAD_CSUM_OFFSET, 6)
		})
	})
}

func (b *batch) equal(expr func(string, func()), v byte) {
	expr("cmp", func() {
		b.Net32(unix.NFTA_CMP_SREG, reg)
		b.Net32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
		b.value(unix.NFTA_CMP_DATA, []byte{v})
	})
}

func (b *batch) value(kind uint16, v []byte) {
	b.Nest(kind, func() { b.Bytes(unix.NFTA_DATA_VALUE, v...) })
}
