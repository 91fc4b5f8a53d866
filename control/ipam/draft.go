package ipam

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

// errNeed says that a step cannot be planned before the draft's needs have
// been read from the store.
var errNeed = errors.New("more is to be read first")

// loaded is what was read from the store, or learnt from a conflict, for the
// transaction that is being planned.
type loaded struct {
	obj store.Object // Revision 0: the key does not exist
	err error        // it cannot be read; other keys may still be
}

// draft is a transaction in the making. Steps plan upon it one after the
// other, each on what those before it leave. Nothing here does I/O: what a
// step lacks goes to needs, and it is planned again when that has been read.
type draft struct {
	s      *state
	loaded map[store.Key]loaded
	now    time.Time

	blocks     map[netip.Prefix]*blockDraft
	affinities map[store.Key]*affinityDraft
	handles    map[string]*handleDraft
	claimed    []netip.Prefix // blocks that steps took for this node, in order
	touched    []store.Key    // in the order in which they are to be written
	needs      []store.Key

	gives   bool                          // a step of it may give addresses
	leaving map[netip.Addr]store.Revision // what goes back from the reserve; see reserve
}

type blockDraft struct {
	base  store.Object
	block block // its Block is nil when the block does not exist
	write bool
	check bool // its revision must hold although it is not written
}

type affinityDraft struct {
	base  store.Object
	value *store.Affinity // nil: it does not exist
	write bool
}

type handleDraft struct {
	base  store.Object
	value map[string]int // nil: it does not exist
	write bool
	check bool // its revision must hold although it is not written
	fence bool // it must be written: see draft.fence
	sure  bool // it was read for this transaction
}

func newDraft(s *state, known map[store.Key]loaded, now time.Time) *draft {
	return &draft{
		s: s, loaded: known, now: now,
		blocks:     map[netip.Prefix]*blockDraft{},
		affinities: map[store.Key]*affinityDraft{},
		handles:    map[string]*handleDraft{},
		leaving:    map[netip.Addr]store.Revision{},
	}
}

// need notes that a key must be read.
func (d *draft) need(key store.Key) error {
	if !slices.Contains(d.needs, key) {
		d.needs = append(d.needs, key)
	}
	return errNeed
}

// touch notes that a key will be written or checked.
func (d *draft) touch(key store.Key) {
	if !slices.Contains(d.touched, key) {
		d.touched = append(d.touched, key)
	}
}

// readBlock returns a block as the steps before leave it. A block of which
// nothing is known counts as not existing, unless sure is set: then the store
// is asked.
func (d *draft) readBlock(cidr netip.Prefix, sure bool) (*blockDraft, error) {
	if bd := d.blocks[cidr]; bd != nil {
		return bd, nil
	}
	key := store.BlockKey(cidr)
	info, l := d.s.blocks[cidr], loaded{}
	if info != nil && info.Object != nil {
		l.obj = *info.Object
	}
	if read, ok := d.loaded[key]; ok {
		if read.err != nil {
			return nil, read.err
		}
		if read.obj.Revision >= l.obj.Revision {
			l = read
		}
	} else if info != nil && info.broken != nil {
		return nil, info.broken
	} else if l.obj.Value == nil && (info != nil || sure) {
		return nil, d.need(key)
	}
	bd := &blockDraft{base: l.obj, block: block{cidr: cidr}}
	if l.obj.Revision != 0 {
		b, ok := l.obj.Value.(*store.Block)
		if !ok {
			return nil, fmt.Errorf("block %s: %w", cidr, store.ErrDecode)
		}
		var err error
		if bd.block, err = openBlock(cidr, b); err != nil {
			return nil, err
		}
		bd.block.collect(d.now, d.s.cooldown())
	}
	d.blocks[cidr] = bd
	return bd, nil
}

// writeBlock marks a block as changed.
func (d *draft) writeBlock(bd *blockDraft) {
	bd.write = true
	d.touch(store.BlockKey(bd.block.cidr))
}

// checkBlock makes the transaction depend on a block staying as it is.
func (d *draft) checkBlock(bd *blockDraft) {
	bd.check = true
	d.touch(store.BlockKey(bd.block.cidr))
}

// readAffinity returns the affinity of a node to a block. This node's are
// known; others' are read.
func (d *draft) readAffinity(node string, cidr netip.Prefix) (*affinityDraft, error) {
	key := store.AffinityKey(node, cidr)
	if ad := d.affinities[key]; ad != nil {
		return ad, nil
	}
	ad := &affinityDraft{}
	if node == d.s.node {
		ad.base = d.s.affinities[cidr].obj
	}
	if read, ok := d.loaded[key]; ok {
		// An affinity that cannot be decoded is written over or deleted.
		if read.err != nil && !errors.Is(read.err, store.ErrDecode) {
			return nil, read.err
		}
		if read.obj.Revision >= ad.base.Revision {
			ad.base = read.obj
		}
	} else if node != d.s.node {
		return nil, d.need(key)
	}
	if a, ok := ad.base.Value.(*store.Affinity); ok {
		value := *a
		ad.value = &value
	} else if ad.base.Revision != 0 {
		ad.value = &store.Affinity{State: store.AffinityPending}
	}
	d.affinities[key] = ad
	return ad, nil
}

// setAffinity writes this node's affinity to a block as confirmed, unless it
// is so already.
func (d *draft) setAffinity(cidr netip.Prefix) error {
	ad, err := d.readAffinity(d.s.node, cidr)
	if err != nil {
		return err
	}
	if ad.value == nil || !ad.value.Confirmed() || ad.value.Deleted {
		ad.value, ad.write = &store.Affinity{State: store.AffinityConfirmed}, true
		d.touch(store.AffinityKey(d.s.node, cidr))
	}
	return nil
}

