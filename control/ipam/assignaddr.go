package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// addrStep gives one address that the caller names. Reservations do not stop
// it: they keep addresses for those who ask for them.
type addrStep struct {
	req  Request
	addr netip.Addr

	held  []Assignment
	given []Assignment
}

func (st *addrStep) plan(d *draft) error { return planTogether(d, st) }

func (st *addrStep) request() *Request { return &st.req }

func (st *addrStep) give(held, given []Assignment) { st.held, st.given = held, given }

func (st *addrStep) result() (held, given []Assignment) { return st.held, st.given }

func (st *addrStep) find(d *draft) (held []Assignment, picks []pick, err error) {
	p, err := d.poolAt(st.addr, &st.req)
	if err != nil {
		// What was given stays its owner's, whatever became of the pool.
		known, heldErr := st.heldAlready(d)
		if heldErr != nil || len(known) > 0 {
			return known, nil, heldErr
		}
		if !st.req.Again || d.s.blockAround(st.addr) == nil {
			return nil, nil, err
		}
	}
	pk, held, err := st.pick(d, p)
	if err != nil || len(held) > 0 {
		return held, nil, err
	}
	return nil, []pick{pk}, nil
}

// heldAlready returns the address as held if the handle of a request that may be
// repeated has it.
func (st *addrStep) heldAlready(d *draft) ([]Assignment, error) {
	around := d.s.blockAround(st.addr)
	if around == nil || !st.req.Idempotent {
		return nil, nil
	}
	bd, err := d.readBlock(around.CIDR, false)
	if err != nil || bd.block.Block == nil {
		return nil, err
	}
	d.checkBlock(bd) // what is known of the block may be old
	o := ordinalOf(around.CIDR, st.addr)
	if !st.holds(bd.block.Block.Attribute(o)) {
		return nil, nil
	}
	return []Assignment{d.assignment(bd.block, o, st.req.Handle)}, nil
}

// holds reports whether an address is the request's handle's on its node.
func (st *addrStep) holds(a *store.Attribute) bool {
	return a != nil && a.HandleID != nil && *a.HandleID == st.req.Handle && st.req.Idempotent && sameNode(a, st.req.Attributes[AttrNode])
}

// poolAt returns the enabled pool that contains an address and allows the use,
// if the request names one. For what was given before any pool will do whose
// blocks are known.
func (d *draft) poolAt(a netip.Addr, r *Request) (*pool, error) {
	s := d.s
	var refused []PoolReason
	for _, p := range s.poolsByName() {
		switch {
		case !p.cidr.Contains(a):
		case r.Again && p.blockBits > 0:
			return p, nil
		case s.foreign(a):
			refused = append(refused, PoolReason{p.name, s.outsidePodCIDRs()})
		case p.off != "":
			refused = append(refused, PoolReason{p.name, p.off})
		case r.Use != "" && !p.allows(r.Use):
			refused = append(refused, PoolReason{p.name, fmt.Sprintf("its allowedUses %v lack %s", p.uses, r.Use)})
		case len(r.Pools) > 0 && !slices.ContainsFunc(r.Pools, func(n string) bool { return s.findPool(n) == p }):
			refused = append(refused, PoolReason{p.name, "the request names other pools"})
		default:
			return p, nil
		}
	}
	return nil, &Error{Reason: ErrOutsidePools, Message: fmt.Sprintf("%s; there are %s", a, s.poolNames()), Pools: refused}
}

