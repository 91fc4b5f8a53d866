package cluster

import (
	"net/netip"
	"time"

	"github.com/routerd/routerd/store"
)

// Block is what an IPAM block says.
type Block struct {
	CIDR     netip.Prefix
	Revision store.Revision
	Holder   string // the node that has its affinity; empty: none has
	Virtual  bool   // something other than a node has it

	// Borrowed lists the addresses that are assigned to other nodes than the holder,
	// in ascending order.
	Borrowed []Borrowed

	// Tunnels lists the addresses that are assigned to nodes' tunnel devices, in
	// ascending order.
	Tunnels []Assigned

	Size    int       // addresses
	Used    int       // of them not free: those in their cool-down count
	Held    int       // of those, how many its holder has ready for workloads to come
	Claimed time.Time // when the holder got it; zero: not recorded
	Cooling time.Time // the earliest release of an address in its cool-down; zero: there is none

	// Object is the whole of a block that this host holds. Of others', of which a
	// large cluster has thousands, it is not kept.
	Object *store.Object
}

// Borrowed is an address of a block and who has it.
type Borrowed struct {
	Addr netip.Addr
	Node string
}

// Assigned is an address of a block and the node that it is assigned to.
type Assigned struct {
	Addr netip.Addr
	Node string
}

// Value returns the whole of a block that this host holds, and nil of others.
func (b *Block) Value() *store.Block {
	if b.Object == nil {
		return nil
	}
	v, _ := b.Object.Value.(*store.Block)
	return v
}

// NewBlock reads a block as a host sees it. The object must hold one.
func NewBlock(self string, obj store.Object) (*Block, bool) {
	b, ok := obj.Value.(*store.Block)
	if !ok {
		return nil, false
	}
	return newBlock(self, obj, b), true
}

func newBlock(self string, obj store.Object, b *store.Block) *Block {
	out := &Block{
		CIDR: obj.Key.CIDR(), Revision: obj.Revision, Holder: b.Holder(), Virtual: b.Virtual(),
		Size: len(b.Allocations), Used: b.Allocated(), Held: len(b.HeldBy(store.ReserveHandle(b.Holder()))),
	}
	for addr, node := range b.Borrowed() {
		out.Borrowed = append(out.Borrowed, Borrowed{addr, node})
	}
	for addr, node := range b.Tunnels() {
		out.Tunnels = append(out.Tunnels, Assigned{addr, node})
	}
	if b.AffinityClaimTime != nil {
		out.Claimed = b.AffinityClaimTime.Time
	}
	for i := range b.Attributes {
		if at := b.Attributes[i].ReleasedAt; at != nil && (out.Cooling.IsZero() || at.Time.Before(out.Cooling)) {
			out.Cooling = at.Time
		}
	}
	if out.Holder == self && self != "" {
		out.Object = &obj
	}
	return out
}
