package ipam

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

// The reserve is addresses of this node's blocks that are assigned to the node
// itself, under a handle of its own, so that one can be given to a workload
// without asking the datastore: [Allocator.Take] says which, the caller makes
// that durable, and [Allocator.Confirm] writes it later, many in one
// transaction. Other programs see assigned addresses and leave them alone.

// AttrTypeReserve is the [AttrType] of a node's reserve.
const AttrTypeReserve = "routerdReserve"

// ReserveConfig bounds a node's reserve. It is held for each pool from which a
// workload that asks for none in particular would get an address, one of each
// family, and for those that requests have named lately.
type ReserveConfig struct {
	// Min is how many addresses are held ready when there is no demand; 0: there
	// is no reserve. It is never more than half a block.
	Min int
	// Max is how many at most, after a time of much demand.
	Max int
	// Journal keeps what an Allocator must know to give addresses after a reboot
	// at which the datastore is away; nil: then it gives none.
	Journal Journal
}

const (
	demandPeriod = 30 * time.Second // over which demand is counted
	refillRetry  = time.Second      // after a refill that could not be written
)

// reserve is what is known of the reserve beside the blocks themselves. The
// Allocator's lock guards it.
type reserve struct {
	cfg ReserveConfig

	// claims are addresses that a workload of this host has been given, by handle. The
	// datastore may show them as the reserve's still, or, where others wrote to it, as
	// free.
	claims   map[netip.Addr]string
	byHandle map[string][]netip.Addr
	last     map[string]netip.Addr    // by pool: what was taken last, so that others come first
	released map[netip.Addr]time.Time // when what was in use ceased to be, where there is a cool-down

	// leaving are addresses that a transaction gives back which is under way, or of
	// which it is not known what became, with the revision of the block that it
	// changes: they are not assigned until a later one is known.
	leaving map[netip.Addr]store.Revision

	demand  map[string]*demand // by pool
	dry     map[string]bool    // pools that had no more to give at the last refill
	filling map[string]bool
	saved   string // the form of what the journal holds
	// remembered is what the journal knew of the reserve before the datastore
	// answered; nil from then on.
	remembered map[netip.Prefix][]int

	// A transaction of the previous run may take place after this run has read the
	// datastore: it gives an address back, or to a workload that is gone. Each has the
	// handle of the reserve among its conditions, so once this run has written that
	// handle none can. Until then only what the previous run trusted is given.
	//
	// A datastore that writes one object at a time looks at that condition before it
	// writes the block, and may have shown the block as it was. There this run writes
	// each block once before it gives what the previous run did not trust of it.
	fenced  bool
	trusted map[netip.Prefix][]int
	written map[netip.Prefix]bool // by this run
}

// trusts reports whether no transaction of the previous run can have taken an address of the
// reserve away, or take it away yet.
func (s *state) trusts(cidr netip.Prefix, ordinal int) bool {
	r := s.reserve
	return r.fenced && (!s.piecewise || r.written[cidr]) || slices.Contains(r.trusted[cidr], ordinal)
}

// doubtful returns a block of this node in a pool, nil: in none, with addresses of the reserve that
// are not given before this run has written the block.
func (s *state) doubtful(p *pool) (block netip.Prefix, ok bool) {
	if !s.piecewise {
		return netip.Prefix{}, false
	}
	for _, b := range s.own {
		if s.reserve.written[b.CIDR] || s.poolOf(b.CIDR) != p {
			continue
		}
		if slices.ContainsFunc(b.ready, func(o int) bool { return !slices.Contains(s.reserve.trusted[b.CIDR], o) }) {
			return b.CIDR, true
		}
	}
	return netip.Prefix{}, false
}

func newReserve(cfg ReserveConfig) *reserve {
	return &reserve{
		cfg: cfg, claims: map[netip.Addr]string{}, byHandle: map[string][]netip.Addr{}, last: map[string]netip.Addr{},
		released: map[netip.Addr]time.Time{}, leaving: map[netip.Addr]store.Revision{},
		demand: map[string]*demand{}, dry: map[string]bool{}, filling: map[string]bool{}, written: map[netip.Prefix]bool{},
	}
}

// demand counts what was asked for in the present period and the one before.
type demand struct {
	period      time.Time
	now, before int
}

func (d *demand) turn(now time.Time) {
	switch past := now.Sub(d.period); {
	case past < demandPeriod:
		return
	case past < 2*demandPeriod:
		d.before = d.now
	default:
		d.before = 0
	}
	d.period, d.now = now, 0
}

func (d *demand) count(now time.Time) {
	d.turn(now)
	d.now++
}

func (d *demand) recent(now time.Time) int {
	d.turn(now)
	return max(d.now, d.before)
}

// target returns how many addresses of a pool are to be ready.
func (r *reserve) target(p *pool, now time.Time) int {
	half := blockLen(netip.PrefixFrom(p.cidr.Addr(), p.blockBits)) / 2
	n := min(r.cfg.Min, half)
	if d := r.demand[p.name]; d != nil {
		n = max(n, min(d.recent(now), r.cfg.Max))
	}
	return n
}

