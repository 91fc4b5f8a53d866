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
	for _, key := range hops {
		if !slices.Contains(k.toCut, key) {
			k.toCut = append(k.toCut, key)
		}
	}
	k.mu.Unlock()
	k.wakeLoop()
	return rev
}

// spare takes back what is to be cut and is wanted again: by the time the loop
// looks, its routes may be on their way elsewhere in good order.
func (k *Kernel) spare(put []dataplane.Object) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.toCut) > 0 {
		k.toCut = slices.DeleteFunc(k.toCut, func(key dataplane.Key) bool {
			return slices.ContainsFunc(put, func(o dataplane.Object) bool { return o.Key() == key })
		})
	}
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
	if len(keys) == 0 || len(k.want.Unsynced()) > 0 {
		return // what an earlier life left is nobody's to lose yet
	}
	for _, kind := range []dataplane.Kind{dataplane.KindNextHopGroup, dataplane.KindNextHop} {
		if k.dirty == "" {
			k.cutEach(k.cuttable(kind, keys))
		}
	}
}

func (k *Kernel) cutEach(ops []op) {
	k.inBatches(ops, k.encodeRemove, func(o op, err error) result {
		r := judgeRemove(o, err)
		if id := idOf(o.Key); r.Outcome == reconcile.Succeeded && k.users[id] > 0 {
			k.cut[id] = struct{}{}
			k.wrote(dataplane.KindRoute, true, k.users[id])
		}
		return r
	})
	if k.dirty == "" {
		return
	}
	for _, o := range ops { // whether the kernel did it is not known
		k.asked[idOf(o.Key)] = struct{}{}
	}
}

// cuttable returns the removals of those next hops of a kind that are there, nobody wants
// again, and no group would lose whose other members are of use; and for which
// it is worth the kernel's walk.
func (k *Kernel) cuttable(kind dataplane.Kind, keys []dataplane.Key) (ops []op) {
	for _, key := range keys {
		if key.Kind() != kind {
			continue
		}
		have, there := k.want.Have(key)
		id := idOf(key)
		if _, wanted := k.want.Want(key); there && !wanted && k.worthAWalk(id) && !k.isMember(id) {
			ops = append(ops, op{Key: key, Have: have, Exists: true})
		}
	}
	return ops
}

// worthAWalk reports whether the routes that lead to a next hop are a good part
// of all. If the kernel is to remove them with it, it walks the whole table for
// it (fib_flush in its source), however few they are: 15 ms with 300,000 routes.
func (k *Kernel) worthAWalk(id dataplane.NextHopID) bool {
	n := k.users[id]
	return n > 1 && n*8 >= k.routes
}

// isMember reports whether a group has that next hop.
func (k *Kernel) isMember(id dataplane.NextHopID) bool {
	for g := range k.groups {
		have, _ := k.want.Have(dataplane.NextHopGroupKey{ID: g}) // it is one of those that there are
		if slices.ContainsFunc(membersOf(have), func(m dataplane.GroupMember) bool { return m.ID == id }) {
			return true
		}
	}
	return false
}

// wasCut reports whether what there is went with a next hop that was cut.
func (k *Kernel) wasCut(have dataplane.Object) bool {
	_, ok := k.cut[nextHopOf(have)]
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

// routesOfAsked lists the routes that lead to next hops of which it is not known
// whether they were cut, and forgets these.
func (k *Kernel) routesOfAsked() map[dataplane.Key]bool {
	if len(k.asked) == 0 {
		return nil
	}
	out := map[dataplane.Key]bool{}
	for _, key := range k.want.Keys() {
		have, _ := k.want.Have(key)
		if _, ok := k.asked[nextHopOf(have)]; ok {
			out[key] = true
		}
	}
	clear(k.asked)
	return out
}
