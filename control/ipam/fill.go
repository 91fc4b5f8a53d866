package ipam

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

// fillStep brings the reserve of a pool to its target, as far as the pool has
// addresses.
type fillStep struct {
	pool   string
	target int

	gave int
	dry  bool
	more bool // there is more to do at once
}

func (st *fillStep) plan(d *draft) error {
	st.gave, st.dry, st.more = 0, false, false
	if err := d.ready(); err != nil {
		return err
	}
	if err := d.fence(); err != nil {
		return err
	}
	if err := d.settleLeaving(); err != nil {
		return err
	}
	p := d.s.pools[st.pool]
	if block, ok := d.s.doubtful(p); ok {
		bd, err := d.readBlock(block, false)
		if err != nil {
			return err
		}
		d.writeBlock(bd)
		st.more = true
		return nil
	}
	if p == nil || p.off != "" || st.target == 0 {
		return st.giveBack(d, p, 0)
	}
	own := store.ReserveHandle(d.s.node)
	held, free, err := d.room(p, own)
	if err != nil {
		return err
	}
	if held > 2*st.target {
		return st.giveBack(d, p, st.target)
	}
	if err := st.giveBack(d, p, held); err != nil { // what a reservation has now
		return err
	}
	f := finder{
		d: d, pools: []*pool{p}, want: st.target - held,
		r: &Request{Family: p.family(), Handle: own, Use: Workload, Attributes: map[string]string{AttrType: AttrTypeReserve}},
	}
	if f.want <= 0 {
		return nil
	}
	spare := d.s.spare(p)
	if !spare {
		// What is left of a pool that is nearly cut up is for all to borrow.
		f.want = min(f.want, (held+free+1)/2-held)
	}
	if f.want > 0 {
		if err := f.ownBlocks(); err != nil {
			return err
		}
	}
	for f.want > 0 && spare && d.s.config.AutoAllocateBlocks && f.owned < d.s.blockLimit(f.r) {
		found, err := f.newBlock()
		if err != nil {
			return err
		}
		if !found {
			break
		}
		f.owned++
	}
	st.dry = held+len(f.picks) == 0 && d.s.unclaimed(p) == 0
	hd, err := d.readHandle(own, true)
	if err != nil {
		return err
	}
	d.checkHandle(own, hd) // it may be gone, where its count need not rise
	if err := d.preparePicks(f.r, f.picks); err != nil {
		return err
	}
	_, err = d.take(f.r, f.picks)
	return err
}

// fence makes the transaction one after which no transaction of the previous run
// that concerns the reserve can take place.
func (d *draft) fence() error {
	if d.s.reserve.fenced {
		return nil
	}
	own := store.ReserveHandle(d.s.node)
	hd, err := d.readHandle(own, true)
	if err != nil {
		return err
	}
	// One that does not exist has nothing that could be taken away: that is checked.
	hd.write, hd.fence = true, true
	d.touch(store.HandleKey(own))
	return nil
}

// settleLeaving writes the blocks from which addresses are on their way back in a
// transaction of which it is not known what became: after that it is.
func (d *draft) settleLeaving() error {
	for a, rev := range d.s.reserve.leaving {
		info := d.s.blockAround(a)
		if info == nil {
			continue
		}
		bd, err := d.readBlock(info.CIDR, true)
		if err != nil {
			return err
		}
		if bd.block.Block != nil && bd.base.Revision <= rev {
			d.writeBlock(bd)
		}
	}
	return nil
}

