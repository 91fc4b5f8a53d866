package sourceport

import (
	"encoding/binary"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
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
type batch struct{ msgs []netlink.Message }

// add appends a request about the table's contents, in the family of both IPv4
// and IPv6.
func (b *batch) add(kind uint16, flags netlink.HeaderFlags, attrs func(*netlink.AttributeEncoder)) error {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	attrs(ae)
	data, err := ae.Encode()
	if err != nil {
		return err
	}
	b.msgs = append(b.msgs, netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind),
			Flags: netlink.Request | netlink.Acknowledge | flags,
		},
		Data: append([]byte{unix.NFPROTO_INET, 0, 0, 0}, data...),
	})
	return nil
}

// frame returns the messages between those that begin and end a transaction.
func (b *batch) frame() []netlink.Message {
	edge := func(t uint16) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(t), Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, 0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
	}
	out := append([]netlink.Message{edge(unix.NFNL_MSG_BATCH_BEGIN)}, b.msgs...)
	return append(out, edge(unix.NFNL_MSG_BATCH_END))
}

// replace returns the transaction that makes the table what it should be,
// whatever was there: for no peers, nothing.
func replace(port uint16, peers []netip.AddrPort) (*batch, error) {
	b := new(batch)
	table := func(ae *netlink.AttributeEncoder) { ae.String(unix.NFTA_TABLE_NAME, TableName) }
	steps := []func() error{
		// Made first, so that its removal does not fail where there is none.
		func() error { return b.add(unix.NFT_MSG_NEWTABLE, netlink.Create, table) },
		func() error { return b.add(unix.NFT_MSG_DELTABLE, 0, table) },
	}
	if len(peers) > 0 {
		steps = append(steps,
			func() error { return b.add(unix.NFT_MSG_NEWTABLE, netlink.Create, table) },
			func() error { return b.addSet(set4Name, 1, typeIPv4<<6|typeService, 8) },
			func() error { return b.addSet(set6Name, 2, typeIPv6<<6|typeService, 20) },
			func() error { return b.addElements(set4Name, 1, peers, netip.Addr.Is4) },
			func() error { return b.addElements(set6Name, 2, peers, netip.Addr.Is6) },
			b.addChain,
			func() error { return b.addRule(unix.NFPROTO_IPV4, 16, 4, set4Name, 1, port) },
			func() error { return b.addRule(unix.NFPROTO_IPV6, 24, 16, set6Name, 2, port) },
		)
	}
	for _, s := range steps {
		if err := s(); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (b *batch) addSet(name string, id, keyType, keyLen uint32) error {
	return b.add(unix.NFT_MSG_NEWSET, netlink.Create, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_TABLE, TableName)
		ae.String(unix.NFTA_SET_NAME, name)
		ae.Uint32(unix.NFTA_SET_ID, id)
		ae.Uint32(unix.NFTA_SET_FLAGS, 0)
		ae.Uint32(unix.NFTA_SET_KEY_TYPE, keyType)
		ae.Uint32(unix.NFTA_SET_KEY_LEN, keyLen)
	})
}

