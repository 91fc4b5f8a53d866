package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// mender carries out what --fix does. What was found is old by then: hosts go on
// giving addresses meanwhile. So each record is read again, and after it the
// endpoints and nodes, and what is written is conditional on the record being as
// it was read, on nodes that are to be absent being so, and on each address being
// the one that was found, by its sequence number. What changed is left alone.
type mender struct {
	s    store.Store
	hook func() // called between reading and writing; tests interfere there
}

// freedTogether bounds how many addresses one transaction frees: each may have a
// handle and a node of its own.
const freedTogether = 24

// mend carries out the fixes of findings and returns how many it did.
func (m *mender) mend(ctx context.Context, found []finding) (int, error) {
	blocks := map[netip.Prefix]*fix{}
	done := 0
	var errs []error
	for _, f := range found {
		switch {
		case f.fix == nil:
		case f.fix.remove.Revision != 0:
			ok, err := m.remove(ctx, f.fix.remove)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", f.What, err))
			} else if ok {
				done++
			}
		default:
			have := blocks[f.fix.block]
			if have == nil {
				have = &fix{block: f.fix.block}
				blocks[f.fix.block] = have
			}
			have.disown = have.disown || f.fix.disown
			if f.fix.free != nil {
				have.free = f.fix.free
			}
		}
	}
	n, err := m.blocks(ctx, blocks)
	return done + n, errors.Join(append(errs, err)...)
}

// remove deletes a claim whose node is absent, or a handle of which no block has
// an address. It reports whether it did.
func (m *mender) remove(ctx context.Context, o store.Object) (bool, error) {
	ops := []store.Op{{Action: store.Remove, If: store.IfRevision(o.Revision), Object: store.Object{Key: o.Key}}}
	if h, ok := o.Value.(*store.Handle); ok {
		checks, empty, err := m.emptyHandle(ctx, o.Key.Name, h)
		if err != nil || !empty {
			return false, err
		}
		ops = append(ops, checks...)
	} else {
		ops = append(ops, absent(o.Key.Namespace))
	}
	m.interfere()
	_, err := m.s.Txn(ctx, ops...)
	if errors.Is(err, store.ErrConflict) {
		return false, nil // somebody uses it, or has removed it
	}
	return err == nil, err
}

// emptyHandle reports whether no block that a handle names has an address of it,
// and returns the conditions under which that stays so.
func (m *mender) emptyHandle(ctx context.Context, name string, h *store.Handle) ([]store.Op, bool, error) {
	if len(h.Block) >= store.MaxOps {
		return nil, false, fmt.Errorf("it names %d blocks; release its addresses first", len(h.Block))
	}
	var ops []store.Op
	for c := range h.Block {
		cidr, err := netip.ParsePrefix(c)
		if err != nil {
			continue // no block has such a name
		}
		obj, err := m.s.Get(ctx, store.BlockKey(cidr.Masked()))
		op := store.Op{Action: store.Check, If: store.IfAbsent(), Object: store.Object{Key: store.BlockKey(cidr.Masked())}}
		switch {
		case errors.Is(err, store.ErrNotFound):
		case err != nil:
			return nil, false, err
		default:
			b, ok := obj.Value.(*store.Block)
			if !ok {
				return nil, false, nil
			}
			list, err := ipam.Allocations(cidr.Masked(), b)
			if err != nil || slices.ContainsFunc(list, func(a ipam.Allocation) bool { return a.Handle == name }) {
				return nil, false, err
			}
			op.If = store.IfRevision(obj.Revision)
		}
		ops = append(ops, op)
	}
	return ops, true, nil
}

// readTogether is how many blocks are read before the endpoints are.
const readTogether = 100

// blocks frees addresses of blocks, and takes them from their holders if asked
// to. It returns how many of these it did. Blocks that somebody else writes
// meanwhile are tried again.
func (m *mender) blocks(ctx context.Context, fixes map[netip.Prefix]*fix) (done int, err error) {
	todo := sorted(slices.Collect(maps.Keys(fixes)))
	for tries := 0; len(todo) > 0 && tries < writeTries; tries++ {
		var again []netip.Prefix
		for chunk := range slices.Chunk(todo, readTogether) {
			more, n, err := m.chunk(ctx, chunk, fixes)
			if done += n; err != nil {
				return done, err
			}
			if again = append(again, more...); n > 0 {
				tries = 0
			}
		}
		todo = again
	}
	if len(todo) > 0 {
		err = fmt.Errorf("%d blocks, the first is %s, were changed again and again meanwhile: %w; run it again", len(todo), todo[0], store.ErrConflict)
	}
	return done, err
}

