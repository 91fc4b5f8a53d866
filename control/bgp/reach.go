package bgp

import "net/netip"

// hostRoute is the prefix of an address alone.
func hostRoute(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// reach gives the reader a host route for each peer that has a gateway to be
// reached by (BGPPeer's reachableBy): like what is learned, but said by no peer,
// so that no session's end takes it along, not even one with the gateway. The
// caller holds the lock.
func (s *Speaker) reach(c *Config, fresh bool) {
	if fresh {
		s.reachable = map[netip.Prefix]Hop{} // a new start has forgotten them
	}
	want := map[netip.Prefix]Hop{}
	for _, p := range c.Peers {
		if p.runs() && p.ReachableBy.IsValid() {
			want[hostRoute(p.Addr)] = Hop{NextHop: p.ReachableBy, Peer: p.Name}
		}
	}
	for prefix, h := range s.reachable {
		if want[prefix] != h {
			s.rib.remove(prefix, h.PeerAddr)
		}
	}
	for prefix, h := range want {
		if s.reachable[prefix] != h {
			s.rib.add(prefix, h)
		}
	}
	s.reachable = want
}

// reached lists the host routes to peers.
func (s *Speaker) reached() []Path {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Path
	for prefix, h := range s.reachable {
		out = append(out, Path{prefix, newPathSet(h)})
	}
	return out
}
