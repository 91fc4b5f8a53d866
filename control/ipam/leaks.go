package ipam

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/store"
)

// Allocations lists what this node's own blocks give, in the order of the
// blocks' keys. It does not ask the datastore.
func (a *Allocator) Allocations() []Allocation {
	a.mu.Lock()
	blocks := make([]store.Object, 0, len(a.state.own))
	for _, b := range a.state.own {
		obj := *b.Object
		obj.Key = store.BlockKey(b.CIDR)
		blocks = append(blocks, obj)
	}
	a.mu.Unlock()
	var out []Allocation
	for _, obj := range blocks {
		b, _ := obj.Value.(*store.Block)
		all, err := Allocations(obj.Key.CIDR(), b)
		if err != nil {
			continue // reported where it is met; nothing can be said of its addresses
		}
		out = append(out, all...)
	}
	return out
}

// ReleaseUnless is like [Allocator.Release], and leaves out the claims of which
// used says that they are in use after all. It is asked at the last moment, in
// the order of this node's assignments: who takes note of a use before asking
// for an address is never robbed of it. It must not block. An address of this node's
// reserve is left out besides where the node holds its block, or assigned it.
func (a *Allocator) ReleaseUnless(ctx context.Context, used func(Claim) bool, claims ...Claim) ([]netip.Addr, error) {
	var out []netip.Addr
	for len(claims) > 0 {
		n := min(len(claims), maxClaims)
		st := &unlessStep{used: used, all: claims[:n:n]}
		if err := a.do(ctx, st); err != nil {
			return out, fmt.Errorf("release addresses: %w", err)
		}
		out = append(out, st.released...)
		claims = claims[n:]
	}
	return out, nil
}

// keeps reports whether an address that the datastore shows as the reserve's may be
// assigned, or was. Of a block that the node does not hold it never is:
// another program has taken the affinity away.
func (s *state) keeps(a netip.Addr) bool {
	info := s.blockAround(a)
	return info == nil || info.broken != nil || info.Object != nil || s.reserve.claims[a] != ""
}

// unlessStep releases what is not in use.
type unlessStep struct {
	claimsStep
	used func(Claim) bool
	all  []Claim
}

func (st *unlessStep) plan(d *draft) error {
	st.claims = slices.DeleteFunc(slices.Clone(st.all), func(c Claim) bool {
		return st.used(c) || c.Handle == store.ReserveHandle(d.s.node) && d.s.keeps(c.Addr)
	})
	return st.claimsStep.plan(d)
}
