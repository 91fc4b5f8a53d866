package kernel

import (
	"fmt"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// encodeGroup appends the message that makes a group of those of its members
// that there are: a next hop whose device is down, or that the kernel refuses,
// must not keep the traffic from the others. The rest follows when it comes.
func (wr *writer) encodeGroup(b *builder, o op, w dataplane.NextHopGroup) *result {
	wr.applyFlushOf(w.ID)
	if s, ok := wr.mirror.nextHops[w.ID]; ok {
		return &result{Outcome: reconcile.Refused, Err: &ClashError{o.Key.other, s.protocol, wr.cfg.Protocol}}
	}
	there, missing := wr.hops.present(membersOf(w))
	if len(there) == 0 || o.Exists && o.Have.other == groupOf(w.ID, there) {
		return wr.waitForMembers(o.Key.other, missing)
	}
	b.putGroup(w.ID, there, o.Exists, wr.cfg.Protocol)
	return nil
}

// madeGroup says what a group has become that the kernel took. No message is
// between that one and this look at what there is, so the members that were
// there then are there now.
func (wr *writer) madeGroup(o op) result {
	w, ok := o.Want.other.(dataplane.NextHopGroup)
	if !ok {
		return result{}
	}
	there, missing := wr.hops.present(membersOf(w))
	if len(missing) == 0 {
		return result{}
	}
	wr.want.SetDependent(o.Key.other, groupOf(w.ID, there))
	wr.wakeWaiting(dataplane.NextHopKey{ID: w.ID})
	return *wr.waitForMembers(o.Key.other, missing)
}

func groupOf(id dataplane.NextHopID, members []dataplane.GroupMember) dataplane.NextHopGroup {
	return dataplane.NextHopGroup{ID: id, Members: dataplane.GroupOf(members...)}
}

func (wr *writer) waitForMembers(who dataplane.Key, missing []dataplane.GroupMember) *result {
	var r *result
	for _, m := range missing {
		r = wr.waiting.add(who, dataplane.NextHopKey{ID: m.ID}, fmt.Errorf("waiting for next hop %d", missing[0].ID))
	}
	return r
}

// shrinkGroups derives what the kernel took out of groups because the next hop
// is gone (remove_nexthop_from_groups in the kernel's source), and which groups
// went with their last member. It notifies of a group that shrank only when it
// notifies of the next hop.
func (ob *observer) shrinkGroups() {
	for id := range ob.hops.groups {
		key := dataplane.NextHopGroupKey{ID: id}
		have, ok := ob.want.Have(key)
		if !ok {
			continue
		}
		var there []dataplane.GroupMember
		changed := false
		for m := range membersOf(have).All() {
			if ob.hasNextHop(m.ID) {
				there = append(there, m)
			} else {
				changed = true
			}
		}
		if !changed {
			continue
		}
		var drift bool
		if len(there) == 0 {
			drift = ob.want.LoseDependent(key)
		} else {
			drift = ob.want.SetDependent(key, groupOf(id, there))
		}
		if drift && !ob.drift.quiet {
			ob.drift.note(key)
		}
	}
}