// dropAffinity deletes an affinity.
func (d *draft) dropAffinity(node string, cidr netip.Prefix) error {
	ad, err := d.readAffinity(node, cidr)
	if err != nil {
		return err
	}
	if ad.value != nil {
		ad.value, ad.write = nil, true
		d.touch(store.AffinityKey(node, cidr))
	}
	return nil
}

// readHandle returns a handle as the steps before leave it. It may be older
// than the store's, for the watch does not deliver handles: who relies on it
// writes or checks it. One of which nothing is known counts as not existing,
// unless sure is set: then the store is asked.
func (d *draft) readHandle(id string, sure bool) (*handleDraft, error) {
	if hd := d.handles[id]; hd != nil {
		return hd, nil
	}
	key := store.HandleKey(id)
	l := loaded{obj: d.s.handles[id].obj}
	read, ok := d.loaded[key]
	if ok {
		if read.err != nil {
			return nil, read.err
		}
		l = read
	} else if l.obj.Revision == 0 && sure {
		return nil, d.need(key)
	}
	hd := &handleDraft{base: l.obj, sure: ok}
	if l.obj.Revision != 0 {
		h, ok := l.obj.Value.(*store.Handle)
		if !ok {
			return nil, fmt.Errorf("handle %s: %w", id, store.ErrDecode)
		}
		hd.value = make(map[string]int, len(h.Block))
		maps.Copy(hd.value, h.Block)
	}
	d.handles[id] = hd
	return hd, nil
}

// checkHandle makes the transaction depend on a handle staying as it is.
func (d *draft) checkHandle(id string, hd *handleDraft) {
	hd.check = true
	d.touch(store.HandleKey(id))
}

// count sets how many addresses of a block a handle holds, from the block
// itself: so counts that a crash or another program left wrong come right.
func (d *draft) count(id string, hd *handleDraft, b block) {
	d.setCount(id, hd, b.cidr.String(), len(b.Block.HeldBy(id)))
}

func (hd *handleDraft) has(cidr string) bool {
	_, ok := hd.value[cidr]
	return ok
}

func (d *draft) setCount(id string, hd *handleDraft, cidr string, n int) {
	hd.write = true
	d.touch(store.HandleKey(id))
	if n > 0 {
		if hd.value == nil {
			hd.value = map[string]int{}
		}
		hd.value[cidr] = n
		return
	}
	if delete(hd.value, cidr); len(hd.value) == 0 {
		hd.value = nil
	}
}

// ops returns the transaction. The draft is used up by it.
func (d *draft) ops() []store.Op {
	var out []store.Op
	for _, key := range d.touched {
		var op store.Op
		ok := false
		switch key.Kind {
		case store.KindIPAMBlock:
			bd := d.blocks[key.CIDR()]
			var value any
			if bd.write && bd.block.Block != nil {
				bd.block.SequenceNumber++
				value = bd.block.Block
			}
			op, ok = opFor(key, bd.base, value, bd.write, bd.check)
		case store.KindIPAMAffinity:
			ad := d.affinities[key]
			var value any
			if ad.value != nil {
				value = ad.value
			}
			op, ok = opFor(key, ad.base, value, ad.write, false)
		case store.KindIPAMHandle:
			hd := d.handles[key.Name]
			switch {
			case !d.s.piecewise:
			case key.Name == store.ReserveHandle(d.s.node):
				hd.bound()
			default:
				hd.spare()
			}
			var value any
			if hd.value != nil {
				value = &store.Handle{Block: hd.value}
			}
			op, ok = opFor(key, hd.base, value, hd.write, hd.check)
		}
		if ok {
			out = append(out, op)
		}
	}
	d.setRoles(out)
	return out
}

// bound keeps a transaction from writing the reserve's handle only because it counts
// less of a block. Its counts are hints in any case, and the reserve soon has as many again; the
// write would be one for each of the few pods that share one of their block. Which blocks it names
// stays exact.
func (hd *handleDraft) bound() {
	before, _ := hd.base.Value.(*store.Handle)
	hd.write = hd.write && (hd.fence || before == nil || len(hd.value) < len(before.Block) || hd.more())
}

// spare keeps a transaction from writing a handle that says already what it is to say, as one that
// [confirmStep.foresee] wrote does. That it does is looked at.
func (hd *handleDraft) spare() {
	before, _ := hd.base.Value.(*store.Handle)
	if hd.write && before != nil && maps.Equal(hd.value, before.Block) {
		hd.write, hd.check = false, true
	}
}

// opFor returns what brings a key from base to value, nil to have it deleted,
// on condition that it still is as base.
func opFor(key store.Key, base store.Object, value any, write, check bool) (store.Op, bool) {
	op := store.Op{If: store.IfAbsent(), Object: store.Object{Key: key}}
	if base.Revision != 0 {
		op.If = store.IfRevision(base.Revision)
	}
	switch {
	case write && value != nil:
		op.Action = store.Put
		op.Object.Value, op.Object.Raw = value, base.Raw
	case write && base.Revision != 0:
		op.Action = store.Remove
	case write || check:
		op.Action = store.Check
	default:
		return store.Op{}, false
	}
	return op, true
}

// size returns how many operations and about how many bytes the transaction
// has.
func (d *draft) size() (ops, bytes int) {
	for _, key := range d.touched {
		if key.Kind != store.KindIPAMBlock {
			bytes += 512
		} else if bd := d.blocks[key.CIDR()]; bd.write && bd.block.Block != nil {
			bytes += bd.block.jsonSize()
		}
	}
	return len(d.touched), bytes
}
