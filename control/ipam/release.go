package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/store"
)

// handleStep releases all that a handle holds, or what is in use on one node.
type handleStep struct {
	handle   string
	node     string       // empty: any
	keep     []netip.Addr // but these
	released []netip.Addr
}

func (st *handleStep) plan(d *draft) error {
	st.released = nil
	hd, err := d.readHandle(st.handle, true)
	if err != nil {
		return err
	}
	all, err := d.holdings(st.handle, hd)
	if err != nil {
		return err
	}
	held := len(all)
	all = slices.DeleteFunc(d.on(st.node, all), func(a Assignment) bool { return slices.Contains(st.keep, a.Addr) })
	part := len(all) < held
	perBlock := map[netip.Prefix][]int{}
	for _, a := range all {
		st.released = append(st.released, a.Addr)
		perBlock[a.Block] = append(perBlock[a.Block], ordinalOf(a.Block, a.Addr))
	}
	for _, cidr := range d.blocksOf(st.handle, hd) {
		if ordinals := perBlock[cidr]; len(ordinals) > 0 {
			left := len(d.blocks[cidr].block.Block.HeldBy(st.handle)) - len(ordinals)
			d.release(d.blocks[cidr], ordinals)
			if part && hd.has(cidr.String()) {
				d.setCount(st.handle, hd, cidr.String(), left)
			}
		}
	}
	if hd.value != nil && !part {
		hd.value, hd.write = nil, true
		d.touch(store.HandleKey(st.handle))
	}
	return st.settleClaims(d)
}

// settleClaims writes the blocks in which the handle was given an address of the
// reserve that the datastore shows as the reserve's still: a [Allocator.Confirm] of
// it of which it is not known what became cannot take place after that, when the
// address is another's.
func (st *handleStep) settleClaims(d *draft) error {
	if st.node != "" && st.node != d.s.node {
		return nil
	}
	var missing error
	for _, a := range d.s.reserve.byHandle[st.handle] {
		info := d.s.blockAround(a)
		if info == nil || slices.Contains(st.keep, a) {
			continue
		}
		bd, err := d.readBlock(info.CIDR, true)
		if err != nil {
			missing = cmp.Or(missing, err)
			continue
		}
		if bd.block.Block == nil {
			continue
		}
		if at := bd.block.Block.Attribute(ordinalOf(info.CIDR, a)); at != nil && at.HandleID != nil && *at.HandleID == store.ReserveHandle(d.s.node) {
			d.writeBlock(bd)
		}
	}
	return missing
}

// release frees ordinals of a block. A block without holder and without
// allocations is deleted.
func (d *draft) release(bd *blockDraft, ordinals []int) {
	bd.block.release(ordinals, d.now, d.s.cooldown())
	d.writeBlock(bd)
	if node, virtual := bd.block.Block.Holder(), bd.block.Block.Virtual(); node == "" && !virtual && bd.block.empty() {
		bd.block.Block = nil
	}
}

// claimsStep releases addresses one by one.
type claimsStep struct {
	claims   []Claim
	released []netip.Addr
}

func (st *claimsStep) plan(d *draft) error {
	st.released = nil
	type found struct {
		bd      *blockDraft
		ordinal int
		handle  string
		hd      *handleDraft
	}
	var all []found
	var missing error
	for _, c := range st.claims {
		bd, err := d.blockOfAddr(c.Addr)
		if err != nil {
			missing = cmp.Or(missing, err)
			continue
		}
		if bd == nil {
			continue
		}
		d.checkBlock(bd) // what is known of it may be old, and then it may be held
		f := found{bd: bd, ordinal: ordinalOf(bd.block.cidr, c.Addr)}
		a := bd.block.Block.Attribute(f.ordinal)
		if a == nil || a.ReleasedAt != nil {
			continue // free already
		}
		if a.HandleID != nil {
			f.handle = *a.HandleID
		}
		if err := c.concerns(f.handle, sequence(bd.block.Block, f.ordinal)); err != nil {
			return err
		}
		if f.handle != "" {
			if f.hd, err = d.readHandle(f.handle, true); err != nil {
				missing = cmp.Or(missing, err)
				continue
			}
			if !f.hd.sure && !f.hd.has(bd.block.cidr.String()) {
				// What is known of the handle is older than the block.
				missing = cmp.Or(missing, d.need(store.HandleKey(f.handle)))
				continue
			}
		}
		all = append(all, f)
	}
	if missing != nil {
		return missing
	}
	for _, f := range all {
		if f.bd.block.Block == nil {
			continue // the same address twice
		}
		if a := f.bd.block.Block.Attribute(f.ordinal); a == nil || a.ReleasedAt != nil {
			continue // likewise
		}
		st.released = append(st.released, addrAt(f.bd.block.cidr, f.ordinal))
		left := 0
		if f.handle != "" {
			left = len(f.bd.block.Block.HeldBy(f.handle)) - 1
		}
		d.release(f.bd, []int{f.ordinal})
		if f.hd != nil && f.hd.has(f.bd.block.cidr.String()) {
			d.setCount(f.handle, f.hd, f.bd.block.cidr.String(), left)
		}
	}
	return nil
}

