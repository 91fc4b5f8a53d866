package engine

import (
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// origins is the paths that begin here.
type origins struct {
	table *table
	local rib.Peer
	sets  map[wire.Prefix]attrs.Handle // the path of each prefix holds them
}

// announce makes the paths those of a list: new ones first, so that an aggregate or
// a part of it is there throughout.
func (o *origins) announce(list []Origin) {
	o.put(list)
	want := make(map[wire.Prefix]bool, len(list))
	for i := range list {
		want[wire.FromNetip(list[i].Prefix)] = true
	}
	for p := range o.sets {
		if !want[p] {
			o.end(p)
		}
	}
}

// update makes some of the paths others, and ends some, in that order.
func (o *origins) update(list []Origin, gone []netip.Prefix) {
	o.put(list)
	for _, p := range gone {
		if p := wire.FromNetip(p); o.sets[p] != 0 {
			o.end(p)
		}
	}
}

func (o *origins) put(list []Origin) {
	var set attrs.Handle // of the origin before, which most share
	for i := range list {
		if i == 0 || !list[i].equal(&list[i-1]) {
			o.release(set)
			set = list[i].put(o.table.sets)
		}
		p := wire.FromNetip(list[i].Prefix)
		if old, ok := o.sets[p]; ok && old == set {
			continue
		}
		o.sets[p] = set
		o.table.rib.Announce(o.local, p, set, true)
	}
	o.release(set)
}

func (o *origins) end(p wire.Prefix) {
	o.table.rib.Withdraw(o.local, p)
	delete(o.sets, p)
}

// release releases a set; zero: there is none.
func (o *origins) release(h attrs.Handle) {
	if h != 0 {
		o.table.sets.Release(h)
	}
}

// equal reports whether two have the same attributes.
func (o *Origin) equal(q *Origin) bool {
	return o.Prefix.Addr().Is6() == q.Prefix.Addr().Is6() &&
		o.NextHop == q.NextHop && o.LocalPref == q.LocalPref && slices.Equal(o.Communities, q.Communities) && slices.Equal(o.Large, q.Large)
}

// put returns the attributes of an own path, with a reference.
func (o *Origin) put(sets *attrs.Table) attrs.Handle {
	hop := make([]byte, 4)
	if o.Prefix.Addr().Is6() {
		hop = make([]byte, 16)
	}
	if o.NextHop.IsValid() && !o.NextHop.IsUnspecified() {
		hop = o.NextHop.AsSlice()
	}
	bare := sets.Put(hop, []byte{0x40, 1, 1, 0, 0x40, 2, 0}) // ORIGIN IGP, an empty AS_PATH
	defer sets.Release(bare)
	e := &attrs.Edit{Communities: o.Communities, Large: o.Large}
	if o.LocalPref != 0 {
		e.LocalPref = &o.LocalPref
	}
	return sets.Advertise(bare, &attrs.Change{Edit: e})
}