// wanted reports whether a reserve of a pool is to be held.
func (s *state) reserves(p *pool, now time.Time) bool {
	r := s.reserve
	if r.cfg.Min == 0 {
		return false
	}
	req := Request{Family: p.family(), Use: Workload}
	if s.usable(p, &req) != "" || !p.nodes.Matches(s.labels) {
		return false
	}
	if d := r.demand[p.name]; d != nil && d.recent(now) > 0 {
		return true
	}
	pools, err := s.selectPools(&req)
	return err == nil && slices.Index(pools, p) == s.firstNotDry(pools)
}

// firstNotDry returns the index of the first pool that has more to give.
func (s *state) firstNotDry(pools []*pool) int {
	for i, p := range pools {
		if !s.reserve.dry[p.name] {
			return i
		}
	}
	return 0
}

// ready returns the addresses of the reserve that lie in a pool and that
// no workload has been given.
func (s *state) ready(p *pool, now time.Time) []Assignment {
	var out []Assignment
	add := func(cidr netip.Prefix, ordinals []int) {
		if !p.cidr.Contains(cidr.Addr()) || p.cidr.Bits() > cidr.Bits() {
			return
		}
		for _, o := range ordinals {
			a := addrAt(cidr, o)
			if _, leaves := s.reserve.leaving[a]; leaves || s.synced && !s.trusts(cidr, o) {
				continue
			}
			if s.reserve.claims[a] == "" && !s.coolingDown(a, now) && !containsAddr(s.reserved, a) {
				out = append(out, Assignment{Addr: a, Block: cidr, Pool: p.name})
			}
		}
	}
	if !s.synced {
		for cidr, ordinals := range s.reserve.remembered {
			add(cidr, ordinals)
		}
		slices.SortFunc(out, func(a, b Assignment) int { return a.Addr.Compare(b.Addr) })
		return out
	}
	for _, b := range s.own {
		if s.affinities[b.CIDR].state != store.AffinityPendingDeletion {
			add(b.CIDR, b.ready)
		}
	}
	return out
}

// Take gives addresses out of the reserve, one for each part, without asking
// the datastore: all of them, or none and false. Then the reserve cannot serve
// the request, and [Allocator.AssignTogether] may. What is given is known to
// this process alone: the caller has it survive a crash ([Allocator.Claim]) and
// confirms it. [Allocator.Unclaim] gives it back.
func (a *Allocator) Take(parts ...Part) ([]Assignment, bool) {
	a.mu.Lock()
	got, ok := a.state.take(parts, a.cfg.Clock())
	a.mu.Unlock()
	if a.cfg.Reserve.Min > 0 {
		a.reserveChanged.Set()
	}
	return got, ok
}

func (s *state) take(parts []Part, now time.Time) ([]Assignment, bool) {
	if !s.registered || s.configErr != nil || s.reserve.cfg.Min == 0 {
		return nil, false
	}
	var out []Assignment
	fits := true
	for _, part := range parts {
		a, ok := s.takeOne(part, now)
		fits = fits && ok
		out = append(out, a)
	}
	if !fits || len(out) == 0 {
		return nil, false
	}
	for _, a := range out {
		s.reserve.claim(a.Handle, a.Addr)
		s.reserve.last[a.Pool] = a.Addr
	}
	return out, true
}

func (s *state) takeOne(part Part, now time.Time) (Assignment, bool) {
	r := part.Request
	if err := r.check(); err != nil || part.Addr.IsValid() || r.Count != 1 || r.MaxBlocks != 0 || r.tunnel != nil ||
		r.Use != "" && r.Use != Workload || !r.Fresh && s.holds(r.Handle) {
		return Assignment{}, false
	}
	pools, err := s.selectPools(&r)
	if err != nil {
		return Assignment{}, false
	}
	first := s.firstNotDry(pools)
	d := s.reserve.demand[pools[first].name]
	if d == nil {
		d = &demand{period: now}
		s.reserve.demand[pools[first].name] = d
	}
	d.count(now)
	// In the pools' order, and from a later one only where those before it have
	// no more to give.
	for _, p := range pools[:first+1] {
		if a, ok := s.next(p, now); ok {
			a.Handle = r.Handle
			return a, true
		}
	}
	return Assignment{}, false
}

// next returns the address of a pool's reserve that follows the one that was
// taken last.
func (s *state) next(p *pool, now time.Time) (Assignment, bool) {
	ready := s.ready(p, now)
	if len(ready) == 0 {
		return Assignment{}, false
	}
	if last, ok := s.reserve.last[p.name]; ok {
		for _, a := range ready {
			if last.Less(a.Addr) {
				return a, true
			}
		}
	}
	return ready[0], true
}

// holds reports whether a handle is known to hold addresses, or was given some.
func (s *state) holds(handle string) bool {
	if len(s.reserve.byHandle[handle]) > 0 {
		return true
	}
	return slices.ContainsFunc(s.own, func(b *blockInfo) bool {
		return len(b.Value().HeldBy(handle)) > 0
	})
}