// chunk is blocks for some; more are those that are to be looked at again.
func (m *mender) chunk(ctx context.Context, cidrs []netip.Prefix, fixes map[netip.Prefix]*fix) (more []netip.Prefix, done int, err error) {
	var objs []store.Object
	for _, cidr := range cidrs {
		obj, err := m.s.Get(ctx, store.BlockKey(cidr))
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, done, fmt.Errorf("block %s: %w", cidr, err)
		}
		obj.Key = store.BlockKey(cidr)
		objs = append(objs, obj)
	}
	now, err := m.users(ctx)
	if err != nil {
		return nil, done, err
	}
	for _, obj := range objs {
		cidr := obj.Key.CIDR()
		ops, n, err := m.plan(ctx, obj, *fixes[cidr], now)
		if err != nil {
			return more, done, fmt.Errorf("block %s: %w", cidr, err)
		}
		if n == 0 {
			continue
		}
		m.interfere()
		switch _, err := m.s.Txn(ctx, ops...); {
		case errors.Is(err, store.ErrConflict):
			more = append(more, cidr)
		case err != nil:
			return more, done, fmt.Errorf("block %s: %w", cidr, err)
		default:
			if done += n; n >= freedTogether {
				more = append(more, cidr)
			}
		}
	}
	return more, done, nil
}

// plan returns what mends a block as it was read before the users, now, and how
// many things that are.
func (m *mender) plan(ctx context.Context, obj store.Object, f fix, now *records) ([]store.Op, int, error) {
	b, ok := obj.Value.(*store.Block)
	if !ok {
		return nil, 0, store.ErrDecode
	}
	nodes := map[string]bool{} // that must be absent
	owner, virtual := ipam.Owner(b)
	disown := f.disown && owner != "" && !virtual && !now.nodes[owner]
	if disown {
		nodes[owner] = true
	}
	free := 0
	edit, ok, err := ipam.EditBlock(obj, func(a ipam.Allocation) bool {
		seq, wanted := f.free[a.Addr]
		if !wanted || seq != a.Sequence || now.nodes[a.Node] || len(now.users[a.Addr]) > 0 || free == freedTogether {
			return false
		}
		if free++; a.Node != "" {
			nodes[a.Node] = true
		}
		return true
	}, disown, time.Now(), cooldown(ctx, m.s))
	n := len(edit.Freed)
	if disown {
		n++
	}
	if err != nil || !ok || n == 0 {
		return nil, 0, err
	}
	ops := []store.Op{edit.Op}
	for node := range nodes {
		ops = append(ops, absent(node))
	}
	for h, left := range edit.Left {
		obj, err := m.s.Get(ctx, store.HandleKey(h))
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return nil, 0, err
		}
		obj.Key = store.HandleKey(h)
		if op, ok := ipam.EditHandle(obj, map[string]int{f.block.String(): left}); ok {
			ops = append(ops, op)
		}
	}
	return ops, n, nil
}

// users reads who uses which address, and which nodes there are.
func (m *mender) users(ctx context.Context) (*records, error) {
	r := &records{blocks: map[netip.Prefix]*store.Block{}, nodes: map[string]bool{}, users: map[netip.Addr][]string{}}
	for _, kind := range []store.Kind{store.KindNode, store.KindWorkloadEndpoint} {
		err := store.Pages(ctx, m.s, kind, "", func(objs []store.Object) error {
			for _, o := range objs {
				r.take(o)
			}
			return nil
		})
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return nil, err
		}
	}
	for _, key := range r.unreadable {
		if key.Kind == store.KindWorkloadEndpoint {
			return nil, fmt.Errorf("%s cannot be read, and which addresses it uses is not known: repair or delete it first", key)
		}
	}
	return r, nil
}

// absent is the condition that a node does not exist.
func absent(node string) store.Op {
	return store.Op{Action: store.Check, If: store.IfAbsent(), Object: store.Object{Key: store.ResourceKey(store.KindNode, node)}}
}

func (m *mender) interfere() {
	if m.hook != nil {
		m.hook()
	}
}
