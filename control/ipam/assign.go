package ipam

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/store"
)

// reclaimAge is how long another node must have held an empty block before it
// may be taken over. It keeps two nodes from taking a block from each other
// before either has used it.
const reclaimAge = time.Minute

// step is one caller's request. plan adds it to a draft, whole or not at all. It
// may be called many times, always on a new draft; the last call counts.
type step interface {
	plan(*draft) error
}

// assignStep gives addresses.
type assignStep struct {
	req Request

	held  []Assignment // what the handle had already
	given []Assignment
}

// pick is some ordinals of one block.
type pick struct {
	bd       *blockDraft
	fresh    *block // what the block is to be, when it is taken for this node
	from     string // the node that the block is taken from
	ordinals []int
}

func (st *assignStep) plan(d *draft) error { return planTogether(d, st) }

func (st *assignStep) request() *Request { return &st.req }

func (st *assignStep) give(held, given []Assignment) { st.held, st.given = held, given }

func (st *assignStep) result() (held, given []Assignment) { return st.held, st.given }

func (st *assignStep) find(d *draft) (held []Assignment, picks []pick, err error) {
	r := &st.req
	pools, refused := d.s.selectPools(r)
	want := r.Count
	if r.Idempotent {
		if held, err = d.heldBefore(r, pools); err != nil {
			return nil, nil, err
		}
		if want -= len(held); want <= 0 {
			return held, nil, nil
		}
	}
	f := finder{d: d, r: r, pools: pools, want: want}
	if refused == nil {
		refused = f.find()
	}
	if refused != nil {
		if hd := d.handles[r.Handle]; r.Idempotent && hd != nil && !hd.sure {
			// No transaction will find out whether the handle is new indeed.
			return nil, nil, d.need(store.HandleKey(r.Handle))
		}
		return nil, nil, refused
	}
	return held, f.picks, nil
}

// ready reports what keeps every assignment from taking place.
func (d *draft) ready() error {
	if d.s.configErr != nil {
		return d.s.configErr
	}
	if !d.s.registered {
		return fmt.Errorf("%w: there is no Node %q in the datastore; it is made when the daemon starts", ErrNodeMissing, d.s.node)
	}
	return nil
}

// heldBefore returns what the request's handle holds in its family. For a
// tunnel only what lies in the pools counts.
func (d *draft) heldBefore(r *Request, pools []*pool) ([]Assignment, error) {
	// Nearly always the handle is new. Then nothing is read: the transaction's
	// condition finds out if it was not so.
	known := slices.ContainsFunc(d.s.own, func(b *blockInfo) bool {
		return len(b.Value().HeldBy(r.Handle)) > 0
	})
	hd, err := d.readHandle(r.Handle, known)
	if err != nil {
		return nil, err
	}
	all, err := d.holdings(r.Handle, hd)
	if err != nil {
		return nil, err
	}
	all = d.on(r.Attributes[AttrNode], all)
	return slices.DeleteFunc(all, func(a Assignment) bool {
		return a.Addr.Is4() != (r.Family.Bits() == 32) ||
			r.tunnel != nil && !slices.ContainsFunc(pools, func(p *pool) bool { return p.cidr.Contains(a.Addr) })
	}), nil
}

// on leaves out what is in use on another node. Two nodes can come to one
// handle: cnitool derives a container's id from the path of its namespace,
// which is the same on many hosts.
func (d *draft) on(node string, held []Assignment) []Assignment {
	return slices.DeleteFunc(held, func(a Assignment) bool {
		return !sameNode(d.blocks[a.Block].block.Attribute(ordinalOf(a.Block, a.Addr)), node)
	})
}

// sameNode reports whether an address is not known to be in use elsewhere than
// on a node; an empty node is any.
func sameNode(a *store.Attribute, node string) bool {
	return node == "" || a == nil || a.Secondary[AttrNode] == "" || a.Secondary[AttrNode] == node
}

// holdings returns every address that a handle holds, by the blocks that it
// names and those that this node holds. The transaction depends on all of
// these: after an outcome that is not known, what is known here may be older
// than what is stored.
func (d *draft) holdings(id string, hd *handleDraft) ([]Assignment, error) {
	var out []Assignment
	var missing error
	for _, cidr := range d.blocksOf(id, hd) {
		bd, err := d.readBlock(cidr, true)
		if err != nil {
			missing = cmp.Or(missing, err)
			continue // so that all needs are read together
		}
		d.checkBlock(bd)
		d.checkHandle(id, hd)
		if bd.block.Block == nil {
			continue
		}
		for _, o := range bd.block.Block.HeldBy(id) {
			out = append(out, d.assignment(bd.block, o, id))
		}
	}
	return out, missing
}