// claimedBy returns which handle other than one has been given an address; empty: none.
func (r *reserve) claimedBy(a netip.Addr, other string) string {
	if h := r.claims[a]; h != other {
		return h
	}
	return ""
}

func (r *reserve) claim(handle string, a netip.Addr) {
	if old := r.claims[a]; old == handle {
		return
	} else if old != "" {
		r.byHandle[old] = slices.DeleteFunc(r.byHandle[old], func(o netip.Addr) bool { return o == a })
	}
	r.claims[a] = handle
	r.byHandle[handle] = append(r.byHandle[handle], a)
}

// unclaim forgets addresses that a handle was given; none named: all.
func (r *reserve) unclaim(handle string, addrs ...netip.Addr) {
	if addrs == nil {
		addrs = r.byHandle[handle]
	}
	left := slices.Clone(r.byHandle[handle])
	for _, a := range slices.Clone(addrs) {
		if r.claims[a] == handle {
			delete(r.claims, a)
			left = slices.DeleteFunc(left, func(o netip.Addr) bool { return o == a })
		}
	}
	if len(left) == 0 {
		delete(r.byHandle, handle)
		return
	}
	r.byHandle[handle] = left
}

// leave notes what a transaction gives back before it is sent: from here on it may
// have taken place.
func (r *reserve) leave(addrs map[netip.Addr]store.Revision) { maps.Copy(r.leaving, addrs) }

// stay notes that such a transaction did not take place.
func (r *reserve) stay(addrs map[netip.Addr]store.Revision) {
	for a, rev := range addrs {
		if r.leaving[a] == rev {
			delete(r.leaving, a)
		}
	}
}

// settled forgets what was leaving a block of which a later revision is known now:
// that one says whether an address is still the reserve's.
func (r *reserve) settled(cidr netip.Prefix, info *blockInfo) {
	if len(r.leaving) == 0 {
		return
	}
	maps.DeleteFunc(r.leaving, func(a netip.Addr, rev store.Revision) bool {
		return cidr.Contains(a) && (info == nil || info.Revision > rev)
	})
}

// Claim says that workloads of this host have addresses under a handle: what the
// datastore gave them, and, after a start of the process and before the first
// [Allocator.Take], what a journal knows of them. They are not assigned again until
// [Allocator.Unclaim], whatever the datastore says of them.
func (a *Allocator) Claim(handle string, addrs ...netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, addr := range addrs {
		a.state.reserve.claim(handle, addr)
	}
}

// Unclaim says that addresses of a handle, or all where none is named, are not
// in use any more, as far as this host is concerned. Those that the datastore
// shows as the reserve's may be given again, after their cool-down.
func (a *Allocator) Unclaim(handle string, addrs ...netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.coolDown(handle, addrs); err != nil {
		a.coolDownUnwritten(handle, addrs)
		a.cfg.Log.Warn("the cool-down of a released address ends with this daemon at the latest", "handle", handle, "error", err)
	}
	a.state.reserve.unclaim(handle, addrs...)
}

// Ready returns how many addresses of each pool are held for workloads to come
// and not assigned, by the pools' names. It does not ask the datastore.
func (a *Allocator) Ready() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := map[string]int{}
	for _, p := range a.state.poolsByName() {
		if n := len(a.state.ready(p, a.cfg.Clock())); n > 0 {
			out[p.name] = n
		}
	}
	return out
}

// ownReserve reports whether an address is held ready by this node, for
// anybody or for the handle of a request.
func (s *state) ownReserve(at *store.Attribute, a netip.Addr, r *Request, now time.Time) bool {
	if at.HandleID == nil || *at.HandleID != store.ReserveHandle(s.node) || at.ReleasedAt != nil {
		return false
	}
	claimed := s.reserve.claims[a]
	return claimed == r.Handle || claimed == "" && (r.Again || !s.coolingDown(a, now))
}

// doNamed is do for steps that give addresses by name. Those that this node
// holds ready are kept from others meanwhile.
func (a *Allocator) doNamed(ctx context.Context, st step, parts ...Part) error {
	var named []Part
	a.mu.Lock()
	for _, p := range parts {
		info := a.state.blockAround(p.Addr)
		if p.Addr.IsValid() && info != nil && slices.Contains(info.ready, ordinalOf(info.CIDR, p.Addr)) && a.state.reserve.claims[p.Addr] == "" &&
			(p.Again || !a.state.coolingDown(p.Addr, a.cfg.Clock())) {
			a.state.reserve.claim(p.Handle, p.Addr)
			named = append(named, p)
		}
	}
	a.mu.Unlock()
	err := a.do(ctx, st)
	if !errors.Is(err, store.ErrUnavailable) { // else it may be given: it stays kept
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, p := range named {
			a.state.reserve.unclaim(p.Handle, p.Addr)
		}
	}
	return err
}
