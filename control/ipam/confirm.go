package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/store"
)

// Confirmation is an address that [Allocator.Take] gave and how it is to be
// written.
type Confirmation struct {
	Addr       netip.Addr
	Handle     string
	Attributes map[string]string // as in [Request]
}

// maxConfirmations is how many are written together: each has a handle of its
// own, and may touch a block.
const maxConfirmations = 48

// Confirm writes to the datastore what Take gave, many in one transaction or, on a
// datastore that writes one object at a time, those of one block, and
// returns an error or nil for each. One that matches [ErrNotHolder] says that
// the address is this node's no more: it was taken away in the datastore.
// One that matches [store.ErrUnavailable] leaves the outcome open. To confirm
// twice does no harm.
func (a *Allocator) Confirm(ctx context.Context, cs ...Confirmation) []error {
	var out []error
	for chunk := range slices.Chunk(cs, maxConfirmations) {
		errs, err := a.confirm(ctx, &confirmStep{all: chunk})
		if errors.Is(err, store.ErrOneByOne) {
			for _, in := range a.byBlock(chunk) {
				some := make([]Confirmation, 0, len(in))
				for _, i := range in {
					some = append(some, chunk[i])
				}
				each, _ := a.confirm(ctx, &confirmStep{all: some, soon: chunk}) // which has the error
				for n, i := range in {
					errs[i] = each[n]
				}
			}
		}
		out = append(out, errs...)
	}
	return out
}

// confirm writes addresses in one transaction. Its error, if there is one, is that of each
// of them.
func (a *Allocator) confirm(ctx context.Context, st *confirmStep) ([]error, error) {
	if err := a.do(ctx, st); err != nil {
		err = fmt.Errorf("confirm %d addresses: %w", len(st.all), err)
		return slices.Repeat([]error{err}, len(st.all)), err
	}
	return st.errs, nil
}

// byBlock returns which of the addresses are of one block.
func (a *Allocator) byBlock(cs []Confirmation) (groups [][]int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	group := map[netip.Prefix]int{}
	for i, c := range cs {
		block := netip.PrefixFrom(c.Addr, c.Addr.BitLen())
		if info := a.state.blockAround(c.Addr); info != nil {
			block = info.CIDR
		}
		at, ok := group[block]
		if !ok {
			at = len(groups)
			group[block], groups = at, append(groups, nil)
		}
		groups[at] = append(groups[at], i)
	}
	return groups
}

// confirmStep gives addresses of the reserve to those who use them.
type confirmStep struct {
	all  []Confirmation
	soon []Confirmation // what comes after it: handles count that already, and are written once
	errs []error
}

func (st *confirmStep) plan(d *draft) error {
	st.errs = make([]error, len(st.all))
	own := store.ReserveHandle(d.s.node)
	blocks := make([]*blockDraft, len(st.all))
	var missing error
	note := func(err error) {
		if missing == nil {
			missing = err
		}
	}
	for i, c := range st.all {
		bd, err := d.blockOfAddr(c.Addr)
		switch {
		case errors.Is(err, errNeed):
			note(err)
			continue
		case err != nil: // the others are confirmed all the same
			st.errs[i] = err
			continue
		case bd == nil:
			st.errs[i] = fmt.Errorf("%w: there is no block for %s any more", ErrNotHolder, c.Addr)
			continue
		}
		d.checkBlock(bd) // what is known of it may be old
		at := bd.block.Block.Attribute(ordinalOf(bd.block.cidr, c.Addr))
		switch {
		case at == nil || at.HandleID == nil:
			st.errs[i] = fmt.Errorf("%w: %s is free in the datastore", ErrNotHolder, c.Addr)
		case *at.HandleID == c.Handle && sameNode(at, d.s.node): // done already
		case *at.HandleID != own:
			st.errs[i] = fmt.Errorf("%w: %s is held by %q", ErrNotHolder, c.Addr, *at.HandleID)
		default:
			_, err = d.readHandle(c.Handle, false)
			if err == nil {
				_, err = d.readHandle(own, true)
			}
			switch {
			case err == nil:
				blocks[i] = bd
			case errors.Is(err, errNeed):
				note(err)
			default:
				st.errs[i] = err
			}
		}
	}
	if missing != nil {
		return missing
	}
	for i, c := range st.all {
		if bd := blocks[i]; bd != nil {
			r := Request{Handle: c.Handle, Attributes: c.Attributes}
			if err := d.handOver(bd, c.Addr, own, &r); err != nil {
				return err
			}
		}
	}
	st.foresee(d)
	return nil
}

// foresee has the handles of the transaction count what they are given by the next ones. As after
// a crash between them, they count too much until then, which does no harm.
func (st *confirmStep) foresee(d *draft) {
	counts := make(map[string]map[string]int)
	for _, c := range st.soon {
		hd, info := d.handles[c.Handle], d.s.blockAround(c.Addr)
		if hd == nil || !hd.write || info == nil || d.blocks[info.CIDR] != nil {
			continue
		}
		cidr := info.CIDR.String()
		if counts[c.Handle] == nil {
			counts[c.Handle] = make(map[string]int)
		}
		counts[c.Handle][cidr]++
		d.setCount(c.Handle, hd, cidr, max(hd.value[cidr], counts[c.Handle][cidr]))
	}
}

// handOver gives an assigned address of a block to another handle.
func (d *draft) handOver(bd *blockDraft, a netip.Addr, from string, r *Request) error {
	hd, err := d.readHandle(r.Handle, false)
	if err != nil {
		return err
	}
	old, err := d.readHandle(from, true)
	if err != nil {
		return err
	}
	bd.block.assign([]int{ordinalOf(bd.block.cidr, a)}, r.attribute(d.s.node))
	bd.block.compact()
	d.writeBlock(bd)
	d.count(from, old, bd.block)
	d.count(r.Handle, hd, bd.block)
	return nil
}
