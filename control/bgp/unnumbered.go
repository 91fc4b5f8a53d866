package bgp

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/store"
)

// Link is what sessions over link-local addresses need to know of a device.
// Its addresses are link-local and have no zone.
type Link struct {
	Up   bool       // administratively up and with carrier
	Addr netip.Addr // this host's own; invalid: there is none yet

	// Routers are the neighbours that advertise themselves as routers (RFC 4861,
	// section 4.2), Hosts the others of which something was heard. Both sorted,
	// and without those that the kernel has found not to answer.
	Routers, Hosts []netip.Addr
}

// found is the neighbour that a device's session was given.
type found struct {
	addr   netip.Addr
	router bool // it advertised itself
}

// adjacency is who is on the links of this host's devices, and who of them the sessions over
// link-local addresses were given. Its methods may be called from any goroutine; the zero value is ready.
type adjacency struct {
	mu      sync.Mutex
	links   map[string]Link
	given   map[string]found
	devices []string // that were asked for
}

// SetAdjacent says who is on the links of the devices that [Options.Devices]
// was called with. It may be called at any time, also before.
func (c *Controller) SetAdjacent(links map[string]Link) {
	if c.adjacency.set(links) {
		c.poke()
	}
}

// set reports whether that is something else than was known.
func (a *adjacency) set(links map[string]Link) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	same := reflect.DeepEqual(links, a.links)
	a.links = links
	return !same
}

// now returns what is known. It is replaced as a whole: it is not to be changed.
func (a *adjacency) now() map[string]Link {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.links
}

// resolve gives the sessions over link-local addresses their addresses. It returns
// the devices, sorted, on whose links they are, and whether these are others than before.
func (a *adjacency) resolve(cfg Config) (out Config, devices []string, changed bool) {
	for _, p := range cfg.Peers {
		if p.Interface != "" && p.Problem == "" {
			devices = append(devices, p.Interface)
		}
	}
	slices.Sort(devices)
	devices = slices.Compact(devices)
	a.mu.Lock()
	defer a.mu.Unlock()
	changed = !slices.Equal(devices, a.devices)
	a.devices = devices
	out, a.given = onLinks(cfg, a.links, a.given)
	return out, devices, changed
}

// onLinks resolves the sessions over link-local addresses: a peer gets the
// address of its device's neighbour and this host's own as the source, or
// Waiting says what is missing. last has what was found before; a neighbour that
// falls silent is kept, for its session and its routes have timers of their own.
func onLinks(cfg Config, links map[string]Link, last map[string]found) (Config, map[string]found) {
	next := map[string]found{}
	peers := slices.Clone(cfg.Peers)
	taken := map[netip.Addr]Peer{}
	for i := range peers {
		p := &peers[i]
		if p.Interface == "" || p.Problem != "" {
			continue
		}
		l, known := links[p.Interface]
		var f found
		if p.Addr.IsValid() {
			f.addr = p.Addr.WithZone("")
		} else {
			p.Found = true
			f, p.Waiting = l.neighbour(p.Interface, last[p.Interface])
			next[p.Interface] = f
		}
		switch {
		case !known:
			p.Waiting = fmt.Sprintf("there is no device %s on this host", p.Interface)
		case !l.Up:
			p.Waiting = fmt.Sprintf("device %s is down or without carrier", p.Interface)
		case !l.Addr.IsValid():
			p.Waiting = fmt.Sprintf("device %s has no IPv6 link-local address; net.ipv6.conf.%s.disable_ipv6 and addr_gen_mode decide that", p.Interface, p.Interface)
		}
		if f.addr.IsValid() {
			p.Addr = f.addr.WithZone(p.Interface)
		}
		if p.Waiting != "" {
			continue
		}
		p.Source = l.Addr.WithZone(p.Interface)
		if q, ok := taken[f.addr]; ok {
			if p.Problem = p.notBeside(q, f.addr); p.Problem != "" {
				continue
			}
		}
		taken[f.addr] = *p
	}
	cfg.Peers = peers
	return cfg, next
}

