package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// pool deletes an IPPool: disable it, let allocations under way end, let nodes
// move their tunnel addresses elsewhere, give back its empty blocks, remove it,
// and give back what the tunnels without another pool leave then.
func (d *deletion) pool(ctx context.Context, o store.Object) error {
	p, ok := o.Value.(*v3.IPPool)
	if !ok {
		return d.remove(ctx, o.Key) // undecodable: nobody allocates from it
	}
	if _, err := store.Modify(ctx, d.store, o.Key, setDisabled(true)); err != nil {
		return fmt.Errorf("disable %s before its deletion: %w", o.Key, err)
	}
	if err := async.Sleep(ctx, d.settle); err != nil {
		return err
	}
	cidr, err := netip.ParsePrefix(p.Spec.CIDR)
	if err != nil {
		return d.remove(ctx, o.Key)
	}
	cidr = cidr.Masked()
	// What began before the pool was disabled counts as well.
	if err := d.unused(ctx, o); err != nil {
		return fmt.Errorf("%w; it stays disabled", err)
	}
	if err := d.moveTunnels(ctx, p); err != nil {
		return err
	}
	if err := d.emptyBlocks(ctx, o.Key, cidr); err != nil {
		return err
	}
	if err := d.remove(ctx, o.Key); err != nil {
		return err
	}
	return d.leftovers(ctx, o.Key, cidr)
}

// unused refuses a pool that workloads have addresses of.
func (d *deletion) unused(ctx context.Context, o store.Object) error {
	p, ok := o.Value.(*v3.IPPool)
	if !ok || d.force {
		return nil
	}
	workloads, _, err := d.users(ctx, p)
	if err != nil {
		return fmt.Errorf("delete %s: %w", o.Key, err)
	}
	if len(workloads) > 0 {
		return fmt.Errorf("delete %s: workloads have %d of its addresses (%s); move them with \"routerctl pool drain %s --wait\", or give --force",
			o.Key, len(workloads), whose(workloads), o.Key.Name)
	}
	return nil
}

func (d *deletion) users(ctx context.Context, p *v3.IPPool) (workloads, tunnels []holding, err error) {
	cidr, err := netip.ParsePrefix(p.Spec.CIDR)
	if err != nil {
		return nil, nil, nil //nolint:nilerr // nobody can have an address of it
	}
	blocks, _, err := d.store.List(ctx, store.KindIPAMBlock, "")
	if err != nil {
		return nil, nil, err
	}
	workloads, tunnels = split(holdings(cidr.Masked(), blocks))
	return workloads, tunnels, nil
}

// moveTunnels waits until the nodes' tunnels have addresses of other pools,
// where there is one for them. Those of nodes that do not run are left to the
// deletion of the node.
func (d *deletion) moveTunnels(ctx context.Context, p *v3.IPPool) error {
	pools, _, err := d.store.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return fmt.Errorf("delete IPPool(%s): %w", p.Name, err)
	}
	if !takesTunnels(p, pools) {
		return nil
	}
	_, err = d.until(ctx, func() (bool, error) {
		_, tunnels, err := d.users(ctx, p)
		return len(tunnels) == 0, err
	})
	return err
}

// until looks at something until it is done or patience ends.
func (d *deletion) until(ctx context.Context, done func() (bool, error)) (bool, error) {
	for end := time.Now().Add(d.patience); ; {
		ok, err := done()
		if ok || err != nil || !time.Now().Before(end) {
			return ok, err
		}
		if err := async.Sleep(ctx, d.every); err != nil {
			return false, err
		}
	}
}

// leftovers waits until the nodes have given up the blocks from which their
// tunnels took addresses to the last, and notes what is left.
func (d *deletion) leftovers(ctx context.Context, pool store.Key, cidr netip.Prefix) error {
	var left []store.Object
	gone, err := d.until(ctx, func() (bool, error) {
		blocks, _, err := d.store.List(ctx, store.KindIPAMBlock, "")
		if err != nil {
			return false, fmt.Errorf("%s is deleted; read what is left of it: %w", pool, err)
		}
		left = slices.DeleteFunc(blocks, func(o store.Object) bool { return !cidr.Overlaps(o.Key.CIDR()) })
		// Only tunnels leave by themselves.
		workloads, _ := split(holdings(cidr, left))
		return len(left) == 0 || len(workloads) > 0, nil
	})
	if err != nil || gone && len(left) == 0 {
		return err
	}
	all := holdings(cidr, left)
	fmt.Fprintf(d.notes, "note: %s: addresses still in use: %d; blocks that stay until these are released: %d", pool, len(all), len(left))
	if len(all) > 0 {
		fmt.Fprintf(d.notes, " (%s)", whose(all))
	}
	fmt.Fprintln(d.notes)
	if _, tunnels := split(all); len(tunnels) > 0 {
		fmt.Fprintln(d.notes, "note: a node releases its tunnel address when its routerd runs; if a node is gone for good, delete it")
	}
	return nil
}

func (d *deletion) remove(ctx context.Context, key store.Key) error {
	err := store.Delete(ctx, d.store, key, 0)
	if errors.Is(err, store.ErrNotFound) {
		return nil // somebody else was faster
	}
	return err
}

// emptyBlocks removes the blocks of a pool that hold no address, each with its
// owner's claim in one transaction.
func (d *deletion) emptyBlocks(ctx context.Context, pool store.Key, cidr netip.Prefix) error {
	for try := 1; ; try++ {
		blocks, _, err := d.store.List(ctx, store.KindIPAMBlock, "")
		if err != nil {
			return fmt.Errorf("delete %s: %w", pool, err)
		}
		retry := false
		for _, o := range blocks {
			if !cidr.Overlaps(o.Key.CIDR()) {
				continue
			}
			b := o.Value.(*store.Block)
			if b.Allocated() > 0 {
				continue
			}
			_, err := d.store.Txn(ctx, dropBlock(o)...)
			if errors.Is(err, store.ErrConflict) {
				retry = true
				continue
			}
			if err != nil {
				return fmt.Errorf("release block %s of %s: %w", b.CIDR, pool, err)
			}
		}
		if retry && try < writeTries {
			continue
		}
		return nil
	}
}

// dropBlock removes an empty block and the claim on it.
func dropBlock(o store.Object) []store.Op {
	ops := []store.Op{store.RemoveOp(o)}
	if node := o.Value.(*store.Block).Holder(); node != "" {
		ops = append(ops, store.Op{Action: store.Remove, Role: store.Follows, Object: store.Object{Key: store.AffinityKey(node, o.Key.CIDR())}})
	}
	return ops
}
