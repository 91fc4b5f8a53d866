package kernel

import "github.com/routerd/routerd/dataplane"

// nextHops is what there is of our next hops and groups, and who uses them. It
// also keeps what the kernel does not notify of: that to remove a next hop removes
// its routes.
type nextHops struct {
	ids    map[dataplane.NextHopID]struct{} // of next hops and groups
	groups map[dataplane.NextHopID]struct{}
	users  map[dataplane.NextHopID]int // routes and groups
	routes int                         // of all next hops, and of none

	// measured are those of which a route has, or had, metrics.
	measured map[dataplane.NextHopID]struct{}
	// held are unwanted and still in use; of these, freed are in use no more.
	held  map[dataplane.NextHopID]dataplane.Key
	freed []dataplane.Key
	// flushed are gone, with the routes that users still counts.
	flushed map[dataplane.NextHopID]struct{}
	// unsure are those that were to be flushed when the connection broke.
	unsure map[dataplane.NextHopID]struct{}
}

func newNextHops() *nextHops {
	return &nextHops{
		ids:      make(map[dataplane.NextHopID]struct{}),
		groups:   make(map[dataplane.NextHopID]struct{}),
		users:    make(map[dataplane.NextHopID]int),
		measured: make(map[dataplane.NextHopID]struct{}),
		held:     make(map[dataplane.NextHopID]dataplane.Key),
		flushed:  make(map[dataplane.NextHopID]struct{}),
		unsure:   make(map[dataplane.NextHopID]struct{}),
	}
}

// appeared and gone note that there is something of that key now, or no more.
func (n *nextHops) appeared(k key) {
	switch key := k.other.(type) {
	case dataplane.NextHopKey:
		n.ids[key.ID] = struct{}{}
		delete(n.groups, key.ID)
	case dataplane.NextHopGroupKey:
		n.ids[key.ID], n.groups[key.ID] = struct{}{}, struct{}{}
	default:
		if k.kind() == dataplane.KindRoute {
			n.routes++
		}
	}
}

func (n *nextHops) gone(k key) {
	if k.kind() == dataplane.KindRoute {
		n.routes--
	} else if id := idOf(k.other); id != 0 {
		delete(n.ids, id)
		delete(n.groups, id)
	}
}

// count counts so many more users of the next hops that an object uses: a route's one, a
// group's members.
func (n *nextHops) count(s shape, more int) {
	n.countOne(s.hop(), more)
	for m := range membersOf(s.other).All() {
		n.countOne(m.ID, more)
	}
}

func (n *nextHops) countOne(id dataplane.NextHopID, more int) {
	if id == 0 {
		return
	}
	if n.users[id] += more; n.users[id] > 0 {
		return
	}
	delete(n.users, id)
	delete(n.flushed, id)
	if key, ok := n.held[id]; ok {
		delete(n.held, id)
		n.freed = append(n.freed, key)
	}
}

// takeFreed returns the next hops that were held and that nothing uses any more.
func (n *nextHops) takeFreed() []dataplane.Key {
	freed := n.freed
	n.freed = nil
	return freed
}

// has reports whether there is a next hop or a group of that number.
func (n *nextHops) has(id dataplane.NextHopID) bool {
	_, ok := n.ids[id]
	return ok
}

// present divides members by whether their next hops are there.
func (n *nextHops) present(members dataplane.GroupMembers) (there, missing []dataplane.GroupMember) {
	for m := range members.All() {
		if n.has(m.ID) {
			there = append(there, m)
		} else {
			missing = append(missing, m)
		}
	}
	return there, missing
}

// worthFlushing reports whether the routes that lead to a next hop are a good part
// of all. If the kernel is to remove them with it, it walks the whole table for
// it (fib_flush in its source), however few they are: 15 ms with 300,000 routes.
func (n *nextHops) worthFlushing(id dataplane.NextHopID) bool {
	users := n.users[id]
	return users > 1 && users*8 >= n.routes
}

// wasFlushed reports whether a next hop was flushed, with all that used it.
func (n *nextHops) wasFlushed(id dataplane.NextHopID) bool {
	_, ok := n.flushed[id]
	return ok
}

// measure notes that a route has metrics.
func (n *nextHops) measure(routes ...fibRoute) {
	for i := range routes {
		if r := &routes[i]; r.nh != 0 && (r.mtu != 0 || r.extra) {
			n.measured[r.nh] = struct{}{}
		}
	}
}
