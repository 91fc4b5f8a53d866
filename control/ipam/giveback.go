package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/routerd/routerd/store"
)

// giveBackTries is how often a block is tried that another writer changes.
const giveBackTries = 20

// Held returns how many addresses a node's reserve has in the datastore.
func Held(ctx context.Context, st store.Store, node string) (int, error) {
	h, err := reserveOf(ctx, st, node)
	if err != nil {
		return 0, err
	}
	n := 0
	for c := range h.Block {
		cidr, err := netip.ParsePrefix(c)
		if err != nil {
			return 0, fmt.Errorf("the reserve of node %s: block %q: %w", node, c, err)
		}
		obj, err := st.Get(ctx, store.BlockKey(cidr.Masked()))
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		b, ok := obj.Value.(*store.Block)
		switch {
		case err == nil && !ok:
			err = store.ErrDecode
			fallthrough
		case err != nil:
			return 0, fmt.Errorf("the reserve of node %s: read block %s: %w", node, cidr, err)
		}
		n += len(b.HeldBy(store.ReserveHandle(node)))
	}
	return n, nil
}

// reserveOf reads the handle of a node's reserve; one that does not exist holds
// nothing.
func reserveOf(ctx context.Context, st store.Store, node string) (*store.Handle, error) {
	obj, err := st.Get(ctx, store.HandleKey(store.ReserveHandle(node)))
	if errors.Is(err, store.ErrNotFound) {
		return &store.Handle{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the reserve of node %s: %w", node, err)
	}
	h, ok := obj.Value.(*store.Handle)
	if !ok {
		return nil, fmt.Errorf("read the reserve of node %s: %w", node, store.ErrDecode)
	}
	return h, nil
}

// GiveBack releases the reserve of a node whose daemon is stopped and will not
// use it any more, and returns how many addresses that were. They cool down as
// released addresses do, for some may have been a workload's. A block that is empty then
// stays the node's.
func GiveBack(ctx context.Context, st store.Store, node string) (int, error) {
	h, err := reserveOf(ctx, st, node)
	if err != nil {
		return 0, err
	}
	n := 0
	for c := range h.Block {
		cidr, err := netip.ParsePrefix(c)
		if err != nil {
			return n, fmt.Errorf("give the reserve of node %s back: block %q: %w", node, c, err)
		}
		freed, err := giveBackBlock(ctx, st, node, cidr.Masked())
		if n += freed; err != nil {
			return n, fmt.Errorf("give the reserve of node %s back: block %s: %w", node, cidr, err)
		}
	}
	return n, nil
}

func giveBackBlock(ctx context.Context, st store.Store, node string, cidr netip.Prefix) (int, error) {
	var last error
	for range giveBackTries {
		handle, err := st.Get(ctx, store.HandleKey(store.ReserveHandle(node)))
		if errors.Is(err, store.ErrNotFound) {
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		handle.Key = store.HandleKey(store.ReserveHandle(node))
		var ops []store.Op
		left, freed := map[string]int{cidr.String(): 0}, 0
		switch obj, err := st.Get(ctx, store.BlockKey(cidr)); {
		case errors.Is(err, store.ErrNotFound):
		case err != nil:
			return 0, err
		default:
			obj.Key = store.BlockKey(cidr)
			edit, ok, err := EditBlock(obj, func(a Allocation) bool { return a.Handle == store.ReserveHandle(node) }, false, time.Now(), Cooldown(ctx, st))
			if err != nil {
				return 0, err
			}
			if freed = len(edit.Freed); ok {
				ops = append(ops, edit.Op)
			}
		}
		if op, ok := editHandle(handle, left); ok {
			if len(ops) > 0 {
				op.Role = store.Follows
			}
			ops = append(ops, op)
		}
		if _, last = st.Txn(ctx, ops...); last == nil {
			return freed, nil
		}
		if !errors.Is(last, store.ErrConflict) {
			return 0, last
		}
	}
	return 0, last
}

// ForgetReserve has a journal know nothing of the reserve, so that a daemon that
// starts by it without the datastore gives none of what was given back.
func ForgetReserve(j Journal) error { return j.Delete(rememberKey) }
