package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/routerd/routerd/store"
)

// Allocation is an address of a block that is not free.
type Allocation struct {
	Addr       netip.Addr
	Block      netip.Prefix
	Handle     string // empty: none
	Sequence   uint64 // see [Assignment]; 0: unknown
	Attributes map[string]string
	Node       string    // that uses the address by its attributes, else that holds the block; empty: none
	ReleasedAt time.Time // it was released and cools down; zero: it is in use
}

// Assigned returns when the address was given, by its attributes; zero: they
// do not say.
func (a Allocation) Assigned() time.Time {
	// As time.Time's String, which Calico stores; what follows the zone is a
	// monotonic reading.
	const layout = "2006-01-02 15:04:05.999999999 -0700 MST"
	t, err := time.Parse(layout, a.Attributes[AttrTimestamp])
	if err != nil {
		return time.Time{}
	}
	return t
}

// Allocations lists what a stored block gives, in order. The error says what
// of the block makes no sense; then nothing can be said of its addresses.
func Allocations(cidr netip.Prefix, b *store.Block) ([]Allocation, error) {
	if b == nil {
		return nil, fmt.Errorf("block %s: %w", cidr, store.ErrDecode)
	}
	if n := blockLen(cidr); len(b.Allocations) != n {
		return nil, fmt.Errorf("block %s: allocations has %d entries, not %d", cidr, len(b.Allocations), n)
	}
	owner := b.Holder()
	var out []Allocation
	for o, index := range b.Allocations {
		if index == nil {
			continue
		}
		at := b.Attribute(o)
		if at == nil {
			return nil, fmt.Errorf("block %s: allocations[%d] is %d, but there are %d attributes", cidr, o, *index, len(b.Attributes))
		}
		a := Allocation{
			Addr: addrAt(cidr, o), Block: cidr, Sequence: sequence(b, o), Attributes: at.Secondary, Node: at.Secondary[AttrNode],
		}
		if at.HandleID != nil {
			a.Handle = *at.HandleID
		}
		if at.ReleasedAt != nil {
			a.ReleasedAt = at.ReleasedAt.Time
		}
		if a.Node == "" {
			a.Node = owner
		}
		out = append(out, a)
	}
	return out, nil
}

// BlockEdit is a change of a stored block and what it means for the handles
// concerned.
type BlockEdit struct {
	Op    store.Op
	Freed []Allocation
	Left  map[string]int // by handle: how many addresses of the block it still has
	Gone  bool           // the block is deleted

	Disowned string // the node that it is taken from; empty: none
}

// EditBlock frees those addresses of a stored block that free chooses and, with
// disown, takes the block from its holder. A block without a holder and that
// gives nothing is deleted. The Op is conditional on obj being as it was read;
// ok is false when there is nothing to be changed. It decides only: the caller
// writes, see [EditOps].
func EditBlock(obj store.Object, free func(Allocation) bool, disown bool, now time.Time, cooldown time.Duration) (e BlockEdit, ok bool, err error) {
	stored, _ := obj.Value.(*store.Block)
	cidr := obj.Key.CIDR()
	all, err := Allocations(cidr, stored)
	if err != nil {
		return BlockEdit{}, false, err
	}
	b, err := openBlock(cidr, stored)
	if err != nil {
		return BlockEdit{}, false, err
	}
	changed := b.collect(now, cooldown)
	var ordinals []int
	for _, a := range all {
		if a.ReleasedAt.IsZero() && free(a) {
			e.Freed = append(e.Freed, a)
			ordinals = append(ordinals, ordinalOf(cidr, a.Addr))
		}
	}
	if len(ordinals) > 0 {
		b.release(ordinals, now, cooldown)
		changed = true
	}
	for _, a := range e.Freed {
		if a.Handle == "" {
			continue
		}
		if e.Left == nil {
			e.Left = map[string]int{}
		}
		e.Left[a.Handle] = len(b.Block.HeldBy(a.Handle))
	}
	node, virtual := b.Block.Holder(), b.Block.Virtual()
	if disown && node != "" {
		b.disown()
		e.Disowned, node, changed = node, "", true
	}
	switch {
	case node == "" && !virtual && b.empty():
		e.Gone = true
		e.Op, ok = opFor(obj.Key, obj, nil, true, false)
	case changed:
		b.SequenceNumber++
		e.Op, ok = opFor(obj.Key, obj, b.Block, true, false)
	}
	return e, ok, nil
}

// editHandle sets what a stored handle says of some blocks: how many addresses
// of each it has left. A handle with none is deleted. The Op is conditional on
// obj being as it was read; an obj without revision is a handle that does not
// exist. ok is false when there is nothing to be changed.
func editHandle(obj store.Object, left map[string]int) (op store.Op, ok bool) {
	h, is := obj.Value.(*store.Handle)
	if !is {
		return store.Op{}, false
	}
	blocks := maps.Clone(h.Block)
	changed := false
	for cidr, n := range left {
		if have, known := blocks[cidr]; !known || have == n {
			continue
		}
		changed = true
		if n > 0 {
			blocks[cidr] = n
		} else {
			delete(blocks, cidr)
		}
	}
	if len(blocks) == 0 {
		return opFor(obj.Key, obj, nil, true, false)
	}
	return opFor(obj.Key, obj, &store.Handle{Block: blocks}, changed, false)
}