// notBeside says why there cannot be a session with a neighbour that has the
// address of another link's; empty: there can. Passwords are the kernel's by the
// address without the device, where they would go with one of the two.
func (p Peer) notBeside(q Peer, addr netip.Addr) string {
	if p.Secret == (SecretRef{}) && q.Secret == (SecretRef{}) && p.AO.N+q.AO.N == 0 {
		return ""
	}
	return fmt.Sprintf("neighbour %s of device %s has the address of the one of BGPPeer %s, and one has a spec.password or keys for TCP-AO: give the two neighbours different addresses, or remove the passwords and keys", addr, p.Interface, q.Name)
}

// neighbour chooses the neighbour to speak with: the one that advertises itself
// as a router, or where none ever did the only one there is.
func (l Link) neighbour(device string, last found) (f found, waiting string) {
	if one := only(l.Routers, last.addr); one.IsValid() {
		return found{one, true}, ""
	}
	if len(l.Routers) == 0 && !last.router {
		if one := only(l.Hosts, last.addr); one.IsValid() {
			return found{one, false}, ""
		}
	}
	candidates := l.Routers
	if len(candidates) == 0 {
		candidates = l.Hosts
	}
	switch {
	case len(candidates) == 0 && last.addr.IsValid(), len(l.Routers) == 0 && last.router:
		return last, ""
	case len(candidates) == 0:
		return found{}, fmt.Sprintf("no neighbour has been heard on %s yet: does the other side send router advertisements, or have this node as its neighbour there?", device)
	}
	var names []string
	for _, a := range candidates {
		names = append(names, a.String())
	}
	return found{}, fmt.Sprintf("device %s has %d neighbours, %s: give the right one in spec.peerIP", device, len(names), strings.Join(names, " and "))
}

// only returns the single address of a list, or the one of several that was
// chosen before.
func only(list []netip.Addr, last netip.Addr) netip.Addr {
	switch {
	case len(list) == 1:
		return list[0]
	case slices.Contains(list, last):
		return last
	}
	return netip.Addr{}
}

// carries lists what a session with the peer carries: the routes of its own
// transport's family, and where RFC 8950 is to be used those of IPv4 over IPv6.
func (p Peer) carries() []wire.Family {
	switch {
	case p.Interface != "", p.ExtendedNextHop && p.Addr.Is6():
		return []wire.Family{wire.IPv6, wire.IPv4}
	case p.Addr.IsValid():
		return []wire.Family{familyOf(p.Addr)}
	}
	return nil
}

// carriesOf reports whether the session carries routes of a prefix's family.
func (p Peer) carriesOf(prefix netip.Prefix) bool {
	return slices.Contains(p.carries(), familyOf(prefix.Addr()))
}

// onLink returns the next hop that a peer named beside a prefix (RFC 4760
// section 3, RFC 2545 section 3), if that is to be used over a session between
// link-local addresses: with the device on which alone it means something. There
// the next hop is the peer, but for what an iBGP peer passes on from elsewhere.
// The first of two addresses may be empty (BIRD) or a global one that this host has
// no route to.
func onLink(hop, peer netip.Addr, ibgp bool) netip.Addr {
	switch {
	case engine.Remote(peer).Zone() == "" || !hop.IsValid():
		return hop
	case ibgp && hop.Is6() && hop.IsLinkLocalUnicast():
		return hop.WithZone(peer.Zone())
	case ibgp && !hop.IsUnspecified():
		return hop
	}
	return peer
}

// linkProblem says what is wrong with the settings of a session over link-local
// addresses or with IPv4 over IPv6.
func (p Peer) linkProblem(s peerSpec) string {
	switch {
	case s.linkNote != "":
		return s.linkNote
	case p.Interface != "" && p.Reflect:
		return fmt.Sprintf("annotation %s: this node is a route reflector, and what it would pass on from an iBGP session over link-local addresses has next hops that mean something on one link only; give spec.peerIP instead", store.AnnotationPeerInterface)
	}
	return ""
}
