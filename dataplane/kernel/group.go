package kernel

import (
	"fmt"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// encodeGroup appends the message that makes a group of those of its members
// that there are: a next hop whose device is down, or that the kernel refuses,
// must not keep the traffic from the others. The rest follows when it comes.
func (k *Kernel) encodeGroup(b *builder, o op, w dataplane.NextHopGroup) *result {
	k.admitCutOf(w.ID)
	if s, ok := k.mir.nextHops[w.ID]; ok {
		return &result{Outcome: reconcile.Refused, Err: &ClashError{o.Key, s.protocol, k.cfg.Protocol}}
	}
	there, missing := k.present(membersOf(w))
	if len(there) == 0 || o.Exists && o.Have == groupOf(w.ID, there) {
		return k.waitForMembers(o.Key, missing)
	}
	b.putGroup(w.ID, there, o.Exists, k.cfg.Protocol)
	return nil
}

// madeGroup says what a group has become that the kernel took. No message is
// between that one and this look at what there is, so the members that were
// there then are there now.
func (k *Kernel) madeGroup(o op) result {
	w, ok := o.Want.(dataplane.NextHopGroup)
	if !ok {
		return result{}
	}
	there, missing := k.present(membersOf(w))
	if len(missing) == 0 {
		return result{}
	}
	k.want.SetDependent(o.Key, groupOf(w.ID, there))
	k.wakeWaiting(dataplane.NextHopKey{ID: w.ID})
	return *k.waitForMembers(o.Key, missing)
}

func groupOf(id dataplane.NextHopID, members []dataplane.GroupMember) dataplane.NextHopGroup {
	return dataplane.NextHopGroup{ID: id, Members: dataplane.GroupOf(members...)}
}

// present divides members by whether their next hops are there.
func (k *Kernel) present(members []dataplane.GroupMember) (there, missing []dataplane.GroupMember) {
	for _, m := range members {
		if _, ok := k.nextHops[m.ID]; ok {
			there = append(there, m)
		} else {
			missing = append(missing, m)
		}
	}
	return there, missing
}

func (k *Kernel) waitForMembers(who dataplane.Key, missing []dataplane.GroupMember) *result {
	var r *result
	for _, m := range missing {
		r = k.wait(who, dataplane.NextHopKey{ID: m.ID}, fmt.Errorf("waiting for next hop %d", missing[0].ID))
	}
	return r
}

// shrinkGroups derives what the kernel took out of groups because the next hop
// is gone (remove_nexthop_from_groups in the kernel's source), and which groups
// went with their last member. It tells of a group that shrank only when it
// tells of the next hop.
func (k *Kernel) shrinkGroups() {
	for id := range k.groups {
		key := dataplane.NextHopGroupKey{ID: id}
		have, ok := k.want.Have(key)
		if !ok {
			continue
		}
		members := membersOf(have)
		there := slices.DeleteFunc(slices.Clone(members), func(m dataplane.GroupMember) bool { return !k.hasNextHop(m.ID) })
		switch {
		case len(there) == len(members):
			continue
		case len(there) == 0:
			if k.want.LoseDependent(key) && !k.quiet {
				k.drifted(key)
			}
			continue
		}
		if k.want.SetDependent(key, groupOf(id, there)) && !k.quiet {
			k.drifted(key)
		}
	}
}
