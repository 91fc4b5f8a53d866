package vrouter

import (
	"errors"
	"fmt"
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
// they want are chosen anew.
func (t *table) refreshGroup(h *hop) bool {
	now, err := t.usableMembers(h.key)
	if !slices.Equal(now, h.members) && h.owners < h.refs {
		for p, c := range t.routes {
			if c.on == h && c.hop != h.key {
				t.dirty[p] = struct{}{}
			}
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
	if k.set == "" {
		return len(h.members) == 1 && h.members[0] == k && t.usable(k).err == nil
	}
	now, err := t.usableMembers(k)
	return err == nil && slices.Equal(now, h.members)
}

// disown gives a group of which no route wants the set any more the identity
// of what it has become, so that the next group of that set is another object
// and no route on this one is sent to a next hop that is back for others.
func (t *table) disown(h *hop) {
	if h.owners > 0 || h.refs == 0 || h.key.set == "" || h.key.orphan != 0 {
		return
	}
	addrs := make([]string, len(h.members))
	for i, m := range h.members {
		addrs[i] = m.via.String()
	}
	delete(t.hops, h.key)
	delete(t.stale, h.key)
	h.key = hopKey{set: HopSet(strings.Join(addrs, " ")), fam: h.key.fam, orphan: h.id}
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
		if h, ok := t.hops[k]; k.set == "" || !ok || t.stale[k] || h.owners < len(t.byHop[k]) {
			for p := range t.byHop[k] {
				t.dirty[p] = struct{}{}
			}
		}
	}
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

// indexPath notes which prefixes have which next hops.
func (t *table) indexPath(p Path) {
	k := hopKeyOf(p)
	if len(t.byHop[k]) == 0 {
		for _, a := range hopAddrs(p) {
			t.hopsOf.add(a, k)
		}
	}
	t.byHop.add(k, p.Prefix)
}

func (t *table) unindexPath(p Path) {
	k := hopKeyOf(p)
	t.byHop.remove(k, p.Prefix)
	if len(t.byHop[k]) == 0 {
		for _, a := range hopAddrs(p) {
			t.hopsOf.remove(a, k)
		}
	}
}

func hopAddrs(p Path) []netip.Addr {
	if p.Set != "" {
		return p.Set.addrs()
	}
	return []netip.Addr{p.NextHop}
}
