package kernel

import (
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// Cut withdraws next hops, given by their keys, and takes them out of the kernel
// at once with all routes that lead to them, whatever their number: for what
// cannot be reached any more. The [Kernel.Update] that withdraws these routes, or
// moves them, is to follow. A next hop that is the member of a group which stays
// is withdrawn as by Update.
func (k *Kernel) Cut(src dataplane.Source, hops []dataplane.Key) dataplane.Revision {
	rev := k.Update(src, nil, hops)
	k.mu.Lock()
	k.toCut = append(k.toCut, hops...)
	k.mu.Unlock()
	k.wakeLoop()
	return rev
}

// cutNextHops removes the next hops that are to be cut, groups first. The kernel
// removes what leads to them (remove_nexthop in its source). The routes count as
// there until their wishes go too, which is what comes next: to look for them
// among all would take longer than all the rest.
func (k *Kernel) cutNextHops() {
	k.mu.Lock()
	keys := k.toCut
	k.toCut = nil
	k.mu.Unlock()
	slices.SortFunc(keys, func(a, b dataplane.Key) int { return int(b.Kind()) - int(a.Kind()) })
	for len(keys) > 0 {
		n := slices.IndexFunc(keys, func(key dataplane.Key) bool { return key.Kind() != keys[0].Kind() })
		if n < 0 {
			n = len(keys)
		}
		k.inBatches(k.cuttable(keys[:n]), k.encodeRemove, func(o op, err error) result {
			r := judgeRemove(o, err)
			if id := idOf(o.Key); r.Outcome == reconcile.Succeeded && k.users[id] > 0 {
				k.cut[id] = struct{}{}
				k.wrote(dataplane.KindRoute, true, k.users[id])
			}
			return r
		})
		keys = keys[n:]
	}
}

// cuttable returns the removals of those next hops that are there, nobody wants
// again, and no group would lose: its other members are of use.
func (k *Kernel) cuttable(keys []dataplane.Key) (ops []op) {
	for _, key := range keys {
		have, there := k.want.Have(key)
		if _, wanted := k.want.Want(key); there && !wanted && !k.isMember(idOf(key)) {
			ops = append(ops, op{Key: key, Have: have, Exists: true})
		}
	}
	return ops
}

// isMember reports whether a group has that next hop.
func (k *Kernel) isMember(id dataplane.NextHopID) bool {
	for g := range k.groups {
		have, _ := k.want.Have(dataplane.NextHopGroupKey{ID: g})
		if slices.ContainsFunc(membersOf(have), func(m dataplane.GroupMember) bool { return m.ID == id }) {
			return true
		}
	}
	return false
}

// wasCut reports whether what there is went with a next hop that was cut.
func (k *Kernel) wasCut(have dataplane.Object) bool {
	id := nextHopOf(have)
	if id == 0 {
		return false
	}
	_, ok := k.cut[id]
	return ok
}

// admitCutOf is admitCuts if one next hop was cut.
func (k *Kernel) admitCutOf(id dataplane.NextHopID) {
	if _, ok := k.cut[id]; ok {
		k.admitCuts()
	}
}

// admitCuts tells the tracker of what went with next hops that were cut, if that
// is still of interest: before a next hop of that number is made again, and
// before what there is is compared with what should be.
func (k *Kernel) admitCuts() {
	if len(k.cut) == 0 {
		return
	}
	k.want.LoseWhere(func(_ dataplane.Key, have dataplane.Object) bool { return k.wasCut(have) })
	clear(k.cut)
}
