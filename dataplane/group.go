package dataplane

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"iter"
	"slices"
	"strings"
	"unique"
)

// NextHopGroup is a next-hop object that spreads flows over several others
// (NHA_GROUP with NEXTHOP_GRP_TYPE_MPATH, Linux 5.3; linux/nexthop.h). Routes
// point at it as at a single next hop, so replacing it moves all of them in
// one step. Groups and next hops share one space of numbers.
//
// The kernel takes a member out when its next hop or that one's device goes,
// and removes the group with its last member.
type NextHopGroup struct {
	ID      NextHopID
	Members GroupMembers
}

// NextHopGroupKey identifies a [NextHopGroup].
type NextHopGroupKey struct{ ID NextHopID }

// Kind implements [Key].
func (NextHopGroupKey) Kind() Kind       { return KindNextHopGroup }
func (k NextHopGroupKey) String() string { return fmt.Sprintf("nexthop id %d group", k.ID) }
func (NextHopGroupKey) key()             {}

// Key implements [Object].
func (g NextHopGroup) Key() Key { return NextHopGroupKey{g.ID} }
func (NextHopGroup) object()    {}

func (g NextHopGroup) String() string { return fmt.Sprintf("id %d group %s", g.ID, g.Members) }

// MaxGroupWeight is the largest weight of a member that every kernel takes: it is
// written less one in eight bits (struct nexthop_grp), of which Linux before 6.12
// refuses the last value.
const MaxGroupWeight = 255

// GroupMember is a next hop of a group with its share of the flows.
type GroupMember struct {
	ID     NextHopID
	Weight int // 1 to [MaxGroupWeight]; 0 stands for 1
}

// GroupMembers is a set of members, each next hop once, in the order of their
// numbers. It is interned: two of the same members are equal, and comparing them
// is comparing two pointers. The zero value has no members.
type GroupMembers struct{ packed unique.Handle[string] }

// memberSize is what a member takes of a packed list: its number and its weight.
const memberSize = 5

// GroupOf returns the set of members. The weights of members with one number add
// up, to [MaxGroupWeight].
func GroupOf(members ...GroupMember) GroupMembers {
	if len(members) == 0 {
		return GroupMembers{}
	}
	list := slices.Clone(members)
	slices.SortFunc(list, func(a, b GroupMember) int { return cmp.Compare(a.ID, b.ID) })
	packed := make([]byte, 0, memberSize*len(list))
	for i := 0; i < len(list); {
		id, weight := list[i].ID, 0
		for ; i < len(list) && list[i].ID == id; i++ {
			weight += max(1, list[i].Weight)
		}
		packed = append(binary.BigEndian.AppendUint32(packed, uint32(id)), byte(min(weight, MaxGroupWeight)))
	}
	return GroupMembers{unique.Make(string(packed))}
}

// All iterates over the members.
func (m GroupMembers) All() iter.Seq[GroupMember] {
	return func(yield func(GroupMember) bool) {
		if m == (GroupMembers{}) {
			return
		}
		for b := m.packed.Value(); len(b) > 0; b = b[memberSize:] {
			id := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
			if !yield(GroupMember{NextHopID(id), int(b[4])}) {
				return
			}
		}
	}
}

// String writes the members as ip-nexthop(8) does, "1/2,5": with the weight where
// that is not 1.
func (m GroupMembers) String() string {
	var b strings.Builder
	for member := range m.All() {
		if b.Len() > 0 {
			b.WriteByte('/')
		}
		fmt.Fprint(&b, member.ID)
		if member.Weight > 1 {
			fmt.Fprintf(&b, ",%d", member.Weight)
		}
	}
	return b.String()
}
