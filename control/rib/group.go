package rib

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unique"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/dataplane"
)

// errDown says why nothing is sent to a next hop although paths name it still.
var errDown = errors.New("the BGP session with the peer that announced it has ended")

// errNoMember says that none of several next hops can be used.
var errNoMember = errors.New("none of the next hops can be used")

// errWrongFamily says why an IPv6 prefix has no use for an IPv4 next hop.
var errWrongFamily = errors.New("IPv6 packets cannot be sent to an IPv4 gateway")

// usableMembers lists the next hops that BGP names with k and that can be used
// now.
func (n *nextHops) usableMembers(k hopKey) ([]hopKey, error) {
	var out []hopKey
	var why []string
	for a := range k.hops.All() {
		m := hopKeyVia(a)
		err := errWrongFamily
		if k.Family == dataplane.IPv4 || a.Is6() {
			err = n.usable(m).Err
		}
		if err == nil {
			out = append(out, m)
		} else {
			why = append(why, fmt.Sprintf("%s: %v", a, err))
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: %s", errNoMember, strings.Join(why, "; "))
	}
	return out, nil
}

// planGroup says whether several next hops can be used. It has no objects:
// their numbers are known when the members are in use.
func (n *nextHops) planGroup(k hopKey) encap.Plan {
	pl := encap.Plan{Driver: dataplane.DriverDirect}
	m, err := n.usableMembers(k)
	if err != nil {
		pl.Err = err
		return pl
	}
	pl.Hop = n.usable(m[0]).Hop
	return pl
}

// fillGroup puts the usable members of a group into use, and plans the group of
// them. What it had before is still in use.
func (n *nextHops) fillGroup(h *hop) {
	h.plan = n.planGroup(h.key)
	h.members, _ = n.usableMembers(h.key) // the caller knows that there are some
	var list []dataplane.GroupMember
	for _, m := range h.members {
		list = append(list, dataplane.GroupMember{ID: n.acquireHop(m).id})
	}
	h.plan.Objects = []dataplane.Object{dataplane.NextHopGroup{ID: h.id, Members: dataplane.GroupOf(list...)}}
}

// forgetGroup lets go of a group's members.
func (n *nextHops) forgetGroup(h *hop) {
	for _, m := range h.members {
		n.releaseHop(m)
	}
	h.members = nil
}

// refreshGroup is refreshHop for a group: one object replaced, whatever the
// number of routes. Routes that stayed on it because it equalled what they
// desire are chosen anew if it no longer does.
func (n *nextHops) refreshGroup(h *hop) bool {
	now, err := n.usableMembers(h.key)
	for k := range n.desired(h) {
		if k.Value() == h.key {
			continue
		}
		if m, errOf := n.usableMembers(hopKey{Key: encap.Key{Family: h.key.Family}, hops: k.Value().hops}); err != nil || errOf != nil || !slices.Equal(m, now) {
			n.turned[k.Value()] = struct{}{}
		}
	}
	if err != nil {
		return false
	}
	old := *h
	n.fillGroup(h)
	n.objects.Swap(old.plan.Objects, h.plan.Objects)
	n.forgetGroup(&old)
	return true
}

// equals reports whether a group has become just what k stands for. A route
// that desires k may then stay on it: the loss of one of two next hops moves no
// route, whatever BGP says of each prefix afterwards.
func (n *nextHops) equals(h *hop, desired unique.Handle[hopKey]) bool {
	k := desired.Value()
	if !h.key.group() || !k.learned() || n.stale[h.key] || h.key.Family != k.Family && k.group() {
		return false
	}
	now, ok := n.usableNow[desired]
	if !ok {
		now, _ = n.usableMembers(k) // none equals none
		n.usableNow[desired] = now
	}
	return len(now) > 0 && slices.Equal(now, h.members)
}

// rekey gives a group whose own set no route desires any more the identity of
// what it has become: of the set that all of its routes desire, or of its
// members if they desire different ones. The group keeps its number, and the
// next group of the old set is another object, so no route on this one is sent
// to a next hop that is up again for others.
func (n *nextHops) rekey(h *hop) {
	if !h.key.group() || len(h.choices) == 0 {
		return
	}
	var now nexthop.Set
	desired := set[unique.Handle[hopKey]]{}
	for k := range n.desired(h) {
		if k.Value() == h.key {
			return
		}
		desired[k] = struct{}{}
		now = k.Value().hops
	}
	switch {
	case len(desired) == 1:
	case h.key.rekeyed == 0:
		var list []netip.Addr
		for _, m := range h.members {
			list = append(list, m.hops.Single())
		}
		now = nexthop.SetOf(list...)
	default:
		return
	}
	if h.key.rekeyed != 0 && h.key.hops == now {
		return
	}
	delete(n.hops, h.key)
	delete(n.stale, h.key)
	h.key = hopKey{Key: encap.Key{Family: h.key.Family}, hops: now, rekeyed: h.id}
	n.hops[h.key] = h
}

// Useless lists the objects of next hops in use, single ones and groups, that
// cannot be used while these are down.
func (n *nextHops) Useless(down []netip.Addr) []dataplane.Key {
	hops := set[hopKey]{}
	for _, a := range down {
		maps.Copy(hops, n.groupsOf(a))
		hops[hopKeyVia(a)] = struct{}{}
	}
	var out []dataplane.Key
	for k := range hops {
		if h := n.hops[k]; h != nil && n.stale[k] {
			for _, o := range h.plan.Objects {
				out = append(out, o.Key())
			}
		}
	}
	return out
}

// wellPlaced counts the routes that desire k and are on a group that is up to
// date and equals it.
func (n *nextHops) wellPlaced(k hopKey) int {
	members, err := n.usableMembers(k)
	if err != nil {
		return 0
	}
	total := 0
	for g, h := range n.hops {
		if n.stale[g] || !slices.Equal(h.members, members) {
			continue
		}
		for desired, routes := range n.desired(h) {
			if desired.Value() == k {
				total += routes
			}
		}
	}
	return total
}

// groupsOf lists the groups in use that may have a next hop as a member.
func (n *nextHops) groupsOf(a netip.Addr) set[hopKey] {
	out := set[hopKey]{}
	for k := range n.hops {
		if k.group() && k.hops.Contains(a) {
			out[k] = struct{}{}
		}
	}
	return out
}
