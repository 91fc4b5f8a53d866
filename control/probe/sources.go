package probe

import (
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// source is an address that a peer's authenticated packets came from: its own, or that of
// a translator on the way.
type source struct {
	addr netip.Addr
	at   time.Time
}

const (
	// maxSources is how many are kept of a peer in a family: translators with several
	// addresses choose one for each mapping.
	maxSources = 4
	// sourceFor is how long one counts when the peer's packets come from another.
	sourceFor = 10 * time.Minute
)

// from notes where a packet of the peer came from, and ends what counted long enough. It reports whether the addresses are
// others than before.
func (p *peer) from(now time.Time, addr netip.Addr) bool {
	was := addrsOf(p.sources)
	list := slices.DeleteFunc(p.sources, func(s source) bool { return s.addr == addr || now.Sub(s.at) > sourceFor })
	if addr != p.target.Registered {
		list = slices.Insert(list, 0, source{addr, now})
	}
	p.sources = list[:min(len(list), maxSources)]
	return !slices.Equal(was, addrsOf(p.sources))
}

// noteSource notes where a packet of a peer came from. Its registered address is known
// to all.
func (e *engine) noteSource(p *peer, now time.Time, addr netip.Addr) {
	if addr == p.target.Registered && len(p.sources) == 0 {
		return
	}
	if p.from(now, addr) {
		e.moved[p.key.node] = true
	}
}

// addrsOf returns the addresses in order.
func addrsOf(list []source) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, s.addr)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// sourcesOf returns where a peer's packets come from.
func (e *engine) sourcesOf(k peerKey) []source {
	if p := e.peers[k]; p != nil {
		return p.sources
	}
	return e.gone[k].sources
}

// sources returns the addresses from which the packets of a node come.
func (e *engine) sources(node string) []netip.Addr {
	var out []netip.Addr
	for _, f := range dataplane.Families() {
		out = append(out, addrsOf(e.sourcesOf(peerKey{node, f}))...)
	}
	return out
}

// saved is what is kept of a peer over a restart of the daemon.
type saved struct {
	known
	sources []netip.Addr
}

// seeded makes sources of addresses that the previous run saw.
func seeded(now time.Time, addrs []netip.Addr) []source {
	var list []source
	for _, a := range addrs[:min(len(addrs), maxSources)] {
		list = append(list, source{a, now})
	}
	return list
}
