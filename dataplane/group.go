package dataplane

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
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

// GroupMembers is a list of members as ip-nexthop(8) writes it, "1/2,5": each
// number once, in ascending order, with its weight where that is not 1. Two
// lists of the same members are equal.
type GroupMembers string

// GroupOf lists members in the form of [GroupMembers]. The weights of members
// with one number add up.
func GroupOf(members ...GroupMember) GroupMembers {
	list := slices.Clone(members)
	slices.SortFunc(list, func(a, b GroupMember) int { return cmp.Compare(a.ID, b.ID) })
	var b strings.Builder
	for i := 0; i < len(list); {
		id, weight := list[i].ID, 0
		for ; i < len(list) && list[i].ID == id; i++ {
			weight += max(1, list[i].Weight)
		}
		if b.Len() > 0 {
			b.WriteByte('/')
		}
		b.WriteString(strconv.FormatUint(uint64(id), 10))
		if weight = min(weight, MaxGroupWeight); weight > 1 {
			b.WriteByte(',')
			b.WriteString(strconv.Itoa(weight))
		}
	}
	return GroupMembers(b.String())
}

// Parse returns the members, by number. It refuses what [GroupOf] does not
// write.
func (m GroupMembers) Parse() ([]GroupMember, error) {
	var out []GroupMember
	if m == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(string(m), "/") {
		number, share, weighted := strings.Cut(part, ",")
		id, err := strconv.ParseUint(number, 10, 32)
		weight := 1
		if err == nil && weighted {
			weight, err = strconv.Atoi(share)
		}
		if err != nil || id == 0 || weight < 1 || weight > MaxGroupWeight {
			return nil, fmt.Errorf("group member %q: want a next hop's number, then perhaps a comma and a weight from 1 to %d", part, MaxGroupWeight)
		}
		out = append(out, GroupMember{NextHopID(id), weight})
	}
	if GroupOf(out...) != m {
		return nil, fmt.Errorf("group %q: want each number once, in ascending order", string(m))
	}
	return out, nil
}
