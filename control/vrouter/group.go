package vrouter

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// errLost says why nothing is sent to a next hop although paths name it still.
var errLost = errors.New("the BGP session with the peer that announced it has ended")

// errNoMember says that none of several next hops can be used.
var errNoMember = errors.New("none of the next hops can be used")

// usableMembers lists the next hops of a set that can be used now.
func (t *table) usableMembers(k hopKey) ([]hopKey, error) {
	var out []hopKey
	var why []string
	for _, a := range k.set.addrs() {
		m := hopKeyVia(a)
		err := errWrongFamily
		if k.fam == dataplane.IPv4 || a.Is6() {
			err = t.usable(m).err
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

// errWrongFamily says why an IPv6 prefix has no use for an IPv4 next hop.
var errWrongFamily = errors.New("IPv6 packets cannot be sent to an IPv4 gateway")

// planSet says whether a set of next hops can be used. It has no objects: their
// numbers are known when the members are in use.
func (t *table) planSet(k hopKey) plan {
	pl := plan{driver: dataplane.DriverDirect}
	m, err := t.usableMembers(k)
	if err != nil {
		pl.err = err
		return pl
	}
	pl.hop = t.usable(m[0]).hop
	return pl
}

// fillGroup puts the usable members of a group's set into use, and plans the
// group of them. What it had before is still in use.
func (t *table) fillGroup(h *hop) {
	h.plan = t.planSet(h.key)
	h.members, _ = t.usableMembers(h.key) // who calls knows that there are some
	var list []dataplane.GroupMember
	for _, m := range h.members {
		list = append(list, dataplane.GroupMember{ID: t.acquireHop(m).id})
	}
	h.plan.objs = []dataplane.Object{dataplane.NextHopGroup{ID: h.id, Members: dataplane.GroupOf(list...)}}
}

// forgetGroup lets go of a group's members.
func (t *table) forgetGroup(h *hop) {
	for _, m := range h.members {
		t.releaseHop(m)
	}
	h.members = nil
}

// refreshGroup is refreshHop for a group: one object replaced, whatever the
// number of routes. Routes that were left on it because it was the same as what
// they want are chosen anew if it no longer is.
func (t *table) refreshGroup(h *hop) bool {
	now, err := t.usableMembers(h.key)
	for a := range h.guests {
		if m, errOf := t.usableMembers(hopKey{set: a.set, fam: h.key.fam}); err != nil || errOf != nil || !slices.Equal(m, now) {
			t.turned[a.key] = struct{}{}
		}
	}
	if err != nil {
		return false
	}
	old := *h
	t.fillGroup(h)
	for _, o := range h.plan.objs {
		t.acquire(o)
	}
	for _, o := range old.plan.objs {
		t.release(o)
	}
	t.forgetGroup(&old)
	return true
}

// stands reports whether a route on h may stay there although it wants the next
// hops of k: a group that has become just that set. So the loss of one of two
// next hops moves no route, whatever BGP then says about each.
func (t *table) stands(h *hop, k hopKey) bool {
	if h == nil || h.key.set == "" || !k.learned() || t.stale[h.key] || h.key.fam != k.fam && k.set != "" {
		return false
	}
	now, ok := t.members[k]
	if !ok {
		now, _ = t.usableMembers(k.whole()) // none stands for none
		t.members[k] = now
	}
	return len(now) > 0 && slices.Equal(now, h.members)
}

// whole is a single next hop as the set of itself.
func (k hopKey) whole() hopKey {
	if k.via.IsValid() {
		k.set, k.via = HopSet(k.via.String()), netip.Addr{}
	}
	return k
}

// disown gives a group of which no route wants the set any more the identity
// of what it has become: of the set that all of its routes want, or of its
// members if they want different ones. So the next group of the old set is
// another object, and no route on this one is sent to a next hop that is back
// for others.
func (t *table) disown(h *hop) {
	if h.owners > 0 || h.refs == 0 || h.key.set == "" {
		return
	}
	var now HopSet
	if len(h.guests) == 1 {
		for a := range h.guests {
			now = a.set
		}
	} else if h.key.orphan == 0 {
		addrs := make([]string, len(h.members))
		for i, m := range h.members {
			addrs[i] = m.via.String()
		}
		now = HopSet(strings.Join(addrs, " "))
	}
	if now == "" || h.key.orphan != 0 && h.key.set == now {
		return
	}
	delete(t.hops, h.key)
	delete(t.stale, h.key)
	h.key = hopKey{set: now, fam: h.key.fam, orphan: h.id}
	t.hops[h.key] = h
	t.ids[h.id] = h.key
}

// setLost notes next hops that must not be used, and those that may again.
func (t *table) setLost(lost, found []netip.Addr) {
	for _, a := range lost {
		t.found = slices.DeleteFunc(t.found, func(f netip.Addr) bool { return f == a })
		if !t.lost[a] {
			t.lost[a] = true
			t.followNextHop(a, true)
		}
	}
	for _, a := range found {
		if t.lost[a] {
			delete(t.lost, a)
			t.followNextHop(a, true)
		}
	}
}

// useless lists the next hops in use, single ones and groups, that the loss of
// these leaves without any way.
func (t *table) useless(lost []netip.Addr) []dataplane.Key {
	hops := set[hopKey]{}
	for _, a := range lost {
		maps.Copy(hops, t.groupsOf(a))
		hops[hopKeyVia(a)] = struct{}{}
	}
	var out []dataplane.Key
	for k := range hops {
		if h := t.hops[k]; h != nil && t.stale[k] {
			for _, o := range h.plan.objs {
				out = append(out, o.Key())
			}
		}
	}
	return out
}

// followNextHop brings up to date what uses a next hop that changed. With
// turned it was usable and is not, or the reverse.
func (t *table) followNextHop(a netip.Addr, turned bool) {
	via := hopKeyVia(a)
	t.refresh(via)
	for k := range t.groupsOf(a) {
		t.refresh(k)
	}
	if !turned {
		return
	}
	for k := range t.hopsOf[a] {
		// A group that is still of use moved its routes already; those that
		// want it and are elsewhere may come.
		if k.set == "" || t.settledOn(k) < len(t.byHop[k].prefixes) {
			t.turned[k] = struct{}{}
		}
	}
}

// settledOn counts the routes that want the set of k and are on a group that
// has been brought up to date and is that set.
func (t *table) settledOn(k hopKey) int {
	n := 0
	if h, ok := t.hops[k]; ok && !t.stale[k] {
		n = h.owners
	}
	a := t.aims[k]
	want, err := t.usableMembers(k)
	if a == nil || err != nil {
		return n
	}
	for g, h := range t.hops {
		if h.guests[a] > 0 && !t.stale[g] && slices.Equal(h.members, want) {
			n += h.guests[a]
		}
	}
	return n
}

// groupsOf lists the groups in use that may have a next hop as a member.
func (t *table) groupsOf(a netip.Addr) set[hopKey] {
	out := set[hopKey]{}
	for k := range t.hops {
		if k.set != "" && slices.Contains(k.set.addrs(), a) {
			out[k] = struct{}{}
		}
	}
	return out
}