// room counts what this node's blocks have of a pool: held by a handle and ready
// to be given, and free.
func (d *draft) room(p *pool, handle string) (held, free int, err error) {
	for _, info := range d.s.own {
		if !p.cidr.Contains(info.CIDR.Addr()) || p.cidr.Bits() > info.CIDR.Bits() {
			continue
		}
		bd, err := d.readBlock(info.CIDR, false)
		if err != nil {
			return 0, 0, err
		}
		if bd.block.Block == nil {
			continue
		}
		for _, o := range bd.block.Block.HeldBy(handle) {
			if a := addrAt(info.CIDR, o); d.s.reserve.claims[a] == "" && !d.s.coolingDown(a, d.now) && !containsAddr(d.s.reserved, a) {
				held++
			}
		}
		free += len(bd.block.peek(info.Size, d.s.reserved, func(a netip.Addr) bool { return d.s.reserve.claims[a] != "" }))
	}
	return held, free, nil
}

// spare reports whether a pool has blocks enough that taking one before it is
// needed takes it from no workload: a quarter of them has no holder.
func (s *state) spare(p *pool) bool {
	if s.usePodCIDR {
		return s.unclaimed(p) > 0 // no other node may claim it
	}
	return s.unclaimed(p) > max(1<<min(p.blockBits-p.cidr.Bits(), maxCountedBits)/4, 1)
}

// maxCountedBits bounds how many blocks of a pool are counted: 2 to this.
const maxCountedBits = 20

// unclaimed returns how many blocks of a pool that this node may have do not exist
// yet.
func (s *state) unclaimed(p *pool) int {
	n := 0
	for _, r := range s.rangesOf(p) {
		n += 1 << min(max(p.blockBits-r.Bits(), 0), maxCountedBits)
		for c := range s.blocks {
			if r.Overlaps(c) {
				n--
			}
		}
	}
	return max(n, 0)
}

// giveBack releases what is more than keep of the reserve, the last first, and
// all that an IPReservation has; never what is assigned, or what
// is in its cool-down. Without a pool it is what lies in none.
func (st *fillStep) giveBack(d *draft, p *pool, keep int) error {
	own := store.ReserveHandle(d.s.node)
	hd, err := d.readHandle(own, true)
	if err != nil {
		return err
	}
	for _, info := range slices.Clone(d.s.own) {
		if d.s.poolOf(info.CIDR) != p {
			continue
		}
		bd, err := d.readBlock(info.CIDR, false)
		if err != nil {
			return err
		}
		if bd.block.Block == nil {
			continue
		}
		var back []int
		for _, o := range bd.block.Block.HeldBy(own) {
			switch a := addrAt(info.CIDR, o); {
			case d.s.reserve.claims[a] != "" || d.s.coolingDown(a, d.now):
			case containsAddr(d.s.reserved, a):
				back = append(back, o)
			case keep > 0:
				keep--
			default:
				back = append(back, o)
			}
		}
		if len(back) > 0 {
			// They were never used: they need no cool-down.
			for _, o := range back {
				d.leaving[addrAt(info.CIDR, o)] = bd.base.Revision
			}
			bd.block.free(back)
			bd.block.compact()
			d.writeBlock(bd)
			d.count(own, hd, bd.block)
			st.gave += len(back)
		}
	}
	return nil
}

// fills returns what is to be done about the reserve now, and notes that it is
// under way.
func (s *state) fills(now time.Time) []*fillStep {
	r := s.reserve
	if !s.synced || !s.registered || s.configErr != nil {
		return nil
	}
	var out []*fillStep
	do := func(name string, target int) {
		if !r.filling[name] {
			r.filling[name] = true
			out = append(out, &fillStep{pool: name, target: target})
		}
	}
	seen := map[string]bool{}
	for _, p := range s.poolsByName() {
		seen[p.name] = true
		if !p.cidr.IsValid() {
			continue
		}
		have, target := len(s.ready(p, now)), 0
		_, doubtful := s.doubtful(p)
		if s.reserves(p, now) {
			target = r.target(p, now)
		}
		switch {
		case s.leaves(p), !r.fenced && (target > 0 || s.holdsReserve(p)), doubtful, target == 0 && have > 0, have > 2*target, s.setAside(p, now),
			target > 0 && have < enoughOf(target) && !(r.dry[p.name] && have == 0 && s.full(p)):
			do(p.name, target)
		}
	}
	for _, b := range s.own {
		if len(b.ready) > 0 && s.poolOf(b.CIDR) == nil && s.orphaned() {
			do("", 0)
		}
	}
	maps.DeleteFunc(r.demand, func(name string, _ *demand) bool { return !seen[name] })
	maps.DeleteFunc(r.dry, func(name string, _ bool) bool { return !seen[name] })
	return out
}

