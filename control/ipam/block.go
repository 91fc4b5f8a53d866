package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// block is a copy of a stored block that may be changed. Its methods are the
// whole algebra of blocks; none of them does I/O.
//
// Invariants, which [openBlock] establishes and every method keeps: each
// ordinal is either allocated or once in the queue; each allocation points at
// an attribute, and each attribute has an allocation. Allocations may share
// the integer that they point at: it is never written through.
type block struct {
	*store.Block
	cidr netip.Prefix
}

// newBlock returns an empty block. node is its holder.
func newBlock(cidr netip.Prefix, node string, now time.Time) block {
	n := blockLen(cidr)
	claimed := metav1.NewTime(now.UTC())
	b := block{cidr: cidr, Block: &store.Block{
		CIDR:                        cidr.String(),
		AffinityClaimTime:           &claimed,
		Allocations:                 make([]*int, n),
		Unallocated:                 make([]int, n),
		Attributes:                  []store.Attribute{},
		SequenceNumber:              uint64(now.UnixNano()),
		SequenceNumberForAllocation: map[string]uint64{},
	}}
	b.SetHolder(node)
	for i := range n {
		b.Unallocated[i] = i
	}
	return b
}

// openBlock copies a block that was read and checks it. A queue that lacks
// ordinals, or holds some twice or in error, is put right: the allocations say
// what is free. What cannot be put right is an error that says what to do.
func openBlock(cidr netip.Prefix, from *store.Block) (block, error) {
	cure := "; repair or delete it with Calico's ipam tools, the other blocks are not concerned"
	if p, err := netip.ParsePrefix(from.CIDR); err != nil || p != cidr {
		return block{}, fmt.Errorf("block %s: cidr is %q%s", cidr, from.CIDR, cure)
	}
	n := blockLen(cidr)
	if len(from.Allocations) != n {
		return block{}, fmt.Errorf("block %s: allocations has %d entries, not %d%s", cidr, len(from.Allocations), n, cure)
	}
	for i, a := range from.Allocations {
		if a != nil && (*a < 0 || *a >= len(from.Attributes)) {
			return block{}, fmt.Errorf("block %s: allocations[%d] is %d, but there are %d attributes%s", cidr, i, *a, len(from.Attributes), cure)
		}
	}
	c := *from
	c.Allocations = slices.Clone(from.Allocations)
	c.Attributes = slices.Clone(from.Attributes)
	if c.Attributes == nil {
		c.Attributes = []store.Attribute{}
	}
	c.SequenceNumberForAllocation = maps.Clone(from.SequenceNumberForAllocation)
	if c.SequenceNumberForAllocation == nil {
		c.SequenceNumberForAllocation = map[string]uint64{}
	}
	c.Unallocated = queueOf(from)
	b := block{Block: &c, cidr: cidr}
	b.compact()
	return b, nil
}

// queueOf returns the queue of a block, put right.
func queueOf(b *store.Block) []int {
	queued := make([]bool, len(b.Allocations))
	out := make([]int, 0, len(b.Allocations))
	add := func(i int) {
		if i >= 0 && i < len(queued) && !queued[i] && b.Allocations[i] == nil {
			queued[i] = true
			out = append(out, i)
		}
	}
	for _, i := range b.Unallocated {
		add(i)
	}
	for i := range b.Allocations {
		add(i)
	}
	return out
}

// empty reports whether nothing is allocated, not even cooling down.
func (b block) empty() bool { return len(b.Unallocated) == len(b.Allocations) }

// peek returns up to n free ordinals from the front of the queue, leaving out
// addresses inside reserved and those of which it is reported that they are in use.
func (b block) peek(n int, reserved []netip.Prefix, inUse func(netip.Addr) bool) []int {
	reserved = within(reserved, b.cidr)
	var out []int
	for _, o := range b.Unallocated {
		if len(out) == n {
			break
		}
		if a := addrAt(b.cidr, o); !containsAddr(reserved, a) && !inUse(a) {
			out = append(out, o)
		}
	}
	return out
}

