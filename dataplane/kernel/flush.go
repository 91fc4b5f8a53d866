package kernel

import (
	"slices"
	"sync"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// flushQueue holds the next hops that are to be flushed.
type flushQueue struct {
	mu   sync.Mutex
	keys []dataplane.Key
}

func (q *flushQueue) add(keys []dataplane.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, key := range keys {
		if !slices.Contains(q.keys, key) {
			q.keys = append(q.keys, key)
		}
	}
}

// cancel takes back what is wanted again: by the time the loop looks, its routes
// may be on their way elsewhere in good order.
func (q *flushQueue) cancel(put []dataplane.Object) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.keys) > 0 {
		q.keys = slices.DeleteFunc(q.keys, func(key dataplane.Key) bool {
			return slices.ContainsFunc(put, func(o dataplane.Object) bool { return o.Key() == key })
		})
	}
}

func (q *flushQueue) take() []dataplane.Key {
	q.mu.Lock()
	defer q.mu.Unlock()
	keys := q.keys
	q.keys = nil
	return keys
}

// Flush withdraws next hops, given by their keys, and takes them out of the kernel
// at once with all routes that lead to them, whatever their number: for what
// cannot be reached any more. The [Kernel.Update] that withdraws these routes, or
// moves them, is to follow. A next hop that is the member of a group which stays
// is withdrawn as by Update.
func (k *Kernel) Flush(src dataplane.Source, hops []dataplane.Key) dataplane.Revision {
	rev := k.Update(src, nil, hops)
	k.toFlush.add(hops)
	k.wake.Set()
	return rev
}

// flushNextHops removes the next hops that are to be flushed, groups first. The kernel
// removes what leads to them (remove_nexthop in its source). The routes count as
// there until nobody wants them, which is what comes next: to look for them
// among all would take longer than all the rest.
func (k *Kernel) flushNextHops() {
	keys := k.toFlush.take()
	if len(keys) == 0 || len(k.want.Unsynced()) > 0 {
		return // whose what the previous run left is, is not known yet
	}
	for _, kind := range []dataplane.Kind{dataplane.KindNextHopGroup, dataplane.KindNextHop} {
		if !k.listing.needed() {
			k.flushEach(k.flushable(kind, keys))
		}
	}
}

func (k *Kernel) flushEach(ops []op) {
	k.inBatches(ops, k.encodeRemove, func(o op, err error) result {
		r := judgeRemove(o, err)
		if id := idOf(o.Key); r.Outcome == reconcile.Succeeded && k.hops.users[id] > 0 {
			k.hops.flushed[id] = struct{}{}
			k.wrote(dataplane.KindRoute, true, k.hops.users[id])
		}
		return r
	})
	if !k.listing.needed() {
		return
	}
	for _, o := range ops { // whether the kernel did it is not known
		k.hops.unsure[idOf(o.Key)] = struct{}{}
	}
}

// flushable returns the removals of those next hops of a kind that are there, nobody wants
// again, and no group would lose whose other members are of use; and for which
// it is worth the kernel's walk.
func (k *Kernel) flushable(kind dataplane.Kind, keys []dataplane.Key) (ops []op) {
	for _, key := range keys {
		if key.Kind() != kind {
			continue
		}
		have, there := k.want.Have(key)
		id := idOf(key)
		if _, wanted := k.want.Want(key); there && !wanted && k.hops.worthFlushing(id) && !k.isMember(id) {
			ops = append(ops, op{Key: key, Have: have, Exists: true})
		}
	}
	return ops
}

// isMember reports whether a group has that next hop.
func (k *Kernel) isMember(id dataplane.NextHopID) bool {
	for g := range k.hops.groups {
		have, _ := k.want.Have(dataplane.NextHopGroupKey{ID: g}) // it is one of those that there are
		for m := range membersOf(have).All() {
			if m.ID == id {
				return true
			}
		}
	}
	return false
}

// applyFlushOf is applyFlushes if one next hop was flushed.
func (k *Kernel) applyFlushOf(id dataplane.NextHopID) {
	if _, ok := k.hops.flushed[id]; ok {
		k.applyFlushes()
	}
}

// applyFlushes tells the tracker of what went with next hops that were flushed, if that
// is still of interest: before a next hop of that number is made again, and
// before what there is is compared with what should be.
func (k *Kernel) applyFlushes() {
	if len(k.hops.flushed) == 0 {
		return
	}
	k.want.LoseWhere(func(_ dataplane.Key, have dataplane.Object) bool { return k.hops.wasFlushed(have) })
	clear(k.hops.flushed)
}

// routesOfUnsure lists the routes that lead to next hops of which it is not known
// whether they were flushed, and forgets these.
func (k *Kernel) routesOfUnsure() map[dataplane.Key]bool {
	if len(k.hops.unsure) == 0 {
		return nil
	}
	out := map[dataplane.Key]bool{}
	for _, key := range k.want.Keys() {
		have, _ := k.want.Have(key)
		if _, ok := k.hops.unsure[nextHopOf(have)]; ok {
			out[key] = true
		}
	}
	clear(k.hops.unsure)
	return out
}