// pick finds the block of the address, or takes it for this node; the pool is
// needed for the latter alone. It returns the address as held when the handle
// holds it already.
func (st *addrStep) pick(d *draft, p *pool) (pk pick, held []Assignment, err error) {
	var cidr netip.Prefix
	if around := d.s.blockAround(st.addr); around != nil {
		cidr = around.CIDR
	} else if cidr, err = st.addr.Prefix(p.blockBits); err != nil {
		return pick{}, nil, fmt.Errorf("assign %s: %w", st.addr, err)
	} else if other := d.s.overlapping(cidr); other != nil {
		return pick{}, nil, &Error{Reason: ErrOutsidePools, Message: fmt.Sprintf("%s: its block %s would overlap the block %s, which is left from another blockSize; free and delete that first", st.addr, cidr, other.CIDR)}
	}
	bd, err := d.readBlock(cidr, false)
	if err != nil {
		return pick{}, nil, err
	}
	o := ordinalOf(cidr, st.addr)
	if holder := d.s.reserve.claimedBy(st.addr, st.req.Handle); holder != "" && (bd.block.Block == nil || bd.block.Block.Attribute(o) == nil) {
		return pick{}, nil, fmt.Errorf("%w: %s is in use by %s on this host, though the datastore has it as free", ErrTaken, st.addr, holder)
	}
	if by := d.s.occupier(st.addr); by != "" && !st.req.Again && (bd.block.Block == nil || !st.holds(bd.block.Block.Attribute(o))) {
		return pick{}, nil, fmt.Errorf("%w: %s is in use on this host by %s", ErrTaken, st.addr, by)
	}
	if bd.block.Block == nil {
		fresh := newBlock(cidr, d.s.node, d.now)
		return pick{bd: bd, fresh: &fresh, ordinals: []int{o}}, nil, nil
	}
	if a := bd.block.Block.Attribute(o); a != nil {
		d.checkBlock(bd) // what is known of the block may be old
		switch {
		case st.holds(a):
			return pick{}, []Assignment{d.assignment(bd.block, o, st.req.Handle)}, nil
		case d.s.ownReserve(a, st.addr, &st.req, d.now):
			if _, err := d.readHandle(store.ReserveHandle(d.s.node), true); err != nil {
				return pick{}, nil, err
			}
			return pick{bd: bd, ordinals: []int{o}}, nil, nil
		case a.ReleasedAt != nil && st.req.Again:
			// It is free, and its cool-down protects those who still send to it.
			return pick{bd: bd, ordinals: []int{o}}, nil, nil
		case a.ReleasedAt != nil:
			return pick{}, nil, st.stillCooling(d, a.ReleasedAt.Time)
		case a.HandleID != nil && *a.HandleID == store.ReserveHandle(d.s.node) && d.s.coolingDown(st.addr, d.now):
			return pick{}, nil, st.stillCooling(d, d.s.reserve.released[st.addr])
		case a.HandleID != nil:
			return pick{}, nil, fmt.Errorf("%w: %s is held by %s", ErrTaken, st.addr, *a.HandleID)
		}
		return pick{}, nil, fmt.Errorf("%w: %s", ErrTaken, st.addr)
	}
	if node := bd.block.Block.Holder(); node != d.s.node && d.s.config.StrictAffinity && !st.req.Again {
		holder := "nobody"
		if node != "" {
			holder = "node " + node
		}
		return pick{}, nil, fmt.Errorf("%w: %s lies in %s, which %s holds, and strict affinity is on", ErrStrictAffinity, st.addr, cidr, holder)
	}
	return pick{bd: bd, ordinals: []int{o}}, nil, nil
}

// stillCooling says that the address was released a short time ago.
func (st *addrStep) stillCooling(d *draft, at time.Time) error {
	return fmt.Errorf("%w: %s is %w at %s, for %s", ErrTaken, st.addr, ErrCooldown, at.UTC().Format("15:04:05"), d.s.cooldown())
}

// checkAddr completes a request for one address.
func checkAddr(r *Request, a netip.Addr) error {
	if !a.IsValid() || a.Zone() != "" || a.Is4In6() {
		return fmt.Errorf("%w: address %q is not a plain IPv4 or IPv6 address", ErrInvalidRequest, a)
	}
	if r.Family == 0 {
		r.Family = dataplane.FamilyOf(a)
	}
	if r.Family != dataplane.FamilyOf(a) {
		return fmt.Errorf("%w: address %s is not %s", ErrInvalidRequest, a, r.Family)
	}
	if r.Count > 1 {
		return fmt.Errorf("%w: count is %d for the one address %s", ErrInvalidRequest, r.Count, a)
	}
	return r.check()
}
