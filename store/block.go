package store

import (
	"encoding/binary"
	"iter"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
)

// hostAffinity begins the affinity of a block that a node holds.
const hostAffinity = "host:"

// AttrNode is the attribute that names the node which uses an address.
const AttrNode = "node"

// AttrType is the attribute that says what an address is used for, where that is no
// workload: vxlanTunnelAddress, say.
const AttrType = "type"

// Holder returns the node that has the affinity of the block: "" when none has,
// or when something other than a node does (see [Block.Virtual]).
func (b *Block) Holder() string {
	if b.Affinity == nil {
		return ""
	}
	if node, ok := strings.CutPrefix(*b.Affinity, hostAffinity); ok {
		return node
	}
	return ""
}

// SetHolder gives the affinity of the block to a node.
func (b *Block) SetHolder(node string) {
	affinity := hostAffinity + node
	b.Affinity = &affinity
}

// Virtual reports whether something other than a node has the affinity of the
// block, such as Calico's load balancers.
func (b *Block) Virtual() bool {
	return b.Affinity != nil && *b.Affinity != "" && !strings.HasPrefix(*b.Affinity, hostAffinity)
}

// Prefix returns the range of the block's addresses, the zero value when CIDR is
// none.
func (b *Block) Prefix() netip.Prefix {
	p, err := netip.ParsePrefix(b.CIDR)
	if err != nil {
		return netip.Prefix{}
	}
	return p.Masked()
}

// Addr returns the block's address with ordinal n, false when the block has none.
func (b *Block) Addr(n int) (netip.Addr, bool) { return AddrAt(b.Prefix(), n) }

// Ordinal is the inverse of [Block.Addr].
func (b *Block) Ordinal(a netip.Addr) (int, bool) { return OrdinalOf(b.Prefix(), a) }

// Attribute returns what is recorded of the address with ordinal n, nil when the
// address is free or its record missing. It is part of b.
func (b *Block) Attribute(n int) *Attribute {
	if n < 0 || n >= len(b.Allocations) || b.Allocations[n] == nil {
		return nil
	}
	i := *b.Allocations[n]
	if i < 0 || i >= len(b.Attributes) {
		return nil
	}
	return &b.Attributes[i]
}

// Allocated counts the addresses that are not free: assigned, or in their
// cool-down.
func (b *Block) Allocated() int {
	n := 0
	for _, a := range b.Allocations {
		if a != nil {
			n++
		}
	}
	return n
}

// ReserveHandle returns the handle under which a node holds addresses for workloads to come.
func ReserveHandle(node string) string { return "routerd-reserve-" + node }

// HeldBy returns the ordinals that a handle holds, ascending.
func (b *Block) HeldBy(handle string) []int {
	if !slices.ContainsFunc(b.Attributes, func(a Attribute) bool { return a.HandleID != nil && *a.HandleID == handle }) {
		return nil // most blocks know nothing of most handles
	}
	var out []int
	for i := range b.Allocations {
		if a := b.Attribute(i); a != nil && a.HandleID != nil && *a.HandleID == handle {
			out = append(out, i)
		}
	}
	return out
}

// Borrowed yields the addresses that are assigned to another node than the
// holder, with that node, in ascending order. An address in its cool-down
// belongs to nobody.
func (b *Block) Borrowed() iter.Seq2[netip.Addr, string] {
	return func(yield func(netip.Addr, string) bool) {
		holder := b.Holder()
		lends := false
		for i := range b.Attributes { // few blocks have any: spare them the rest
			lends = lends || b.Attributes[i].borrower(holder) != ""
		}
		if !lends {
			return
		}
		cidr := b.Prefix()
		for n := range b.Allocations {
			at := b.Attribute(n)
			if at == nil {
				continue
			}
			node := at.borrower(holder)
			if node == "" {
				continue
			}
			if addr, ok := AddrAt(cidr, n); ok && !yield(addr, node) {
				return
			}
		}
	}
}

