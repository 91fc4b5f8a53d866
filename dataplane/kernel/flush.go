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
	k.writer.toFlush.add(hops)
	k.wake.Set()
	return rev
}

// flushNextHops removes the next hops that are to be flushed, groups first. The kernel
// removes what leads to them (remove_nexthop in its source). The routes count as
// there until no source wants them, which is what comes next: to look for them
// among all would take longer than all the rest.
func (wr *writer) flushNextHops() {
	keys := wr.toFlush.take()
	if len(keys) == 0 || len(wr.want.Unsynced()) > 0 {
		return // whose what the previous run left is, is not known yet
	}
	for _, kind := range []dataplane.Kind{dataplane.KindNextHopGroup, dataplane.KindNextHop} {
		if !wr.listing.needed() {
			wr.flushEach(wr.flushable(kind, keys))
		}
	}
}

func (wr *writer) flushEach(ops []op) {
	wr.inBatches(ops, wr.encodeRemove, func(o op, err error) result {
		r := judgeRemove(o, err)
		if id := idOf(o.Key.other); r.Outcome == reconcile.Succeeded && wr.hops.users[id] > 0 {
			wr.hops.flushed[id] = struct{}{}
			wr.wrote(dataplane.KindRoute, true, wr.hops.users[id])
		}
		return r
	})
	if !wr.listing.needed() {
		return
	}
	for _, o := range ops { // whether the kernel did it is not known
		wr.hops.unsure[idOf(o.Key.other)] = struct{}{}
	}
}

// flushable returns the removals of those next hops of a kind that are there, no source wants
// again, and no group would lose whose other members are of use; and for which
// it is worth the kernel's walk.
func (ac *actual) flushable(kind dataplane.Kind, keys []dataplane.Key) (ops []op) {
	for _, key := range keys {
		if key.Kind() != kind {
			continue
		}
		have, there := ac.want.Have(key)
		id := idOf(key)
		if _, wanted := ac.want.Want(key); there && !wanted && ac.hops.worthFlushing(id) && !ac.isMember(id) {
			ops = append(ops, op{Key: keyOf(key), Have: shapeOf(have), Exists: true})
		}
	}
	return ops
}

// isMember reports whether a group has that next hop.
func (ac *actual) isMember(id dataplane.NextHopID) bool {
	for g := range ac.hops.groups {
		have, _ := ac.want.Have(dataplane.NextHopGroupKey{ID: g}) // it is one of those that there are
		for m := range membersOf(have).All() {
			if m.ID == id {
				return true
			}
		}
	}
	return false
}

// applyFlushOf is applyFlushes if one next hop was flushed.
func (ac *actual) applyFlushOf(id dataplane.NextHopID) {
	if _, ok := ac.hops.flushed[id]; ok {
		ac.applyFlushes()
	}
}

// applyFlushes reports to the tracker what went with next hops that were flushed, if that
// is still of interest: before a next hop of that number is made again, and
// before what there is is compared with what should be.
func (ac *actual) applyFlushes() {
	if len(ac.hops.flushed) == 0 {
		return
	}
	ac.want.LoseWhere(func(_ key, have shape) bool { return ac.hops.wasFlushed(have.hop()) })
	clear(ac.hops.flushed)
}

// routesOfUnsure lists the routes that lead to next hops of which it is not known
// whether they were flushed, and forgets these.
func (ac *actual) routesOfUnsure() map[key]bool {
	if len(ac.hops.unsure) == 0 {
		return nil
	}
	out := map[key]bool{}
	for _, k := range ac.want.Keys() {
		have, _ := ac.want.Tracker.Have(k)
		if _, ok := ac.hops.unsure[have.hop()]; ok {
			out[k] = true
		}
	}
	clear(ac.hops.unsure)
	return out
}