// assign gives free ordinals to attr.
func (b block) assign(ordinals []int, attr store.Attribute) {
	index := b.attributeIndex(attr)
	taken := make(map[int]bool, len(ordinals))
	for _, o := range ordinals {
		taken[o] = true
		b.Allocations[o] = &index
		b.SequenceNumberForAllocation[strconv.Itoa(o)] = b.SequenceNumber
	}
	b.Unallocated = slices.DeleteFunc(b.Unallocated, func(o int) bool { return taken[o] })
}

// attributeIndex returns where attr is, and puts it there if need be. Equal
// attributes share one entry.
func (b block) attributeIndex(attr store.Attribute) int {
	for i := range b.Attributes {
		if equalAttributes(b.Attributes[i], attr) {
			return i
		}
	}
	b.Attributes = append(b.Attributes, attr)
	return len(b.Attributes) - 1
}

// release frees ordinals. With a cool-down they are not given again until
// [block.collect] finds them old enough.
func (b block) release(ordinals []int, now time.Time, cooldown time.Duration) {
	if cooldown > 0 {
		at := metav1.NewTime(now.UTC().Truncate(time.Second))
		index := b.attributeIndex(store.Attribute{ReleasedAt: &at})
		for _, o := range ordinals {
			b.Allocations[o] = &index
		}
	} else {
		b.free(ordinals)
	}
	b.compact()
}

// collect frees what has cooled down and reports whether there was any.
func (b block) collect(now time.Time, cooldown time.Duration) bool {
	var cooled []int
	for o := range b.Allocations {
		if a := b.Block.Attribute(o); a != nil && a.ReleasedAt != nil && now.Sub(a.ReleasedAt.Time) >= cooldown {
			cooled = append(cooled, o)
		}
	}
	b.free(cooled)
	b.compact()
	return len(cooled) > 0
}

func (b block) free(ordinals []int) {
	for _, o := range ordinals {
		b.Allocations[o] = nil
		b.Unallocated = append(b.Unallocated, o)
		delete(b.SequenceNumberForAllocation, strconv.Itoa(o))
	}
}

// compact drops attributes without an allocation and numbers the allocations
// anew. Order is kept.
func (b block) compact() {
	used := make([]bool, len(b.Attributes))
	for _, a := range b.Allocations {
		if a != nil {
			used[*a] = true
		}
	}
	if !slices.Contains(used, false) {
		return
	}
	renumbered := make([]int, len(b.Attributes))
	kept := make([]store.Attribute, 0, len(b.Attributes))
	for i, a := range b.Attributes {
		if used[i] {
			renumbered[i] = len(kept)
			kept = append(kept, a)
		}
	}
	b.Attributes = kept
	for o, a := range b.Allocations {
		if a != nil {
			b.Allocations[o] = &renumbered[*a]
		}
	}
}

// disown takes the block from its holder.
func (b block) disown() { b.Affinity, b.AffinityClaimTime = nil, nil }

// sequence returns the number under which an ordinal was given, 0 if unknown.
func sequence(b *store.Block, ordinal int) uint64 {
	return b.SequenceNumberForAllocation[strconv.Itoa(ordinal)]
}

func equalAttributes(a, b store.Attribute) bool {
	return equalPointers(a.HandleID, b.HandleID) &&
		maps.Equal(a.Secondary, b.Secondary) &&
		maps.Equal(a.AlternateOwnerAttrs, b.AlternateOwnerAttrs) &&
		(a.ReleasedAt == b.ReleasedAt || a.ReleasedAt != nil && b.ReleasedAt != nil && a.ReleasedAt.Equal(b.ReleasedAt))
}

func equalPointers(a, b *string) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// jsonSize estimates how many bytes a block takes when it is stored. It errs
// on the high side.
func (b block) jsonSize() int {
	n := 512 + 40*len(b.Allocations)
	for _, a := range b.Attributes {
		n += 128
		if a.HandleID != nil {
			n += len(*a.HandleID)
		}
		for _, m := range []map[string]string{a.Secondary, a.AlternateOwnerAttrs} {
			for k, v := range m {
				n += len(k) + 2*len(v) + 8
			}
		}
	}
	return n
}