// Tunnels yields the addresses that are assigned to a node's tunnel device, with that
// node, in ascending order.
func (b *Block) Tunnels() iter.Seq2[netip.Addr, string] {
	return func(yield func(netip.Addr, string) bool) {
		if !slices.ContainsFunc(b.Attributes, func(a Attribute) bool { return a.tunnelOf() != "" }) {
			return // as most blocks: spare them the rest
		}
		cidr := b.Prefix()
		for n := range b.Allocations {
			at := b.Attribute(n)
			if at == nil || at.tunnelOf() == "" {
				continue
			}
			if addr, ok := AddrAt(cidr, n); ok && !yield(addr, at.tunnelOf()) {
				return
			}
		}
	}
}

// Routing returns of a block what routes go by: its holder, and the addresses that [Block.Borrowed]
// and [Block.Tunnels] yield. It says nothing of what else is assigned in it.
func (b *Block) Routing() *Block {
	out := &Block{CIDR: b.CIDR, Affinity: b.Affinity}
	holder := b.Holder()
	for n := range b.Allocations {
		at := b.Attribute(n)
		if at == nil || at.borrower(holder) == "" && at.tunnelOf() == "" {
			continue
		}
		out.Allocations = append(out.Allocations, make([]*int, n-len(out.Allocations))...)
		i := len(out.Attributes)
		out.Allocations = append(out.Allocations, &i)
		kept := map[string]string{AttrNode: at.Secondary[AttrNode]}
		if typ, ok := at.Secondary[AttrType]; ok {
			kept[AttrType] = typ
		}
		out.Attributes = append(out.Attributes, Attribute{Secondary: kept})
	}
	return out
}

// tunnelOf returns the node whose tunnel device has the addresses of an attribute, ""
// where it is none's. Calico gives them types such as vxlanTunnelAddress.
func (a *Attribute) tunnelOf() string {
	if strings.HasSuffix(a.Secondary[AttrType], "TunnelAddress") && a.ReleasedAt == nil {
		return a.Secondary[AttrNode]
	}
	return ""
}

// borrower returns the node that uses the addresses of an attribute, "" when it
// is the holder or nobody.
func (a *Attribute) borrower(holder string) string {
	if node := a.Secondary[AttrNode]; node != holder && a.ReleasedAt == nil {
		return node
	}
	return ""
}

// AddrAt returns the address n after the first of p, false when that lies
// outside p.
func AddrAt(p netip.Prefix, n int) (netip.Addr, bool) {
	if !p.IsValid() || n < 0 {
		return netip.Addr{}, false
	}
	raw := p.Masked().Addr().As16()
	low, carry := bits.Add64(binary.BigEndian.Uint64(raw[8:]), uint64(n), 0)
	binary.BigEndian.PutUint64(raw[8:], low)
	binary.BigEndian.PutUint64(raw[:8], binary.BigEndian.Uint64(raw[:8])+carry)
	a := netip.AddrFrom16(raw)
	if p.Addr().Is4() {
		a = a.Unmap()
	}
	// Beyond the last address of all it is the first ones' turn: they are in p
	// only when p has all of them.
	return a, p.Contains(a)
}

// OrdinalOf is the inverse of [AddrAt]. It reports false for an address outside
// p, and for one that is further from p's first than an int can say.
func OrdinalOf(p netip.Prefix, a netip.Addr) (int, bool) {
	if !p.IsValid() || !p.Contains(a) {
		return 0, false
	}
	first, raw := p.Masked().Addr().As16(), a.As16()
	low, borrow := bits.Sub64(binary.BigEndian.Uint64(raw[8:]), binary.BigEndian.Uint64(first[8:]), 0)
	high := binary.BigEndian.Uint64(raw[:8]) - binary.BigEndian.Uint64(first[:8]) - borrow
	return int(low), high == 0 && int(low) >= 0
}
