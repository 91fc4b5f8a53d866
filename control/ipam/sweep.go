package ipam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/store"
)

// readsAtOnce of handles.
const readsAtOnce = 8

// Reserved reports whether Calico holds the address for something that neither an
// endpoint nor a node's resource names: a load balancer, or Windows.
func (a Allocation) Reserved() bool {
	return strings.HasPrefix(a.Handle, "lb-") || a.Handle == "windows-reserved-ipam-handle"
}

// Cooldown reads how long a released address is not assigned again; 0 when the
// settings cannot be read.
func Cooldown(ctx context.Context, st store.Store) time.Duration {
	obj, err := st.Get(ctx, store.IPAMConfigKey())
	if c, ok := obj.Value.(*store.IPAMConfig); err == nil && ok {
		return c.Cooldown()
	}
	return 0
}

// ReadHandles reads the handles that edits concern. One that does not exist is
// left out. With an error that matches [store.ErrDecode] it returns those that can
// be read.
func ReadHandles(ctx context.Context, st store.Store, edits ...BlockEdit) (map[string]store.Object, error) {
	out := map[string]store.Object{}
	for _, e := range edits {
		for id := range e.Left {
			out[id] = store.Object{}
		}
	}
	ids := slices.Sorted(maps.Keys(out))
	got, failed := make([]store.Object, len(ids)), make([]error, len(ids))
	var g errgroup.Group
	g.SetLimit(readsAtOnce)
	for i, id := range ids {
		g.Go(func() error {
			obj, err := st.Get(ctx, store.HandleKey(id))
			obj.Key = store.HandleKey(id)
			switch {
			case err == nil:
				got[i] = obj
			case errors.Is(err, store.ErrDecode):
				failed[i] = fmt.Errorf("read handle %s: %w", id, err)
			case !errors.Is(err, store.ErrNotFound):
				return fmt.Errorf("read handle %s: %w", id, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for i, id := range ids {
		if out[id] = got[i]; got[i].Revision == 0 {
			delete(out, id)
		}
	}
	return out, errors.Join(failed...)
}

// EditOps returns what writes edits of blocks, and lowers their handles, of which
// handles has those that can be read. deleted counts the handles that go. Several
// blocks stand for themselves where one object is written at a time: each of them
// is only freed.
func EditOps(handles map[string]store.Object, edits ...BlockEdit) (ops []store.Op, deleted int) {
	left := map[string]map[string]int{} // handle → block → addresses
	for _, e := range edits {
		if len(edits) > 1 {
			e.Op.Role = store.Prepares
		}
		ops = append(ops, e.Op)
		for h, n := range e.Left {
			if left[h] == nil {
				left[h] = map[string]int{}
			}
			left[h][e.Op.Object.Key.CIDR().String()] = n
		}
	}
	for _, h := range slices.Sorted(maps.Keys(left)) {
		if op, ok := editHandle(handles[h], left[h]); ok {
			op.Role = store.Follows
			ops = append(ops, op)
			if op.Action == store.Remove {
				deleted++
			}
		}
	}
	return ops, deleted
}

// NodesAbsent returns the conditions that the nodes whose addresses and blocks the
// edits free do not exist.
func NodesAbsent(edits ...BlockEdit) []store.Op {
	nodes := map[string]bool{}
	for _, e := range edits {
		nodes[e.Disowned] = true
		for _, a := range e.Freed {
			nodes[a.Node] = true
		}
	}
	delete(nodes, "")
	var ops []store.Op
	for _, n := range slices.Sorted(maps.Keys(nodes)) {
		ops = append(ops, store.CheckAbsent(store.ResourceKey(store.KindNode, n)))
	}
	return ops
}

// RemoveHandle returns the operations that delete a handle as it was read, on
// condition that the blocks which it names stay as they are. It returns none when
// one of these has an address of the handle, or may have one because it makes no
// sense. The operations can be more than [store.MaxOps].
func RemoveHandle(ctx context.Context, st store.Store, o store.Object) ([]store.Op, error) {
	h, ok := o.Value.(*store.Handle)
	if !ok {
		return nil, fmt.Errorf("%s: %w", o.Key, store.ErrDecode)
	}
	ops := []store.Op{store.RemoveOp(o)}
	for c := range h.Block {
		cidr, err := netip.ParsePrefix(c)
		if err != nil || cidr != cidr.Masked() {
			continue // no block has such a name
		}
		check := store.CheckAbsent(store.BlockKey(cidr))
		obj, err := st.Get(ctx, check.Object.Key)
		switch {
		case errors.Is(err, store.ErrNotFound):
		case err != nil && !errors.Is(err, store.ErrDecode):
			return nil, fmt.Errorf("read block %s: %w", cidr, err)
		default:
			b, _ := obj.Value.(*store.Block)
			all, err := Allocations(cidr, b)
			if err != nil || slices.ContainsFunc(all, func(a Allocation) bool { return a.Handle == o.Key.Name }) {
				return nil, nil //nolint:nilerr // a block that cannot be read may name the handle
			}
			check.If = store.IfRevision(obj.Revision)
		}
		ops = append(ops, check)
	}
	return ops, nil
}