func (d *draft) assignment(b block, ordinal int, handle string) Assignment {
	a := Assignment{Addr: addrAt(b.cidr, ordinal), Block: b.cidr, Handle: handle, Sequence: sequence(b.Block, ordinal)}
	if p := d.s.poolOf(b.cidr); p != nil {
		a.Pool = p.name
	}
	return a
}

// blocksOf returns the blocks in which a handle may hold addresses, in order.
func (d *draft) blocksOf(id string, hd *handleDraft) []netip.Prefix {
	var out []netip.Prefix
	for c := range hd.value {
		if p, err := netip.ParsePrefix(c); err == nil {
			out = append(out, p.Masked())
		}
	}
	for _, b := range d.s.own {
		if len(b.Value().HeldBy(id)) > 0 {
			out = append(out, b.CIDR)
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

// preparePicks reads what carrying picks out will change. Everything that can go
// wrong with them does so here, before the first change.
func (d *draft) preparePicks(r *Request, picks []pick) error {
	if _, err := d.readHandle(r.Handle, false); err != nil {
		return err
	}
	for _, p := range picks {
		if err := d.prepare(p); err != nil {
			return err
		}
	}
	return nil
}

// take carries picks out.
func (d *draft) take(r *Request, picks []pick) ([]Assignment, error) {
	hd, err := d.readHandle(r.Handle, false)
	if err != nil {
		return nil, err
	}
	var out []Assignment
	for _, p := range picks {
		if err := d.settle(p); err != nil {
			return nil, err
		}
		own := store.ReserveHandle(d.s.node)
		before := len(p.bd.block.Block.HeldBy(own))
		p.bd.block.assign(p.ordinals, r.attribute(d.s.node))
		p.bd.block.compact() // what an address in its cool-down had may be left
		if r.Handle != own && len(p.bd.block.Block.HeldBy(own)) < before {
			// One that was named, and that this node held ready for anybody.
			old, err := d.readHandle(own, true)
			if err != nil {
				return nil, err
			}
			d.count(own, old, p.bd.block)
		}
		d.writeBlock(p.bd)
		d.count(r.Handle, hd, p.bd.block)
		for _, o := range p.ordinals {
			out = append(out, d.assignment(p.bd.block, o, r.Handle))
		}
	}
	return out, nil
}

// prepare reads the affinities that a pick will change.
func (d *draft) prepare(p pick) error {
	if _, err := d.readAffinity(d.s.node, p.bd.block.cidr); err != nil {
		return err
	}
	if p.from != "" {
		if _, err := d.readAffinity(p.from, p.bd.block.cidr); err != nil {
			return err
		}
	}
	return nil
}

// settle makes the block of a pick exist and its affinity agree with it. That
// also mends an affinity that a crash left unconfirmed.
func (d *draft) settle(p pick) error {
	cidr := p.bd.block.cidr
	if p.fresh != nil {
		p.bd.block = *p.fresh
		d.claimed = append(d.claimed, cidr)
		if p.from != "" {
			if err := d.dropAffinity(p.from, cidr); err != nil {
				return err
			}
		}
	}
	if node := p.bd.block.Block.Holder(); node != d.s.node {
		return nil // borrowed
	}
	return d.setAffinity(cidr)
}

// finder looks for free addresses, in the order that Calico keeps: this node's
// blocks, new blocks, empty blocks of others, borrowing.
type finder struct {
	d     *draft
	r     *Request
	pools []*pool
	want  int
	picks []pick

	owned   int   // blocks that this node holds in the pools
	trouble error // why a block could not be looked at
}

func (f *finder) find() error {
	for _, stage := range []func() error{f.ownBlocks, f.newBlocks, f.borrow} {
		if f.want == 0 {
			return nil
		}
		if err := stage(); err != nil {
			return err
		}
	}
	if f.want == 0 {
		return nil
	}
	for _, b := range f.d.s.blocks {
		if b.broken != nil && f.poolFor(b.CIDR) != nil {
			f.trouble = cmp.Or(f.trouble, b.broken)
		}
	}
	err := &Error{Reason: ErrExhausted, Message: fmt.Sprintf("node %s lacks %d of %d %s addresses in %s; release some, or add a pool",
		f.d.s.node, f.want, f.r.Count, f.r.Family, describe(f.pools))}
	if f.d.s.usePodCIDR {
		err.Message = fmt.Sprintf("node %s lacks %d of %d %s addresses in %s: %s", f.d.s.node, f.want, f.r.Count, f.r.Family, describe(f.pools), f.d.s.outsidePodCIDRs())
	}
	if f.trouble != nil {
		return fmt.Errorf("%w; and there is a block that cannot be used: %w", err, f.trouble)
	}
	return err
}

// poolFor returns the pool of the request that contains a block.
func (f *finder) poolFor(block netip.Prefix) *pool {
	for _, p := range f.pools {
		if p.cidr.Bits() <= block.Bits() && p.cidr.Contains(block.Addr()) {
			return p
		}
	}
	return nil
}

// inUse reports whether a workload of this host other than the request's lives with an
// address, though the datastore may say that it is free: it was released there, or
// deleted its block.
func (f *finder) inUse(a netip.Addr) bool { return f.d.s.reserve.claimedBy(a, f.r.Handle) != "" }

// use takes what a block has.
func (f *finder) use(p pick, b block) bool {
	if p.ordinals = b.peek(f.want, f.d.s.reserved, f.inUse); len(p.ordinals) == 0 {
		return false
	}
	f.picks = append(f.picks, p)
	f.want -= len(p.ordinals)
	return true
}

// read returns a block to be used, nil if it does not exist or cannot be read.
// A block that cannot be read does not stop the others.
func (f *finder) read(cidr netip.Prefix) (*blockDraft, error) {
	bd, err := f.d.readBlock(cidr, false)
	switch {
	case errors.Is(err, errNeed):
		return nil, err
	case err != nil:
		f.trouble = cmp.Or(f.trouble, err)
		return nil, nil
	case bd.block.Block == nil:
		return nil, nil
	}
	return bd, nil
}

func (f *finder) ownBlocks() error {
	cidrs := make([]netip.Prefix, 0, len(f.d.s.own)+len(f.d.claimed))
	for _, b := range f.d.s.own {
		cidrs = append(cidrs, b.CIDR)
	}
	for _, c := range f.d.claimed {
		if !slices.Contains(cidrs, c) {
			cidrs = append(cidrs, c)
		}
	}
	for _, c := range cidrs {
		if f.want == 0 {
			return nil
		}
		if f.poolFor(c) == nil {
			continue
		}
		if info := f.d.s.blocks[c]; info != nil && f.d.blocks[c] == nil && info.Holder == f.d.s.node && !info.mayHaveFree(f.d.now, f.d.s.cooldown()) {
			f.owned++ // not worth a copy
			continue
		}
		bd, err := f.read(c)
		if err != nil {
			return err
		}
		if bd == nil {
			continue
		}
		if node := bd.block.Block.Holder(); node != f.d.s.node {
			continue // given up by a step before, or meanwhile
		}
		f.owned++
		if f.d.s.affinities[c].state == store.AffinityPendingDeletion {
			continue // another node began to take the block away; let it be done
		}
		f.use(pick{bd: bd}, bd.block)
	}
	return nil
}

func (f *finder) newBlocks() error {
	if !f.d.s.config.AutoAllocateBlocks {
		return nil
	}
	limit := f.d.s.blockLimit(f.r)
	for _, search := range []func() (bool, error){f.newBlock, f.reclaim} {
		for f.want > 0 {
			if f.owned >= limit {
				return &Error{Reason: ErrBlockLimit, Message: fmt.Sprintf("node %s holds %d blocks in %s, may hold %d, and they are full; raise maxBlocksPerHost or use a larger blockSize",
					f.d.s.node, f.owned, describe(f.pools), limit)}
			}
			found, err := search()
			if err != nil {
				return err
			}
			if !found {
				break
			}
			f.owned++
		}
	}
	return nil
}

// picked reports whether the request has taken a block already.
func (f *finder) picked(cidr netip.Prefix) bool {
	return slices.ContainsFunc(f.picks, func(p pick) bool { return p.bd.block.cidr == cidr })
}

// newBlock takes a block that does not exist yet.
func (f *finder) newBlock() (bool, error) {
	for _, p := range f.pools {
		// A claim that was begun and not finished comes first.
		var begun []netip.Prefix
		for c := range f.d.s.affinities {
			if c.Bits() == p.blockBits && p.cidr.Contains(c.Addr()) {
				begun = append(begun, c)
			}
		}
		slices.SortFunc(begun, netip.Prefix.Compare)
		for _, c := range begun {
			if ok, err := f.claim(c); ok || err != nil {
				return ok, err
			}
		}
		ok, err := f.walk(p)
		if ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// walk goes once round the blocks of a pool.
func (f *finder) walk(p *pool) (bool, error) {
	first := firstBlock(p.cidr, p.blockBits, f.d.s.node, f.d.now.UnixNano())
	for c := first; ; {
		next := after(p.cidr, c, p.blockBits)
		if wide, ok := covering(f.d.s.reserved, c); ok {
			// Leap over the whole reservation: an IPv6 one may hold more blocks
			// than can be counted.
			if wide.Bits() <= p.cidr.Bits() {
				return false, nil
			}
			next = after(p.cidr, wide.Masked(), p.blockBits)
		} else if ok, err := f.claim(c); ok || err != nil {
			return ok, err
		}
		if passed(c, next, first) {
			return false, nil
		}
		c = next
	}
}

// passed reports whether going from c on to next has come to or gone past
// first on the ring.
func passed(c, next, first netip.Prefix) bool {
	a, b, f := c.Addr(), next.Addr(), first.Addr()
	if a.Less(b) { // no turn at the end
		return a.Less(f) && !b.Less(f)
	}
	return !b.Less(f) || a.Less(f)
}

// claim takes a block if nothing is there.
func (f *finder) claim(c netip.Prefix) (bool, error) {
	if f.picked(c) {
		return false, nil
	}
	// A block that a step before has deleted may be taken again.
	if other := f.d.s.overlapping(c); other != nil && (other.CIDR != c || f.d.blocks[c] == nil) {
		return false, nil
	}
	bd, err := f.d.readBlock(c, false)
	if err != nil || bd.block.Block != nil {
		if errors.Is(err, errNeed) {
			return false, err
		}
		f.trouble = cmp.Or(f.trouble, err)
		return false, nil
	}
	fresh := newBlock(c, f.d.s.node, f.d.now)
	return f.use(pick{bd: bd, fresh: &fresh}, fresh), nil
}

// candidates returns the known blocks of the pools that pass a test.
func (f *finder) candidates(test func(*blockInfo, *pool) bool) []*blockInfo {
	var out []*blockInfo
	for _, b := range f.d.s.blocks {
		if b.broken != nil || b.Virtual || b.Holder == f.d.s.node || f.picked(b.CIDR) {
			continue
		}
		if p := f.poolFor(b.CIDR); p != nil && test(b, p) {
			out = append(out, b)
		}
	}
	return out
}

// reclaim takes over an empty block that another node holds, or none.
func (f *finder) reclaim() (bool, error) {
	old := func(claimed time.Time) bool { return f.d.now.Sub(claimed) >= reclaimAge }
	empty := f.candidates(func(b *blockInfo, p *pool) bool {
		return b.Used == 0 && b.CIDR.Bits() == p.blockBits && (b.Holder == "" || old(b.Claimed))
	})
	slices.SortFunc(empty, func(a, b *blockInfo) int { return strings.Compare(a.path(), b.path()) })
	for _, info := range empty {
		fresh := newBlock(info.CIDR, f.d.s.node, f.d.now)
		if len(fresh.peek(1, f.d.s.reserved, f.inUse)) == 0 {
			continue
		}
		bd, err := f.read(info.CIDR)
		if err != nil {
			return false, err
		}
		if bd == nil || !bd.block.empty() {
			continue
		}
		node, virtual := bd.block.Block.Holder(), bd.block.Block.Virtual()
		if virtual || node == f.d.s.node {
			continue
		}
		if t := bd.block.AffinityClaimTime; node != "" && t != nil && !old(t.Time) {
			continue
		}
		if node != "" {
			if _, err := f.d.readAffinity(node, info.CIDR); err != nil {
				return false, err
			}
		}
		if f.use(pick{bd: bd, fresh: &fresh, from: node}, fresh) {
			return true, nil
		}
	}
	return false, nil
}

// borrow takes single addresses from blocks of others.
func (f *finder) borrow() error {
	if f.d.s.config.StrictAffinity {
		return nil
	}
	free := f.candidates(func(b *blockInfo, _ *pool) bool { return b.mayHaveFree(f.d.now, f.d.s.cooldown()) })
	// Each node has its own order, so that not all borrow from the same block.
	order := func(b *blockInfo) uint32 {
		h := fnv.New32a()
		_, _ = h.Write([]byte(f.d.s.node + " " + b.path())) // never returns an error
		return h.Sum32()
	}
	slices.SortFunc(free, func(a, b *blockInfo) int {
		return cmp.Or(cmp.Compare(order(a), order(b)), strings.Compare(a.path(), b.path()))
	})
	for _, info := range free {
		if f.want == 0 {
			return nil
		}
		bd, err := f.read(info.CIDR)
		if err != nil {
			return err
		}
		if bd != nil {
			f.use(pick{bd: bd}, bd.block)
		}
	}
	return nil
}