// enoughOf is how many addresses of a target are so many that no more are fetched yet.
func enoughOf(target int) int { return (target*3 + 3) / 4 }

// leaves reports whether it is not known what became of a transaction that gives
// addresses of a pool back. While one is under way the pool is being filled.
func (s *state) leaves(p *pool) bool {
	for a := range s.reserve.leaving {
		if p.cidr.Contains(a) {
			return true
		}
	}
	return false
}

// holdsReserve reports whether the datastore shows something of a pool as this
// node's reserve.
func (s *state) holdsReserve(p *pool) bool {
	return slices.ContainsFunc(s.own, func(b *blockInfo) bool { return len(b.ready) > 0 && p.cidr.Contains(b.CIDR.Addr()) })
}

// setAside reports whether the reserve holds something that an IPReservation has
// since.
func (s *state) setAside(p *pool, now time.Time) bool {
	for _, b := range s.own {
		if !p.cidr.Contains(b.CIDR.Addr()) || len(b.ready) == 0 {
			continue
		}
		reserved := within(s.reserved, b.CIDR)
		for _, o := range b.ready {
			if a := addrAt(b.CIDR, o); containsAddr(reserved, a) && s.reserve.claims[a] == "" && !s.coolingDown(a, now) {
				return true
			}
		}
	}
	return false
}

// full reports whether nothing has changed that would let a dry pool give
// again: this node's blocks in it have no free address, and there is no spare
// block.
func (s *state) full(p *pool) bool {
	for _, b := range s.own {
		if b.Used < b.Size && p.cidr.Contains(b.CIDR.Addr()) {
			return false
		}
	}
	return s.unclaimed(p) == 0
}

// keepReserve fills the reserve and gives back what is too much of it, until ctx
// ends: when something has changed, and from time to time while demand falls.
func (a *Allocator) keepReserve(ctx context.Context) {
	if err := a.waitSynced(ctx); err != nil {
		return
	}
	fall := time.NewTicker(demandPeriod)
	defer fall.Stop()
	retry := time.NewTimer(refillRetry)
	defer retry.Stop()
	for {
		a.mu.Lock()
		fills := a.state.fills(a.cfg.Clock())
		a.mu.Unlock()
		failed := false
		for _, st := range fills {
			if err := a.do(ctx, st); err != nil {
				failed = true
				a.cfg.Log.Debug("reserve not filled; will try again", "pool", st.pool, "error", err)
			} else if st.gave > 0 {
				a.tidyLater()
			}
			a.mu.Lock()
			if !failed && !a.state.reserve.fenced {
				a.state.reserve.fenced = true
				if !a.state.piecewise {
					a.state.reserve.trusted = nil
				}
				a.remember()
				a.reserveChanged.Set() // what is ready is more by it
			}
			if !failed && st.more {
				a.reserveChanged.Set()
			}
			delete(a.state.reserve.filling, st.pool)
			if st.pool != "" && st.target > 0 {
				a.state.reserve.dry[st.pool] = st.dry
			}
			a.mu.Unlock()
		}
		if failed {
			retry.Reset(refillRetry)
		}
		select {
		case <-ctx.Done():
			return
		case <-a.reserveChanged:
		case <-fall.C:
		case <-retry.C:
		}
	}
}

// tidyLater has blocks looked at that may be empty now.
func (a *Allocator) tidyLater() {
	a.mu.Lock()
	blocks := a.state.tidyable()
	a.mu.Unlock()
	if len(blocks) > 0 {
		a.queue.push(&call{step: &tidyStep{blocks: blocks}})
	}
}
