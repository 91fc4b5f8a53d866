package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// pool deletes an IPPool: disable it, let allocations under way end, give back
// its empty blocks, remove it.
func (d *deletion) pool(ctx context.Context, o store.Object) error {
	if o.Value == nil {
		return d.remove(ctx, o.Key) // undecodable: nobody allocates from it
	}
	if _, err := store.Modify(ctx, d.store, o.Key, disabled); err != nil {
		return fmt.Errorf("disable %s before its deletion: %w", o.Key, err)
	}
	if err := wait(ctx, d.settle); err != nil {
		return err
	}
	cidr, err := netip.ParsePrefix(o.Value.(*v3.IPPool).Spec.CIDR)
	if err == nil {
		if err := d.emptyBlocks(ctx, o.Key, cidr); err != nil {
			return err
		}
	}
	return d.remove(ctx, o.Key)
}

func disabled(cur store.Object) (any, error) {
	if cur.Revision == 0 {
		return nil, fmt.Errorf("%s: %w", cur.Key, store.ErrNotFound)
	}
	p := store.Clone(cur.Value).(*v3.IPPool)
	p.Spec.Disabled = true
	return p, nil
}

func (d *deletion) remove(ctx context.Context, key store.Key) error {
	err := store.Delete(ctx, d.store, key, 0)
	if errors.Is(err, store.ErrNotFound) {
		return nil // somebody else was faster
	}
	return err
}

// emptyBlocks removes the blocks of a pool that hold no address, each with its
// owner's claim in one transaction, and notes what is left.
func (d *deletion) emptyBlocks(ctx context.Context, pool store.Key, cidr netip.Prefix) error {
	for try := 1; ; try++ {
		blocks, _, err := d.store.List(ctx, store.KindIPAMBlock, "")
		if err != nil {
			return fmt.Errorf("delete %s: %w", pool, err)
		}
		busy, inUse, retry := 0, 0, false
		for _, o := range blocks {
			if !cidr.Overlaps(o.Key.CIDR()) {
				continue
			}
			b := o.Value.(*store.Block)
			if n := allocated(b); n > 0 {
				busy, inUse = busy+1, inUse+n
				continue
			}
			_, err := d.store.Txn(ctx, dropBlock(o)...)
			if errors.Is(err, store.ErrConflict) {
				retry = true
				continue
			}
			if err != nil {
				return fmt.Errorf("give back block %s of %s: %w", b.CIDR, pool, err)
			}
		}
		if retry && try < writeTries {
			continue
		}
		if inUse > 0 {
			fmt.Fprintf(d.notes, "note: %s: addresses still in use: %d; blocks that stay until these are released: %d\n", pool, inUse, busy)
		}
		return nil
	}
}

// dropBlock removes an empty block and the claim on it.
func dropBlock(o store.Object) []store.Op {
	ops := []store.Op{{If: store.IfRevision(o.Revision), Action: store.Remove, Object: store.Object{Key: o.Key}}}
	if node := owner(o.Value.(*store.Block)); node != "" {
		ops = append(ops, store.Op{Action: store.Remove, Object: store.Object{Key: store.AffinityKey(node, o.Key.CIDR())}})
	}
	return ops
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
