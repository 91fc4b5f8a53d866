package audit

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

// Mender carries out what findings say. What was found is old by then: hosts go on
// giving addresses meanwhile. So each record is read again, and after it the
// endpoints and nodes, and what is written is conditional on the record being as
// it was read, on nodes that are to be absent being so, and on each address being
// the one that was found, by its sequence number. What changed is left alone.
type Mender struct {
	Store store.Store

	hook func() // called between reading and writing; tests interfere there
}

// tries is how often a block is tried that another writer changes meanwhile.
const tries = 5

// freedTogether bounds how many addresses one transaction frees: each may have a
// handle and a node of its own.
const freedTogether = 24

// Mend carries out the fixes of findings and returns how many it did.
func (m *Mender) Mend(ctx context.Context, found []Finding) (int, error) {
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
func (m *Mender) remove(ctx context.Context, o store.Object) (bool, error) {
	ops := []store.Op{store.RemoveOp(o), store.CheckAbsent(store.ResourceKey(store.KindNode, o.Key.Namespace))}
	if h, ok := o.Value.(*store.Handle); ok {
		if len(h.Block) >= store.MaxOps {
			return false, fmt.Errorf("it names %d blocks; release its addresses first", len(h.Block))
		}
		var err error
		if ops, err = ipam.RemoveHandle(ctx, m.Store, o); err != nil || len(ops) == 0 {
			return false, err
		}
	}
	m.beforeWrite()
	_, err := m.Store.Txn(ctx, ops...)
	if errors.Is(err, store.ErrConflict) {
		return false, nil // it is in use, or was removed
	}
	return err == nil, err
}

// readTogether is how many blocks are read before the endpoints are.
const readTogether = 100

// blocks frees addresses of blocks, and takes them from their holders if asked
// to. It returns how many of these it did. Blocks that another writer changes
// meanwhile are tried again.
func (m *Mender) blocks(ctx context.Context, fixes map[netip.Prefix]*fix) (done int, err error) {
	todo := slices.SortedFunc(maps.Keys(fixes), netip.Prefix.Compare)
	for failed := 0; len(todo) > 0 && failed < tries; failed++ {
		var again []netip.Prefix
		for chunk := range slices.Chunk(todo, readTogether) {
			more, n, err := m.chunk(ctx, chunk, fixes)
			if done += n; err != nil {
				return done, err
			}
			if again = append(again, more...); n > 0 {
				failed = 0
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
func (m *Mender) chunk(ctx context.Context, cidrs []netip.Prefix, fixes map[netip.Prefix]*fix) (more []netip.Prefix, done int, err error) {
	var objs []store.Object
	for _, cidr := range cidrs {
		obj, err := m.Store.Get(ctx, store.BlockKey(cidr))
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, done, fmt.Errorf("block %s: %w", cidr, err)
		}
		obj.Key = store.BlockKey(cidr)
		objs = append(objs, obj)
	}
	now, err := read(ctx, m.Store, store.KindNode, store.KindWorkloadEndpoint)
	if err != nil {
		return nil, done, err
	}
	for _, key := range now.unreadable {
		if key.Kind == store.KindWorkloadEndpoint {
			return nil, done, fmt.Errorf("%s cannot be read, and which addresses it uses is not known: repair or delete it first", key)
		}
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
		m.beforeWrite()
		switch _, err := m.Store.Txn(ctx, ops...); {
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
func (m *Mender) plan(ctx context.Context, obj store.Object, f fix, now *Records) ([]store.Op, int, error) {
	b, ok := obj.Value.(*store.Block)
	if !ok {
		return nil, 0, store.ErrDecode
	}
	holder := b.Holder()
	disown := f.disown && holder != "" && !now.Nodes[holder]
	free := 0
	edit, ok, err := ipam.EditBlock(obj, func(a ipam.Allocation) bool {
		seq, wanted := f.free[a.Addr]
		if !wanted || seq != a.Sequence || now.Nodes[a.Node] || len(now.users[a.Addr]) > 0 || free == freedTogether {
			return false
		}
		free++
		return true
	}, disown, time.Now(), ipam.Cooldown(ctx, m.Store))
	n := len(edit.Freed)
	if disown {
		n++
	}
	if err != nil || !ok || n == 0 {
		return nil, 0, err
	}
	handles, err := ipam.ReadHandles(ctx, m.Store, edit)
	if err != nil {
		return nil, 0, err
	}
	ops, _ := ipam.EditOps(handles, edit)
	return append(ipam.NodesAbsent(edit), ops...), n, nil
}

func (m *Mender) beforeWrite() {
	if m.hook != nil {
		m.hook()
	}
}

// Release frees an address that has still its sequence number, with whatever uses
// it, and returns how many that were.
func Release(ctx context.Context, s store.Store, a ipam.Allocation) (int, error) {
	var last error
	for range tries {
		obj, err := s.Get(ctx, store.BlockKey(a.Block))
		if errors.Is(err, store.ErrNotFound) {
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		obj.Key = store.BlockKey(a.Block)
		edit, ok, err := ipam.EditBlock(obj, func(b ipam.Allocation) bool {
			return b.Addr == a.Addr && b.Sequence == a.Sequence
		}, false, time.Now(), ipam.Cooldown(ctx, s))
		if err != nil || !ok {
			return 0, err
		}
		handles, err := ipam.ReadHandles(ctx, s, edit)
		if err != nil {
			return 0, err
		}
		ops, _ := ipam.EditOps(handles, edit)
		if _, last = s.Txn(ctx, ops...); last == nil || !errors.Is(last, store.ErrConflict) {
			return len(edit.Freed), last
		}
	}
	return 0, last
}