func (b *batch) addElements(set string, id uint32, peers []netip.AddrPort, family func(netip.Addr) bool) error {
	// An attribute holds 64 KiB, so the elements go in several messages.
	const most = 1000
	var keys [][]byte
	for _, p := range peers {
		if family(p.Addr()) {
			k := binary.BigEndian.AppendUint16(p.Addr().AsSlice(), p.Port())
			keys = append(keys, append(k, 0, 0))
		}
	}
	for len(keys) > 0 {
		now := keys[:min(most, len(keys))]
		keys = keys[len(now):]
		err := b.add(unix.NFT_MSG_NEWSETELEM, netlink.Create, func(ae *netlink.AttributeEncoder) {
			ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, TableName)
			ae.String(unix.NFTA_SET_ELEM_LIST_SET, set)
			ae.Uint32(unix.NFTA_SET_ELEM_LIST_SET_ID, id)
			ae.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(ae *netlink.AttributeEncoder) error {
				for _, k := range now {
					ae.Nested(unix.NFTA_LIST_ELEM, func(ae *netlink.AttributeEncoder) error {
						ae.Nested(unix.NFTA_SET_ELEM_KEY, func(ae *netlink.AttributeEncoder) error {
							ae.Bytes(unix.NFTA_DATA_VALUE, k)
							return nil
						})
						return nil
					})
				}
				return nil
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *batch) addChain() error {
	return b.add(unix.NFT_MSG_NEWCHAIN, netlink.Create, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, TableName)
		ae.String(unix.NFTA_CHAIN_NAME, chainName)
		ae.String(unix.NFTA_CHAIN_TYPE, "filter")
		ae.Nested(unix.NFTA_CHAIN_HOOK, func(ae *netlink.AttributeEncoder) error {
			ae.Uint32(unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_LOCAL_OUT)
			ae.Int32(unix.NFTA_HOOK_PRIORITY, priority)
			return nil
		})
	})
}

// VXLAN's valid-VNI flag, the first byte after the UDP header (RFC 7348).
const flagI = 0x08

// addRule adds: family, UDP, destination in the set, VXLAN data → source port.
func (b *batch) addRule(family byte, addrOffset, addrLen uint32, set string, id uint32, port uint16) error {
	type attrs = *netlink.AttributeEncoder
	meta := func(key uint32) func(attrs) {
		return func(ae attrs) {
			ae.Uint32(unix.NFTA_META_KEY, key)
			ae.Uint32(unix.NFTA_META_DREG, reg)
		}
	}
	equal := func(v byte) func(attrs) {
		return func(ae attrs) {
			ae.Uint32(unix.NFTA_CMP_SREG, reg)
			ae.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
			value(ae, unix.NFTA_CMP_DATA, []byte{v})
		}
	}
	load := func(base, offset, length, dreg uint32) func(attrs) {
		return func(ae attrs) {
			ae.Uint32(unix.NFTA_PAYLOAD_DREG, dreg)
			ae.Uint32(unix.NFTA_PAYLOAD_BASE, base)
			ae.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
			ae.Uint32(unix.NFTA_PAYLOAD_LEN, length)
		}
	}
	exprs := []struct {
		name  string
		attrs func(attrs)
	}{
		{"meta", meta(unix.NFT_META_NFPROTO)},
		{"cmp", equal(family)},
		{"meta", meta(unix.NFT_META_L4PROTO)},
		{"cmp", equal(unix.IPPROTO_UDP)},
		{"payload", load(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 8, 1, reg)},
		{"cmp", equal(flagI)},
		{"payload", load(unix.NFT_PAYLOAD_NETWORK_HEADER, addrOffset, addrLen, reg)},
		{"payload", load(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, reg+addrLen/4)},
		{"lookup", func(ae attrs) {
			ae.String(unix.NFTA_LOOKUP_SET, set)
			ae.Uint32(unix.NFTA_LOOKUP_SET_ID, id)
			ae.Uint32(unix.NFTA_LOOKUP_SREG, reg)
		}},
		{"immediate", func(ae attrs) {
			ae.Uint32(unix.NFTA_IMMEDIATE_DREG, reg)
			value(ae, unix.NFTA_IMMEDIATE_DATA, binary.BigEndian.AppendUint16(nil, port))
		}},
		{"payload", func(ae attrs) {
			ae.Uint32(unix.NFTA_PAYLOAD_SREG, reg)
			ae.Uint32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_TRANSPORT_HEADER)
			ae.Uint32(unix.NFTA_PAYLOAD_OFFSET, 0)
			ae.Uint32(unix.NFTA_PAYLOAD_LEN, 2)
			ae.Uint32(unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFT_PAYLOAD_CSUM_INET)
			ae.Uint32(unix.NFTA_PAYLOAD_CSUM_OFFSET, 6)
		}},
	}
	return b.add(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, func(ae attrs) {
		ae.String(unix.NFTA_RULE_TABLE, TableName)
		ae.String(unix.NFTA_RULE_CHAIN, chainName)
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(ae attrs) error {
			for _, e := range exprs {
				ae.Nested(unix.NFTA_LIST_ELEM, func(ae attrs) error {
					ae.String(unix.NFTA_EXPR_NAME, e.name)
					ae.Nested(unix.NFTA_EXPR_DATA, func(ae attrs) error {
						e.attrs(ae)
						return nil
					})
					return nil
				})
			}
			return nil
		})
	})
}

func value(ae *netlink.AttributeEncoder, kind uint16, v []byte) {
	ae.Nested(kind, func(ae *netlink.AttributeEncoder) error {
		ae.Bytes(unix.NFTA_DATA_VALUE, v)
		return nil
	})
}