// concerns is the guard against releasing an address that was given to another
// workload meanwhile.
func (c Claim) concerns(handle string, seq uint64) error {
	switch {
	case c.Handle != "" && c.Handle != handle:
		return fmt.Errorf("%w: %s is held by %q, not by %q", ErrNotHolder, c.Addr, handle, c.Handle)
	case c.Sequence != 0 && c.Sequence != seq:
		return fmt.Errorf("%w: %s was given anew since (sequence %d, not %d)", ErrNotHolder, c.Addr, seq, c.Sequence)
	}
	return nil
}

// blockOfAddr returns the block that contains an address, nil if there is none.
func (d *draft) blockOfAddr(a netip.Addr) (*blockDraft, error) {
	cidr := netip.Prefix{}
	if info := d.s.blockAround(a); info != nil {
		cidr = info.CIDR
	} else {
		for _, p := range d.s.poolsByName() {
			if p.cidr.Contains(a) && p.blockBits > 0 {
				cidr = netip.PrefixFrom(a, p.blockBits).Masked()
			}
		}
	}
	if !cidr.IsValid() {
		return nil, nil
	}
	bd, err := d.readBlock(cidr, true)
	if err != nil || bd.block.Block == nil {
		return nil, err
	}
	return bd, nil
}

// queryStep reads what a handle holds.
type queryStep struct {
	handle string
	held   []Assignment
}

func (st *queryStep) plan(d *draft) error {
	hd, err := d.readHandle(st.handle, true)
	if err != nil {
		return err
	}
	st.held, err = d.holdings(st.handle, hd)
	return err
}

// tidyStep ends what a crash, or another writer, left half done
// in this node's affinities, and gives up empty blocks of pools that do not
// select the node any more or do not exist any more.
type tidyStep struct {
	blocks   []netip.Prefix // to look at
	released []netip.Prefix
}

// tidyable returns the blocks that a tidyStep might have to do with.
func (s *state) tidyable() []netip.Prefix {
	var out []netip.Prefix
	for c, a := range s.affinities {
		b := s.blocks[c]
		if a.state != store.AffinityConfirmed || b == nil || b.Holder != s.node || b.Virtual {
			out = append(out, c)
		}
	}
	for _, b := range s.own {
		_, known := s.affinities[b.CIDR]
		if !known || b.Used == 0 && s.unwanted(b.CIDR) {
			out = append(out, b.CIDR)
		}
	}
	return out
}

// unwanted reports whether an empty block is to be given up: its pool is gone,
// or does not select this node, or it lies outside of the node's pod CIDRs. That the node's own record is missing says
// nothing, nor does a pool that the watch has not shown yet, or that cannot be
// read.
func (s *state) unwanted(block netip.Prefix) bool {
	if p := s.poolOf(block); p != nil {
		return s.registered && (!p.nodes.Matches(s.labels) || s.usePodCIDR && !slices.ContainsFunc(s.podCIDRs, block.Overlaps))
	}
	return s.registered && s.orphaned()
}

// orphaned reports whether a block of no known pool is one of no pool at all.
func (s *state) orphaned() bool {
	if !s.synced {
		return false
	}
	for _, p := range s.pools {
		if !p.cidr.IsValid() {
			return false
		}
	}
	return true
}

func (st *tidyStep) plan(d *draft) error {
	st.released = nil
	for _, cidr := range st.blocks {
		if err := st.tidy(d, cidr); err != nil {
			return err
		}
	}
	return nil
}

func (st *tidyStep) tidy(d *draft, cidr netip.Prefix) error {
	ad, err := d.readAffinity(d.s.node, cidr)
	if err != nil {
		return err
	}
	bd, err := d.readBlock(cidr, true)
	if err != nil {
		return err
	}
	node, virtual := "", false
	if bd.block.Block != nil {
		node, virtual = bd.block.Block.Holder(), bd.block.Block.Virtual()
	}
	ours := bd.block.Block != nil && node == d.s.node && !virtual
	unwanted := d.s.unwanted(cidr)
	switch {
	case !ours:
		// A claim that was not finished, or that another host won.
		if ad.value == nil {
			return nil
		}
		d.checkBlock(bd)
	case ad.value != nil && ad.value.State == store.AffinityPendingDeletion, unwanted && bd.block.empty():
		if bd.block.disown(); bd.block.empty() {
			bd.block.Block = nil
		}
		d.writeBlock(bd)
		st.released = append(st.released, cidr)
	case ad.value == nil || !ad.value.Confirmed():
		// Only a block whose affinity is written counts as this node's.
		d.checkBlock(bd)
		return d.setAffinity(cidr)
	default:
		return nil
	}
	return d.dropAffinity(d.s.node, cidr)
}
