package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
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

// Confirm writes to the datastore what Take gave, many in one transaction, and
// returns an error or nil for each. One that matches [ErrNotHolder] says that
// the address is this node's no more: it was taken away in the datastore.
// One that matches [store.ErrUnavailable] leaves the outcome open. To confirm
// twice does no harm.
func (a *Allocator) Confirm(ctx context.Context, cs ...Confirmation) []error {
	var out []error
	for chunk := range slices.Chunk(cs, maxConfirmations) {
		st := &confirmStep{all: chunk}
		if err := a.do(ctx, st); err != nil {
			err = fmt.Errorf("confirm %d addresses: %w", len(chunk), err)
			out = append(out, slices.Repeat([]error{err}, len(chunk))...)
			continue
		}
		out = append(out, st.errs...)
	}
	return out
}

// confirmStep gives addresses of the reserve to those who use them.
type confirmStep struct {
	all  []Confirmation
	errs []error
}

func (st *confirmStep) plan(d *draft) error {
	st.errs = make([]error, len(st.all))
	own := ReserveHandle(d.s.node)
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
	return nil
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
